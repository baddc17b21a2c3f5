"""The executor `ray` on two nodes of this machine: rows equal to those of `local`, whatever is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.compute as pc
import pytest

from prooflens.errors import RunError
from prooflens.sweep.cluster import execute
from prooflens.sweep.drive import pending, start, status
from prooflens.sweep.executors import Crew, Executor
from prooflens.sweep.spec import parse_spec
from prooflens.sweep.store import SweepStore
from tests.sweep.conftest import SPEC, TASKS, finish, rows_of

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'prooflens[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and two nodes of a core each; Ray's sockets need a short path, so not below pytest's folder."""
    from ray.cluster_utils import Cluster

    with (
        TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        soon = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 2,
        }
        made = Cluster(initialize_head=True, head_node_args=small | {"num_cpus": 0, "_system_config": soon})
        try:
            made.add_node(wait=False, **small)
            made.add_node(wait=False, **small)
            made.wait_for_nodes()
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def stopped_at_work(node: Any) -> list[int]:
    """The processes of a node, stopped, if one of them is at a task: Ray writes that into its name."""
    [raylet] = node.all_processes["raylet"]
    pid = raylet.process.pid
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    found = [pid, *children]
    for child in found:
        os.kill(child, signal.SIGSTOP)
    if any(Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::_serve") for child in children):
        return found
    for child in found:
        os.kill(child, signal.SIGCONT)
    return []


def test_a_node_is_killed_in_mid_sweep(cluster: Any, undisturbed: SweepStore, tmp_path: Path) -> None:
    store = start(parse_spec(SPEC, "test"), tmp_path / "run")
    tasks, total = pending(store)
    reports = []
    lost: list[int] = []
    for report in execute(tasks, store.path, 8, 1, cluster.address):  # more than cores: no node waits for us
        reports.append(report)
        if len(reports) >= 3 and not lost:
            lost = next(filter(None, map(stopped_at_work, cluster.worker_nodes)), [])
            for pid in lost:
                os.kill(pid, signal.SIGKILL)
    assert sorted(report.task.key for report in reports) == sorted(task.key for task in tasks)
    assert [report.error for report in reports] == [None] * total == [None] * TASKS
    assert any(report.tries > 1 for report in reports)
    assert rows_of(store) == rows_of(undisturbed)


def test_a_sweep_is_resumed_on_a_cluster(cluster: Any, undisturbed: SweepStore, tmp_path: Path) -> None:
    store = start(parse_spec(SPEC | {"samples": [0, 99]}, "test"), tmp_path / "run")
    tasks, _ = pending(store)
    for report in execute(tasks, store.path, 2, 1, cluster.address):
        if report.error is None:
            break  # as if the driver was interrupted
    assert 1 <= len(store.done()) < 4
    finish(store, crew=Crew(Executor.RAY, None, 1, cluster.address))
    whole = rows_of(undisturbed)
    assert rows_of(store) == whole.filter(pc.equal(whole["prompt"], "sample 0"))
    found = status(store)
    assert (found["done"], found["failed"], found["running"]) == (4, 4, False)
    assert all("not 99" in record["error"] for record in store.errors().values())


def test_no_cluster_is_one_line(cluster: Any, tmp_path: Path) -> None:
    store = start(parse_spec(SPEC, "test"), tmp_path / "run")
    with pytest.raises(RunError, match="no Ray cluster can be used at nowhere"):
        finish(store, crew=Crew(Executor.RAY, None, 1, "nowhere"))
    with pytest.raises(RunError, match="no node of the Ray cluster has 99 free cores"):
        finish(store, crew=Crew(Executor.RAY, None, 99, cluster.address))
