"""Commands that read runs: query."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from prooflens.cli.common import app, print_json, print_table
from prooflens.cli.options import Json


@app.command()
def query(
    run: Annotated[Path, typer.Argument(help="A run directory, as `certify -o` or `sweep -o` writes it.")],
    sql: Annotated[str, typer.Argument(help="DuckDB SQL over the table `rows`.")],
    as_json: Json = False,
) -> None:
    """Ask a run anything: DuckDB over its rows, as in "select layer, verdict, count(*) from rows group by all"."""
    from prooflens.certificate.store import query_rows

    if (run / "sweep.json").is_file():
        from prooflens.sweep.store import SweepStore

        found = SweepStore.open(run).query(sql)
    else:
        found = query_rows(run, sql)
    if as_json:
        rows = [{name: _plain(value) for name, value in row.items()} for row in found.to_pylist()]
        print_json({"columns": found.column_names, "rows": rows})
    else:
        print_table(found.column_names, (row.values() for row in found.to_pylist()))


def _plain(value: object) -> object:
    """A value that JSON has: numbers that are not finite are null, dates and the like are texts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return value if value is None or isinstance(value, str | int) else str(value)
