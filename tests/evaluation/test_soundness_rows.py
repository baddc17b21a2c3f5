"""Steps of the paper that are not sound, broken on stated examples, beside what stands in their place.

The rows are those of docs/soundness.md, which names the test of every one.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, minimize
from torch import Tensor

from prooflens import Ball, Region, Transformer
from prooflens.engines.first_layer.layer import FirstLayer
from prooflens.engines.relaxations.interval_walk import value_boxes
from prooflens.models import Architecture
from prooflens.models.weights import optional_shapes, required_shapes
from prooflens.problem import Problem
from prooflens.sets import quadratic_upper

ATTENTION = "blocks.0.hook_attn_out"
NORM = "blocks.0.ln1.hook_normalized"


def identity_block(norm_place: str) -> Transformer:
    """One head on two coordinates whose maps are all the identity: every spectral norm is 1."""
    architecture = Architecture("encoder", 1, 1, 2, 2, "relu", norm_place=norm_place, pool="mean")  # type: ignore[arg-type]
    shapes = optional_shapes(architecture) | required_shapes(architecture)
    weights = {
        name: torch.eye(2, dtype=torch.float64)
        if len(shape) == 2
        else torch.zeros(shape, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    for name in weights:
        if "norm" in name and name.endswith("weight"):
            weights[name] = torch.ones(2, dtype=torch.float64)
    return Transformer(architecture, weights)


def slope(model: Transformer, value: str, x: Tensor, y: Tensor) -> float:
    """‖f(y) − f(x)‖ / ‖y − x‖."""
    at_x, at_y = (model.run(point, [value])[value] for point in (x, y))
    return float((at_y - at_x).norm() / (y - x).norm())


def composed_constant(model: Transformer) -> float:
    """Spectral norms of q, k, v and o, softmax with constant 1, the residual's 1: as generous as a product can be."""
    q, k, v, o = (
        float(torch.linalg.matrix_norm(model.weights[f"blocks.0.{name}.weight"], 2)) for name in "qkvo"
    )
    return 1.0 + o * v * (1.0 + q * k)


@pytest.mark.parametrize("size", [5.0, 20.0, 80.0])
def test_row_3_attention_has_no_constant_made_of_spectral_norms(size: float) -> None:
    """Row 3: the first token reads (r, 0) and (−r, 0) with equal weight, and its own motion moves the weights by ~r².

    The slope of attention grows with the input while every spectral norm is 1. On the set itself a bound exists: the
    interval engine's box of the attention output holds both points.
    """
    model = identity_block("post")
    assert composed_constant(model) == pytest.approx(3.0)
    x = torch.tensor([[0.0, 0.0], [size, 0.0], [-size, 0.0]], dtype=torch.float64)
    radius = torch.zeros_like(x)
    radius[0, 0] = 1e-3
    y = x + radius
    found = slope(model, ATTENTION, x, y)
    assert found > composed_constant(model) * (size / 5.0) ** 2
    box = value_boxes(Problem(model, Region(x, radius=radius)), [ATTENTION])[ATTENTION]
    for point in (x, y):
        value = model.run(point, [ATTENTION])[ATTENTION]
        assert bool(((box.lower <= value) & (value <= box.upper)).all())


def test_row_3_the_constant_of_a_norm_depends_on_the_variance() -> None:
    """Row 3: near a constant token LayerNorm stretches by up to |γ|/√ε; away from there by |γ| n on the actual set."""
    model = identity_block("pre")
    eps = model.architecture.norm_eps
    still = torch.zeros(1, 2, dtype=torch.float64)
    moved = torch.tensor([[1e-5, -1e-5]], dtype=torch.float64)
    found = slope(model, NORM, still, moved)
    assert 100.0 < found <= eps**-0.5
    center = torch.tensor([[1.0, -0.5]], dtype=torch.float64)
    problem = Problem(model, Ball(0.2).around(center))
    local = float(FirstLayer.of(problem).n_high[0])
    assert local < 3.0
    points, _ = problem.region.sample(200, seed=0)
    pairs = itertools.pairwise(points)
    assert max(slope(model, NORM, a, b) for a, b in pairs if not torch.equal(a, b)) <= local * (1 + 1e-9)


