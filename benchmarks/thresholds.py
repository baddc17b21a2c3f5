"""Where something stops as ε grows, in few looks, because every look is dear."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

SLOPES = (1.0, 6.0)
"""A linear part is used up in proportion to ε, a remainder faster; beyond the sixth power a fit is no guide."""

FAR = 8.0
"""The largest step while one side of the bracket is missing."""


@dataclass
class Bracket:
    """Looks so far: (ε, share of the margin that is used up there). Less than 1 is good; ∞ says nothing more."""

    tolerance: float
    step: float = FAR
    """The first step while one side is missing; it is squared from look to look."""
    looks: list[tuple[float, float]] = field(default_factory=list)

    @property
    def good(self) -> float | None:
        """The largest ε that was good."""
        return max((eps for eps, used in self.looks if used < 1.0), default=None)

    @property
    def bad(self) -> float | None:
        """The smallest ε above it that was not."""
        floor = self.good or 0.0
        return min((eps for eps, used in self.looks if not used < 1.0 and eps > floor), default=None)

    @property
    def closed(self) -> bool:
        """Whether a step of the tolerance beyond the good end is bad, seen or foreseen: use grows at least like ε."""
        if self.good is None:
            return False
        used = max(used for eps, used in self.looks if eps == self.good)
        near = self.bad is not None and self.bad <= self.good * self.tolerance
        return near or used * self.tolerance >= 1.0

    def guess(self) -> float:
        """The next ε: where a power law through the nearest looks is just below 1, kept inside the bracket."""
        good, bad = self.good, self.bad
        known = sorted(
            ((eps, used) for eps, used in self.looks if 0.0 < used < math.inf),
            key=lambda look: abs(math.log(look[1])),
        )
        aim = self.tolerance**-0.5
        found: float | None = None
        if known:
            eps, used = known[0]
            slope = 1.5 if used < 1.0 else 3.0
            if len(known) > 1 and known[1][0] != eps:
                other, there = known[1]
                slope = math.log(used / there) / math.log(eps / other)
            low, high = SLOPES
            found = eps * math.pow(aim / used, 1.0 / min(high, max(low, slope)))
        far = min(FAR, math.pow(self.step, 2 ** (len(self.looks) - 1)))
        if good is None:
            assert bad is not None
            return bad / far if found is None else min(max(found, bad / far), bad / self.tolerance)
        if bad is None:
            return good * far if found is None else max(min(found, good * far), good * self.tolerance)
        inside = found is not None and good < found < bad
        return found if inside and found is not None else math.sqrt(good * bad)


def largest(
    used: Callable[[float], float], start: float, tolerance: float = 1.15, most: int = 5, step: float = FAR
) -> Bracket:
    """Look at so many ε for the largest that is good, twice as many where none is.

    A small `step` says that `start` is a good guess.
    """
    bracket = Bracket(tolerance, step)
    eps = start
    while not bracket.closed and len(bracket.looks) < (2 * most if bracket.good is None else most):
        bracket.looks.append((eps, used(eps)))
        if not bracket.closed:
            eps = bracket.guess()
    return bracket


def share_between(
    share: Callable[[float], float], start: float, low: float, high: float, most: int = 14
) -> tuple[float, float]:
    """An ε at which a share that falls with ε lies in [low, high], and the share: bisection in log ε.

    Where there is none (the share jumps), the look nearest to the middle.
    """
    looks: list[tuple[float, float]] = []
    small, large = 0.0, math.inf
    eps = start
    for _ in range(most):
        looks.append((eps, share(eps)))
        if low <= looks[-1][1] <= high:
            return looks[-1]
        if looks[-1][1] > high:
            small = eps
        else:
            large = eps
        middle = math.sqrt(small * min(large, 4.0 * small))
        eps = middle if small else large / 2.0
    return min(looks, key=lambda look: abs(look[1] - 0.5 * (low + high)))
