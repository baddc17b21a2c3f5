"""sweep, resume, compact, diff, watch and query on the command line."""

import json
from pathlib import Path

import pyarrow.compute as pc
import pytest
import yaml

import prooflens as pl
from prooflens.sweep.drive import start
from prooflens.sweep.spec import parse_spec
from tests.conftest import Call
from tests.sweep.conftest import SPEC, TASKS, performed, rows_of

pytestmark = pytest.mark.slow


def written(path: Path, **changes: object) -> str:
    path.write_text(yaml.safe_dump(SPEC | changes))
    return str(path)


def test_a_dry_run_counts_and_writes_nothing(call: Call, tmp_path: Path) -> None:
    spec = written(tmp_path / "spec.yaml")
    code, out, _ = call("sweep", spec, "--dry-run", "--workers", "2", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["tasks"], found["probed"], found["errors"], found["rows"]) == (TASKS, 4, [], TASKS * 16)
    assert found["seconds"] > 0
    assert found["bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


def test_a_sweep_from_start_to_end(call: Call, tmp_path: Path) -> None:
    spec, run = written(tmp_path / "spec.yaml", samples=[0, 99], layers=[0]), str(tmp_path / "run")
    code, out, _ = call("sweep", spec, "-o", run, "--workers", "1", "--json")
    found = json.loads(out)
    assert (code, found["tasks"], found["done"], found["failed"]) == (2, 4, 2, 2)
    assert sum(found["verdicts"].values()) == 32
    code, _, err = call("sweep", spec, "-o", run)
    assert (code, "prooflens resume" in err) == (1, True)
    counted = ("query", run, "select count(*) as n, count(distinct task) as t from rows", "--json")
    before = json.loads(call(*counted)[1])["rows"]
    assert before == [{"n": 32, "t": 2}]
    assert json.loads(call("compact", run, "--json")[1]) == {"shards": 2, "files": 1}
    assert json.loads(call(*counted)[1])["rows"] == before
    status = json.loads(call("watch", run, "--once", "--json")[1])
    assert (status["done"], status["failed"], status["running"]) == (2, 2, False)
    assert "2/4 tasks, 2 failed" in call("watch", run)[1]
    assert call("query", run, "select * from read_csv('/etc/passwd')")[0] == 1


def test_diff_says_what_changed(call: Call, tmp_path: Path) -> None:
    auto, interval = str(tmp_path / "a"), str(tmp_path / "b")
    performed(tmp_path / "a")
    performed(tmp_path / "b", engine="interval", layers=[1])
    same = json.loads(call("diff", auto, auto, "--json")[1])
    assert same["summary"]["common"] == 64
    assert same["summary"]["changed"] == same["summary"]["moved"] == 0
    found = json.loads(call("diff", auto, interval, "--json")[1])
    summary = found["summary"]
    assert (summary["common"], summary["only_a"], summary["only_b"]) == (32, 32, 0)
    assert summary["changed"] == len(found["rows"]) == sum(row["rows"] for row in found["transitions"]) > 0
    assert summary["moved"] > 0
    assert (
        summary["mean_lower_move"] < 0
    )  # the portfolio's bounds are never worse than those of one of its engines
    assert all((row["verdict_a"], row["verdict_b"]) == ("holds", "unknown") for row in found["transitions"])
    moved = [row for row in found["rows"] if row["lower_a"] != row["lower_b"]]
    assert found["summary"]["moved"] >= len(moved) > 0
    code, out, _ = call("diff", auto, interval)
    assert (code, "unknown" in out) == (0, True)


def test_radii_are_those_of_radius(call: Call, tmp_path: Path) -> None:
    search = {"between": [1e-3, 1.0], "tolerance": 0.5}
    store = performed(tmp_path / "a", regions={"radius": search}, layers=[0], samples=[2, 3])
    model = pl.load("toy")
    found = pl.radius(
        model,
        model.example(2),
        ("top1", "mass>=0.2"),
        layer=0,
        budget="100/3/15",
        between=(1e-3, 1.0),
        tolerance=0.5,
    )
    rows = rows_of(store)
    rows = rows.filter(pc.equal(rows["prompt"], "sample 2"))
    assert rows.select(found.table.drop_columns(["ms"]).column_names) == found.table.drop_columns(["ms"])
    assert store.damaged() == []
    assert store.compact() == (2, 1)
    status = json.loads(call("watch", str(store.path), "--once", "--json")[1])
    assert (status["done"], sum(status["verdicts"].values())) == (2, 2 * len(found))
    assert status["verdicts"]["radius proved"] > 0
    same = json.loads(call("diff", str(store.path), str(store.path), "--json")[1])
    assert (same["summary"]["common"], same["summary"]["moved"]) == (2 * len(found), 0)
    performed(tmp_path / "b")
    code, _, err = call("diff", str(store.path), str(tmp_path / "b"))
    assert (code, "radii" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sweep", "none.yaml", "-o", "x"), "none.yaml cannot be read"),
        (("resume", "none", "--executor", "magic"), "no executor 'magic'"),
        (("resume", "none", "--executor", "slurm", "--slurm", "gpu", "--workers", "1"), "takes NAME=VALUE"),
        (("resume", "none"), "none is not a sweep"),
        (("watch", "none", "--once"), "none is not a sweep"),
    ],
)
def test_errors_are_one_line(call: Call, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_changed_model_is_refused(call: Call, tmp_path: Path) -> None:
    store = start(parse_spec(SPEC, "test"), tmp_path / "run")
    header = store.path / "sweep.json"
    header.write_text(header.read_text().replace(store.header["models"]["toy"]["sha256"], "0" * 64))
    code, _, err = call("resume", str(store.path))
    assert (code, "its weights changed" in err) == (1, True)


def test_runs_are_held_against_each_other_as_well(call: Call, tmp_path: Path) -> None:
    for engine in ("attack", "interval"):
        run = str(tmp_path / engine)
        call(
            "certify",
            "toy",
            "--layer",
            "0",
            "--eps",
            "0.02",
            "--engine",
            engine,
            "--budget",
            "50/2/5",
            "-o",
            run,
        )
    call("circuit", "toy", "0.0,0.1", "--eps", "0.01", "-o", str(tmp_path / "circuit"))
    code, out, _ = call("diff", str(tmp_path / "attack"), str(tmp_path / "interval"), "--json")
    found = json.loads(out)["summary"]
    assert code == 0
    # An attack has no bounds: a bound that is there on one side only has moved.
    assert (found["common"], found["only_a"], found["only_b"], found["moved"]) == (8, 0, 0, 8)
    circuit = str(tmp_path / "circuit")
    assert json.loads(call("diff", circuit, circuit, "--json")[1])["summary"]["common"] == 3
    code, _, err = call("diff", circuit, str(tmp_path / "nothing"))
    assert (code, "is not a run" in err) == (1, True)


@pytest.mark.parametrize("text", ['{"schema": 2}', '{"schema": 2, "spec": {"regions": {}}, "versions": 3}'])
def test_a_damaged_header_is_one_line(call: Call, tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    for command in (
        ["query", "select 1"],
        ["resume"],
        ["watch", "--once"],
        ["report"],
        ["compact"],
        ["diff", "x"],
    ):
        code, out, err = call(command[0], str(tmp_path), *command[1:])
        assert (code, out) == (1, "")
        assert "sweep.json is damaged" in err
    code, _, err = call("check", str(tmp_path))
    assert (code, "keeps no evidence" in err) == (1, True)


def test_readers_say_what_to_do_about_a_damaged_shard(call: Call, tmp_path: Path) -> None:
    store = performed(tmp_path / "run")
    shard = store.files()[0]
    shard.write_bytes(shard.read_bytes()[:50])
    page = str(tmp_path / "x.html")
    for command in (["query", "select count(*) from rows"], ["watch", "--once"], ["report", "-o", page]):
        code, _, err = call(command[0], str(store.path), *command[1:])
        assert code == 1
        assert f"{shard} is damaged" in err
        assert "prooflens resume" in err
