"""Midpoint–radius arithmetic on numpy arrays: every result contains the real number it stands for.

With u = 2⁻⁵³ a rounded sum or product is within u·|result|, and a dot product of length n within nu/(1 − nu) times
the dot product of the absolute values, in any order (Higham, ch. 3). Radii are sums of nonnegative floats; `_up`
covers their own rounding (up to 10⁵ operations) and underflow. Elementary functions are Arb's: no libm is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flint import arb
from numpy.typing import NDArray

Array = NDArray[np.float64]
U = 2.0**-53


def _up(radius: Array) -> Array:
    return radius * (1.0 + 2.0**-36) + 2.0**-1000


class Ball:
    """The reals within `rad` of `mid`, elementwise; `low` and `high` are floats around them all."""

    __slots__ = ("mid", "rad")
    __array_ufunc__ = None

    def __init__(self, mid: Any, rad: Any = 0.0) -> None:
        self.mid: Array = np.asarray(mid, dtype=np.float64)
        self.rad: Array = np.broadcast_to(np.asarray(rad, dtype=np.float64), self.mid.shape)

    @property
    def low(self) -> Array:
        """At or below every member."""
        return np.asarray(np.nextafter(self.mid - self.rad, -np.inf))

    @property
    def high(self) -> Array:
        """At or above every member."""
        return np.asarray(np.nextafter(self.mid + self.rad, np.inf))

    @property
    def T(self) -> Ball:  # noqa: N802
        """The last two axes swapped."""
        return Ball(self.mid.swapaxes(-1, -2), self.rad.swapaxes(-1, -2))

    def __getitem__(self, key: Any) -> Ball:
        return Ball(self.mid[key], self.rad[key])

    def __neg__(self) -> Ball:
        return Ball(-self.mid, self.rad)

    def __add__(self, other: Any) -> Ball:
        other = other if isinstance(other, Ball) else Ball(other)
        mid = self.mid + other.mid
        return Ball(mid, _up(self.rad + other.rad + U * np.abs(mid)))

    def __sub__(self, other: Any) -> Ball:
        return self + (-(other if isinstance(other, Ball) else Ball(other)))

    def __mul__(self, other: Any) -> Ball:
        other = other if isinstance(other, Ball) else Ball(other)
        mid = self.mid * other.mid
        spread = np.abs(self.mid) * other.rad + self.rad * (np.abs(other.mid) + other.rad)
        return Ball(mid, _up(spread + U * np.abs(mid)))

    def __matmul__(self, other: Any) -> Ball:
        other = other if isinstance(other, Ball) else Ball(other)
        a, b, n = np.abs(self.mid), np.abs(other.mid), self.mid.shape[-1]
        spread = a @ (other.rad + 1.01 * n * U * b) + self.rad @ (b + other.rad)
        return Ball(self.mid @ other.mid, _up(spread))

    def sum(self) -> Ball:
        """Over the last axis, which stays with length 1."""
        error = self.rad + 1.01 * self.mid.shape[-1] * U * np.abs(self.mid)
        return Ball(self.mid.sum(-1, keepdims=True), _up(error.sum(-1, keepdims=True)))

    def mean(self) -> Ball:
        """Over the last axis, which stays with length 1."""
        return self.sum() * Ball(float(self.mid.shape[-1])).each(lambda v: 1 / v)

    def reshape(self, *shape: int) -> Ball:
        """As numpy."""
        return Ball(self.mid.reshape(shape), self.rad.reshape(shape))

    def each(self, function: Callable[[arb], arb]) -> Ball:
        """An elementary function, by Arb; where it is not defined the ball is NaN and decides nothing."""
        pairs = zip(self.mid.ravel().tolist(), self.rad.ravel().tolist(), strict=True)
        found = [function(arb(mid, rad)) for mid, rad in pairs]
        ends = np.array([(float(v.mid()), float(v.rad())) for v in found]).reshape(*self.mid.shape, 2)
        return Ball(ends[..., 0], _up(ends[..., 1]))


def norm(x: Ball) -> float:
    """At least ‖x‖₂."""
    return float((x.reshape(1, -1) @ x.reshape(-1, 1)).each(lambda v: abs(v).upper().sqrt()).high[0, 0])


def spectral_radius(C: Ball) -> float:
    """At least ρ(C) for every matrix in the ball: ρ(C)^m = ρ(C^m) ≤ ‖C^m‖_F, m = 64, by squaring and scaling."""
    exponent = 0
    for _ in range(6):
        power = int(np.frexp(np.abs(C.mid).max())[1])
        C = C * 2.0**-power
        C, exponent = C @ C, 2 * (exponent + power)
    return float(Ball([norm(C)]).each(lambda v: (v * arb(2) ** exponent).root(64)).high[0])
