"""Runs about values inside a model: the checker computes every hook itself, and sees what was changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.models.reads import hooks_of
from tests.checker.forging import TOY, edit


def directions(toy: pl.Transformer) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        hook.name: torch.randn(hook.width, generator=generator, dtype=torch.float64)
        for hook in hooks_of(toy.architecture)
    }


def test_every_hook_is_computed_by_the_checker(toy: pl.Transformer, tmp_path: Path) -> None:
    for number, (hook, w) in enumerate(directions(toy).items()):
        out = tmp_path / str(number)
        queries = [f"read({hook}@2,D){level}" for level in (">0", "<0", "")]
        res = pl.certify(
            toy,
            toy.example(),
            pl.Ball(0.02),
            queries=queries,
            vectors={"D": w},
            out=out,
            engine="crown",
            budget="20/1/5",
        )
        report = check(out, TOY)
        assert report.ok, report
        assert report.counts["witness confirmed"] == res.counts["fails"] >= 1
        assert all("its name is free text" in finding.note for finding in report.findings)


@pytest.fixture
def run(toy: pl.Transformer, tmp_path: Path) -> Path:
    _, cache = toy.run_with_cache(toy.example())
    pre = cache["blocks.1.mlp.hook_pre"][3]
    queries = [f"neuron 1.{n}{'>' if pre[n] > 0 else '<'}0@-1" for n in range(4)]
    pl.certify(toy, toy.example(), pl.Ball(1e-3), queries=queries, out=tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert report.ok
    assert report.counts["re-proved"] == 4
    return tmp_path / "run"


def change_header(run: Path, **read: Any) -> None:
    info = json.loads((run / "run.json").read_text())
    info["read"] |= read
    (run / "run.json").write_text(json.dumps(info))


def test_another_place_in_the_header_is_seen(run: Path) -> None:
    change_header(run, position=2)
    assert not check(run, TOY).ok


def test_swapped_names_are_seen(run: Path) -> None:
    names = json.loads((run / "run.json").read_text())["read"]["names"]
    change_header(run, names=[names[1], names[0], *names[2:]])
    assert check(run, TOY).counts["WRONG"] >= 2


def test_other_directions_are_seen(run: Path) -> None:
    def scaled(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        tensors["read/weight"] = 2.0 * tensors["read/weight"]
        return 0

    edit(run, scaled)
    assert not check(run, TOY).ok


@pytest.mark.parametrize(
    "query", ["neuron 1.7>0.0@3", "neuron 0.0>0.0@3", "neuron 1.0>5.0@3", "neuron 1.0>0.0@2"]
)
def test_another_query_is_seen(run: Path, query: str) -> None:
    def renamed(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        rows[0]["query"] = query
        return 0

    edit(run, renamed)
    assert check(run, TOY).counts["WRONG"] >= 1
