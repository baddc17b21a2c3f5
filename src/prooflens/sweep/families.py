"""A family of prompts over workers, Ray or Slurm: its parts are tasks, and their counts are added up at the end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prooflens.enumeration import family
from prooflens.errors import RunError
from prooflens.families import Prompts, Swaps, Template
from prooflens.progress import Progress
from prooflens.results.families import FamilyResults
from prooflens.sweep.executors import Crew, execute
from prooflens.sweep.local import default_workers
from prooflens.sweep.tasks import FamilyTask

SHARES = 4
"""Parts per worker: none is waited for long."""


@dataclass(frozen=True)
class Asked:
    """What is asked of a family, as `pl.family` takes it.

    Attributes:
        model: the model's name or folder.
        prompts: the family.
        queries: the claims.
        out: the run directory to write.
        options: other arguments of `pl.family`.
    """

    model: str
    prompts: Template | Swaps | Prompts
    queries: Sequence[str]
    out: Path
    options: Mapping[str, Any]


def spread(asked: Asked, crew: Crew, tell: Progress) -> FamilyResults:
    """Run the parts of a family on workers, add their counts up, and write the run.

    Args:
        asked: the family and the claims.
        crew: who does the work.
        tell: is told how far it is.

    Raises:
        RunError: if a part failed; those that are done are kept, and the same call does the rest.
    """
    parts = SHARES * (crew.workers or default_workers(crew.threads))
    tasks = [
        FamilyTask(
            asked.model,
            asked.prompts,
            tuple(asked.queries),
            (i, parts),
            str(asked.out.resolve()),
            asked.options,
        )
        for i in range(1, parts + 1)
    ]
    folder = asked.out.resolve().with_name(f"{asked.out.name}.work")
    done = 0
    try:
        with closing(execute(tasks, folder, crew)) as reports:
            for report in reports:
                if report.error is not None:
                    raise RunError(f"part {report.task.key} failed: {report.error}")
                done += 1
                tell(f"{done} of {parts} parts", done / parts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return family(
        asked.model,
        asked.prompts,
        asked.queries,
        out=asked.out,
        part=(1, parts),
        progress=tell,
        **asked.options,
    )
