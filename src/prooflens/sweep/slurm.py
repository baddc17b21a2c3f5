"""The executor `slurm`: batches of tasks as Slurm jobs, through submitit.

A job does its tasks one after another and adds a line to its ledger when one ended; the driver reads ledgers. Where a
job ends before its tasks are done (killed, out of time, its node lost) the rest of them are another job; the task that
it was at is given up when that happens twice. Ledgers are in RUN/jobs, a folder for each driver. Jobs outlive a driver
that is killed; the next driver removes their ledgers, and they end after the task that they are at.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from prooflens.errors import RunError
from prooflens.sweep.local import TRIES, pinned
from prooflens.sweep.store import SweepStore
from prooflens.sweep.tasks import AnyTask
from prooflens.sweep.work import TaskReport, perform

SHARES = 4
"""Tasks are dealt into so many batches per worker: few jobs, and none that the others wait for long."""

LOOK_SECONDS = 0.5
MINUTES = 60
"""The time limit of a job, unless `--slurm time=…` says otherwise; what is left is another job."""


def execute(
    tasks: Sequence[AnyTask],
    path: Path,
    workers: int,
    threads: int = 1,
    address: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Generator[TaskReport, None, None]:
    """Do the tasks in at most `workers` jobs at a time; reports come as tasks end.

    Args:
        tasks: what is to be done.
        path: the sweep's folder.
        workers: how many jobs at a time.
        threads: the threads of each.
        address: `local` to run jobs here, without Slurm; None for Slurm.
        options: what `--slurm` says, by name.
    """
    if not tasks:
        return
    folder = path.resolve() / "jobs" / uuid4().hex[:12]
    shutil.rmtree(folder.parent, ignore_errors=True)  # jobs of a driver that was killed end by this
    executor = _executor(folder, address, threads, options or {})
    size = max(1, -(-len(tasks) // (SHARES * workers)))
    waiting = deque(list(tasks[i : i + size]) for i in range(0, len(tasks), size))
    running: list[_Job] = []
    deaths, barren = Counter[str](), 0
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Job.submit(executor, waiting.popleft(), path.resolve(), folder, threads))
            for job in list(running):
                ended = job.handle.done()  # asked before the ledger is read: then it is complete
                reports = list(job.news())
                for report in reports:
                    yield replace(report, tries=report.tries + deaths[report.task.key])
                barren = 0 if reports else barren + ended
                if not ended:
                    continue
                running.remove(job)
                if not job.left:
                    continue
                if barren > 2 * workers + TRIES:
                    raise RunError(f"jobs end before they do a task, the last one {job.fate()}")
                task = job.left[0]
                deaths[task.key] += 1
                if deaths[task.key] == TRIES:
                    reason = f"its job ended {TRIES} times at this task, the last time {job.fate()}"
                    yield TaskReport(task, error=reason, kind="WorkerDied", tries=TRIES)
                    job.left.pop(0)
                if job.left:
                    waiting.append(job.left)
            time.sleep(LOOK_SECONDS)
    finally:
        for job in running:
            job.cancel()
        shutil.rmtree(folder.parent, ignore_errors=True)


@dataclass
class _Job:
    """A job, its ledger, and the tasks that the ledger does not have yet."""

    handle: Any
    ledger: Path
    left: list[AnyTask]
    read: int = field(default=0)
    """How much of the ledger is known."""

    @classmethod
    def submit(cls, executor: Any, tasks: list[AnyTask], path: Path, folder: Path, threads: int) -> _Job:
        """Hand a batch to the executor.

        Args:
            executor: submitit's.
            tasks: the batch.
            path: the sweep's folder.
            folder: where the job keeps its ledger.
            threads: the threads of the job.
        """
        import submitit

        ledger = folder / f"{uuid4().hex[:12]}.jsonl"
        try:
            ledger.touch()
            with pinned(threads):
                handle = executor.submit(_serve, tasks, path, ledger, threads)
        except (OSError, RuntimeError, submitit.core.utils.FailedJobError) as error:
            raise RunError(f"no job can be submitted: {' '.join(str(error).split())}") from error
        return cls(handle, ledger, list(tasks))

    def news(self) -> Iterator[TaskReport]:
        """Reports of tasks that ended since this was asked last."""
        with self.ledger.open("rb") as file:
            file.seek(self.read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            found = json.loads(line)
            task = next(task for task in self.left if task.key == found["key"])
            self.left.remove(task)
            yield TaskReport(task, **found["report"])

    def fate(self) -> str:
        """How the job ended: the state that the scheduler gives, and the last line it wrote."""
        said = ""
        with suppress(Exception):  # logs may be gone with the node
            lines = (self.handle.stderr() or "").strip().splitlines()
            said = f": {lines[-1]}" if lines else ""
        return f"as {self.handle.state}{said}"

    def cancel(self) -> None:
        """End the job; a task under way leaves nothing."""
        with suppress(Exception):  # it may have ended, or the scheduler does not answer
            self.ledger.unlink(missing_ok=True)
            self.handle.cancel(check=False)


def _serve(tasks: list[AnyTask], path: Path, ledger: Path, threads: int) -> None:
    """What a job does, as long as a driver reads its ledger."""
    import torch

    torch.set_num_threads(threads)
    store = SweepStore(path)
    for task in tasks:
        if not ledger.exists():
            return
        report = asdict(perform(task, store))
        del report["task"]
        line = json.dumps({"key": task.key, "report": report}) + "\n"
        with ledger.open("r+", encoding="utf-8") as file:
            file.seek(0, os.SEEK_END)
            file.write(line)


def _executor(folder: Path, address: str | None, threads: int, options: Mapping[str, str]) -> Any:
    """submitit's executor for Slurm, or the one that runs jobs as processes of this machine."""
    try:
        import submitit
    except ImportError as error:
        raise RunError("--executor slurm needs submitit: pip install 'prooflens[slurm]'") from error
    if address not in (None, "local"):
        raise RunError(f"--executor slurm has the addresses local and none, not {address}")
    if address is None and shutil.which("srun") is None:
        raise RunError(
            "there is no Slurm here: start the sweep where sbatch is, or try it with --address local"
        )
    folder.mkdir(parents=True)
    executor = submitit.AutoExecutor(folder=folder / "%j", cluster=address or "slurm")
    executor.update_parameters(
        name="prooflens",
        timeout_min=MINUTES,
        cpus_per_task=threads,
        slurm_additional_parameters=dict(options),
    )
    return executor
