"""Find a circuit that is faithful on every prompt of a family: the search of `verdicts.discover`, all members run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from prooflens.enumeration.effects import family_effects
from prooflens.enumeration.enumerate import bound_family
from prooflens.families import Given
from prooflens.models import Transformer, load
from prooflens.progress import Show, shown
from prooflens.results.discovery import Discovery
from prooflens.results.effects import FamilyEffects
from prooflens.verdicts.discover import Held, check_circuit, chosen_parts, circuit_of, taken_out
from prooflens.verdicts.effect import check_thresholds
from prooflens.verdicts.settings import checked_device


def family_discover(
    model: Transformer | str,
    prompts: Given,
    metric: str,
    faithful: float,
    *,
    parts: Sequence[str] | None = None,
    circuit: Sequence[str] | None = None,
    edits: Held | None = None,
    batch: int | None = None,
    memory: int | str | None = None,
    device: str | None = None,
    progress: Show = False,
) -> Discovery:
    """Find a circuit whose metric stays within ±δ of the model's on every prompt of a family, each run in float64.

    Args:
        model: a model, or what `load` takes.
        prompts: a `Template`, `Swaps`, `Prompts`, or one of these in the model.
        metric: a difference of two outputs, as in `"logit{A}-logit{B}"`.
        faithful: δ.
        parts: the parts that may be taken out; None for all heads and networks.
        circuit: those of them that are left in a circuit that is judged; None to search for one.
        edits: how parts are taken out; None for at zero.
        batch: members of one batch; None for as many as fit.
        memory: bytes that a batch may take, as in "8GB"; None for what there is.
        device: where to run; None for where the model is.
        progress: show how far it is, or a function that is told.

    Returns:
        The circuit, the counts that show it to be faithful, and for each of its parts the member that breaks the
        circuit without it.

    Raises:
        ProoflensError: where an argument is not what it should be; the message says what to do.

    Example:
        >>> import prooflens as pl
        >>> template = pl.Template("When{A} and{B} met,{B} spoke to", A=pl.NAMES, B=pl.NAMES, differ=[("A", "B")])
        >>> pl.family_discover("smollm2", template, "logit{A}-logit{B}", 1.0)  # doctest: +SKIP
    """
    begin = time.perf_counter()
    check_thresholds(None, faithful)
    whole = load(model) if device is None else load(model).to(checked_device(device))
    chosen, members = chosen_parts(whole, parts), bound_family(prompts, whole)
    check_circuit(chosen, circuit)

    def effects(names: Sequence[Sequence[str]]) -> FamilyEffects:
        taken = [taken_out(some, edits) for some in names]
        return family_effects(whole, taken, members, metric, faithful=faithful, batch=batch, memory=memory)

    with shown(progress) as tell:
        tell("the effect of every part alone", 0.0)
        alone = effects([[name] for name in chosen])
        sizes = {
            name: max(abs(row.least[0]), abs(row.most[0]))
            for name, row in zip(chosen, alone.rows, strict=True)
        }
        found = circuit_of(whole, sizes, lambda names: effects([names]), tell, circuit)
    where = f"{members.label}, {members.size:,} members"
    seconds = time.perf_counter() - begin
    return replace(found, metric=alone.metric, delta=faithful, where=where, seconds=seconds)
