r"""Where what a root misses comes from: the memory of `taylor`.

The e of a root is linear in what earlier roots and the sites between them missed: e_t = Σ_o Σ_r J_o[t, r] x_o[r], each
x_o[r] in an ellipsoid of its own. Its shape, token by token, is all that a chain needs. But several tokens miss the
same thing: if only these shapes went on, every mixing would add up shares of one x as if they were different ones, and
e would grow by a factor from layer to layer where it grows by a summand. So x_o and J_o are kept, and linear maps act
on J_o.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import image, total, total_along, trace
from prooflens.engines.relaxations.norms import frobenius, grow, product_error


class RemainderSource(NamedTuple):
    """What the tokens of some root missed, and the Jacobian of a later root by it; none at that root itself."""

    shape: Float[Tensor, "R m m"]
    J: Float[Tensor, "S R d m"] | None = None


class PropagatedSource(NamedTuple):
    """The same at a later root."""

    shape: Float[Tensor, "R m m"]
    J: Float[Tensor, "T R d m"]


def propagate(
    origins: Sequence[RemainderSource], A: Float[Tensor, "T S d n"], error: Float[Tensor, "T S"]
) -> tuple[list[PropagatedSource], Float[Tensor, " T"]]:
    """All origins one root later, A its Jacobian by the root before, up to an error; and what rounding adds."""
    T, S, d, n = A.shape
    flat = A.movedim(1, 2).reshape(T * d, S * n)
    slip = error + product_error(S * n, frobenius(A))
    found, noise = [], A.new_zeros(T)
    for shape, before in origins:
        size = trace(shape).sqrt()
        if before is None:
            J, lost = A, error @ size
        else:
            _, R, _, m = before.shape
            J = (flat @ before.movedim(1, 2).reshape(S * n, R * m)).reshape(T, d, R, m).movedim(2, 1)
            lost = slip @ (frobenius(before) @ size)
        found.append(PropagatedSource(shape, J))
        noise = noise + lost
    return found, grow(noise)


def reached(
    J: Float[Tensor, "T R d m"], shape: Float[Tensor, "R m m"], chunks: Sequence[Tensor]
) -> Float[Tensor, "T d d"]:
    """The shape of Σ_r J[t, r] x[r], so many tokens at a time; most of it comes from the token itself."""
    return torch.cat([total_along(image(J[some], shape)) for some in chunks])


def kept_apart(
    origins: Sequence[PropagatedSource],
    shapes: Sequence[Float[Tensor, "T d d"]],
    missed: Float[Tensor, "T d d"],
    room: int,
) -> list[RemainderSource]:
    """The origins of a root with what it misses itself; the oldest are added up where there is room for few."""
    if room == 0:
        return [RemainderSource(total([*shapes, missed]))]
    found = [RemainderSource(*origin) for origin in origins]
    if len(found) > room:
        old = len(found) - room + 1
        found = [RemainderSource(total(shapes[:old])), *found[old:]]
    return [*found, RemainderSource(missed)]
