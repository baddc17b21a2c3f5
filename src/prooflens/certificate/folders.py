"""Folders that hold run directories: which these are, and what to say of a folder that is no run itself."""

from __future__ import annotations

from pathlib import Path

from prooflens.errors import RunError


def runs_inside(folder: Path) -> list[Path]:
    """Return the run directories that lie in a folder, by name, as `prooflens effect --each -o` writes them.

    Args:
        folder: any path.
    """
    if not folder.is_dir():
        return []
    return sorted(one for one in folder.iterdir() if (one / "run.json").is_file())


def not_a_run(folder: Path) -> RunError:
    """Return the error about a folder without a `run.json`: it names the runs that lie in it, if there are any.

    Args:
        folder: any path.
    """
    if not folder.exists():
        return RunError(f"{folder} is not a run: there is no such folder")
    inside = runs_inside(folder)
    hint = f"; it holds runs: give one of them, as {inside[0]}" if inside else ""
    return RunError(f"{folder} is not a run: it has no run.json{hint}")
