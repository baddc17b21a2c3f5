"""Mutations of the later steps: an engine that leaves one out, or does it otherwise, is caught by an attack.

The engine is asked about a model without the step and the attack about the model with it, on a ball so small that even
boxes are narrow. Lines, boxes and parabolas of caps have property tests of their own here.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prooflens.engines import FormBounds, forms_of, get_engine
from prooflens.engines.attack import Attack, AttackBudget
from prooflens.engines.crown.lines import softcap as cap_lines
from prooflens.engines.tensor_sets.relax import softcap as cap_set
from prooflens.engines.tensor_sets.tensor_set import TensorSet
from prooflens.evaluation.soundness.forms import random_functionals
from prooflens.models import Architecture, Transformer
from prooflens.models.weights import optional_shapes, required_shapes
from prooflens.problem import Problem
from prooflens.queries import Box
from prooflens.regions import Ball

ENGINES = ("interval", "crown", "taylor", "zonotope")
SKIPPED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "ALiBi": ({"alibi": True}, {"alibi": False}),
    "window": ({"window": 1, "window_layers": (0, 1)}, {"window": None}),
    "cap": ({"score_cap": 1.0}, {"score_cap": None}),
    "cap of another height": ({"score_cap": 1.0}, {"score_cap": 2.0}),
    "norm of heads": ({"qk_norm": "head"}, {"qk_norm": "none"}),
    "norm of all heads": ({"qk_norm": "whole"}, {"qk_norm": "none"}),
    "side by side": ({"parallel": True}, {"parallel": False}),
    "one norm for both": ({"parallel": True, "shared_norm": True}, {"shared_norm": False}),
    "norm before": ({"norm_place": "pre"}, {"norm_place": "none"}),
    "norm behind": ({"norm_place": "sandwich"}, {"norm_place": "pre"}),
    "norm of what is added": ({"norm_place": "output"}, {"norm_place": "none"}),
    "first norm": ({"first_norm": True}, {"first_norm": False}),
    "network": ({"has_network": True}, {"has_network": False}),
    "gate": ({"gated": True}, {"gated": False}),
    "positions of queries and keys": ({"head_positions": True, "context": 5}, {"head_positions": False}),
    "scale": ({"attention_scale": 1.0}, {"attention_scale": None}),
    "scale by layer": ({"scale_by_layer": True}, {"scale_by_layer": False}),
    "rotation": ({"rope_theta": 100.0}, {"rope_theta": None}),
    "given rotation": ({"rope_given": True, "rope_scale": 1.1}, {"rope_scale": 1.0}),
    "square of ReLU": ({"activation": "relu2"}, {"activation": "relu"}),
}
"""By what is skipped: fields of the model with the step, and those that take it away."""
COMMON: dict[str, object] = {
    "family": "steps",
    "n_layers": 2,
    "n_heads": 2,
    "d_model": 8,
    "d_ff": 8,
    "activation": "gelu",
    "norm_place": "pre",
    "causal": True,
    "pool": "last",
}


def changed(model: Transformer, fields: dict[str, object]) -> Transformer:
    """The model with other fields, and those of its weights that it still reads."""
    architecture = Architecture.from_dict(model.architecture.to_dict() | fields)
    names = optional_shapes(architecture) | required_shapes(architecture)
    return Transformer(architecture, {n: w for n, w in model.weights.items() if n in names}, name=model.name)


def encloses(bounds: FormBounds, attained: FormBounds) -> bool:
    """Whether every attained value lies within the bounds, up to its own rounding."""
    slack = 1e-12 * (1.0 + attained.lower.abs() + attained.upper.abs())
    inside = (attained.lower >= bounds.lower - slack) & (attained.upper <= bounds.upper + slack)
    return bool(inside.all())


@pytest.mark.parametrize("step", sorted(SKIPPED))
def test_a_step_that_is_left_out_is_caught(step: str) -> None:
    there, gone = SKIPPED[step]
    architecture = Architecture.from_dict(COMMON | there)
    generator = torch.Generator().manual_seed(1)
    shapes = optional_shapes(architecture) | required_shapes(architecture)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5
        + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        for name, shape in sorted(shapes.items())
    }
    model = Transformer(architecture, weights, name=step)
    x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    problem = Problem(model, Ball(1e-6).around(x))
    forms = forms_of(random_functionals(problem, 1, random.Random(0))[:16])
    attained = Attack(budget=AttackBudget(20, 1, 4)).bound_forms(problem, forms)
    wrong = replace(problem, model=changed(model, gone))
    for name in ENGINES:
        engine = get_engine(name)
        assert encloses(engine.bound_forms(problem, forms), attained)
        assert not encloses(engine.bound_forms(wrong, forms), attained)


@given(
    low=st.floats(-50, 50),
    width=st.floats(0, 60),
    cap=st.sampled_from([0.5, 1.0, 3.0, 30.0, 50.0]),
)
def test_lines_and_sets_of_caps_hold(low: float, width: float, cap: float) -> None:
    box = Box(*(torch.tensor([end], dtype=torch.float64) for end in (low, low + width)))
    x = (low + width * torch.linspace(0.0, 1.0, 41, dtype=torch.float64)).clamp(low, low + width)
    y, room = cap * torch.tanh(x / cap), 1e-12 * (1.0 + cap + abs(low) + width)
    lines = cap_lines(cap, box)
    assert bool((lines.upper.slope * x + lines.upper.offset >= y - room).all())
    assert bool((lines.lower.slope * x + lines.lower.offset <= y + room).all())
    middle, half = 0.5 * (box.lower + box.upper), 0.5 * (box.upper - box.lower)
    moved = cap_set(cap, TensorSet.point(middle).widened(half), 8).hull()
    assert bool(((y >= moved.lower - room) & (y <= moved.upper + room)).all())
