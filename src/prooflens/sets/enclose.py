"""Enclosures: the zonotope and the interval around a set, and splitting."""

from fractions import Fraction

import torch

from prooflens.errors import SetError
from prooflens.sets.arrays import (
    as_float,
    diagonal_matrix,
    halved,
    join,
    outward,
    sum_up,
    sum_with_error,
    take,
)
from prooflens.sets.compact import compact
from prooflens.sets.constrained import ConstrainedPolynomialZonotope, fresh_ids, replaced
from prooflens.sets.factors import even_columns, substitute_factor
from prooflens.sets.interval import Interval
from prooflens.sets.range_bounds import Method, polynomial_range
from prooflens.sets.zonotope import Zonotope


def zonotope_enclosure(z: ConstrainedPolynomialZonotope) -> Zonotope:
    """Return a zonotope that contains z (Kochdumper & Althoff 2021); constraints and box are not used.

    A monomial with even exponents lies in [0,1] = ½ + ½[−1,1], so half its generator moves into the centre; the
    others lie in [−1,1]. The rounding of the centre, if there is any, becomes a box.

    Args:
        z: the set.

    Example:
        >>> parabola = ConstrainedPolynomialZonotope([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [[1, 2]])
        >>> around = zonotope_enclosure(parabola)  # (α, ½ + ½β)
        >>> around.c.tolist(), around.G.tolist()
        ([0.0, 0.5], [[1.0, 0.0], [0.0, 0.5]])
    """
    even = even_columns(z.E)
    columns = [halved(z.G[:, i : i + 1]) if even[i] else z.G[:, i : i + 1] for i in range(z.dependent)]
    shifts = [columns[i] for i in torch.nonzero(even).flatten().tolist()]
    centre, error = sum_with_error(join([z.c[:, None], *shifts], 1))
    inexact = torch.nonzero(as_float(error) > 0).flatten()
    return Zonotope(centre, join([*columns, z.GI, take(diagonal_matrix(error), inexact)], 1))


def interval_enclosure(z: ConstrainedPolynomialZonotope, *, method: Method = "shift") -> Interval:
    """Return a box that contains z: `polynomial_range` of the dependent part, Σ|GI|, and the side information `box`.

    Constraints on the factors are not used; `constrained_enclosure` uses them.

    Args:
        z: the set.
        method: how the dependent part is bounded, `"shift"` or `"best"` (`polynomial_range`).

    Raises:
        SetError: if the box shows that z is empty.

    Example:
        >>> parabola = ConstrainedPolynomialZonotope([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [[1, 2]])
        >>> [round(x, 9) + 0.0 for x in interval_enclosure(parabola).lower.tolist()]
        [-1.0, 0.0]
    """
    dependent = polynomial_range(z.c, z.G, z.E, method=method)
    radius = sum_up(abs(z.GI), 1)
    hull = Interval(-outward(-(dependent.lower - radius)), outward(dependent.upper + radius))
    if z.box is None:
        return hull
    common = hull.intersect(z.box)
    if common is None:
        raise SetError("the set is empty: its hull does not meet its box")
    return common


def split(
    z: ConstrainedPolynomialZonotope, factor: int
) -> tuple[ConstrainedPolynomialZonotope, ConstrainedPolynomialZonotope]:
    """Split z into two sets whose union it is: α_k ∈ [−1,0] and α_k ∈ [0,1], each with a fresh factor. Exact.

    α_k = ∓½ + ½α' is expanded by the binomial theorem, in the constraints too. The new factor is another variable
    than α_k, so it has another id; split sets that share factors after `stack`.

    Args:
        z: the set.
        factor: k, the position of the factor in `z.ids`.

    Raises:
        SetError: if there is no such factor.

    Example:
        >>> left, right = split(ConstrainedPolynomialZonotope([0.0], [[1.0]]), 0)  # ∓½ + ½α'
        >>> left.c.tolist(), right.c.tolist(), right.G.tolist()
        ([-0.5], [0.5], [[0.5]])
    """
    if not 0 <= factor < z.factors:
        raise SetError(f"there is no factor {factor}; the set has {z.factors}")
    left, right = (_substituted(z, factor, side) for side in (-1, 1))
    return left, right


def _substituted(z: ConstrainedPolynomialZonotope, k: int, side: int) -> ConstrainedPolynomialZonotope:
    middle = Fraction(side, 2)
    G, E = substitute_factor(z.G, z.E, k, middle, Fraction(1, 2))
    A, R = substitute_factor(z.A, z.R, k, middle, Fraction(1, 2))
    ids = (*z.ids[:k], *fresh_ids(1), *z.ids[k + 1 :])
    return compact(replaced(z, G=G, E=E, A=A, R=R, ids=ids))
