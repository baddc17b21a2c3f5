"""Every engine on the later steps: parallel blocks, windows, ALiBi, caps, norms of queries and keys, no norm."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines import FormBounds, Forms, forms_of, get_engine
from prooflens.engines.attack import Attack, AttackBudget
from prooflens.engines.crown import walk
from prooflens.engines.relaxations.interval_steps import apply_step
from prooflens.engines.taylor import Taylor
from prooflens.engines.taylor.head_norms import HeadNormSite
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.evaluation.soundness.cases import LATER, SOLU, random_model
from prooflens.evaluation.soundness.forms import random_functionals
from prooflens.models import Architecture, Transformer
from prooflens.models.sites import Softcap
from prooflens.models.weights import required_shapes
from prooflens.problem import Problem
from prooflens.queries import Box
from prooflens.regions import Ball

BUDGET = AttackBudget(200, 2, 12)
ENGINES = ("interval", "layer0", "crown", "taylor", "cpz", "zonotope", "jacobian-proved")


def question(
    family: str, seed: int, eps: float, depth: int = 2, layer: int | None = None
) -> tuple[Problem, Forms]:
    """A random model of a family, and margins of a layer (the last one, if none is named)."""
    choose = random.Random(seed)
    model = random_model(family, choose, depth)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, model.architecture.d_model, generator=generator, dtype=torch.float64)
    problem = Problem(model, Ball(eps).around(x))
    layer = depth - 1 if layer is None else layer
    found = [f for f in random_functionals(problem, layer, choose) if f.name == "margin"][:12]
    return problem, forms_of(found, model.architecture.d_out or 0)


def assert_not_crossed(problem: Problem, forms: Forms, bounds: FormBounds, seed: int = 0) -> None:
    """No attained value lies beyond the bounds; the attack starts from their own corners, too."""
    starts = bounds if bounds.lower_corner is not None else None
    attained = Attack(budget=BUDGET, seed=seed, starts=starts).bound_forms(problem, forms)
    slack = 1e-11 * (1.0 + attained.lower.abs() + attained.upper.abs())
    assert not bool(bounds.lower.isnan().any() | bounds.upper.isnan().any())
    assert bool((attained.lower >= bounds.lower - slack).all())
    assert bool((attained.upper <= bounds.upper + slack).all())


@pytest.mark.slow
@pytest.mark.parametrize("family", [*LATER, SOLU])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("layer", [0, 1])
def test_bounds_are_not_crossed(family: str, name: str, layer: int) -> None:
    engine = get_engine(name)
    problem, forms = question(family, 1, eps=0.02, layer=layer)
    reason = engine.refuses(problem, forms)
    if reason is None:
        assert_not_crossed(problem, forms, engine.bound_forms(problem, forms))
    else:
        assert "layer 0 only" in reason


@pytest.mark.slow
@pytest.mark.parametrize("family", LATER)
def test_taylor_is_tight_on_small_balls(family: str) -> None:
    problem, forms = question(family, 3, eps=1e-3, depth=3)
    bounds = Taylor().bound_forms(problem, forms)
    attained = Attack(budget=BUDGET, starts=bounds).bound_forms(problem, forms)
    width, least = bounds.upper - bounds.lower, attained.upper - attained.lower
    # Some of these models hardly move: rounding is all there is.
    assert bool((width <= 1.15 * least + 5e-9).all())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gemma3"])
def test_what_keys_miss_is_carried_on(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation: norms of keys are sources of their own, and dropping them lets an attack through."""
    broken = False
    for seed in range(3):
        problem, forms = question(family, seed, eps=0.05, depth=2)
        assert_not_crossed(problem, forms, Taylor().bound_forms(problem, forms), seed)
    shapes = {site: vars(site)["shape"].func for site in (NormSite, HeadNormSite)}
    for site, shape in shapes.items():

        def shrunk(self: object, shape: Callable[[object], Tensor] = shape) -> Tensor:
            return 1e-9 * shape(self)

        monkeypatch.setattr(site, "shape", property(shrunk))
        monkeypatch.setattr(site, "bound", lambda self, v, t: v.new_zeros(len(v), 2))
        monkeypatch.setattr(site, "rest", lambda self, v, t: v.new_zeros(len(v)))
    for seed in range(12):
        problem, forms = question(family, seed, eps=0.05, depth=2)
        try:
            assert_not_crossed(problem, forms, Taylor().bound_forms(problem, forms), seed)
        except AssertionError:
            broken = True
            break
    assert broken


