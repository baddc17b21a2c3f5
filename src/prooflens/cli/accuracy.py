"""The command `accuracy`: small attention-only models over all inputs of a task."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from prooflens.cli.common import app, print_json, say
from prooflens.cli.options import Json, Model


@app.command()
def accuracy(
    model: Model,
    task: Annotated[str, typer.Option(help="max-of-4 or induction-2l.")],
    proof: Annotated[
        bool, typer.Option("--proof", help="Prove it by cells of inputs instead of running every input.")
    ] = False,
    as_json: Json = False,
) -> None:
    """On how many of all inputs of a task a model answers rightly: enumerated, or proved without enumeration."""
    from prooflens.verdicts.accuracy import accuracy as find

    found = find(model, task, proof)
    if as_json:
        print_json(asdict(found) | {"share": float(found.share)})
        return
    ends = f"{found.right:,}" if found.right == found.most else f"{found.right:,} to {found.most:,}"
    say(
        f"{found.word}: right on {ends} of {found.inputs:,} inputs ({100 * float(found.share):.5f} %), "
        f"{found.cells:,} cells, {found.seconds:.1f} s"
    )
