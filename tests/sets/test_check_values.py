"""Worked examples from CORA's and LazySets' tests, re-derived in the project's design notes (peers.md, "Check values
for polynomial zonotopes"); the numbers are those of that list.

Each runs on float64 and, where the operation is generic, on exact rationals.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from prooflens.sets import (
    ConstrainedPolynomialZonotope,
    PolynomialZonotope,
    affine_map,
    contains,
    exact_sum,
    interval_enclosure,
    is_empty,
    quadratic_map,
    reduce_girard,
    relax_exponents,
    support,
    zonotope_enclosure,
)

Rows = Sequence[Any]
"""Numbers, or rows of them."""
Numbers = Any
"""A float64 tensor, or an array of rationals."""
Make = Callable[[Rows], Numbers]


def floats(rows: Rows) -> Numbers:
    return torch.tensor(rows, dtype=torch.float64)


def rationals(rows: Rows) -> Numbers:
    exact = np.vectorize(lambda x: Fraction(x).limit_denominator(1000), otypes=[object])
    return exact(np.array(rows, dtype=float))


def same(x: Numbers, y: Numbers) -> bool:
    return tuple(x.shape) == tuple(y.shape) and bool((x == y).all())


@pytest.fixture(params=[floats, rationals], ids=["float64", "rational"])
def num(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def test_1_exact_sum(num: Make) -> None:
    """Check value 1: exactPlus."""
    A = PolynomialZonotope(
        num([-1, 3]), num([[-1, -1, 3, 2], [2, -1, -1, 0]]), [[1, 0, 1, 5], [0, 1, 3, 0]], ids=[1, 2]
    )
    B = PolynomialZonotope(
        num([0, 2]), num([[-2, -2, -1], [-1, -2, -3]]), [[1, 0, 2], [0, 0, 0], [0, 1, 3]], ids=[1, 2, 3]
    )
    z = exact_sum(A, B)
    assert same(z.c, num([-1, 5]))
    assert same(z.G, num([[-3, -1, 3, 2, -2, -1], [1, -1, -1, 0, -2, -3]]))
    assert z.E.tolist() == [[1, 0, 1, 5, 0, 2], [0, 1, 3, 0, 0, 0], [0, 0, 0, 0, 1, 3]]
    assert isinstance(z, PolynomialZonotope)


def test_2_exact_sum_merges_ids(num: Make) -> None:
    """Check value 2: exactPlus with ids [1,3] and [3,5]."""
    x = PolynomialZonotope(
        num([4, 4]), num([[2, 1, 2], [0, 2, 2]]), [[1, 0, 3], [0, 1, 1]], num([[1], [0]]), [1, 3]
    )
    y = PolynomialZonotope(num([1, -1]), num([[1, -1], [0, 2]]), [[1, 0], [2, 1]], num([[0], [1]]), [3, 5])
    z = exact_sum(x, y)
    assert same(z.c, num([5, 3]))
    assert same(z.G, num([[2, 1, 2, 1, -1], [0, 2, 2, 0, 2]]))
    assert same(z.GI, num([[1, 0], [0, 1]]))
    assert z.E.tolist() == [[1, 0, 3, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 2, 1]]
    assert z.ids == (1, 3, 5)


def test_3_linear_map(num: Make) -> None:
    """Check value 3: linear map."""
    z = PolynomialZonotope(
        num([1, 2]),
        num([[1, 2, 1, -3], [1, -1, 2, -1]]),
        [[1, 0, 0, 2], [0, 1, 2, 1]],
        num([[0, -1], [1, 1]]),
    )
    image = affine_map(z, num([[1, -0.5], [-1, 0]]))
    assert same(image.c, num([0, -1]))
    assert same(image.G, num([[0.5, 2.5, 0, -2.5], [-1, -2, -1, 3]]))
    assert same(image.GI, num([[-0.5, -1.5], [0, 1]]))
    assert image.E.tolist() == z.E.tolist()


def test_4_quadratic_map(num: Make) -> None:
    """Check value 4: quadMap."""
    z = PolynomialZonotope(num([1, 2]), num([[1, -2, 1], [2, 3, -1]]), [[1, 0, 2], [0, 1, 1]])
    image = quadratic_map(z, [num([[1, 2], [-1, 2]]), num([[-3, 0], [1, 1]])])
    assert same(image.c, num([11, 3]))
    assert same(image.G, num([[22, 19, -5, 11, 19, -5, 16, -11, 2], [6, 23, -9, 3, 23, -9, -9, 11, -3]]))
    assert image.E.tolist() == [[1, 0, 2, 2, 1, 3, 0, 2, 4], [0, 1, 1, 0, 1, 1, 2, 2, 2]]


def test_5_girard_to_order_one(num: Make) -> None:
    """Check value 5, reduce (Girard): row sums of |G| are 3 and 4."""
    z = reduce_girard(PolynomialZonotope(num([0, 0]), num([[0, 2, 1], [3, 0, 1]]), [[1, 0, 1], [0, 1, 1]]), 1)
    assert z.dependent == 0
    assert same(z.GI, num([[3, 0], [0, 4]]))


def test_6_zonotope_enclosure(num: Make) -> None:
    """Check value 6, zonotope enclosure: only the third monomial, α₂², is even."""
    z = PolynomialZonotope(num([1, 2]), num([[1, 2, 1, -3], [1, -1, 2, -1]]), [[1, 0, 0, 2], [0, 1, 2, 1]])
    enclosure = zonotope_enclosure(z)
    assert same(enclosure.c, num([1.5, 3]))
    assert same(enclosure.G, num([[1, 2, 0.5, -3], [1, -1, 1, -1]]))


def test_7_interval(num: Make) -> None:
    """Check value 7, interval: [0,6] × [1,7]; floats may be an ulp wider, never narrower."""
    z = PolynomialZonotope(num([3, 4]), num([[2, 0, 1], [0, 2, 1]]), [[1, 0, 1], [0, 1, 1]])
    hull = interval_enclosure(z)
    if num is rationals:
        assert same(hull.lower, num([0, 1]))
        assert same(hull.upper, num([6, 7]))
    for box in (hull, interval_enclosure(z, method="best")):
        assert bool((box.lower <= num([0, 1])).all())
        assert bool((box.upper >= num([6, 7])).all())
        assert float(max(abs(box.lower - num([0, 1])))) < 1e-13
        assert float(max(abs(box.upper - num([6, 7])))) < 1e-13


def test_8_relax_exponents(num: Make) -> None:
    """Check value 8, relaxed exponents: t⁴ − t² ∈ [−¼, 0]."""
    z = relax_exponents(PolynomialZonotope(num([2, 2]), num([[1, -1], [2, 3]]), [[1, 1], [4, 2]]))
    assert same(z.c, num([2, 2]))
    assert same(z.G, num([[0], [5]]))
    assert same(z.GI, num([[0.25], [0.5]]))
    assert z.E.tolist() == [[1], [2]]


def test_9_contains() -> None:
    """Check value 9: contains."""
    z = PolynomialZonotope(
        floats([0, 0]), floats([[2, 0, 1], [0, 2, 1]]), [[1, 0, 3], [0, 1, 1]], floats([[0.5], [0]])
    )
    assert contains(z, floats([1, 1])) is True
    assert contains(z, floats([-1, 3])) is False


def test_10_support_function_of_a_constrained_set() -> None:
    """Check value 10, constrained support function: the minimum in direction (1,1) is −¼, at α = (−½, ½, 1)."""
    z = ConstrainedPolynomialZonotope(
        floats([0, 0]),
        floats([[1, 0, 1, -1], [0, 2, 1, 2]]),
        [[1, 2, 1, 0], [0, 0, 1, 2], [0, 0, 0, 0]],
        A=[[1, 1, 0.5]],
        b=[0.5],
        R=[[0, 1, 0], [1, 0, 0], [0, 0, 1]],
    )
    found = support(z, floats([-1, -1]), tolerance=1e-3)
    assert 0.25 <= found.upper <= 0.2511
    assert found.attained == pytest.approx(0.25, abs=1e-4)
    assert found.alpha == pytest.approx((-0.5, 0.5, 1.0), abs=0.05)


def test_11_empty() -> None:
    """Check value 11, an empty constrained set: α₂ = α₁² and α₁ − α₂ = 1 have no common real root."""
    z = ConstrainedPolynomialZonotope(
        floats([0]),
        floats([[1, 0]]),
        [[1, 0], [0, 1]],
        A=[[1, -1, 0], [0, -1, 1]],
        b=[0, 1],
        R=[[2, 0, 1], [0, 1, 0]],
    )
    assert is_empty(z) is True


@pytest.mark.parametrize(
    ("cost", "minimum"),
    [((3, 2, 0), 1), ((-3, -1, 2), -3.5), ((1, -2, -5), -6), ((-2, -3, -1), -4), ((-2, 1, 1), -1.5)],
)
def test_12_simplex_linear_program(cost: tuple[float, ...], minimum: float) -> None:
    """Check value 12, simplex program: box [0,1]³ with sum 1.5; s = ½ + ½α, so Σα = 0."""
    z = ConstrainedPolynomialZonotope(
        [0.5] * 3,
        0.5 * torch.eye(3, dtype=torch.float64),
        A=[[1, 1, 1]],
        b=[0],
        R=torch.eye(3, dtype=torch.int64),
    )
    found = support(z, -floats(cost), tolerance=1e-9, max_cells=1)
    assert -minimum <= found.upper <= -minimum + 1e-12
