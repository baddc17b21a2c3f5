"""What all commands share: the application, `--json`, progress on stderr, one JSON document on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

app = typer.Typer(
    name="prooflens",
    help="Prove that an attention mechanism holds on a whole neighbourhood of an input.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Renamed(TyperCommand):
    """A command that still understands earlier names of its options; its help shows the present ones.

    Attributes:
        earlier: present names of options by earlier ones.
    """

    earlier: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, with earlier names replaced up to a `--`."""
        end = args.index("--") if "--" in args else len(args)
        renamed = []
        for word in args[:end]:
            name, equals, value = word.partition("=")
            renamed.append(f"{self.earlier.get(name, name)}{equals}{value}")
        return super().parse_args(ctx, [*renamed, *args[end:]])


def renamed(**earlier: str) -> type[Renamed]:
    """Return a class of commands with earlier names of options.

    Args:
        earlier: present names by earlier ones, without dashes: `engines="engine"`.
    """
    names = {f"--{old}": f"--{new}" for old, new in earlier.items()}
    return type("Renamed", (Renamed,), {"earlier": names})


def print_json(document: dict[str, Any]) -> None:
    """The one document of `--json`."""
    sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """A table on stdout; numbers short, nothing as a dash. In a file it is as wide as it needs to be."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column != columns[-1])
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    console = Console()
    Console(width=None if console.is_terminal else 240).print(table)


def cell(value: object) -> str:
    """A value as tables show it."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def say(text: str, error: bool = False) -> None:
    """A line, as it is, on stdout or stderr."""
    Console(stderr=error).print(text, markup=False, highlight=False, soft_wrap=True)
