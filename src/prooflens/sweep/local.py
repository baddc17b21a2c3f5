"""The executor `local`: worker processes on this machine, threads pinned so that cores are not oversubscribed.

Each worker has a pipe of its own and holds one task at a time, so a worker that dies is known by its pipe, and with it
the task that it died on: a fresh worker takes its place and the task is tried once more. Workers end with the driver,
however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from prooflens.memory import keep_freed
from prooflens.sweep.store import SweepStore
from prooflens.sweep.tasks import AnyTask
from prooflens.sweep.work import TaskReport, perform

TRIES = 2
"""A task whose worker dies is given to so many workers."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def default_workers(threads: int) -> int:
    """As many workers as keep the cores of this process busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def execute(
    tasks: Iterable[AnyTask], path: Path, workers: int, threads: int = 1
) -> Generator[TaskReport, None, None]:
    """Do the tasks in worker processes; reports come as tasks end.

    Args:
        tasks: what is to be done.
        path: the sweep's folder.
        workers: how many processes.
        threads: the threads of each.
    """
    waiting, deaths = deque(tasks), Counter[str]()
    crew: list[_Worker] = []
    with pinned(threads):
        try:
            crew += [_Worker(path, threads) for _ in range(min(workers, len(waiting)))]
            while True:
                for number, worker in enumerate(crew):
                    if worker.task is None and waiting and not worker.give(waiting.popleft()):
                        waiting.appendleft(worker.untaken())
                        crew[number] = _Worker(path, threads)
                busy = [worker.pipe for worker in crew if worker.task is not None]
                if not busy and not waiting:
                    return
                ready = wait(busy) if busy else []
                for number, worker in enumerate(crew):
                    if worker.pipe not in ready:
                        continue
                    report = worker.report()
                    if report is not None:
                        yield report
                        continue
                    task = worker.untaken()
                    crew[number] = _Worker(path, threads)
                    deaths[task.key] += 1
                    if deaths[task.key] < TRIES:
                        waiting.append(task)
                    else:
                        reason = f"the worker died {TRIES} times on this task, the last time {worker.fate()}"
                        yield TaskReport(task, error=reason, kind="WorkerDied", tries=TRIES)
        finally:
            for worker in crew:
                worker.stop()


class _Worker:
    """A process that does one task at a time."""

    def __init__(self, path: Path, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.task: AnyTask | None = None
        self.process = context.Process(target=_serve, args=(theirs, path, threads), daemon=True)
        self.process.start()
        theirs.close()  # so that its death is the end of the pipe

    def give(self, task: AnyTask) -> bool:
        """Hand over a task; False if the worker is gone."""
        self.task = task
        try:
            self.pipe.send(task)
        except OSError:
            return False
        return True

    def report(self) -> TaskReport | None:
        """How the task ended; None if the worker did."""
        try:
            found: TaskReport = self.pipe.recv()
        except (EOFError, OSError):
            return None
        self.task = None
        return found

    def untaken(self) -> AnyTask:
        """The task that a dead worker leaves."""
        assert self.task is not None
        self.process.join()
        self.pipe.close()
        return self.task

    def fate(self) -> str:
        """How the process ended."""
        code = self.process.exitcode
        return (
            f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        )

    def stop(self) -> None:
        """End the process; a task under way leaves nothing."""
        self.process.terminate()
        self.process.join()


def _serve(pipe: Connection, path: Path, threads: int) -> None:
    """What a worker does until the driver is gone."""
    import torch

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group: the driver ends its workers
    threading.Thread(target=_end_with_driver, daemon=True).start()
    torch.set_num_threads(threads)
    keep_freed()
    store = SweepStore(path)
    with suppress(EOFError, OSError):
        while True:
            pipe.send(perform(pipe.recv(), store))


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    if driver is not None:
        wait([driver.sentinel])
        os._exit(1)


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Processes started meanwhile have so many threads in every library that reads these variables."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
