"""The command line: parse, call, print. Nothing is computed here, and torch is imported only when needed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from prooflens import __version__
from prooflens.cli import checks as _checks
from prooflens.cli import models as _models
from prooflens.cli.common import app
from prooflens.errors import ProoflensError

__all__ = ["app", "main"]

del _checks, _models  # importing them is what enters their commands


def main() -> None:
    """Entry point: an error of ours is one line on stderr and exit code 1, never a traceback."""
    try:
        app()
    except ProoflensError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"prooflens {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version
