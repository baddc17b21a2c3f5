"""Rates with exact binomial confidence intervals (Clopper and Pearson 1934), as the paper's appendix reports them.

With k successes in n trials and confidence 1 − a the interval is

    [ B(a/2; k, n − k + 1),  B(1 − a/2; k + 1, n − k) ],     B(q; α, β) the q-quantile of the beta distribution,

with 0 for the left end at k = 0 and 1 for the right end at k = n. Whatever the true rate is, such an interval
covers it with probability at least 1 − a.
"""

from __future__ import annotations

from dataclasses import dataclass

from prooflens.errors import ProoflensError


class RateError(ProoflensError):
    """Counts that are not a number of successes in a number of trials."""


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a rate.

    Args:
        successes: how many succeeded.
        trials: out of how many.
        confidence: how sure the interval is.

    >>> low, high = clopper_pearson(95, 100)
    >>> f"{100 * low:.1f} to {100 * high:.1f} %"
    '88.7 to 98.4 %'
    """
    _check(successes, trials, confidence)
    from scipy.stats import beta

    tail = (1.0 - confidence) / 2.0
    low = 0.0 if successes == 0 else float(beta.ppf(tail, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(beta.ppf(1.0 - tail, successes + 1, trials - successes))
    return low, high


@dataclass(frozen=True)
class Rate:
    """So many successes in so many trials."""

    successes: int
    trials: int
    confidence: float = 0.95

    def __post_init__(self) -> None:
        _check(self.successes, self.trials, self.confidence)

    @property
    def value(self) -> float:
        """The share of successes."""
        return self.successes / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        """The Clopper–Pearson interval of the rate."""
        return clopper_pearson(self.successes, self.trials, self.confidence)

    def __str__(self) -> str:
        low, high = self.interval
        counts = f"({self.successes}/{self.trials})"
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}] {counts}"


def _check(successes: int, trials: int, confidence: float) -> None:
    for what, number in (("successes", successes), ("trials", trials)):
        if type(number) is not int:
            raise RateError(f"the number of {what} must be an integer, got {number!r}")
    if trials < 1:
        raise RateError(f"a rate needs at least one trial, got {trials}")
    if not 0 <= successes <= trials:
        raise RateError(f"successes must lie in 0 … {trials}, got {successes}")
    if not 0.0 < confidence < 1.0:
        raise RateError(f"the confidence must lie strictly between 0 and 1, got {confidence}")
