"""Run directories: what is written is read back, what was damaged is refused, queries see the rows and nothing else."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import prooflens as pl
from prooflens.certificate import RunWriter, read_run
from prooflens.certificate.store import query_rows
from prooflens.engines import Bounds, Guarantee
from prooflens.engines.attack import AttackBudget
from prooflens.engines.bounds import Ledger
from prooflens.errors import RunError
from prooflens.queries import Claim
from prooflens.report import report
from prooflens.results import Results
from prooflens.results.record import append, describe, header
from prooflens.sweep.diff import Rows

SENSES = {">0": lambda low, high: low > 0, ">=0": lambda low, high: low >= 0}


@pytest.fixture(scope="module")
def found() -> Results:
    model = pl.load("toy")
    return pl.certify(
        model,
        model.example(0),
        pl.Ball(0.05),
        heads="0-1",
        queries=["top1", "mass>=0.2", "entropy", "0.5<=entropy<=1.5"],
        budget=AttackBudget(100, 3, 15),
    )


@pytest.fixture(scope="module")
def written(found: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    found.save(path, seed=0)
    return path


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


@pytest.mark.slow
def test_what_is_written_is_read_back(found: Results, written: Path) -> None:
    run = read_run(written)
    assert run.info["schema"] == 1
    assert run.info["complete"]
    assert run.info["counts"] == found.counts
    assert run.info["model"] == {"name": "toy", "sha256": pl.load("toy").sha256, "source": None}
    assert run.table.select(found.table.column_names).equals(found.table)
    assert run.table.column("row").to_pylist() == list(range(len(found)))
    region = found.subject.region  # type: ignore[union-attr]
    assert np.array_equal(run.tensors["region/0/center"], region.center.numpy())
    assert np.array_equal(run.tensors["region/0/radius"], region.radius.numpy())  # type: ignore[union-attr]
    for number, outcome in enumerate(found.outcomes):
        assert np.array_equal(run.tensors[f"row/{number}/lower"], outcome.bounds.lower.numpy())
        assert (f"row/{number}/witness" in run.tensors) == (outcome.witness is not None)
        if outcome.witness is not None:
            assert np.array_equal(run.tensors[f"row/{number}/witness"], outcome.witness.x.numpy())


def test_rows_come_back_as_results(found: Results, written: Path) -> None:
    loaded = pl.Results.load(written)
    assert loaded.counts == found.counts
    assert loaded["0.1"].verdict is found["0.1"].verdict
    assert loaded["0.1"].bound == found["0.1"].bound


def test_a_place_that_cannot_be_written(found: Results, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        found.save(tmp_path / "file" / "run")


def test_verdicts_can_be_redone_from_the_files(written: Path) -> None:
    """`holds` follows from the stored bounds and the stored claim, by comparisons alone."""
    run = read_run(written)
    for row in run.table.to_pylist():
        claim = json.loads(row["claim"])
        lower, upper = (run.tensors[f"row/{row['row']}/{end}"] for end in ("lower", "upper"))
        met = [
            np.isfinite(low) and np.isfinite(high) if f["sense"] == "range" else SENSES[f["sense"]](low, high)
            for f, low, high in zip(claim["functionals"], lower, upper, strict=True)
        ]
        assert (claim["tie"] is None and all(met)) == (row["verdict"] == "holds")


def test_functionals_can_be_evaluated_from_the_files(written: Path) -> None:
    """The stored terms give the stored clean values, with numpy alone."""
    model = pl.load("toy")
    scores = {layer: model.scores(model.example(0).x, layer).numpy() for layer in (0, 1)}
    for row in read_run(written).table.to_pylist():
        claim = json.loads(row["claim"])
        values = [
            f["constant"] + sum(_atom(term, scores) for term in f["terms"]) for f in claim["functionals"]
        ]
        assert np.allclose(values, claim["clean"], atol=1e-12)


def _atom(term: list[Any], scores: dict[int, np.ndarray]) -> float:
    weight, kind, layer, head, position, keys = term
    a = scores[layer][head, position][keys]
    if kind == "score":
        return float(weight * a)
    if kind == "logsumexp":
        return float(weight * np.log(np.exp(a).sum()))
    s = np.exp(a) / np.exp(a).sum()
    return float(-weight * (s * np.log(s)).sum())


def test_reading_needs_no_torch(written: Path) -> None:
    code = (
        "import sys\nfrom prooflens.certificate import read_run\n"
        f"run = read_run({str(written)!r})\nlen(run.table)\nrun.tensors['row/0/lower']\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["rows/part-00000.parquet", "tensors/part-00000.safetensors"])
def test_a_flipped_bit_is_caught(run: Path, name: str) -> None:
    content = bytearray((run / name).read_bytes())
    content[len(content) // 2] ^= 1
    (run / name).write_bytes(content)
    with pytest.raises(RunError, match=name.split("/")[1]):
        read_run(run)


@pytest.mark.parametrize("name", ["rows/part-00000.parquet", "tensors/part-00000.safetensors"])
def test_truncated_and_missing_files(run: Path, name: str) -> None:
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(RunError, match="damaged or was changed"):
        read_run(run)
    with pytest.raises(RunError, match="not a readable"):
        read_run(run, verify=False)
    (run / name).unlink()
    with pytest.raises(RunError, match="missing"):
        read_run(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"rows": 3}, "says 3"),
        ({"files": {"../outside": "0"}}, "outside the run"),
        ({"files": None}, "incomplete"),
    ],
)
def test_headers_that_do_not_fit(run: Path, change: dict[str, object], message: str) -> None:
    info = json.loads((run / "run.json").read_text()) | change
    kept = {name: value for name, value in info.items() if value is not None or name == "text"}
    (run / "run.json").write_text(json.dumps(kept))
    with pytest.raises(RunError, match=message):
        read_run(run)


def test_headers_that_are_no_headers(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no run\.json"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": ')
    with pytest.raises(RunError, match="not readable JSON"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(RunError, match="incomplete"):
        read_run(tmp_path)


def test_no_run_is_overwritten(found: Results, run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not empty: choose another folder"):
        found.save(run)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="choose another folder"):
        found.save(tmp_path)
    with pytest.raises(RunError, match="not empty"):
        found.save(tmp_path / "notes.txt")


def test_a_run_that_came_to_nothing_is_in_no_ones_way(found: Results, tmp_path: Path) -> None:
    assert found.subject is not None
    RunWriter.create(tmp_path / "run", header(found.subject, {}))
    found.save(tmp_path / "run")
    assert read_run(tmp_path / "run").table.num_rows == len(found)


def test_parts(found: Results, tmp_path: Path) -> None:
    assert found.subject is not None
    facts = header(found.subject, {})
    writer = RunWriter.create(tmp_path / "run", facts)
    append(writer, found.sel(layer=0))
    writer, run = RunWriter.resume(tmp_path / "run", facts)
    assert not run.info["complete"]
    append(writer, found.sel(layer=1))
    writer.finish()
    run = read_run(tmp_path / "run")
    assert len(run.info["files"]) == 4
    assert run.table.column("row").to_pylist() == list(range(len(found)))
    last = found.sel(layer=1).outcomes[-1]
    assert np.array_equal(run.tensors[f"row/{len(found) - 1}/lower"], last.bounds.lower.numpy())
    with pytest.raises(RunError, match="another tokens"):
        RunWriter.resume(tmp_path / "run", facts | {"tokens": ["other"]})
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_part_that_was_interrupted_is_written_again(
    found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the files of a part and the header: the header names what was there before."""
    assert found.subject is not None
    writer = RunWriter.create(tmp_path / "run", header(found.subject, {}))
    append(writer, found.sel(layer=0))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "_write_header", interrupt)
        with pytest.raises(KeyboardInterrupt):
            append(writer, found.sel(layer=1))
    append(writer, found.sel(layer=1))
    writer.finish()
    assert read_run(tmp_path / "run").table.column("row").to_pylist() == list(range(len(found)))


