"""Regions: every way to make one, what they contain, and what they refuse."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens.errors import RegionError
from prooflens.models import Prompt
from prooflens.regions import Ball, Constraints, Paraphrases, Region
from prooflens.verdicts.question import as_region

X = torch.arange(12, dtype=torch.float64).reshape(4, 3)


def test_ball_on_all_tokens() -> None:
    region = Ball(0.1).around(X)
    assert region.n_factors == 12
    assert region.contains(X + 0.1 * 0.999)
    assert not region.contains(X + 0.11)
    assert torch.equal(region.half_widths(), torch.full_like(X, 0.1))


def test_ball_on_chosen_tokens() -> None:
    region = Ball(0.1, tokens=[1, -1]).around(X)
    assert region.n_factors == 6
    moved = X.clone()
    moved[0, 0] += 0.01
    assert not region.contains(moved)
    moved = X.clone()
    moved[3] += 0.05
    assert region.contains(moved)


def test_per_token_radii() -> None:
    listed = Ball([0.1, 0.0, 0.2, 0.3]).around(X)
    mapped = Ball({0: 0.1, 2: 0.2, 3: 0.3}).around(Prompt(X, ("a", "b", "c", "d")))
    assert torch.equal(listed.half_widths(), mapped.half_widths())
    assert listed.n_factors == 9


def test_paraphrase_hull_holds_the_paraphrases() -> None:
    texts = [X, X + 1, X * 0.5, X - 2]
    for convex in (False, True):
        region = Paraphrases(texts, convex).region()
        assert region.n_factors == 4
        for text in texts:
            assert region.contains(text, 1e-7)
        assert not region.contains(X + 50)
    assert not Paraphrases(texts, convex=True).region().contains(X + 2, 1e-7)


def test_constraints_are_respected_by_samples_and_corners() -> None:
    generators = torch.eye(3, dtype=torch.float64)[:, None, :] * torch.ones(1, 2, 1, dtype=torch.float64)
    sum_is_one = Constraints.of(3, torch.ones(1, 3), torch.ones(1))
    region = Region(torch.zeros(2, 3, dtype=torch.float64), generators=generators, constraints=sum_is_one)
    _, alpha = region.sample(200, seed=1)
    assert len(alpha) > 150
    assert float((alpha.sum(-1) - 1).abs().max()) < 1e-8
    assert region.corners().shape[0] == 3
    assert region.contains(torch.tensor([[1.0, 1.0, -1.0]] * 2, dtype=torch.float64), 1e-7)
    assert not region.contains(torch.tensor([[1.0, 1.0, 1.0]] * 2, dtype=torch.float64), 1e-7)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), eps=st.floats(1e-6, 10.0), corners=st.floats(0.0, 1.0))
def test_samples_lie_inside(seed: int, eps: float, corners: float) -> None:
    region = Ball(eps, tokens=[0, 2]).around(X)
    points, alpha = region.sample(8, seed, corners)
    assert points.shape == (8, 4, 3)
    assert float(alpha.abs().max()) <= 1.0
    for point in points:
        assert region.contains(point, 1e-12 * (1 + eps))


def test_samples_are_reproducible() -> None:
    region = Ball(0.1).around(X)
    assert torch.equal(region.sample(5, seed=7)[0], region.sample(5, seed=7)[0])
    assert not torch.equal(region.sample(5, seed=7)[0], region.sample(5, seed=8)[0])


def test_pullback_is_the_adjoint_of_point() -> None:
    dense = Region(X, generators=Ball(0.1, tokens=[1]).around(X).dense_generators())
    for region in (Ball(0.1, tokens=[1]).around(X), dense):
        alpha = torch.randn(region.n_factors, dtype=torch.float64)
        covector = torch.randn(4, 3, dtype=torch.float64)
        left = (region.point(alpha) - X).mul(covector).sum()
        assert torch.allclose(left, alpha @ region.pullback(covector))


def test_corners_of_a_small_ball() -> None:
    corners = Ball(0.5, tokens=[0]).around(X).corners()
    assert corners.shape == (8, 4, 3)
    assert torch.equal(corners[:, 1:], X[1:].expand(8, 3, 3))
    with pytest.raises(RegionError, match="too many corners"):
        Ball(0.5).around(torch.zeros(3, 7, dtype=torch.float64)).corners()


def test_scaling_multiplies_the_radius() -> None:
    region = Ball(0.1).around(X).scaled(3.0)
    assert torch.allclose(region.half_widths(), torch.full_like(X, 0.3))


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_radii(eps: float) -> None:
    with pytest.raises(RegionError, match="positive finite"):
        Ball(eps).around(X)


@pytest.mark.parametrize("eps", ["0.1", None, [0.1, "a", 0.1, 0.1], {0: None}])
def test_radii_that_are_no_numbers(eps: object) -> None:
    with pytest.raises(RegionError, match="positive finite"):
        Ball(eps).around(X)  # type: ignore[arg-type]


def test_arrays_and_other_precisions() -> None:
    expected = Ball([0.1, 0.0, 0.2, 0.3]).around(X)
    radii = np.array([0.1, 0.0, 0.2, 0.3])
    arrays: list[Any] = [radii, torch.from_numpy(radii)]
    for array in arrays:
        assert torch.equal(Ball(array).around(X).half_widths(), expected.half_widths())
    assert torch.equal(Ball(0.1, tokens=2).around(X).half_widths(), Ball({2: 0.1}).around(X).half_widths())
    region = Region(X.numpy(), generators=torch.ones(2, 4, 3, dtype=torch.float32))  # type: ignore[arg-type]
    assert region.generators is not None
    assert region.generators.dtype == region.center.dtype == torch.float64
    held = Constraints.of(2, [[1.0, 1.0]], np.zeros(1))  # type: ignore[arg-type]
    assert held.A_eq.dtype == torch.float64


def test_the_centre_may_lie_outside_of_the_constraints() -> None:
    G = torch.ones(1, 4, 3, dtype=torch.float64)
    assert Region(X, generators=G).holds_reference
    assert Region(
        X, generators=G, constraints=Constraints.of(1, A_ub=torch.ones(1, 1), b_ub=torch.ones(1))
    ).holds_reference
    away = Region(X, generators=G, constraints=Constraints.of(1, torch.ones(1, 1), torch.ones(1)))
    assert not away.holds_reference
    assert not away.contains(X)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_points_of_their_own_factors_are_contained(seed: int) -> None:
    """Also at scales at which a solver's own tolerances are coarse, and with constraints; points beyond are not."""
    g = torch.Generator().manual_seed(seed)
    n, eps = seed % 5 + 1, 10.0 ** (-seed % 7 - 1)
    G = torch.randn(n, 4, 3, generator=g, dtype=torch.float64) * eps
    rows = torch.randn(2, n, generator=g, dtype=torch.float64)
    for held in (None, Constraints.of(n, A_ub=rows, b_ub=torch.tensor([0.3, 0.1]))):
        region = Region(X, generators=G, constraints=held)
        points, alpha = region.sample(5, seed)
        assert region.contains(X)
        assert all(region.contains(point) for point in points)
        assert not region.contains(X + 1.01 * region.half_widths() + 1e-8)
        assert len(alpha) == 5 or held is not None


