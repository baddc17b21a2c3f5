"""Find the point of a region that is nearest to a given one, or show that constraints contradict: linear programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import linprog
from scipy.sparse import block_array, csr_array
from torch import Tensor

from prooflens.regions.region import Constraints, Region

TOLERANCE = 1e-10
"""The tolerance of the solver, in units of the largest entry of the program."""
INFEASIBLE = 2
"""The status with which `linprog` says that no point satisfies a program."""


def nearest_factors(region: Region, x: Float[Tensor, "S d"]) -> Float[Tensor, " p"] | None:
    """Return the feasible α whose point is nearest to x in the ∞-norm.

    Args:
        region: the set; its box and constraints are respected up to the solver's tolerance.
        x: a point, shape [S, d].

    Returns:
        The factors [p], or None if the solver finds none.
    """
    G, target = _generators(region), _array(x - region.center).ravel()
    # The solver's tolerances are absolute: in units of the largest entry they are relative.
    unit = max(np.abs(G.data).max(initial=0.0), np.abs(target).max()) or 1.0
    near = np.full((len(target), 1), -1.0)
    rows: list[list[Any]] = [[G / unit, near], [-G / unit, near]]
    limits = [target / unit, -target / unit]
    A_eq: Any = None
    b_eq: Any = None
    if (held := region.constraints) is not None:
        rows.append([_array(held.A_ub), np.zeros((len(held.A_ub), 1))])
        limits.append(_array(held.b_ub))
        A_eq, b_eq = np.pad(_array(held.A_eq), ((0, 0), (0, 1))), _array(held.b_eq)
    program: Any = block_array(rows, format="csr")  # the stubs know dense ones only
    found = linprog(
        np.append(np.zeros(region.n_factors), 1.0),
        A_ub=program,
        b_ub=np.concatenate(limits),
        A_eq=A_eq,
        b_eq=b_eq,
        bounds=[(-1.0, 1.0)] * region.n_factors + [(0.0, None)],
        method="highs",
        options={"primal_feasibility_tolerance": TOLERANCE, "dual_feasibility_tolerance": TOLERANCE},
    )
    if found.status != 0 or found.x is None:
        return None
    return torch.tensor(found.x[:-1], dtype=torch.float64).clamp(-1.0, 1.0).to(region.center)


def contradictory(held: Constraints) -> bool:
    """Say whether a linear program finds that no α of the box satisfies the constraints.

    Args:
        held: the constraints.
    """
    found = linprog(
        np.zeros(held.A_eq.shape[1]),
        A_ub=_array(held.A_ub),
        b_ub=_array(held.b_ub),
        A_eq=_array(held.A_eq),
        b_eq=_array(held.b_eq),
        bounds=(-1.0, 1.0),
        method="highs",
    )
    return bool(found.status == INFEASIBLE)


def _generators(region: Region) -> Any:
    """Return G as a sparse matrix [S·d, p]; a ball has one entry per factor."""
    if region.generators is not None:
        return csr_array(_array(region.generators.flatten(1).T))
    places = region.moving.cpu().numpy(), np.arange(region.n_factors)
    return csr_array((_array(region.scale), places), shape=(region.center.numel(), region.n_factors))


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().double().numpy()
