"""Proofs by cells for two layers: against enumeration, and each bound against the members of its cell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines.attention_only import bound_task, enumerate_task, two_layers
from prooflens.engines.attention_only.mixtures import FirstLayer
from prooflens.errors import QueryError
from prooflens.models import Transformer
from prooflens.models.tasks import TokenTask
from tests.engines.attention_only.test_accuracy import INDUCTION, inputs_of, model_of

LEARNED = replace(INDUCTION, steps=700, width=16)


def margins_of(model: Transformer, ids: Tensor, task: TokenTask, rival: Tensor) -> Tensor:
    logits = model(ids)
    return (logits.gather(1, task.answers(ids)[:, None]) - logits.gather(1, rival[:, None]))[:, 0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [5, 100])
def test_the_proof_equals_enumeration(seed: int, steps: int) -> None:
    model = model_of(INDUCTION, seed, steps)
    proved, run = bound_task(model, INDUCTION), enumerate_task(model, INDUCTION)
    assert proved.word == "proved"
    assert proved.right == proved.most == run.right


@pytest.mark.slow
def test_a_model_that_has_learned_needs_fewer_cells_than_inputs() -> None:
    task = replace(LEARNED, vocabulary=9, steps=1500)
    model = model_of(task, biases=False)
    proved = bound_task(model, task)
    assert proved.right == enumerate_task(model, task).right > 0.9 * task.inputs
    assert proved.cells < task.inputs


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.3, 1.0, 3.0]), fixed=st.integers(0, 2))
def test_a_cell_bounds_all_its_members(seed: int, spread: float, fixed: int) -> None:
    task = INDUCTION
    model = model_of(task, seed, 0)
    model = replace(model, weights={name: spread * part for name, part in model.weights.items()})
    generator = torch.Generator().manual_seed(seed)
    tables = two_layers._Tables.of(model, task.length)
    cells = list(two_layers._first_cells(task))
    cell = cells[int(torch.randint(len(cells), (1,), generator=generator))]
    cell = cell.select(torch.randperm(len(cell), generator=generator)[:20])
    for _ in range(min(fixed, len(cell.free))):
        cell = cell.cut(task.vocabulary)
        cell = cell.select(torch.randperm(len(cell), generator=generator)[:20])
    found = tables.margins(cell)
    ids = inputs_of(task)
    ids = ids[ids[:, cell.i] == ids[:, -1]]
    for tokens, rival, least in zip(cell.tokens, cell.rival, found, strict=True):
        may = ((tokens == task.vocabulary) | (ids[:, :-1] == tokens)).all(-1)
        free = list(cell.free)
        may &= (ids[:, free] != rival).all(-1)
        members = ids[may]
        assert len(members)
        true = margins_of(model, members, task, rival.expand(len(members)))
        assert not bool((true < least).any())


def test_single_inputs_are_run_as_the_model_runs_them() -> None:
    model, task = model_of(INDUCTION, 3, 50), INDUCTION
    tables = two_layers._Tables.of(model, task.length)
    ids = inputs_of(task)
    ids = ids[ids[:, 1] == ids[:, -1]]
    rival = (task.answers(ids) + 1) % task.vocabulary
    middle, off = tables.run(two_layers._Cells(1, (), ids[:, :-1], rival))
    assert off < 1e-6
    assert bool(((middle - margins_of(model, ids, task, rival)).abs() <= off).all())


def test_every_input_and_rival_is_in_one_cell() -> None:
    task = replace(INDUCTION, vocabulary=5, length=4)
    seen: dict[tuple[int, ...], int] = {}
    stack = list(two_layers._first_cells(task))
    while stack:
        cell = stack.pop()
        if cell.free:
            stack.append(cell.cut(task.vocabulary))
            continue
        for tokens, rival in zip(cell.tokens.tolist(), cell.rival.tolist(), strict=True):
            key = (*tokens, tokens[cell.i], rival)
            seen[key] = seen.get(key, 0) + 1
    assert set(seen.values()) == {1}
    assert len(seen) == task.inputs * (task.vocabulary - 1)


@pytest.mark.parametrize("rule", ["the least", "ratios", "neighbours", "cells"])
def test_mutations_are_seen(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Each part of the rule counts: without it some proof is not what enumeration says."""
    if rule == "the least":
        inner = FirstLayer.least_mixture

        def mean(self: FirstLayer, e: Tensor, f: Tensor, *rest: Tensor) -> Tensor:
            found: Tensor = inner(self, e, f, *rest)  # type: ignore[arg-type]
            return torch.maximum(found, f / e)  # as if free positions did not matter

        monkeypatch.setattr(FirstLayer, "least_mixture", mean)
    elif rule == "ratios":
        monkeypatch.setattr(two_layers, "_score_tables", _eager(two_layers._score_tables))
    elif rule == "neighbours":
        free = two_layers._with_free

        def first_only(least: Tensor, taken: Tensor, p: int) -> Tensor:
            found = free(least, taken, p)
            found[:, -1] = found[:, 0].clamp(max=1e6)
            return found

        monkeypatch.setattr(two_layers, "_with_free", first_only)
    else:
        first = two_layers._first_cells
        monkeypatch.setattr(two_layers, "_first_cells", lambda task: list(first(task))[:-1])
    differs = [
        (proved.right, proved.most) != (run.right, run.right)
        for model in (model_of(INDUCTION, seed, 30) for seed in range(3))
        for proved, run in [(bound_task(model, INDUCTION), enumerate_task(model, INDUCTION))]
    ]
    assert any(differs)


def _eager(tables: object) -> object:
    """Scores of other positions too low by 30."""

    def made(*args: object) -> tuple[Tensor, Tensor]:
        right, others = tables(*args)  # type: ignore[operator]
        return right, others + 30.0

    return made


def test_scores_that_spread_too_far_are_refused() -> None:
    model = model_of(INDUCTION, 0, 1)
    weights = dict(model.weights)
    weights["blocks.0.q.weight"] = 1e6 * weights["blocks.0.q.weight"]
    with pytest.raises(QueryError, match="enumerate it"):
        bound_task(replace(model, weights=weights), INDUCTION)
