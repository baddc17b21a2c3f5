"""Proved bounds of the range of c + Σ_i g_i ∏_k α_k^{E_ki} over α ∈ [−1,1]ᵖ, row by row; the best of several.

- *shift* (the default): terms of degree three and more one by one (a monomial with even exponents lies in [0,1], the
  others in [−1,1]), the quadratic part through the row-sum shift of `prooflens.sets.quadratic`, never above
  Lemma `lem:quadratic_bound`. O(h), and monotone: a term that is kept never costs more than the same term boxed.
- *best*: also the verified eigenvalue shifts of the quadratic part, and Bernstein coefficients of small polynomials.

All sums carry their γ_n terms, so the bounds are about the real polynomial with the given float64 coefficients.
Rational coefficients are bounded term by term without rounding.
"""

import itertools
import math
from fractions import Fraction
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import SetError
from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.sets.arrays import is_rational, sum_up
from prooflens.sets.factors import even_columns
from prooflens.sets.interval import Interval
from prooflens.sets.quadratic import quadratic_upper, scalar_maximum

Method = Literal["shift", "best"]

_DENSE_FACTORS = 256
"""Up to this many factors the quadratic part is written out as a matrix for the eigenvalue shifts."""

_BERNSTEIN_SIZE = 4096
"""The largest number of Bernstein coefficients that are worth computing."""


def polynomial_range(
    c: Float[Tensor, " n"], G: Float[Tensor, "n h"], E: Int[Tensor, "p h"], *, method: Method = "shift"
) -> Interval:
    """Return a box that contains the polynomial's values over the whole factor box.

    Args:
        c: constants, shape [n].
        G: coefficients, shape [n, h].
        E: exponents, shape [p, h].
        method: `"shift"`, or `"best"` for the tighter and slower bounds as well.

    Example:
        >>> c, G = torch.tensor([1.0]).double(), torch.tensor([[2.0, 3.0]]).double()
        >>> box = polynomial_range(c, G, torch.tensor([[1, 2]]), method="best")  # 1 + 2α + 3α²
        >>> round(box.upper.item(), 6)
        6.0
    """
    if is_rational(G) or is_rational(c):
        return Interval(-_termwise_upper(-c, -G, E), _termwise_upper(c, G, E))
    return Interval(-polynomial_upper(-c, -G, E, method=method), polynomial_upper(c, G, E, method=method))


def polynomial_upper(
    c: Float[Tensor, " n"], G: Float[Tensor, "n h"], E: Int[Tensor, "p h"], *, method: Method = "shift"
) -> Float[Tensor, " n"]:
    """Bound the maximum of each row over the factor box from above.

    Args:
        c: constants, shape [n].
        G: coefficients, shape [n, h].
        E: exponents, shape [p, h].
        method: `"shift"`, or `"best"` for the tighter and slower bounds as well.

    Raises:
        SetError: if there is no such method.
    """
    if method not in get_args(Method):
        raise SetError(f"there is no method {method!r}: choose one of {', '.join(get_args(Method))}")
    degree = E.sum(dim=0)
    small, large = torch.nonzero(degree <= 2).flatten(), torch.nonzero(degree > 2).flatten()
    rest = _termwise_upper(torch.zeros_like(c), G[:, large], E[:, large])
    best = up(_row_sum_upper(c, G[:, small], E[:, small]) + rest)
    if method == "best":
        if 0 < E.shape[0] <= _DENSE_FACTORS and bool((degree == 2).any()):
            constant, a, H, error = _dense_quadratic(c, G[:, small], E[:, small])
            best = torch.minimum(best, up(up(quadratic_upper(constant, a, H) + error) + rest))
        if 0 < math.prod((E.amax(dim=1) + 1).tolist() if E.numel() else [0]) <= _BERNSTEIN_SIZE:
            best = torch.minimum(best, bernstein_upper(c, G, E))
    return best


def bernstein_upper(
    c: Float[Tensor, " n"], G: Float[Tensor, "n h"], E: Int[Tensor, "p h"]
) -> Float[Tensor, " n"]:
    """Return the largest Bernstein coefficient; every value of the polynomial is a convex combination of them.

    On [−1,1] the coefficients of t^e in degree N are β_i = Σ_j (−1)^{e−j} C(i,j) C(N−i,e−j) / C(N,e), averages of
    products of ±1, so |β_i| ≤ 1 and all rounding is below γ_{h+3p+16} (|c| + Σ|g|). Complexity: O(n h ∏_k (N_k + 1)).

    Args:
        c: constants, shape [n].
        G: coefficients, shape [n, h].
        E: exponents, shape [p, h].

    Example:
        >>> c, G = torch.zeros(1).double(), torch.tensor([[1.0, -1.0]]).double()
        >>> round(bernstein_upper(c, G, torch.tensor([[1, 2]])).item(), 9)  # α − α²: coefficients −2, 1, 0
        1.0
    """
    p, h = E.shape
    weights = torch.ones((h, 1), dtype=torch.float64, device=G.device)
    for k in range(p):
        top = int(E[k].max()) if h else 0
        table = torch.tensor(
            [_bernstein_row(top, e) for e in range(top + 1)], dtype=torch.float64, device=G.device
        )
        weights = (weights[:, :, None] * table[E[k]][:, None, :]).reshape(h, -1)
    coefficients = c[:, None] + G @ weights
    size = sum_up(torch.cat([c[:, None], G], dim=1).abs())
    return up(coefficients.amax(dim=1) + up(gamma(h + 3 * p + 16) * size + TINY))


