"""Accuracy over all inputs: enumeration against the model itself, proofs against enumeration."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import prooflens as pl
from prooflens.engines.attention_only import bound_task, enumerate_task, one_layer
from prooflens.errors import ModelError, QueryError
from prooflens.models import Transformer
from prooflens.models.tasks import TASKS, TokenTask, fit
from prooflens.models.train import train
from prooflens.models.weights import optional_shapes
from tests.conftest import Call

MAX = TokenTask("max-of-3", "max", vocabulary=7, length=3, layers=1, steps=150, width=8)
INDUCTION = TokenTask("induction", "induction", vocabulary=6, length=5, layers=2, steps=100, width=8)


def model_of(task: TokenTask, seed: int = 0, steps: int | None = None, biases: bool = True) -> Transformer:
    """A model that has learned something, with biases that it was not trained with."""
    made = fit(
        task,
        seed,
        task.steps if steps is None else steps,
        torch.Generator().manual_seed(seed),
        lambda _: None,
    )
    weights = {name: tensor.detach().double() for name, tensor in made.weights.items()}
    if biases:
        generator = torch.Generator().manual_seed(seed)
        for name, shape in sorted(optional_shapes(task.architecture).items()):
            if name.endswith(("q.bias", "k.bias", "v.bias", "o.bias", "head.bias")):
                weights[name] = 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return Transformer(task.architecture, weights, name=task.name)


def inputs_of(task: TokenTask) -> Tensor:
    if task.kind == "max":
        return torch.tensor(list(itertools.product(range(task.vocabulary), repeat=task.length)))
    rows = [
        (*row, row[again])
        for row in itertools.permutations(range(task.vocabulary), task.length - 1)
        for again in range(task.length - 2)
    ]
    return torch.tensor(rows)


def truth(model: Transformer, task: TokenTask) -> tuple[int, float]:
    ids = inputs_of(task)
    assert len(ids) == task.inputs
    logits = model(ids)
    answers = task.answers(ids)
    right = logits.gather(-1, answers[:, None])[:, 0]
    margins = right - logits.scatter(-1, answers[:, None], -torch.inf).amax(-1)
    return int((margins > 0).sum()), float(margins.abs().min())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "task", [MAX, replace(MAX, length=2), replace(MAX, length=4, vocabulary=5), INDUCTION]
)
def test_enumeration_equals_the_model(task: TokenTask, seed: int) -> None:
    model = model_of(task, seed)
    found = enumerate_task(model, task)
    right, nearest = truth(model, task)
    assert (found.right, found.most, found.word) == (right, right, "enumerated")
    assert found.nearest == pytest.approx(nearest, abs=1e-9)
    assert 0 < right < task.inputs or seed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [5, 150])
def test_the_proof_equals_enumeration(seed: int, steps: int) -> None:
    model = model_of(MAX, seed, steps)
    proved, run = bound_task(model, MAX), enumerate_task(model, MAX)
    assert proved.word == "proved"
    assert proved.right == proved.most == run.right
    assert proved.share == run.share


def test_a_good_model_needs_few_cells() -> None:
    task = replace(MAX, steps=600)
    proved = bound_task(model_of(task, biases=False), task)
    assert proved.cells < task.inputs
    assert proved.right > 0.9 * task.inputs


@pytest.mark.parametrize("rule", ["m at least once", "errors", "sizes"])
def test_mutations_are_seen(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Each part of the rule counts: without it some proof is not what enumeration says."""
    if rule == "m at least once":
        once = one_layer._LastToken._free

        def forgetful(self: one_layer._LastToken) -> list[tuple[Tensor, Tensor]]:
            return [(least, least + 1e3) for least, _ in once(self)]

        monkeypatch.setattr(one_layer._LastToken, "_free", forgetful)
    elif rule == "errors":
        of = one_layer._LastToken.of.__func__  # type: ignore[attr-defined]

        def loose(cls: type, tables: object, last: int) -> one_layer._LastToken:
            made: one_layer._LastToken = of(cls, tables, last)
            return replace(made, errors=made.errors + 1e3)

        monkeypatch.setattr(one_layer._LastToken, "of", classmethod(loose))
    else:
        cut = one_layer._LastToken._cut

        def wide(self: one_layer._LastToken, depth: int, *parts: Tensor) -> tuple[Tensor, ...]:
            return cut(self, min(depth, 0), *parts)

        monkeypatch.setattr(one_layer._LastToken, "_cut", wide)
    differs = [
        (proved.right, proved.most) != (run.right, run.right)
        for model in (model_of(MAX, seed, 50) for seed in range(3))
        for proved, run in [(bound_task(model, MAX), enumerate_task(model, MAX))]
    ]
    assert any(differs)


def test_ties_are_proved_by_nobody() -> None:
    """Two outputs with one row of the head: the larger of them is never above the other."""
    model = model_of(MAX, 1)
    weights = dict(model.weights)
    for name in ("head.weight", "head.bias"):
        weights[name] = weights[name].clone()
        weights[name][3] = weights[name][6]
    twins = Transformer(model.architecture, weights)
    ids = inputs_of(MAX)
    affected = int(((ids.amax(-1) == 3) | (ids.amax(-1) == 6)).sum())
    assert bound_task(twins, MAX).right <= MAX.inputs - affected


def test_refusals() -> None:
    model = model_of(MAX, steps=1)
    with pytest.raises(ModelError, match="another depth or vocabulary"):
        enumerate_task(model, INDUCTION)
    with pytest.raises(ModelError, match="float32"):
        enumerate_task(model.to(dtype=torch.float32), MAX)
    with pytest.raises(ModelError, match="attention-only models with one head"):
        enumerate_task(pl.load("toy"), MAX)
    deeper = replace(INDUCTION, layers=3)
    with pytest.raises(QueryError, match="no proof for induction by 3 layer"):
        bound_task(model_of(deeper, steps=1), deeper)
    with pytest.raises(QueryError, match="those are max-of-4, induction-2l"):
        pl.accuracy(model, "max")


def test_tasks_have_the_sizes_of_the_literature() -> None:
    assert TASKS["max-of-4"].inputs == 64**4
    assert TASKS["induction-2l"].inputs == 2_096_640
    ids = torch.tensor([[3, 1, 4, 0, 5, 1]])
    assert TASKS["induction-2l"].answers(ids).item() == 4


def test_train_and_accuracy_on_the_command_line(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "max-of-4", replace(MAX, name="max-of-4"))
    first = train("max-of-4", target=tmp_path / "a", epochs=1)
    assert (
        pl.load(first.folder).sha256
        == pl.load(train("max-of-4", target=tmp_path / "b", epochs=1).folder).sha256
    )
    code, text, _ = call("accuracy", str(first.folder), "--task", "max-of-4", "--json")
    assert code == 0
    run = json.loads(text)
    code, text, _ = call("accuracy", str(first.folder), "--task", "max-of-4", "--proof")
    assert code == 0
    assert f"{run['right']:,} of {MAX.inputs:,}" in text
