"""Capped scores: y = φ(a) = c·tanh(a/c) of a product a of queries and keys, score by score.

Let â be the float score at the centre, ℓ the float linear part of its move u = ℓ + β, |ℓ| ≤ ρ and |β| ≤ E. With
floats ŷ, λ ∈ [0, 1] and κ near φ(â), φ′(â) and ½φ″(â), exactly,

    φ(â + u) = ŷ + λ(ℓ + β) + κℓ² + x,      |x| ≤ |κ|(2ρE + E²) + sup_{|u| ≤ ρ + E} |φ(â + u) − ŷ − λu − κu²|,

the last by Taylor's theorem in Arb, the rounding of ŷ, λ and κ included. λℓ and λβ are what an uncapped score would
bring, times a number that is at most 1; κℓ² is a quadratic form of the factors; x is a box. As 0 < φ′ ≤ 1 everywhere,
φ(â + u) − φ(â) lies between 0 and u, so that |φ(â + u) − ŷ − λu| ≤ |φ(â) − ŷ| + max(λ, 1 − λ)(ρ + E) as well: where
that, or Taylor's first order, says more than the second, κ is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from flint import arb, ctx
from numpy.typing import NDArray

from prooflens.checker.depth.activations import BITS, SMOOTH, Series, coefficients, high
from prooflens.checker.depth.shapes import Array, up


class Caps(NamedTuple):
    """What a cap makes of scores, each [H, S, S]; scores that no query sees stay as they are.

    Attributes:
        value: ŷ.
        slope: λ.
        bend: κ.
        rest: at least |x|.
        most: at least |κℓ² + x|.
    """

    value: Array
    slope: Array
    bend: Array
    rest: Array
    most: Array


def capped(cap: float, a: Array, rho: Array, E: Array, mask: NDArray[np.bool_]) -> Caps:
    """Expand a cap around scores.

    Args:
        cap: c.
        a: scores at the centre, as they are computed.
        rho: at least |ℓ|.
        E: at least |β|, what a rounds by included.
        mask: which scores are seen.
    """
    found = Caps(a.copy(), np.ones_like(a), *(np.zeros_like(a) for _ in range(3)))
    for place in zip(*np.nonzero(mask), strict=True):
        made = _expanded(cap, float(a[place]), float(rho[place]), float(E[place]))
        for part, number in zip(found, made, strict=True):
            part[place] = number
    return found


def _expanded(cap: float, a: float, rho: float, E: float) -> tuple[float, ...]:
    """ŷ, λ, κ and the bounds of |x| and of |κℓ² + x| of one score."""
    c = arb(cap)
    reach = float(up(np.asarray(rho + E)))

    def function(x: Series) -> Series:
        return c * SMOOTH["tanh"](x / c)

    with ctx.workprec(BITS):
        at = coefficients(function, arb(a))
        if not all(part.is_finite() for part in at[:3]):
            return 0.0, 0.0, 0.0, np.inf, np.inf
        value, slope, bend = (float(part.mid()) for part in at[:3])
        slope = min(1.0, max(0.0, slope))
        if not np.isfinite(reach):
            return value, slope, 0.0, np.inf, np.inf
        over, far = coefficients(function, arb(a, reach)), arb(reach)
        slips = [abs(at[i] - kept) * far**i for i, kept in enumerate((value, slope, bend))]
        first = high(slips[0] + slips[1] + abs(over[2]) * far**2)
        whole = min(first, high(slips[0] + arb(slope).max(1 - arb(slope)) * far))
        curved = abs(arb(bend))
        second = high(sum(slips, abs(over[3]) * far**3) + curved * (2 * arb(rho) * E + arb(E) ** 2))
        if not second < whole:
            return value, slope, 0.0, whole, whole
        return value, slope, bend, second, min(whole, high(curved * arb(rho) ** 2 + second))
