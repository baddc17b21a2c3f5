"""Where the e of a root comes from: remainders of earlier roots, kept apart with the Jacobian of this root by them.

The e of token t is linear in what earlier roots missed, e_t = Σ_o Σ_r J_o[t, r] x_o[r], and several tokens share one
x_o[r], which lies in an ellipsoid of its own. A mixing takes e on by a matrix A: Σ_t A[s, t] e_t. With the shapes of
the e_t alone it would add up shares of one x_o[r] as if they were different ones, and e would grow by a factor from
layer to layer. So A is multiplied with J_o, which is exact but for a rounding that is counted, and only sums over
different x pay a triangle inequality.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prooflens.checker.depth.room import numbers
from prooflens.checker.depth.shapes import Array, frobenius, gamma, image, total, trace, up

SHARE = 0.25
"""The share of the memory that the Jacobians of a root's origins may take; beyond that the oldest are added up."""


class Origin(NamedTuple):
    """What the tokens of some root missed there, and the Jacobian of a later root by it.

    Attributes:
        shapes: the ellipsoids of x, token by token of that root [R, m, m].
        J: the Jacobian [S, d, R, m]; None at the root itself, where it is the identity.
    """

    shapes: Array
    J: Array | None = None


class Carried(NamedTuple):
    """Origins at a new root, the shape of what each brings to its tokens [T, d, d], and what rounding adds [T]."""

    origins: list[Origin]
    reached: list[Array]
    noise: Array


def carried_on(origins: list[Origin], A: Array) -> Carried:
    """Take origins one root further.

    Args:
        origins: the origins at the root before; each is taken out of the list, so that nothing holds it any longer.
        A: the Jacobian of the new root by that one [T, d, S, n].
    """
    T, d, S, n = A.shape
    sizes = frobenius(A.reshape(T, d, S * n))
    found = Carried([], [], np.zeros(T))
    noise = found.noise
    while origins:
        shapes, before = origins.pop(0)
        J = A
        if before is not None:
            R, m = before.shape[2:]
            J = _product(A, before)
            # Sums of S·n products, seen by each x[r].
            most = frobenius(np.moveaxis(before, 2, 0).reshape(R, S * n, m)) * np.sqrt(trace(shapes))
            noise = noise + gamma(S * n + 8) * sizes * most.sum()
        found.origins.append(Origin(shapes, J))
        found.reached.append(np.stack([_reached(J[t], shapes) for t in range(T)]))
    return Carried(found.origins, found.reached, up(noise))


def _product(A: Array, before: Array) -> Array:
    """A [T, d, S, n] times a Jacobian [S, n, R, m]; in a causal network most pairs of tokens are 0 in either."""
    (T, d, _, n), (R, m) = A.shape, before.shape[2:]
    found = np.zeros((T, d, R, m))
    reads = [np.flatnonzero(A[t].any((0, 2))) for t in range(T)]
    for r in range(R):
        column = before[:, :, r]
        comes = np.asarray(column.any((1, 2)))
        for t in range(T):
            if len(some := reads[t][comes[reads[t]]]):
                found[t, :, r] = A[t][:, some].reshape(d, len(some) * n) @ column[some].reshape(
                    len(some) * n, m
                )
    return found


def _reached(J: Array, shapes: Array) -> Array:
    """The shape of Σ_r J[:, r] x[r]."""
    live = np.flatnonzero(J.any((0, 2)))
    return total([image(J[:, r], shapes[r]) for r in (live if len(live) else [0])])


def kept_apart(carried: Carried, own: Array) -> list[Origin]:
    """The origins of a root with what it missed itself; the oldest are added up where Jacobians would take too much.

    Args:
        carried: the origins that came from earlier roots.
        own: the shapes of what the root's tokens missed [T, d, d].
    """
    origins, first = list(carried.origins), 0
    sizes, room = [origin.J.size for origin in origins if origin.J is not None], numbers(SHARE)
    while sum(sizes[first:]) > room:
        first += 1
    if first:
        # Those that are added up are one more origin of this root.
        origins = [Origin(total(carried.reached[: first + 1])), *origins[first + 1 :]]
    return [*origins, Origin(own)]
