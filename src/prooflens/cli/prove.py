"""Commands that prove and break: certify, radius, circuit, attack."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prooflens.cli.common import Json, app, print_json, print_table, say
from prooflens.cli.keep import Keeper, configuration, make_room, tell_written
from prooflens.cli.options import (
    Device,
    Effort,
    EngineName,
    Eps,
    Heads,
    Layer,
    Memory,
    Model,
    Out,
    Positions,
    Queries,
    Resume,
    Sample,
    Seed,
    TextOption,
    Tokens,
    capped,
    input_of,
    moving_tokens,
    named_tokens,
    question_of,
    settings_of,
)
from prooflens.progress import Progress, shown

if TYPE_CHECKING:
    from prooflens.frames import Frame
    from prooflens.results import Radii, Results

FEW = 40
"""So many rows are listed; of more, the counts per layer and query are."""


@app.command()
def certify(
    model: Model,
    eps: Eps,
    text: TextOption = None,
    sample: Sample = None,
    layer: Layer = None,
    heads: Heads = None,
    tokens: Tokens = None,
    positions: Positions = None,
    query: Queries = None,
    engine: EngineName = "auto",
    device: Device = None,
    memory: Memory = None,
    seed: Seed = 0,
    budget: Effort = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Prove that attention holds on a whole ball around a prompt, head by head, or find what breaks it.

    Exit code: 0 all hold, 1 error, 2 some unknown or only estimated, 3 some fail.
    """
    options = dict(locals())
    _verdicts(options, engine)


@app.command()
def attack(
    model: Model,
    eps: Eps,
    text: TextOption = None,
    sample: Sample = None,
    layer: Layer = None,
    heads: Heads = None,
    tokens: Tokens = None,
    positions: Positions = None,
    query: Queries = None,
    device: Device = None,
    seed: Seed = 0,
    budget: Effort = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Only try to break claims: witnesses where it succeeds, `unknown` elsewhere. Nothing is proved."""
    options = dict(locals()) | {"memory": None}
    _verdicts(options, "attack")


def _verdicts(options: dict[str, Any], engine: str) -> None:
    from prooflens.certify import Interrupted, certify_question

    settings = settings_of(options, engine)
    with shown(not options["as_json"]) as tell:
        question = question_of(options, tell)
        keeper = Keeper(options, question.subject)
        question = keeper.remaining(question)
        capped(options["memory"])
        try:
            results = certify_question(question, settings, tell, keeper.keep if options["out"] else None)
        except Interrupted as stop:
            keeper.keep(stop.results)
            say(f"interrupted: {len(stop.results)} of {len(question.claims)} claims were decided", error=True)
            say(keeper.advice(), error=True)
            raise typer.Exit(130) from None
    _finish(keeper.finish(results), options)


@app.command()
def radius(
    model: Model,
    text: TextOption = None,
    sample: Sample = None,
    layer: Layer = None,
    heads: Heads = None,
    tokens: Tokens = None,
    per_token: Annotated[bool, typer.Option("--per-token", help="Move one token at a time.")] = False,
    positions: Positions = None,
    query: Queries = None,
    tolerance: Annotated[float, typer.Option(help="Step of the grid of radii, relatively.")] = 0.1,
    engine: EngineName = "auto",
    device: Device = None,
    memory: Memory = None,
    seed: Seed = 0,
    budget: Effort = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """The largest ε that is proved and the smallest that is broken, per head × position × query."""
    options = dict(locals())
    from prooflens.radius import radius as search

    def look(tell: Progress) -> Radii:
        held, prompt = input_of(options, tell)
        return search(
            held,
            prompt,
            query or ["top1"],
            heads,
            layer=layer,
            tokens=moving_tokens(tokens, prompt),
            per_token=per_token,
            engine=engine,
            tolerance=tolerance,
            memory=capped(memory),
            device=device,
            progress=tell,
            seed=seed,
            budget=budget,
            positions=named_tokens(positions),
        )

    show_radii(look, options)


def show_radii(look: Callable[[Progress], Radii], options: dict[str, Any]) -> None:
    """Search radii, print them, and keep them where that was asked for; after Ctrl-C those so far."""
    from prooflens.certificate.record import save_frame
    from prooflens.radius import SearchInterrupted

    out, complete = options["out"], True
    make_room(out)
    try:
        with shown(not options["as_json"]) as tell:
            found = look(tell)
    except SearchInterrupted as stop:
        found, complete = stop.radii, False
    if options["as_json"]:
        print_json(found.to_dict())
    else:
        _list(found)
    if out is not None:  # last: what was found is seen even where it cannot be written
        save_frame(found, out, configuration(options), "radii", complete)
        tell_written(options)
    if not complete:
        again = "give the command again" + (", with another folder" if out is not None else "")
        say(f"interrupted: these radii are sound, but the search was not at its end; {again}", error=True)
        raise typer.Exit(130)


@app.command()
def circuit(
    model: Model,
    circuit: Annotated[
        str, typer.Argument(help="'0.3:top1@-1 & 1.4:top1@-1', heads 0.3,1.4 or a .json file of nodes.")
    ],
    eps: Eps,
    text: TextOption = None,
    sample: Sample = None,
    tokens: Tokens = None,
    query: Annotated[str, typer.Option(help="What the heads of a list are asked.")] = "top1@-1",
    engine: EngineName = "auto",
    device: Device = None,
    memory: Memory = None,
    seed: Seed = 0,
    budget: Effort = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Several heads at once: does the circuit hold on the whole ball, and which part is the weakest link?"""
    options = dict(locals())
    from prooflens.circuits import circuit as settle
    from prooflens.regions import Ball

    make_room(out)
    with shown(not as_json) as tell:
        held, prompt = input_of(options, tell)
        found = settle(
            held,
            prompt,
            Ball(eps, moving_tokens(tokens, prompt)),
            circuit,
            query=query,
            engine=engine,
            memory=capped(memory),
            device=device,
            progress=tell,
            seed=seed,
            budget=budget,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        _list(found)
    if out is not None:
        found.save(out, **configuration(options))
        tell_written(options)
    raise typer.Exit(exit_code({found.verdict: 1}))


def _finish(results: Results, options: dict[str, Any]) -> None:
    if options["as_json"]:
        print_json(results.to_dict())
    else:
        _list(results)
    tell_written(options)
    raise typer.Exit(exit_code(results.counts))


def exit_code(counts: dict[Any, int]) -> int:
    """0 all hold, 2 some are unknown or only estimated, 3 some fail."""
    if counts.get("fails"):
        return 3
    return 2 if counts.get("unknown") or counts.get("estimated") else 0


def _list(frame: Frame) -> None:
    """The rows, or counts of them if they are many, and a line that sums up."""
    names = [name for name in frame.shown if name not in ("layer", "head", "position", "reason")]
    if len(frame) <= FEW:
        rows = frame.table.to_pylist()
        print_table(("row", *names), ((_address(row), *(row[name] for name in names)) for row in rows))
    elif "verdict" in names:
        keys = ["layer", "query", "verdict"]
        counted = frame.table.group_by(keys).aggregate([([], "count_all")])
        ordered = counted.sort_by([(key, "ascending") for key in keys]).select([*keys, "count_all"])
        print_table((*keys, "rows"), (row.values() for row in ordered.to_pylist()))
    say(frame.line)


def _address(row: dict[str, Any]) -> str:
    if row["layer"] is not None:
        return f"{row['layer']}.{row['head']}@{row['position']}"
    return "output" if row["query"].startswith(("argmax", "logit")) else "all parts"
