"""Commands about sweeps: sweep, resume, compact, diff, watch."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.cli.common import app, print_json, print_table, say
from prooflens.cli.groups import grouped
from prooflens.cli.options import Json
from prooflens.progress import Progress, shown

if TYPE_CHECKING:
    from prooflens.sweep.executors import Crew
    from prooflens.sweep.store import SweepStore

LINE_SECONDS = 10.0
"""Where stderr is no terminal, a line of progress comes at most so often."""

Run = Annotated[Path, typer.Argument(help="The folder of a sweep.")]


@dataclass(frozen=True)
class CrewOptions:
    """Who does the work of a sweep."""

    executor: Annotated[str, typer.Option(help="Where workers run: local, ray, slurm.")] = "local"
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Workers at a time (default: the cores of machine or cluster over --threads)."
        ),
    ] = None
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1
    address: Annotated[
        str | None,
        typer.Option(
            help="Of a Ray cluster, as host:port or auto; `local` tries Slurm's jobs on this machine."
        ),
    ] = None
    slurm: Annotated[
        list[str] | None, typer.Option("--slurm", help="An option of sbatch, as in --slurm partition=gpu.")
    ] = None

    def crew(self) -> Crew:
        """The workers that were asked for."""
        from prooflens.errors import RunError
        from prooflens.sweep.executors import Crew, Executor

        if self.executor not in list(Executor):
            raise RunError(f"there is no executor {self.executor!r}: give one of {', '.join(Executor)}")
        options = dict(text.lstrip("-").partition("=")[::2] for text in self.slurm or ())
        if wrong := next((name for name, value in options.items() if not (name and value)), None):
            raise RunError(f"--slurm takes NAME=VALUE, as in --slurm partition=gpu, not {wrong!r}")
        return Crew(Executor(self.executor), self.workers, self.threads, self.address, options)


@app.command()
@grouped
def sweep(
    spec: Annotated[Path, typer.Argument(help="What to ask, as YAML: docs/sweeps.md.")],
    crew: CrewOptions,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder of the run, new or empty.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the tasks and estimate time and disk from a few of them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Every model × prompt × layer × ε of a specification, here or on a cluster; what is killed can be resumed.

    Exit code: 0 all tasks are done, 1 error, 2 some tasks failed, 130 interrupted.
    """
    from prooflens.errors import RunError
    from prooflens.sweep.drive import probe, start
    from prooflens.sweep.spec import read_spec

    asked, who = read_spec(spec), crew.crew()
    if dry_run:
        found = probe(asked, who)
        if as_json:
            print_json(found)
        else:
            print_table(("", ""), found.items())
        return
    if out is None:
        raise RunError("a sweep needs a folder to write: -o RUN/ (or --dry-run)")
    _proceed(start(asked, out), who, as_json)


@app.command()
@grouped
def resume(
    run: Run,
    crew: CrewOptions,
    as_json: Json = False,
) -> None:
    """Go on with a sweep: what is done is kept, damaged shards are redone, failed tasks are tried again."""
    from prooflens.sweep.store import SweepStore

    who = crew.crew()
    _proceed(SweepStore.open(run), who, as_json)


def _proceed(store: SweepStore, crew: Crew, as_json: bool) -> None:
    from prooflens.sweep.drive import proceed

    try:
        with shown(True) as bar:
            tally = proceed(store, crew, _telling(bar))
    except KeyboardInterrupt:
        say(f"interrupted; to go on: prooflens resume {store.path}", error=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(tally.to_dict() | {"run": str(store.path)})
    else:
        say(f"{tally.line()}; written to {store.path}")
        for record in list(store.errors().values())[:3]:
            task = record["task"]
            say(f"failed: {task['model']}, {task['prompt']!r}, layer {task['layer']}: {record['error']}")
    raise typer.Exit(2 if tally.failed else 0)


def _telling(bar: Progress) -> Progress:
    """The bar where stderr is a terminal, else a line now and then."""
    if sys.stderr.isatty():
        return bar
    last = time.monotonic()

    def tell(stage: str, share: float) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            say(stage, error=True)

    return tell


@app.command()
def compact(run: Run, as_json: Json = False) -> None:
    """Put the shards of a sweep together into few files; nothing else about it changes."""
    from prooflens.sweep.drive import locked
    from prooflens.sweep.store import SweepStore

    store = SweepStore.open(run)
    with locked(store):
        shards, parts = store.compact()
    if as_json:
        print_json({"shards": shards, "files": parts})
    else:
        say(f"{shards} shards put together into {parts} files")


@app.command()
def diff(
    run_a: Annotated[Path, typer.Argument(help="The folder of a sweep, or of a run.")],
    run_b: Annotated[Path, typer.Argument(help="The folder of another.")],
    as_json: Json = False,
) -> None:
    """Which verdicts changed between two sweeps or runs, and by how much bounds moved."""
    from prooflens.sweep.diff import Rows
    from prooflens.sweep.diff import diff as compare

    found = compare(Rows.of(run_a), Rows.of(run_b))
    if as_json:
        print_json(found)
        return
    print_table(("", ""), found["summary"].items())
    if found["transitions"]:
        print_table(list(found["transitions"][0]), (row.values() for row in found["transitions"]))
        few = found["rows"][:40]
        place = "eps" if "eps" in few[0] else "token"
        names = ("model", "prompt", place, "layer", "head", "position", "query", "verdict_a", "verdict_b")
        print_table(names, ([row[name] for name in names] for row in few))
        if len(found["rows"]) > len(few):
            say(f"… {len(found['rows']) - len(few)} more rows: --json has them all")


@app.command()
def watch(
    run: Run,
    once: Annotated[bool, typer.Option("--once", help="Say how far it is, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    as_json: Json = False,
) -> None:
    """How far a sweep is, from another shell; ends with it."""
    from prooflens.sweep.drive import status
    from prooflens.sweep.store import SweepStore

    store = SweepStore.open(run)
    while True:
        found = status(store)
        if once and as_json:
            print_json(found)
        else:
            say(_status_line(found))
        if once or not found["running"]:
            return
        time.sleep(every)


def _status_line(found: dict[str, Any]) -> str:
    parts = [f"{found['done']}/{found['tasks']} tasks", f"{found['failed']} failed"]
    parts += [f"{count} {name}" for name, count in found["verdicts"].items()]
    if found["tasks_per_second"] is not None:
        parts.append(f"{found['tasks_per_second']:.2g} tasks/s")
    if found["seconds_left"] is not None:
        parts.append(f"about {found['seconds_left']:.0f} s left")
    return ", ".join([*parts, "running" if found["running"] else "not running"])
