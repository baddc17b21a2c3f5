"""Where the remainder of a root comes from: the sources that `taylor` keeps apart.

The e of a root is linear in the remainders of earlier roots and of the sites between them: e_t = Σ_o Σ_r J_o[t, r]
x_o[r], each x_o[r] in an ellipsoid of its own. A chain needs only the shape of e, token by token. But several tokens
share one x. If only the shapes of e went on, every mixing would add up shares of the same x as if they were
different, and e would grow by a factor from layer to layer, where it grows by a summand. So x_o and J_o are kept, and
linear maps act on J_o.
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


class RemainderSource(NamedTuple):
    """The remainders of the tokens of some root, and the Jacobian of a later root by them (None at that root)."""

    shape: Float[Tensor, "R m m"]
    J: Float[Tensor, "S R d m"] | None = None


class PropagatedSource(NamedTuple):
    """A remainder source with its Jacobian at a later root."""

    shape: Float[Tensor, "R m m"]
    J: Float[Tensor, "T R d m"]


def propagate(
    origins: Sequence[RemainderSource], A: Float[Tensor, "T S d n"], error: Float[Tensor, "T S"]
) -> tuple[list[PropagatedSource], Float[Tensor, " T"]]:
    """Take all sources one root further.

    Args:
        origins: the sources at the root before.
        A: the Jacobian of the new root by the root before, shape [T, S, d, n].
        error: the rounding of each of its blocks, shape [T, S].

    Returns:
        The sources at the new root, and what rounding adds per token.
    """
    _, S, _, n = A.shape
    slip = error + product_error(S * n, frobenius(A))
    found, noise = [], A.new_zeros(len(A))
    for shape, before in origins:
        size = trace(shape).sqrt()
        if before is None:
            J, lost = A, error @ size
        else:
            J = _through(A, before)
            lost = slip @ (frobenius(before) @ size)
        found.append(PropagatedSource(shape, J))
        noise = noise + lost
    return found, grow(noise)


def touched(J: Float[Tensor, "T R d m"]) -> Bool[Tensor, "T R"]:
    """Return which tokens a Jacobian lets depend on which: a mask leaves blocks of exact zeros."""
    return (J != 0).any(3).any(2)


def _through(A: Float[Tensor, "T S d n"], before: Float[Tensor, "S R n m"]) -> Float[Tensor, "T R d m"]:
    """Return Σ_s A[t, s] before[s, r], some tokens t and r at a time, over the s that are zero for none of them.

    Behind a causal mask that is a sixth of the blocks: r ≤ s ≤ t.
    """
    (T, _, d, _), (_, R, _, m) = A.shape, before.shape
    reads, depends = touched(A).cpu(), touched(before).cpu()
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
                right = columns[over, :, by].reshape(-1, len(r) * m)
                J[to, :, by] = (left @ right).reshape(len(t), d, len(r), m)
    return J.movedim(2, 1)


def reached(J: Float[Tensor, "T R d m"], shape: Float[Tensor, "R m m"]) -> Float[Tensor, "T d d"]:
    """Return the shape of Σ_r J[t, r] x[r]; most of it comes from the token itself.

    Args:
        J: the Jacobian, shape [T, R, d, m].
        shape: the shapes of x, [R, m, m].
    """
    live = touched(J)
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
