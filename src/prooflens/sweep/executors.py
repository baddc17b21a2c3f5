"""Who does the tasks of a sweep: processes of this machine, a Ray cluster, or Slurm jobs. Rows do not depend on it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from prooflens.errors import RunError
from prooflens.sweep import local
from prooflens.sweep.tasks import AnyTask
from prooflens.sweep.work import TaskReport


class Executor(StrEnum):
    """Where workers run."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


@dataclass(frozen=True)
class Crew:
    """An executor, how many workers it may have at a time, and how many threads each of them."""

    executor: Executor = Executor.LOCAL
    workers: int | None = None
    """None: as many as the cores of this machine or of the cluster allow."""
    threads: int = 1
    address: str | None = None
    """Of a Ray cluster; for Slurm `local`, which runs jobs as processes of this machine."""
    slurm: Mapping[str, str] = field(default_factory=dict)
    """Options of sbatch."""

    def __post_init__(self) -> None:
        if self.executor is Executor.LOCAL and self.address is not None:
            raise RunError("--address is for --executor ray (or slurm): workers of local are on this machine")
        if self.executor is not Executor.SLURM and self.slurm:
            raise RunError("--slurm is for --executor slurm")
        if self.executor is Executor.SLURM and self.workers is None:
            raise RunError("--executor slurm needs --workers N, the number of jobs at a time")


def execute(tasks: Sequence[AnyTask], path: Path, crew: Crew) -> Generator[TaskReport, None, None]:
    """Do the tasks of the sweep in a folder; reports come as tasks end.

    Args:
        tasks: what is to be done.
        path: the sweep's folder.
        crew: who works.
    """
    if crew.executor is Executor.RAY:
        from prooflens.sweep import cluster

        return cluster.execute(tasks, path, crew.workers, crew.threads, crew.address)
    if crew.executor is Executor.SLURM:
        from prooflens.sweep import slurm

        assert crew.workers is not None
        return slurm.execute(tasks, path, crew.workers, crew.threads, crew.address, crew.slurm)
    workers = crew.workers or local.default_workers(crew.threads)
    return local.execute(tasks, path, workers, crew.threads)
