"""What a functional does beyond its linear term: proved bounds of f(a⁰ + u) − f(a⁰) − ∇f(a⁰)·u.

Deviations of a row's scores are described by D[j, k] ≥ u_j − u_k (`differences_from_scores` makes D from a box of
deviations). Both atoms see u only up to a common shift, so this is all they need.

`LogSumExp`, p its softmax at a⁰, ũ = u − p·u: the rest is log Σ p_j e^{ũ_j} ≥ 0 (Jensen), and at most
- (max u − min u)²/8 (Hoeffding's lemma), and
- log(1 + Σ p_j ψ(ũ_j)), ψ(x) = e^x − 1 − x, since Σ p_j ũ_j = 0; ũ_j = Σ_k p_k (u_j − u_k) is within D's averages.
  It is small where one key dominates.

`RowEntropy`: along a⁰ + tu the second derivative is −Σ g_j(t) (u_j − ū_t)², g_j = s_j(1 + log s_j + H), ū_t = s(t)·u.
(K(t) = log Σ s⁰e^{tu} gives H' = −Cov_t(log s, u) and H'' = −Var_t(u) − E_t[(log s − E_t log s)(u − ū_t)²].) With a
box of weights valid for all t ∈ [0, 1], ranges of g_j over it and ρ_j ≥ |u_j − ū_t| by a linear program over that
box, the rest ½H''(τ) lies in [−½Σ max(g_j, 0)ρ_j², ½Σ max(−g_j, 0)ρ_j²].
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.numerics.rounding import down, up
from prooflens.queries.entropy import entropy_range
from prooflens.queries.functionals import Functional, LogSumExp, RowEntropy, Scores
from prooflens.queries.outward import exp_down, exp_up, log_down, log_up, scaled_up, sum_up
from prooflens.queries.rows import Row
from prooflens.queries.simplex import maximise
from prooflens.queries.weights import differences_from_scores, from_differences, weight_box

Differences = Mapping[Row, Float[Tensor, "... S S"]]
"""D[j, k] ≥ u_j − u_k for each row."""

Range = tuple[Float[Tensor, "..."], Float[Tensor, "..."]]


def remainder(functional: Functional, scores: Scores, differences: Differences) -> Range:
    """Bound what a functional does beyond its linear term at the clean scores a⁰: f(a⁰ + u) − f(a⁰) − ∇f(a⁰)·u.

    Args:
        functional: f; its `Score` and output terms are linear and add nothing.
        scores: the clean scores a⁰ of the rows that it reads.
        differences: D[j, k] ≥ u_j − u_k for those rows, shape [..., S, S].

    Returns:
        A lower bound ≤ 0 and an upper bound ≥ 0.

    Raises:
        QueryError: if the differences of a row are missing.

    Example:
        >>> row = Row(0, 0, 1)
        >>> mass = Functional(((1.0, LogSumExp(row, (0, 1))),))
        >>> low, high = remainder(mass, {row: torch.zeros(2)}, {row: torch.full((2, 2), 0.2)})
        >>> low.item() <= 0.0, round(high.item(), 6)  # Hoeffding: 0.2²/8
        (True, 0.005)
    """
    low: Tensor | None = None
    high: Tensor | None = None
    for weight, atom in functional.terms:
        if not isinstance(atom, LogSumExp | RowEntropy):
            continue
        if atom.row not in differences:
            raise QueryError(
                f"the remainder of {functional.name!r} needs score differences of row {atom.row}"
            )
        rest = log_sum_exp_rest if isinstance(atom, LogSumExp) else entropy_rest
        below, above = rest(_among(atom.keys, scores[atom.row]), _square(atom.keys, differences[atom.row]))
        first, second = (below, above) if weight >= 0 else (above, below)
        low = down(weight * first, 1) if low is None else down(low + down(weight * first), 1)
        high = up(weight * second, 1) if high is None else up(high + up(weight * second), 1)
    if low is None or high is None:
        zero = torch.zeros((), dtype=torch.float64)
        return zero, zero
    return low, high


def log_sum_exp_rest(a: Float[Tensor, "... K"], D: Float[Tensor, "... K K"]) -> Range:
    """Bound the remainder of log Σ e^a at a by [0, min(Hoeffding, ψ)].

    Args:
        a: clean scores, shape [..., K].
        D: D[j, k] ≥ u_j − u_k for the deviations u, shape [..., K, K].
    """
    D = _with_zero_diagonal(D)
    spread = D.amax((-1, -2)).clamp_min(0.0)
    hoeffding = scaled_up(spread * spread / 8.0, 2)
    p = from_differences(differences_from_scores(a, a))
    largest = maximise(D, p.lower[..., None, :], p.upper[..., None, :])
    smallest = -maximise(D.mT, p.lower[..., None, :], p.upper[..., None, :])
    psi = torch.maximum(_psi_up(largest), _psi_up(smallest))
    # log(1 + x) ≤ x for the sums below 1 where the logarithm would only lose digits.
    total = sum_up(scaled_up(p.upper * psi, 1))
    bound = torch.minimum(torch.minimum(total, log_up(up(1.0 + total))), hoeffding)
    return torch.zeros_like(bound), bound


def entropy_rest(a: Float[Tensor, "... K"], D: Float[Tensor, "... K K"]) -> Range:
    """Bound the remainder of the entropy at a.

    Args:
        a: clean scores, shape [..., K].
        D: D[j, k] ≥ u_j − u_k for the deviations u, shape [..., K, K].
    """
    # The path tu, 0 ≤ t ≤ 1, stays within tD, hence within max(D, 0).
    reach = _with_zero_diagonal(D).clamp_min(0.0)
    base = differences_from_scores(a, a)
    box = weight_box(differences=up(base + reach))
    H_low, H_high = entropy_range(box.lower, box.upper, exact=False)
    u_above = maximise(reach, box.lower[..., None, :], box.upper[..., None, :])
    u_below = maximise(reach.mT, box.lower[..., None, :], box.upper[..., None, :])
    rho = torch.maximum(u_above, u_below).clamp_min(0.0)
    g_low, g_high = _curvature(box.lower, box.upper, H_low[..., None], H_high[..., None])
    square = scaled_up(rho * rho, 1)
    down_part = sum_up(scaled_up(0.5 * g_high.clamp_min(0.0) * square, 1))
    up_part = sum_up(scaled_up(0.5 * (-g_low).clamp_min(0.0) * square, 1))
    return -down_part, up_part


def _curvature(
    low: Float[Tensor, "... K"],
    high: Float[Tensor, "... K"],
    H_low: Float[Tensor, "... 1"],
    H_high: Float[Tensor, "... 1"],
) -> tuple[Float[Tensor, "... K"], Float[Tensor, "... K"]]:
    """Bound g = s(1 + log s + H): convex in s, least at s = e^{−2−H} with −e^{−2−H}, and growing in H."""
    ends_low = torch.minimum(_g(low, H_low)[0], _g(high, H_low)[0])
    ends_high = torch.maximum(_g(low, H_high)[1], _g(high, H_high)[1])
    valley_low, valley_high = exp_down(down(-2.0 - H_low)), exp_up(up(-2.0 - H_low))
    inside = (valley_high >= low) & (valley_low <= high)
    return torch.where(inside, torch.minimum(-valley_high, ends_low), ends_low), ends_high


def _g(s: Float[Tensor, "... K"], H: Float[Tensor, "... 1"]) -> tuple[Tensor, Tensor]:
    factor_low = down(down(1.0 + log_down(s)) + H)
    factor_high = up(up(1.0 + log_up(s)) + H)
    zero = torch.zeros_like(factor_low)
    return torch.where(s > 0, down(s * factor_low), zero), torch.where(s > 0, up(s * factor_high), zero)


def _psi_up(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return at least ψ(x) = e^x − 1 − x.

    For |x| ≤ 1 use x²(1/2 + x/6 + x²/16), because Σ_{n≥4} x^{n−2}/n! ≤ (e − 8/3)x² < x²/16 there.
    """
    series = scaled_up(x * x * (0.5 + x / 6.0 + x * x / 16.0), 10)
    direct = up(up(exp_up(x) - 1.0) - x)
    return torch.where(x.abs() <= 1.0, series, direct)


def _with_zero_diagonal(D: Float[Tensor, "... K K"]) -> Float[Tensor, "... K K"]:
    size = D.shape[-1]
    return D.masked_fill(torch.eye(size, dtype=torch.bool, device=D.device), 0.0)


def _among(keys: tuple[int, ...], scores: Float[Tensor, "... S"]) -> Float[Tensor, "... K"]:
    return scores[..., list(keys)].double()


def _square(keys: tuple[int, ...], D: Float[Tensor, "... S S"]) -> Float[Tensor, "... K K"]:
    index = list(keys)
    return D[..., index, :][..., :, index].double()
