"""Products of sets with shared factors: exact, by adding exponents (⊙ of the paper's CPZ algebra).

A product of c₁ + Σ g_i α^{E_i} and c₂ + Σ g'_j α^{E'_j} has the (h₁+1)(h₂+1) terms g_i g'_j α^{E_i + E'_j}. Independent
generators are absorbed into fresh factors first (`absorb`), so nothing is bounded and nothing lost; reduce afterwards.
Constraints are kept (Theorem `thm:constraint_preservation`). For bounds of many inner products without their
generators see `prooflens.sets.bilinear`.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import SetError
from prooflens.sets.absorb import absorb
from prooflens.sets.arrays import join, parse, zeros
from prooflens.sets.compact import compact
from prooflens.sets.constrained import ConstrainedPolynomialZonotope, rebuild
from prooflens.sets.constraints import conjunction
from prooflens.sets.factors import merge_ids


def elementwise_product(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """{x(α) ⊙ y(α)}. Exact."""
    if x.dim != y.dim:
        raise SetError(f"the sets lie in dimensions {x.dim} and {y.dim}")
    return _product(x, y, _columnwise)


def scalar_product(
    s: ConstrainedPolynomialZonotope, x: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """{s(α) x(α)} for a one-dimensional s: scalar times vector. Exact."""
    if s.dim != 1:
        raise SetError(f"the first set must be one-dimensional, not of dimension {s.dim}")
    return _product(s, x, _columnwise)


def inner_product(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """{x(α)·y(α)}, one-dimensional: 1ᵀ(x ⊙ y), exact and bilinear."""
    if x.dim != y.dim:
        raise SetError(f"the sets lie in dimensions {x.dim} and {y.dim}")
    return _product(x, y, lambda u, v: (u.T @ v)[None])


def quadratic_map(
    x: ConstrainedPolynomialZonotope, Q: Sequence[Float[Tensor, "n n"]]
) -> ConstrainedPolynomialZonotope:
    """{(xᵀQ₁x, …, xᵀQ_m x)}. Exact (Kochdumper & Althoff 2021); the Q_i need not be symmetric."""
    matrices = [parse(each, "Q") for each in Q]
    if not matrices or any(tuple(each.shape) != (x.dim, x.dim) for each in matrices):
        raise SetError(f"a quadratic map needs at least one matrix, each {x.dim} × {x.dim}")
    # One absorption for both sides: they are the same x, so their independent factors are the same too.
    x = absorb(x)
    return _product(x, x, lambda u, v: join([(u.T @ each @ v)[None] for each in matrices], 0))


def _columnwise(u: Tensor, v: Tensor) -> Tensor:
    return u[:, :, None] * v[:, None, :]


def _product(
    x: ConstrainedPolynomialZonotope,
    y: ConstrainedPolynomialZonotope,
    combine: Callable[[Tensor, Tensor], Tensor],
) -> ConstrainedPolynomialZonotope:
    """combine(u, v): n₁ × k₁ and n₂ × k₂ columns to n × k₁ × k₂, bilinear; the centre is column 0 with exponent 0."""
    same = x is y
    x = absorb(x)
    y = x if same else absorb(y)
    ids, (Ex, Ey), _ = merge_ids(x, y)
    A, b, R = conjunction(x, y)
    columns = combine(join([x.c[:, None], x.G], 1), join([y.c[:, None], y.G], 1))
    nothing = torch.zeros((len(ids), 1), dtype=torch.int64)
    Ex, Ey = torch.cat([nothing, Ex], dim=1), torch.cat([nothing, Ey], dim=1)
    E = (Ex[:, :, None] + Ey[:, None, :]).reshape(len(ids), Ex.shape[1] * Ey.shape[1])
    n = int(columns.shape[0])
    G = columns.reshape(n, E.shape[1])
    return compact(rebuild((x, y), zeros((n,), x.c), G, E, zeros((n, 0), x.c), A, b, R, ids))
