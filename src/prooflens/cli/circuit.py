"""The command `circuit`: several heads, and values inside the model, at once."""

from __future__ import annotations

from typing import Annotated

import typer

from prooflens.cli.common import app, say
from prooflens.cli.groups import grouped
from prooflens.cli.keep import configuration, make_room, tell_written
from prooflens.cli.options import (
    Deployed,
    EffortOptions,
    Eps,
    KeepOptions,
    Nearest,
    SlottedOptions,
    VectorFiles,
    limit_memory,
    read_vectors,
)
from prooflens.cli.prove import exit_code, show_rows
from prooflens.progress import shown


@app.command()
@grouped
def circuit(
    given: SlottedOptions,
    circuit: Annotated[
        str, typer.Argument(help="'0.3:top1@-1 & 1.4:top1@-1', heads 0.3,1.4 or a .json file of nodes.")
    ],
    effort: EffortOptions,
    keep: KeepOptions,
    eps: Eps = None,
    query: Annotated[str, typer.Option(help="What the heads of a list are asked.")] = "top1@-1",
    vector: VectorFiles = None,
    nearest: Nearest = None,
    deployed: Deployed = None,
) -> None:
    """Several heads at once: does the circuit hold on the whole region, and which part is the weakest link?"""
    from prooflens.verdicts.certify import Interrupted
    from prooflens.verdicts.circuit import circuit as decide

    make_room(keep.out)
    with shown(True) as tell:
        held, prompt = given.load(tell)
        limit_memory(effort.memory)
        place = given.region(eps, held, prompt)
        words = given.eps_in_words(eps, held, prompt, nearest)
        try:
            found = decide(
                held,
                prompt,
                place,
                circuit,
                query=query,
                vectors=read_vectors(vector),
                deployed=deployed,
                **effort.options(tell),
            )
        except Interrupted as stop:
            show_rows(stop.results, keep, words)
            say(f"interrupted: {len(stop.results)} parts were decided", error=True)
            raise typer.Exit(130) from None
    show_rows(found, keep, words)
    if keep.out is not None:
        asked = configuration(
            given, effort, circuit=circuit, eps=eps, query=query, eps_in_words=words, deployed=deployed
        )
        found.save(keep.out, **asked)
        tell_written(keep)
    raise typer.Exit(exit_code({found.verdict: 1}))
