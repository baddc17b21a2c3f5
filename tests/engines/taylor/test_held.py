"""Walks that are kept between calls: the bounds of one that starts at the input, and nothing taken over wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import prooflens as pl
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineOptions, Workspace
from prooflens.engines.taylor.chain import Fork
from prooflens.engines.taylor.engine import Taylor
from prooflens.engines.taylor.held import HeldWalk, earlier_walk
from prooflens.engines.taylor.segments import Segment, asked_segments
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.models import Architecture, Transformer
from prooflens.models.train import initial_weights
from prooflens.problem import Problem
from tests.engines.support import assert_contains, center_of, model_of, random_forms, random_problem
from tests.families import FAMILIES


def deep_model(layers: int = 4) -> Transformer:
    """A small encoder of several layers."""
    architecture = Architecture("encoder", layers, 2, 8, 8, "gelu", pool="mean", d_out=2)
    weights = initial_weights(architecture, torch.Generator().manual_seed(1))
    return Transformer(
        architecture, {name: 1.5 * tensor.detach().double() for name, tensor in weights.items()}
    )


def test_layer_after_layer_has_the_bounds_of_walks_from_the_input() -> None:
    model = deep_model()
    problem = Problem(model, pl.Ball(1e-3).around(center_of(model, 3, 0)))
    options = EngineOptions(workspace=Workspace())
    for layer in (1, 1, 2, 3, 2):
        forms = random_forms(problem, layer, 8, layer)
        held, alone = Taylor().bound_forms(problem, forms, options), Taylor().bound_forms(problem, forms)
        assert torch.allclose(held.lower, alone.lower, rtol=1e-9, atol=1e-12)
        assert torch.allclose(held.upper, alone.upper, rtol=1e-9, atol=1e-12)
        assert_contains(problem, forms, held)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_on(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in turn, the second of them twice: the third call takes a chain over, and outputs do as well."""
    taken: list[int] = []
    go_on = TaylorWalk.go_on

    def counted(walk: TaylorWalk, segments: list[Segment], fork: Fork, read: list[int] | None) -> None:
        taken.append(len(fork.chains))
        go_on(walk, segments, fork, read)

    monkeypatch.setattr(TaylorWalk, "go_on", counted)
    problem = random_problem(model_of(family), 3, 1e-3, 2)
    options = EngineOptions(workspace=Workspace())
    for layer in (0, 1, 1):
        forms = random_forms(problem, layer, 6, len(taken) + layer)
        held, alone = Taylor().bound_forms(problem, forms, options), Taylor().bound_forms(problem, forms)
        assert torch.allclose(held.lower, alone.lower, rtol=1e-9, atol=1e-12)
        assert_contains(problem, forms, held)
    logits = torch.eye(problem.model.architecture.d_out or 0, dtype=torch.float64)[:2]
    if len(logits):
        forms = replace(Forms.of([], len(logits)), logits=logits)
        assert_contains(problem, forms, Taylor().bound_forms(problem, forms, options))
    assert taken
    assert min(taken) == 1


def test_only_the_same_problem_and_what_is_kept_is_taken_over() -> None:
    model = deep_model()
    problem = Problem(model, pl.Ball(1e-3).around(center_of(model, 3, 0)))
    forms = random_forms(problem, 2, 4, 0)
    segments = asked_segments(problem, forms)

    def held(kept: frozenset[int] | None) -> EngineOptions:
        """A workspace with a walk to layer 1, as `Taylor.walk` makes it."""
        walk = TaylorWalk(2**30, kept=kept)
        before = asked_segments(problem, random_forms(problem, 1, 4, 0))
        walk.forward(before, problem.region.center, torch.zeros(3, 8, 1, dtype=torch.float64))
        work = Workspace()
        work.put("taylor, tight walk", problem, HeldWalk(problem, walk))
        return EngineOptions(workspace=work)

    whole, some = TaylorWalk(2**30), TaylorWalk(2**30, kept=frozenset({0, 2}))
    assert earlier_walk(held(None), problem, segments, whole) is not None
    assert earlier_walk(held(frozenset({0, 1})), problem, segments, some) is not None
    assert earlier_walk(held(frozenset({1})), problem, segments, some) is None  # layer 0 is gone
    assert earlier_walk(held(None), problem, segments, some) is None
    assert earlier_walk(held(None), problem, segments, TaylorWalk(2**30, quick=True)) is None
    assert earlier_walk(held(None), problem, segments, TaylorWalk(2**30, blur=1e-9)) is None
    assert earlier_walk(held(None), problem, segments[:1], whole) is None
    other = Problem(model, pl.Ball(2e-3).around(center_of(model, 3, 0)))
    assert earlier_walk(held(None), other, segments, whole) is None
    options = held(None)
    assert earlier_walk(options, problem, segments, whole) is not None
    assert not options.workspace  # its last root is used up


def test_nothing_is_held_that_memory_does_not_allow() -> None:
    model = deep_model()
    problem = Problem(model, pl.Ball(1e-3).around(center_of(model, 3, 0)))
    forms = random_forms(problem, 2, 4, 0)
    for memory, some in ((2**30, True), (2**19, False)):
        options = EngineOptions(memory=memory, workspace=Workspace())
        if Taylor().refuses(problem, forms, options) is None:
            Taylor().bound_forms(problem, forms, options)
        assert bool(options.workspace) is some
