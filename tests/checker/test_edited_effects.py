"""Runs about effects of edits that are tables of a model: they are proved again, from the weights and the words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.models.dictionaries import Dictionary
from prooflens.models.held_edits import feature
from tests.checker.forging import PACKAGE, TOY
from tests.checker.test_later_steps import point, written

EMBEDDED = PACKAGE / "models" / "embedded"
METRIC = "logit0-logit1"


def drawn_feature(model: pl.Transformer, error: bool) -> pl.Edit:
    generator = torch.Generator().manual_seed(0)
    d = model.architecture.d_model
    W, D, more = (torch.randn(4, d, generator=generator, dtype=torch.float64) for _ in range(3))
    held = Dictionary.of(
        "blocks.1.hook_resid_pre", W, more[0, :4], more[1], decoder=0.3 * D.T, decoder_bias=more[2]
    )
    return feature(held, 1, 0.2, (-1,), error)


def edits_of(name: str, model: pl.Transformer) -> Any:
    """An edit by its name in the tests below."""
    if name.startswith("feature"):
        return drawn_feature(model, error=name == "feature")
    if name == "direction":
        v = torch.linspace(0.0, 1.0, model.architecture.d_model, dtype=torch.float64)
        return pl.Edit("blocks.1.hook_resid_pre@-1", direction=v)
    return name.split(", ")


def claimed(model: pl.Transformer, name: str, out: Path, prompt: Any, eps: float = 0.01) -> None:
    """A run whose claims leave a little room beside the range that is proved."""
    asked: Any = (model, edits_of(name, model), prompt, pl.Ball(eps), METRIC)
    low, high = pl.effect(*asked, budget="20/1/2", engine="taylor").ends
    room = 0.1 * (high - low)
    wanted: dict[str, Any] = {"necessary": low - room, "faithful": max(high, -low) + room}
    pl.effect(*asked, budget="20/1/2", engine="taylor", **wanted).save(out)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("toy", "a1.h0@1@-1"),
        ("toy", "m0@2, a0.h1"),
        ("toy", "m1.n3@0"),
        ("toy", "a0@1"),
        ("toy", "a0.h0.result@-1"),
        ("toy", "a0.h1.k1"),
        ("toy", "a1.h0.q2.k1"),
        ("toy", "a0.h1.pattern"),
        ("toy", "direction"),
        ("toy", "feature"),
        ("toy", "feature decoded"),
        ("toy-4layer", "a1.h0@1"),
    ],
)
def test_effects_of_tables_are_proved_again(model: str, name: str, tmp_path: Path) -> None:
    loaded = pl.load(model)
    claimed(loaded, name, tmp_path / "run", loaded.example(), 0.002 if model != "toy" else 0.01)
    report = check(tmp_path / "run", EMBEDDED / model)
    assert report.ok, report
    assert [finding.status for finding in report.findings[1:]] == ["re-proved"] * 2, report


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt2", "a0.h0->a1.h0.k"),
        ("gpt2", "input->a1.h1.v, m0->logits"),
        ("bloom", "a0->m0@-1"),
        ("neo", "m0.n1->m1, a0.h1->logits@-1"),
    ],
)
def test_effects_of_edges_are_proved_again(family: str, name: str, tmp_path: Path) -> None:
    model = written(family, tmp_path / "model", seed=0)
    claimed(model, name, tmp_path / "run", point(model), 0.001)
    report = check(tmp_path / "run", tmp_path / "model")
    assert report.ok, report
    assert [finding.status for finding in report.findings[1:]] == ["re-proved"] * 2, report


def test_a_patch_is_proved_again(toy: pl.Transformer, tmp_path: Path) -> None:
    """A metric of the edited model alone: parts at their values on another prompt, token by token."""
    for number in range(8):
        found = pl.effect(
            toy,
            ["a1.h0", "m0@-1"],
            toy.example(),
            pl.Ball(1e-3),
            METRIC,
            patched=toy.example(number),
            budget="20/1/2",
        )
        if found.claims[-1].verdict.value != "holds":
            continue
        found.save(tmp_path / f"{number}")
        report = check(tmp_path / f"{number}", TOY)
        assert report.ok, report
        assert report.findings[-1].status == "re-proved", report
        return
    pytest.fail("no patch holds")


@pytest.mark.parametrize("name", ["a1.h0@1", "a0.h1.k1", "a0.h1.pattern"])
def test_the_bounds_of_one_edit_are_none_of_another(toy: pl.Transformer, tmp_path: Path, name: str) -> None:
    """The rows of a run about one edit in the folder of another: the clean values are off, whatever the hashes say."""
    claimed(toy, name, tmp_path / "one", toy.example())
    claimed(toy, "a1.h0@2", tmp_path / "other", toy.example())
    held = {part: json.loads((tmp_path / part / "run.json").read_text()) for part in ("one", "other")}
    (tmp_path / "one" / "run.json").write_text(json.dumps(held["one"] | {"edited": held["other"]["edited"]}))
    assert not check(tmp_path / "one", TOY).ok
