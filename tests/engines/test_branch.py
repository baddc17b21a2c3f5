"""Engine `beta-crown`: cases of ReLUs cover the region, the bound of each part holds there, and cases decide more."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens import Ball, output
from prooflens.engines import get_engine
from prooflens.engines.crown.alpha import SlopeSearch
from prooflens.engines.crown.branch import BetaCrown, Branching, Parts
from prooflens.engines.crown.engine import starts
from prooflens.engines.crown.steps import Curve, Parameters, Passed
from prooflens.engines.crown.walk import LineWalk, Start, plain
from prooflens.engines.forms import Forms
from prooflens.engines.hidden import output_forms
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions
from prooflens.engines.relaxations.interval_walk import form_program
from prooflens.problem import Problem
from prooflens.verdicts.stages import PORTFOLIO
from tests.engines.cases import tiny_problem

ENGINE = BetaCrown(steps=4, part_steps=6, most_parts=256)


def plain_network(seed: int, eps: float, n_tokens: int = 2, n_layers: int = 1) -> tuple[Problem, Forms]:
    """A model without norms, where ReLUs are what lines lose most at, and its first output less its second."""
    problem = tiny_problem(seed, n_tokens, eps, norm_place="none", n_layers=n_layers)
    return problem, output_forms(torch.tensor([[1.0, -1.0]], dtype=torch.float64))


def values(problem: Problem, points: Tensor) -> Tensor:
    output = problem.model(points)
    return output[..., 0] - output[..., 1]


def branching_of(problem: Problem, forms: Forms) -> tuple[Branching, Parts, Tensor]:
    """The cases of minus the form, the region as one part, and the sign that makes the form positive."""
    walk = LineWalk.through(problem, form_program(problem, forms), plain)
    ((_, start),) = starts(problem, walk, forms)
    asked = Start({name: -A for name, A in start.values.items()})
    found = SlopeSearch(3).search(walk, asked)
    assert found is not None
    made = Branching(walk, asked, found.tau, 5)
    return made, made.whole(found.best), found.best


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), eps=st.sampled_from([0.02, 0.1, 0.3]), layers=st.sampled_from([1, 2]))
def test_bounds_hold_and_are_never_looser_than_crowns(seed: int, eps: float, layers: int) -> None:
    problem, forms = plain_network(seed, eps, n_layers=layers)
    found, crown = ENGINE.bound_forms(problem, forms), get_engine("crown").bound_forms(problem, forms)
    reached = values(problem, problem.region.sample(300, seed, corners=0.7)[0])
    slack = 1e-12 * (1.0 + float(reached.abs().max()))
    assert float(found.lower) <= float(reached.min()) + slack
    assert float(found.upper) >= float(reached.max()) - slack
    assert float(found.lower) >= float(crown.lower) - 1e-12
    assert float(found.upper) <= float(crown.upper) + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_every_part_bounds_the_points_that_have_its_signs(seed: int) -> None:
    all_parts_of(seed, 0.3)


@pytest.mark.parametrize("seed", range(3))
def test_where_the_time_ends_parts_keep_the_bound_of_what_they_are_parts_of(seed: int) -> None:
    all_parts_of(seed, 0.3, EngineOptions(deadline=0.0))
    made, parts, _ = branching_of(*plain_network(seed, 0.3))
    if len(made.gaps):
        late = made._split(parts, len(made.gaps), EngineOptions(deadline=0.0))
        assert bool((late.best == parts.best).all())


def all_parts_of(seed: int, eps: float, options: EngineOptions = NO_OPTIONS) -> None:
    problem, forms = plain_network(seed, eps)
    made, parts, _ = branching_of(problem, forms)
    if not len(made.gaps):
        return
    points = problem.region.sample(2000, seed, corners=0.5)[0]
    program = problem.model.program(problem.n_tokens, ["output"], None)
    found = program.run(points)
    names = {step.out: step.inputs[0] for step in program.steps}
    hidden = torch.cat([found[names[name]][:, mask] for name, mask in made.open.items()], -1)
    reached = -values(problem, points)
    for _ in range(2):
        free = int((parts.side == 0).sum(-1).min())
        if free == 0:
            break
        parts = made._split(parts, free, options)
        inside = (hidden[None] * parts.side[:, None] >= 0.0).all(-1)
        assert bool(inside.any(0).all()), "the parts do not cover the region"
        for part, bound in zip(inside, parts.best.tolist(), strict=True):
            if bool(part.any()):
                assert float(reached[part].max()) <= bound + 1e-12


def decided(engine: Any, problem: Problem, forms: Forms) -> bool:
    found = engine.bound_forms(problem, forms)
    return bool(found.lower > 0.0) or bool(found.upper < 0.0)


def open_problem() -> tuple[Problem, Forms]:
    """A problem that `alpha-crown` leaves open and cases decide."""
    return plain_network(19, 0.1)


def test_cases_decide_what_lines_leave_open() -> None:
    problem, forms = open_problem()
    assert not decided(get_engine("alpha-crown"), problem, forms)
    assert decided(ENGINE, problem, forms)
    reached = values(problem, problem.region.sample(5000, 0, corners=0.7)[0])
    assert bool((reached > 0.0).all()) or bool((reached < 0.0).all())


def test_the_time_is_kept() -> None:
    problem, forms = open_problem()
    late = ENGINE.bound_forms(problem, forms, EngineOptions(deadline=0.0))
    whole = ENGINE.bound_forms(problem, forms)
    assert bool(late.lower <= whole.lower)
    assert bool(late.upper >= whole.upper)


@pytest.mark.parametrize("wrong", ["sign of beta", "both sides the input"])
def test_a_wrong_rule_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutation of the rule of a split ReLU breaks a bound of some part."""
    right = Curve.back

    def back(self: Curve, A: Tensor, tau: Parameters) -> Passed:
        if "side" not in tau:
            return right(self, A, tau)
        changed = dict(tau)
        if wrong == "sign of beta":
            changed["beta"] = -tau["beta"]
        else:
            changed["side"] = tau["side"].abs()
        return right(self, A, changed)

    monkeypatch.setattr(Curve, "back", back)
    with pytest.raises(AssertionError):
        all_parts_hold()


