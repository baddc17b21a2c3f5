"""Floating point that can be trusted: outward rounding, a-priori error bounds, verified factorisations."""

from prooflens.numerics.platform import check_arithmetic
from prooflens.numerics.psd import certified_shift, dominates, gershgorin_shift, is_psd, lambda_max_upper
from prooflens.numerics.rounding import UNIT_ROUNDOFF, down, gamma, up

__all__ = [
    "UNIT_ROUNDOFF",
    "certified_shift",
    "check_arithmetic",
    "dominates",
    "down",
    "gamma",
    "gershgorin_shift",
    "is_psd",
    "lambda_max_upper",
    "up",
]
