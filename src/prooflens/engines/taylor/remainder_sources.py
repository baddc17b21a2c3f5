"""Where the remainder of a root comes from: the sources that `taylor` keeps apart.

The e of a root is linear in the remainders of earlier roots and of the sites between them: e_t = Σ_o Σ_r J_o[t, r]
x_o[r], each x_o[r] in an ellipsoid of its own. A chain needs only the shape of e, token by token. But several tokens
share one x. If only the shapes of e went on, every mixing would add up shares of the same x as if they were
different, and e would grow by a factor from layer to layer, where it grows by a summand. So x_o and J_o are kept, and
linear maps act on J_o.

The J_o are the largest things that a deep walk holds, and are kept in single precision. What a number is off by there,
2⁻²³ of itself at most, is a remainder of the root at which it is kept (`narrowing`): a share of e, which is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import image, total, total_along, trace
from prooflens.engines.relaxations.norms import frobenius, grow, product_error

WIDE = 2048
"""Rows and columns of a product of Jacobians that are done at once: a block of it that is zero is left out."""

KEPT = torch.float32
"""The precision in which Jacobians by sources are kept from root to root."""


class PropagatedSource(NamedTuple):
    """The remainders of the tokens of some root, and the Jacobian of a later root by them.

    Attributes:
        shape: the shape of each token's remainder.
        J: the Jacobian, as it is made or as it is kept.
        live: which of its blocks may be other than 0, on the CPU, so that a GPU need not be asked.
    """

    shape: Float[Tensor, "R m m"]
    J: Float[Tensor, "T R d m"]
    live: Bool[Tensor, "T R"]


class RemainderSource(NamedTuple):
    """A remainder source at a root: its own, without a Jacobian, or that of an earlier one."""

    shape: Float[Tensor, "R m m"]
    J: Float[Tensor, "S R d m"] | None = None
    live: Bool[Tensor, "S R"] | None = None

    def seen_by(self, keys: slice) -> RemainderSource:
        """Return the source as a range of the root's tokens sees it."""
        if self.J is None or self.live is None:
            return RemainderSource(self.shape[keys])
        return RemainderSource(self.shape, self.J[keys], self.live[keys])


def propagate(
    origins: Sequence[RemainderSource],
    A: Float[Tensor, "T S d n"],
    error: Float[Tensor, "T S"],
    reads: Bool[Tensor, "T S"],
) -> tuple[list[PropagatedSource], Float[Tensor, " T"]]:
    """Take all sources one root further.

    Args:
        origins: the sources at the root before.
        A: the Jacobian of the new root by the root before, shape [T, S, d, n].
        error: the rounding of each of its blocks, shape [T, S].
        reads: which of its blocks may be other than 0, on the CPU; the others are not looked at.

    Returns:
        The sources at the new root, and what rounding adds per token.
    """
    _, S, _, n = A.shape
    slip = error + product_error(S * n, frobenius(A))
    found, noise = [], A.new_zeros(len(A))
    for shape, before, depends in origins:
        size = trace(shape).sqrt()
        if before is None or depends is None:
            J, live, lost = A, reads, error @ size
        else:
            J, live = _through(A, before, reads, depends), reads.float() @ depends.float() > 0.0
            lost = slip @ (torch.stack([frobenius(J.to(A)) for J in before]) @ size)
        found.append(PropagatedSource(shape, J, live))
        noise = noise + lost
    return found, grow(noise)


def _through(
    A: Float[Tensor, "T S d n"],
    before: Float[Tensor, "S R n m"],
    reads: Bool[Tensor, "T S"],
    depends: Bool[Tensor, "S R"],
) -> Float[Tensor, "T R d m"]:
    """Return Σ_s A[t, s] before[s, r], some tokens t and r at a time, over the s that are live for one of each.

    Behind a causal mask that is a sixth of the blocks: r ≤ s ≤ t.
    """
    (T, _, d, _), (_, R, _, m) = A.shape, before.shape
    rows, columns = A.movedim(1, 2), before.movedim(1, 2)
    size = max(1, WIDE // d)
    if bool(reads.all()) and bool(depends.all()):
        size = max(T, R)
    J = A.new_zeros(T, d, R, m)
    for t in torch.arange(T).split(size):
        for r in torch.arange(R).split(size):
            live = (reads[t].any(0) & depends[:, r].any(1)).nonzero()[:, 0].tolist()
            if live:
                to, by, over = (slice(int(span[0]), int(span[-1]) + 1) for span in (t, r, live))
                left = rows[to, :, over].reshape(len(t) * d, -1)
                right = columns[over, :, by].reshape(-1, len(r) * m).to(left)
                J[to, :, by] = (left @ right).reshape(len(t), d, len(r), m)
    return J.movedim(2, 1)


def narrowing(J: Float[Tensor, "T R d m"], shape: Float[Tensor, "R m m"]) -> Float[Tensor, " T"]:
    """Bound what Σ_r J[t, r] x[r] loses where J is kept in single precision.

    However a number is rounded it errs by at most 2⁻²³ of itself, or by 2⁻¹²⁶; of numbers that are too large nothing is
    known.

    Args:
        J: the Jacobian in double precision, shape [T, R, d, m].
        shape: the shapes of x, [R, m, m].
    """
    size = frobenius(J)
    lost = 2.0**-23 * size + 2.0**-126 * (J.shape[2] * J.shape[3]) ** 0.5
    return grow(torch.where(size < 2.0**127, lost, torch.inf) @ trace(shape).sqrt())


def reached(
    J: Float[Tensor, "T R d m"], shape: Float[Tensor, "R m m"], live: Bool[Tensor, "T R"]
) -> Float[Tensor, "T d d"]:
    """Return the shape of Σ_r J[t, r] x[r]; most of it comes from the token itself.

    Args:
        J: the Jacobian, shape [T, R, d, m].
        shape: the shapes of x, [R, m, m].
        live: which blocks of J may be other than 0, on the CPU; the others are not looked at.
    """
    t, r = live.nonzero(as_tuple=True)
    images = J.new_zeros(*live.shape, J.shape[2], J.shape[2])
    images[t, r] = image(J[t, r], shape[r])
    return total_along(images)


def kept_apart(
    origins: Sequence[PropagatedSource],
    shapes: Sequence[Float[Tensor, "T d d"]],
    missed: Float[Tensor, "T d d"],
    room: int,
) -> list[RemainderSource]:
    """Return the sources of a root, with its own remainder; the oldest are added up if there is room for few.

    Args:
        origins: the sources that came from earlier roots.
        shapes: the shape of each of them at this root.
        missed: the shape of this root's own remainder.
        room: how many sources can be kept apart.
    """
    if room == 0:
        return [RemainderSource(total([*shapes, missed]))]
    found = [RemainderSource(*origin) for origin in origins]
    if len(found) > room:
        old = len(found) - room + 1
        found = [RemainderSource(total(shapes[:old])), *found[old:]]
    return [*found, RemainderSource(missed)]
