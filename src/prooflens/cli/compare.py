"""The command `compare`: engines side by side, as a table, JSON, CSV, LaTeX and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prooflens.cli.common import app, print_json, print_table, renamed, say
from prooflens.cli.groups import grouped
from prooflens.cli.options import (
    QUERY_HELP,
    AttackEffort,
    ClaimOptions,
    Device,
    Eps,
    InputOptions,
    Json,
    Memory,
    Seed,
)
from prooflens.progress import shown


@app.command(cls=renamed(engines="engine"), epilog=QUERY_HELP)
@grouped
def compare(
    given: InputOptions,
    claims: ClaimOptions,
    eps: Eps = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Engines, as in interval,crown,cpz (may be repeated; default: all that fit)."),
    ] = None,
    device: Device = None,
    memory: Memory = None,
    seed: Seed = 0,
    budget: AttackEffort = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table as CSV.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the table as LaTeX (booktabs).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw tightness against time (SVG).")] = None,
    as_json: Json = False,
) -> None:
    """Engines side by side on the same claims: what each proves, how tight, at what cost, what an attack crosses."""
    from prooflens.evaluation.compare import compare as ask_all
    from prooflens.verdicts.settings import Settings

    named = [name.strip() for given_ in engine or [] for name in given_.split(",") if name.strip()]
    for name in named:
        Settings.of(name)  # a name that there is not is an error before the work
    with shown(True) as tell:
        settings = Settings.of("auto", memory, device, tell, seed, budget)
        found = ask_all(claims.ask(given, eps, device, tell), named or None, settings)
    written = []
    for path, made in (
        (csv, found.csv),
        (latex, found.latex),
        (plot, lambda: _drawn(found.rows, given.model)),
    ):
        if path is not None:
            path.write_text(made(), encoding="utf-8")
            written.append(str(path))
    if as_json:
        print_json(found.to_dict())
        return
    print_table(found.columns, found.cells)
    if written:
        say(f"written to {', '.join(written)}")


def _drawn(rows: list[dict[str, object]], model: str) -> str:
    from prooflens.report.comparison import tightness_plot

    return tightness_plot(rows, f"tightness against time on {model}")
