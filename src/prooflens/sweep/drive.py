"""The driver: plans a sweep, hands its tasks to an executor, records what fails, and says how far it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout

from prooflens.errors import RunError
from prooflens.progress import Progress
from prooflens.results.record import versions
from prooflens.sweep.executors import Crew, execute
from prooflens.sweep.local import default_workers
from prooflens.sweep.spec import Spec, parse_spec
from prooflens.sweep.store import HEADER, SweepStore
from prooflens.sweep.tasks import ModelFacts, Task, plan
from prooflens.sweep.work import NOT_PROVED, PROVED, TaskReport

PROBES = 4
"""A dry run does at most so many tasks, spread over the sweep."""


@dataclass
class Tally:
    """How far a sweep is."""

    total: int
    done: int = 0
    failed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    fresh: int = 0
    """Tasks that ended since this driver started."""
    started: float = field(default_factory=time.monotonic)

    def add(self, report: TaskReport) -> None:
        """One more task ended."""
        self.fresh += 1
        self.done += report.error is None
        self.failed += report.error is not None
        self.counts.update(report.counts)

    @property
    def rate(self) -> float:
        """Tasks per second of this driver."""
        return self.fresh / max(1e-9, time.monotonic() - self.started)

    @property
    def seconds_left(self) -> float | None:
        """What the rest takes at this rate; None before a task ended."""
        return (self.total - self.done - self.failed) / self.rate if self.fresh else None

    def line(self) -> str:
        """Tasks, verdicts, rate and time left."""
        tally = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()) if count)
        failed = f", {self.failed} failed" if self.failed else ""
        left = f"; about {self.seconds_left:.0f} s left" if self.seconds_left else ""
        return (
            f"{self.done}/{self.total} tasks{failed}; {tally or 'no verdicts'}; {self.rate:.2g} tasks/s{left}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON has it."""
        return {
            "tasks": self.total,
            "done": self.done,
            "failed": self.failed,
            "verdicts": {name: count for name, count in sorted(self.counts.items()) if count},
        }


def start(spec: Spec, path: Path) -> SweepStore:
    """A new run for a specification: models are loaded once for their fingerprints, and tasks are counted."""
    facts = {name: ModelFacts.of(name) for name in spec.models}
    total = sum(1 for _ in plan(spec, facts))
    header = {
        "kind": "sweep",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "spec": spec.model_dump(mode="json"),
        "models": {name: asdict(found) for name, found in facts.items()},
        "tasks": total,
    }
    return SweepStore.create(path, header)


def proceed(store: SweepStore, crew: Crew, tell: Progress) -> Tally:
    """Do every task of a run that is not done; damaged files count as not done, failed tasks are tried again.

    Args:
        store: the sweep.
        crew: who works.
        tell: told of every task that ends.
    """
    with locked(store):
        store.repair()
        tasks, total = pending(store)
        tally = Tally(total, done=total - len(tasks), counts=verdicts(store))
        with closing(execute(tasks, store.path, crew)) as reports:
            for report in map(partial(_seen, store), reports):
                if report.error is not None:
                    store.write_error(report.task.key, _record(report))
                tally.add(report)
                tell(tally.line(), (tally.done + tally.failed) / max(1, total))
        return tally


def _seen(store: SweepStore, report: TaskReport) -> TaskReport:
    """The report, or an error where a worker wrote a shard that is not here."""
    if report.error is not None or store.shard(report.task.key).is_file():
        return report
    reason = (
        f"its rows were written on another machine: {store.path} must be in a folder that all machines share"
    )
    return replace(report, error=reason, kind="NotShared", counts={})


def pending(store: SweepStore) -> tuple[list[Task], int]:
    """The tasks of a run that are not done, and how many it has in all."""
    header = store.header
    ours = versions()["prooflens"]
    if header["versions"]["prooflens"] != ours:
        raise RunError(
            f"{store.path} was made by prooflens {header['versions']['prooflens']}, this is {ours}"
        )
    spec = parse_spec(header["spec"], str(store.path / HEADER))
    facts = {name: ModelFacts(**found) for name, found in header["models"].items()}
    done = store.done()
    tasks = [task for task in plan(spec, facts) if task.key not in done]
    for name in {task.model for task in tasks}:
        if ModelFacts.of(name) != facts[name]:
            raise RunError(f"{name} is not the model that {store.path} was started with: its weights changed")
    return tasks, header["tasks"]


def status(store: SweepStore) -> dict[str, Any]:
    """How far a run is, seen from outside: counts, whether a driver is at work, its rate and the time left."""
    files = store.files()
    errors = store.errors().keys() - store.done()
    tally = Tally(store.header["tasks"], len(store.done()), len(errors), verdicts(store))
    ends = sorted(path.stat().st_mtime for path in files if path.parent.name == "shards")[-100:]
    rate = (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 and ends[-1] > ends[0] else None
    left = tally.total - tally.done - tally.failed
    running = is_locked(store)
    return {
        **tally.to_dict(),
        "running": running,
        "tasks_per_second": rate,
        "seconds_left": left / rate if running and rate else None,
    }


def probe(spec: Spec, crew: Crew) -> dict[str, Any]:
    """A dry run: the number of tasks, and what a few of them, done here, say about rows, time and disk.

    Args:
        spec: what would be swept.
        crew: who would work.
    """
    workers = crew.workers or default_workers(crew.threads)
    facts = {name: ModelFacts.of(name) for name in spec.models}
    tasks = list(plan(spec, facts))
    step = max(1, len(tasks) // PROBES)
    chosen = tasks[step // 2 :: step][:PROBES]
    with TemporaryDirectory() as folder:
        store = SweepStore(Path(folder))
        reports = list(execute(chosen, store.path, Crew(workers=1, threads=crew.threads)))
        done = [report for report in reports if report.error is None]
        size = sum(path.stat().st_size for path in store.files())
        rows = sum(sum(report.counts.values()) for report in done)
    share = len(tasks) / max(1, len(done))
    return {
        "tasks": len(tasks),
        "workers": workers,
        "probed": len(reports),
        "errors": [report.error for report in reports if report.error is not None],
        "rows": round(share * rows) if done else None,
        "seconds": share * sum(report.seconds for report in done) / workers if done else None,
        "bytes": round(share * size) if done else None,
    }


def verdicts(store: SweepStore) -> Counter[str]:
    """The counts of all verdicts of a run, or of its radii that are proved and not."""
    radii = f"if(coalesce(certified, 1) > 0, '{PROVED}', '{NOT_PROVED}')"
    name = radii if store.holds_radii else "verdict"
    found = store.query(f"select {name} as name, count(*) as n from rows group by name")
    return Counter({row["name"]: row["n"] for row in found.to_pylist()})


@contextmanager
def locked(store: SweepStore) -> Iterator[None]:
    """One driver per run; the lock of a killed one is free."""
    lock = FileLock(store.path / ".lock")
    try:
        lock.acquire(timeout=1)  # someone may only be looking
    except Timeout as error:
        raise RunError(f"another process is at work on {store.path}: wait for it or stop it") from error
    try:
        yield
    finally:
        lock.release()


def is_locked(store: SweepStore) -> bool:
    """Whether a driver is at work."""
    lock = FileLock(store.path / ".lock")
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True


def _record(report: TaskReport) -> dict[str, Any]:
    return {
        "error": report.error,
        "type": report.kind,
        "tries": report.tries,
        "seconds": round(report.seconds, 3),
        "task": report.task.to_dict(),
    }
