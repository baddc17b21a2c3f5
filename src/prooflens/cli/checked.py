"""What `prooflens check` prints: a table of the rows with what was found of each, and what that means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prooflens.errors import RunError

if TYPE_CHECKING:
    from prooflens.checker import CheckReport

CLAIMED = (
    (
        "the files are those of the run, the weights those of the model",
        "that the text gives the stored centre",
    ),
    (
        "every verdict follows from the stored bounds",
        "that the weights are the ones you mean: compare sha256",
    ),
    (
        "every claim is what its query asks for; a ball or hull is what its name says",
        "what a region with another name is",
    ),
    ("`re-proved`: holds for all points of the region, over the reals", "anything about points outside it"),
    ("`witness confirmed`: this point of the region breaks the claim", "that no nearer point does"),
    (
        "`re-run`: this member of a family has this margin in float64",
        "that float64 has its sign right over the reals",
    ),
    ("`nothing claimed`: the verdict is `unknown`", "anything"),
    ("`not checkable`: nothing contradicts the row", "that the row is true: its engine is trusted"),
)
"""What a check says and what it does not."""

TOLD = ("layer", "head", "position", "query", "verdict")
"""The columns that say what a row claims."""

SHOWN = 20
"""So many rows are shown, those first that need a look."""


def claims_of(run: Path) -> dict[int, str]:
    """Return what the rows of a run claim, by their numbers: where, what, and the verdict.

    Args:
        run: a run directory; of one that cannot be read nothing is known.
    """
    from prooflens.certificate import read_run

    try:
        table = read_run(run, verify=False).rows
    except RunError:
        return {}
    read = table.select([name for name in TOLD if name in table.column_names])
    return {number: _claim(row) for number, row in enumerate(read.to_pylist())}


def _claim(row: Mapping[str, Any]) -> str:
    place = "" if row.get("layer") is None else f"{row['layer']}.{row['head']}@{row['position']}"
    parts = [place, str(row.get("query") or ""), str(row.get("verdict") or "")]
    return " ".join(part for part in parts if part)


def print_check(found: CheckReport, folder: Path, claims: Mapping[int, str]) -> None:
    """Print what was found of each row, and what that means.

    Args:
        found: what the checker found.
        folder: where the weights were read.
        claims: what rows claim, by their numbers; empty where that is not known.
    """
    console = Console()
    order = {"WRONG": 0, "not checkable": 1, "nothing claimed": 3}
    table = Table("row", *(["claim"] if claims else []), "finding", "note")
    for finding in sorted(found.findings, key=lambda f: order.get(f.status, 2))[:SHOWN]:
        claim = [Text(claims.get(finding.row, ""))] if claims else []
        table.add_row(str(finding.row), *claim, finding.status, Text(finding.note))
    if found.findings:
        console.print(table)
    if len(found.findings) > SHOWN:
        console.print(f"… {len(found.findings) - SHOWN} more rows; --json lists them all", highlight=False)
    meaning = Table("claimed", "not claimed")
    for yes, no in CLAIMED:
        meaning.add_row(Text(yes), Text(no))
    console.print(meaning)
    console.print(Text(f"weights: {folder}"))
    if found.problems:  # no row was looked at
        console.print(Text("\n".join(found.problems)))
    else:
        console.print(", ".join(f"{n} {word}" for word, n in found.counts.items()), highlight=False)


def check_document(found: CheckReport, folder: Path) -> dict[str, Any]:
    """Return the same as one JSON document.

    Args:
        found: what the checker found.
        folder: where the weights were read.
    """
    return {
        "rows": [asdict(finding) for finding in found.findings],
        "summary": found.counts,
        "ok": found.ok,
        "problems": found.problems,
        "weights": str(folder),
        "claimed": [{"claimed": yes, "not_claimed": no} for yes, no in CLAIMED],
    }
