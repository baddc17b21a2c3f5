"""Margins of a few ulps on both sides of 0: what is not positive over the reals is never proved to be."""

import itertools
import math
from dataclasses import replace

import flint
import pytest
import torch

from prooflens import Ball, Transformer
from prooflens.engines import Forms, Guarantee, engine_names, get_engine
from prooflens.evaluation.soundness import modest, random_case
from prooflens.models import Architecture
from prooflens.models.weights import optional_shapes, required_shapes
from prooflens.problem import Problem
from prooflens.queries import Row
from tests.rounding.real import real_forms, real_points

PROVED = [name for name in engine_names() if get_engine(name).guarantee is Guarantee.PROVED]
STEPS = (-64, -3, -2, -1, 0, 1, 2, 3, 64)
"""Ulps of the margin's terms between the true minimum and 0."""

SMALL_CASES = (15, 121, 117, 78, 104)
"""One random case of every family with few numbers."""


@pytest.fixture(autouse=True)
def _precision() -> None:
    flint.ctx.prec = 200


def random_mpnet(seed: int) -> Transformer:
    """One head on two coordinates; scores have a bias per distance, which moves a margin without changing its shape."""
    architecture = Architecture("mpnet", 1, 1, 2, 2, "gelu", relative_buckets=32, pool="mean", d_out=2)
    generator = torch.Generator().manual_seed(seed)
    shapes = optional_shapes(architecture) | required_shapes(architecture)
    weights = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in sorted(shapes.items())}
    return Transformer(architecture, weights, name="ulps")


MARGIN = Forms.of([(0, Row(0, 0, 0), 1, 1.0), (0, Row(0, 0, 0), 2, -1.0)], 1)
"""a₀₁ − a₀₂: affine in every coordinate, so its minimum over a ball is at one of the 64 corners."""


def smallest(problem: Problem) -> flint.arb:
    """The true minimum of the margin over the ball."""
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=6)), dtype=torch.float64)
    values = [v for (v,) in real_forms(problem, MARGIN, real_points(problem, corners))]
    least = values[0]
    for value in values[1:]:
        least = least.min(value)
    return least


def shifted(model: Transformer, by: float) -> Transformer:
    """The same with `by` added to the bias of distance 1; the bias of distance 2 is 0."""
    bias = model.weights["relative_bias"].clone()
    bias[16 + 1], bias[16 + 2] = by, 0.0
    return replace(model, weights={**model.weights, "relative_bias": bias})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_margin_at_zero_is_proved_wrongly(seed: int) -> None:
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model, eps = shifted(random_mpnet(seed), 0.0), 10.0 ** -(1 + seed)
    base = smallest(Problem(model, Ball(eps).around(x)))
    start = -float(base.mid())
    tried = wide = 0
    for steps in STEPS:
        problem = Problem(shifted(model, start + steps * math.ulp(start)), Ball(eps).around(x))
        truth = smallest(problem)
        assert abs(float(truth.mid())) <= 70 * math.ulp(start)
        for name in PROVED:
            bounds = modest(name).bound_forms(problem, MARGIN)
            assert not bool(bounds.lower > 0) or bool(truth > 0), (name, steps)
            assert flint.arb(float(bounds.lower)) <= truth, (name, steps)
            tried += 1
    for name in ("exact", "layer0"):
        problem = Problem(shifted(model, start + 1e-11 * max(1.0, abs(start))), Ball(eps).around(x))
        wide += bool(modest(name).bound_forms(problem, MARGIN).lower > 0)
    assert tried == len(STEPS) * len(PROVED)
    assert wide, "a margin of 1e-11 is proved: the test is not empty"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SMALL_CASES)
def test_no_output_at_zero_is_proved_wrongly(seed: int) -> None:
    """Whole models of every family on balls of a few ulps: the bias of the head puts an output at 0 ± some ulps."""
    case = random_case(seed)
    model, x = case.problem.model, case.problem.region.center
    forms = replace(Forms.of([], 1), logits=torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    ball = Ball(4e-16).around(x)
    center = torch.zeros(1, ball.n_factors, dtype=torch.float64)
    bias = model.weights.get("head.bias", torch.zeros(3, dtype=torch.float64)).clone()
    bias[0] = 0.0
    if model.architecture.rope_given:
        pytest.skip("the checker knows given rotary frequencies to a float32 unit only")
    plain = Problem(replace(model, weights={**model.weights, "head.bias": bias}), ball)
    ((value,),) = real_forms(plain, forms, real_points(plain, center))
    for steps in (-1, 0, 1):
        bias = bias.clone()
        bias[0] = -float(value.mid()) + steps * math.ulp(float(value.mid()))
        problem = Problem(replace(model, weights={**model.weights, "head.bias": bias}), ball)
        ((truth,),) = real_forms(problem, forms, real_points(problem, center))
        for name in PROVED:
            engine = modest(name)
            if engine.refuses(problem, forms) is None:
                bounds = engine.bound_forms(problem, forms)
                assert flint.arb(float(bounds.lower)) <= truth <= flint.arb(float(bounds.upper)), (
                    name,
                    steps,
                )
                assert not bool(bounds.lower > 0) or bool(truth > 0), (name, steps)
