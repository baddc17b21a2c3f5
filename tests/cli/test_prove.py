"""certify, radius, circuit, attack and query: one JSON document, exit codes, errors of one line, resuming."""

import json
import sys
from pathlib import Path

import pytest

from prooflens.certificate import read_run
from prooflens.cli.options import InputOptions
from prooflens.errors import EngineError, RunError
from prooflens.memory import parse_memory
from prooflens.problem import Problem
from prooflens.verdicts.evidence import Evidence
from prooflens.verdicts.portfolio import gather_evidence
from prooflens.verdicts.settings import Settings
from tests.conftest import Call

CONTRACT = {
    *("model", "model_sha256", "tokens", "layer", "head", "position", "query", "region", "eps"),
    *("engine", "verdict", "guarantee", "lower", "upper", "clean", "attack", "ms"),
}
FAST = ("--budget", "100/3/15")
GATHER = "prooflens.verdicts.certify.gather_evidence"


def test_certify_prints_one_document(call: Call) -> None:
    code, out, err = call("certify", "toy", "--layer", "0", "--eps", "0.05", "--json", *FAST)
    document = json.loads(out)
    assert set(document) == {"rows", "summary", "engines", "advice", "ways_on", "eps_in_words"}
    assert len(document["rows"]) == document["summary"]["rows"] == 8
    assert all(set(row) >= CONTRACT for row in document["rows"])
    assert document["summary"]["fails"] > 0
    assert code == 3
    assert err == "2 heads of layer 0 at 4 positions: 8 claims\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--heads", "0.1", "--positions", "-1", "--eps", "0.01"), 0),
        (("--heads", "1", "--eps", "0.01", "--engine", "interval", "--budget", "0/0/0"), 2),
        (("--heads", "1.0", "--positions", "3", "--eps", "0.05", "--engine", "jacobian"), 2),
        (("--layer", "0", "--eps", "0.2"), 3),
        (("--layer", "0", "--eps", "0"), 1),
    ],
)
def test_exit_codes(call: Call, arguments: tuple[str, ...], code: int) -> None:
    budget = () if "--budget" in arguments else FAST
    assert call("certify", "toy", *arguments, *budget)[0] == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("certify toy", "--eps"),
        ("certify toy --eps x", "--eps"),
        ("certify toy --eps nan", "positive finite"),
        ("certify toy --eps -1", "positive finite"),
        ("certify toi --eps 1", "did you mean 'toy'?"),
        ("certify toy --eps 1 --heads 0.9", "did you mean '0.1'?"),
        ("certify toy --eps 1 --query tpo1", "did you mean 'top1'?"),
        ("certify toy --eps 1 --tokens 9", "there is no token 9"),
        ("certify toy --eps 1 --tokens y1", "did you mean 'x1'?"),
        ("certify toy --eps 1 --engine layr0", "did you mean 'layer0'?"),
        ("certify toy --eps 1 --memory lots", "8GB"),
        ("certify toy --eps 1 --sample 99", "examples 0"),
        ("certify toy --eps 1 --text hello", "--sample"),
        ("certify toy --eps 1 --text a --sample 1", "not both"),
        ("certify toy --eps 1 --resume", "-o RUN/"),
        ("certfy toy", "certify"),
        ("radius toy --query entropy", "has no radius"),
        ("circuit toy 0.1,0.9 --eps 1", "did you mean '0.1'?"),
        ("query nowhere 1", "not a run"),
    ],
)
def test_errors_are_one_line(call: Call, empty_home: Path, arguments: str, message: str) -> None:
    code, out, err = call(*arguments.split())
    assert code == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_runs_are_written_queried_and_resumed(call: Call, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    certify = ("certify", "toy", "--eps", "0.05", *FAST, "-o", run)
    code, out, _ = call(*certify, "--layer", "0")
    assert code == 3
    assert f"written to {run}" in out.replace("\n", "")
    code, _, err = call(*certify, "--layer", "0")
    assert code == 1
    assert "go on with it (--resume" in err
    code, _, err = call("radius", "toy", "--layer", "0", *FAST, "-o", run)
    assert code == 1
    assert "--resume" not in err  # it cannot
    assert call(*certify, "--heads", "0-1", "--resume", "--json")[0] == 3
    found = read_run(run)
    assert found.table.num_rows == 16
    assert len(found.info["files"]) == 4
    assert found.info["configuration"]["command"].startswith("prooflens certify toy --eps 0.05")
    code, out, _ = call(
        "query", run, "select layer, count(*) as n from rows group by all order by all", "--json"
    )
    assert code == 0
    assert json.loads(out)["rows"] == [{"layer": 0, "n": 8}, {"layer": 1, "n": 8}]
    assert "layer" in call("query", run, "select layer from rows limit 1")[1]
    odd = "select 'nan'::double as a, [1.5, 'inf'::double] as b, date '2026-01-01' as c, {'k': 1} as d, true as e"
    assert json.loads(call("query", run, odd, "--json")[1])["rows"] == [
        {"a": None, "b": [1.5, None], "c": "2026-01-01", "d": {"k": 1}, "e": True}
    ]
    again = call(*certify, "--heads", "0-1", "--resume", "--json")
    assert len(json.loads(again[1])["rows"]) == 16
    assert read_run(run).table.num_rows == 16


def test_interruption_keeps_what_is_done(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(problem: Problem, evidence: list[Evidence], settings: Settings) -> None:
        if evidence[0].claim.rows[0].layer == 1:
            raise KeyboardInterrupt
        gather_evidence(problem, evidence, settings)

    monkeypatch.setattr(GATHER, impatient)
    run = str(tmp_path / "run")
    certify = ("certify", "toy", "--eps", "0.05", *FAST, "-o", run)
    code, _, err = call(*certify)
    assert code == 130
    assert "8 of 16 claims" in err
    assert "--resume" in err
    kept = read_run(run)
    assert kept.table.num_rows == 8
    assert not kept.info["complete"]
    monkeypatch.setattr(GATHER, gather_evidence)
    call(*certify, "--resume")
    assert read_run(run).table.num_rows == 16
    assert read_run(run).info["complete"]


def test_an_interrupted_search_keeps_sound_radii(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("radius", "toy", "--layer", "0", *FAST, "--json")
    whole = json.loads(call(*command)[1])["rows"]
    search = sys.modules["prooflens.verdicts.radius_search"].RadiusSearch
    prove, calls = search._is_proved, []

    def impatient(self: object, eps: float, members: list[int]) -> list[bool]:
        calls.append(eps)
        if len(calls) > 4:
            raise KeyboardInterrupt
        found: list[bool] = prove(self, eps, members)
        return found

    monkeypatch.setattr(search, "_is_proved", impatient)
    code, out, err = call(*command, "-o", str(tmp_path / "run"))
    rows = json.loads(out)["rows"]
    assert code == 130
    assert "sound" in err
    assert any(row["certified"] > 0 for row in rows)
    assert any(row["certified"] < full["certified"] for row, full in zip(rows, whole, strict=True))
    for row, full in zip(rows, whole, strict=True):
        assert row["certified"] <= full["certified"] < full["attack"] <= row["attack"]
        assert "interrupted" in row["reason"]
    kept = read_run(tmp_path / "run")
    assert kept.table.num_rows == 8
    assert not kept.info["complete"]


def test_a_kill_loses_only_the_chunk_under_way(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SIGKILL leaves: no handler runs, so every chunk must be on disk before the next begins."""
    seen: list[int] = []
    run = tmp_path / "run"

    def watched(problem: Problem, evidence: list[Evidence], settings: Settings) -> None:
        seen.append(read_run(run).table.num_rows)
        gather_evidence(problem, evidence, settings)

    monkeypatch.setattr(GATHER, watched)
    call("certify", "toy", "--eps", "0.05", *FAST, "-o", str(run))
    assert seen == [0, 8]
    whole = read_run(run)
    assert whole.table.num_rows == 16
    assert whole.info["complete"]
    assert sum(whole.info["counts"].values()) == 16


@pytest.mark.parametrize(
    "command", ["radius toy --layer 0", "circuit toy 0.0,0.1 --eps 0.01", "output toy --eps 0.01"]
)
def test_a_folder_that_cannot_be_written_is_said_before_the_work(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")

    def worked(*arguments: object, **named: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(InputOptions, "load", worked)
    for place in ("full", "file", "file/run"):
        code, out, err = call(*command.split(), "-o", str(tmp_path / place))
        assert (code, out) == (1, "")
        assert "is not empty" in err or "Not a directory" in err


def test_what_was_found_is_seen_where_it_cannot_be_written(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise RunError("cannot write run: No space left on device")

    monkeypatch.setattr(sys.modules["prooflens.results.record"], "append", full)
    code, out, err = call("circuit", "toy", "0.0,0.1", "--eps", "0.01", "-o", str(tmp_path / "run"))
    assert code == 1
    assert "weakest: " in out
    assert "No space left" in err


def test_no_memory_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(GATHER, hungry)
    code, _, err = call("certify", "toy", "--eps", "0.05")
    assert code == 1
    assert err.splitlines()[-1].startswith("error: not enough memory")


def test_attack_only_breaks(call: Call) -> None:
    code, out, _ = call("attack", "toy", "--layer", "1", "--eps", "0.05", "--json", *FAST)
    assert code == 3
    assert {row["verdict"] for row in json.loads(out)["rows"]} == {"fails", "unknown"}


@pytest.mark.slow
def test_compare(call: Call) -> None:
    arguments = ("compare", "toy", "--layer", "0", "--eps", "0.02", *FAST)
    code, out, _ = call(
        *arguments, "--engine", "layer0", "--engine", "interval", "--engine", "jacobian", "--json"
    )
    layer0, interval, jacobian, attack = json.loads(out)["rows"]
    assert code == 0
    assert layer0["holds"] >= interval["holds"]
    assert layer0["gap"] < interval["gap"]
    assert layer0["tightest"] > interval["tightest"]
    assert jacobian["holds"] is None
    assert jacobian["estimated"] is not None
    assert attack["engine"] == "attack"
    code, out, _ = call("compare", "toy", "--layer", "1", "--eps", "0.02", "--engine", "layer0", *FAST)
    assert "layer 0 only" in out
    assert call(*arguments, "--engine", "layr0")[0] == 1


def test_radius(call: Call, tmp_path: Path) -> None:
    code, out, _ = call(
        "radius", "toy", "--query", "0.1:top1@-1", "--json", "-o", str(tmp_path / "run"), *FAST
    )
    (row,) = json.loads(out)["rows"]
    assert code == 0
    assert 0 < row["certified"] < row["attack"]
    assert read_run(tmp_path / "run").info["kind"] == "radii"
    assert "0.1@3" in call("radius", "toy", "--query", "0.1:top1@-1", "--per-token", *FAST)[1]


def test_circuit(call: Call, tmp_path: Path) -> None:
    (tmp_path / "circuit.json").write_text('{"nodes": {"a0.h0": {"in_graph": true}, "m0": true}}')
    code, out, _ = call("circuit", "toy", str(tmp_path / "circuit.json"), "--eps", "0.01", "--json", *FAST)
    document = json.loads(out)
    assert code == 0
    assert document["summary"]["circuit"] == "holds"
    assert document["summary"]["weakest"] == "0.0:top1@3"
    code, out, _ = call("circuit", "toy", "0.0,1.1", "--eps", "0.05", "-o", str(tmp_path / "run"), *FAST)
    assert code == 3
    assert "weakest: 1.1:top1@3" in out
    assert read_run(tmp_path / "run").table.column("circuit").to_pylist()[:2] == [None, None]


@pytest.mark.parametrize(
    ("text", "value"),
    [("8GB", 8 * 10**9), ("512MiB", 2**29), ("1.5g", 15 * 10**8), ("3000000", 3_000_000), (None, None)],
)
def test_memory(text: str | None, value: int | None) -> None:
    assert parse_memory(text) == value


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "8QB", "nan"])
def test_no_memory(text: str) -> None:
    with pytest.raises(EngineError, match="no amount of memory"):
        parse_memory(text)


def test_certify_asks_about_ways_and_hulls(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("certify", "toy", "--to", "1", "--layer", "1", "--json", *FAST)
    document = json.loads(out)
    assert code == 3
    assert all(row["region"].startswith("segment to") for row in document["rows"])
    file = tmp_path / "hull.txt"
    file.write_text("1\n\n2\n", encoding="utf-8")
    _, out, _ = call("certify", "toy", "--hull", str(file), "--heads", "0.1", "--json", *FAST)
    assert json.loads(out)["rows"][0]["region"] == "hull of 3 prompts"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "give one of --eps, --to and --hull"),
        (("--eps", "0.1", "--to", "1"), "not --eps and --to"),
        (("--to", "1", "--tokens", "0"), "--tokens is for balls"),
        (("--hull", "/nowhere.txt"), "cannot read prompts"),
    ],
)
def test_regions_that_cannot_be_meant_are_refused(call: Call, arguments: tuple[str, ...], line: str) -> None:
    code, _, err = call("certify", "toy", "--layer", "0", *arguments)
    assert code == 1
    assert line in err
    assert len(err.strip().splitlines()) == 1


def test_way_prints_how_far_claims_are_proved(call: Call, tmp_path: Path) -> None:
    code, out, _ = call(
        "way", "toy", "--to", "1", "--heads", "1.0", "--json", "--plot", str(tmp_path / "plots")
    )
    rows = json.loads(out)["rows"]
    assert code == 3
    assert len(rows) == 4
    assert all(0.0 <= row["proved"] <= (row["breaks"] or 1.0) for row in rows)
    assert len(list((tmp_path / "plots").glob("*.svg"))) == 4
    code, _, err = call("way", "toy", "--heads", "1.0")
    assert code == 1
    assert "--to" in err
