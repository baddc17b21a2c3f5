"""How commands keep what they find: run directories, and going on with one."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

from prooflens.errors import RunError

if TYPE_CHECKING:
    from prooflens.certify import Question
    from prooflens.results import Results, Subject


class Keeper:
    """Writes a run where one was asked for, and knows what an earlier one holds."""

    def __init__(self, options: dict[str, Any], subject: Subject) -> None:
        from prooflens.certificate.record import header
        from prooflens.certificate.store import RunWriter

        self.writer: RunWriter | None = None
        self.before: Any = None
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
            self.writer = RunWriter.create(path, facts)

    def remaining(self, question: Question) -> Question:
        """The question without what is done already."""
        from dataclasses import replace

        from prooflens.results import Results, claim_key

        if self.before is None:
            return question
        done = Results(self.before).keys
        return replace(question, claims=[c for c in question.claims if claim_key(c) not in done])

    def keep(self, results: Results, complete: bool = True) -> Results:
        """Write new results; all of the run comes back."""
        import pyarrow as pa

        from prooflens.certificate.record import append
        from prooflens.results import VERDICTS, Results

        whole = results
        if self.before is not None:
            whole = Results(pa.concat_tables([self.before.select(VERDICTS.names), results.table]))
        if self.writer is not None:
            if len(results):
                append(self.writer, results)
            if complete:
                self.writer.finish(counts=whole.counts)
        return whole

    def advice(self) -> str:
        """How to go on."""
        if self.writer is None:
            return "nothing was written: with -o RUN/ what is done is kept and --resume goes on with it"
        return f"to go on: {command_line(without='--resume')} --resume"


def configuration(options: dict[str, Any]) -> dict[str, Any]:
    """The options as `run.json` keeps them, with the command that was given."""
    kept = {name: value for name, value in options.items() if name not in ("as_json", "out", "resume")}
    return {**kept, "command": command_line()}


def command_line(without: str = "") -> str:
    """The command as it was given."""
    return shlex.join(["prooflens", *(word for word in sys.argv[1:] if word != without)])
