"""What the deployed precision changes is measured: against transformers itself, and never called proved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import prooflens as pl
from prooflens.certificate import read_run
from prooflens.checker import check
from prooflens.errors import ModelError, RunError
from prooflens.models.deployed import transformers_module
from prooflens.report.data import collect
from prooflens.report.page import render
from prooflens.results.deployed import DEPLOYED, Difference, said_of_precision, with_differences
from prooflens.verdicts.deployed import POINTS
from tests.checker.forging import TOY
from tests.conftest import Call
from tests.models.hf_families import DECODERS, ENCODERS, IMAGE, decoder, encoder, randomised

NONE = "0/0/0"


def saved(module: Any, folder: Path) -> str:
    module.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_the_module_of_transformers_runs_from_the_first_block(name: str, tmp_path: Path) -> None:
    folder = saved(decoder(name) if name in DECODERS else encoder(name), tmp_path / "model")
    model = pl.load(folder)
    prompt = model.prompt([3, 5, 7, 5, 9, 4])
    last = model.architecture.n_layers - 1
    res = pl.certify(
        folder,
        prompt,
        pl.Ball(1e-4),
        layer=last,
        positions=[-1],
        deployed="float32",
        engine="interval",
        budget=NONE,
    )
    assert all(row["deployed"].startswith("float32 by transformers") for row in res.rows), res.rows[0]
    assert all(row["difference"] < 1e-3 * (1.0 + abs(row["clean"])) for row in res.rows)
    if model.architecture.d_out is not None:
        out = pl.output(folder, prompt, pl.Ball(1e-4), deployed="bfloat16", engine="interval", budget=NONE)
        assert out.whole.deployed.startswith("bfloat16 by transformers")
        assert 0.0 < out.whole.difference < 5.0


def test_the_margin_is_that_of_the_module_at_the_same_point(tmp_path: Path) -> None:
    """Brute force: the clean margin, from the module's own attention on the tokens themselves."""
    folder = saved(decoder("qwen2"), tmp_path / "model")
    model = pl.load(folder)
    prompt = model.prompt([3, 5, 7, 5, 9, 4])
    res = pl.certify(folder, prompt, pl.Ball(1e-5), "1.0", positions=[-1], deployed="float32", budget=NONE)
    module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        weights = module(torch.tensor([[3, 5, 7, 5, 9, 4]]), output_attentions=True).attentions[1][0, 0, -1]
    first, second = weights.double().log().topk(2).values.tolist()
    assert res.difference_centre == pytest.approx(abs(first - second - res.clean), abs=2e-6)


