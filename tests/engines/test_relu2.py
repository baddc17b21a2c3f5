"""ReLU² in every engine: boxes, lines, parabolas, expansions and slopes on intervals, and mutations of its rules."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines import Forms, forms_of, get_engine
from prooflens.engines.crown.lines import activation as lines_of
from prooflens.engines.jacobian.interval import _derivative
from prooflens.engines.relaxations import derivatives as derivatives_module
from prooflens.engines.relaxations.activations import chord, deviation, parabola
from prooflens.engines.relaxations.derivatives import derivatives, expansions
from prooflens.engines.relaxations.interval_steps import apply_step
from prooflens.engines.taylor import network
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.segments import FeedForward
from prooflens.evaluation.soundness.cases import random_model
from prooflens.evaluation.soundness.forms import random_functionals
from prooflens.models import Architecture, Transformer
from prooflens.models.sites import Affine, Elementwise
from prooflens.problem import Problem
from prooflens.queries import Box
from prooflens.regions import Ball
from tests.engines.taylor.test_sites import assert_site_holds, moves, value_of
from tests.engines.test_later_steps import assert_not_crossed

POINTS = torch.linspace(0.0, 1.0, 41, dtype=torch.float64)
INTERVALS = {"low": st.floats(-30, 30), "width": st.floats(0, 30)}


def interval(low: float, width: float) -> tuple[Box, Tensor]:
    """A box of one coordinate, and points of it."""
    ends = (torch.tensor([end], dtype=torch.float64) for end in (low, low + width))
    box = Box(*ends)
    return box, (box.lower + POINTS * (box.upper - box.lower)).clamp(box.lower, box.upper)


def square(x: Tensor) -> Tensor:
    return x.clamp(min=0.0) ** 2


@given(**INTERVALS)
def test_boxes_lines_parabolas_and_slopes_hold(low: float, width: float) -> None:
    box, x = interval(low, width)
    y, room = square(x), 1e-13 * (1.0 + float(box.upper.abs())) ** 2
    made = apply_step(Elementwise("y", ("x",), "relu2"), box)
    assert bool(((y >= made.lower) & (y <= made.upper)).all())
    assert float(made.upper - made.lower) <= float(y[-1] - y[0]) + room
    for side, sign in ((lines_of("relu2", box).lower, -1.0), (lines_of("relu2", box).upper, 1.0)):
        assert bool((sign * (side.slope * x + side.offset - y) >= -room).all())
    c = 0.5 * box.lower + 0.5 * box.upper
    for how in (chord, parabola):
        found = deviation("relu2", c, box, *how("relu2", c, box))
        inside = y - found.value - found.slope * (x - c) - found.curvature * (x - c) ** 2
        assert bool((inside.abs() <= found.error + room).all())
        assert width < 1e-3 or float(found.error) <= 2.0 * width**2 + room
    steep = _derivative("relu2", box)
    slope = 2.0 * x.clamp(min=0.0)
    assert bool(((slope >= steep.lower) & (slope <= steep.upper)).all())


@given(x=st.floats(-10, 10), b=st.floats(0, 20), share=st.floats(-1, 1))
def test_expansions_hold_and_are_exact_away_from_the_kink(x: float, b: float, share: float) -> None:
    at, far = (torch.tensor([value], dtype=torch.float64) for value in (x, b))
    known = derivatives("relu2", at)
    u = share * far
    gap = square(at + u) - square(at) - known.first * u
    for order, (cubic, quartic, limit) in enumerate(expansions("relu2", at, far, known), start=1):
        assert float(cubic) == float(quartic) == 0.0
        left = gap - (0.5 * known.second * u**2 if order > 1 else 0.0)
        assert float(left.abs()) <= float(limit) + 1e-13 * (1.0 + abs(x) + b) ** 2
        assert order == 1 or b > abs(x) or float(limit) == 0.0


def question(seed: int, eps: float, gated: bool) -> tuple[Problem, Forms]:
    """Margins of layer 1 of a random GPT-2-like or Llama-like model with ReLU² in its networks."""
    choose = random.Random(seed)
    model = random_model("llama" if gated else "gpt2", choose, depth=2)
    architecture = Architecture.from_dict(model.architecture.to_dict() | {"activation": "relu2"})
    model = Transformer(architecture, model.weights, name="random ReLU²")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, architecture.d_model, generator=generator, dtype=torch.float64)
    problem = Problem(model, Ball(eps).around(x))
    return problem, forms_of(random_functionals(problem, 1, choose)[:12])


@pytest.mark.parametrize("name", ["interval", "crown", "taylor", "cpz", "zonotope", "jacobian-proved"])
@pytest.mark.parametrize("gated", [False, True])
def test_bounds_are_not_crossed(name: str, gated: bool) -> None:
    for seed in range(2):
        problem, forms = question(seed, 0.02, gated)
        assert get_engine(name).refuses(problem, forms) is None
        assert_not_crossed(problem, forms, get_engine(name).bound_forms(problem, forms), seed)


def assert_network_holds(gated: bool) -> None:
    """A neuron near its kink, on both sides of it, alone or behind a gate that moves too."""
    one = torch.ones(1, 1).double()
    for h in (-0.1, 0.1):
        gate = Affine("g", ("r",), one, h * one[0], 1, (1,))
        up = Affine("h", ("r",), one, 2.0 * one[0], 1, (1,)) if gated else gate
        step = FeedForward("n", "r", "relu2", up, gate if gated else None, None)
        site = NetworkSite(step, value_of(0.0 * one[0], one, 0.0 * one))
        linear, e = moves(one, 0.0 * one)
        post = square(linear + h) * (linear + 2.0 if gated else 1.0)
        assert_site_holds(site, linear, post - site.output[0] - (linear + e) @ site.jacobian[0].T)


@pytest.mark.parametrize(
    ("gated", "module"), [(False, derivatives_module), (True, derivatives_module), (True, network)]
)
def test_a_kink_that_is_left_out_is_caught(
    gated: bool, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutations: without what lies beyond the kink, in expansions and secants, or in the slope of a gate."""
    assert_network_holds(gated)
    monkeypatch.setattr(module, "kinked", lambda x, b: 0.0 * b)
    with pytest.raises(AssertionError):
        assert_network_holds(gated)
