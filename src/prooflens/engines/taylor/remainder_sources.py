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

from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import image, total, total_along, trace
from prooflens.engines.relaxations.norms import frobenius, grow, product_error


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


def reached(J: Float[Tensor, "T R d m"], shape: Float[Tensor, "R m m"]) -> Float[Tensor, "T d d"]:
    """Return the shape of Σ_r J[t, r] x[r]; most of it comes from the token itself.

    Args:
        J: the Jacobian, shape [T, R, d, m].
        shape: the shapes of x, [R, m, m].
    """
    live = (J != 0).flatten(2).any(2).any(0)
    return total_along(image(J, shape) if bool(live.all()) else image(J[:, live], shape[live]))


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
