"""Effects of edits in `taylor`: the second walk goes on where the models part, and other edits share the first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import prooflens as pl
from prooflens.engines.bounds import FormBounds
from prooflens.engines.forms import Forms
from prooflens.engines.hidden import output_forms
from prooflens.engines.protocol import EngineOptions, Workspace
from prooflens.engines.taylor import Taylor, least_memory
from prooflens.engines.taylor.chain import Fork
from prooflens.engines.taylor.segments import Segment
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.problem import Problem
from tests.engines.support import center_of, model_of, random_problem
from tests.engines.taylor.test_held import deep_model
from tests.engines.test_relational import check

EDITS = {"a3.h0": 3, "a2.h1": 2, "m2": 3, "a3.h1": 3}
"""Parts that are taken out, and how many chains the model shares with the one without it."""


@pytest.fixture(name="begun")
def fixture_begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With how many chains taken over each walk began."""
    begun: list[int] = []
    forward, go_on = TaylorWalk.forward, TaylorWalk.go_on

    def counted(walk: TaylorWalk, *asked: object) -> None:
        begun.append(0)
        forward(walk, *asked)  # type: ignore[arg-type]

    def gone_on(walk: TaylorWalk, segments: list[Segment], fork: Fork, read: list[int] | None) -> None:
        begun.append(len(fork.chains))
        go_on(walk, segments, fork, read)

    monkeypatch.setattr(TaylorWalk, "forward", counted)
    monkeypatch.setattr(TaylorWalk, "go_on", gone_on)
    return begun


def asked(layers: int = 4) -> tuple[Problem, Forms]:
    """A deep model on a ball, and a difference of its outputs."""
    model = deep_model(layers)
    problem = Problem(model, pl.Ball(2e-3).around(center_of(model, 3, 0)))
    return problem, output_forms(torch.tensor([[1.0, -1.0]]).double())


def same(one: FormBounds | None, other: FormBounds | None) -> bool:
    assert one is not None
    assert other is not None
    return torch.allclose(one.lower, other.lower, rtol=1e-9, atol=1e-12) and torch.allclose(
        one.upper, other.upper, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("whole", [True, False])
def test_edits_share_the_walk_through_the_model(whole: bool, begun: list[int]) -> None:
    """Where chains are not kept, a second edit at the same layer or behind it needs no first walk of its own."""
    problem, forms = asked()
    memory = None if whole else int(1.01 * least_memory(problem, forms))
    options = EngineOptions(memory, workspace=Workspace())
    for name in EDITS:
        edited = Problem(pl.edit(problem.model, name), problem.region)
        shared = Taylor().bound_effects(problem, edited, forms, options)
        taken = begun.copy()
        begun.clear()
        alone = Taylor().bound_effects(problem, edited, forms, EngineOptions(memory))
        assert same(shared, alone), name
        assert shared is not None
        check(shared, problem, edited, forms)
        # The fork of the first walk lies behind layer 2, that of the second serves all that follow.
        assert taken == ([0, EDITS[name]] if whole or name in ("a3.h0", "a2.h1") else [2]), name
        begun.clear()


def test_a_walk_is_not_shared_with_other_questions(begun: list[int]) -> None:
    problem, forms = asked()
    memory = int(1.01 * least_memory(problem, forms))
    options = EngineOptions(memory, workspace=Workspace())
    edited = Problem(pl.edit(problem.model, "a2.h0"), problem.region)
    other = replace(forms, logits=torch.tensor([[1.0, 0.0]]).double())
    region = pl.Ball(1e-3).around(problem.region.center)
    near = Problem(problem.model, region), Problem(edited.model, region)
    for first, second, read in ((problem, edited, forms), (problem, edited, other), (*near, forms)):
        begun.clear()
        found = Taylor().bound_effects(first, second, read, options)
        assert begun == [0, 2]
        assert same(found, Taylor().bound_effects(first, second, read, EngineOptions(memory)))


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_quick_walks_bound_effects(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where thorough walks do not fit into memory, quick ones bound the effect."""
    taken: list[bool] = []
    walk = Taylor.walk

    def noted(
        engine: Taylor, asked: Problem, forms: Forms, options: EngineOptions, quick: bool, **more: object
    ) -> TaylorWalk:
        taken.append(quick)
        return walk(engine, asked, forms, options, quick, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Taylor, "walk", noted)
    problem = random_problem(model_of(family), 3, 1e-3, 2)
    outputs = problem.model.architecture.d_out or 0
    forms = output_forms(torch.eye(outputs, dtype=torch.float64)[:1])
    edited = Problem(pl.edit(problem.model, "a1.h0"), problem.region)
    found = Taylor().bound_effects(problem, edited, forms, EngineOptions(least_memory(problem, forms) - 1))
    assert found is not None
    assert taken == [True, True]
    assert check(found, problem, edited, forms)


def test_models_that_go_on_with_other_tokens_share_no_walk(begun: list[int]) -> None:
    """Behind the last attention the model needs its last token alone, and the edited one every token."""
    problem = random_problem(model_of("gpt2"), 3, 1e-3, 2)
    forms = output_forms(torch.eye(problem.model.architecture.d_out or 0, dtype=torch.float64)[:1])
    edited = Problem(pl.edit(problem.model, f"m{problem.model.architecture.n_layers - 1}@0"), problem.region)
    found = Taylor().bound_effects(problem, edited, forms)
    assert found is not None
    check(found, problem, edited, forms)
    assert begun == [0, 0]


def test_roots_of_chains_that_are_not_kept_hold_no_factors() -> None:
    problem, forms = asked()
    options = EngineOptions(int(1.01 * least_memory(problem, forms)))
    walk = Taylor().walk(problem, forms, options)
    assert walk.kept is not None
    assert all(chain.root.N.numel() == 0 for chain in walk.chains[:-1] if chain.segment.attention is not None)
    whole = Taylor().walk(problem, forms)
    for one, other in zip(walk.chains, whole.chains, strict=True):
        assert torch.equal(one.root.reads, other.root.N.sum(-1))
