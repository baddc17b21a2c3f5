"""Folders that a report is made from: of which kind a run is, and which runs a discovered circuit consists of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prooflens.certificate.folders import runs_inside
from prooflens.json_files import read_json

FAMILY, FAMILY_EFFECTS, VOCABULARY = "family", "family effects", "vocabulary"
"""Kinds of runs that have pages of their own."""


def kind_of(path: Path | str) -> str | None:
    """Return what the rows of a run directory are; None where it is no run that can be read.

    Args:
        path: any path.
    """
    try:
        return str(read_json(Path(path) / "run.json")["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def unfolded(paths: Sequence[Path]) -> list[Path]:
    """Return run directories: of a folder that `discover` wrote its certificate and parts, of a folder of runs these.

    Args:
        paths: any paths.
    """
    found: list[Path] = []
    for path in paths:
        inside = [path / "certificate", *sorted((path / "needed").glob("*"))]
        if (path / "run.json").exists():
            found.append(path)
        elif (path / "circuit.json").is_file():
            found += [run for run in inside if (run / "run.json").is_file()]
        else:
            found += runs_inside(path) or [path]
    return found


def label_of(path: Path | str, edit: str) -> str:
    """Return a short name for the edit of a run: of a run that `discover` wrote, the part that it is about.

    Args:
        path: the run, or what stands for it.
        edit: the edit in words.
    """
    place = Path(path)
    if place.parent.name == "needed":
        return f"{place.name}, and all outside"
    return "all outside the circuit" if place.name == "certificate" else edit.removeprefix("without ")
