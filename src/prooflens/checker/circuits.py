"""Folders that `prooflens discover` wrote: a circuit, the run that shows it faithful, and one for each of its parts.

A circuit is faithful if the claim of its run `certificate` is; it is minimal, part by part, if in every run of `needed`
a point (or a member of a family) is off by more than δ. Here each run is checked by itself, and must be about what the
circuit says: the same metric and δ, and the parts outside of the circuit, with the one part more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prooflens.checker.findings import (
    CONFIRMED,
    REPROVED,
    RERUN,
    WRONG,
    CheckReport,
    Finding,
    WrongError,
    need,
)

Examined = Callable[[Path], CheckReport]
"""Checks one run directory."""


def is_circuit(folder: Path) -> bool:
    """Whether a folder is one that `discover` wrote."""
    return (folder / "circuit.json").is_file() and not (folder / "run.json").exists()


def check_circuit(folder: Path, examine: Examined) -> CheckReport:
    """Check a circuit: row 0 is that it is faithful, every other that one of its parts is needed.

    Args:
        folder: what `prooflens discover -o` wrote.
        examine: checks one run directory.
    """
    try:
        stated = json.loads((folder / "circuit.json").read_text(encoding="utf-8"))
        parts, gone = list(stated["circuit"]), list(stated["removed"])
        need(set(stated["nodes"]) == set(parts), "the nodes of circuit.json are not its circuit")
        need(not set(parts) & set(gone), "a part is in the circuit and taken out")
        findings = [_faithful(folder, stated, gone, examine)]
        findings += [
            _needed(folder, stated, part, gone, examine, number) for number, part in enumerate(parts, 1)
        ]
        if stated["minimal"]:
            shown = all(finding.status in (CONFIRMED, RERUN) for finding in findings[1:])
            wrong = any(finding.status == WRONG for finding in findings)
            need(shown or wrong, "it is called minimal, and not every part has a witness")
        return CheckReport([], findings)
    except (WrongError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return CheckReport([f"WRONG: {error or type(error).__name__}"], [])


def _faithful(folder: Path, stated: dict[str, Any], gone: list[str], examine: Examined) -> Finding:
    if not gone:
        return Finding(0, REPROVED, "nothing is taken out")
    word, note, verdict = _claim(folder / "certificate", stated, gone, examine)
    if verdict != stated["circuit_is_faithful"]:
        return Finding(0, WRONG, f"circuit.json says {stated['circuit_is_faithful']}, its run {verdict}")
    return Finding(0, word, f"the circuit is faithful: {verdict}; {note}")


def _needed(
    folder: Path, stated: dict[str, Any], part: str, gone: list[str], examine: Examined, number: int
) -> Finding:
    word, note, verdict = _claim(folder / "needed" / part, stated, [*gone, part], examine)
    left = part in stated["open"] or part in stated["superfluous"]
    if word != WRONG and (verdict == "fails") == left:
        return Finding(number, WRONG, f"{part}: circuit.json says otherwise than its run, {verdict}")
    return Finding(number, word, f"{part}: {'open' if left else 'needed'}; {note}")


def _claim(run: Path, stated: dict[str, Any], gone: list[str], examine: Examined) -> tuple[str, str, str]:
    """What the checker says of the one claim of a run, and its verdict; an error if it is about something else."""
    found = examine(run)
    if found.problems:
        return WRONG, found.problems[0], ""
    info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    need(info["model"]["sha256"] == stated["model_sha256"], f"{run.name} is about another model")
    files = [run / name for name in info["files"] if name.startswith("rows/")]
    rows: list[dict[str, Any]] = pa.concat_tables([pq.read_table(file) for file in files]).to_pylist()
    delta, metric = float(stated["faithful"]), stated["metric"]
    if info["kind"] == "family effects":
        need(len(rows) == 1 and info["claimed"] == {"faithful": delta}, f"{run.name} claims something else")
        row, edit = rows[0], info["edits"][0]["edit"]
        need(row["metric"] == metric, f"{run.name} is about another metric")
        holds = row["faithful"] == row["asked"]
        verdict = "fails" if not holds else "holds" if row["word"] == "enumerated" else "estimated"
    else:
        edit = info["edited"]["edit"]
        asked = f"|effect({metric})|<={delta!r} {edit}"
        (row,) = (row for row in rows if row["query"] == asked)
        verdict = row["verdict"]
    named = re.fullmatch(r"without ([\w., @<>-]+)", edit)
    same = named is None or set(named[1].split(", ")) == set(gone)
    need(same, f"{run.name} takes other parts out than the circuit leaves")
    (finding,) = (finding for finding in found.findings if finding.row == row["row"])
    free = "" if named else "; how its parts are taken out is the stored one"
    return finding.status, finding.note + free, verdict
