"""Effects of parts at any value of a set: bounds over X × V against plain edits at single values."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

import prooflens as pl
from prooflens.checker.depth import steps, walk
from prooflens.engines import FormBounds, Forms, get_engine
from prooflens.engines.attack.effects import attack_effects
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.hidden import output_forms
from prooflens.engines.relational import both_alone, bound_effects
from prooflens.engines.taylor.effects import Shared
from prooflens.engines.taylor.segments import asked_segments
from prooflens.evaluation.soundness.cases import FAMILIES, random_model
from prooflens.evaluation.soundness.second import SecondProof
from prooflens.evaluation.soundness.spreads import side_by_side
from prooflens.models import program_blocks, program_edits
from prooflens.models.edits import find_place, places_of
from prooflens.models.parts import Edit
from prooflens.problem import Problem
from prooflens.regions import Ball, Region, Segment
from tests.models.test_spread import at_value

S = 3
EVERY = ("interval", "crown", "zonotope", "cpz", "jacobian-proved", "taylor")


class Case:
    """A random model on a region, one part of it at any value of a set, and what is asked."""

    def __init__(self, family: str, seed: int, segment: bool = False) -> None:
        choose = random.Random(f"spread {family} {seed}")
        self.model = random_model(family, choose, 2)
        self.generator = torch.Generator().manual_seed(seed)
        a, name = self.model.architecture, choose.choice(places_of(self.model.architecture))
        place = find_place(a, name)
        self.size = a.d_model if place.columns is None else len(place.columns)
        value = 0.5 * self.draw(self.size)
        sets: list[float | torch.Tensor] = [0.02, 0.05 * self.draw(1 if segment else 2, self.size)]
        self.edit = Edit(name + choose.choice(["", "@-1"]), value, spread=sets[1 if segment else seed % 2])
        self.x = self.draw(S, a.d_model)
        near = Segment(self.x, self.x + 0.05 * self.draw(S, a.d_model)).region()
        self.inputs: Region = near if segment else Ball(0.003).around(self.x)
        self.forms: Forms = output_forms(self.draw(4, a.d_out or 1))
        edited = pl.edit(self.model, self.edit)
        self.problem, self.edited = side_by_side(Problem(self.model, self.inputs), edited, S)

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def effects(self, n: int = 12) -> torch.Tensor:
        """Effects at random inputs and values, half of them at corners of both; by plain edits, so not by our steps."""
        points, _ = self.inputs.sample(n, seed=1)
        free, found = self.edited.model.architecture.free, []
        for number, x in enumerate(points):
            beta = torch.rand(free, generator=self.generator).double() * 2 - 1
            beta = beta.sign() if number % 2 else beta
            plain = pl.edit(self.model, at_value(self.edit, beta, self.size))
            asked = [Problem(one, self.inputs) for one in (self.model, plain)]
            outs = [one.read_output(one.model(x)) for one in asked]
            assert self.forms.logits is not None
            found.append(self.forms.logits @ (outs[0] - outs[1]))
        return torch.stack(found)

    def enclosed_by(self, found: FormBounds) -> bool:
        seen = self.effects()
        reached = attack_effects(self.problem, self.edited, self.forms, AttackBudget(32, 1, 5), 0, [found])
        least = torch.minimum(seen.amin(0), reached.lower)
        most = torch.maximum(seen.amax(0), reached.upper)
        room = 1e-11 * (1.0 + least.abs() + most.abs())
        return bool((found.lower <= least + room).all() & (found.upper >= most - room).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_taylor_encloses_effects_of_every_value(family: str) -> None:
    case = Case(family, FAMILIES.index(family))
    assert case.enclosed_by(bound_effects(get_engine("taylor"), case.problem, case.edited, case.forms))


@pytest.mark.parametrize(
    ("engine", "family"),
    [("alpha-crown", "gpt2"), *itertools.product(EVERY, ["encoder", "llama"])],
)
def test_engines_enclose_effects_of_every_value(engine: str, family: str) -> None:
    case = Case(family, 5)
    chosen = get_engine(engine)
    assert chosen.refuses(case.edited, case.forms) is None
    assert case.enclosed_by(both_alone(chosen, case.problem, case.edited, case.forms))


@pytest.mark.parametrize("family", ["encoder", "gpt2", "llama"])
def test_segments_times_segments_are_cut_into_pieces(family: str) -> None:
    case = Case(family, 2, segment=True)
    assert case.problem.region.n_factors == 2
    found = bound_effects(get_engine("chebyshev"), case.problem, case.edited, case.forms)
    assert bool(found.lower.isfinite().all())
    assert case.enclosed_by(found)


def test_engines_that_read_the_first_scores_alone_refuse() -> None:
    case = Case("gpt2", 0)
    for engine in ("layer0", "exact", "autolirpa"):
        assert get_engine(engine).refuses(case.problem, case.forms) is not None


def test_a_smaller_set_of_values_is_caught() -> None:
    """Without the generators of the set, or with half of them, what is proved is less than what is claimed."""
    case = Case("encoder", 0)
    whole, taylor = case.problem.region, get_engine("taylor")
    assert whole.radius is None
    for kept in (0.0, 0.5):
        G = whole.dense_generators().clone()
        G[:, :, case.model.architecture.d_model :] *= kept
        less = Region(whole.center, None, G, free=whole.free)
        pair = replace(case.problem, region=less), replace(case.edited, region=less)
        assert not case.enclosed_by(bound_effects(taylor, *pair, case.forms))


@pytest.mark.parametrize("family", ["encoder", "gpt2", "llama", "gemma2", "pythia"])
def test_the_checkers_own_bounds_hold(family: str) -> None:
    case = Case(family, 1)
    assert case.enclosed_by(SecondProof().bound_effects(case.problem, case.edited, case.forms))


@pytest.mark.parametrize("who", ["checker", "program"])
def test_a_walk_that_forgets_the_values_is_caught(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    case, engine = Case("encoder", 0), SecondProof() if who == "checker" else get_engine("taylor")
    if who == "program":
        for module in (program_blocks, program_edits):
            monkeypatch.setattr(module, "add_values", lambda builder, held, source, *before: source)
    for module in (walk, steps) if who == "checker" else ():
        monkeypatch.setattr(module, "values", lambda *given: None)
    assert not case.enclosed_by(bound_effects(engine, case.problem, case.edited, case.forms))


def test_values_alone_are_bounded_as_a_grid_of_plain_edits_finds_them(toy: pl.Transformer) -> None:
    value, spread = torch.ones(4).double() * 0.1, 0.05 * torch.eye(4)[:2].double()
    one, x = Edit("a1.h0@-1", value, spread=spread), toy.example()
    found = pl.effect(toy, one, x, pl.Ball(1e-9), "logit0-logit1", engine="taylor", budget="20/1/5")
    grid = torch.tensor(list(itertools.product(torch.linspace(-1.0, 1.0, 9).tolist(), repeat=2))).double()
    seen = []
    for beta in grid:
        outs = toy(x), pl.edit(toy, Edit("a1.h0@-1", value + beta @ spread))(x)
        seen.append(float(outs[0][0] - outs[0][1] - outs[1][0] + outs[1][1]))
    room = 1e-7
    assert found.lower <= min(seen) + room
    assert found.upper >= max(seen) - room
    assert found.upper - found.lower <= 1.1 * (max(seen) - min(seen))


def test_both_models_carry_the_values_so_that_they_part_at_the_edit() -> None:
    choose = random.Random(0)
    model = random_model("gpt2", choose, 3)
    x = torch.randn(S, model.architecture.d_model, generator=torch.Generator().manual_seed(0)).double()
    problem = Problem(model, Ball(0.01).around(x))
    problem, edited = side_by_side(problem, pl.edit(model, Edit("m2@-1", spread=0.1)), S)
    forms = output_forms(torch.ones(1, model.architecture.d_out or 1).double())
    assert Shared.of(*(asked_segments(one, forms) for one in (problem, edited))).chains == 3
