"""Direct logit attributions and logit lenses: against caches and exact fractions, and in runs that are checked."""

from __future__ import annotations

import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.errors import ModelError, ProoflensError, QueryError
from prooflens.models.attribution import _frozen, _largest, attribution_error
from prooflens.models.edits import find_place
from prooflens.models.export import export
from prooflens.queries import parse_metric, parse_query
from prooflens.verdicts.question import ask
from tests.checker.forging import TOY, edit
from tests.enumeration.words import reader

TEXT = "When Mary and John met the store"
PARTS = {"1.0": "a1.h0", "a1": "a1", "m0": "m0"}


@pytest.mark.parametrize(
    "text",
    [
        "dla 9.6 logit3-logit5>0.0",
        "dla-live m3 logit3-logit5<=0.0",
        "dla a9 logit{A}-logit{B.2}>=0.25",
        "dla 9.6 logit3-logit5",
        "lens 12 argmax",
        "lens 12 argmax={A}",
        "lens 12 logit{A}>logit{B}",
        "lens 0 logit3>=0.5",
        "lens 0 logit3",
        "neuron 5.12>0.0@{A}",
        "neuron 5.10@-1>neuron 5.11@-1",
        "feature S.1@{A}<=feature S.2@{A}",
        "read(blocks.8.hook_resid_post@-1,D)>=read(blocks.8.hook_resid_post@-1,E)",
        "dla 9.6 logit3-logit5>dla 9.7 logit3-logit5",
        "read(blocks.8.hook_resid_post@{B.2},DIR)",
    ],
)
def test_short_forms_are_read_back(text: str) -> None:
    query = parse_query(text, ["A", "B"])
    assert str(query) == text
    assert parse_query(str(query), ["A", "B"]) == query
    assert hash(query) == hash(parse_query(text, ["A", "B"]))


def test_the_token_of_a_comparison_may_be_said_once() -> None:
    assert parse_query("neuron 5.10 > neuron 5.11 @ 2") == parse_query("neuron 5.10@2>neuron 5.11@2")


