"""Linear operations: affine map, sums, difference, Cartesian product, stack. All are exact up to rounding to nearest.

Constraints restrict only α, which none of these operations touches, so every one of them keeps the constraints
(Theorem `thm:constraint_preservation`). Coefficients are rounded to nearest; an enclosure taken afterwards is proved
for the rounded coefficients. With rational arrays the operations are exact without exception.
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
    """Return {Mx + offset | x ∈ z}. Exact: the map is applied to every generator (Kochdumper & Althoff 2021).

    Args:
        z: a set in dimension n.
        M: a matrix, shape [m, n].
        offset: a vector, shape [m]; None for 0.

    Example:
        >>> z = ConstrainedPolynomialZonotope([1.0], [[2.0]])
        >>> image = affine_map(z, [[3.0]])
        >>> image.c.tolist(), image.G.tolist()
        ([3.0], [[6.0]])
    """
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
    """Return {x(α) + y(α)}: the sum that respects shared factors (⊞ of the paper, `exactPlus` of CORA). Exact.

    Generators of equal monomials add up, so a set and its negative cancel. Independent generators never cancel: their
    factors belong to one set each.

    Args:
        x: a set.
        y: a set of the same dimension; factors with equal ids are the same variable.

    Example:
        >>> z = ConstrainedPolynomialZonotope([1.0], [[2.0]])
        >>> exact_sum(z, z).G.tolist()
        [[4.0]]
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
    """Return {x(α) − y(α)}; shared monomials cancel. Exact: `exact_sum` with −y.

    Args:
        x: a set.
        y: a set of the same dimension; factors with equal ids are the same variable.

    Example:
        >>> z = ConstrainedPolynomialZonotope([1.0], [[2.0]])
        >>> exact_difference(z, z)  # the point 0: nothing is left of 2α − 2α
        ConstrainedPolynomialZonotope(dim=1, factors=1, dependent=0, independent=0, constraints=0)
    """
    return exact_sum(x, replaced(y, c=-y.c, G=-y.G, GI=-y.GI, box=None if y.box is None else -y.box))


def minkowski_sum(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """Return {s + t | s ∈ x, t ∈ y} for every pair: factors of y that x has, too, get fresh ids first. Exact.

    Args:
        x: a set.
        y: a set of the same dimension.

    Example:
        >>> z = ConstrainedPolynomialZonotope([1.0], [[2.0]])
        >>> minkowski_sum(z, z).G.tolist()
        [[2.0, 2.0]]
    """
    return exact_sum(x, disjoint(x, y))


def stack(*sets: ConstrainedPolynomialZonotope) -> ConstrainedPolynomialZonotope:
    """Return {(x₁(α), …, x_k(α))}: coordinates one after another, factors shared by id. Exact.

    Args:
        sets: at least one set, each an argument of its own.

    Example:
        >>> z = ConstrainedPolynomialZonotope([1.0], [[2.0]])
        >>> stack(z, z).G.tolist()
        [[2.0], [2.0]]
    """
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
    """Return {(s, t) | s ∈ x, t ∈ y}: the stack of sets that share no factor. Exact.

    Args:
        x: a set.
        y: a set; its factors that x has, too, get fresh ids.

    Example:
        >>> z = ConstrainedPolynomialZonotope([1.0], [[2.0]])
        >>> cartesian_product(z, z).G.tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    return stack(x, disjoint(x, y))


def disjoint(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """Return y with fresh ids for the factors that x has, too: the same set, no longer tied to x."""
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
