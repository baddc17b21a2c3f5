"""What new users met: each slip is answered by one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import prooflens as pl
from prooflens.errors import QueryError
from prooflens.problem import Problem
from prooflens.verdicts.evidence import Evidence
from prooflens.verdicts.portfolio import gather_evidence
from prooflens.verdicts.settings import Settings
from tests.checker.forging import TOY
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
        (["certify", "toy", "--eps", "1e308"], "ε = 1e+308 is too large: give one of at most 1e+30"),
        (["certify", "toy", "--eps", "0.01", "--time", "soon"], "60s, 2m"),
        (["certify", "toy", "--eps", "0.01", "--query", "prev"], "write it as in 'top1={self-1}'"),
        (["certify", "toy", "--eps", "0.01", "--query", "induction"], "known are top1"),
        (["certify", "toy", "--eps", "0.01", "--query", "mas>=0.2"], "did you mean 'mass>=0.2'"),
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


def test_what_was_selected_is_said_before_the_work(call: Call) -> None:
    _, _, err = call("certify", "toy", "--eps", "0.01", "--heads", "0,1", "--budget", "0/0/0")
    assert err == "2 heads of layer 0, 2 heads of layer 1 at 4 positions: 16 claims\n"
    _, _, err = call("plan", "toy", "--eps", "0.01", "--heads", "0.1", "--positions=-1")
    assert err == "1 head of layer 0 at 1 position: 1 claim\n"


def test_open_rows_say_who_was_not_asked_and_the_command_that_asks(call: Call) -> None:
    command = ("certify", "toy", "--eps", "0.06", "--layer", "1", "--budget", "8/1/1", "--time", "1ms")
    code, out, _ = call(*command)
    assert code in (2, 3)
    assert "not asked: " in out
    assert "taylor (about" in out
    (line,) = [line for line in out.splitlines() if line.startswith("to ask on: ")]
    assert line.startswith("to ask on: prooflens certify toy --eps 0.06 --layer 1 --budget 8/1/1 --time ")
    code, out, _ = call(*command, "--json")
    document = json.loads(out)
    assert document["ways_on"] == [{"time": line.rsplit(" ", 1)[1]}]
    assert "not asked" in document["advice"]
    skipped = [entry for entry in document["engines"] if entry["state"] == "not asked"]
    assert {entry["engine"] for entry in skipped} >= {"taylor", "crown"}
    assert all(entry["why"] for entry in skipped)
    again = line.removeprefix("to ask on: prooflens ").split()
    _, out, _ = call(*again, "--json")
    asked = [entry["engine"] for entry in json.loads(out)["engines"] if entry["state"] == "asked"]
    assert "taylor" in asked  # on a busy machine the time may be up before crown


def test_a_plan_is_printed(call: Call) -> None:
    code, out, _ = call("plan", "toy", "--eps", "0.01", "--layer", "1")
    assert code == 0
    assert "taylor" in out
    assert "120 s allowed" in out
    code, out, _ = call("plan", "toy", "--eps", "0.01", "--layer", "1", "--time", "5s", "--json")
    document = json.loads(out)
    assert document["allotted"] == 5.0
    assert {stage["engine"] for stage in document["stages"]} >= {"interval", "taylor", "crown", "attack"}
    assert all(stage["seconds"] > 0 for stage in document["stages"] if stage["engine"] != "cpz")


def test_every_row_has_a_unit_and_the_mask_has_none(tmp_path: Path) -> None:
    """`lower` of a row that the mask decides is no log-odds: it stays empty, and the checker agrees."""
    from prooflens.checker import check

    toy = pl.load("toy")
    queries = ["top1", "mass>=0.3", "mass>=0.3@{0,1,2,3}", "spec{0}>{3}", "entropy<=9"]
    res = pl.certify(
        toy, toy.example(), pl.Ball(1e-4), "0.0", queries=queries, budget="0/0/0", out=tmp_path / "RUN"
    )
    units = {row["query"]: row["unit"] for row in res.rows}
    assert list(units.values()) == ["score margin", "log-odds", "log-odds", "log-odds", "nats"]
    masked = [row for row in res.rows if row["query"] == "mass>=0.3@{0,1,2,3}"]
    assert len(masked) == 4
    for row in masked:  # all of the mass, whatever the scores: nothing is measured
        assert row["verdict"] == "holds"
        assert row["lower"] is row["upper"] is row["clean"] is None
    assert check(tmp_path / "RUN", TOY).problems == []
    whole = pl.circuit(toy, toy.example(), pl.Ball(1e-4), "0.0:top1@-1 & 0.0:entropy<=9@-1", budget="0/0/0")
    assert whole.whole.unit == "several units"
    assert pl.radius(toy, toy.example(), "0.0:top1@-1", tolerance=1.0).unit == "score margin"


def test_an_interruption_shows_what_was_decided(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(9))

    def stopped(problem: Problem, evidence: Sequence[Evidence], settings: Settings) -> None:
        if next(calls):
            raise KeyboardInterrupt
        gather_evidence(problem, evidence, settings)

    monkeypatch.setattr("prooflens.verdicts.certify.gather_evidence", stopped)
    code, out, err = call("certify", "toy", "--eps", "0.01", "--budget", "8/1/1", "--json")
    assert code == 130
    assert {row["layer"] for row in json.loads(out)["rows"]} == {0}
    assert "interrupted: 8 of 16 claims were decided" in err
    calls = iter(range(9))
    code, out, err = call("circuit", "toy", "0.1:top1@-1 & 1.1:top1@-1", "--eps", "0.01", "--json")
    assert code == 130
    assert [row["layer"] for row in json.loads(out)["rows"]] == [0]
    assert "interrupted: 1 parts were decided" in err
