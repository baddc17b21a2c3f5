"""Bounds that use the constraints: a linear program proposes multipliers, weak duality proves the bound.

For any multipliers y, a polynomial f and constraints h(α) = b satisfy f = f + yᵀ(b − h) on the feasible set, and the
right-hand side is one polynomial, which `polynomial_upper` bounds over the whole factor box. So the bound holds
whatever HiGHS returns (inexact, stopped early, or wrong); only its quality rests on the solver. The proposal treats
every monomial as a variable of its own with its own range. The primal objective is never used.
"""

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.sets.arrays import sum_up
from prooflens.sets.compact import merge_columns
from prooflens.sets.factors import monomial_range
from prooflens.sets.range_bounds import Method, polynomial_upper

Array = npt.NDArray[np.float64]


def constrained_upper(
    f: Float[Tensor, " h"],
    A: Float[Tensor, "q h"],
    b: Float[Tensor, " q"],
    E: Int[Tensor, "p h"],
    *,
    method: Method = "best",
) -> float:
    """Bound the maximum of Σ f_i α^{E_i} over {α ∈ [−1,1]ᵖ | Σ A_i α^{E_i} = b} from above; the bound is proved.

    It is the better of y = 0 and the multipliers of a linear program.

    Args:
        f: coefficients of the objective, shape [h].
        A: coefficients of the constraints, shape [q, h].
        b: right-hand sides, shape [q].
        E: exponents of the monomials that they share, shape [p, h].
        method: how a polynomial is bounded (`polynomial_upper`).

    Example:
        >>> f, A = torch.tensor([1.0, 1.0]).double(), torch.tensor([[1.0, -1.0]]).double()
        >>> bound = constrained_upper(f, A, torch.ones(1).double(), torch.eye(2, dtype=torch.int64))
        >>> round(bound, 9)  # α₁ + α₂ with α₁ − α₂ = 1: at (1, 0)
        1.0
    """
    best = lagrangian_upper(f, A, b, E, torch.zeros_like(b), method=method)
    if len(b) == 0:
        return best
    y = _multipliers(f, A, b, E)
    return best if y is None else min(best, lagrangian_upper(f, A, b, E, y, method=method))


def infeasible(
    A: Float[Tensor, "q h"],
    b: Float[Tensor, " q"],
    E: Int[Tensor, "p h"],
    slack: Float[Tensor, " q"] | None = None,
) -> bool:
    """Say whether {α ∈ [−1,1]ᵖ | |Σ A_i α^{E_i} − b| ≤ slack} is proved empty; False means not proved.

    The proof is a multiplier with yᵀ(b − h) < 0 everywhere, from the elastic problem min ‖s‖₁ with A m + s = b.

    Args:
        A: coefficients of the constraints, shape [q, h].
        b: right-hand sides, shape [q].
        E: exponents, shape [p, h].
        slack: how far each constraint may be missed, shape [q]; None for 0.

    Example:
        >>> infeasible(torch.ones(1, 1).double(), torch.tensor([2.0]).double(), torch.tensor([[1]]))  # α = 2
        True
    """
    if len(b) == 0:
        return False
    y = _elastic_multipliers(A, b, E)
    if y is None:
        return False
    zero = torch.zeros_like(A[0]) if A.shape[1] else torch.zeros(0, dtype=b.dtype)
    spill = 0.0 if slack is None else float(up(sum_up(y.abs() * slack * (1.0 + gamma(4))) + TINY))
    return any(
        up(lagrangian_upper(zero, A, b, E, sign * y, method="best") + spill) < 0.0 for sign in (1.0, -1.0)
    )


def lagrangian_upper(
    f: Float[Tensor, " h"],
    A: Float[Tensor, "q h"],
    b: Float[Tensor, " q"],
    E: Int[Tensor, "p h"],
    y: Float[Tensor, " q"],
    *,
    method: Method = "best",
) -> float:
    """Bound max f + yᵀ(b − h) over the factor box from above; the bound is valid for every y.

    It covers the rounding of f − Aᵀy (γ_{q+2} of the sizes, times |α^E| ≤ 1), of yᵀb, and of the bound itself.

    Args:
        f: coefficients of the objective, shape [h].
        A: coefficients of the constraints, shape [q, h].
        b: right-hand sides, shape [q].
        E: exponents of the monomials that they share, shape [p, h].
        y: multipliers, shape [q].
        method: how a polynomial is bounded (`polynomial_upper`).
    """
    q = len(b)
    L = f - y @ A
    size = torch.cat([f.abs(), y.abs() @ A.abs(), (y * b).abs()])
    error = up(gamma(4 * q + 8) * sum_up(size) + TINY)
    merged, powers = merge_columns(L[None, :], E)
    # Merging equal monomials rounds once more, at most γ_h of the same sizes.
    error = up(error + up(gamma(2 * E.shape[1] + 4) * sum_up(L.abs()) + TINY))
    return float(up(polynomial_upper((y @ b)[None], merged, powers, method=method)[0] + error))


def _multipliers(f: Tensor, A: Tensor, b: Tensor, E: Tensor) -> Tensor | None:
    """Return multipliers of max f·m with A m = b, where every monomial m_i has its own range."""
    y = _dual(-f.numpy(), A.numpy(), b.numpy(), _ranges(E))
    return None if y is None else -y


def _elastic_multipliers(A: Tensor, b: Tensor, E: Tensor) -> Tensor | None:
    """Return multipliers of min ‖s‖₁ with A m + s = b."""
    q, h = A.shape
    cost = np.concatenate([np.zeros(h), np.ones(2 * q)])
    lhs = np.concatenate([A.numpy(), np.eye(q), -np.eye(q)], axis=1)
    return _dual(cost, lhs, b.numpy(), _ranges(E) + [(0.0, float("inf"))] * (2 * q))


def _ranges(E: Tensor) -> list[tuple[float, float]]:
    monomial = monomial_range(E)
    return list(zip(monomial.lower.tolist(), monomial.upper.tolist(), strict=True))


def _dual(cost: Array, lhs: Array, rhs: Array, bounds: list[tuple[float, float]]) -> Tensor | None:
    """Return the dual values of the equality constraints as HiGHS reports them; None if it reports none."""
    # Imported here: scipy.optimize takes as long to load as the rest of the package.
    from scipy.optimize import linprog

    found = linprog(cost, A_eq=lhs, b_eq=rhs, bounds=bounds, method="highs")
    y = found.eqlin.get("marginals")
    if y is None or not bool(np.isfinite(y).all()):
        return None
    return torch.tensor(y, dtype=torch.float64)
