"""Answers that say once what they have to say, and errors that name what the user wrote."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from torch import Tensor

import prooflens as pl
from prooflens.checker import check
from prooflens.cli.checked import claims_of
from prooflens.cli.output import visible
from prooflens.cli.prove import tell_reasons
from prooflens.errors import ModelError, QueryError, RegionError
from prooflens.models.export import export
from prooflens.results.asked import Asked, State, explanation, how_far
from tests.checker.forging import TOY
from tests.conftest import Call


def test_an_engine_that_was_asked_twice_is_named_once_with_its_best() -> None:
    asked = [
        Asked("taylor", State.ASKED, reached=-3.0),
        Asked("attack", State.ASKED, reached=0.5),
        Asked("taylor", State.ASKED, reached=-1.0),
        Asked("attack", State.ASKED, reached=0.7),
    ]
    assert explanation(asked) == (
        "neither proved nor broken: taylor proves at least -1, attack came down to 0.5"
    )


def test_several_reasons_leave_to_the_advice_what_is_the_same_for_all_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = {"layer": 1, "head": 0, "query": "top1", "verdict": "unknown"}
    rows = [
        place | {"position": i, "reason": f"neither: attack came down to {i}; not asked: taylor (about 9 s)"}
        for i in range(2)
    ]
    tell_reasons(rows, True)
    assert (
        capsys.readouterr().out
        == "1.0@0: neither: attack came down to 0\n1.0@1: neither: attack came down to 1\n"
    )
    for shown, advised in ((rows[:1], True), (rows, False)):  # one reason, or no advice below: in full
        tell_reasons(shown, advised)
        assert capsys.readouterr().out.count("taylor (about 9 s)") == len(shown)
    assert how_far("neither: x; to ask on: --time 9s") == "neither: x"


def test_an_attack_alone_says_that_it_proves_nothing(call: Call) -> None:
    _, out, _ = call("attack", "toy", "--eps", "0.01", "--heads", "0.0", "--budget", "8/1/1")
    assert "4 rows are open; only an attack was asked, which proves nothing: `certify`" in out
    assert "nobody" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("certify toy --eps 0.01 --memory 1MB", "1000000 bytes of memory: give more, as in 8GB"),
        ("certify toy --eps 0.01 --query feature_SAE.7_active@-1", "give it with --vector SAE=PATH"),
        (
            "effect toy --eps 0.01 --without a1.h0@9 --metric logit0",
            "held at token 9, and the prompt has tokens 0",
        ),
        ("compare toy --eps 0.01 --engine taylr", "there is no engine 'taylr'; did you mean 'taylor'"),
        ("show _", "the name of the model is empty"),
        ("effect toy --eps 0.01 --without m1 --metric gap", "'gap' measures nothing: write a difference"),
        ("effect toy --eps 0.01 --without m1 --metric logit1-logit1", "is 0 whatever the model does"),
        ("certify toy --eps 0.01 --memory 8", "8 bytes of memory: write the unit, as in 8GB"),
    ],
)
def test_an_error_says_what_was_wrong_with_what_was_written(call: Call, arguments: str, message: str) -> None:
    code, _, err = call(*(word.replace("_", " ") for word in arguments.split()))
    assert code == 1
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_model_without_outputs_says_so_before_it_asks_for_more(call: Call, tmp_path: Path) -> None:
    export(pl.load("toy").headless, tmp_path / "headless")
    code, _, err = call("output", str(tmp_path / "headless"))
    assert code == 1
    assert "has no head: it predicts neither classes nor tokens; ask about its attention" in err


def test_a_folder_that_is_no_run_says_what_it_is(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "run.json").write_text("[]")
    (tmp_path / "object").mkdir()
    (tmp_path / "object" / "run.json").write_text("{}")
    for name, message in (
        ("none", "there is no such folder"),
        ("empty", "it has no run.json"),
        ("list", "cannot be read (it must hold one JSON object)"),
        ("object", "its run.json lacks 'model'"),
    ):
        code, _, err = call("check", str(tmp_path / name))
        assert code == 1
        assert f"{name} is not a run: " in err
        assert message in err


def test_runs_of_several_parts_are_reported_by_their_folder(call: Call, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = ("effect", "toy", "--eps", "0.01", "--without", "a1.h0,m1", "--each", "--budget", "8/1/1")
    call(*command, "--metric", "logit0-logit1", "-o", str(runs))
    code, _, _ = call("report", str(runs), "-o", str(tmp_path / "page.html"))
    assert code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "a1.h0" in page
    assert "m1" in page
    code, _, err = call("check", str(runs))
    assert code == 1
    assert f"it holds runs: give one of them, as {runs / 'a1.h0'}" in err


def test_a_file_that_is_gone_is_named_by_the_checker(tmp_path: Path) -> None:
    toy = pl.load("toy")
    pl.certify(toy, toy.example(), pl.Ball(0.01), "0.0", budget="0/0/0", out=tmp_path / "run")
    (tmp_path / "run" / "tensors" / "part-00000.safetensors").unlink()
    assert check(tmp_path / "run", TOY).problems == ["WRONG: tensors/part-00000.safetensors is missing"]


def test_a_range_is_shown_with_both_ends(call: Call) -> None:
    command = ("certify", "toy", "--eps", "0.01", "--heads", "0.0", "--positions", "1", "--budget", "0/0/0")
    _, out, _ = call(*command, "--query", "entropy")
    assert out.split()[:6] == ["row", "query", "top", "verdict", "lower", "upper"]
    _, out, _ = call(*command)
    assert "upper" not in out


def test_a_circuit_that_a_point_breaks_has_no_bounds_to_show() -> None:
    toy = pl.load("toy-induction")
    asked = (toy, toy.example(), pl.Ball(0.001), "logit0-logit1", 0.5)
    told = str(pl.discover(*asked, circuit=["a0.h1", "m0"], budget="8/1/1"))
    assert "inf" not in told
    assert "  taking the others out: fails (" in told


def test_slips_in_python_name_what_was_meant() -> None:
    toy = pl.load("toy")
    x, ball = toy.example(), pl.Ball(0.01)
    with pytest.raises(TypeError, match="there is no argument 'query'; did you mean 'queries'"):
        pl.certify(toy, x, ball, query="top1")  # type: ignore[call-arg]
    with pytest.raises(QueryError, match=r"1\.5 names no token: give its number"):
        pl.certify(toy, x, ball, positions=[1.5])  # type: ignore[list-item]
    with pytest.raises(QueryError, match=r"'2-3'; several numbers are written .* \[2, 5\] in Python"):
        pl.certify(toy, x, ball, positions="2-3")
    with pytest.raises(
        QueryError, match=r"layer is one number, not \[0, 1\]: several layers are heads='0,1'"
    ):
        pl.certify(toy, x, ball, layer=[0, 1])  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="there is no row 9: there are 4"):
        pl.certify(toy, x, ball, "0.0", budget="0/0/0")[9]
    told = str(pl.plan(toy, x, ball, layer=1, time="5s"))
    assert "layer 1: taylor, 8 claims, about " in told
    assert "(5 s allowed)" in told


def test_rows_of_another_kind_are_named(tmp_path: Path) -> None:
    toy = pl.load("toy")
    pl.radius(toy, toy.example(), "0.1:top1@-1", tolerance=1.0).save(tmp_path / "run")
    with pytest.raises(QueryError, match="holds no verdicts: its rows are radii"):
        pl.Results.load(tmp_path / "run")


def test_a_hook_that_sets_no_numbers_is_refused() -> None:
    def broken(z: Tensor, hook: object) -> Tensor:
        return z * float("nan")

    toy = pl.load("toy")
    with pytest.raises(ModelError, match="sets NaN"):
        pl.effect(toy, ("blocks.1.attn.hook_z", broken), toy.example(), pl.Ball(0.01), "logit0-logit1")


def test_blank_tokens_are_seen_in_tables() -> None:
    assert [visible(text) for text in (" Paris", "\n", " ", None)] == [" Paris", r"'\n'", "' '", None]


def test_prompts_of_other_lengths_are_counted() -> None:
    model = pl.load("toy")
    with pytest.raises(RegionError, match="the prompts have 4 and 3 tokens"):
        pl.Segment(model.example().x, model.example().x[:3]).region()


def test_radii_that_want_more_time_say_so(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "reason": "proved at ε=1; not asked at some ε: taylor (about 9 s); to ask on: --time 20s (in Python)"
    }
    table = pl.radius("toy", pl.load("toy").example(), "0.1:top1@-1", tolerance=1.0).to_arrow()
    place = table.column_names.index("reason")
    found = pl.Radii(table.set_column(place, "reason", pa.array([row["reason"]])))
    assert found.ways_on == ["taylor (about 9 s); to ask on: --time 20s (in Python)"]
    monkeypatch.setattr("prooflens.verdicts.radius.radius", lambda *given, **options: found)
    _, out, _ = call("radius", "toy", "--heads", "0.1", "--positions=-1")
    assert "radii may be larger; not asked at some ε: taylor (about 9 s); to ask on: --time 20s" in out


def test_rows_that_a_run_does_not_have_are_not_checked_in_silence(call: Call, tmp_path: Path) -> None:
    toy = pl.load("toy")
    pl.certify(toy, toy.example(), pl.Ball(0.01), "0.0", budget="0/0/0", out=tmp_path / "run")
    code, _, err = call("check", str(tmp_path / "run"), "--only", "2-4")
    assert code == 1
    assert "the run has no row 4" in err
    code, out, _ = call("check", str(tmp_path / "run"), "--only", "2-3")
    assert code == 0
    assert "2 re-proved" in out


def test_a_check_says_what_each_row_claims(call: Call, tmp_path: Path) -> None:
    """Of claims the verdict too; a run whose rows cannot be read has no such column."""
    run = tmp_path / "run"
    call("certify", "toy", "--eps", "0.02", "--heads", "1.0", "-o", str(run))
    _, out, _ = call("check", str(run))
    assert "1.0@0 top1 fails" in out
    assert "1.0@3 top1 holds" in out
    assert claims_of(run)[3] == "1.0@3 top1 holds"
    assert claims_of(tmp_path) == {}