def _bernstein_row(top: int, e: int) -> list[float]:
    total = math.comb(top, e)
    return [
        float(
            Fraction(
                sum((-1) ** (e - j) * math.comb(i, j) * math.comb(top - i, e - j) for j in range(e + 1)),
                total,
            )
        )
        for i in range(top + 1)
    ]


def _termwise_upper(c: Tensor, G: Tensor, E: Tensor) -> Tensor:
    """Return c + Σ max of every term: max(g, 0) for a monomial in [0,1], |g| for one in [−1,1], g for the constant
    1."""
    even = even_columns(E).tolist()
    constant = (E == 0).all(dim=0).tolist()
    if is_rational(G) or is_rational(c):
        total = c
        for i, (is_even, is_constant) in enumerate(zip(even, constant, strict=True)):
            g = G[:, i]
            total = total + (g if is_constant else abs(g) if not is_even else (g + abs(g)) / 2)
        return total
    terms = torch.where(torch.tensor(even, device=G.device, dtype=torch.bool), G.clamp(min=0.0), G.abs())
    terms = torch.where(torch.tensor(constant, device=G.device, dtype=torch.bool), G, terms)
    return up(c + sum_up(terms)) if G.shape[1] else c


def _row_sum_upper(c: Tensor, G: Tensor, E: Tensor) -> Tensor:
    """Return Σ_k max_t(a_k t + ½d_k t²), d_k = 2g_kk + Σ_l |g_kl|, of terms of degree at most two, without a matrix.

    Each coefficient is added up with its own γ, in d upward; the linear part's rounding enters as a sum of errors.
    """
    n, p = G.shape[0], E.shape[0]
    degree = E.sum(dim=0)
    constant, linear, square, mixed = (
        torch.nonzero(chosen).flatten()
        for chosen in (
            degree == 0,
            degree == 1,
            (E == 2).any(dim=0),
            (degree == 2) & ~(E == 2).any(dim=0),
        )
    )
    zero = torch.zeros((n, p), dtype=G.dtype, device=G.device)

    def spread(values: Tensor, columns: Tensor) -> Tensor:
        return values @ (E[:, columns] > 0).to(G.dtype).to(G.device).T if len(columns) else zero

    a = spread(G[:, linear], linear)
    d = spread(2.0 * G[:, square], square) + spread(G[:, mixed].abs(), mixed)
    h = G.shape[1]
    a_error = gamma(2 * h + 4) * spread(G[:, linear].abs(), linear)
    d_error = gamma(2 * h + 4) * (spread(2.0 * G[:, square].abs(), square) + spread(G[:, mixed].abs(), mixed))
    maxima = up(scalar_maximum(a, up(d + up(d_error))) + up(a_error + TINY))
    return up(c + sum_up(torch.cat([maxima, G[:, constant]], dim=1))) if p + len(constant) else c


def _dense_quadratic(c: Tensor, G: Tensor, E: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return c, a, H and e: terms of degree two or less equal c + aᵀα + ½αᵀHα up to e on the factor box.

    Distinct monomials land in distinct places; only repeated ones are added up, with γ_h.
    """
    n, h, p = G.shape[0], G.shape[1], E.shape[0]
    constant, a = c.clone(), torch.zeros((n, p), dtype=G.dtype, device=G.device)
    H = torch.zeros((n, p, p), dtype=G.dtype, device=G.device)
    for i, column in enumerate(E.T):
        where = torch.nonzero(column).flatten().tolist()
        if not where:
            constant = constant + G[:, i]
        elif int(column.sum()) == 1:
            a[:, where[0]] += G[:, i]
        elif len(where) == 1:
            H[:, where[0], where[0]] += 2.0 * G[:, i]
        else:
            for k, other in itertools.permutations(where):
                H[:, k, other] += G[:, i]
    return constant, a, H, up(gamma(h + 4) * sum_up(torch.cat([c[:, None], G], dim=1).abs()) + TINY)
