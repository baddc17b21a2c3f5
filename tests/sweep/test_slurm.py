"""The executor `slurm`, its jobs as processes of this machine: rows equal to those of `local`, whatever is killed."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import yaml

from prooflens.errors import RunError
from prooflens.sweep import slurm
from prooflens.sweep.drive import pending, start, status
from prooflens.sweep.executors import Crew, Executor
from prooflens.sweep.spec import parse_spec
from prooflens.sweep.store import SweepStore
from prooflens.sweep.work import TaskReport
from tests.sweep.conftest import SPEC, finish, is_alive, rows_of, until

pytestmark = pytest.mark.slow

pytest.importorskip("submitit", reason="submitit is not installed: pip install 'prooflens[slurm]'")

FEW = SPEC | {"samples": [0, 1]}


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.02)


def crew(workers: int = 1) -> Crew:
    return Crew(Executor.SLURM, workers, 1, "local")


def expected(undisturbed: SweepStore) -> pa.Table:
    whole = rows_of(undisturbed)
    return whole.filter(pc.is_in(whole["prompt"], pa.array(["sample 0", "sample 1"])))


def workers_of(pid: int) -> list[int]:
    """The processes below one, down to those that work."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in children for found in (int(child), *workers_of(int(child)))]


def is_job(pid: int) -> bool:
    return b"submitit.core._submit" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_job_is_killed(undisturbed: SweepStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "SHARES", 1)
    store = start(parse_spec(FEW, "test"), tmp_path / "run")
    tasks, _ = pending(store)
    reports: list[TaskReport] = []
    for report in slurm.execute(tasks, store.path, 1, 1, "local"):
        if not reports:
            [job] = [pid for pid in workers_of(os.getpid()) if is_job(pid) and not workers_of(pid)]
            os.kill(job, signal.SIGKILL)
        reports.append(report)
    assert sorted(report.task.key for report in reports) == sorted(task.key for task in tasks)
    assert all(report.error is None for report in reports)
    assert [report.tries for report in reports].count(2) == 1
    assert rows_of(store) == expected(undisturbed)
    assert not (store.path / "jobs").exists()


def test_the_driver_is_killed(
    undisturbed: SweepStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "SHARES", 1)
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(FEW | {"samples": [0, 1, 99]}))
    store = SweepStore(tmp_path / "run")
    options = ["--executor", "slurm", "--address", "local", "--workers", "1"]
    command = [sys.executable, "-m", "prooflens.cli", "sweep", str(spec), "-o", str(store.path), *options]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(store.files()) >= 1)
    jobs = workers_of(driver.pid)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    finish(store, crew=crew())
    until(lambda: not any(map(is_alive, jobs)), 10.0)  # they saw that nobody reads what they do
    assert rows_of(store) == expected(undisturbed)
    found = status(store)
    assert (found["done"], found["failed"], found["running"]) == (8, 4, False)
    assert all("not 99" in record["error"] for record in store.errors().values())


def test_jobs_that_do_nothing_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = start(parse_spec(FEW, "test"), tmp_path / "run")
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))  # the interpreter of a job does not start
    with pytest.raises(RunError, match="jobs end before they do a task"):
        finish(store, crew=crew())
    assert store.done() == set()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"workers": None}, "--executor slurm needs --workers"),
        ({"address": "elsewhere"}, "has the addresses local and none"),
        ({"address": None}, "there is no Slurm here"),
        ({"executor": Executor.LOCAL}, "--address is for"),
        ({"executor": Executor.RAY, "slurm": {"partition": "gpu"}}, "--slurm is for"),
    ],
)
def test_errors_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    store = start(parse_spec(FEW, "test"), tmp_path / "run")
    crew = Crew(Executor.SLURM, workers=1, address="local")
    with pytest.raises(RunError, match=message):
        finish(store, crew=replace(crew, **asked))


def test_options_reach_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked.sh"
    for name, line in (
        ("srun", "exit 0"),
        ("sbatch", f'cat "$1" > {asked}; echo no such partition >&2; exit 1'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    store = start(parse_spec(FEW, "test"), tmp_path / "run")
    options = {"partition": "gpu", "time": "04:00:00"}
    with pytest.raises(RunError, match=r"no job can be submitted: .*no such partition"):
        finish(store, crew=Crew(Executor.SLURM, 1, 3, slurm=options))
    lines = asked.read_text().splitlines()
    assert {"#SBATCH --partition=gpu", "#SBATCH --time=04:00:00", "#SBATCH --cpus-per-task=3"} <= set(lines)
    assert not (store.path / "jobs").exists()
