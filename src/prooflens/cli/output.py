"""`prooflens output`: is what the model says the same on a whole ball?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from prooflens.cli.common import app, print_json, print_table, renamed, say
from prooflens.cli.groups import grouped
from prooflens.cli.keep import configuration, make_room, tell_written
from prooflens.cli.options import (
    Deployed,
    EffortOptions,
    InputOptions,
    KeepOptions,
    Nearest,
    Tolerance,
    limit_memory,
    loaded,
)
from prooflens.cli.prove import document, exit_code, show_radii, tell_open, tell_precision
from prooflens.errors import RegionError
from prooflens.progress import Progress, shown

if TYPE_CHECKING:
    from prooflens.results import Radii
    from prooflens.results.outputs import OutputResults

SHOWN = ("candidate", "text", "verdict", "clean", "lower", "upper", "unit", "engine")


@app.command(cls=renamed(layers="cut"))
@grouped
def output(
    given: InputOptions,
    effort: EffortOptions,
    keep: KeepOptions,
    eps: Annotated[
        float | None, typer.Option(help="Radius of the ball around the embeddings (not with --radius).")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--cut", help="Cut the model after so many blocks; final norm and head follow there."),
    ] = None,
    top: Annotated[int | None, typer.Option(help="Candidates with a row of their own (default: 20).")] = None,
    radius: Annotated[
        bool, typer.Option("--radius", help="Search the largest proved and the smallest broken ε.")
    ] = False,
    tolerance: Tolerance = 0.1,
    nearest: Nearest = None,
    deployed: Deployed = None,
) -> None:
    """Prove that the model's answer (class, or next token over its whole vocabulary) is the same on a region.

    Exit code: 0 it holds, 1 error, 2 unknown or only estimated, 3 it fails.
    """
    from prooflens.verdicts.output import output as decide
    from prooflens.verdicts.output import output_radius

    with shown(True) as tell:
        held = loaded(given.model, None, tell)
    held.check_head()
    placed = eps is not None or given.to is not None or given.hull is not None
    if radius == placed:
        raise RegionError(
            "give a region (--eps, --to or --hull), or --radius to search the ball: one of them"
        )
    if radius and deployed is not None:
        raise RegionError("--deployed measures margins on a region: give one (--eps, --to or --hull)")
    asked = configuration(
        given, effort, eps=eps, layers=layers, top=top, radius=radius, tolerance=tolerance, deployed=deployed
    )

    def look(tell: Progress) -> Radii:
        model, prompt = given.load(tell, held)
        limit_memory(effort.memory)
        return output_radius(
            model,
            prompt,
            layers=layers,
            top=top,
            tokens=given.moving(prompt),
            tolerance=tolerance,
            nearest=nearest,
            **effort.options(tell),
        )

    if radius:
        show_radii(look, keep, asked)
        return
    make_room(keep.out)
    with shown(True) as tell:
        held, prompt = given.load(tell, held)
        limit_memory(effort.memory)
        words = given.eps_in_words(eps, held, prompt, nearest)
        found = decide(
            held,
            prompt,
            given.region(eps, held, prompt),
            layers=layers,
            top=top,
            deployed=deployed,
            **effort.options(tell),
        )
    _show(found, keep, words)
    if keep.out is not None:
        found.save(keep.out, **asked, eps_in_words=words)
        tell_written(keep)
    raise typer.Exit(exit_code({found.whole.verdict.value: 1}))


def _show(found: OutputResults, keep: KeepOptions, words: str | None) -> None:
    if keep.as_json:
        print_json(document(found, words))
    else:
        rows = [row | {"text": visible(row["text"])} for row in found.rows]
        print_table(SHOWN, ([row[name] for name in SHOWN] for row in rows))
        say(f"{found.whole.text!r} {found.whole.verdict}: {found.whole.reason}")
        tell_precision(found)
        tell_open(found.whole)
        if words is not None:
            say(words)


def visible(text: str | None) -> str | None:
    """Return a token's text; in quotes where it would be blank, or break the line.

    Args:
        text: the text; None for none.

    Example:
        >>> visible(" Paris"), visible("\\n")
        (' Paris', "'\\\\n'")
    """
    return text if text is None or (text.strip() and text.isprintable()) else repr(text)
