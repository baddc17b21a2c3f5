"""Features of a dictionary: what is active, what stays so on balls and ways, pictures, runs and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import prooflens as pl
from prooflens.checker import check
from prooflens.cli import app
from prooflens.errors import ProoflensError
from prooflens.report import collect
from prooflens.report.readouts import readout_bars
from tests.checker.forging import TOY

HOOK = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def toy() -> pl.Transformer:
    return pl.load("toy")


@pytest.fixture(scope="module")
def sae(toy: pl.Transformer) -> pl.Dictionary:
    generator = torch.Generator().manual_seed(0)
    d = toy.architecture.d_model
    W, b, c = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((12, d), (12,), (d,)))
    return pl.Dictionary.of(HOOK, W, b, 0.1 * c, threshold=0.2, kind="jumprelu")


def distances(toy: pl.Transformer, sae: pl.Dictionary, x: torch.Tensor, position: int) -> torch.Tensor:
    h = toy.run_with_cache(x)[1][HOOK][position]
    return (h - sae.center) @ sae.weight.T + sae.bias - sae.threshold


def test_the_active_ones_come_first_with_their_distances(toy: pl.Transformer, sae: pl.Dictionary) -> None:
    x = toy.example()
    found = pl.features(toy, x, sae, pl.Ball(1e-5), position=2, off=3, engine="taylor")
    clean = distances(toy, sae, x.x, 2)
    active = [i for i in clean.argsort(descending=True).tolist() if clean[i] > 0]
    off = [i for i in clean.argsort(descending=True).tolist() if clean[i] <= 0][:3]
    assert found.table["feature"].to_pylist() == active + off
    assert found.table["active"].to_pylist() == [True] * len(active) + [False] * len(off)
    for row in found:
        assert row.clean == pytest.approx(abs(float(clean[row.feature])), abs=1e-12)
        assert row.lower <= abs(float(clean[row.feature])) <= row.upper + 1e-12
    assert found.summary["stay active"] == len(active)
    assert found.summary["stay off"] == len(off)
    assert found.queries[0] == f"feature SAE.{active[0]} active@2"
    few = pl.features(toy, x, sae, pl.Ball(1e-5), position=2, off=0, most=1, engine="taylor")
    assert few.table["feature"].to_pylist() == active[-1:]


def test_broken_features_have_points_that_break_them(toy: pl.Transformer, sae: pl.Dictionary) -> None:
    x = toy.example()
    found = pl.features(toy, x, sae, pl.Ball(0.3), off=4, budget="100/2/10", engine="interval")
    assert found.counts["fails"] > 0
    for row, outcome in zip(found, found.outcomes, strict=True):
        if row.verdict == "fails":
            assert outcome.witness is not None
            there = distances(toy, sae, outcome.witness.x, 3)[row.feature]
            assert (float(there) > 0) != row.active


def test_runs_pictures_and_checks(toy: pl.Transformer, sae: pl.Dictionary, tmp_path: Path) -> None:
    found = pl.features(toy, toy.example(), sae, pl.Ball(1e-3), off=2)
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert report.ok, report
    assert report.counts["re-proved"] == found.counts["holds"]
    (read,) = collect(tmp_path / "run").readings
    picture = readout_bars(read).svg()
    assert picture.count("data-filter") == len(found)
    assert "positive where the claim holds (proved)" in picture
    hostile = replace(read, bars=(replace(read.bars[0], text="<script>alert(1)</script>"),))
    assert "<script>" not in readout_bars(hostile).svg()
    pl.report(tmp_path / "run", path=tmp_path / "page.html")
    assert "Values inside the model" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<img" in found._repr_html_()


def test_ways_say_where_features_change_first(toy: pl.Transformer, sae: pl.Dictionary) -> None:
    a, b = toy.example(0).x, toy.example(1).x
    asked = pl.features(toy, a, sae, pl.Ball(1e-6), off=2, engine="taylor")
    ways = pl.way(toy, a, b, asked.queries, vectors={"SAE": sae})
    shares = torch.linspace(0.0, 1.0, 101, dtype=torch.float64)
    path = torch.stack([distances(toy, sae, a + s * (b - a), 3) for s in shares])
    for row, feature, active in zip(
        ways, asked.table["feature"].to_pylist(), asked.table["active"].to_pylist(), strict=True
    ):
        stays = (path[:, feature] > 0) == active
        broken = [float(s) for s, stay in zip(shares, stays, strict=True) if not stay]
        assert (row.breaks is None) == (not broken)
        assert not broken or row.proved <= broken[0]
        if row.breaks is not None and broken:
            assert row.breaks <= broken[0] + 1e-9


def test_what_cannot_be_asked_is_one_line(toy: pl.Transformer, sae: pl.Dictionary) -> None:
    x = toy.example()
    other = pl.Dictionary.of(HOOK, torch.ones(2, toy.architecture.d_model + 1).double())
    silent = pl.Dictionary.of(HOOK, sae.weight, threshold=1e6)
    for arguments, words in (
        ({"dictionary": other}, "another model"),
        ({"dictionary": silent, "off": 0}, "no feature is active"),
        ({"dictionary": 3}, "no dictionary"),
        ({"dictionary": sae, "position": 9}, "no token 9"),
        ({"dictionary": sae, "off": -1}, "at least 0"),
    ):
        with pytest.raises(ProoflensError, match=words) as error:
            pl.features(toy, x, region=pl.Ball(0.01), **arguments)
        assert "\n" not in str(error.value)


def test_the_command_line(toy: pl.Transformer, sae: pl.Dictionary, tmp_path: Path) -> None:
    tensors = {"W_enc": sae.weight.T.contiguous(), "b_enc": sae.bias, "b_dec": sae.center}
    (tmp_path / "sae").mkdir()
    save_file(tensors | {"threshold": sae.threshold}, tmp_path / "sae" / "sae_weights.safetensors")
    config = {"architecture": "jumprelu", "hook_name": HOOK}
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps(config))
    words = ["features", "toy", "--sample", "0", "--eps", "1e-5", "--dictionary", str(tmp_path / "sae")]
    words += ["--off", "2", "-o", str(tmp_path / "run"), "--plot", str(tmp_path / "bars.svg")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "stay active" in found.output
    assert (tmp_path / "bars.svg").read_text(encoding="utf-8").startswith("<svg")
    assert check(tmp_path / "run", TOY).ok
