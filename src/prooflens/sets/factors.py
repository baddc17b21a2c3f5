"""The factors α of sets: align them across sets, evaluate and bound monomials, draw feasible ones."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import SetError
from prooflens.sets.arrays import as_float, is_rational, join, parse, take
from prooflens.sets.constrained import ConstrainedPolynomialZonotope
from prooflens.sets.interval import Interval


def merge_ids(
    *sets: ConstrainedPolynomialZonotope,
) -> tuple[tuple[int, ...], list[Int[Tensor, "p h"]], list[Int[Tensor, "p r"]]]:
    """Return the common id vector in order of first appearance, and every E and R padded to it (`mergeID` of CORA).

    Only rows of zeros are added, so no set changes: a factor with exponent 0 everywhere does not act.

    Args:
        sets: the sets to align.

    Returns:
        The ids, a list of exponents E, and a list of constraint exponents R.
    """
    ids = tuple(dict.fromkeys(label for z in sets for label in z.ids))
    position = {label: k for k, label in enumerate(ids)}
    rows = [torch.tensor([position[label] for label in z.ids], dtype=torch.int64) for z in sets]

    def padded(exponents: Tensor, where: Tensor) -> Tensor:
        full = torch.zeros((len(ids), exponents.shape[1]), dtype=torch.int64)
        full[where] = exponents
        return full

    return (
        ids,
        [padded(z.E, where) for z, where in zip(sets, rows, strict=True)],
        [padded(z.R, where) for z, where in zip(sets, rows, strict=True)],
    )


def monomials(alpha: Float[Tensor, "*points p"], E: Int[Tensor, "p h"]) -> Float[Tensor, "*points h"]:
    """Return ∏_k α_k^{E_ki} for every column i; 0⁰ = 1.

    Args:
        alpha: factors, shape [..., p].
        E: exponents, shape [p, h].

    Example:
        >>> monomials(torch.tensor([0.5, 2.0]), torch.tensor([[1, 2], [1, 0]])).tolist()  # α₁α₂ and α₁²
        [1.0, 0.25]
    """
    if is_rational(alpha):
        powers: Any = np.asarray(alpha)[..., :, None] ** E.numpy().astype(object)
        product: Any = (
            np.prod(powers, axis=-2) if E.shape[0] else np.ones((*alpha.shape[:-1], E.shape[1]), object)
        )
        return product  # type: ignore[no-any-return]
    return (alpha[..., :, None] ** E.to(alpha.device)).prod(dim=-2)


def evaluate(
    z: ConstrainedPolynomialZonotope,
    alpha: Float[Tensor, "*points p"] | Mapping[int, float],
    beta: Float[Tensor, "*points m"] | None = None,
) -> Float[Tensor, "*points n"]:
    """Return the point c + Σ α^E G + GI β of the set at given factors, rounded to nearest.

    Args:
        z: the set.
        alpha: factors in the order of `z.ids`, shape [..., p], or a value for each id.
        beta: independent factors, shape [..., m]; None for 0.

    Raises:
        SetError: if the number of factors does not fit.

    Example:
        >>> parabola = ConstrainedPolynomialZonotope([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [[1, 2]])
        >>> evaluate(parabola, [0.5]).tolist()  # (α, α²)
        [0.5, 0.25]
    """
    if isinstance(alpha, Mapping):
        if missing := sorted(set(z.ids) - set(alpha)):
            raise SetError(f"no value is given for the factors {missing}")
        alpha = parse([alpha[label] for label in z.ids], "alpha")
    alpha = parse(alpha, "alpha")
    if not alpha.shape or alpha.shape[-1] != z.factors:
        raise SetError(f"alpha has shape {tuple(alpha.shape)} for {z.factors} factors")
    point = z.c + monomials(alpha, z.E) @ z.G.T
    if beta is None:
        return point
    beta = parse(beta, "beta")
    if not beta.shape or beta.shape[-1] != z.independent:
        raise SetError(f"beta has shape {tuple(beta.shape)} for {z.independent} independent factors")
    return point + beta @ z.GI.T


def constraint_residual(
    z: ConstrainedPolynomialZonotope, alpha: Float[Tensor, "*points p"]
) -> Float[Tensor, "*points q"]:
    """Return Σ_j α^{R_j} A_j − b, which is zero where the factors are feasible.

    Args:
        z: the set.
        alpha: factors, shape [..., p].
    """
    return monomials(alpha, z.R) @ z.A.T - z.b


def even_columns(E: Int[Tensor, "p h"]) -> Tensor:
    """Return which columns have even exponents only: those monomials lie in [0,1], the others in [−1,1]."""
    return (E % 2 == 0).all(dim=0)


def monomial_range(E: Int[Tensor, "p h"]) -> Interval:
    """Return the exact range of every monomial over [−1,1]ᵖ: {1}, [0,1] or [−1,1].

    Example:
        >>> monomial_range(torch.tensor([[0, 1, 2]])).lower.tolist()
        [1.0, -1.0, 0.0]
    """
    even = even_columns(E).to(torch.float64)
    constant = (E == 0).all(dim=0).to(torch.float64)
    return Interval(even + constant - 1.0, torch.ones_like(even))


def substitute_factor(
    G: Float[Tensor, "n h"], E: Int[Tensor, "p h"], k: int, middle: Fraction, radius: Fraction
) -> tuple[Float[Tensor, "n g"], Int[Tensor, "p g"]]:
    """Substitute α_k = middle + radius·α' in Σ g_i α^{E_i}; equal terms are not merged.

    By the binomial theorem α_k^e = Σ_j C(e,j) middle^{e−j} radius^j α'^j.

    Args:
        G: coefficients, shape [n, h].
        E: exponents, shape [p, h].
        k: which factor.
        middle: the middle of the new range.
        radius: half its width.
    """
    columns, exponents = [G[:, :0]], [E[:, :0]]
    for e in E[k].unique().tolist():
        chosen = torch.nonzero(E[k] == e).flatten()
        for j in range(e + 1):
            weight = math.comb(e, j) * middle ** (e - j) * radius**j
            columns.append(take(G, chosen) * (weight if is_rational(G) else float(weight)))
            power = E[:, chosen].clone()
            power[k] = j
            exponents.append(power)
    return join(columns, 1), join(exponents, 1)


def sample_factors(
    z: ConstrainedPolynomialZonotope, count: int, generator: torch.Generator | None = None
) -> Float[Tensor, "points p"]:
    """Draw up to `count` feasible α: uniform on the box or at corners, then pulled onto the constraints.

    Points that do not reach the constraints are dropped, so fewer (perhaps none) may come back. Samples illustrate;
    they never prove.

    Args:
        z: the set.
        count: how many to draw.
        generator: the source of randomness; None for seed 0.
    """
    generator = generator or torch.Generator().manual_seed(0)
    alpha = torch.rand((count, z.factors), generator=generator, dtype=torch.float64) * 2.0 - 1.0
    corners = torch.rand((count, z.factors), generator=generator, dtype=torch.float64) < 0.3
    return pull_to_constraints(z, torch.where(corners, alpha.sign(), alpha))


def pull_to_constraints(
    z: ConstrainedPolynomialZonotope,
    alpha: Float[Tensor, "points p"],
    *,
    tolerance: float = 1e-10,
    rounds: int = 40,
) -> Float[Tensor, "reached p"]:
    """Move points onto the constraints by Gauss–Newton with clipping, and keep those that get there.

    Args:
        z: the set.
        alpha: factors, shape [points, p].
        tolerance: how far a constraint may be missed, absolutely.
        rounds: how many Gauss–Newton steps to take.
    """
    if z.constraints == 0:
        return alpha
    A, b = as_float(z.A), as_float(z.b)
    for _ in range(rounds if z.factors else 0):
        J = A @ _monomial_jacobian(alpha, z.R)
        residual = monomials(alpha, z.R) @ A.T - b
        step = torch.linalg.pinv(J) @ residual[..., None]
        alpha = (alpha - step[..., 0]).clamp(-1.0, 1.0)
    residual = monomials(alpha, z.R) @ A.T - b
    return alpha[residual.abs().amax(dim=-1) <= tolerance]


def sample(
    z: ConstrainedPolynomialZonotope, count: int, generator: torch.Generator | None = None
) -> Float[Tensor, "points n"]:
    """Draw points of the set from `sample_factors`; independent factors are drawn at random and at corners.

    Args:
        z: the set.
        count: how many to draw; fewer may come back if there are constraints.
        generator: the source of randomness; None for seed 0.
    """
    generator = generator or torch.Generator().manual_seed(0)
    alpha = sample_factors(z, count, generator)
    beta = torch.rand((len(alpha), z.independent), generator=generator, dtype=torch.float64) * 2.0 - 1.0
    beta = torch.where(beta.abs() > 0.5, beta.sign(), beta)
    points = as_float(z.c) + monomials(alpha, z.E) @ as_float(z.G).T + beta @ as_float(z.GI).T
    return points if z.box is None else points[z.box.contains(points)]


def _monomial_jacobian(alpha: Tensor, R: Tensor) -> Tensor:
    """Return ∂(α^{R_j})/∂α_k, shape [points, r, p]."""
    columns: Sequence[Tensor] = [
        R[k] * monomials(alpha, (R - torch.eye(len(R), dtype=torch.int64)[:, k : k + 1]).clamp(min=0))
        for k in range(len(R))
    ]
    return torch.stack(list(columns), dim=-1)
