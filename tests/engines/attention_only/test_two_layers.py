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


@pytest.mark.parametrize(("vocabulary", "length"), [(4, 5), (5, 3), (7, 4)])
def test_few_tokens_and_short_inputs(vocabulary: int, length: int) -> None:
    """With as many tokens as places, rivals that occur nowhere have empty cells."""
    task = replace(INDUCTION, vocabulary=vocabulary, length=length)
    model = model_of(task, 1, 40)
    proved = bound_task(model, task)
    assert proved.right == proved.most == enumerate_task(model, task).right


@pytest.mark.parametrize("scale", [0.0, 2.5])
def test_ties_and_large_scores_are_left_open(scale: float) -> None:
    """With no weights all logits are 0, and with large ones rounding blurs what is small."""
    model = model_of(INDUCTION, 2, 40)
    model = replace(model, weights={name: scale * part for name, part in model.weights.items()})
    proved, run = bound_task(model, INDUCTION), enumerate_task(model, INDUCTION)
    assert proved.right <= run.right <= proved.most
    assert proved.right == 0 or scale


def test_twins_are_proved_by_nobody() -> None:
    """Two outputs with one row of the head: neither is ever above the other."""
    model = model_of(INDUCTION, 1)
    weights = dict(model.weights)
    for name in ("head.weight", "head.bias"):
        weights[name] = weights[name].clone()
        weights[name][3] = weights[name][5]
    answers = INDUCTION.answers(inputs_of(INDUCTION))
    affected = int(((answers == 3) | (answers == 5)).sum())
    assert bound_task(replace(model, weights=weights), INDUCTION).right <= INDUCTION.inputs - affected


def by_hand(task: TokenTask) -> Transformer:
    """An induction circuit: each position fetches the token before it, and the last the position that fetched its own.

    The stream holds the token, its place, the token before, and the answer, each as a unit vector.
    """
    V, n = task.vocabulary, task.length
    d = task.architecture.d_model
    token, place, before = torch.arange(V), V + torch.arange(n), V + n + torch.arange(V)
    zero = torch.zeros(d, d, dtype=torch.float64)
    weights = {f"blocks.{layer}.{name}.weight": zero.clone() for layer in (0, 1) for name in "qkvo"}
    weights |= {"embed.tokens": zero[:V].clone(), "embed.positions": zero[:n].clone()}
    weights |= {"head.weight": zero[:V].clone(), "head.bias": zero[0, :V].clone()}
    weights["embed.tokens"][token, token] = 1.0
    weights["embed.positions"][torch.arange(n), place] = 1.0
    weights["blocks.0.q.weight"][place[:-1], place[1:]] = 60.0
    weights["blocks.0.k.weight"][place, place] = 1.0
    weights["blocks.0.v.weight"][token, token] = 1.0
    weights["blocks.0.o.weight"][before, token] = 1.0
    weights["blocks.1.q.weight"][token, token] = 60.0
    weights["blocks.1.k.weight"][token, before] = 1.0
    weights["blocks.1.k.weight"][token, place[0]] = -1.0  # the first position fetched itself
    weights["blocks.1.v.weight"][token, token] = 1.0
    weights["blocks.1.o.weight"][before, token] = 4.0  # above the token before the last
    weights["head.weight"][token, before] = 1.0
    return Transformer(task.architecture, weights, name="by hand")


def test_a_clear_circuit_needs_fewer_cells_than_inputs() -> None:
    task = TokenTask("induction", "induction", vocabulary=8, length=6, layers=2, steps=0, width=22)
    model = by_hand(task)
    proved = bound_task(model, task)
    assert proved.right == enumerate_task(model, task).right == task.inputs
    assert proved.cells < 0.5 * task.inputs


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

        def hopeful(least: Tensor, taken: Tensor, p: int) -> Tensor:
            found = free(least, taken, p)
            found[:, -1], found[:, :, -1] = 50.0, 50.0  # whatever stands there writes nothing
            return found

        monkeypatch.setattr(two_layers, "_with_free", hopeful)
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