@given(
    low=st.floats(-50, 50),
    width=st.floats(0, 60),
    cap=st.sampled_from([0.5, 1.0, 3.0, 30.0, 50.0]),
    share=st.floats(0, 1),
)
def test_boxes_of_caps_hold_and_are_tight(low: float, width: float, cap: float, share: float) -> None:
    step = Softcap("y", ("x",), cap)
    box = Box(*(torch.tensor([end], dtype=torch.float64) for end in (low, low + width)))
    made = apply_step(step, box)
    value = step(torch.tensor([low + share * width], dtype=torch.float64))
    assert float(made.lower) <= float(value) <= float(made.upper)
    assert float(made.lower) >= float(step(box.lower)) - 1e-12 * cap
    assert float(made.upper) <= float(step(box.upper)) + 1e-12 * cap


def test_caps_keep_the_order_of_scores_at_layer_0() -> None:
    """What `layer0` proves of uncapped scores it proves of capped ones, with a margin that the cap shrinks."""
    problem, forms = question("gemma2", 5, eps=1e-3, layer=0)
    plain = replace(
        problem,
        model=replace(problem.model, architecture=replace(problem.model.architecture, score_cap=None)),
    )
    capped, free = (get_engine("layer0").bound_forms(p, forms) for p in (problem, plain))
    assert bool(((capped.lower > 0) == (free.lower > 0)).all())
    assert bool((capped.lower <= free.lower.clamp(min=0.0) + free.lower.clamp(max=0.0)).all())
    assert bool((capped.lower[free.lower > 0] < free.lower[free.lower > 0]).all())
    assert_not_crossed(problem, forms, capped)


@pytest.mark.parametrize("tokens", [4, 8])
def test_crown_takes_capped_scores_back_row_by_row(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of scores stand behind heads: token by token, as in large models, boxes are those of all rows at once."""
    architecture = Architecture(
        "capped", 2, 8, 16, 8, "gelu", norm_place="pre", causal=True, pool="last", score_cap=2.0
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5 * shape[-1] ** -0.5
        for name, shape in required_shapes(architecture).items()
    }
    x = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
    problem = Problem(Transformer(architecture, weights, name="capped"), Ball(1e-3).around(x))
    found = random_functionals(problem, 1, random.Random(0))[:8]
    bounds = {}
    for at_once in (10**6, 1):
        monkeypatch.setattr(walk, "AT_ONCE", at_once)
        bounds[at_once] = get_engine("crown").bound_forms(problem, forms_of(found))
    assert_not_crossed(problem, forms_of(found), bounds[1])
    for end in ("lower", "upper"):
        gap = getattr(bounds[1], end) - getattr(bounds[10**6], end)
        assert float(gap.abs().max()) < 1e-4  # lines are found by bisection


def test_capped_scores_alone_are_refused_by_layer0() -> None:
    problem, _ = question("gemma2", 5, eps=1e-3, layer=0)
    choose = random.Random(0)
    single = [f for f in random_functionals(problem, 0, choose) if f.name == "score"][:2]
    assert "differences of two" in str(get_engine("layer0").refuses(problem, forms_of(single)))


@pytest.mark.parametrize("scale", [1.0, 1.3, 3.0])
@pytest.mark.parametrize("name", ["layer0", "taylor", "crown", "interval"])
def test_scaled_rotary_tables(scale: float, name: str) -> None:
    """YaRN multiplies cosines and sines: no engine may take them for at most 1."""
    problem, forms = question("pythia", 4, eps=1e-3, layer=0)
    architecture = replace(problem.model.architecture, rope_scale=scale)
    problem = replace(problem, model=replace(problem.model, architecture=architecture))
    assert_not_crossed(problem, forms, get_engine(name).bound_forms(problem, forms))
