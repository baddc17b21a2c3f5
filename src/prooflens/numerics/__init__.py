"""Floating point that can be trusted: outward rounding, a-priori error bounds, verified factorisations."""

from prooflens.numerics.rounding import UNIT_ROUNDOFF, down, gamma, up

__all__ = ["UNIT_ROUNDOFF", "down", "gamma", "up"]
