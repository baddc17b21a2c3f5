"""Whatever is killed or damaged: after resuming, the rows are those of an undisturbed run, none lost, none twice."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from prooflens.errors import EngineError, RunError
from prooflens.results import Radii, Results
from prooflens.sweep import work
from prooflens.sweep.drive import locked, pending, start, status
from prooflens.sweep.local import execute
from prooflens.sweep.spec import parse_spec
from prooflens.sweep.store import SweepStore, verified_keys
from prooflens.sweep.tasks import Task
from tests.sweep.conftest import SPEC, TASKS, finish, is_alive, rows_of, run, until

pytestmark = pytest.mark.slow


def copied(store: SweepStore, path: Path) -> SweepStore:
    shutil.copytree(store.path, path)
    return SweepStore.open(path)


def test_one_and_two_workers_give_equal_rows(undisturbed: SweepStore, tmp_path: Path) -> None:
    assert rows_of(run(tmp_path / "two", workers=2)) == rows_of(undisturbed)
    assert len(undisturbed.done()) == TASKS
    assert rows_of(undisturbed).num_rows == TASKS * 16


def test_the_driver_is_killed(undisturbed: SweepStore, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(SPEC))
    store = SweepStore(tmp_path / "run")
    command = [
        sys.executable,
        "-m",
        "prooflens.cli",
        "sweep",
        str(spec),
        "-o",
        str(store.path),
        "--workers",
        "1",
    ]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(store.files()) >= 2)
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    until(lambda: not any(is_alive(int(child)) for child in children), 10.0)
    before = {path: path.stat().st_mtime_ns for path in store.files()}
    assert 2 <= len(before) < TASKS
    finish(store)
    assert rows_of(store) == rows_of(undisturbed)
    assert {path: path.stat().st_mtime_ns for path in before} == before  # a task done is never redone


def test_a_worker_is_killed(undisturbed: SweepStore, tmp_path: Path) -> None:
    store = copied(undisturbed, tmp_path / "run")
    for path in store.files()[:6]:
        path.unlink()
    tasks, _ = pending(store)
    reports = []
    for report in execute(tasks, store.path, 1):
        reports.append(report)
        if len(reports) == 2:
            [worker] = multiprocessing.active_children()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
    assert sorted(report.task.key for report in reports) == sorted(task.key for task in tasks)
    assert all(report.error is None for report in reports)
    assert rows_of(store) == rows_of(undisturbed)


def test_a_task_that_kills_its_workers_is_given_up(undisturbed: SweepStore, tmp_path: Path) -> None:
    store = copied(undisturbed, tmp_path / "run")
    store.files()[0].unlink()
    tasks, _ = pending(store)
    killed: set[int] = set()

    def murder() -> None:
        while len(killed) < 2:
            for child in multiprocessing.active_children():
                if child.pid is not None and child.pid not in killed:
                    killed.add(child.pid)
                    os.kill(child.pid, signal.SIGKILL)
            time.sleep(0.01)

    thread = threading.Thread(target=murder)
    thread.start()
    [report] = execute(tasks, store.path, 1)
    thread.join()
    assert report.kind == "WorkerDied"
    assert report.error is not None
    assert "SIGKILL" in report.error


def test_damaged_shards_are_redone(undisturbed: SweepStore, tmp_path: Path) -> None:
    store = copied(undisturbed, tmp_path / "run")
    cut, flipped, swapped, *_ = store.files()
    cut.write_bytes(cut.read_bytes()[:-100])
    content = bytearray(flipped.read_bytes())
    content[200] ^= 1
    flipped.write_bytes(content)
    shutil.copy(store.files()[5], swapped)
    (store.path / "shards" / ".half.parquet.1.tmp").write_bytes(b"PAR1")
    assert set(store.damaged()) == {cut, flipped, swapped}
    with pytest.raises(RunError, match="damaged"):
        store.compact()
    finish(store)
    assert rows_of(store) == rows_of(undisturbed)
    assert not list((store.path / "shards").glob(".*"))


def test_no_flipped_bit_changes_rows_unseen(undisturbed: SweepStore, tmp_path: Path) -> None:
    shard = undisturbed.files()[0]
    keys, content = verified_keys(shard), shard.read_bytes()
    draw = random.Random(0)
    place = tmp_path / shard.name
    for _ in range(150):
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        place.write_bytes(changed)
        found = verified_keys(place)
        assert found is None or (found == keys and pq.read_table(place).equals(pq.read_table(shard)))


def test_compacted_runs_have_the_same_rows(undisturbed: SweepStore, tmp_path: Path) -> None:
    store = copied(undisturbed, tmp_path / "run")
    some = store.files()[3]
    content = some.read_bytes()
    assert store.compact() == (TASKS, 1)
    some.write_bytes(content)  # as if it was killed before shards were removed
    assert len(store.files()) == 1
    assert rows_of(store) == rows_of(undisturbed)
    assert pending(store)[0] == []
    assert store.compact() == (0, 0)
    assert not some.exists()


def test_a_bad_prompt_is_recorded(tmp_path: Path) -> None:
    store = run(tmp_path / "run", samples=[99, 0], layers=[0])
    errors = store.errors()
    assert len(errors) == 2
    assert {record["task"]["prompt"] for record in errors.values()} == {99}
    assert all("not 99" in record["error"] and record["type"] == "PromptError" for record in errors.values())
    found = status(store)
    assert (found["done"], found["failed"], found["tasks"], found["running"]) == (2, 2, 4, False)
    assert json.loads(json.dumps(found)) == found


def test_out_of_memory_is_tried_once_more_with_half(
    undisturbed: SweepStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied(undisturbed, tmp_path / "run")
    copy.files()[0].unlink()
    [task], _ = pending(copy)
    run_task, asked = work.run_task, []

    def scarce(task: Task) -> Results | Radii:
        asked.append(task.memory)
        if len(asked) == 1:
            raise EngineError("taylor needs about 9.0 GiB, 2.0 GiB are allowed")
        return run_task(task)

    monkeypatch.setattr(work, "run_task", scarce)
    report = work.perform(task, copy)
    assert (report.error, report.tries, asked) == (None, 2, [None, work.CHUNK_BYTES // 2])
    assert rows_of(copy) == rows_of(undisturbed)

    def none(task: Task) -> Results:
        raise MemoryError

    monkeypatch.setattr(work, "run_task", none)
    report = work.perform(task, copy)
    assert (report.kind, report.tries) == ("MemoryError", 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_the_disk_is_full(undisturbed: SweepStore, small_disk: Path) -> None:
    store = start(parse_spec(SPEC, "test"), small_disk / "run")
    with suppress(RunError):  # not even the error could be written
        finish(store)
    assert 2 <= len(store.done()) < TASKS
    assert store.damaged() == []
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    finish(store)
    assert rows_of(store) == rows_of(undisturbed)
    assert store.errors() == {}


def test_one_driver_at_a_time(undisturbed: SweepStore) -> None:
    with locked(undisturbed), pytest.raises(RunError, match="another process"):
        finish(undisturbed)
