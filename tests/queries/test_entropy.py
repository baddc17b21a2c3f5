"""Entropy ranges against dense vertex enumeration, bisection, samples; rows 5 and 6 of the soundness list."""

import math

import pytest
import torch

from prooflens.queries.entropy import entropy_of, entropy_range
from prooflens.queries.simplex import argmin

from .boxes import candidate_vertices, random_boxes


def brute_minimum(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """The least entropy over all vertices: one free token, every choice of a bound for the others."""
    best = torch.full((lower.shape[0],), math.inf, dtype=torch.float64)
    for vertex, fits in candidate_vertices(lower, upper):
        entropy = torch.special.entr(vertex).sum(-1)
        best = torch.where(fits, torch.minimum(best, entropy), best)
    return best


def bisected_maximum(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """The entropy of the water-filling point after 200 bisections."""
    left, right = torch.zeros_like(lower[:, :1]), torch.ones_like(lower[:, :1])
    for _ in range(200):
        middle = (left + right) / 2
        short = torch.minimum(torch.maximum(middle, lower), upper).sum(-1, keepdim=True) < 1
        left, right = torch.where(short, middle, left), torch.where(short, right, middle)
    found: torch.Tensor = torch.special.entr(torch.minimum(torch.maximum(right, lower), upper)).sum(-1)
    return found


@pytest.mark.parametrize("size", range(1, 9))
def test_range_against_vertices_and_bisection(size: int) -> None:
    """10,000 boxes: the exact range up to rounding; without enumeration a safe lower bound, mostly the same."""
    lower, upper, point = random_boxes(1250, size, seed=300 + size)
    below, above = entropy_range(lower, upper)
    least, most = brute_minimum(lower, upper), bisected_maximum(lower, upper)
    torch.testing.assert_close(below, least, rtol=0, atol=2e-11)
    torch.testing.assert_close(above, most, rtol=0, atol=1e-11)
    assert (below <= least + 1e-15).all()
    assert (above >= most - 1e-15).all()
    quick, same_above = entropy_range(lower, upper, exact=False)
    assert (quick <= least + 1e-15).all()
    assert torch.equal(above, same_above)
    assert (quick >= below - 1e-10).double().mean() > 0.8
    here = torch.special.entr(point).sum(-1)
    assert (below <= here).all()
    assert (here <= above).all()


def test_wide_rows_contain_samples() -> None:
    lower, upper, _ = random_boxes(300, 40, seed=7)
    below, above = entropy_range(lower, upper)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        cost = torch.randn(300, 40, generator=generator, dtype=torch.float64)
        entropy = torch.special.entr(argmin(cost, lower, upper)).sum(-1)
        assert (below <= entropy + 1e-13).all()
        assert (entropy <= above + 1e-13).all()


def test_exact_range_of_twelve_tokens() -> None:
    """The largest enumerated size: 12 equal boxes [0, 1/6] leave at least six tokens, log 6 to log 12."""
    lower = torch.zeros(2, 12, dtype=torch.float64)
    below, above = entropy_range(lower, torch.full_like(lower, 1 / 6))
    assert below.tolist() == pytest.approx([math.log(6)] * 2, abs=1e-9)
    assert above.tolist() == pytest.approx([math.log(12)] * 2, abs=1e-12)


def greedy_vertex_entropy(key: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """The paper's lower bound: saturate tokens in the order of a key, largest first."""
    found: torch.Tensor = torch.special.entr(argmin(-key, lower, upper)).sum(-1)
    return found


def test_row_5_the_greedy_vertex_is_not_the_minimum() -> None:
    """prop:entropy, lower side, on s_1 ∈ [.2, .9], s_2 ∈ [.19, .95], s_3 ∈ [0, .61].

    Saturating the largest upper bound gives (.2, .8, 0) with H = .500; (.81, .19, 0) is feasible with H = .486.
    """
    lower = torch.tensor([[0.2, 0.19, 0.0]], dtype=torch.float64)
    upper = torch.tensor([[0.9, 0.95, 0.61]], dtype=torch.float64)
    counterexample = torch.tensor([[0.81, 0.19, 0.0]], dtype=torch.float64)
    assert ((counterexample >= lower) & (counterexample <= upper)).all()
    truth = float(entropy_of(counterexample)[0])
    paper = float(greedy_vertex_entropy(upper, lower, upper))
    assert paper > truth + 0.01, "the paper's bound is too high"
    for exact in (True, False):
        assert float(entropy_range(lower, upper, exact=exact)[0]) <= truth


def test_row_5_every_greedy_order_breaks_on_random_boxes() -> None:
    generator = torch.Generator().manual_seed(5)
    point = torch.rand(1500, 5, generator=generator, dtype=torch.float64)
    point = point / point.sum(-1, keepdim=True)
    width = torch.rand(2, 1500, 5, generator=generator, dtype=torch.float64) * 0.6
    lower, upper = (point - width[0]).clamp_min(0), (point + width[1]).clamp_max(1)
    least = brute_minimum(lower, upper)
    for key in (upper, lower, (lower + upper) / 2, upper - lower):
        too_high = greedy_vertex_entropy(key, lower, upper) > least + 1e-9
        assert int(too_high.sum()) > 100
    assert (entropy_range(lower, upper, exact=False)[0] <= least).all()


def test_row_6_a_stopped_bisection_is_no_bound() -> None:
    """Three steps of the paper's bisection stop at a point whose entropy a feasible pattern exceeds; the dual holds."""
    lower = torch.tensor([[0.0, 0.0, 0.3]], dtype=torch.float64)
    upper = torch.tensor([[0.6, 0.6, 0.4]], dtype=torch.float64)
    left, right = 0.0, 1.0
    for _ in range(3):
        middle = (left + right) / 2
        x = torch.full_like(lower, middle).maximum(lower).minimum(upper)
        left, right = (middle, right) if float(x.sum()) < 1 else (left, middle)
    stopped = torch.full_like(lower, left).maximum(lower).minimum(upper)
    feasible = torch.full_like(lower, 1 / 3)
    assert ((feasible >= lower) & (feasible <= upper)).all()
    truth = float(entropy_of(feasible)[0])
    assert float(torch.special.entr(stopped).sum()) < truth
    assert truth <= float(entropy_range(lower, upper)[1]) <= truth + 1e-12


def test_any_multiplier_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 6: with θ = 1/S whatever the box, the dual is looser and still above every pattern."""
    lower, upper, _ = random_boxes(500, 6, seed=77)
    tight = entropy_range(lower, upper)[1]
    monkeypatch.setattr(
        "prooflens.queries.entropy._water_level", lambda low, high: torch.full_like(low[:, :1], 1 / 6)
    )
    loose = entropy_range(lower, upper)[1]
    assert (loose >= tight - 1e-13).all()
    assert (loose > tight + 1e-6).any()


@pytest.mark.parametrize("steps", [0, 8])
def test_newton_and_sorting_find_the_same_maximum(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lower, upper, _ = random_boxes(500, 20, seed=78)
    monkeypatch.setattr("prooflens.queries.entropy.NEWTON_STEPS", steps)
    above = entropy_range(lower, upper)[1]
    torch.testing.assert_close(above, bisected_maximum(lower, upper), rtol=0, atol=1e-11)


def test_single_token_and_masked_rows() -> None:
    one = torch.ones(3, 1, dtype=torch.float64)
    below, above = entropy_range(one, one)
    assert below.tolist() == [0.0] * 3
    assert max(above.tolist()) <= 1e-14
    lower = torch.tensor([0.4, 0.0, 0.4, 0.0], dtype=torch.float64)
    upper = torch.tensor([0.6, 0.0, 0.6, 0.0], dtype=torch.float64)
    with_masked = entropy_range(lower, upper)
    without = entropy_range(lower[::2], upper[::2])
    torch.testing.assert_close(torch.stack(with_masked), torch.stack(without), rtol=0, atol=1e-13)


def test_tiny_weights() -> None:
    lower = torch.tensor([0.0, 1e-320, 0.5], dtype=torch.float64)
    upper = torch.tensor([1e-310, 1e-300, 1.0], dtype=torch.float64)
    below, above = entropy_range(lower, upper)
    assert 0.0 <= float(below) <= float(above) < 1e-13
