"""The words that a check has for rows, and what a check found."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPROVED, CONFIRMED, NOTHING_CLAIMED = "re-proved", "witness confirmed", "nothing claimed"
NOT_CHECKABLE, WRONG = "not checkable", "WRONG"
WORDS = (REPROVED, CONFIRMED, NOTHING_CLAIMED, NOT_CHECKABLE, WRONG)
RERUN = "re-run"
"""A further word, of families of prompts and vocabularies alone: members were run again in float64 by the checker."""

Row = dict[str, Any]


class WrongError(Exception):
    """What contradicts the run."""


def need(condition: object, otherwise: str) -> None:
    """Raise what contradicts the run, unless a condition is met.

    Args:
        condition: what must be true.
        otherwise: what is wrong if it is not.
    """
    if not condition:
        raise WrongError(otherwise)


@dataclass(frozen=True)
class Finding:
    """One of the words about a row, and why."""

    row: int
    status: str
    note: str


@dataclass(frozen=True)
class CheckReport:
    """What was found: problems of the run as a whole, and a finding per row."""

    problems: list[str]
    findings: list[Finding]

    @property
    def counts(self) -> dict[str, int]:
        """How many rows got each word."""
        found = Counter(finding.status for finding in self.findings)
        words = WORDS if not found[RERUN] else (*WORDS[:2], RERUN, *WORDS[2:])
        return {word: found[word] for word in words}

    @property
    def ok(self) -> bool:
        """Whether nothing is WRONG."""
        return not self.problems and not self.counts[WRONG]

    def save(self, run: Path) -> Path:
        """Write the words beside the run, as check.json, for reports; rows that were judged before keep theirs.

        The file names the run.json that it is about by its sha256. Nothing of the run is changed; no check reads it.

        Args:
            run: the run directory that was checked.

        Returns:
            The file.
        """
        path, digest = run / "check.json", hashlib.sha256((run / "run.json").read_bytes()).hexdigest()
        held: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        same = (
            isinstance(held, dict) and held.get("run_sha256") == digest and isinstance(held.get("rows"), dict)
        )
        rows = dict(held["rows"]) if same else {}
        rows |= {str(finding.row): [finding.status, finding.note] for finding in self.findings}
        text = json.dumps({"run_sha256": digest, "rows": rows, "problems": self.problems}, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
        return path