def test_heads_are_named_in_two_ways() -> None:
    assert parse_query("dla a9.h6 logit3 - logit5 > 0") == parse_query("dla 9.6 logit3-logit5>0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dla 9.6", "write it as in 'dla 9.6 logit3-logit5>0'"),
        ("dla m3.n1 logit1-logit2>0", "write it as in"),
        ("dla-live 9.6 logit3-logit5>0.5", "only a sign"),
        ("dla-live 9.6 logit3-logit5", "only a sign"),
        ("dla 9.6 logit3-logit5>0@-1", "takes no heads and no position"),
        ("lens 12", "write it as in 'lens 12 argmax'"),
        ("lens 12 top1", "a lens reads outputs"),
        ("lens 12 lens 3 argmax", "write it as in 'lens 12 argmax'"),
        ("lenz 12 argmax", "did you mean 'lens 12 argmax'"),
        ("lens 3 argmax@2", "takes no heads and no position"),
        ("neuron 5.10>0@-1>neuron 5.11@-1", "no readout to compare"),
        ("neuron 5.12>0@{C}", "names no slot"),
        ("neuron 5.12>0@{self-1}", "relative to a query"),
    ],
)
def test_mistyped_queries_are_told_what_to_write(text: str, words: str) -> None:
    with pytest.raises(QueryError, match=words):
        parse_query(text, ["A", "B"])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_signs_of_attributions_are_those_of_frozen_and_live_norms(kind: str) -> None:
    """Every point that is tried has the proved sign, with the norm of the prompt and with its own."""
    model = reader(kind)
    x = model.prompt(TEXT)
    for name, part in PARTS.items():
        hook, v = pl.attribution(model, part, (1, 2), x)
        value = float(v @ model.run(x, hook)[hook][-1].flatten())
        sign, other = (">", "<=") if value > 0 else ("<", ">=")
        queries = [f"dla {name} logit1-logit2{sign}0", f"dla-live {name} logit1-logit2{sign}0"]
        queries += [f"dla-live {name} logit1-logit2{other}0", f"dla {name} logit1-logit2"]
        res = pl.certify(model, x, pl.Ball(1e-4), queries=queries, engine="taylor")
        assert [row.verdict.value for row in res] == ["holds", "holds", "fails", "holds"]
        lower, upper = res.table["lower"][3].as_py(), res.table["upper"][3].as_py()
        generator = torch.Generator().manual_seed(0)
        for _ in range(10):
            noise = torch.rand(x.x.shape, generator=generator, dtype=torch.float64) * 2e-4 - 1e-4
            moved = replace(x, x=x.x + noise)
            h = model.run(moved, hook)[hook][-1].flatten()
            assert lower <= float(v @ h) <= upper
            _, live = pl.attribution(model, part, (1, 2), moved)
            assert (float(live @ h) > 0) == (value > 0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_error_of_a_direction_covers_its_rounding(kind: str) -> None:
    """v against exact fractions, times the largest value of the hook; that value against far inputs."""
    model = reader(kind)
    x, a = model.prompt(TEXT), model.architecture
    weight, _ = model.head
    gain = model.weights["final_norm.weight"].tolist()
    frozen = Fraction(float(_frozen(model, x)))
    pair = zip(weight[1].tolist(), weight[2].tolist(), gain, strict=True)
    u = [Fraction(g) * (Fraction(p) - Fraction(q)) for p, q, g in pair]
    mean = sum(u, Fraction(0)) / len(u) if a.norm_kind == "layer" else Fraction(0)
    u = [(value - mean) * frozen for value in u]
    for part in PARTS.values():
        hook, v = pl.attribution(model, part, (1, 2), x)
        exact = u
        if ".h" in part:
            columns = model.weights["blocks.1.o.weight"].T.tolist()
            exact = [
                sum((c * Fraction(w) for c, w in zip(u, col, strict=True)), Fraction(0)) for col in columns
            ]
            exact = [c if float(w) != 0.0 else Fraction(0) for c, w in zip(exact, v, strict=True)]
        place = find_place(a, part)
        most = _largest(model, place)
        off = sum((Fraction(w) - e) ** 2 for w, e in zip(v.tolist(), exact, strict=True))
        assert float(off) ** 0.5 * most <= attribution_error(model, part, (1, 2), x)
        for scale in (1e-3, 1.0, 1e3):
            far = scale * torch.randn(
                x.x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
            h = model.run(far, hook)[hook].flatten(1)
            assert float(place.read(h).norm(dim=-1).max()) <= most


def test_thresholds_are_moved_to_the_strict_side() -> None:
    model = reader("gpt2")
    x = model.prompt(TEXT)
    error = attribution_error(model, "m0", (1, 2), x)
    for compare, level in ((">", 0.25), ("<=", 0.25), (">=", 0.0)):
        question = ask(model, x, pl.Ball(1e-6), queries=f"dla m0 logit1-logit2{compare}{level}")
        (condition,) = question.claims[0].conditions
        meant = -level if compare.startswith(">") else level
        assert error <= meant - condition.functional.constant <= 2.0 * error + 1e-15
        assert condition.blur >= error


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_lens_is_the_head_on_the_stream_behind_a_block(kind: str) -> None:
    model = reader(kind)
    x = model.prompt(TEXT)
    _, cache = model.run_with_cache(x)
    tail, _ = pl.start_at(model, 1)  # the final norm and the head, behind one more block that is not run
    stream = cache["blocks.0.hook_resid_post"]
    gain, shift = tail.weights["final_norm.weight"], tail.weights.get("final_norm.bias")
    centred = stream[-1] - stream[-1].mean() if tail.architecture.norm_kind == "layer" else stream[-1]
    normed = centred / (centred.square().mean() + tail.architecture.norm_eps).sqrt() * gain
    logits = model.head[0] @ (normed if shift is None else normed + shift) + model.head[1]
    best = int(logits.argmax())
    queries = ["lens 0 argmax", f"lens 0 argmax={best}", f"lens 0 logit{best}>logit3", f"lens 0 logit{best}"]
    res = pl.certify(model, x, pl.Ball(1e-6), queries=[*queries, "lens 1 argmax"], engine="taylor")
    assert [row.verdict.value for row in res] == ["holds"] * 5
    assert res.table["query"].to_pylist()[:4] == queries
    assert res.table["model"].to_pylist() == [f"{kind}, first 1 layers"] * 4 + [kind]
    assert res.table["lower"][3].as_py() <= float(logits[best]) <= res.table["upper"][3].as_py()
    wrong = pl.certify(model, x, pl.Ball(1e-6), queries=f"lens 0 logit3>logit{best}")
    assert wrong.verdict == "fails"


def test_a_lens_has_a_radius() -> None:
    model = reader("llama")
    rad = pl.radius(model, model.prompt("When Mary"), "lens 0 logit3>logit5", tolerance=3.0, budget="10/1/3")
    assert rad.attack is None or 0.0 < rad.certified <= rad.attack


@pytest.mark.parametrize("n", range(1, 6))
def test_neurons_are_compared(toy: pl.Transformer, n: int, tmp_path: Path) -> None:
    x = toy.example()
    pre = toy.run_with_cache(x)[1]["blocks.1.mlp.hook_pre"][3]
    first, second = (0, n) if pre[0] > pre[n] else (n, 0)
    queries = [f"neuron 1.{a}{word}neuron 1.{b}@-1" for a, b in ((0, n), (n, 0)) for word in (">", ">=", "<")]
    res = pl.certify(toy, x, pl.Ball(1e-5), queries=queries, out=tmp_path / "run", engine="taylor")
    for row in res:
        larger = row.query.replace("@3", "").split("<" if "<" in row.query else ">")
        larger = larger if "<" not in row.query else larger[::-1]
        assert (row.verdict == "holds") == larger[0].endswith(f".{first}"), second
    report = check(tmp_path / "run", TOY)
    assert report.ok, report
    assert (report.counts["re-proved"], report.counts["witness confirmed"]) == (3, 3)

    def swapped(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        one, other = rows[0]["query"].split(">")
        rows[0]["query"] = f"{other}>{one}"
        return 0

    edit(tmp_path / "run", swapped)
    assert check(tmp_path / "run", TOY).counts["WRONG"] == 1


def test_attributions_are_compared_at_one_scale(tmp_path: Path) -> None:
    model = reader("gpt2")
    x = model.prompt(TEXT)
    v, w = (pl.attribution(model, f"a1.h{head}", (1, 2), x)[1] for head in (0, 1))
    z = model.run(x, "blocks.1.attn.hook_z")["blocks.1.attn.hook_z"][-1].flatten()
    sign = ">" if float((v - w) @ z) > 0 else "<"
    query = f"dla 1.0 logit1-logit2{sign}dla 1.1 logit1-logit2"
    weights = export(model, tmp_path / "weights")
    res = pl.certify(model, x, pl.Ball(1e-6), queries=query, out=tmp_path / "run", engine="taylor")
    assert res.verdict == "holds"
    report = check(tmp_path / "run", weights)
    assert report.counts["re-proved"] == 1, report
    assert "frozen norm" in report.findings[0].note


def test_slots_of_a_template_are_looked_up() -> None:
    model = reader("gpt2")
    prompt = replace(model.prompt(TEXT), roles={"A": ((1,),), "B": ((3,),)})
    queries = ["lens 0 logit{A}>logit{B}", "dla 1.0 logit{A}-logit{B}", "neuron 1.3@{B}"]
    res = pl.certify(model, prompt, pl.Ball(1e-6), queries=queries, engine="taylor", budget="10/1/3")
    assert res.table["query"].to_pylist() == ["lens 0 logit1>logit2", "dla 1.0 logit1-logit2", "neuron 1.3@3"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("dla 1.0 logit1-logit1>0", "with itself"),
        ("dla 1.9 logit1-logit2>0", "heads are 0"),
        ("dla m7 logit1-logit2>0", "layers are 0"),
        ("dla 1.0 logit1-logit999999>0", "no output 999999"),
        ("dla 1.0 logit{A}-logit{B}>0", "not a template's member"),
        ("neuron 0.1@-1>neuron 0.1@-1", "with itself"),
        ("lens 9 argmax", "layer"),
        ("lens 0 logit999999>logit1", "no output 999999"),
        ("0.0:top1@-1 & lens 0 argmax", "alone"),
    ],
)
def test_wrong_places_are_one_line(query: str, words: str) -> None:
    model = reader("gpt2")
    with pytest.raises(ProoflensError, match=words) as error:
        pl.certify(model, model.prompt(TEXT), pl.Ball(0.01), queries=query)
    assert "\n" not in str(error.value)


def test_models_without_attributions_say_so(toy: pl.Transformer) -> None:
    with pytest.raises(ModelError, match="no attributions"):
        pl.certify(toy, toy.example(), pl.Ball(0.01), queries="dla 0.1 logit0-logit1>0")
    with pytest.raises(QueryError, match="measures nothing"):
        parse_metric("dla 0.1 logit0-logit1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model's folder, a run about attributions of a head, of a network, and one about a lens."""
    model, folder = reader("gpt2"), tmp_path_factory.mktemp("runs")
    x, found = model.prompt(TEXT), {"weights": export(reader("gpt2"), folder / "weights")}
    asked = {
        "head": [f"dla{live} 1.0 logit1-logit2{sign}0" for live in ("", "-live") for sign in "<>"],
        "network": ["dla m0 logit1-logit2>0", "dla m0 logit1-logit2>=0.25"],
        "lens": ["lens 0 argmax", "lens 0 logit3>logit5", "lens 0 logit3", "lens 0 logit5>logit3"],
    }
    for name, queries in asked.items():
        found[name] = folder / name
        res = pl.certify(model, x, pl.Ball(1e-5), queries=queries, out=found[name], engine="taylor")
        assert res.counts["unknown"] == 0
        report = check(found[name], found["weights"])
        assert report.ok, report
        assert report.counts["witness confirmed"] == res.counts["fails"]
        assert report.counts["re-proved"] == res.counts["holds"]
        assert ("frozen norm" in str(report.findings[-1].note)) == (name == "network")
    return found


@pytest.mark.parametrize(
    ("run", "query"),
    [
        ("head", "dla 1.1 logit1-logit2<0.0"),
        ("head", "dla 1.0 logit2-logit1<0.0"),
        ("head", "dla a1 logit1-logit2<0.0"),
        ("head", "dla-live 1.0 logit1-logit2<0.5"),
        ("network", "dla m1 logit1-logit2>0.0"),
        ("lens", "lens 1 argmax"),
        ("lens", "dla m0 logit1-logit2>0.0"),
    ],
)
def test_another_query_is_seen(runs: dict[str, Path], run: str, query: str, tmp_path: Path) -> None:
    shutil.copytree(runs[run], tmp_path / "run")

    def renamed(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        rows[0]["query"] = query
        return 0

    edit(tmp_path / "run", renamed)
    assert check(tmp_path / "run", runs["weights"]).counts["WRONG"] >= 1


def test_a_witness_has_to_break_the_query_itself(runs: dict[str, Path], tmp_path: Path) -> None:
    """A stored threshold may be stricter than the query's, so a point between the two breaks the stored one alone."""
    model = reader("gpt2")
    export(model, tmp_path / "model")
    prompt = model.prompt(TEXT)
    place = "dla m1 logit1-logit2"
    at = pl.certify(model, prompt, pl.Ball(1e-9), queries=[place]).table["clean"].to_pylist()[0]
    run = tmp_path / "run"
    pl.certify(model, prompt, pl.Ball(1e-9), queries=[f"{place}>{at + 3e-7!r}"], out=run)
    assert check(run, tmp_path / "model").counts["witness confirmed"] == 1

    def lower(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        rows[0]["query"] = f"{place}>{at - 3e-7!r}"
        return 0

    edit(run, lower)
    report = check(run, tmp_path / "model")
    assert report.counts["WRONG"] == 1
    assert "does not break" in report.findings[0].note


def test_reports_show_them(runs: dict[str, Path], tmp_path: Path) -> None:
    for name, words in (("head", "dla-live 1.0"), ("lens", "lens 0 argmax")):
        pl.report(runs[name], path=tmp_path / f"{name}.html")
        assert words in (tmp_path / f"{name}.html").read_text(encoding="utf-8")


def test_circuits_join_attention_and_values_inside(toy: pl.Transformer, tmp_path: Path) -> None:
    x = toy.example()
    v = torch.linspace(-1.0, 1.0, toy.architecture.d_model, dtype=torch.float64)
    values = toy.run_with_cache(x)[1]
    sign = ">" if values["blocks.1.mlp.hook_pre"][3, 5] > 0 else "<"
    other = "<" if values["blocks.0.hook_resid_post"][2] @ v > 0 else ">"
    held = f"0.1:top1@-1 & neuron 1.5{sign}0@-1 & lens 0 argmax"
    res = pl.circuit(toy, x, pl.Ball(1e-4), held)
    assert res.verdict == "holds"
    assert [row.verdict.value for row in res.parts] == ["holds"] * 3
    assert res.whole.table["circuit"].to_pylist() == [str(parse_query(held))]
    broken = pl.circuit(
        toy, x, pl.Ball(1e-4), f"{held} & read(blocks.0.hook_resid_post@2,v){other}0", vectors={"v": v}
    )
    assert broken.verdict == "fails"
    assert str(broken.weakest_link.query).startswith("read(")
    for number, part in enumerate(broken.by_subject):
        part.save(tmp_path / str(number))
        assert check(tmp_path / str(number), TOY).ok
    assert sum(len(part) for part in broken.by_subject) == len(broken) - 1
    with pytest.raises(QueryError, match="by_subject"):
        res.save(tmp_path / "whole")
    with pytest.raises(QueryError, match="joined to them by &"):
        pl.circuit(toy, x, pl.Ball(1e-4), "1 * 0.1:spec{1}>{2}@-1 + 1 * neuron 1.5>0@-1 > 0")


def test_the_command_line_proves_a_joined_circuit() -> None:
    from typer.testing import CliRunner

    from prooflens.cli import app

    words = ["circuit", "toy", "0.1:top1@-1 & lens 0 argmax", "--sample", "0", "--eps", "1e-4"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "lens 0 argmax" in found.output
