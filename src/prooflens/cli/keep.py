"""How commands keep what they find: room for a run directory, and what `run.json` says was asked for."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prooflens.cli.common import say
from prooflens.cli.options import KeepOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def make_room(path: Path | None) -> None:
    """Before any work: an error where a run could not be written to this folder after it."""
    from prooflens.certificate.store import RunWriter

    if path is not None:
        RunWriter.check_room(path)


def tell_written(keep: KeepOptions) -> None:
    """Where the run is, unless nothing but a document was asked for."""
    if keep.out is not None and not keep.as_json:
        say(f"written to {keep.out}")


def configuration(*groups: DataclassInstance, **others: object) -> dict[str, Any]:
    """The options as `run.json` keeps them, with the command that was given.

    Args:
        groups: groups of options.
        others: options that are in no group.
    """
    kept: dict[str, Any] = {name: value for group in groups for name, value in asdict(group).items()}
    named = {**kept, **others, "command": command_line()}
    return {name: str(value) if isinstance(value, Path) else value for name, value in named.items()}


def command_line(instead: Mapping[str, str] | None = None, without: str = "") -> str:
    """The command as it was given.

    Args:
        instead: options to give other values, or to add.
        without: a flag to leave out.
    """
    instead = instead or {}
    words: list[str] = []
    skip = False
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        changed = name.removeprefix("--") in instead and name.startswith("--")
        if not (skip or changed or word == without):
            words.append(word)
        skip = changed and not value
    added = [part for name, value in instead.items() for part in (f"--{name}", value)]
    return shlex.join(["prooflens", *words, *added])
