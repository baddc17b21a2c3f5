"""Constructors say in one sentence what is wrong; pictures draw what they say."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from prooflens.errors import SetError
from prooflens.sets import (
    ConstrainedPolynomialZonotope,
    Interval,
    PolynomialZonotope,
    Zonotope,
    affine_map,
    constrained_enclosure,
    contains,
    elementwise_product,
    evaluate,
    exact_sum,
    fresh_ids,
    interval_enclosure,
    is_empty,
    quadratic_map,
    reduce_girard,
    reduce_keep,
    relax_exponents,
    sample,
    scalar_product,
    split,
    stack,
    support,
    tighten_independent,
)

GOOD: dict[str, Any] = {
    "c": [0.0, 1.0],
    "G": [[1.0, 2.0], [0.0, 1.0]],
    "E": [[1, 0], [1, 2]],
    "GI": [[1.0], [0.0]],
    "ids": [1, 2],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"c": [[0.0, 1.0]]}, "c must be a vector"),
        ({"c": [0.0, float("nan")]}, "c contains NaN"),
        ({"c": "abc"}, "c is not a numeric array"),
        ({"G": [[1.0, 2.0]]}, "G must be 2 × 2"),
        ({"G": [[1.0, float("inf")], [0.0, 1.0]]}, "G contains NaN or infinite"),
        ({"E": [[1, 0], [1, -2]]}, "E must not hold negative"),
        ({"E": [[1, 0.5], [1, 2]]}, "E must hold integers"),
        ({"E": [1, 0]}, "E must be a matrix"),
        ({"E": [[1], [1]]}, "G must be 2 × 1"),
        ({"GI": [[1.0]]}, "GI must be 2 × any"),
        ({"ids": [1, 1]}, "must not repeat"),
        ({"ids": [1]}, "1 ids for 2 factors"),
        ({"ids": [-1, 2]}, "not be negative"),
        ({"ids": ["a", "b"]}, "ids must be integers"),
        ({"A": [[1.0]], "b": [0.0], "R": [[1]]}, "R has 1 rows"),
        ({"A": [[1.0, 2.0]], "b": [0.0], "R": [[1], [0]]}, "A must be 1 × 1"),
        ({"A": [[1.0]], "b": [0.0, 1.0], "R": [[1], [0]]}, "A must be 2 × 1"),
        ({"box": Interval([0.0], [1.0])}, "the box has shape"),
        ({"c": np.array([Fraction(0), Fraction(1)], dtype=object)}, "not a mixture"),
    ],
)
def test_ill_formed_sets_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SetError, match=message):
        ConstrainedPolynomialZonotope(**(GOOD | change))


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda z: affine_map(z, torch.zeros(2, 3)), "does not act"),
        (lambda z: exact_sum(z, PolynomialZonotope([0.0])), "dimensions 2 and 1"),
        (lambda z: elementwise_product(z, PolynomialZonotope([0.0])), "dimensions 2 and 1"),
        (lambda z: scalar_product(z, z), "one-dimensional"),
        (lambda z: quadratic_map(z, []), "at least one matrix"),
        (lambda z: reduce_keep(z, -1), "cannot keep"),
        (lambda z: reduce_girard(z, 0.5), "below 1"),
        (lambda z: relax_exponents(z, 1), "at least 2"),
        (lambda z: split(z, 5), "no factor 5"),
        (lambda z: stack(), "at least one set"),
        (lambda z: support(z, torch.zeros(3, dtype=torch.float64)), "direction"),
        (lambda z: Interval([1.0], [0.0]), "lower <= upper"),
        (lambda z: Interval([1.0], [1.0, 2.0]), "shape"),
        (lambda z: Zonotope([0.0], [[1.0], [2.0]]), "1 rows"),
        (
            lambda z: tighten_independent(
                tighten_independent(z, Interval([0.0] * 2, [1.0] * 2)), Interval([2.0] * 2, [3.0] * 2)
            ),
            "do not meet",
        ),
    ],
)
def test_operations_that_do_not_apply_are_refused(
    attempt: Callable[[ConstrainedPolynomialZonotope], object], message: str
) -> None:
    with pytest.raises(SetError, match=message):
        attempt(ConstrainedPolynomialZonotope(**GOOD))


def test_counts_per_stage_are_readable() -> None:
    z = PolynomialZonotope(**GOOD)
    assert (z.dim, z.factors, z.dependent, z.independent, z.constraints, z.order) == (2, 2, 2, 1, 0, 1.5)
    assert repr(z) == "PolynomialZonotope(dim=2, factors=2, dependent=2, independent=1, constraints=0)"


def test_fresh_ids_never_meet_those_in_use() -> None:
    z = PolynomialZonotope([0.0], [[1.0]], [[1]], ids=[10**6])
    minted = fresh_ids(3)
    assert min(minted) > z.ids[0]
    assert not set(minted) & set(PolynomialZonotope([0.0], [[1.0]]).ids)


def test_interval_arithmetic_rounds_outward() -> None:
    """0.1 + 0.2 and 0.1·3 in exact rationals lie inside."""
    x, y = Interval([0.1], [0.1]), Interval([0.2], [0.3])
    total, product, difference = x + y, x * y, x - y
    assert Fraction(total.lower.item()) <= Fraction(0.1) + Fraction(0.2) <= Fraction(total.upper.item())
    assert Fraction(product.lower.item()) <= Fraction(0.1) * Fraction(0.3) <= Fraction(product.upper.item())
    assert Fraction(difference.lower.item()) <= Fraction(0.1) - Fraction(0.3)
    assert x.intersect(y) is None
    image = y.affine_map(torch.tensor([[-1.0], [2.0]], dtype=torch.float64))
    assert bool((image.lower <= torch.tensor([-0.3, 0.4], dtype=torch.float64)).all())
    assert y.dim == 1
    assert float(y.center[0] - y.radius[0]) <= 0.2


def test_plot_shows_points_inside_both_outlines() -> None:
    pytest.importorskip("matplotlib")
    from prooflens.sets.plot import plot, zonotope_outline

    z = ConstrainedPolynomialZonotope(**GOOD, A=[[1.0, 1.0]], b=[0.25], R=[[1, 0], [0, 1]])
    axes = plot(z, points=500)
    assert [line.get_label() for line in axes.lines] == ["zonotope enclosure", "interval enclosure"]
    cloud = np.asarray(axes.collections[0].get_offsets())
    assert len(cloud) > 0
    hull = interval_enclosure(z, method="best")
    assert bool(hull.contains(torch.tensor(cloud)).all())
    square = zonotope_outline(Zonotope([1.0, 1.0], [[1.0, 0.0], [0.0, -1.0]]))
    assert sorted(map(tuple, square.tolist())) == [(0.0, 0.0), (0.0, 2.0), (2.0, 0.0), (2.0, 2.0)]
    with pytest.raises(SetError, match="cannot draw"):
        plot(z, dims=(0, 2))


def listed(*numbers: float) -> Any:
    """A list where a tensor is declared: whoever checks no types may give one."""
    return list(numbers)


def test_lists_and_names_of_factors() -> None:
    z = PolynomialZonotope([1.0, 0.0], [[0.5, 0.0], [0.0, 0.25]], ids=[7, 9])
    assert evaluate(z, {9: 1.0, 7: -1.0}).tolist() == evaluate(z, listed(-1.0, 1.0)).tolist() == [0.5, 0.25]
    assert support(z, listed(1.0, 0.0)).upper == pytest.approx(1.5)
    assert contains(z, listed(1.5, 0.25)) is True
    assert bool(Interval([0.0], [1.0]).contains(listed(0.5)))
    assert sample(z, 5).tolist() == sample(z, 5).tolist()
    for broken, message in (
        (lambda: evaluate(z, {7: 1.0}), "no value is given for the factors"),
        (lambda: evaluate(z, listed(1.0)), "for 2 factors"),
        (lambda: evaluate(z, listed(1.0, 1.0), listed(1.0)), "independent factors"),
        (lambda: contains(z, listed(1.0)), "the point has shape"),
        (lambda: support(z, listed(float("nan"), 0.0)), "NaN"),
        (lambda: interval_enclosure(z, method="finest"), "there is no method 'finest'"),  # type: ignore[arg-type]
        (lambda: stack([z, z]), "an argument of its own"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SetError, match=message):
            broken()


@pytest.mark.parametrize("seed", range(6))
def test_the_box_counts_in_support_and_emptiness(seed: int) -> None:
    """Against a fine grid of factors: p(α) = a₁α₁ + a₂α₁α₂ + b β in a box that cuts it, or misses it."""
    g = torch.Generator().manual_seed(seed)
    a1, a2, b, low = (
        torch.rand(4, generator=g, dtype=torch.float64) * torch.tensor([1, 1, 0.5, 2.5])
    ).tolist()
    box = Interval([low], [low + 0.5])
    z = ConstrainedPolynomialZonotope([0.0], [[a1, a2]], [[1, 1], [0, 1]], [[b]], box=box)
    line = torch.linspace(-1.0, 1.0, 41, dtype=torch.float64)
    x, y, w = torch.meshgrid(line, line, line, indexing="ij")
    values = (a1 * x + a2 * x * y + b * w).flatten()
    inside = values[(values >= low) & (values <= low + 0.5)]
    if not len(inside):
        assert is_empty(z) is True
        return
    assert is_empty(z, max_cells=20) is not True
    for sign in (1.0, -1.0):
        found = support(z, listed(sign))
        true = float((sign * inside).max())
        assert found.upper >= true
        assert found.attained <= found.upper + 1e-8
        assert abs(found.attained - true) < 0.06
        assert found.attained <= max(sign * low, sign * (low + 0.5)) + 1e-8
    hull = constrained_enclosure(z)
    assert bool((hull.lower <= inside.min()).all() and (hull.upper >= inside.max()).all())
