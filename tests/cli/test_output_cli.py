"""`prooflens output`: one document, exit codes, errors of one line, runs that are kept, reported and checked."""

import json
from pathlib import Path

import pytest

import prooflens as pl
from prooflens.certificate import read_run
from prooflens.report import collect, render
from prooflens.report.outputs import answer_bars
from tests.cli.test_prove import CONTRACT, FAST
from tests.conftest import Call
from tests.report.conftest import HOSTILE


def test_one_document(call: Call) -> None:
    code, out, err = call("output", "toy", "--eps", "0.01", "--json", *FAST)
    document = json.loads(out)
    assert set(document) == {"rows", "summary", "engines", "advice", "ways_on", "eps_in_words"}
    assert all(set(row) >= CONTRACT | {"candidate", "text"} for row in document["rows"])
    whole, *others = document["rows"]
    assert (whole["query"], whole["layer"], whole["head"]) == ("argmax", None, None)
    assert [row["query"] for row in others] == ["logit0>logit1"]
    assert others[0]["lower"] <= others[0]["clean"] <= others[0]["upper"]
    assert document["summary"]["output"] == whole["verdict"] == "holds"
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--eps", "0.01"), 0),
        (("--eps", "0.01", "--layers", "1"), 0),
        (("--eps", "0.3", "--engine", "interval", "--budget", "0/0/0"), 2),
        (("--eps", "0.01", "--engine", "jacobian"), 2),
        (("--eps", "2"), 3),
        (("--eps", "2", "--tokens", "1", "--engine", "attack"), 3),
    ],
)
def test_exit_codes(call: Call, arguments: tuple[str, ...], code: int) -> None:
    budget = () if "--budget" in arguments else FAST
    assert call("output", "toy", *arguments, *budget)[0] == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("output toy", "--eps"),
        ("output toy --eps 0.1 --radius", "--eps"),
        ("output toy --eps -1", "positive finite"),
        ("output toy --eps 1 --layers 3", "can be cut after 1"),
        ("output toy --eps 1 --top 0", "at least one candidate"),
        ("output toy --eps 1 --engine crwon", "did you mean 'crown'?"),
        ("output toy --eps 1 --engine layer0", "cannot answer"),
        ("output toy --eps 1 --text hello", "--sample"),
        ("output toy --radius --engine jacobian", "only estimates"),
    ],
)
def test_errors_are_one_line(call: Call, empty_home: Path, arguments: str, message: str) -> None:
    code, out, err = call(*arguments.split())
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.slow
def test_radius(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "radii"
    code, out, _ = call("output", "toy", "--radius", "--tolerance", "1", "--json", "-o", str(run), *FAST)
    (row,) = json.loads(out)["rows"]
    assert code == 0
    assert 0 < row["certified"] < row["attack"]
    assert read_run(run).info["kind"] == "radii"


def test_runs_are_kept_reported_and_checked(call: Call, tmp_path: Path) -> None:
    kept = []
    for eps, layers in (("0.01", ()), ("2", ()), ("0.01", ("--layers", "1"))):
        run = tmp_path / f"{eps}{len(layers)}"
        assert call("output", "toy", "--eps", eps, "-o", str(run), *layers, *FAST)[0] == (
            3 if eps == "2" else 0
        )
        code, out, _ = call("check", str(run), "--json")
        found = json.loads(out)
        assert code == 0
        assert found["summary"]["WRONG"] == 0
        assert found["problems"] == []
        kept.append(run)
    assert call("report", *map(str, kept[:2]), "-o", str(tmp_path / "x.html"))[0] == 0
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert 'id="output"' in page
    assert "What the model says" in page
    assert page.count('data-panel="output:') == 2
    assert call("query", str(kept[0]), "select candidate, text from rows", "--json")[0] == 0


def test_the_picture_says_what_is_proved(tmp_path: Path) -> None:
    model = pl.load("toy")
    res = pl.output(model, model.example(0), pl.Ball(0.01), budget="100/3/15")
    data = collect(res)
    (answer,) = data.answers
    assert answer.guarantee == "proved"
    assert [c.verdict for c in answer.candidates] == ["holds"]
    assert "(proved)" in answer_bars(answer).svg()
    bare = pl.certify(model, model.example(0), pl.Ball(0.01), queries="argmax", budget="100/3/15")
    assert collect(bare).answers == ()
    assert 'id="output"' not in render(collect(bare))
    estimate = pl.output(model, model.example(0), pl.Ball(0.01), engine="jacobian", budget="100/3/15")
    assert "estimated, not proved" in answer_bars(collect(estimate).answers[0]).svg()
    nothing = pl.output(model, model.example(0), pl.Ball(2.0), engine="attack", budget="100/3/15")
    assert "no bounds" in answer_bars(collect(nothing).answers[0]).svg()
    for text in HOSTILE:
        hostile = type(answer)(text, *list(vars(answer).values())[1:])
        assert "<script>" not in answer_bars(hostile).svg()
