"""What all commands share: the application, `--json`, progress on stderr, one JSON document on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    name="prooflens",
    help="Prove that an attention mechanism holds on a whole neighbourhood of an input.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]


@contextmanager
def progress_bar(enabled: bool) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr, as the callback that long jobs take."""
    console = Console(stderr=True)
    if not (enabled and console.is_terminal):
        yield lambda stage, share: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)


def print_json(document: dict[str, Any]) -> None:
    """The one document of `--json`."""
    sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
