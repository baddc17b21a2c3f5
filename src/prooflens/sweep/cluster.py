"""The executor `ray`: tasks on the nodes of a Ray cluster, which may come and go.

Every task is a remote call that is tried again by us, not by Ray, when its worker or its node dies: so a task that
kills its workers is given up after as many tries as with `local`. Workers write shards themselves: the folder of the
run must be one that all nodes share. Ray ends the workers of a driver that is gone.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prooflens.errors import RunError
from prooflens.sweep.local import THREAD_VARIABLES, TRIES
from prooflens.sweep.store import SweepStore
from prooflens.sweep.tasks import AnyTask
from prooflens.sweep.work import TaskReport, perform

LOOK_SECONDS = 1.0
"""So often at least it is seen whether nodes joined or left."""


def execute(
    tasks: Sequence[AnyTask], path: Path, workers: int | None, threads: int = 1, address: str | None = None
) -> Generator[TaskReport, None, None]:
    """Do the tasks on a cluster; reports come as tasks end. Tasks on a CUDA device take one GPU each.

    Args:
        tasks: what is to be done.
        path: the sweep's folder.
        workers: how many tasks at a time; None for what the cluster holds.
        threads: the threads of each.
        address: the cluster's address; None to start one here.
    """
    waiting, deaths = deque(tasks), Counter[str]()
    if not waiting:
        return
    gpus = int((waiting[0].device or "").startswith("cuda"))
    with _connected(address) as ray:
        call = ray.remote(
            num_cpus=threads,
            num_gpus=gpus,
            max_retries=0,
            runtime_env={"env_vars": dict.fromkeys(THREAD_VARIABLES, str(threads))},
        )(_serve)
        if workers is None and not _slots(ray, threads, gpus):
            raise RunError(f"no node of the Ray cluster has {threads} free cores" + " and a GPU" * gpus)
        under_way: dict[Any, AnyTask] = {}
        try:
            while waiting or under_way:
                room = workers or max(1, _slots(ray, threads, gpus))
                while waiting and len(under_way) < room:
                    task = waiting.popleft()
                    under_way[call.remote(task, path.resolve(), Path.cwd(), threads)] = task
                ended, _ = ray.wait(list(under_way), timeout=LOOK_SECONDS)
                for reference in ended:
                    task = under_way.pop(reference)
                    try:
                        found: TaskReport = ray.get(reference)
                        yield replace(found, tries=found.tries + deaths[task.key])
                    except ray.exceptions.RayError as error:
                        deaths[task.key] += 1
                        if deaths[task.key] < TRIES:
                            waiting.append(task)
                        else:
                            yield TaskReport(task, error=_reason(error), kind="WorkerDied", tries=TRIES)
        finally:
            for reference in under_way:
                with suppress(Exception):  # the cluster may be gone
                    ray.cancel(reference, force=True)


def _serve(task: AnyTask, path: Path, folder: Path, threads: int) -> TaskReport:
    """What a worker does; relative names of models are meant from the driver's folder."""
    import torch

    with suppress(OSError):
        os.chdir(folder)
    torch.set_num_threads(threads)
    return perform(task, SweepStore(path))


def _slots(ray: Any, threads: int, gpus: int) -> int:
    """How many tasks the nodes that are there can do at a time."""
    found = 0
    for node in ray.nodes():
        held = node["Resources"] if node["Alive"] else {}
        slots = int(held.get("CPU", 0) // threads)
        found += min(slots, int(held.get("GPU", 0))) if gpus else slots
    return found


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"the worker died {TRIES} times on this task, the last time: {lines[0] if lines else type(error).__name__}"


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster; without an address to that of RAY_ADDRESS, or to one of its own on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise RunError("--executor ray needs Ray: pip install 'prooflens[ray]'") from error
    ours = not ray.is_initialized()
    try:
        if ours:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"no Ray cluster can be used at {address or 'this machine'}: {line}") from error
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()
