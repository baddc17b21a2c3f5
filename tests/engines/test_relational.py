"""Effects of edits, jointly and alone: what an attack attains lies inside, and joint bounds are never looser."""

from __future__ import annotations

import random

import pytest
import torch

import prooflens as pl
from prooflens.engines import Engine, FormBounds, get_engine
from prooflens.engines.attack.effects import attack_effects
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.chebyshev import Chebyshev
from prooflens.engines.forms import Forms
from prooflens.engines.hidden import output_forms
from prooflens.engines.relational import both_alone, bound_effects
from prooflens.engines.taylor.effects import Meeting
from prooflens.engines.taylor.parts import Collected
from prooflens.errors import EngineError
from prooflens.evaluation.soundness.cases import FAMILIES, random_model
from prooflens.evaluation.soundness.effects import random_edits
from prooflens.models.parts import Edit
from prooflens.problem import Problem
from prooflens.regions import Ball, Region, Segment

S = 4
FORMS = 12
BUDGET = AttackBudget(64, 2, 8)


def pair(family: str, seed: int, far: float, segment: bool = False) -> tuple[Problem, Problem, Forms]:
    """A random model and a random edit of it on one region, and forms of their outputs."""
    choose = random.Random(f"effect {family} {seed}")
    model = random_model(family, choose, choose.choice((1, 2, 3)))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(S, model.architecture.d_model, generator=generator, dtype=torch.float64)
    move = torch.randn(x.shape, generator=generator, dtype=torch.float64) * far
    region: Region = Segment(x, x + move).region() if segment else Ball(far).around(x)
    W = torch.randn(FORMS, model.architecture.d_out or 1, generator=generator, dtype=torch.float64)
    edited = pl.edit(model, random_edits(model, choose, S))
    return Problem(model, region), Problem(edited, region), output_forms(W)