def test_the_right_rule_is_not() -> None:
    all_parts_hold()


def all_parts_hold() -> None:
    for seed in range(40):
        all_parts_of(seed, 0.1)


def test_a_model_without_relus_is_bounded_as_alpha_crown_does() -> None:
    problem = tiny_problem(3, 2, 0.3, norm_place="none", activation="gelu")
    forms = output_forms(torch.tensor([[1.0, -1.0]], dtype=torch.float64))
    made, whole, best = branching_of(problem, forms)
    assert len(made.gaps) == 0
    assert float(made.prove(whole, 8, NO_OPTIONS)) == float(best)


def test_auto_begins_with_cases_on_large_problems_without_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = open_problem()
    monkeypatch.setattr("prooflens.verdicts.stages.SMALL_FACTORS", 1)
    asked = [stage.engine for stage in PORTFOLIO if stage.applies(problem, 1)]
    assert asked.index("beta-crown") < asked.index("taylor")
    assert "crown" not in asked, "it is the first step of beta-crown"
    assert asked.count("beta-crown") == 1


def test_auto_goes_on_to_cases_where_there_are_no_norms() -> None:
    problem, _ = open_problem()
    first, last = (stage for stage in PORTFOLIO if stage.engine == "beta-crown")
    assert last.applies(problem, 1)
    assert not first.applies(problem, 1), "on a small problem other engines are asked before"
    assert not last.applies(problem, 0)
    assert not last.applies(tiny_problem(19, 2, 0.1), 1)
    found = output(problem.model, problem.region.center, Ball(0.1))
    assert str(found.rows[0]["verdict"]) == "holds", found.rows[0]
