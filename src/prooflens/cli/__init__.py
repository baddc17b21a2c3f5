"""The command line: parse, call, print. Nothing is computed here, and torch is imported only when needed."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from prooflens.cli import accuracy as _accuracy
from prooflens.cli import checks as _checks
from prooflens.cli import circuit as _circuit
from prooflens.cli import compare as _compare
from prooflens.cli import discover as _discover
from prooflens.cli import effect as _effect
from prooflens.cli import export as _export
from prooflens.cli import family as _family
from prooflens.cli import features as _features
from prooflens.cli import models as _models
from prooflens.cli import output as _output
from prooflens.cli import prove as _prove
from prooflens.cli import prune as _prune
from prooflens.cli import reproduce as _reproduce
from prooflens.cli import runs as _runs
from prooflens.cli import sweep as _sweep
from prooflens.cli import view as _view
from prooflens.cli import vocabulary as _vocabulary
from prooflens.cli import way as _way
from prooflens.cli.common import app, say
from prooflens.errors import ProoflensError
from prooflens.memory import is_shortage
from prooflens.version import __version__

__all__ = ["app", "main"]

del (
    _accuracy,
    _checks,
    _circuit,
    _compare,
    _discover,
    _effect,
    _export,
    _family,
    _features,
    _models,
    _output,
    _prove,
    _prune,
    _reproduce,
    _runs,
    _sweep,
    _view,
    _vocabulary,
    _way,
)  # importing them is what enters their commands


SPINS = "3000"
"""How often a thread of torch looks for work before it sleeps, in the words of GNU OpenMP.

By default it looks 300,000 times, about a millisecond: where other programs want the cores, threads then wait for each
other's turns (`benchmarks/busy.py`).
"""


def main() -> None:
    """Entry point: an error, ours or of the arguments, is one line on stderr and exit code 1, never a traceback."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read once, when torch is imported
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="prooflens", standalone_mode=False))
    except ProoflensError as error:
        message = str(error)
    except Exception as error:
        message = _one_line(error)
    except KeyboardInterrupt:
        say("interrupted", error=True)
        sys.exit(130)
    say(f"error: {message}", error=True)
    sys.exit(1)


def _one_line(error: Exception) -> str:
    """What a user reads of an error that is not ours; with PROOFLENS_DEBUG set the error itself is raised."""
    if hasattr(error, "format_message"):  # what typer raises for arguments that do not parse
        return str(error.format_message())
    if os.environ.get("PROOFLENS_DEBUG"):
        raise error
    if is_shortage(error):
        return "not enough memory: ask about fewer heads, positions or tokens, or give more --memory"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    first = (str(error).strip().splitlines() or [""])[0]
    return (
        f"this should not happen ({type(error).__name__}: {first}); please report it with what "
        "PROOFLENS_DEBUG=1 prints"
    )


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
