"""The command `effect`: what taking parts out of a model does to a metric on a whole region."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prooflens.cli.common import app, print_json, say
from prooflens.cli.groups import grouped
from prooflens.cli.keep import configuration, make_room, tell_written
from prooflens.cli.options import ClaimOptions, EffortOptions, Eps, InputOptions, KeepOptions, limit_memory
from prooflens.cli.prove import exit_code
from prooflens.errors import QueryError
from prooflens.progress import shown

if TYPE_CHECKING:
    from prooflens.models import Transformer


@app.command()
@grouped
def effect(
    given: InputOptions,
    effort: EffortOptions,
    keep: KeepOptions,
    metric: Annotated[str, typer.Option(help='"logit{ Mary}-logit{ John}", logit3, "neuron 5.12@-1".')],
    eps: Eps = None,
    without: Annotated[
        str | None, typer.Option(help="Parts that are taken out: a9.h6,m3 (heads, networks, a9, m3.n12).")
    ] = None,
    circuit: Annotated[
        Path | None, typer.Option(help="Keep only this circuit (JSON of nodes): all else is taken out.")
    ] = None,
    necessary: Annotated[
        float | None, typer.Option(help="Claim that the effect is at least this everywhere.")
    ] = None,
    faithful: Annotated[
        float | None, typer.Option(help="Claim that the effect is within ± this everywhere.")
    ] = None,
    sufficient: Annotated[
        bool, typer.Option("--sufficient", help="Claim that both models give the same answer everywhere.")
    ] = False,
    vector: Annotated[
        list[str] | None,
        typer.Option(
            "--vector", metavar="NAME=PATH", help="A direction or dictionary that the metric names."
        ),
    ] = None,
) -> None:
    """What taking parts out of a model does to a metric, proved on a whole region.

    Exit code: 0 all claims hold, 1 error, 2 some unknown, 3 some fail.
    """
    from prooflens.verdicts.effect import effect as bound

    make_room(keep.out)
    with shown(not keep.as_json) as tell:
        held, prompt = given.load(tell)
        limit_memory(effort.memory)
        found = bound(
            held,
            _parts(held, without, circuit),
            prompt,
            given.region(eps, held, prompt),
            metric,
            necessary=necessary,
            faithful=faithful,
            sufficient=sufficient,
            vectors=ClaimOptions(vector=vector).vectors,
            **effort.options(tell),
        )
    if keep.as_json:
        print_json(found.to_dict())
    else:
        say(str(found))
    if keep.out is not None:
        asked = configuration(given, effort, eps=eps, metric=metric, without=without, circuit=circuit)
        found.save(keep.out, **asked)
        tell_written(keep)
    raise typer.Exit(exit_code(Counter(row.verdict for row in found.claims)))


def _parts(model: Transformer, without: str | None, circuit: Path | None) -> list[str]:
    """The parts that are taken out: those that are named, or all that are not in a circuit."""
    from prooflens.verdicts.circuit_files import outside, read_json

    if (without is None) == (circuit is None):
        raise QueryError("give --without a9.h6,m3 or --circuit FILE.json, one of them")
    if circuit is not None:
        return outside(read_json(circuit), model.architecture)
    return [name.strip() for name in str(without).split(",")]