def test_images_and_edited_models(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("vit", **IMAGE)
    vit = randomised(transformers.AutoModelForImageClassification.from_config(config))
    folder = saved(vit, tmp_path / "vit")
    image = torch.rand(3, 8, 8, dtype=torch.float64)
    res = pl.certify(folder, image, pl.Ball(1e-4), "0", positions=[0], deployed="bfloat16", budget=NONE)
    assert all("by transformers" in row["deployed"] for row in res.rows)
    name = saved(decoder("qwen2"), tmp_path / "qwen2")
    cut = replace(pl.load(name).cut(1), name=name)  # a changed model under the name of the whole one
    res = pl.certify(cut, cut.prompt([3, 5, 7]), pl.Ball(1e-5), "0.0", deployed="bfloat16", budget=NONE)
    assert all("own forward pass (the model is edited, cut" in row["deployed"] for row in res.rows)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_embedded_models_run_our_own_forward_pass(precision: str) -> None:
    toy = pl.load("toy")
    res = pl.certify(toy, toy.example(), pl.Ball(0.02), "0", deployed=precision, budget=NONE)
    low = toy.to(dtype=getattr(torch, precision))
    scores = low.scores(toy.example().x.to(low.dtype), 0).double()
    exact = toy.scores(toy.example(), 0)
    # In float32 some processors add up a batch of points in another order than one point.
    order = 1e-12 if precision == "bfloat16" else 4.0 * torch.finfo(low.dtype).eps * float(exact.abs().max())
    for row in res.rows:
        assert row["deployed"].startswith(f"{precision} by prooflens' own forward pass")
        margins = []
        for held in (scores, exact):
            a = held[row["head"], row["position"]]
            rest = torch.cat((a[: row["top"]], a[row["top"] + 1 :]))
            margins.append(float(a[row["top"]] - rest.max()))
        assert row["difference_centre"] == pytest.approx(abs(margins[0] - margins[1]), abs=order)
        parts = [row[name] for name in DEPLOYED.names[2:]]
        assert row["difference"] == max(part for part in parts if part is not None)
        assert row["difference_worst"] is not None  # the corner of layer 0's bound


def test_points_of_the_region_are_looked_at() -> None:
    """Brute force: the largest difference at the 64 points that the region draws."""
    toy = pl.load("toy")
    ball = pl.Ball(0.02)
    res = pl.certify(toy, toy.example(), ball, "1.0", positions=[-1], deployed="bfloat16", budget=NONE)
    points, _ = ball.around(toy.example()).sample(POINTS)
    low = toy.to(dtype=torch.bfloat16)
    held = [model.scores(points.to(model.dtype), 1)[:, 0, -1].double() for model in (toy, low)]
    rest = [key for key in range(4) if key != res.top]
    first, second = (scores[:, res.top] - scores[:, rest].amax(-1) for scores in held)
    assert res.difference_samples == pytest.approx(float((first - second).abs().max()), abs=1e-12)


def test_witnesses_are_the_worst_point() -> None:
    toy = pl.load("toy")
    res = pl.certify(toy, toy.example(), pl.Ball(0.05), "0", budget="100/3/15", deployed="bfloat16")
    failing = res.sel(verdict="fails")[0]
    assert failing.witness is not None
    x = failing.witness.x
    low = toy.to(dtype=torch.bfloat16)
    (claim,) = [outcome.claim for outcome in failing.outcomes]
    row = claim.rows[0]
    both = [
        float(claim.values({row: held[row.head, row.position].double()}).min())
        for held in (toy.scores(x, 0), low.scores(x.bfloat16(), 0))
    ]
    assert failing.difference_worst == pytest.approx(abs(both[0] - both[1]), abs=1e-12)


def test_claims_of_the_mask_have_no_margin(tmp_path: Path) -> None:
    model = pl.load(saved(decoder("qwen2"), tmp_path / "model"))
    prompt = model.prompt([3, 5, 7])
    res = pl.certify(
        model,
        prompt,
        pl.Ball(1e-5),
        "0.0",
        positions=[0],
        queries="top1={self}",
        deployed="float32",
        budget=NONE,
    )
    assert (res.verdict, res.difference) == ("holds", None)
    assert res.precision is None


def test_runs_reports_and_documents_have_it(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = (
        "certify",
        "toy",
        "--eps",
        "0.02",
        "--layer",
        "0",
        "--budget",
        "0/0/0",
        "--deployed",
        "bfloat16",
    )
    _, out, _ = call(*command, "-o", str(run))
    assert "difference" in out
    assert "measured, not proved, in bfloat16 by prooflens' own forward pass" in out
    assert "times the difference" in out
    _, out, _ = call(*command, "--json")
    document = json.loads(out)
    assert "measured, not proved" in document["precision"]
    held = read_run(run)
    assert held.table.column("difference").to_pylist() == [row["difference"] for row in document["rows"]]
    assert check(run, TOY).ok
    page = render(collect(run))
    assert "deployed precision" in page
    assert "measured, not proved" in page
    assert "difference" in pl.Results.load(run)._repr_html_()
    with pytest.raises(RunError, match="another `deployed`"):
        pl.certify("toy", pl.load("toy").example(), pl.Ball(0.02), layer=0, out=run, resume=True)
    again = pl.certify(
        "toy",
        pl.load("toy").example(),
        pl.Ball(0.02),
        "0,1",
        out=run,
        resume=True,
        deployed="bfloat16",
        budget=NONE,
    )
    assert len(again) == 16
    assert again.table.column("difference").null_count == 0


def test_wrong_precisions_are_one_line(call: Call, tmp_path: Path) -> None:
    code, _, err = call("certify", "toy", "--eps", "0.01", "--deployed", "float16")
    assert (code, len(err.strip().splitlines())) == (1, 1)
    assert "bfloat16 or float32, not in 'float16'" in err
    code, _, err = call("output", "toy", "--radius", "--deployed", "bfloat16")
    assert "--deployed measures margins on a region" in err
    code, out, _ = call("output", "toy", "--eps", "0.001", "--deployed", "bfloat16", "--budget", "0/0/0")
    assert code == 0
    assert "the proved margin is" in out
    with pytest.raises(ModelError, match="no transformers module"):
        transformers_module(Path(TOY), pl.load("toy"), "float64")


@given(st.lists(st.tuples(st.floats(1e-9, 1e3), st.floats(0.0, 1e3)), min_size=1, max_size=5))
def test_the_sentence_never_flatters(pairs: list[tuple[float, float]]) -> None:
    import pyarrow as pa

    table = pa.table(
        {
            "verdict": ["holds"] * len(pairs),
            "lower": [lower for lower, _ in pairs],
            "guarantee": ["proved"] * len(pairs),
        }
    )
    told = said_of_precision(with_differences(table, [Difference("x", d, None, None) for _, d in pairs]))
    assert told is not None
    small = sum(lower < difference for lower, difference in pairs)
    assert (f"{small} of {len(pairs)} proved margins are smaller" in told) == (small > 0)


def test_the_number_of_points_is_the_documented_one() -> None:
    assert POINTS == 64
