"""The command `features`: the active features of a dictionary, and on which region they stay active."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prooflens.cli.common import app, print_json, print_table, say
from prooflens.cli.groups import grouped
from prooflens.cli.keep import configuration, make_room, tell_written
from prooflens.cli.options import EffortOptions, Eps, InputOptions, KeepOptions, limit_memory, named_tokens
from prooflens.cli.prove import exit_code, tell_open
from prooflens.errors import QueryError
from prooflens.progress import shown


@app.command()
@grouped
def features(
    given: InputOptions,
    dictionary: Annotated[Path, typer.Option(help="A dictionary, as SAELens keeps it: a folder.")],
    effort: EffortOptions,
    keep: KeepOptions,
    eps: Eps = None,
    position: Annotated[str, typer.Option(help="The token at which it reads: an index or a text.")] = "-1",
    off: Annotated[int, typer.Option(min=0, help="So many of the features that are off, the nearest.")] = 10,
    most: Annotated[
        int | None, typer.Option(min=1, help="At most so many active ones, the nearest to their thresholds.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of the distances to write (SVG).")] = None,
) -> None:
    """Which features of a dictionary are active at a token, and do they stay active on the whole region?

    Exit code: 0 all stay what they are, 1 error, 2 some unknown, 3 some change.
    """
    from prooflens.report import collect
    from prooflens.report.readouts import readout_bars
    from prooflens.verdicts.features import features as ask

    make_room(keep.out)
    (at, *others) = named_tokens(position) or (-1,)
    if others:
        raise QueryError(f"--position {position!r} names several tokens: give one")
    with shown(not keep.as_json) as tell:
        held, prompt = given.load(tell)
        limit_memory(effort.memory)
        place = given.region(eps, held, prompt)
        chosen = effort.options(tell)
        found = ask(held, prompt, dictionary, place, position=at, off=off, most=most, **chosen)
    if keep.out is not None:
        asked = {"dictionary": dictionary, "position": position, "off": off, "most": most, "eps": eps}
        found.save(keep.out, **configuration(given, effort, **asked))
    if keep.as_json:
        print_json(found.to_dict())
    else:
        say(found.line)
        rows = [[row.get(name) for name in found.shown] for row in found.rows]
        print_table(found.shown, rows)
        tell_open(found)
        tell_written(keep)
    if plot is not None:
        plot.write_text(readout_bars(collect(found).readings[0]).svg(alone=True), encoding="utf-8")
        say(f"a picture is in {plot}", error=keep.as_json)
    raise typer.Exit(exit_code(found.counts))
