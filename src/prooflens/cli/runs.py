"""Commands that read runs: query."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prooflens.cli.common import Json, app, print_json, print_table


@app.command()
def query(
    run: Annotated[Path, typer.Argument(help="A run directory, as `certify -o` writes it.")],
    sql: Annotated[str, typer.Argument(help="DuckDB SQL over the table `rows`.")],
    as_json: Json = False,
) -> None:
    """Ask a run anything: DuckDB over its rows, as in "select layer, verdict, count(*) from rows group by all"."""
    from prooflens.certificate.store import query_rows

    found = query_rows(run, sql)
    if as_json:
        print_json({"columns": found.column_names, "rows": found.to_pylist()})
    else:
        print_table(found.column_names, (row.values() for row in found.to_pylist()))
