"""Runs about effects of edits that are tables of a model: they are proved again, from the weights and the words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.models.dictionaries import Dictionary
from prooflens.models.held_edits import feature
from prooflens.models.reads import find_hook, value_name
from tests.checker.forging import PACKAGE, TOY, edit, head
from tests.checker.test_later_steps import point, written

EMBEDDED = PACKAGE / "models" / "embedded"
METRIC = "logit0-logit1"


def drawn_feature(model: pl.Transformer, error: bool, beyond: float | None = None) -> pl.Edit:
    """A feature of four: a ReLU, or one that jumps `beyond` below what it reads at the last token."""
    generator = torch.Generator().manual_seed(0)
    d = model.architecture.d_model
    W, D, more = (torch.randn(4, d, generator=generator, dtype=torch.float64) for _ in range(3))
    held = Dictionary.of(
        "blocks.1.hook_resid_pre", W, more[0, :4], more[1], decoder=0.3 * D.T, decoder_bias=more[2]
    )
    if beyond is not None:
        values = model.run_with_cache(model.example())[1]
        h = values[value_name(values, find_hook(model.architecture, held.hook))][-1]
        read = held.weight @ (h - held.center) + held.bias
        held = replace(
            held, bias=held.bias - read + 1.0, threshold=torch.full((4,), 1.0 - beyond, dtype=torch.float64)
        )
        held = replace(held, kind="jumprelu")
    return feature(held, 1, 0.2, (-1,), error)


def edits_of(name: str, model: pl.Transformer) -> Any:
    """An edit by its name in the tests below."""
    if name.startswith("feature"):
        beyond = {"above": 0.3, "below": -0.3, "astride": 1e-4}.get(name.split()[-1])
        return drawn_feature(model, "decoded" not in name, beyond)
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
        *(("toy", f"feature {end}") for end in ("above", "decoded below")),
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


def test_what_jumps_on_the_region_is_not_proved_again(toy: pl.Transformer, tmp_path: Path) -> None:
    """A range that all samples keep to, about a feature astride its threshold, whatever a run says of it."""
    asked: Any = (toy, edits_of("feature decoded astride", toy), toy.example(), pl.Ball(0.01), METRIC)
    found = pl.effect(*asked, budget="20/1/2", engine="taylor")
    found.save(tmp_path / "run")
    (low, high), (least, most) = found.ends, found.to_dict()["attained"]
    assert most - least < 0.8 * (high - low)

    def narrowed(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        for side, end in (("lower", least - 1e-3), ("upper", most + 1e-3)):
            rows[0][side], tensors[f"row/0/{side}"] = end, 0.0 * tensors[f"row/0/{side}"] + end
        return 0

    assert [finding.status for finding in check(tmp_path / "run", TOY).findings] == ["re-proved"]
    edit(tmp_path / "run", narrowed)
    report = check(tmp_path / "run", TOY)
    assert [finding.status for finding in report.findings] == ["not checkable"], report


@pytest.mark.parametrize("careful", [False, True])
def test_another_threshold_is_wrong(toy: pl.Transformer, tmp_path: Path, careful: bool) -> None:
    """The feature's threshold is changed in the run's tensors; the careful forger states the fingerprint as well."""
    claimed(toy, "feature above", tmp_path / "run", toy.example())
    name = "blocks.1.resid_pre.features.jumps"
    weights = dict(pl.edit(toy, edits_of("feature above", toy)).weights)
    weights[name] = torch.tensor([0.9], dtype=torch.float64)
    sha = pl.Transformer(toy.architecture, weights).sha256

    def forged(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        assert tensors[f"edited/{name}"].tolist() == [0.7]
        tensors[f"edited/{name}"] = weights[name].numpy()
        return 0

    edit(tmp_path / "run", forged)
    if careful:
        info = json.loads((tmp_path / "run" / "run.json").read_text())
        head(tmp_path / "run", edited=info["edited"] | {"sha256": sha})
    report = check(tmp_path / "run", TOY)
    assert not report.ok
    assert ("does not have the stated fingerprint" in str(report)) == (not careful)


@pytest.mark.parametrize("name", ["a1.h0@1", "a0.h1.k1", "a0.h1.pattern"])
def test_the_bounds_of_one_edit_are_none_of_another(toy: pl.Transformer, tmp_path: Path, name: str) -> None:
    """The rows of a run about one edit in the folder of another: the clean values are off, whatever the hashes say."""
    claimed(toy, name, tmp_path / "one", toy.example())
    claimed(toy, "a1.h0@2", tmp_path / "other", toy.example())
    held = {part: json.loads((tmp_path / part / "run.json").read_text()) for part in ("one", "other")}
    (tmp_path / "one" / "run.json").write_text(json.dumps(held["one"] | {"edited": held["other"]["edited"]}))
    assert not check(tmp_path / "one", TOY).ok
