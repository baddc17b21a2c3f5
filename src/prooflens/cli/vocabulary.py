"""The command `vocabulary`: heads of layer 0 over every prompt there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prooflens.cli.common import app, print_json, print_table, say
from prooflens.cli.keep import command_line, make_room
from prooflens.cli.options import Device, Json, Model, limit_memory
from prooflens.errors import QueryError
from prooflens.progress import shown


@app.command()
def vocabulary(
    model: Model,
    length: Annotated[int, typer.Option(help="How many tokens prompts have.")],
    heads: Annotated[str | None, typer.Option(help="Heads of layer 0, as in 0.3,0.8 (default: all).")] = None,
    position: Annotated[int, typer.Option(help="The query position; negative ones count from the end.")] = -1,
    claim: Annotated[
        list[str] | None, typer.Option(help="Also count: top1={-1}, spec{5>0}, mass>=0.5@{4}.")
    ] = None,
    same: Annotated[list[str] | None, typer.Option(help="Positions that hold one token, as in 0,5.")] = None,
    choose: Annotated[
        list[str] | None, typer.Option(help="Tokens that a position may hold, as in 2:17,18,19.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Count only so many query tokens, drawn at random (default: all).")
    ] = None,
    pieces: Annotated[
        int | None,
        typer.Option(help="Cut scores into so many pieces instead of sorting: faster, wider ends."),
    ] = None,
    duplicates: Annotated[
        bool,
        typer.Option(
            "--duplicates", help="Instead: tokens whose earlier copy beats every other token anywhere."
        ),
    ] = False,
    copies: Annotated[
        bool, typer.Option("--copies", help="Instead: tokens that the OV circuit of a head copies.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the drawn query tokens.")] = 0,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run directory (or .json file) to write.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A folder for the picture (SVG).")] = None,
    as_json: Json = False,
) -> None:
    """Count over all prompts of a length which key heads of layer 0 attend most: proved lower and upper counts."""
    from prooflens.report.vocabulary import draw_profiles
    from prooflens.report.written import write_drawings
    from prooflens.verdicts.vocabulary import profile

    limit_memory(None)
    if out is not None and out.suffix != ".json":
        make_room(out)
    if duplicates or copies:
        _print_statements(model, heads, length, position, tokens, seed, device, duplicates, as_json)
        return
    with shown(not as_json) as tell:
        found = profile(
            model,
            heads,
            length=length,
            position=position,
            claims=claim or (),
            same=[_numbers(group, "--same") for group in same or []],
            choices=dict(_choice(text) for text in choose or []),
            tokens=tokens,
            pieces=pieces,
            seed=seed,
            device=device,
            progress=tell,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        rows = [
            (
                profile.head,
                count.claim,
                *(f"{100 * float(share):.6f} %" for share in count.shares),
                count.prompts,
            )
            for profile in found
            for count in (*profile.top, *profile.claims)
        ]
        print_table(("head", "claim", "at least", "at most", "of prompts"), rows)
    if out is not None:
        found.save(out, command=command_line())
        say(f"counts in {out}", error=as_json)
    if plot is not None:
        made = write_drawings([("vocabulary", draw_profiles(found))], plot)
        say(f"{len(made)} files in {plot}", error=as_json)


def _print_statements(
    model: str,
    heads: str | None,
    length: int,
    position: int,
    tokens: int | None,
    seed: int,
    device: str | None,
    duplicates: bool,
    as_json: bool,
) -> None:
    """Print what the weights of heads say about every token."""
    from prooflens.verdicts.vocabulary import statements

    found = statements(model, heads, length, position, tokens, seed, device, duplicates)
    what = "duplicates" if duplicates else "copies"
    if as_json:
        rows = [
            {
                "head": head,
                "statement": what,
                "tokens": len(one.tokens),
                "holds": list(one.holds),
                "fails": len(one.fails),
                "unknown": one.unknown,
            }
            for head, one in found.items()
        ]
        print_json({"rows": rows})
        return
    print_table(
        ("head", "statement", "proved for", "refuted for", "open", "of tokens"),
        [
            (head, what, len(one.holds), len(one.fails), one.unknown, len(one.tokens))
            for head, one in found.items()
        ],
    )


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise QueryError(f"{option} {text!r}: write whole numbers with commas, as in 0,5") from error


def _choice(text: str) -> tuple[int, list[int]]:
    position, colon, tokens = text.partition(":")
    if not colon:
        raise QueryError(f"--choose {text!r}: write a position, a colon and token ids, as in 2:17,18")
    return _numbers(position, "--choose")[0], _numbers(tokens, "--choose")
