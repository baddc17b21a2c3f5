"""Products of sets with shared factors: exact, by adding exponents (⊙ of the paper's CPZ algebra).

A product of c₁ + Σ g_i α^{E_i} and c₂ + Σ g'_j α^{E'_j} has the (h₁+1)(h₂+1) terms g_i g'_j α^{E_i + E'_j}.
Independent generators are absorbed into fresh factors first (`absorb`), so nothing is bounded and nothing lost;
reduce afterwards. Constraints are kept (Theorem `thm:constraint_preservation`). For bounds of many inner products
without their generators see `prooflens.sets.bilinear`.
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
    """Return {x(α) ⊙ y(α)}. Exact.

    Args:
        x: a set.
        y: a set of the same dimension; factors with equal ids are the same variable.

    Example:
        >>> z = ConstrainedPolynomialZonotope([1.0], [[2.0]])
        >>> square = elementwise_product(z, z)  # (1 + 2α)² = 1 + 4α + 4α²
        >>> square.c.tolist(), square.G.tolist(), square.E.tolist()
        ([1.0], [[4.0, 4.0]], [[1, 2]])
    """
    if x.dim != y.dim:
        raise SetError(f"the sets lie in dimensions {x.dim} and {y.dim}")
    return _product(x, y, _columnwise)


def scalar_product(
    s: ConstrainedPolynomialZonotope, x: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """Return {s(α) x(α)} for a one-dimensional s: scalar times vector. Exact.

    Args:
        s: a set of dimension 1.
        x: a set.
    """
    if s.dim != 1:
        raise SetError(f"the first set must be one-dimensional, not of dimension {s.dim}")
    return _product(s, x, _columnwise)


def inner_product(
    x: ConstrainedPolynomialZonotope, y: ConstrainedPolynomialZonotope
) -> ConstrainedPolynomialZonotope:
    """Return the one-dimensional set {x(α)·y(α)} = 1ᵀ(x ⊙ y). Exact.

    Args:
        x: a set.
        y: a set of the same dimension; factors with equal ids are the same variable.

    Example:
        >>> z = ConstrainedPolynomialZonotope([1.0, 0.0], [[0.0], [2.0]])
        >>> length = inner_product(z, z)  # |(1, 2α)|² = 1 + 4α²
        >>> length.c.tolist(), length.G.tolist(), length.E.tolist()
        ([1.0], [[4.0]], [[2]])
    """
    if x.dim != y.dim:
        raise SetError(f"the sets lie in dimensions {x.dim} and {y.dim}")
    return _product(x, y, lambda u, v: (u.T @ v)[None])


def quadratic_map(
    x: ConstrainedPolynomialZonotope, Q: Sequence[Float[Tensor, "n n"]]
) -> ConstrainedPolynomialZonotope:
    """Return {(xᵀQ₁x, …, xᵀQ_m x)}. Exact (Kochdumper & Althoff 2021).

    Args:
        x: a set of dimension n.
        Q: at least one matrix [n, n]; none need be symmetric.

    Example:
        >>> z = ConstrainedPolynomialZonotope([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]])
        >>> quadratic_map(z, [[[0.0, 3.0], [0.0, 0.0]]]).G.tolist()  # 3α₁α₂
        [[3.0]]
    """
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
    """Multiply two sets by a bilinear map of columns; the centre is column 0 with exponent 0.

    Args:
        x: a set.
        y: a set.
        combine: maps columns [n₁, k₁] and [n₂, k₂] to products [n, k₁, k₂].
    """
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
