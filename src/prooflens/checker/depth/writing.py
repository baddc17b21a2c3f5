"""What blocks write into the stream, y_t = Σ_b F_bt R_b x_t + bias_t, x what attention mixes or the neurons' values.

Without an edit there is one block R = W_O with F the identity. A part that is held at tokens stands in a block of its
own, and a direction that is held acts on every F. What is written may then differ from token to token, and between two
networks that are walked side by side. The sites before it need not: they make rows that all of them share,

| case | rows | y_t |
|---|---|---|
| one block R everywhere | R | F_t R x + bias_t |
| several | the columns in which all agree, and each other coordinate of x by itself | W x + F_t x_C + bias_t |

so the remainder of the site is one and the same for all tokens and for both networks, and cancels in their difference.
In columns in which all agree nothing but one block with F the identity writes, so that nothing is rounded there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prooflens.checker.depth.shapes import Array, frobenius, gamma, length, up
from prooflens.checker.edited import places, spreads

MOST_APART = 512
"""So many coordinates of x stand apart at most; where there are more, networks do not share the site."""


@dataclass(frozen=True, eq=False)
class Maps:
    """A float affine map of every token, y = F_t x + bias_t, and what it is off by.

    Attributes:
        F: the maps [S, d, m], or one for all [1, d, m].
        bias: what is added [S, d] or [1, d].
        error: at least the Frobenius norm of what F is off by, by token.
        bias_error: at least the 2-norm of what the bias is off by, by token.
    """

    F: Array
    bias: Array
    error: Array
    bias_error: Array

    def at(self, tokens: Sequence[int]) -> Maps:
        """The maps of some tokens, in that order."""
        some = list(tokens)
        parts = (x if len(x) == 1 else x[some] for x in (self.F, self.bias, self.error, self.bias_error))
        return Maps(*parts)


@dataclass(frozen=True, eq=False)
class Block:
    """F_t R, and a bound of what F_t is off by.

    Attributes:
        R: rows [m, n], exact.
        F: maps [S, d, m] or [1, d, m].
        error: by token.
    """

    R: Array
    F: Array
    error: Array

    @property
    def is_plain(self) -> bool:
        """Whether F is the identity, exactly."""
        m = self.F.shape[-1]
        same = self.F.shape[1] == m and not self.error.any()
        return same and bool(np.array_equal(self.F, np.broadcast_to(np.eye(m), self.F.shape)))


@dataclass(frozen=True, eq=False)
class Writing:
    """Blocks, what is added to them [S, d] or [1, d], and what that is off by."""

    blocks: tuple[Block, ...]
    bias: Array
    bias_error: Array

    def through(self, T: Maps) -> Writing:
        """A map of what is written."""
        blocks = []
        for block in self.blocks:
            F = T.F @ block.F
            sizes = frobenius(T.F) * frobenius(block.F)
            error = T.error * (frobenius(block.F) + block.error) + frobenius(T.F) * block.error
            blocks.append(Block(block.R, F, up(error + gamma(F.shape[1] + 8) * sizes)))
        bias = (T.F @ self.bias[..., None])[..., 0] + T.bias
        size = frobenius(T.F) * length(self.bias) + length(T.bias)
        error = T.error * (length(self.bias) + self.bias_error) + frobenius(T.F) * self.bias_error
        return Writing(tuple(blocks), bias, up(error + T.bias_error + gamma(bias.shape[-1] + 8) * 2.0 * size))


def directions(weights: Mapping[str, Array], stem: str, n: int) -> Maps:
    """x + P(c − chosen·(Rx + r)) of a table of directions, as a map of every token.

    Args:
        weights: all weights.
        stem: what the table's names start with.
        n: how many tokens there are.
    """
    chosen, put = places(weights, stem, n)
    R, r, P = (weights[f"{stem}.{part}"] for part in ("read", "bias", "write"))
    F = np.eye(len(P)) - (P * chosen[:, None, :]) @ R
    moved = put - chosen * r
    k = len(R)
    size = len(P) ** 0.5 + frobenius(P) * frobenius(R)
    bias_error = gamma(k + 8) * frobenius(P) * (length(put) + length(r))
    return Maps(F, moved @ P.T, np.full(n, up(gamma(k + 8) * size)), up(np.asarray(bias_error)))


def writing(weights: Mapping[str, Array], name: str, n: int) -> Writing:
    """How a block of a network writes: `blocks.3.o` or `blocks.3.down`, and directions that are held behind it.

    Args:
        weights: all weights.
        name: the map.
        n: how many tokens there are.
    """
    W = weights[f"{name}.weight"]
    d, nothing = len(W), np.zeros(1)
    bias, bias_error = weights.get(f"{name}.bias", np.zeros(d))[None], nothing
    blocks = [Block(W, np.eye(d)[None], nothing)]
    stem = f"{name}.held"
    if f"{stem}.at" in weights:
        chosen, put = places(weights, stem, n)
        R, r, P = (weights[f"{stem}.{part}"] for part in ("read", "bias", "write"))
        kept = 1.0 - chosen
        # Products with 0 and 1, and sums of which one side is 0: exact.
        blocks.append(Block(R, P * kept[:, None, :], np.zeros(n)))
        moved = r * kept + put
        size = length(bias) + frobenius(P) * length(moved)
        bias, bias_error = bias + moved @ P.T, up(gamma(len(R) + 8) * size)
    found = Writing(tuple(block for block in blocks if block.R.any()), bias, bias_error)
    layer, _, which = name.rpartition(".")
    held = f"{layer}.{'attn' if which == 'o' else 'mlp'}_out.directions"
    return found.through(directions(weights, held, n)) if f"{held}.at" in weights else found


def valued(weights: Mapping[str, Array], stem: str, n: int) -> Maps | None:
    """What free coordinates add to a value of which parts or directions are held; None where they add nothing.

    Args:
        weights: all weights.
        stem: what the table's names start with.
        n: how many tokens there are.
    """
    table = spreads(weights, stem, n)
    if table is None:
        return None
    P, nothing = weights[f"{stem}.write"], np.zeros(1)
    error = up(gamma(P.shape[1] + 8) * frobenius(P) * frobenius(table))
    return Maps(P @ table, np.zeros((1, len(P))), error, nothing)


def values(weights: Mapping[str, Array], name: str, n: int) -> Maps | None:
    """What free coordinates add to what a block writes, as `writing` says it; None where they add nothing.

    Args:
        weights: all weights.
        name: the map.
        n: how many tokens there are.
    """
    own = valued(weights, f"{name}.held", n)
    layer, _, which = name.rpartition(".")
    held = f"{layer}.{'attn' if which == 'o' else 'mlp'}_out.directions"
    if f"{held}.at" not in weights:
        return own
    more = valued(weights, held, n)
    if own is None:
        return more
    block = Block(np.eye(own.F.shape[-1]), own.F, own.error)
    (through,) = Writing((block,), own.bias, own.bias_error).through(directions(weights, held, n)).blocks
    if more is None:
        return Maps(through.F, own.bias, through.error, own.bias_error)
    F = through.F + more.F
    return Maps(F, own.bias, up(through.error + more.error + gamma(4) * frobenius(F)), own.bias_error)


@dataclass(frozen=True, eq=False)
class Opening:
    """Rows that a site makes for everything that is written from it.

    Attributes:
        common: the map that all share and that needs no more [d, n]; None if there is none.
        rows: what stands apart [k, n].
        columns: the coordinates of x that the rows are; None where they are the one block.
    """

    common: Array | None
    rows: Array
    columns: list[int] | None

    @property
    def is_plain(self) -> bool:
        """Whether nothing stands apart."""
        return not len(self.rows)

    def maps(self, found: Writing) -> Maps:
        """What a network makes of the rows, besides what all share.

        Args:
            found: how it writes; one of those that the opening is of.
        """
        d, k = found.bias.shape[-1], len(self.rows)
        F, error = np.zeros((1, d, k)), np.zeros(1)
        for block in () if self.is_plain else found.blocks:
            if self.columns is None:
                F, error = F + block.F, error + block.error
                continue
            R = block.R[:, self.columns]
            sizes = frobenius(block.F) * frobenius(R)
            slip = np.zeros(1) if block.is_plain else gamma(len(R) + 8) * sizes
            before = F
            F = F + block.F @ R
            error = error + block.error * frobenius(R) + slip
            error = error + (gamma(4) * frobenius(F) if before.any() else 0.0)
        return Maps(F, found.bias, up(error) if error.any() else error, found.bias_error)


def opening(every: Sequence[Writing], d: int, n: int) -> Opening | None:
    """Rows that serve how several networks write; None where too many would stand apart.

    Args:
        every: how each of them writes.
        d: the width of the stream.
        n: the width of x.
    """
    distinct = list[Array]()
    for block in (block for one in every for block in one.blocks):
        if not any(block.R is R or np.array_equal(block.R, R) for R in distinct):
            distinct.append(block.R)
    nothing = np.zeros((0, n))
    plain = all(len(one.blocks) == 1 and one.blocks[0].is_plain for one in every)
    alike = all(np.array_equal(one.bias, every[0].bias) for one in every)
    if plain and alike and len(distinct) == 1 and not every[0].bias_error.any() and len(every[0].bias) == 1:
        return Opening(distinct[0], nothing, None)
    if len(distinct) <= 1 and all(len(one.blocks) <= 1 for one in every):
        return Opening(None, distinct[0] if distinct else np.zeros((1, n)), None)
    common, apart = _agreed(every, d, n)
    columns = np.flatnonzero(apart).tolist()
    if len(columns) > MOST_APART:
        return None
    return Opening(common if common.any() else None, np.eye(n)[columns], columns)


def _agreed(every: Sequence[Writing], d: int, n: int) -> tuple[Array, Array]:
    """The columns in which one block with F the identity is the same in all and nothing else writes, and the others."""
    apart = np.zeros(n, bool)
    bases = []
    for one in every:
        plain = [block for block in one.blocks if block.is_plain and block.R.shape == (d, n)]
        base = plain[0].R if plain else np.zeros((d, n))
        bases.append(base)
        for block in one.blocks:
            if not plain or block is not plain[0]:
                apart |= block.R.any(0)
    for base in bases[1:]:
        apart |= (base != bases[0]).any(0)
    return np.where(apart, 0.0, bases[0]), apart
