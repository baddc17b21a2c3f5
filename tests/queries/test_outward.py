"""Rounding: every outward bound against ball arithmetic (Arb) or exact rationals, with no tolerance."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from prooflens.queries.entropy import entropy_range
from prooflens.queries.outward import (
    exclusive_sum,
    exp_down,
    exp_up,
    log_down,
    log_up,
    scaled_down,
    scaled_up,
    sum_down,
    sum_up,
)
from prooflens.queries.remainder import _psi_up
from prooflens.queries.weights import from_differences, from_scores, mass_from_scores, vertex_softmax

from .boxes import random_boxes

flint = pytest.importorskip("flint", reason="python-flint (extra 'exact') checks the rounding")


@pytest.fixture(autouse=True)
def _precision() -> None:
    flint.ctx.prec = 200


def spread_numbers(count: int, low: float, high: float) -> list[float]:
    generator = torch.Generator().manual_seed(count)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return (low + (high - low) * uniform).tolist()


def test_exponentials_and_logarithms_enclose_the_real_ones() -> None:
    for x in [
        *spread_numbers(500, -40, 40),
        *spread_numbers(500, -1e-9, 1e-9),
        -800.0,
        -744.9,
        -710.0,
        0.0,
        705.0,
    ]:
        real = flint.arb(x).exp()
        point = torch.tensor([x], dtype=torch.float64)
        assert flint.arb(float(exp_down(point))) <= real <= flint.arb(float(exp_up(point)))
    for x in [*spread_numbers(500, 1e-300, 2), *spread_numbers(500, 1 - 1e-9, 1 + 1e-9), 1.0, 1e300]:
        real = flint.arb(x).log()
        point = torch.tensor([x], dtype=torch.float64)
        assert flint.arb(float(log_down(point))) <= real <= flint.arb(float(log_up(point)))
    assert float(log_up(torch.zeros(1, dtype=torch.float64))) == -math.inf


def test_psi_is_above_the_real_one() -> None:
    for x in [*spread_numbers(1000, -3, 3), *spread_numbers(300, -1e-6, 1e-6), -1.0, 1.0, 0.0]:
        real = flint.arb(x).exp() - 1 - flint.arb(x)
        assert real <= flint.arb(float(_psi_up(torch.tensor([x], dtype=torch.float64))))


def test_sums_enclose_the_real_ones() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(300, 40, generator=generator, dtype=torch.float64)
    x = x * torch.exp(20 * torch.randn(300, 40, generator=generator, dtype=torch.float64))
    x[:, 20:] = -x[:, :20].flip(-1) * (1 + 2.0**-50)
    low, high = sum_down(x), sum_up(x)
    for row in range(300):
        real = sum(map(Fraction, x[row].tolist()), Fraction(0))
        assert Fraction(float(low[row])) <= real <= Fraction(float(high[row]))
    positive = x.abs()
    others = exclusive_sum(positive)
    below, above = scaled_down(others, 2 * 40), scaled_up(others, 2 * 40)
    for row, j in itertools.product(range(50), (0, 7, 39)):
        real = sum(map(Fraction, positive[row].tolist()), Fraction(0)) - Fraction(float(positive[row, j]))
        assert Fraction(float(below[row, j])) <= real <= Fraction(float(above[row, j]))


def arb_softmax(scores: list[float]) -> list[Any]:
    terms = [flint.arb(a).exp() for a in scores]
    return [term / sum(terms, flint.arb(0)) for term in terms]


def test_weights_and_masses_of_points_enclose_the_real_softmax() -> None:
    """Boxes of zero width leave nothing but rounding."""
    generator = torch.Generator().manual_seed(4)
    scores = 12 * torch.randn(100, 7, generator=generator, dtype=torch.float64)
    group = torch.tensor([True, False, True, False, False, False, True])
    box = from_scores(scores, scores)
    pairs = from_differences(
        (scores[:, :, None] - scores[:, None, :]).nextafter(torch.tensor(math.inf).double())
    )
    mass = mass_from_scores(group.expand(100, 7), scores, scores)
    cost = torch.randn(100, 7, generator=generator, dtype=torch.float64)
    best = vertex_softmax(cost, scores, scores)
    for row in range(100):
        real = arb_softmax(scores[row].tolist())
        for j in range(7):
            for bound in (box, pairs):
                assert (
                    flint.arb(float(bound.lower[row, j])) <= real[j] <= flint.arb(float(bound.upper[row, j]))
                )
        total = real[0] + real[2] + real[6]
        assert flint.arb(float(mass[0][row])) <= total <= flint.arb(float(mass[1][row]))
        average = sum((flint.arb(c) * s for c, s in zip(cost[row].tolist(), real, strict=True)), flint.arb(0))
        assert average <= flint.arb(float(best[row]))


def exact_vertices(lower: list[float], upper: list[float]) -> list[list[Fraction]]:
    """The vertices of the polytope of these very floats, in rationals."""
    size = len(lower)
    found = []
    for free in range(size):
        for sides in itertools.product((lower, upper), repeat=size):
            point = [Fraction(sides[j][j]) for j in range(size)]
            point[free] = 1 - (sum(point) - point[free])
            if Fraction(lower[free]) <= point[free] <= Fraction(upper[free]):
                found.append(point)
    return found


def arb_entropy(point: list[Fraction]) -> object:
    total = flint.arb(0)
    for weight in point:
        if weight > 0:
            x = flint.arb(flint.fmpq(weight.numerator, weight.denominator))
            total -= x * x.log()
    return total


def test_entropy_ranges_enclose_every_exact_vertex() -> None:
    """Lower bounds are attained at vertices: there is no room for a lucky rounding."""
    lower, upper, _ = random_boxes(120, 4, seed=31)
    for exact in (True, False):
        below, above = entropy_range(lower, upper, exact=exact)
        for row in range(120):
            for vertex in exact_vertices(lower[row].tolist(), upper[row].tolist()):
                entropy = arb_entropy(vertex)
                assert flint.arb(float(below[row])) <= entropy <= flint.arb(float(above[row]))


def test_entropy_of_uniform_rows_is_above_the_real_logarithm() -> None:
    for size in range(1, 70):
        rows = torch.zeros(1, size, dtype=torch.float64)
        _, above = entropy_range(rows, torch.ones_like(rows), exact=False)
        assert flint.arb(size).log() <= flint.arb(float(above))
        assert float(above) <= math.log(size) + 1e-13
