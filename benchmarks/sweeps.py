"""What sweeps cost beside the proofs, and how they scale.

python benchmarks/sweeps.py rows                      # 10⁶ rows: bookkeeping, memory of the driver, queries, report
python benchmarks/sweeps.py tasks                     # seconds of one task at layer 0, one thread
python benchmarks/sweeps.py scaling --model minilm    # one worker, two workers, and the executors side by side
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch

from prooflens.certificate.store import query_tables
from prooflens.report.sweep import report_sweep
from prooflens.sweep import drive
from prooflens.sweep.executors import Crew, Executor, execute
from prooflens.sweep.spec import Spec, parse_spec
from prooflens.sweep.store import SweepStore
from prooflens.sweep.tasks import ModelFacts, Task, plan
from prooflens.sweep.work import TaskReport, run_task
from texts import IOI

PER_TASK = 252
"""Rows of a task: the 9 heads × 14 tokens × 2 queries of a layer of smollm2 on the IOI prompt."""

GROUP_BY = "select layer, head, query, verdict, count(*), avg(lower) from rows group by all"
TEXTS = ("the movie was long but good", "the book was short and very odd", "we went home after the rain")


def resident() -> float:
    """MiB that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def cpu_of_children() -> float:
    """CPU seconds of the processes that this one started and that ended; those of a Ray cluster are not seen."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(name: str, call: Any) -> Any:
    start = time.perf_counter()
    found = call()
    print(f"{name}: {time.perf_counter() - start:.2f} s")
    return found


def with_numbers(table: pa.Table, seed: int) -> pa.Table:
    """The table with numbers that do not compress."""
    draw = np.random.default_rng(seed)
    for name in ("lower", "upper", "clean", "attack", "ms"):
        table = table.set_column(table.column_names.index(name), name, pa.array(draw.normal(size=len(table))))
    return table


def bench_rows(rows: int, folder: Path) -> None:
    """A sweep whose tasks take no time: what is left is planning, writing, counting and reading."""
    tasks = -(-rows // PER_TASK)
    spec = parse_spec(
        {
            "models": ["toy"],
            "samples": list(range(tasks)),
            "layers": [0],
            "regions": {"eps": 0.01},
            "budget": "100/3/15",
        },
        "benchmark",
    )
    first = next(plan(spec, {"toy": ModelFacts.of("toy")}))
    found = run_task(first).table
    table = pa.concat_tables([found] * -(-PER_TASK // len(found))).slice(0, PER_TASK).combine_chunks()
    at_tasks: list[float] = []

    def canned(asked: Sequence[Task], path: Path, crew: Crew) -> Generator[TaskReport, None, None]:
        store = SweepStore(path)
        for number, task in enumerate(asked):
            if number % (tasks // 4) == 0:
                at_tasks.append(resident())
            store.write_shard(task.key, task.label, with_numbers(table, number))
            yield TaskReport(task, counts={"holds": PER_TASK})
        at_tasks.append(resident())

    store = timed("plan", lambda: drive.start(spec, folder / "run"))
    start = time.perf_counter()
    with patch.object(drive, "execute", canned):
        drive.proceed(store, Crew(), lambda stage, share: None)
    spent = time.perf_counter() - start
    print(f"{tasks} tasks, {tasks * PER_TASK} rows: {spent:.1f} s, {1e3 * spent / tasks:.1f} ms a task")
    print("MiB of the driver at each quarter: " + ", ".join(f"{size:.0f}" for size in at_tasks))

    def grouped() -> Any:
        return query_tables({"rows": store.dataset()}, GROUP_BY)

    timed("group by over shards", grouped)
    timed("watch over shards", lambda: drive.status(store))
    timed("resume with nothing to do", lambda: drive.proceed(store, Crew(), lambda stage, share: None))
    timed("compact", store.compact)
    timed("group by after compact", grouped)
    timed("watch after compact", lambda: drive.status(store))
    timed("report", lambda: report_sweep(store.path, folder / "report.html"))
    print(f"MiB on disk: {sum(path.stat().st_size for path in store.files()) / 2**20:.1f}")


def bench_tasks() -> None:
    """What a task takes that is not bookkeeping: wall and CPU seconds, the model being loaded."""
    torch.set_num_threads(1)
    asked: list[tuple[str, str | int, float]] = [
        ("toy", 0, 0.02),
        ("minilm", TEXTS[0], 0.001),
        ("smollm2", IOI[0], 0.0005),
    ]
    for model, prompt, eps in asked:
        source = {"samples": [prompt]} if isinstance(prompt, int) else {"prompts": [prompt]}
        queries = ["top1", "mass>=0.2"]
        document = {"models": [model], "layers": [0], "regions": {"eps": eps}, "queries": queries, **source}
        [task] = plan(parse_spec(document, "benchmark"), {model: ModelFacts.of(model)})
        run_task(task)
        wall, work = time.perf_counter(), time.process_time()
        rows = len(run_task(task))
        wall, work = time.perf_counter() - wall, time.process_time() - work
        print(f"{model}: {rows} rows, {wall:.2f} s, {work:.2f} s of CPU")


def measured(spec: Spec, folder: Path, crew: Crew) -> tuple[float, float]:
    """Wall seconds of a sweep, and the seconds that its tasks took."""
    store = drive.start(spec, folder)
    work: list[float] = []

    def counted(asked: Sequence[Task], path: Path, crew: Crew) -> Generator[TaskReport, None, None]:
        for report in execute(asked, path, crew):
            assert report.error is None, report.error
            work.append(report.seconds)
            yield report

    start = time.perf_counter()
    with patch.object(drive, "execute", counted):
        drive.proceed(store, crew, lambda stage, share: None)
    return time.perf_counter() - start, sum(work)


def bench_scaling(model: str, eps: list[float], repeat: int, executors: list[str], folder: Path) -> None:
    """The same sweep with one worker and two: efficiency is tasks per second and worker, relative to one worker."""
    prompts = [text + " now" * i for i in range(repeat) for text in TEXTS]
    source = {"samples": list(range(4 * repeat))} if model == "toy" else {"prompts": prompts}
    spec = parse_spec({"models": [model], "layers": [0], "regions": {"eps": eps}, **source}, "benchmark")
    print(f"load {os.getloadavg()[0]:.1f} before")
    alone = None
    for name in executors:
        for workers in (1, 2):
            address = "local" if name == "slurm" else None
            crew = Crew(Executor(name), workers, 1, address)
            before = cpu_of_children()
            wall, work = measured(spec, folder / f"{name}-{workers}", crew)
            alone = alone or wall
            print(
                f"{name}, {workers} workers: {wall:.1f} s, tasks {work:.1f} s, "
                f"CPU of workers {cpu_of_children() - before:.1f} s, "
                f"busy {100 * work / wall / workers:.0f} %, efficiency {100 * alone / wall / workers:.0f} %"
            )
    print(f"load {os.getloadavg()[0]:.1f} after")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("rows", "tasks", "scaling"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--eps", type=float, nargs="+", default=[0.001, 0.002])
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--executors", nargs="+", default=["local"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.what == "rows":
            bench_rows(asked.rows, Path(folder))
        elif asked.what == "tasks":
            bench_tasks()
        else:
            bench_scaling(asked.model, asked.eps, asked.repeat, asked.executors, Path(folder))


if __name__ == "__main__":
    main()
