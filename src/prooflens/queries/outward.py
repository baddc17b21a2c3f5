"""Float64 sums, exponentials and logarithms with a proved side, on which every program of this package is built.

With u = 2⁻⁵³, a nonnegative float y with |y − x| ≤ n·u·x gives x ≤ y(1 + (n+2)u) and x ≥ y(1 − (n+2)u); the two spare
u cover second-order terms and the rounding of that product itself, and `TINY` covers gradual underflow.

There is one assumption about the platform: `exp` and `log` of torch are within `LIBM_ULPS` = 4 units in the last
place, a relative error of at most 8u. SLEEF, MKL (high accuracy) and CUDA document 1 ulp for both.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.numerics.rounding import TINY, UNIT_ROUNDOFF, down, gamma, up

LIBM_ULPS = 4
"""The units in the last place within which `exp` and `log` are trusted."""

LIBM_ROUNDINGS = 2 * LIBM_ULPS
"""The error of `exp` and `log` as a number of relative roundings u: one ulp is at most 2u."""


LARGEST_EXPONENT = 700.0
"""Lower bounds of e^x stop growing at this x, so that sums of them stay finite."""


def together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in float64, broadcast to one shape.

    Args:
        tensors: the tensors.
    """
    shared: tuple[Tensor, ...] = torch.broadcast_tensors(*(t.double() for t in tensors))
    return shared


def scaled_up(y: Float[Tensor, "..."], roundings: int) -> Float[Tensor, "..."]:
    """Return an upper bound of the x ≥ 0 that y ≥ 0 approximates within `roundings`·u relative.

    The factor 1 + 2(⌊n/2⌋ + 2)u ≥ 1 + (n + 3)u is a float64 exactly, because it is 1 plus a multiple of 2u.

    Args:
        y: the float result, not negative.
        roundings: n, how many relative roundings y carries.
    """
    return y * (1.0 + 2.0 * (roundings // 2 + 2) * UNIT_ROUNDOFF) + TINY


def scaled_down(y: Float[Tensor, "..."], roundings: int) -> Float[Tensor, "..."]:
    """Return a lower bound, not below 0, of the x ≥ 0 that y ≥ 0 approximates within `roundings`·u relative.

    Args:
        y: the float result, not negative.
        roundings: n, how many relative roundings y carries.
    """
    return (y * (1.0 - (roundings + 2.0) * UNIT_ROUNDOFF) - TINY).clamp_min(0.0)


def sum_slack(magnitude: Float[Tensor, "..."], terms: int) -> Float[Tensor, "..."]:
    """Bound the error of a float sum of `terms` terms.

    The error is at most γ_n Σ|x|, and Σ|x| is itself rounded: γ_n/(1 − γ_n) ≤ γ_2n. The four more roundings cover the
    product with `magnitude` and the addition of `TINY`. Terms that carry r roundings of their own are covered by
    passing n + r.

    Args:
        magnitude: the float sum of the terms' absolute values.
        terms: n, how many terms were added.
    """
    return gamma(2 * terms + 4) * magnitude + TINY


def sum_down(x: Float[Tensor, "... n"], extra: int = 0) -> Float[Tensor, "..."]:
    """Return at most the real sum over the last dimension.

    Args:
        x: the terms, shape [..., n].
        extra: how many roundings each term carries already.
    """
    return down(x.sum(-1) - sum_slack(x.abs().sum(-1), x.shape[-1] + extra))


def sum_up(x: Float[Tensor, "... n"], extra: int = 0) -> Float[Tensor, "..."]:
    """Return at least the real sum over the last dimension.

    Args:
        x: the terms, shape [..., n].
        extra: how many roundings each term carries already.
    """
    return up(x.sum(-1) + sum_slack(x.abs().sum(-1), x.shape[-1] + extra))


def exp_down(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return at most the real e^x.

    Args:
        x: real numbers.
    """
    return scaled_down(x.clamp_max(LARGEST_EXPONENT).exp(), LIBM_ROUNDINGS)


def exp_up(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return at least the real e^x.

    Args:
        x: real numbers.
    """
    return scaled_up(x.exp(), LIBM_ROUNDINGS)


def log_down(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return at most the real log x (−∞ at 0).

    Args:
        x: numbers that are not negative.
    """
    y = x.log()
    return torch.where(x > 0, down(y - (LIBM_ROUNDINGS + 2) * UNIT_ROUNDOFF * y.abs()), y)


def log_up(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return at least the real log x (−∞ at 0).

    Args:
        x: numbers that are not negative.
    """
    y = x.log()
    return torch.where(x > 0, up(y + (LIBM_ROUNDINGS + 2) * UNIT_ROUNDOFF * y.abs()), y)


def log_sum_exp_down(x: Float[Tensor, "... n"], member: Bool[Tensor, "... n"]) -> Float[Tensor, "..."]:
    """Return at most the real log Σ e^x over the members; exact for a single member or an infinite largest one.

    Args:
        x: exponents, shape [..., n].
        member: which of them to sum, shape [..., n].
    """
    shift = x.masked_fill(~member, -math.inf).amax(-1)
    terms = exp_down(down(x - shift[..., None])).masked_fill(~member, 0.0)
    bound = down(shift + log_down(sum_down(terms)))
    return torch.where((member.sum(-1) == 1) | shift.isinf(), shift, bound)


def log_sum_exp_up(x: Float[Tensor, "... n"], member: Bool[Tensor, "... n"]) -> Float[Tensor, "..."]:
    """Return at least the real log Σ e^x over the members; exact for a single member or an infinite largest one.

    Args:
        x: exponents, shape [..., n].
        member: which of them to sum, shape [..., n].
    """
    shift = x.masked_fill(~member, -math.inf).amax(-1)
    terms = exp_up(up(x - shift[..., None])).masked_fill(~member, 0.0)
    bound = up(shift + log_up(sum_up(terms)))
    return torch.where((member.sum(-1) == 1) | shift.isinf(), shift, bound)


def exclusive_sum(x: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
    """Return Σ_{k≠j} x_k for every j from prefix and suffix sums.

    For x ≥ 0 nothing cancels, and the relative error is at most γ_n.

    Args:
        x: the numbers, shape [..., n].

    Example:
        >>> exclusive_sum(torch.tensor([1.0, 2.0, 4.0])).tolist()
        [6.0, 5.0, 3.0]
    """
    zero = torch.zeros_like(x[..., :1])
    before = torch.cat([zero, x[..., :-1]], -1).cumsum(-1)
    after = torch.cat([x[..., 1:], zero], -1).flip(-1).cumsum(-1).flip(-1)
    return before + after
