"""Like for like: the radius at which our attack leaves as large a share of the claims standing as the paper's did.

Two models at one radius are not equally hard. What an attack leaves is how hard a setting is, so rates of two models
compare where their attacks leave the same share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from prooflens.engines.attack import AttackBudget
from prooflens.evaluation.studies.measure import StudyCase, attacked

LOOKS = 12
"""How many radii are tried at most."""

NEAR = 0.01
"""A share so near to the wanted one is near enough."""


def calibrated(
    cases: Callable[[float], Sequence[StudyCase]],
    query: str,
    share: float,
    start: float,
    budget: AttackBudget,
    seed: int = 0,
) -> float:
    """Return a radius, of three digits, at which the attack leaves about a share of a query's claims.

    Claims that the clean input breaks or that tie count as broken, as everywhere in a study. If no radius leaves so
    many, because the clean inputs do not, the smallest that was tried is returned.

    Args:
        cases: the cases at a radius.
        query: the query that is counted.
        share: the wanted share, from 0 to 1.
        start: the first radius.
        budget: the attack's.
        seed: the attack's.
    """
    low, high = 0.0, math.inf
    found: dict[float, float] = {}
    eps = start
    for _ in range(LOOKS):
        eps = float(f"{eps:.3g}")
        if eps in found:
            break
        holds = attacked(cases(eps), budget, seed).holds[query]
        found[eps] = sum(holds) / len(holds)
        if abs(found[eps] - share) <= NEAR:
            break
        low, high = (eps, high) if found[eps] > share else (low, eps)
        eps = 3.0 * low if math.isinf(high) else high / 3.0 if low == 0.0 else math.sqrt(low * high)
    return min(found, key=lambda tried: (abs(found[tried] - share), tried))