def test_a_complete_run_that_goes_on_is_not_complete(found: Results, tmp_path: Path) -> None:
    found.sel(layer=0).save(tmp_path / "run")
    assert found.subject is not None
    writer, _ = RunWriter.resume(tmp_path / "run", header(found.subject, {}))
    append(writer, found.sel(layer=1))
    assert not read_run(tmp_path / "run").info["complete"]


def test_a_run_that_came_to_nothing_says_so_to_every_reader(found: Results, tmp_path: Path) -> None:
    assert found.subject is not None
    RunWriter.create(tmp_path, header(found.subject, {}))
    readers = (
        Results.load,
        Rows.of,
        lambda run: query_rows(run, "select 1"),
        lambda run: report(run, path=run / "x"),
    )
    for read in readers:
        with pytest.raises(RunError, match="holds no rows"):
            read(tmp_path)


def test_ledgers_are_kept(found: Results, tmp_path: Path) -> None:
    from dataclasses import replace

    import torch

    outcome = found.outcomes[0]
    size, p, S = len(outcome.bounds.lower), 32, 4
    ledger = Ledger(torch.ones(size, p, dtype=torch.int8), outcome.bounds.lower, torch.zeros(size, S))
    bounds = Bounds(
        outcome.bounds.lower, outcome.bounds.upper, Guarantee.PROVED, "x", 0.0, lower_ledger=ledger
    )
    assert found.subject is not None
    Results.of([replace(outcome, bounds=bounds)], found.subject).save(tmp_path / "run")
    tensors = read_run(tmp_path / "run").tensors
    assert tensors["row/0/ledger/corner"].dtype == np.int8
    assert tensors["row/0/ledger/value"].shape == (size,)
    assert tensors["row/0/ledger/penalty"].shape == (size, S)
    assert "row/0/lower_corner" not in tensors


def test_logits_are_described() -> None:
    model = pl.load("toy")
    (outcome,) = pl.certify(model, model.example(0), pl.Ball(1e-3), queries="argmax").outcomes
    claim: Claim = outcome.claim
    terms = json.loads(describe(claim))["functionals"][0]["terms"]
    assert [term[1] for term in terms] == ["logit", "logit"]


def test_queries(written: Path, found: Results) -> None:
    table = query_rows(written, "select verdict, count(*) as n from rows group by all")
    counts = dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
    assert counts == {name: count for name, count in found.counts.items() if count}


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('/etc/hostname')",
        "copy rows to 'out.csv'",
        "attach 'other.db'",
        "install httpfs",
        "set enable_external_access = true",
        "select * from found",
        "selec 1",
    ],
)
def test_queries_see_nothing_else(written: Path, sql: str) -> None:
    with pytest.raises(RunError, match="the query failed"):
        query_rows(written, sql)


def test_many_rows_are_written_and_queried_quickly(found: Results, tmp_path: Path) -> None:
    """2·10⁴ rows here; the whole budget for 10⁵ is 20 s."""
    assert found.subject is not None
    size = 20_000
    outcomes = [found.outcomes[i % len(found)] for i in range(size)]
    start = time.perf_counter()
    Results.of(outcomes, found.subject).save(tmp_path / "run")
    table = query_rows(tmp_path / "run", "select count(*) as n from rows where verdict = 'holds'")
    assert isinstance(table, pa.Table)
    assert table.column("n")[0].as_py() > 0
    assert time.perf_counter() - start < 10