def test_other_bad_regions() -> None:
    with pytest.raises(RegionError, match="not both"):
        Ball({0: 0.1}, tokens=[1]).around(X)
    for token in (1.5, "the"):
        with pytest.raises(RegionError, match="no token"):
            Ball(0.1, tokens=[token]).around(X)  # type: ignore[list-item]
    with pytest.raises(RegionError, match=r"radius must have shape \[4, 3\]"):
        Region(X, radius=0.1)  # type: ignore[arg-type]
    with pytest.raises(RegionError, match="tensor of numbers"):
        Region("text", radius=X)  # type: ignore[arg-type]
    with pytest.raises(RegionError, match=r"Constraints\.of"):
        Region(X, radius=X, constraints={"A_eq": X})  # type: ignore[arg-type]
    with pytest.raises(RegionError, match="of\\(model\\)"):
        Paraphrases(["one text", "another"]).region()
    with pytest.raises(RegionError, match="a list"):
        Paraphrases("one text").region()
    with pytest.raises(RegionError, match="no token 4"):
        Ball(0.1, tokens=[4]).around(X)
    with pytest.raises(RegionError, match="3 radii for 4 tokens"):
        Ball([0.1, 0.1, 0.1]).around(X)
    with pytest.raises(RegionError, match="no token moves"):
        Ball([0.0] * 4).around(X)
    with pytest.raises(RegionError, match="equal length"):
        Paraphrases([X, X[:3]]).region()
    with pytest.raises(RegionError, match="at least two"):
        Paraphrases([X]).region()
    with pytest.raises(RegionError, match="NaN"):
        Region(X * float("nan"), radius=torch.ones_like(X))
    with pytest.raises(RegionError, match="not both"):
        Region(X)
    with pytest.raises(RegionError, match="constraints"):
        Constraints.of(3, torch.ones(1, 2), torch.ones(1))


def test_a_mask_of_tokens_is_not_read_as_indices() -> None:
    with pytest.raises(RegionError, match="no token True"):
        Ball(0.1, [True, False]).around(X)


def test_lists_are_float64_and_the_finer_precision_is_kept() -> None:
    assert Region(X.tolist(), radius=X.tolist()).center.dtype == torch.float64  # type: ignore[arg-type]
    mixed = Region(X.float(), radius=X / 3)
    assert mixed.center.dtype == torch.float64
    assert torch.equal(mixed.radius, X / 3)  # type: ignore[arg-type]


def test_a_point_of_a_wide_constrained_ball_is_found_in_it() -> None:
    """As many factors as a sentence of a pretrained model has: the program must be sparse."""
    x = torch.zeros(8, 384, dtype=torch.float64)
    half = Constraints.of(x.numel(), A_ub=torch.ones(1, x.numel()), b_ub=torch.zeros(1))
    region = Region(x, radius=torch.full_like(x, 1e-3), constraints=half)
    assert region.contains(x - 5e-4)
    assert not region.contains(x + 5e-4)


def test_a_token_has_one_radius() -> None:
    with pytest.raises(RegionError, match="two radii"):
        Ball({-1: 0.1, 3: 0.2}).around(X)
    prompt = Prompt(X, ("a", "b", "a", "d"))
    with pytest.raises(RegionError, match="two radii"):
        as_region(Ball({"a": 0.1, 2: 0.2}), prompt)  # type: ignore[arg-type]


def test_a_float32_hull_answers_as_a_float64_one() -> None:
    points = [torch.zeros(2, 3), torch.ones(2, 3)]
    coarse, fine = (Paraphrases([x.to(kind) for x in points], convex=True).region() for kind in KINDS)
    assert coarse.holds_reference == fine.holds_reference
    for x in (*points, 0.5 * torch.ones(2, 3), 2.0 * torch.ones(2, 3)):
        assert bool(coarse.contains(x)) == bool(fine.contains(x.double()))


KINDS = (torch.float32, torch.float64)
