"""The searches of the benchmarks find the end of what is good in few looks, whatever the shape of the curve."""

import math
from collections.abc import Callable

import pytest

from thresholds import largest, share_between

TOLERANCE = 1.15


def linear(eps: float) -> float:
    return eps / 3e-5


def curved(eps: float) -> float:
    t = eps / 1e-5
    return 0.01 * t + 0.02 * t**2 + 0.001 * t**3


def exploding(eps: float) -> float:
    """A remainder that feeds itself: finite, then not."""
    t = eps / 1e-5
    return 0.2 * t / (1.0 - t / 4.0) if t < 4.0 else math.inf


def cliff(eps: float) -> float:
    """Nothing is foreseen: fine, then nothing at all."""
    return 0.01 if eps < 7e-6 else math.inf


def end_of(used: Callable[[float], float]) -> float:
    low, high = 1e-9, 1.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if used(middle) < 1.0 else (low, middle)
    return low


@pytest.mark.parametrize("used", [linear, curved, exploding, cliff])
@pytest.mark.parametrize("off", [0.1, 0.5, 0.97, 1.05, 2.0, 10.0])
def test_the_largest_good_radius_is_found(used: Callable[[float], float], off: float) -> None:
    end = end_of(used)
    seen: list[float] = []

    def look(eps: float) -> float:
        seen.append(eps)
        return used(eps)

    found = largest(look, off * end, TOLERANCE, most=12)
    assert found.good is not None
    assert used(found.good) < 1.0
    assert end / TOLERANCE <= found.good * (1.0 + 1e-12)
    assert found.bad is None or used(found.bad) >= 1.0
    assert len(seen) == len(set(seen)) == len(found.looks)
    if used is not cliff:
        assert len(seen) <= 5


@pytest.mark.parametrize("used", [linear, curved, exploding, cliff])
@pytest.mark.parametrize("off", [0.6, 0.8, 0.99, 1.01, 1.3, 1.7])
def test_a_good_guess_with_a_small_step_saves_looks(used: Callable[[float], float], off: float) -> None:
    end = end_of(used)
    found = largest(used, off * end, TOLERANCE, most=7 if used is cliff else 5, step=1.6)
    assert found.closed
    assert found.good is not None
    assert end / TOLERANCE <= found.good * (1.0 + 1e-12)


def test_looks_are_limited_but_something_good_is_looked_for_longer() -> None:
    found = largest(cliff, 1.0, TOLERANCE, most=3)
    assert len(found.looks) == 6
    found = largest(lambda eps: math.inf, 1.0, TOLERANCE, most=2)
    assert found.good is None
    assert len(found.looks) == 4
    assert found.bad == min(eps for eps, _ in found.looks)


@pytest.mark.parametrize("start", [1e-5, 1e-3, 1e-1])
def test_a_share_is_found(start: float) -> None:
    def share(eps: float) -> float:
        return round(96 / (1.0 + math.pow(eps / 2e-3, 1.5))) / 96

    eps, found = share_between(share, start, 0.75, 0.80)
    assert found == share(eps)
    assert 0.75 <= found <= 0.80


def test_a_share_that_jumps_gives_the_nearest() -> None:
    eps, found = share_between(lambda eps: 1.0 if eps < 0.3 else 0.2, 0.1, 0.75, 0.80)
    assert found == 1.0
    assert eps < 0.3