def check(found: FormBounds, problem: Problem, edited: Problem, forms: Forms) -> int:
    reached = attack_effects(problem, edited, forms, BUDGET, 0, [found])
    room = 1e-13 * (1.0 + reached.lower.abs() + reached.upper.abs())
    assert bool((found.lower <= reached.lower + room).all())
    assert bool((found.upper >= reached.upper - room).all())
    return int(found.lower.isfinite().sum() + found.upper.isfinite().sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_joint_bounds_hold_on_balls(family: str) -> None:
    for seed, far in enumerate((1e-3, 2e-2)):
        problem, edited, forms = pair(family, seed, far)
        found = bound_effects(get_engine("taylor"), problem, edited, forms)
        assert check(found, problem, edited, forms) == 2 * FORMS or far > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_joint_bounds_hold_on_segments(family: str) -> None:
    problem, edited, forms = pair(family, 7, 0.1, segment=True)
    engines: tuple[Engine, ...] = (Chebyshev(most_walks=4), get_engine("taylor"))
    for engine in engines:
        check(bound_effects(engine, problem, edited, forms), problem, edited, forms)


@pytest.mark.parametrize("end", ["k", "v"])
def test_an_edge_into_one_head_of_several_that_share_is_bounded_on_segments(end: str) -> None:
    """Its keys or values are then one for every head, and the others are still shared."""
    choose = random.Random(3)
    model = random_model("llama", choose, 2)
    while model.architecture.kv_heads == model.architecture.n_heads:
        model = random_model("llama", choose, 2)
    x = torch.randn(S, model.architecture.d_model, generator=torch.Generator().manual_seed(1)).double()
    region = Segment(x, 1.02 * x).region()
    edited = Problem(pl.edit(model, [Edit(f"m0->a1.h0.{end}")]), region)
    forms = output_forms(torch.eye(model.architecture.d_out or 1, dtype=torch.float64))
    found = bound_effects(Chebyshev(), Problem(model, region), edited, forms)
    assert check(found, Problem(model, region), edited, forms) == 2 * forms.size


@pytest.mark.parametrize("engine", ["crown", "interval", "zonotope"])
def test_others_bound_both_alone(engine: str) -> None:
    problem, edited, forms = pair("gpt2", 1, 1e-3)
    found = bound_effects(get_engine(engine), problem, edited, forms)
    assert torch.equal(found.lower, both_alone(get_engine(engine), problem, edited, forms).lower)
    check(found, problem, edited, forms)


@pytest.mark.parametrize("family", ["encoder", "gpt2", "llama", "gemma2"])
def test_joint_is_not_looser_and_is_much_tighter_near_a_point(family: str) -> None:
    problem, edited, forms = pair(family, 2, 1e-3)
    for engine in (get_engine("taylor"), get_engine("crown")):
        apart = both_alone(engine, problem, edited, forms)
        found = bound_effects(engine, problem, edited, forms, alone=True)
        assert bool((found.lower >= apart.lower).all())
        assert bool((found.upper <= apart.upper).all())
    small, other, asked = pair(family, 2, 1e-5)
    found, apart = (bound(get_engine("taylor"), small, other, asked) for bound in (bound_effects, both_alone))
    reached = attack_effects(small, other, asked, BUDGET)
    most = 1.05 * (reached.upper - reached.lower) + 0.02 * (apart.upper - apart.lower)
    assert bool((found.upper - found.lower <= most).all())


def test_polynomials_are_subtracted_before_their_range_is_taken() -> None:
    problem, edited, forms = pair("llama", 3, 0.2, segment=True)
    engine = Chebyshev()
    found, apart = (bound(engine, problem, edited, forms) for bound in (bound_effects, both_alone))
    reached = attack_effects(problem, edited, forms, AttackBudget(500, 2, 10))
    width = found.upper - found.lower
    assert bool((width <= apart.upper - apart.lower).all())
    assert bool((width <= 1.1 * (reached.upper - reached.lower) + 1e-9).all())


def test_an_edit_that_changes_nothing_has_no_effect() -> None:
    model = random_model("llama", random.Random(0), 2)
    first = torch.zeros_like(model.weights["blocks.0.down.weight"])
    silent = pl.edit(model, "m0")
    region = Ball(0.01).around(torch.randn(S, model.architecture.d_model, dtype=torch.float64))
    assert torch.equal(silent.weights["blocks.0.down.weight"], first)
    problem, edited = Problem(silent, region), Problem(pl.edit(silent, "m0"), region)
    forms = output_forms(torch.eye(3).double())
    found, apart = (
        bound(get_engine("taylor"), problem, edited, forms) for bound in (bound_effects, both_alone)
    )
    assert bool((found.lower <= 0.0).all())
    assert bool((found.upper >= 0.0).all())
    assert bool((found.upper - found.lower < 1e-5 * (apart.upper - apart.lower)).all())


@pytest.mark.parametrize("forgets", ["remainders", "the edited model"])
def test_what_is_forgotten_is_caught(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pl.load("toy-4layer")
    region = Ball(0.02).around(model.example())
    problem, edited = Problem(model, region), Problem(pl.edit(model, "a3.h0"), region)
    forms = output_forms(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]]).double())
    check(bound_effects(get_engine("taylor"), problem, edited, forms), problem, edited, forms)
    if forgets == "remainders":
        monkeypatch.setattr(Meeting, "at", lambda self, key, v, own, bound: own)
    else:
        monkeypatch.setattr(Collected, "plus", lambda self, other: self)
    wrong = bound_effects(get_engine("taylor"), problem, edited, forms)
    with pytest.raises(AssertionError):
        check(wrong, problem, edited, forms)


def test_only_the_same_inputs_and_outputs_are_compared() -> None:
    problem, edited, forms = pair("gpt2", 0, 0.01)
    with pytest.raises(EngineError, match="over one region"):
        bound_effects(
            get_engine("crown"),
            problem,
            Problem(edited.model, Ball(0.1).around(problem.region.center)),
            forms,
        )
    deeper = random_model("gpt2", random.Random("effect gpt2 0"), 4)
    if deeper.architecture.d_model == problem.model.architecture.d_model:
        with pytest.raises(EngineError, match="is no edit of"):
            bound_effects(get_engine("crown"), problem, Problem(deeper, problem.region), forms)
