"""The command that tries prooflens itself: soundness."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prooflens.cli.common import Json, app, print_json
from prooflens.progress import shown


@app.command()
def soundness(
    cases: Annotated[int, typer.Option(help="How many random cases.")] = 200,
    hours: Annotated[float, typer.Option(help="Stop after this many hours.")] = 24.0,
    seed: Annotated[int, typer.Option(help="Number of the first case.")] = 0,
    engine: Annotated[
        list[str] | None, typer.Option(help="Only these engines (default: all that prove).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Random models, regions and queries: attack every proved bound. Exit code 3 if one is broken."""
    from prooflens.soundness import run

    with shown(not as_json) as report:
        found = run(cases, seed, engine, seconds=3600.0 * hours, progress=report)
    if as_json:
        print_json(found.to_dict())
    else:
        console = Console()
        table = Table("family", "engine", "query", "bounds attacked")
        for (family, name, query), count in sorted(found.attacked.items()):
            table.add_row(family, name, Text(query), str(count))
        console.print(table)
        for violation in found.violations:
            console.print(Text(f"VIOLATION {violation}"))
        console.print(
            f"{found.cases} cases, {found.bounds} proved bounds and {found.proved} proved claims attacked, "
            f"{len(found.violations)} broken, {found.seconds:.0f} s",
            highlight=False,
        )
    if found.violations:
        raise typer.Exit(3)
