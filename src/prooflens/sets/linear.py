"""Linear operations: affine map, sums, difference, Cartesian product, stack. All exact up to rounding to nearest.

Constraints restrict only α, which none of these operations touches, so they survive every one of them
(Theorem `thm:constraint_preservation`). Coefficients are rounded to nearest; an enclosure taken afterwards is proved
for the rounded coefficients. Rational arrays make the operations exact without exception.
"""

from jaxtyping import Float
from torch import Tensor

from prooflens.errors import SetError
from prooflens.sets.arrays import join, parse, zeros
from prooflens.sets.compact import compact
from prooflens.sets.constrained import (
    ConstrainedPolynomialZonotope,
    fresh_ids,
    rebuild,
    replaced,
)
from prooflens.sets.constraints import conjunction
from prooflens.sets.factors import merge_ids
from prooflens.sets.interval import Interval


def affine_map(
    z: ConstrainedPolynomialZonotope, M: Float[Tensor, "m n"], offset: Float[Tensor, " m"] | None = None
) -> ConstrainedPolynomialZonotope:
    """{Mx + offset | x ∈ z}. Exact: the map goes through the sum (Kochdumper & Althoff 2021)."""
    M = parse(M, "M")
    if len(M.shape) != 2 or M.shape[1] != z.dim:
        raise SetError(f"a matrix of shape {tuple(M.shape)} does not act on dimension {z.dim}")
    c = M @ z.c
    box = None if z.box is None else z.box.affine_map(M, None if offset is None else parse(offset, "offset"))
    return replaced(
        z, c=c if offset is None else c + parse(offset, "offset"), G=M @ z.G, GI=M @ z.GI, box=box
    )


def exact_sum(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """{x(α) + y(α)}: the sum that respects shared factors (⊞ of the paper, `exactPlus` of CORA). Exact.

    Generators of equal monomials add up, so a set and its negative cancel. Independent generators never cancel: their
    factors belong to one set each.
    """
    _same_dimension(x, y)
    ids, (Ex, Ey), _ = merge_ids(x, y)
    A, b, R = conjunction(x, y)
    box = x.box + y.box if x.box is not None and y.box is not None else None
    return compact(
        rebuild(
            (x, y),
            x.c + y.c,
            join([x.G, y.G], 1),
            join([Ex, Ey], 1),
            join([x.GI, y.GI], 1),
            A,
            b,
            R,
            ids,
            box,
        )
    )


def exact_difference(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """{x(α) − y(α)} with cancellation of shared monomials. Exact: `exact_sum` with −y."""
    return exact_sum(x, replaced(y, c=-y.c, G=-y.G, GI=-y.GI, box=None if y.box is None else -y.box))


def minkowski_sum(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """{s + t | s ∈ x, t ∈ y}: every pair, so factors are not shared; y's get fresh ids where they collide. Exact."""
    return exact_sum(x, disjoint(x, y))


def stack(*sets: ConstrainedPolynomialZonotope) -> ConstrainedPolynomialZonotope:
    """{(x₁(α), …, x_k(α))}: coordinates one after another, factors shared by id. Exact."""
    if not sets or not all(isinstance(z, ConstrainedPolynomialZonotope) for z in sets):
        raise SetError("stack needs at least one set, each an argument of its own: stack(x, y)")
    ids, exponents, _ = merge_ids(*sets)
    A, b, R = conjunction(*sets)
    boxes = [z.box for z in sets if z.box is not None]
    box = None
    if len(boxes) == len(sets):
        box = Interval(join([each.lower for each in boxes], 0), join([each.upper for each in boxes], 0))
    return compact(
        rebuild(
            sets,
            join([z.c for z in sets], 0),
            _block_diagonal([z.G for z in sets]),
            join(exponents, 1),
            _block_diagonal([z.GI for z in sets]),
            A,
            b,
            R,
            ids,
            box,
        )
    )


def cartesian_product(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """{(s, t) | s ∈ x, t ∈ y}: `stack` of sets that share no factor; y's get fresh ids where they collide. Exact."""
    return stack(x, disjoint(x, y))


def disjoint(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """y with fresh ids where x has the same: the same set, no longer tied to x."""
    taken = set(x.ids)
    return replaced(y, ids=tuple(fresh_ids(1)[0] if label in taken else label for label in y.ids))


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    rows, total = sum(int(block.shape[0]) for block in blocks), sum(int(block.shape[1]) for block in blocks)
    matrix = zeros((rows, total), blocks[0])
    row = column = 0
    for block in blocks:
        matrix[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + int(block.shape[0]), column + int(block.shape[1])
    return matrix


def _same_dimension(x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope) -> None:
    if x.dim != y.dim:
        raise SetError(f"the sets lie in dimensions {x.dim} and {y.dim}")