def taylor_rest(scores: Tensor, moves: Tensor) -> Tensor:
    """s(a + η) − s(a) − J(a)η."""
    s = scores.softmax(-1)
    return (scores + moves).softmax(-1) - s - s * (moves - (s * moves).sum(-1, keepdim=True))


def sound_rest(scores: Tensor, moves: Tensor) -> Tensor:
    """s⁰(½b̃²e^{|b̃|} + |1 + b̃| Σ s⁰½b̃²e^{|b̃|}), b̃ = η − Σ s⁰η; it uses Z ≥ 1 and e^x − 1 − x ≤ ½x²e^{|x|}."""
    s = scores.softmax(-1)
    b = moves - (s * moves).sum(-1, keepdim=True)
    size = 0.5 * b.square() * b.abs().exp()
    return s * (size + (1.0 + b).abs() * (s * size).sum(-1, keepdim=True))


def centre_rest(scores: Tensor, moves: Tensor) -> Tensor:
    """The paper's ½s⁰(1 − s⁰)‖η‖²."""
    s = scores.softmax(-1)
    return 0.5 * s * (1.0 - s) * moves.square().sum(-1, keepdim=True)


def test_row_4_the_curvature_at_the_centre_is_not_its_supremum() -> None:
    """Row 4: weights (0.01, 0.99), and the first score rises by 3: the rest is 0.129, the paper's bound 0.0446."""
    scores = torch.tensor([0.01, 0.99], dtype=torch.float64).log()
    moves = torch.tensor([3.0, 0.0], dtype=torch.float64)
    rest = float(taylor_rest(scores, moves)[0])
    assert rest == pytest.approx(0.129, abs=5e-4)
    assert float(centre_rest(scores, moves)[0]) == pytest.approx(0.0446, abs=5e-5)
    assert rest <= float(sound_rest(scores, moves)[0])


def test_row_4_on_random_scores() -> None:
    """Row 4, 20,000 draws with four keys: the paper's bound is violated often, the replacement never."""
    generator = torch.Generator().manual_seed(4)
    scores = 2.0 * torch.randn(20_000, 4, generator=generator, dtype=torch.float64)
    moves = torch.randn(20_000, 4, generator=generator, dtype=torch.float64)
    rest = taylor_rest(scores, moves).abs()
    broken = (rest > centre_rest(scores, moves)).any(-1)
    assert int(broken.sum()) > 500
    assert bool((rest <= sound_rest(scores, moves) + 1e-15).all())


def test_row_8_a_local_search_stops_below_an_attained_value() -> None:
    """Row 8: p(α) = ½K(‖α‖² − n) − ½(w·α)² with K ≥ max w² is 0 where α splits w evenly and below elsewhere.

    Every corner from which no single flip helps is a local maximum. Fifty starts all over the box end below −0.01, and
    "p < −0.01" would be certified; the corner v, planted with w·v = 0, attains 0. The diagonal shift K gives 0.
    """
    n, rng = 16, np.random.default_rng(8)
    v = rng.permutation(np.repeat([-1.0, 1.0], n // 2))
    w = rng.integers(1_000, 10_000, n).astype(float)
    w[0] -= v[0] * (v @ w)
    w /= 1_024.0
    K = float((w**2).max())
    c, H = -0.5 * K * n, K * np.eye(n) - np.outer(w, w)
    assert v @ w == 0.0

    def value(x: np.ndarray) -> float:
        return float(-(c + 0.5 * x @ H @ x))

    def slope(x: np.ndarray) -> np.ndarray:
        found: np.ndarray = -(H @ x)
        return found

    def search(start: np.ndarray) -> float:
        found = minimize(value, start, jac=slope, method="L-BFGS-B", bounds=Bounds(-1.0, 1.0))
        return -float(found.fun)

    attained = c + 0.5 * v @ H @ v
    assert attained == pytest.approx(0.0, abs=1e-9)
    assert max(search(start) for start in rng.uniform(-1.0, 1.0, (50, n))) < attained - 0.01
    proved = quadratic_upper(
        torch.tensor(c, dtype=torch.float64), torch.zeros(n, dtype=torch.float64), torch.from_numpy(H)
    )
    assert attained <= float(proved) <= attained + 1e-6
