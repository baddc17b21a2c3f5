"""`prooflens output`: is what the model says the same on a whole ball?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.cli.common import Json, app, print_json, print_table, say
from prooflens.cli.keep import configuration, make_room, tell_written
from prooflens.cli.options import (
    Device,
    Effort,
    EngineName,
    Memory,
    Model,
    Out,
    Sample,
    Seed,
    TextOption,
    Tokens,
    capped,
    input_of,
    moving_tokens,
)
from prooflens.cli.prove import exit_code, show_radii
from prooflens.errors import RegionError
from prooflens.progress import Progress, shown

if TYPE_CHECKING:
    from prooflens.output import OutputResults
    from prooflens.results import Radii

SHOWN = ("candidate", "text", "verdict", "clean", "lower", "upper", "engine")


@app.command()
def output(
    model: Model,
    eps: Annotated[
        float | None, typer.Option(help="Radius of the ball around the embeddings (not with --radius).")
    ] = None,
    text: TextOption = None,
    sample: Sample = None,
    tokens: Tokens = None,
    layers: Annotated[
        int | None, typer.Option(help="Cut the model after so many blocks; final norm and head follow there.")
    ] = None,
    top: Annotated[int | None, typer.Option(help="Candidates with a row of their own (default: 20).")] = None,
    radius: Annotated[
        bool, typer.Option("--radius", help="Search the largest proved and the smallest broken ε.")
    ] = False,
    tolerance: Annotated[float, typer.Option(help="Step of the grid of radii, relatively.")] = 0.1,
    engine: EngineName = "auto",
    device: Device = None,
    memory: Memory = None,
    seed: Seed = 0,
    budget: Effort = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Prove that the model's answer (class, or next token over its whole vocabulary) is the same on a ball.

    Exit code: 0 it holds, 1 error, 2 unknown or only estimated, 3 it fails.
    """
    options = dict(locals())
    if radius == (eps is not None):
        raise RegionError("give the radius of the ball with --eps, or --radius to search it")
    if radius:
        _radius(options)
    else:
        make_room(out)
        _verdict(options)


def _shared(options: dict[str, Any], tell: Any) -> dict[str, Any]:
    return {name: options[name] for name in ("layers", "top", "engine", "device", "seed", "budget")} | {
        "memory": capped(options["memory"]),
        "progress": tell,
    }


def _verdict(options: dict[str, Any]) -> None:
    from prooflens.output import output as settle
    from prooflens.regions import Ball

    with shown(not options["as_json"]) as tell:
        held, prompt = input_of(options, tell)
        ball = Ball(options["eps"], moving_tokens(options["tokens"], prompt))
        found: OutputResults = settle(held, prompt, ball, **_shared(options, tell))
    if options["as_json"]:
        print_json(found.to_dict())
    else:
        print_table(SHOWN, ([row[name] for name in SHOWN] for row in found.rows))
        say(f"{found.whole.text!r} {found.whole.verdict}: {found.whole.reason}")
    if options["out"] is not None:
        found.save(options["out"], **configuration(options))
        tell_written(options)
    raise typer.Exit(exit_code({found.whole.verdict.value: 1}))


def _radius(options: dict[str, Any]) -> None:
    from prooflens.output import output_radius

    def look(tell: Progress) -> Radii:
        held, prompt = input_of(options, tell)
        return output_radius(
            held,
            prompt,
            tokens=moving_tokens(options["tokens"], prompt),
            tolerance=options["tolerance"],
            **_shared(options, tell),
        )

    show_radii(look, options)
