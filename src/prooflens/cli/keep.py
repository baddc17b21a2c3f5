"""How commands keep what they find: run directories, and going on with one."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prooflens.cli.common import say
from prooflens.errors import RunError

if TYPE_CHECKING:
    from prooflens.certify import Question
    from prooflens.frames import Subject
    from prooflens.results import Results


class Keeper:
    """Writes a run where one was asked for, and knows what an earlier one holds."""

    def __init__(self, options: dict[str, Any], subject: Subject) -> None:
        from prooflens.certificate.record import header
        from prooflens.certificate.store import RunWriter

        self.writer: RunWriter | None = None
        self.before: Any = None
        self.written: set[tuple[object, ...]] = set()
        path = options["out"]
        if path is None:
            if options["resume"]:
                raise RunError("--resume needs the run to go on with: -o RUN/")
            return
        facts = header(subject, configuration(options))
        if options["resume"] and path.exists():
            self.writer, run = RunWriter.resume(path, facts)
            self.before = run.table if run.table.num_rows else None
        else:
            self.writer = RunWriter.create(path, facts, "add --resume to go on with it, or ")

    def remaining(self, question: Question) -> Question:
        """The question without what is done already."""
        from dataclasses import replace

        from prooflens.results import Results, claim_key

        if self.before is None:
            return question
        done = Results(self.before).keys
        return replace(question, claims=[c for c in question.claims if claim_key(c) not in done])

    def keep(self, results: Results) -> None:
        """Write what is new of some results as one more part: a kill loses only what is under way."""
        from prooflens.certificate.record import append
        from prooflens.results import Results, claim_key

        if self.writer is None or results.subject is None:
            return
        fresh = [outcome for outcome in results.outcomes if claim_key(outcome.claim) not in self.written]
        if fresh:
            append(self.writer, Results.of(fresh, results.subject))
        self.written |= results.keys

    def finish(self, results: Results) -> Results:
        """Say that the run is complete; all of it comes back."""
        import pyarrow as pa

        from prooflens.results import VERDICTS, Results

        whole = results
        if self.before is not None:
            whole = Results(pa.concat_tables([self.before.select(VERDICTS.names), results.table]))
        if self.writer is not None:
            self.writer.finish(counts=whole.counts)
        return whole

    def advice(self) -> str:
        """How to go on."""
        if self.writer is None:
            return "nothing was written: with -o RUN/ what is done is kept and --resume goes on with it"
        return f"to go on: {command_line(without='--resume')} --resume"


def make_room(path: Path | None) -> None:
    """Before any work: an error where a run could not be written to this folder after it."""
    from prooflens.certificate.store import RunWriter

    if path is not None:
        RunWriter.check_room(path)


def tell_written(options: dict[str, Any]) -> None:
    """Where the run is, unless nothing but a document was asked for."""
    if options["out"] is not None and not options["as_json"]:
        say(f"written to {options['out']}")


def configuration(options: dict[str, Any]) -> dict[str, Any]:
    """The options as `run.json` keeps them, with the command that was given."""
    kept = {name: value for name, value in options.items() if name not in ("as_json", "out", "resume")}
    return {**kept, "command": command_line()}


def command_line(without: str = "") -> str:
    """The command as it was given."""
    return shlex.join(["prooflens", *(word for word in sys.argv[1:] if word != without)])
