import doctest

import pytest

from prooflens import statistics
from prooflens.statistics import Rate, RateError, clopper_pearson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (95, 100, "88.7", "98.4"),
        (74, 80, "84.4", "97.2"),
        (20, 50, "26.4", "54.8"),
        (45, 50, "78.2", "96.7"),
        (60, 60, "94.0", "100.0"),
        (1, 60, "0.0", "8.9"),
    ],
)
def test_the_papers_own_intervals(successes: int, trials: int, low: str, high: str) -> None:
    found = clopper_pearson(successes, trials)
    assert tuple(f"{100 * end:.1f}" for end in found) == (low, high)


def test_the_papers_small_rate_to_two_digits() -> None:
    assert f"{100 * clopper_pearson(1, 60)[0]:.2f}" == "0.04"


def test_ends_are_0_and_1_when_nothing_or_all_succeeds() -> None:
    assert clopper_pearson(0, 7)[0] == 0.0
    assert clopper_pearson(7, 7)[1] == 1.0


def test_symmetric_and_wider_with_more_confidence() -> None:
    low, high = clopper_pearson(3, 20)
    other_low, other_high = clopper_pearson(17, 20)
    assert low == pytest.approx(1 - other_high, rel=1e-12)
    assert high == pytest.approx(1 - other_low, rel=1e-12)
    wide_low, wide_high = clopper_pearson(3, 20, 0.99)
    assert wide_low < low < 3 / 20 < high < wide_high


@pytest.mark.parametrize("rate", [0.03, 0.4, 0.9])
def test_covers_the_true_rate_at_least_as_often_as_it_says(rate: float) -> None:
    from scipy.stats import binom

    n = 40
    covered = sum(
        float(binom.pmf(k, n, rate))
        for k in range(n + 1)
        if clopper_pearson(k, n)[0] <= rate <= clopper_pearson(k, n)[1]
    )
    assert covered >= 0.95


def test_a_rate_prints_percent_interval_and_counts() -> None:
    assert str(Rate(337, 480)) == "70.2 % [65.9, 74.3] (337/480)"
    assert Rate(1, 4).value == 0.25


@pytest.mark.parametrize(
    ("successes", "trials", "confidence", "message"),
    [
        (1, 0, 0.95, "at least one trial"),
        (5, 4, 0.95, "0 … 4, got 5"),
        (-1, 4, 0.95, "got -1"),
        (1, 4, 1.0, "strictly between 0 and 1"),
        (1.5, 4, 0.95, "must be an integer, got 1.5"),
        (True, 4, 0.95, "must be an integer"),
    ],
)
def test_bad_counts_are_named(successes: int, trials: int, confidence: float, message: str) -> None:
    with pytest.raises(RateError, match=message):
        Rate(successes, trials, confidence)
    with pytest.raises(RateError, match=message):
        clopper_pearson(successes, trials, confidence)


def test_the_docstring_example_runs() -> None:
    assert doctest.testmod(statistics).failed == 0
