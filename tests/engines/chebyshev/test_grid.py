"""Interpolation at Chebyshev points: what it misses is never more than is said."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines.chebyshev.grid import RADII, Grid
from prooflens.engines.chebyshev.ranges import polynomial_range

LIKE = torch.zeros(1, dtype=torch.float64)


def evaluated(grid: Grid, runs: Tensor, points: Tensor) -> Tensor:
    """The interpolant of runs [N] at points [n, k], by products of Chebyshev polynomials."""
    coefficients, _ = grid.coefficients(runs[None])
    found = torch.zeros(len(points), dtype=torch.float64)
    for m in range(grid.size):
        value = torch.ones(len(points), dtype=torch.float64)
        for i, n in enumerate(grid.exponents[:, m].tolist()):
            value = value * torch.cos(n * torch.acos(points[:, i].clamp(-1.0, 1.0)))
        found = found + coefficients[0, m] * value
    return found


@given(
    st.integers(1, 8),
    st.floats(0.05, 2.5),
    st.floats(-2.0, 2.0),
)
def test_the_defect_of_an_exponential_is_never_more_than_its_bound(
    degree: int, steep: float, shift: float
) -> None:
    grid = Grid((degree,), LIKE)
    runs = torch.exp(steep * grid.points[:, 0] + shift)
    points = torch.linspace(-1.0, 1.0, 301, dtype=torch.float64)[:, None]
    gap = (evaluated(grid, runs, points) - torch.exp(steep * points[:, 0] + shift)).abs().max()
    most = torch.tensor([[math.exp(steep * 0.5 * (r + 1 / r) + shift)] for r in RADII], dtype=torch.float64)
    assert float(gap) <= float(grid.defect(most[None])[0]) + 1e-12


@given(st.integers(1, 4), st.integers(1, 4), st.floats(0.1, 1.2), st.floats(0.1, 1.2))
def test_two_factors_add_up_their_defects(first: int, second: int, a: float, b: float) -> None:
    grid = Grid((first, second), LIKE)

    def function(x: Tensor) -> Tensor:
        return torch.exp(a * x[:, 0]) * torch.cos(b * x[:, 1])

    generator = torch.Generator().manual_seed(first + 7 * second)
    points = torch.rand(400, 2, generator=generator, dtype=torch.float64) * 2.0 - 1.0
    gap = (evaluated(grid, function(grid.points), points) - function(points)).abs().max()
    most = torch.empty(2, len(RADII), 1, dtype=torch.float64)
    for i, r in enumerate(RADII):
        most[0, i] = math.exp(a * 0.5 * (r + 1 / r))
        most[1, i] = math.exp(a) * math.cosh(b * 0.5 * (r + 1 / r))
    assert float(gap) <= float(grid.defect(most)[0]) + 1e-12


@given(st.integers(1, 6), st.integers(0, 10**6))
def test_polynomials_of_the_grids_degree_are_interpolated_and_refined_without_error(
    degree: int, seed: int
) -> None:
    grid = Grid((degree,), LIKE)
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randn(degree + 1, generator=generator, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return sum(c * x**n for n, c in enumerate(powers.tolist()))  # type: ignore[return-value]

    runs = function(grid.points[:, 0])
    points = torch.linspace(-1.0, 1.0, 50, dtype=torch.float64)[:, None]
    assert torch.allclose(evaluated(grid, runs, points), function(points[:, 0]), atol=1e-10)
    fine = grid.finer
    places, off = fine.at(runs[None, :, None])
    exact = function(fine.grid.points[:, 0])
    assert bool(((places[0, :, 0] - exact).abs() <= off[0] + 1e-12 * exact.abs().max()).all())
    assert float(fine.apart(runs[None, :, None], exact[None, :, None])[0, 0]) < 1e-9


@given(st.integers(1, 6), st.integers(0, 10**6))
def test_how_far_two_interpolants_are_apart_is_seen(degree: int, seed: int) -> None:
    grid = Grid((degree,), LIKE)
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(2, generator=generator, dtype=torch.float64) * 3.0).tolist()

    def function(x: Tensor) -> Tensor:
        return torch.sin(a * x + b)

    runs, fine = function(grid.points[:, 0]), grid.finer
    fine_runs = function(fine.grid.points[:, 0])
    points = torch.linspace(-1.0, 1.0, 101, dtype=torch.float64)[:, None]
    gap = (evaluated(grid, runs, points) - evaluated(fine.grid, fine_runs, points)).abs().max()
    assert float(gap) <= float(fine.apart(runs[None, :, None], fine_runs[None, :, None])[0, 0]) + 1e-13


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 10**6))
def test_ranges_hold_every_value(degrees: list[int], seed: int) -> None:
    grid = Grid(tuple(degrees), LIKE)
    generator = torch.Generator().manual_seed(seed)
    runs = torch.randn(grid.size, generator=generator, dtype=torch.float64)
    coefficients, off = grid.coefficients(runs[None, :, None])
    lower, upper = polynomial_range(grid, coefficients, off)
    points = torch.rand(300, len(degrees), generator=generator, dtype=torch.float64) * 2.0 - 1.0
    points = torch.cat((points, points.sign()))
    values = evaluated(grid, runs, points)
    assert float(lower) <= float(values.min()) + 1e-12
    assert float(values.max()) - 1e-12 <= float(upper)


def test_a_range_is_nearly_attained() -> None:
    grid = Grid((6,), LIKE)
    runs = torch.sin(2.0 * grid.points[:, 0])
    lower, upper = polynomial_range(grid, *grid.coefficients(runs[None, :, None]))
    values = evaluated(grid, runs, torch.linspace(-1.0, 1.0, 2001, dtype=torch.float64)[:, None])
    assert float(upper - lower) < 1.03 * float(values.max() - values.min())


@pytest.mark.parametrize("degrees", [(3,), (2, 2), (10,)])
def test_an_interpolant_is_at_most_lebesgue_times_its_runs(degrees: tuple[int, ...]) -> None:
    grid = Grid(degrees, LIKE)
    points = torch.rand(500, len(degrees), dtype=torch.float64) * 2.0 - 1.0
    for seed in range(20):
        signs = torch.randn(
            grid.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).sign()
        assert float(evaluated(grid, signs, points).abs().max()) <= grid.lebesgue
