"""Constraints on the factors: combine them, add them, intersect sets, and tighten GI by a known box."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import SetError
from prooflens.sets.absorb import absorb
from prooflens.sets.arrays import diagonal_matrix, is_rational, join, parse, sum_up, zeros
from prooflens.sets.constrained import ConstrainedPolynomialZonotope
from prooflens.sets.factors import merge_ids
from prooflens.sets.interval import Interval
from prooflens.sets.range_bounds import polynomial_range


def conjunction(
    *sets: ConstrainedPolynomialZonotope,
) -> tuple[Float[Tensor, "q r"], Float[Tensor, " q"], Int[Tensor, "p r"]]:
    """Collect the constraints of all sets on the merged factors (Theorem `thm:constraint_preservation`).

    A system that an earlier set carries already is taken once.

    Returns:
        A, b and R, as in `ConstrainedPolynomialZonotope`.
    """
    ids, _, exponents = merge_ids(*sets)
    systems: list[tuple[Tensor, Tensor, Tensor]] = []
    for z, R in zip(sets, exponents, strict=True):
        if z.constraints and not any(
            _equal(z.A, A) and _equal(z.b, b) and _equal(R, S) for A, b, S in systems
        ):
            systems.append((z.A, z.b, R))
    return _stacked(systems, sets[0].c, len(ids))


def constrain(
    z: ConstrainedPolynomialZonotope, A: Any, b: Any, R: Any, ids: Sequence[int] | None = None
) -> ConstrainedPolynomialZonotope:
    """Return z with the constraints Σ_j α^{R_j} A_j = b added. Exact.

    A constraint that holds for the true factors may be added at any stage and stays valid afterwards.

    Args:
        z: the set.
        A: coefficients, shape [q, r].
        b: right-hand sides, shape [q].
        R: exponents, shape [p, r].
        ids: the factors of the rows of R; None for those of z.

    Example:
        >>> z = ConstrainedPolynomialZonotope([0.0], [[1.0, 1.0]])  # α₁ + α₂ …
        >>> constrain(z, A=[[1.0, 1.0]], b=[0.5], R=[[1, 0], [0, 1]])  # … with α₁ + α₂ = 0.5
        ConstrainedPolynomialZonotope(dim=1, factors=2, dependent=2, independent=0, constraints=1)
    """
    labels = z.ids if ids is None else tuple(ids)
    nothing = zeros((z.dim,), z.c)
    carrier = ConstrainedPolynomialZonotope(
        nothing,
        zeros((z.dim, 0), z.c),
        torch.zeros((len(labels), 0), dtype=torch.int64),
        A=A,
        b=b,
        R=R,
        ids=labels,
    )
    merged, (E, _), _ = merge_ids(z, carrier)
    lhs, rhs, powers = conjunction(z, carrier)
    return ConstrainedPolynomialZonotope(z.c, z.G, E, z.GI, lhs, rhs, powers, merged, z.box)


def intersect(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """Return x ∩ y, as x with the constraint x(α) = y(α) (Kochdumper & Althoff 2023). Exact.

    Independent generators become dependent first. Sets that share ids meet at equal factors; call `disjoint` before
    for the intersection of the point sets.

    Args:
        x: a set.
        y: a set of the same dimension.

    Example:
        >>> x, y = ConstrainedPolynomialZonotope([0.0], [[1.0]]), ConstrainedPolynomialZonotope([1.0], [[1.0]])
        >>> intersect(x, y)
        ConstrainedPolynomialZonotope(dim=1, factors=2, dependent=1, independent=0, constraints=1)
    """
    if x.dim != y.dim:
        raise SetError(f"the sets lie in dimensions {x.dim} and {y.dim}")
    x, y = absorb(x), absorb(y)
    ids, (Ex, Ey), _ = merge_ids(x, y)
    A, b, R = conjunction(x, y)
    # The centres enter as constant monomials, so that their difference is not rounded.
    constant = torch.zeros((len(ids), 2), dtype=torch.int64)
    meeting = (join([x.c[:, None], -y.c[:, None], x.G, -y.G], 1), x.c * 0, join([constant, Ex, Ey], 1))
    A, b, R = _stacked([(A, b, R), meeting], x.c, len(ids))
    box = x.box if y.box is None else y.box if x.box is None else x.box.intersect(y.box)
    return ConstrainedPolynomialZonotope(x.c, x.G, Ex, x.GI, A, b, R, ids, box)


def tighten_independent(z: ConstrainedPolynomialZonotope, box: Interval) -> ConstrainedPolynomialZonotope:
    """Return a set that contains z ∩ box, with smaller independent generators and the box kept as side information.

    Write a point as dep(α) + g with |g_k| ≤ Σ_j |GI_kj|. If the point lies in [ℓ, u], then g = p − dep lies in [ℓ −
    u_dep, u − ℓ_dep], so |g_k| ≤ min(Σ|GI_k|, max(u − ℓ_dep, u_dep − ℓ)). The paper's Eq. `tighten_gi` (Prop.
    `prop:tighten`) takes max(ℓ_dep − ℓ, u − u_dep, 0), which cuts points when factors are shared (soundness.md, row
    11): dep = α, GI = 2, box [−1,1] loses the point 1 at α = −1.

    Args:
        z: the set.
        box: a box that is known to contain the points that matter.

    Raises:
        SetError: if the box and the set's own box do not meet.

    Example:
        >>> z = ConstrainedPolynomialZonotope([0.0], [[1.0]], GI=[[5.0]])
        >>> tight = tighten_independent(z, Interval([-1.0], [1.0]))  # |g| ≤ 1 − (−1)
        >>> round(tight.GI.item(), 9)
        2.0
    """
    dependent = polynomial_range(z.c, z.G, z.E)
    seen = box if z.box is None else z.box.intersect(box)
    if seen is None:
        raise SetError("the boxes do not meet: the tightened set would be empty")
    reach = seen - dependent
    radius = sum_up(abs(z.GI), 1)
    allowed = reach.magnitude
    smaller = allowed < radius
    tightened = (
        np.where(smaller, allowed, radius) if is_rational(radius) else torch.where(smaller, allowed, radius)
    )
    return ConstrainedPolynomialZonotope(
        z.c, z.G, z.E, diagonal_matrix(parse(tightened, "GI")), z.A, z.b, z.R, z.ids, seen
    )


def _stacked(
    systems: list[tuple[Tensor, Tensor, Tensor]], like: Tensor, p: int
) -> tuple[Tensor, Tensor, Tensor]:
    systems = [(A, b, R) for A, b, R in systems if len(b)]
    rows, columns = sum(len(b) for _, b, _ in systems), sum(int(R.shape[1]) for _, _, R in systems)
    lhs, rhs = zeros((rows, columns), like), zeros((rows,), like)
    powers = torch.zeros((p, columns), dtype=torch.int64)
    row = column = 0
    for A, b, R in systems:
        here, there = slice(row, row + len(b)), slice(column, column + int(R.shape[1]))
        lhs[here, there], rhs[here], powers[:, there] = A, b, R
        row, column = here.stop, there.stop
    return lhs, rhs, powers


def _equal(x: Tensor, y: Tensor) -> bool:
    return tuple(x.shape) == tuple(y.shape) and bool((x == y).all())
