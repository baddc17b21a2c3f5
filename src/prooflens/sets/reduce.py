"""Order reduction and relaxation: fewer or simpler generators, and a set that contains the original."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prooflens.errors import SetError
from prooflens.numerics import UNIT_ROUNDOFF, gamma, up
from prooflens.sets.arrays import (
    as_float,
    diagonal_matrix,
    halved,
    is_rational,
    join,
    outward,
    sum_up,
    sum_with_error,
    take,
)
from prooflens.sets.compact import compact
from prooflens.sets.constrained import ConstrainedPolynomialZonotope, replaced
from prooflens.sets.factors import even_columns
from prooflens.sets.reduction_order import smallest_columns


def reduce_girard(z: ConstrainedPolynomialZonotope, order: float) -> ConstrainedPolynomialZonotope:
    """Return a set that contains z and has at most order·n generators, dependent and independent together.

    The smallest are boxed. A dropped monomial lies in [−1,1], or in [0,1] if its exponents are even; then half of its
    generator moves into the centre first (Kochdumper & Althoff 2021). Constraints stay: they restrict α, not β.

    Args:
        z: the set.
        order: generators per dimension, at least 1.

    Example:
        >>> z = ConstrainedPolynomialZonotope([0.0], [[4.0, 2.0, 1.0]])
        >>> reduce_girard(z, 1).GI.tolist()  # 4 + 2 + 1
        [[7.0]]
    """
    columns = join([z.G, z.GI], 1)
    dropped, _ = smallest_columns(columns, z.dim, order)
    chosen = torch.zeros(int(columns.shape[1]), dtype=torch.bool)
    chosen[dropped] = True
    return _boxed(z, chosen[: z.dependent], chosen[z.dependent :])


def reduce_keep(z: ConstrainedPolynomialZonotope, k: int) -> ConstrainedPolynomialZonotope:
    """Keep the k largest dependent generators and box the rest into one diagonal block (Prop. `prop:trunc_sound`).

    The result contains z: |∏ α^E| ≤ 1, so coordinate i of the dropped sum is at most Σ|g_i|, and β_i takes exactly
    its share. Ties go by position, so a larger k keeps a superset and, with `interval_enclosure`, never gives a wider
    hull.

    Args:
        z: the set.
        k: how many dependent generators to keep.

    Example:
        >>> small = reduce_keep(ConstrainedPolynomialZonotope([0.0], [[4.0, 2.0, 1.0]]), 1)
        >>> small.G.tolist(), small.GI.tolist()
        ([[4.0]], [[3.0]])
    """
    if k < 0:
        raise SetError(f"cannot keep {k} generators")
    if z.dependent <= k:
        return z
    size = as_float(z.G).square().sum(dim=0)
    ranking = torch.argsort(size, descending=True, stable=True).cpu()
    chosen = torch.ones(z.dependent, dtype=torch.bool)
    chosen[ranking[:k]] = False
    return _boxed(z, chosen, torch.zeros(z.independent, dtype=torch.bool))


def relax_exponents(z: ConstrainedPolynomialZonotope, highest: int = 2) -> ConstrainedPolynomialZonotope:
    """Lower exponents above `highest` to the largest allowed one of equal parity; the result contains z.

    For e > f of equal parity, max_{|t| ≤ 1} |t^e − t^f| = δ = x^{f/(e−f)} − x^{e/(e−f)} at x = f/e. The other factors
    of a monomial are at most 1 in size, so the generator g errs by at most |g| Σ_k δ_k. This goes to GI as the column
    g Σ_k δ_k: one column per relaxed term keeps its direction.

    Args:
        z: the set.
        highest: the largest exponent that may stay, at least 2.

    Example:
        >>> z = relax_exponents(ConstrainedPolynomialZonotope([0.0], [[8.0]], [[4]]))
        >>> z.E.tolist(), z.GI.tolist()  # |t⁴ − t²| ≤ ¼, so 8·¼
        ([[2]], [[2.0]])
    """
    if highest < 2:
        raise SetError("the highest exponent must be at least 2, so that each parity has one to fall to")
    lowered = torch.where(highest < z.E, highest - (highest - z.E) % 2, z.E)
    changed = torch.nonzero((lowered != z.E).any(dim=0)).flatten()
    if len(changed) == 0:
        return z
    gaps = [
        sum(
            (_power_gap(int(e), int(f)) for e, f in zip(z.E[:, i], lowered[:, i], strict=True) if e != f),
            Fraction(0),
        )
        for i in changed.tolist()
    ]
    relaxed = take(z.G, changed) * _row(gaps, z.G)
    if is_rational(relaxed) or all(math.frexp(float(gap))[0] == 0.5 for gap in gaps):
        return compact(replaced(z, E=lowered, GI=join([z.GI, relaxed], 1)))
    # fl(gδ) may leave the direction of g by an ulp per coordinate: a box takes that up. Powers of two are exact.
    box = diagonal_matrix(sum_up(2.0 * UNIT_ROUNDOFF * abs(relaxed), 1))
    return compact(replaced(z, E=lowered, GI=join([z.GI, relaxed, box], 1)))


def _boxed(
    z: ConstrainedPolynomialZonotope, dependent: Tensor, independent: Tensor
) -> ConstrainedPolynomialZonotope:
    """Return z with the chosen columns enclosed in an axis-parallel box, whose zero sides are left out."""
    drop, keep = torch.nonzero(dependent).flatten(), torch.nonzero(~dependent).flatten()
    drop_I, keep_I = torch.nonzero(independent).flatten(), torch.nonzero(~independent).flatten()
    if len(drop) + len(drop_I) == 0:
        return z
    even = torch.nonzero(even_columns(z.E[:, drop])).flatten()
    odd = torch.nonzero(~even_columns(z.E[:, drop])).flatten()
    halves = halved(take(z.G, drop[even]))
    # The rounding of the shifted centre joins the box, so that the result contains z in real numbers.
    c, error = sum_with_error(join([z.c[:, None], halves], 1))
    sizes = [abs(halves), abs(take(z.G, drop[odd])), abs(take(z.GI, drop_I)), error[:, None]]
    radius, inexact = sum_with_error(join(sizes, 1))
    radius = _where_positive(inexact, outward(radius + outward(inexact)), radius)
    block = diagonal_matrix(radius)
    sides = torch.nonzero(as_float(radius) > 0).flatten()
    return replaced(
        z, c=c, G=take(z.G, keep), E=z.E[:, keep], GI=join([take(z.GI, keep_I), take(block, sides)], 1)
    )


def _row(gaps: list[Fraction], like: Tensor) -> Tensor:
    """Return the gaps as a row that multiplies the columns of G, rounded up where they become floats."""
    if is_rational(like):
        row: Any = np.array([gaps], dtype=object)
        return row  # type: ignore[no-any-return]
    rounded = [value if Fraction(value := float(gap)) >= gap else up(value) for gap in gaps]
    return torch.tensor([rounded], dtype=like.dtype, device=like.device)


def _power_gap(e: int, f: int) -> Fraction:
    """Return δ ≥ max_{|t| ≤ 1} |t^e − t^f| for e > f > 0 of equal parity; exactly a quarter if e = 2f.

    With y = f/(e−f), the maximum is x^y (1 − x) at x = f/e, where its derivative in x is 0, so the rounding of x
    enters in second order only. The rounding of y changes x^y by u·y·log(e/f) ≤ u relative, and the power, 1 − x and
    the product add a few ulp. γ_64 covers all of these.
    """
    if e == 2 * f:
        return Fraction(1, 4)
    # t^f − t^e at the maximiser; a rounded maximiser gives less, but the powers are correct to a few ulp and the
    # function is flat there (second-order), so γ of a generous count covers both.
    x = f / e
    value = x ** (f / (e - f)) * (1.0 - x)
    return Fraction(up(value * (1.0 + gamma(64))))


def _where_positive(test: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Return `no` where the test is zero: sums that came out exact need no outward rounding."""
    return no if is_rational(no) else torch.where(test > 0, yes, no)
