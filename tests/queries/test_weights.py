"""Weight boxes against samples of scores, vertices of the score box and each other; row 7 of the soundness list."""

import itertools
import math

import pytest
import torch

from prooflens.errors import EmptyPolytopeError, QueryError
from prooflens.queries.simplex import Box
from prooflens.queries.weights import (
    chord_pieces,
    differences_from_scores,
    from_differences,
    from_scores,
    interval_softmax,
    mass_from_differences,
    mass_from_scores,
    piecewise_chord,
    vertex_softmax,
    weight_box,
)


def score_boxes(count: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centre = 3 * torch.randn(count, size, generator=generator, dtype=torch.float64)
    width = 2 * torch.rand(count, size, generator=generator, dtype=torch.float64)
    width[::5] = 0.0
    return centre - width, centre + width


def vertices(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    size = lower.shape[-1]
    sides = torch.tensor(list(itertools.product((False, True), repeat=size)))
    return torch.where(sides, upper[:, None], lower[:, None])


def contains(outer: Box, inner: Box) -> bool:
    """Up to the rounding by which two correct boxes of zero width may differ."""
    rounding = 1e-14
    return bool(
        (outer.lower <= inner.lower + rounding).all() and (outer.upper >= inner.upper - rounding).all()
    )


@pytest.mark.parametrize("size", range(1, 7))
def test_vertex_softmax_box_is_exact(size: int) -> None:
    lower, upper = score_boxes(300, size, seed=size)
    weights = vertices(lower, upper).softmax(-1)
    box = from_scores(lower, upper)
    torch.testing.assert_close(box.lower, weights.amin(1), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(box.upper, weights.amax(1), rtol=1e-13, atol=1e-15)
    rounding = 1e-15
    assert (box.lower <= weights.amin(1) + rounding).all()
    assert (box.upper >= weights.amax(1) - rounding).all()
    assert contains(interval_softmax(lower, upper), box)
    for pieces in (1, 4, 64):
        assert contains(piecewise_chord(lower, upper, pieces), Box(weights.amin(1), weights.amax(1)))


@pytest.mark.parametrize("size", range(1, 7))
def test_vertex_softmax_of_a_linear_objective(size: int) -> None:
    """Threshold structure: max Σ c s over a score box equals the best of all 2^S vertices."""
    lower, upper = score_boxes(300, size, seed=50 + size)
    cost = torch.randn(300, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    cost[::3] = cost[::3].sign()
    best = (vertices(lower, upper).softmax(-1) * cost[:, None]).sum(-1).amax(1)
    bound = vertex_softmax(cost, lower, upper)
    torch.testing.assert_close(bound, best, rtol=0, atol=1e-12)
    assert (bound >= best - 1e-15).all()


def test_vertex_softmax_of_costs_whose_products_vanish() -> None:
    """No less than what the same costs give when they are larger by a power of two."""
    for cost, depth in ((8.0 * 2.0**-1074, 200.0), (2.0**-700, 590.0)):
        low = torch.tensor([0.0, -depth, -depth], dtype=torch.float64)
        costs = torch.tensor([-1e3 * cost, cost, 0.0], dtype=torch.float64)
        far = torch.tensor([-depth, -depth, -depth], dtype=torch.float64)
        bound = vertex_softmax(costs, far, low)
        assert bound >= vertex_softmax(costs * 2.0**700, far, low) * 2.0**-700


def test_mass_over_a_score_box_is_exact() -> None:
    lower, upper = score_boxes(400, 6, seed=3)
    group = torch.rand(400, 6, generator=torch.Generator().manual_seed(3)) < 0.4
    mass = (vertices(lower, upper).softmax(-1) * group[:, None]).sum(-1)
    below, above = mass_from_scores(group, lower, upper)
    torch.testing.assert_close(below, mass.amin(1), rtol=0, atol=1e-13)
    torch.testing.assert_close(above, mass.amax(1), rtol=0, atol=1e-13)
    wider = mass_from_differences(group, differences_from_scores(lower, upper))
    assert (wider[0] <= below + 1e-14).all()
    assert (wider[1] >= above - 1e-14).all()


def test_pairwise_differences_are_the_tightest() -> None:
    """Scores that move together: differences know it, a box of scores does not."""
    centre, _ = score_boxes(200, 5, seed=8)
    generator = torch.Generator().manual_seed(8)
    common = torch.rand(200, 400, 1, generator=generator, dtype=torch.float64) * 4 - 2
    own = (torch.rand(200, 400, 5, generator=generator, dtype=torch.float64) * 2 - 1) * 0.05
    scores = centre[:, None] + common + own
    differences = (scores[..., :, None] - scores[..., None, :]).amax(1)
    low, high = scores.amin(1), scores.amax(1)
    both = weight_box(low, high, differences)
    weights = scores.softmax(-1)
    assert (both.lower <= weights.amin(1)).all()
    assert (both.upper >= weights.amax(1)).all()
    box_only, pairs_only = weight_box(low, high), weight_box(differences=differences)
    for single in (box_only, pairs_only):
        assert contains(single, both)
    assert float((pairs_only.upper - pairs_only.lower).mean()) < 0.5 * float(
        (box_only.upper - box_only.lower).mean()
    )
    group = torch.tensor([True, True, False, False, False]).expand(200, 5)
    below, above = mass_from_differences(group, differences)
    mass = weights[..., :2].sum(-1)
    assert (below <= mass.amin(1)).all()
    assert (above >= mass.amax(1)).all()


def test_row_7_the_minimum_over_pieces_is_not_a_bound() -> None:
    """Eq. joint_softmax on two tokens, a_1 ∈ [−1, 1], a_2 = 0, four pieces: the minimum excludes a_1 = 1."""
    lower = torch.tensor([[-1.0, 0.0]], dtype=torch.float64)
    upper = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    attained = float(upper.softmax(-1)[0, 0])
    pieces = chord_pieces(lower, upper, 4)
    assert float(pieces.upper.amin(0)[0, 0]) < attained - 0.2, "the paper's minimum cuts off a point"
    assert float(piecewise_chord(lower, upper, 4).upper[0, 0]) >= attained


def test_chords_close_in_on_the_optimum() -> None:
    lower, upper = score_boxes(100, 5, seed=4)
    exact = from_scores(lower, upper)
    slack = [
        float((piecewise_chord(lower, upper, pieces).upper - exact.upper).mean()) for pieces in (1, 4, 16, 64)
    ]
    assert slack == sorted(slack, reverse=True)
    assert slack[-1] < 0.1 * slack[0] + 1e-12


@pytest.mark.parametrize("source", [from_scores, interval_softmax, piecewise_chord])
def test_masked_keys_take_no_part(source: object) -> None:
    assert callable(source)
    lower, upper = score_boxes(50, 5, seed=6)
    mask = torch.tensor([True, False, True, True, False])
    hidden_low, hidden_high = lower.clone(), upper.clone()
    hidden_low[:, ~mask], hidden_high[:, ~mask] = -float("inf"), float("inf")
    box = source(hidden_low, hidden_high, mask=mask)
    alone = source(lower[:, mask], upper[:, mask])
    assert not box.lower[:, ~mask].any()
    assert not box.upper[:, ~mask].any()
    torch.testing.assert_close(box.lower[:, mask], alone.lower, rtol=1e-14, atol=0)
    torch.testing.assert_close(box.upper[:, mask], alone.upper, rtol=1e-14, atol=0)


def test_masked_differences_masses_and_objectives() -> None:
    lower, upper = score_boxes(50, 5, seed=16)
    mask = torch.tensor([True, False, True, True, False])
    keep = mask.nonzero().flatten()
    D = differences_from_scores(lower, upper)
    inner = D[:, keep][..., keep]
    torch.testing.assert_close(from_differences(D, mask).upper[:, mask], from_differences(inner).upper)
    group = torch.tensor([True, True, False, False, True]).expand(50, 5)
    visible = lower[:, mask], upper[:, mask]
    for got, wanted in (
        (mass_from_scores(group, lower, upper, mask), mass_from_scores(group[:, mask], *visible)),
        (mass_from_differences(group, D, mask), mass_from_differences(group[:, mask], inner)),
    ):
        torch.testing.assert_close(torch.stack(got), torch.stack(wanted), rtol=1e-13, atol=1e-15)
    cost = torch.arange(5.0, dtype=torch.float64)
    torch.testing.assert_close(
        vertex_softmax(cost, lower, upper, mask), vertex_softmax(cost[mask], *visible), rtol=0, atol=1e-12
    )


def test_one_visible_key_has_weight_one() -> None:
    mask = torch.tensor([True, False])
    box = weight_box(torch.tensor([-3.0, 0.0]).double(), torch.tensor([5.0, 0.0]).double(), mask=mask)
    assert box.lower.tolist() == pytest.approx([1.0, 0.0], abs=1e-14)
    assert box.upper.tolist() == [1.0, 0.0]


def test_a_row_without_keys_is_an_error() -> None:
    scores = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(EmptyPolytopeError, match="less than 1"):
        weight_box(scores, scores, mask=torch.tensor([False, False]))
    with pytest.raises(QueryError, match="needs a box of scores"):
        weight_box()


def test_extreme_scores_stay_sound() -> None:
    """Gaps beyond the range of e^x: bounds stay in [0, 1] and keep both ends."""
    lower = torch.tensor([[0.0, -2000.0, 1e4]], dtype=torch.float64)
    upper = torch.tensor([[2000.0, 2000.0, 1e4]], dtype=torch.float64)
    for box in (weight_box(lower, upper), weight_box(differences=differences_from_scores(lower, upper))):
        assert ((box.lower >= 0) & (box.upper <= 1)).all()
        assert float(box.upper[0, 2]) == 1.0
    wide = torch.tensor([-2000.0, 0.0], dtype=torch.float64), torch.tensor([2000.0, 0.0], dtype=torch.float64)
    assert float(vertex_softmax(torch.tensor([2.0, 1.0]), *wide)) == 2.0


@pytest.mark.parametrize("source", [from_scores, interval_softmax, piecewise_chord])
def test_scores_without_bounds_leave_every_weight(source: object) -> None:
    """An engine that knows nothing of a score says ±∞: the weight of that key may then be anything."""
    low = torch.tensor([-math.inf, 0.0, 0.0], dtype=torch.float64)
    high = torch.tensor([math.inf, 0.1, 0.1], dtype=torch.float64)
    for lower in (low, low.clamp_min(0.0), low.clamp_min(-2000.0) - 1000.0):
        for box in (source(lower, high), weight_box(lower, high)):  # type: ignore[operator]
            for first in (-50.0, 0.0, 50.0):
                scores = torch.tensor([max(first, float(lower[0])), 0.05, 0.1], dtype=torch.float64)
                weights = scores.softmax(-1)
                assert bool((box.lower <= weights).all() and (weights <= box.upper).all())
    group = torch.tensor([True, False, False])
    assert tuple(map(float, mass_from_scores(group, low, high))) == (0.0, 1.0)
    cost = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert float(vertex_softmax(cost, low, high)) == 1.0
