"""What new users met: each slip is answered by one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prooflens as pl
from prooflens.errors import QueryError
from tests.conftest import Call

RUN = str(Path(__file__).parents[1] / "certificate" / "written-by-0.1.0" / "verdicts")
BERT = "certify {bert} --eps 0.001"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["certify", "toy", "--eps", "0.01", "--memory", "8"], "8 bytes of memory"),
        (["query", RUN, " "], "the query is empty"),
        (["certify", "toy", "--eps", "0.01", "--query", "top99"], "more tokens than the prompt has (4)"),
        (["certify", "toy", "--eps", "0.01", "--heads", "0.1", "--query", "0.0:top1"], "names its own heads"),
        (["certify", "toy", "--eps", "0.01", "--positions", "1", "--query", "top1@2"], "its own position"),
    ],
)
def test_a_slip_is_one_line(call: Call, arguments: list[str], message: str) -> None:
    code, _, err = call(*arguments)
    assert code == 1
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_ranges_and_negatives_are_one_grammar(call: Call) -> None:
    command = ("certify", "toy", "--eps", "0.01", "--budget", "0/0/0", "--json")
    code, out, _ = call(*command, "--layer=-1", "--positions", "1-2")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert {(row["layer"], row["position"]) for row in rows} == {(1, 1), (1, 2)}


def test_models_without_a_head_have_no_outputs() -> None:
    model = pl.load("toy").headless
    for query in ("argmax", "logit0>logit1"):
        for engine in ("auto", "attack"):
            with pytest.raises(pl.errors.ModelError, match="has no head"):
                pl.certify(model, pl.load("toy").example(), pl.Ball(0.01), queries=query, engine=engine)


def test_all_rows_of_a_circuit_are_counted() -> None:
    toy = pl.load("toy")
    found = pl.circuit(toy, toy.example(), pl.Ball(0.01), "0.0:top1@-1 & 0.1:top1@-1")
    assert found.summary["rows"] == found.summary["holds"] == 3


def test_words_that_no_row_can_have_are_refused() -> None:
    found = pl.Results.load(RUN)
    with pytest.raises(QueryError, match="did you mean 'holds'"):
        found.sel(verdict="hold")
    assert len(found.sel(verdict="estimated")) == 0


def test_runs_about_different_models_are_not_compared(call: Call, tmp_path: Path) -> None:
    for name in ("toy", "toy-d16"):
        call(
            "certify", name, "--eps", "0.01", "--layer", "0", "--budget", "0/0/0", "-o", str(tmp_path / name)
        )
    code, _, err = call("diff", str(tmp_path / "toy"), str(tmp_path / "toy-d16"))
    assert code == 1
    assert "different models (toy and toy-d16)" in err


def test_a_header_that_is_a_list_is_said_to_be_one(tmp_path: Path) -> None:
    from prooflens.checker import check

    (tmp_path / "run.json").write_text("[]")
    found = check(tmp_path, tmp_path)
    assert found.problems == ["WRONG: run.json must hold one JSON object"]


def test_a_model_prints_as_one_line_and_tables_list_their_columns() -> None:
    toy = pl.load("toy")
    assert len(repr(toy)) < 300
    assert "toy" in repr(toy)
    assert "certified" in dir(pl.radius(toy, toy.example(), "0.1:top1@-1", tolerance=1.0))
