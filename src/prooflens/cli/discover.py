"""The command `discover`: a circuit that is proved faithful on a region, or on every prompt of a family."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prooflens.cli.common import app, print_json, say
from prooflens.cli.effect import MetricOptions, check_family
from prooflens.cli.family import TemplateOptions
from prooflens.cli.groups import grouped
from prooflens.cli.keep import configuration, make_room, tell_written
from prooflens.cli.options import EffortOptions, Eps, InputOptions, KeepOptions, limit_memory
from prooflens.cli.prove import exit_code
from prooflens.progress import shown

if TYPE_CHECKING:
    from prooflens.models import Transformer
    from prooflens.results.discovery import Discovery


@app.command()
@grouped
def discover(
    given: InputOptions,
    prompts: TemplateOptions,
    effort: EffortOptions,
    keep: KeepOptions,
    measured: MetricOptions,
    faithful: Annotated[float, typer.Option(help="How far the circuit's metric may be from the model's.")],
    eps: Eps = None,
    parts: Annotated[
        str | None,
        typer.Option(help="Parts that may be taken out: a9.h6,m3 (default: all heads and networks)."),
    ] = None,
    circuit: Annotated[
        Path | None, typer.Option(help="Judge this circuit (JSON of nodes) instead of searching for one.")
    ] = None,
    everywhere: Annotated[
        bool,
        typer.Option("--everywhere", help="Try to prove of every part that it is needed at every point."),
    ] = False,
) -> None:
    """Find a circuit: take parts out one by one, as long as the rest is proved to be within ± --faithful of the model.

    -o writes a folder: circuit.json, the run `certificate`, and a run for each part of the circuit that shows why it is
    needed. Exit code: 0 the circuit is faithful and every part is needed, 1 error, 2 something is open, 3 a given
    circuit is broken, or a part of it superfluous.
    """
    make_room(keep.out)
    family = prompts.given()
    chosen = None if parts is None else [name.strip() for name in parts.split(",")]
    with shown(not keep.as_json) as tell:
        if family is None:
            from prooflens.verdicts.discover import discover as find

            held, prompt = given.load(tell)
            limit_memory(effort.memory)
            place = given.region(eps, held, prompt)
            found: Discovery = find(
                held,
                prompt,
                place,
                measured.metric,
                faithful,
                parts=chosen,
                circuit=_kept(circuit, held, chosen),
                everywhere=everywhere,
                vectors=measured.vectors,
                **effort.options(tell),
            )
        else:
            from prooflens.enumeration import family_discover
            from prooflens.models import load

            check_family(given, eps, measured)
            held = load(given.model, tell)
            found = family_discover(
                held,
                family,
                measured.metric,
                faithful,
                parts=chosen,
                circuit=_kept(circuit, held, chosen),
                memory=effort.memory,
                device=effort.device,
                progress=tell,
            )
    if keep.as_json:
        print_json(found.to_dict())
    else:
        say(str(found))
    if keep.out is not None:
        asked = configuration(
            given,
            prompts,
            effort,
            measured,
            faithful=faithful,
            parts=parts,
            circuit=circuit,
            eps=eps,
            everywhere=everywhere,
        )
        found.save(keep.out, **asked)
        tell_written(keep)
    raise typer.Exit(exit_code(Counter(found.verdicts)))


def _kept(path: Path | None, model: Transformer, parts: list[str] | None) -> list[str] | None:
    """The parts that a circuit in a file leaves in the model; None without a file."""
    if path is None:
        return None
    from prooflens.models.edits import places_of
    from prooflens.verdicts.circuit_files import outside, read_json

    gone = outside(read_json(path), model.architecture)
    return [name for name in parts or places_of(model.architecture) if name not in gone]
