"""Where the e of a root comes from: remainders of earlier roots, kept apart with the Jacobian of this root by them.

The e of token t is linear in what earlier roots missed, e_t = Σ_o Σ_r J_o[t, r] x_o[r], and several tokens share one
x_o[r], which lies in an ellipsoid of its own. A mixing takes e on by a matrix A: Σ_t A[s, t] e_t. With the shapes of
the e_t alone it would add up shares of one x_o[r] as if they were different ones, and e would grow by a factor from
layer to layer. So A is multiplied with J_o, which is exact but for a rounding that is counted, and only sums over
different x pay a triangle inequality.

The J_o are the largest things that a walk holds. In a causal network token r moves none before it, and those blocks are
left out; the others are kept in single precision. Each number is then off by 2⁻²³ of itself at most, or by 2⁻¹²⁶,
however it is rounded, which is noise of the tokens that they move: e is small already, and this is a share of e.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prooflens.checker.depth.room import numbers
from prooflens.checker.depth.shapes import Array, frobenius, gamma, image, total, trace, up

SHARE = 0.25
"""The share of the memory that the Jacobians of a root's origins may take; beyond that the oldest are added up."""


class Column(NamedTuple):
    """The Jacobian of a root by the remainder of one token of an earlier root.

    Attributes:
        tokens: the tokens that it moves [k].
        blocks: their Jacobians [k, d, m], in either precision.
    """

    tokens: NDArray[np.intp]
    blocks: NDArray[np.floating]

    @property
    def wide(self) -> Array:
        """The blocks in double precision."""
        return self.blocks.astype(np.float64)


class Origin(NamedTuple):
    """What the tokens of some root missed there, and the Jacobian of a later root by it.

    Attributes:
        shapes: the ellipsoids of x, token by token of that root [R, m, m].
        J: the Jacobian by each of these tokens; None at the root itself, where it is the identity.
    """

    shapes: Array
    J: Sequence[Column] | None = None

    @property
    def size(self) -> int:
        """As how many float64 numbers the Jacobian is kept."""
        return sum(column.blocks.nbytes for column in self.J or ()) // 8


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
    reads = [np.flatnonzero(A[t].any((0, 2))) for t in range(T)]
    found = Carried([], [], np.zeros(T))
    noise = found.noise
    while origins:
        shapes, before = origins.pop(0)
        columns: list[Column] = []
        for r, most in enumerate(np.sqrt(trace(shapes))):
            if before is None:
                made = column_of(A, r)
            else:
                made = _product(A, reads, before[r])
                # Sums of S·n products, seen by x[r].
                noise = noise + gamma(S * n + 8) * sizes * (_frobenius(before[r]) * most)
            column, lost = narrowed(made)
            noise[made.tokens] += lost * most
            columns.append(column)
        found.origins.append(Origin(shapes, columns))
        found.reached.append(np.stack([_reached(t, columns, shapes, d) for t in range(T)]))
    return Carried(found.origins, found.reached, up(noise))


def column_of(J: Array, r: int) -> Column:
    """The part of a whole Jacobian [T, d, R, m] that belongs to one token r: the blocks that are not 0."""
    live = np.flatnonzero(J[:, :, r].any((1, 2)))
    return Column(live, J[live, :, r])


def narrowed(column: Column) -> tuple[Column, Array]:
    """A column in single precision, unless it is too large for it, and what its blocks lose in the Frobenius norm."""
    size = frobenius(column.wide)
    if not (size < 2.0**127).all():
        return column, np.zeros(len(column.tokens))
    lost = 2.0**-23 * size + 2.0**-126 * float(np.prod(column.blocks.shape[1:])) ** 0.5
    return Column(column.tokens, column.blocks.astype(np.float32)), up(lost)


def _frobenius(column: Column) -> float:
    """At least the Frobenius norm of all blocks."""
    return float(frobenius(column.wide.reshape(1, -1)))


def _product(A: Array, reads: Sequence[NDArray[np.intp]], before: Column) -> Column:
    """A [T, d, S, n] times a column; in a causal network most pairs of tokens are 0 in either.

    Args:
        A: the Jacobian of the new root by the one before.
        reads: by token of the new root, which tokens of the one before A takes it from.
        before: the column at the root before.
    """
    T, d, _, n = A.shape
    wide, live, blocks = before.wide, list[int](), list[Array]()
    for t in range(T):
        some, _, places = np.intersect1d(reads[t], before.tokens, assume_unique=True, return_indices=True)
        if len(some):
            live.append(t)
            blocks.append(A[t][:, some].reshape(d, -1) @ wide[places].reshape(len(some) * n, -1))
    shape = (len(live), d, before.blocks.shape[2])
    return Column(np.array(live, dtype=np.intp), np.array(blocks).reshape(shape))


def _reached(t: int, columns: Sequence[Column], shapes: Array, d: int) -> Array:
    """The shape of Σ_r J[t, r] x[r]."""
    found = [
        image(column.blocks[place].astype(np.float64), shape)
        for column, shape in zip(columns, shapes, strict=True)
        for place in np.flatnonzero(column.tokens == t)
    ]
    return total(found) if found else image(np.zeros((d, shapes.shape[-1])), shapes[0])


def kept_apart(carried: Carried, own: Array) -> list[Origin]:
    """The origins of a root with what it missed itself; the oldest are added up where Jacobians would take too much.

    Args:
        carried: the origins that came from earlier roots.
        own: the shapes of what the root's tokens missed [T, d, d].
    """
    origins, first = list(carried.origins), 0
    sizes, room = [origin.size for origin in origins], numbers(SHARE)
    while sum(sizes[first:]) > room:
        first += 1
    if first:
        # Those that are added up are one more origin of this root.
        origins = [Origin(total(carried.reached[: first + 1])), *origins[first + 1 :]]
    return [*origins, Origin(own)]
