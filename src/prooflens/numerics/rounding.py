"""A-priori bounds on the error of float64 arithmetic (Higham, *Accuracy and Stability*, ch. 3).

With unit roundoff u = 2⁻⁵³ and γ_n = nu/(1 − nu), a sum or dot product of n terms evaluated in any order, with
or without fused multiply-add, satisfies  |fl(x·y) − x·y| ≤ γ_n |x|·|y|  barring underflow; `TINY` covers that.
"""

from typing import overload

import torch
from torch import Tensor

UNIT_ROUNDOFF = 2.0**-53
"""u, half the spacing of float64 at 1."""

TINY = 2.0**-1022
"""The smallest normal float64: an absolute slack that covers gradual underflow of a handful of operations."""


def gamma(n: int) -> float:
    """Return γ_n = nu/(1 − nu), rounded up: the relative error bound of n roundings in sequence.

    n·u is exact, and the difference and the quotient round once each; the factor 1 + 4u covers them and its own
    product.

    Args:
        n: how many roundings, below 2⁵⁰.

    Example:
        >>> gamma(2) >= 2 * UNIT_ROUNDOFF
        True
    """
    if not 0 <= n < 2**50:
        raise ValueError(f"gamma(n) needs 0 <= n < 2**50, got {n}")
    nu = n * UNIT_ROUNDOFF
    return nu / (1.0 - nu) * (1.0 + 4.0 * UNIT_ROUNDOFF)


@overload
def up(x: Tensor, steps: int = 1) -> Tensor: ...
@overload
def up(x: float, steps: int = 1) -> float: ...
def up(x: Tensor | float, steps: int = 1) -> Tensor | float:
    """Return the float64 that is `steps` places above x.

    One step takes a correctly rounded result to at least the real one.

    Args:
        x: a number or a tensor.
        steps: how many places.

    Example:
        >>> up(1.0) == 1.0 + 2.0**-52
        True
    """
    return _step(x, float("inf"), steps)


@overload
def down(x: Tensor, steps: int = 1) -> Tensor: ...
@overload
def down(x: float, steps: int = 1) -> float: ...
def down(x: Tensor | float, steps: int = 1) -> Tensor | float:
    """Return the float64 that is `steps` places below x.

    One step takes a correctly rounded result to at most the real one.

    Args:
        x: a number or a tensor.
        steps: how many places.
    """
    return _step(x, -float("inf"), steps)


def _step(x: Tensor | float, toward: float, steps: int) -> Tensor | float:
    value = torch.as_tensor(x, dtype=torch.float64)
    limit = value.new_full((), toward)  # one number for all of them
    for _ in range(steps):
        value = torch.nextafter(value, limit)
    return value if isinstance(x, Tensor) else float(value)
