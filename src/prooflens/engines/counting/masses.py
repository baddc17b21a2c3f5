"""Softmax weights by the order of scores: margins that are enough, or necessary, for a mass."""

from __future__ import annotations

import math

from prooflens.numerics.rounding import UNIT_ROUNDOFF


def mass_margins(share: float, inside: int, outside: int) -> tuple[float, float]:
    """Return δ₁ and δ₂ such that the weights of keys J add up to τ if max_J a > max a + δ₁, and only if ≥ max a + δ₂.

    The maxima on the right are over the keys outside J. Σ_J e^a ≥ τ/(1−τ) Σ e^a says it exactly; the sum over J lies
    between its largest term and |J| times that, the sum over m others likewise. So δ₁ = log(mτ/(1−τ)), rounded up, and
    δ₂ = log(τ/((1−τ)|J|)), rounded down.

    Args:
        share: τ, in (0, 1).
        inside: |J|, how many keys there are in J.
        outside: m, how many others there are.

    Example:
        >>> enough, necessary = mass_margins(0.5, 1, 1)
        >>> necessary <= 0.0 <= enough < 1e-12
        True
    """
    terms = math.log(share), math.log1p(-share), math.log(outside), math.log(inside)
    # Each logarithm errs by at most 4 ulp, log(1 − τ) of the float τ too; two sums round once each.
    slack = 32.0 * UNIT_ROUNDOFF * (1.0 + sum(abs(term) for term in terms))
    return terms[0] - terms[1] + terms[2] + slack, terms[0] - terms[1] - terms[3] - slack
