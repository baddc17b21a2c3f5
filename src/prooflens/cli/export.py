"""`prooflens export`: a model in prooflens' own layout, for the checker and for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prooflens.cli.common import app, print_json, say
from prooflens.cli.options import Json, Model
from prooflens.progress import shown


@app.command()
def export(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.")],
    as_json: Json = False,
) -> None:
    """Write a model with canonical names in float64: what `prooflens check --weights` reads for every family."""
    from prooflens.models import load
    from prooflens.models.export import export as write

    with shown(True) as tell:
        held = load(model, tell)
    folder = write(held, out)
    if as_json:
        print_json({"folder": str(folder), "sha256": held.sha256})
    else:
        say(f"written to {folder}, sha256 {held.sha256}")
