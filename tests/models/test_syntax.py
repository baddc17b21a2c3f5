"""The two tasks of syntax: their inputs, and that the recipe learns them."""

from __future__ import annotations

from pathlib import Path

import torch

import prooflens as pl
from prooflens.models.syntax import NAME, SYNTAX, domain
from prooflens.models.train import train


def test_every_mark_is_closed_by_its_own() -> None:
    ids, answers = domain()
    assert (len(ids), len({tuple(row) for row in ids.tolist()})) == (256, 256)
    closes = {4: 4, 5: 5, 6: 7, 8: 9}
    assert answers.tolist() == [closes[mark] for mark in ids[:, 3].tolist()]
    assert [task.answers for task in SYNTAX.values()] == [(4, 5), (7, 9)]


def test_the_recipe_learns_both_tasks(tmp_path: Path) -> None:
    made = train(NAME, target=tmp_path / "model", epochs=1)
    again = train(NAME, target=tmp_path / "again", epochs=1)
    model = pl.load(str(made.folder))
    assert model.sha256 == pl.load(str(again.folder)).sha256
    ids, answers = domain()
    assert made.accuracy == float((model(ids).argmax(-1) == answers).double().mean()) > 0.9
    assert model.architecture.norm_place == "pre"
    assert 7000 < sum(tensor.numel() for tensor in model.weights.values()) < 9000
    assert torch.equal(ids[:, 0], torch.ones(256).long())
