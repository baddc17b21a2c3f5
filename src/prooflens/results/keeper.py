"""Run directories that are written while the work goes on, so that an interruption loses only the current part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from prooflens.certificate.store import RunWriter
from prooflens.errors import RunError
from prooflens.queries import Claim
from prooflens.results.deployed import DEPLOYED
from prooflens.results.frame import Subject, with_units
from prooflens.results.record import append, header
from prooflens.results.tables import VERDICTS, Results, claim_key


class RunKeeper:
    """Write verdicts into a run directory as they come, and know what an earlier run there holds already.

    Args:
        path: the run directory; None to keep nothing.
        subject: what the verdicts are about.
        configuration: what was asked for, kept in `run.json`.
        resume: whether to go on with the run that is there.

    Raises:
        RunError: if the directory cannot be written, holds a run already (without `resume`), or a run about something
            else (with it).
    """

    def __init__(
        self,
        path: Path | str | None,
        subject: Subject,
        configuration: Mapping[str, Any],
        resume: bool = False,
    ) -> None:
        self.writer: RunWriter | None = None
        self.before: pa.Table | None = None
        self.written: set[tuple[object, ...]] = set()
        if path is None:
            if resume:
                raise RunError("there is no run to resume: name its directory (-o RUN/, or out= in Python)")
            return
        path, facts = Path(path), header(subject, configuration)
        if resume and path.exists():
            self.writer, run = RunWriter.resume(path, facts)
            self.before = run.table if run.table.num_rows else None
            if run.info.get("configuration", {}).get("deployed") != configuration.get("deployed"):
                raise RunError(f"{path} was made with another `deployed`: resume with the same one")
        else:
            self.writer = RunWriter.create(
                path, facts, "go on with it (--resume, or resume=True in Python), or "
            )

    def remaining(self, claims: Iterable[Claim]) -> list[Claim]:
        """Return the claims that the run does not hold yet.

        Args:
            claims: everything that is asked.
        """
        done = set() if self.before is None else Results(self.before).keys
        return [claim for claim in claims if claim_key(claim) not in done]

    def keep(self, results: Results) -> None:
        """Write those results that are not written yet as one more part.

        Args:
            results: all results so far, written or not.
        """
        if self.writer is None or results.subject is None:
            return
        fresh = [outcome for outcome in results.outcomes if claim_key(outcome.claim) not in self.written]
        if fresh:
            append(self.writer, Results.of(fresh, results.subject))
        self.written |= results.keys

    def finish(self, results: Results) -> Results:
        """Mark the run as complete; return all of its rows, with those that an earlier run held.

        Args:
            results: all results of this call.
        """
        whole = results
        if self.before is not None:
            kept = [*VERDICTS.names, *(name for name in DEPLOYED.names if name in self.before.column_names)]
            before = with_units(self.before).select(kept)
            whole = Results(
                pa.concat_tables([before, results.table], promote_options="default"), results.subject
            )
        if self.writer is not None:
            self.writer.finish(counts=whole.counts, effort=results.effort)
        return whole
