"""The command `way`: how far along the way to another prompt claims are proved, and where they break first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prooflens.cli.common import app, print_json, print_table, say
from prooflens.cli.groups import grouped
from prooflens.cli.options import (
    QUERY_HELP,
    ClaimOptions,
    Device,
    Json,
    Memory,
    SlottedOptions,
    limit_memory,
    named_tokens,
)
from prooflens.errors import RegionError
from prooflens.progress import shown


@app.command(epilog=QUERY_HELP)
@grouped
def way(
    given: SlottedOptions,
    claims: ClaimOptions,
    device: Device = None,
    memory: Memory = None,
    resolution: Annotated[
        float, typer.Option(help="Broken pieces are cut down to this share of the way.")
    ] = 1 / 64,
    time: Annotated[
        str | None, typer.Option(help="Time that all of it may take: 60s, 2m (default: as long as it takes).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A folder for a picture of every claim (SVG).")] = None,
    as_json: Json = False,
) -> None:
    """How far along the way to another prompt (--to) claims are proved, and where they break first.

    With --from-layer and --steer it is the way from the least strength of a steering vector to the largest.

    Exit code: 0 all hold on the whole way, 1 error, 2 some unknown, 3 some fail.
    """
    from prooflens.regions import Steer
    from prooflens.report.ways import way_picture
    from prooflens.report.written import slug, write_drawings
    from prooflens.verdicts.way import way as walk

    steered = given.steer is not None
    if (given.to is None and not steered) or given.hull is not None or (given.tokens and not steered):
        raise RegionError(
            "a way goes from --text to another prompt: give it with --to, and neither --hull nor --tokens"
        )
    with shown(not as_json) as tell:
        held, prompt = given.load(tell)
        place = given.region(None, held, prompt)
        limit_memory(memory)
        first, last = place.ends() if isinstance(place, Steer) else (prompt, given.other(held, str(given.to)))
        found = walk(
            held,
            first,
            last,
            claims.queries,
            claims.heads,
            layer=claims.layer,
            positions=named_tokens(claims.positions),
            resolution=resolution,
            vectors=claims.vectors,
            memory=memory,
            time=time,
            device=device,
            progress=tell,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        rows = [
            (
                str(row.claim),
                row.verdict,
                f"{100 * row.proved:.4g} %",
                "" if row.breaks is None else f"{100 * row.breaks:.4g} %",
                len(row.pieces),
                " ".join(f"{position}:{token!r}" for position, token in row.nearest),
            )
            for row in found
        ]
        print_table(("claim", "verdict", "proved to", "breaks at", "pieces", "nearest tokens there"), rows)
        if found.advice is not None:
            say(found.advice)
    if plot is not None:
        made = write_drawings(((f"way-{slug(str(row.claim))}", way_picture(row)) for row in found), plot)
        say(f"{len(made)} files in {plot}", error=as_json)
    words = [row.verdict for row in found]
    raise typer.Exit(3 if "fails" in words else 2 if "unknown" in words else 0)
