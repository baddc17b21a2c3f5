"""A proof of the accuracy of a two-layer model on the induction task, by cells of inputs.

An input is t_0 … t_{n−2}, all different, and then a = t_i again; the answer b = t_{i+1} must beat every rival c. With
streams x_p behind the first layer, the second gives position p the score q(x_{n−1})·k(x_p), and

    margin = (u_b − u_c)·x_{n−1} + Σ_p r_p g·x_p + biases,     r = softmax of the scores, g = (u_b − u_c) O V.

A cell fixes i, a, b, c, where c stands (or that it does not occur) and perhaps more tokens; the others are free.

- **Scores.** x_{n−1} is a mixture of what single tokens write (`mixtures`), so q is a mixture of vectors q_j(t_j), and
  the score of i + 1 less that of p is a mixture over j of φ·x_{i+1} − φ·x_p with φ = Kᵀq_j(t_j): forms of streams,
  mixtures themselves. Both are bounded by the tokens at their position and before it, for each (a, j, t_j) once.
- **Margins.** With ρ_p = r_p / r_{i+1} ≤ e^{−difference of scores} the sum is a mixture of g·x_p with weights 1 and up
  to ρ_p. A rival is written by the position where it stands, and that is known.

Where the least margin of a cell is not positive one more token is fixed; where none is left the input itself is run in
float64, with its rounding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import expm1
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.engines.attention_only.enumeration import Accuracy
from prooflens.engines.attention_only.mixtures import FirstLayer, Sizes
from prooflens.engines.attention_only.tables import Chain
from prooflens.models import Transformer
from prooflens.models.tasks import TokenTask
from prooflens.numerics import gamma
from prooflens.numerics.rounding import UNIT_ROUNDOFF

TILE = 2**11
"""Cells that are bounded together."""

STEPS = 6
"""Steps towards the least mixture of the second layer; every one gives a proof."""


def bound_induction(model: Transformer, task: TokenTask) -> Accuracy:
    """Prove on how many inputs, at least and at most, a two-layer model names the token that followed.

    What is proved: over the real numbers, from the float64 embeddings on, the logit of the answer is above all others
    on at least `right` and at most `most` inputs.

    Args:
        model: an attention-only model of two layers with one head each, as `check_model` accepts it.
        task: a task that asks for the token that followed.
    """
    started = time.perf_counter()
    with torch.no_grad():
        tables, cells = _Tables.of(model, task.length), 0
        doubtful, wrong = [torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)]
        stack = list(_first_cells(task))
        while stack:
            cell = stack.pop()
            cells += len(cell)
            proved = [tables.margins(part) > 0.0 for part in cell.split()]
            left = cell.select((~torch.cat(proved)).nonzero()[:, 0]) if proved else cell
            if cell.free:
                stack += [left.cut(task.vocabulary)] if len(left) else []
                continue
            for part in left.split():
                middle, off = tables.run(part)
                numbers = part.numbers(task.vocabulary)
                doubtful.append(numbers[~(middle > off)])
                wrong.append(numbers[middle < -off])
    least, most = (task.inputs - len(torch.cat(some).unique()) for some in (doubtful, wrong))
    seconds = time.perf_counter() - started
    return Accuracy(task.name, "proved", least, most, task.inputs, None, cells, seconds)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Cells with the same free positions.

    Attributes:
        i: where the last token stood before.
        free: the free positions.
        tokens: the tokens of all but the last position; V at free ones.
        rival: c.
    """

    i: int
    free: tuple[int, ...]
    tokens: Int[Tensor, "N m"]
    rival: Int[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.rival)

    def select(self, rows: Int[Tensor, " K"]) -> _Cells:
        """Some of them."""
        return replace(self, tokens=self.tokens[rows], rival=self.rival[rows])

    def split(self) -> Iterator[_Cells]:
        """As many at a time as are bounded together."""
        for start in range(0, len(self), TILE):
            yield self.select(torch.arange(start, min(start + TILE, len(self))))

    def cut(self, V: int) -> _Cells:
        """Fix the middle free position: any token that stands nowhere else and is not the rival."""
        token = torch.arange(V).repeat(len(self))
        many = self.select(torch.arange(len(self)).repeat_interleave(V))
        fresh = (many.tokens != token[:, None]).all(-1) & (many.rival != token)
        many, token = many.select(fresh.nonzero()[:, 0]), token[fresh]
        place = self.free[len(self.free) // 2]
        tokens = many.tokens.clone()
        tokens[:, place] = token
        return replace(many, free=tuple(p for p in self.free if p != place), tokens=tokens)

    def numbers(self, V: int) -> Int[Tensor, " N"]:
        """One number per input, the same whatever its rival."""
        number = torch.full_like(self.rival, self.i)
        for token in self.tokens.unbind(-1):
            number = number * V + token
        return number

    def allowed(self, V: int) -> Bool[Tensor, "N V"]:
        """Tokens that may stand at free positions."""
        may = torch.ones(len(self), V + 1, dtype=torch.bool)
        may.scatter_(1, self.tokens, value=False).scatter_(1, self.rival[:, None], value=False)
        return may[:, :V]


def _first_cells(task: TokenTask) -> Iterator[_Cells]:
    """Every input and rival once: by i, a, b, c, and where c stands."""
    V, n = task.vocabulary, task.length
    token = torch.arange(V)
    for i in range(n - 2):
        others = [p for p in range(n - 1) if p not in (i, i + 1)]
        for place in (None, *others):
            a, b, c = torch.cartesian_prod(token, token, token).T
            fits = (a != b) & (c != b) & ((c != a) | (place is None))  # a stands at i
            a, b, c = a[fits], b[fits], c[fits]
            tokens = torch.full((len(a), n - 1), V)
            tokens[:, i], tokens[:, i + 1] = a, b
            if place is not None:
                tokens[:, place] = c
            yield _Cells(i, tuple(p for p in others if p != place), tokens, c)


@dataclass(frozen=True, eq=False)
class _Tables:
    """Bounds of forms by single tokens; V stands for a free one in the places of v and u.

    Attributes:
        first: the first layer.
        forms: φ[a, j, t].
        right: the least φ[a, j, t]·x_{i+1} where b stands there and a before it: [a, i, b, j, t].
        others: the least −φ[a, j, t]·x_p where v stands there and u before it: [a, p, v, u, j, t]; free ones are not a.
        gains: g[b, c].
        writes: the least g[b, c]·x_p: [b, c, p, v, u]; free ones are neither b nor c.
        direct: (u_b − u_c)·W_j(t): [b, c, j, t].
        constant: (u_b − u_c)·X_{n−1}(a) and biases: [a, b, c].
        scored: how large φ·X and φ·W are.
        gained: the same of g.
        read: the same of u_b − u_c, and of the biases.
    """

    first: FirstLayer
    forms: Float[Tensor, "V n V d"]
    right: Float[Tensor, "V i V n V"]
    others: Float[Tensor, "V n W W n V"]
    gains: Float[Tensor, "V V d"]
    writes: Float[Tensor, "V V n W W"]
    direct: Float[Tensor, "V V n V"]
    constant: Float[Tensor, "V V V"]
    scored: Sizes
    gained: Sizes
    read: Sizes

    @classmethod
    def of(cls, model: Transformer, n: int) -> _Tables:
        """Make all tables."""
        first = FirstLayer.of(model, n)
        unembedding, head_bias = model.head
        scale = model.architecture.scale(1)

        def chain(absolute: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            made = Chain(model.weights, absolute)
            X, W = (first.X_size, first.W_size) if absolute else (first.X, first.W)
            q = made.project("blocks.1.q", X[-1][:, None, None] + W)
            u, bias = (made.part(tensor) for tensor in (unembedding, head_bias))
            u, biases = made.less(u[:, None], u), made.less(bias[:, None], bias)
            out = u @ made.weight("blocks.1.o.weight")
            constant = made.add_bias(torch.zeros_like(first.X[0, 0]), "blocks.1.v")
            biases = biases + out @ constant + u @ made.add_bias(torch.zeros_like(constant), "blocks.1.o")
            return (
                scale * (q @ made.weight("blocks.1.k.weight")),
                out @ made.weight("blocks.1.v.weight"),
                u,
                biases,
            )

        forms, gains, rows, biases = chain(False)
        *chains, bias_size = chain(True)
        scored, gained, read = (
            first.sizes(part.flatten(0, -2), size.flatten(0, -2))
            for part, size in zip((forms, gains, rows), chains, strict=True)
        )
        right, others = _score_tables(first, forms, scored)
        bias_off = 2.0 * first.rounded * float(bias_size.max())
        return cls(
            first,
            forms,
            right,
            others,
            gains,
            _write_table(first, gains, gained),
            torch.einsum("bcd,jtd->bcjt", rows, first.W),
            torch.einsum("bcd,ad->abc", rows, first.X[-1]) + biases,
            scored,
            gained,
            Sizes(read.largest + float(biases.abs().max()) + bias_off, read.off + bias_off),
        )

    def _mixtures(self, cell: _Cells) -> _LastMixture:
        """The mixture of the last position."""
        n = len(self.first.e)
        ids = torch.cat((cell.tokens, cell.tokens[:, cell.i : cell.i + 1]), -1)
        known = [p for p in range(n) if p not in cell.free]
        e, at = self.first.e[n - 1, ids[:, -1]], ids[:, known, None]
        return _LastMixture(
            self.first, ids, known, list(cell.free), e[:, known].gather(-1, at)[..., 0], e[:, cell.free], at,
            ~cell.allowed(e.shape[-1])[:, None],
        )  # fmt: skip

    def margins(self, cell: _Cells) -> Float[Tensor, " N"]:
        """Bound the margins of cells from below; NaN where nothing is known."""
        last = self._mixtures(cell)
        i, n, V = cell.i, len(self.first.e), self.first.e.shape[1]
        a, b, c = last.ids[:, i], last.ids[:, i + 1], cell.rival
        before = torch.cat((torch.full_like(a, V)[:, None], last.ids[:, :-1]), -1)
        # Both tables hold bounds of at most 2·largest: they are not off, but their sum rounds.
        outer = Sizes(5.0 * self.scored.largest, gamma(4) * 5.0 * self.scored.largest)
        right = self.right[a, i, b]
        ratios, writes = [], []
        for p in range(n):
            writes.append(self.writes[b, c, p, last.ids[:, p], before[:, p]])
            if p != i + 1:
                differences = right + self.others[a, p, last.ids[:, p], before[:, p]]
                ratios.append((-last.least(differences, outer)).exp() * (1.0 + 16.0 * UNIT_ROUNDOFF))
        own, rest = writes.pop(i + 1), torch.stack(writes, -1)
        ratio = torch.stack(ratios, -1)
        mixed = own
        for _ in range(STEPS):
            weight = ratio.where(rest < mixed[:, None], 0.0)
            mixed = (own + (weight * rest).sum(-1)) / (1.0 + weight.sum(-1))
        missing = own - mixed + (ratio * (rest - mixed[:, None]).clamp(max=0.0)).sum(-1)
        mixed = mixed + missing.clamp(max=0.0)
        direct = last.least(self.direct[b, c], self.read)
        # |own|, |mixed| and |rest| are at most 2·largest; sums of n terms round.
        off = gamma(256 * n) * (self.gained.largest * (1.0 + ratio.sum(-1)) + self.read.largest)
        return direct + mixed + self.constant[a, b, c] - self.read.off - off

    def run(self, cell: _Cells) -> tuple[Float[Tensor, " N"], float]:
        """Return the margins of single inputs over their rivals, and how far they may be off."""
        first, i, n = self.first, cell.i, len(self.first.e)
        ids = self._mixtures(cell).ids
        a, b, c = ids[:, i], ids[:, i + 1], cell.rival
        place = torch.arange(n)
        e = first.e[place[:, None], ids[:, :, None], place, ids[:, None]]  # [N, p, j]
        share = e / e.sum(-1, keepdim=True)
        x = first.X[place, ids] + share @ first.W[place, ids]

        def off(sizes: Sizes) -> float:
            """A mixture of forms of mixtures."""
            return 8.0 * sizes.off + (32.0 * first.doubt + gamma(256 * n)) * sizes.largest

        phi = (share[:, -1:] @ self.forms[a[:, None], place, ids])[:, 0]
        scores = (x @ phi[..., None])[..., 0]
        difference = scores - scores[:, i + 1, None]
        ratio = difference.exp()
        written = (x @ self.gains[b, c][..., None])[..., 0]
        mixed = (ratio * written).sum(-1) / ratio.sum(-1)
        direct = (share[:, -1] * self.direct[b, c][torch.arange(len(ids))[:, None], place, ids]).sum(-1)
        blur = 2.0 * expm1(2.0 * off(self.scored)) + gamma(256 * n)
        error = off(self.read) + off(self.gained) + 4.0 * blur * self.gained.largest
        return direct + mixed + self.constant[a, b, c], error


class _LastMixture(NamedTuple):
    """The first layer's mixture at the last position of cells.

    Attributes:
        first: the first layer.
        ids: the tokens of all positions; V at free ones.
        known: positions whose token is known.
        free: the others.
        known_e: weights of the known ones.
        open_e: weights of all tokens at the free ones.
        at: the known tokens.
        banned: tokens that cannot stand at free positions.
    """

    first: FirstLayer
    ids: Int[Tensor, "N n"]
    known: list[int]
    free: list[int]
    known_e: Float[Tensor, "N k"]
    open_e: Float[Tensor, "N s V"]
    at: Int[Tensor, "N k 1"]
    banned: Bool[Tensor, "N 1 V"]

    def least(self, values: Float[Tensor, "N n V"], sizes: Sizes) -> Float[Tensor, " N"]:
        """Bound the mixture of values of tokens at positions from below."""
        known = (self.known_e * values[:, self.known].gather(-1, self.at)[..., 0]).sum(-1)
        products = (self.open_e * values[:, self.free]).masked_fill(self.banned, torch.inf)
        return self.first.least_mixture(self.known_e.sum(-1), known, self.open_e, products, sizes)


def _score_tables(first: FirstLayer, forms: Float[Tensor, "V n V d"], sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Bound φ·x_{i+1} and −φ·x_p from below; see `_Tables`."""
    n, V = first.e.shape[:2]
    token = torch.arange(V)
    right, others = first.e.new_empty(V, n - 2, V, n, V), first.e.new_empty(V, n, V + 1, V + 1, n, V)
    for a in range(V):
        mine = forms[a].flatten(0, 1)
        for p in range(n):
            if 0 < p < n - 1:
                found = first.by_neighbours(mine, sizes, p, token, token[a : a + 1])
                right[a, p - 1] = found[..., 0].T.unflatten(-1, (n, V))
            at = token if p < n - 1 else token[a : a + 1]
            least = mine.new_full((n * V, V, V), torch.inf)
            least[:, at] = first.by_neighbours(-mine, sizes, p, at, token)
            found = _with_free(least, token[None] == a, p).unflatten(0, (n, V))
            # What the query holds at a free position stands there: v or u is t itself.
            found[p, token, V] = found[p, token, token]
            if p:
                found[p - 1, token, :, V] = found[p - 1, token, :, token]
            others[a, p] = found.permute(2, 3, 0, 1)
    return right, others


def _write_table(
    first: FirstLayer, gains: Float[Tensor, "V V d"], sizes: Sizes
) -> Float[Tensor, "V V n W W"]:
    """Bound g·x_p from below; see `_Tables`."""
    V = len(gains)
    token = torch.arange(V)
    pairs = torch.cartesian_prod(token, token)
    taken = (pairs[..., None] == token).any(1)
    rows = gains.flatten(0, 1)
    found = [
        _with_free(first.by_neighbours(rows, sizes, p, token, token), taken, p).unflatten(0, (V, V))
        for p in range(len(first.e))
    ]
    return torch.stack(found, 2)


def _with_free(least: Float[Tensor, "F V V"], taken: Bool[Tensor, "F V"], p: int) -> Float[Tensor, "F W W"]:
    """Add the least over free tokens v and u, those that are taken left out."""
    open_v = least.masked_fill(taken[:, :, None], torch.inf).amin(1, keepdim=True)
    rows = torch.cat((least, open_v), 1)
    open_u = (rows if p == 0 else rows.masked_fill(taken[:, None], torch.inf)).amin(2, keepdim=True)
    return torch.cat((rows, open_u), 2)
