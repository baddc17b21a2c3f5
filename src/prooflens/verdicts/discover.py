"""Find a circuit: take parts out one after another, as long as the rest is proved faithful.

A removal counts only if the model without *all* parts that are out by then is proved to stay within ±δ of the model, at
every point of the region. A part that is refused is tried again when others have gone, until no part can go: then for
each that is left the last trial says why. A witness shows that the circuit without this part is off by more than δ;
where every part has one, the circuit is minimal, part by part. That no smaller circuit exists is not claimed.

A circuit that is given is judged in the same way, without a search: whether it is faithful, and each of its parts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models import Prompt, Transformer, load
from prooflens.models.edits import find_place, places_of
from prooflens.models.parts import Edit
from prooflens.progress import Progress, shown
from prooflens.queries import Query
from prooflens.results import Verdict
from prooflens.results.discovery import Discovery, Found, Trial
from prooflens.results.effects import Effect
from prooflens.verdicts.effect import broken_at_reference, check_thresholds, effect
from prooflens.verdicts.pair import Pair
from prooflens.verdicts.question import Place, as_prompt
from prooflens.verdicts.settings import Options, Settings, checked_device
from prooflens.verdicts.sites import Vectors

Held = Mapping[str, Edit]
"""How parts are taken out, by name: at a mean, at another prompt's value; those without an entry at zero."""


def discover(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    metric: str | Query,
    faithful: float,
    *,
    parts: Sequence[str] | None = None,
    circuit: Sequence[str] | None = None,
    edits: Held | None = None,
    everywhere: bool = False,
    vectors: Vectors | None = None,
    **options: Unpack[Options],
) -> Discovery:
    """Find a circuit whose metric is proved to stay within ±δ of the model's on a whole region, or judge a given one.

    Args:
        model: a model, or what `load` takes.
        prompt: a text, a prompt of the model, or an input of shape [S, d].
        region: where the circuit is to be faithful: a ball, a segment, a hull, a span.
        metric: what is measured, as in `effect`.
        faithful: δ.
        parts: the parts that may be taken out; None for all heads and networks.
        circuit: those of them that are left in a circuit that is judged; None to search for one.
        edits: how parts are taken out; None for at zero.
        everywhere: bound the effect of every part of the circuit, also where the prompt alone shows that it is needed:
            it may be needed at every point (`Discovery.needed_everywhere`).
        vectors: the directions and dictionaries that the metric names.
        options: engine, memory, time, device, progress, seed and budget of every trial: see `Options`.

    Returns:
        The circuit, the proof that it is faithful, and for each of its parts the effect of taking it out as well.

    Raises:
        ProoflensError: where an argument is not what it should be; the message says what to do.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> found = pl.discover(model, model.example(), pl.Ball(0.001), "logit0-logit1", 1.0, parts=["a1.h0", "m0"])
        >>> sorted([*found.circuit, *found.removed])
        ['a1.h0', 'm0']
    """
    begin, settings = time.perf_counter(), Settings.of(**options)
    check_thresholds(None, faithful)
    whole = load(model) if settings.device is None else load(model).to(checked_device(settings.device))
    chosen, held = chosen_parts(whole, parts), as_prompt(whole, prompt)
    check_circuit(chosen, circuit)

    def paired(names: Sequence[str]) -> Pair:
        return Pair.of(whole, taken_out(names, edits), held, region, metric, None, vectors)

    with shown(settings.progress) as tell:
        quiet: Options = {**options, "progress": False}

        def judge(names: Sequence[str], bounded: bool = False) -> Effect:
            broken = None if bounded else broken_at_reference(paired(names), faithful)
            if broken is not None:
                return broken
            taken = taken_out(names, edits)
            return effect(whole, taken, held, region, metric, faithful=faithful, vectors=vectors, **quiet)

        alone = {name: paired([name]) for name in chosen}
        sizes = {name: abs(pair.clean[0] - pair.clean[1]) for name, pair in alone.items()}
        first = next(iter(alone.values()))
        found = circuit_of(whole, sizes, judge, tell, circuit)
        if everywhere:
            found = replace(found, needed=_bounded(found, judge, tell))
    about: dict[str, Any] = {"metric": first.metric, "delta": faithful, "where": first.subject.region.label}
    return replace(found, **about, seconds=time.perf_counter() - begin)


def _bounded(
    found: Discovery, judge: Callable[[Sequence[str], bool], Effect], tell: Progress
) -> dict[str, Found]:
    """The effects of all parts of a circuit, those bounded that the prompt alone showed to be needed."""
    needed = dict(found.needed)
    for number, part in enumerate(found.circuit):
        tell(f"{part} at every point", number / len(found.circuit))
        if not all(map(math.isfinite, needed[part].ends)):
            needed[part] = judge([*found.removed, part], True)
    return needed


def circuit_of(
    model: Transformer,
    sizes: Mapping[str, float],
    judge: Callable[[Sequence[str]], Found],
    tell: Progress,
    circuit: Sequence[str] | None = None,
) -> Discovery:
    """Find the circuit that is left when parts are taken out as long as a judge proves the rest faithful.

    Args:
        model: the model.
        sizes: the parts, layer by layer, with how much each matters alone: the least is tried first.
        judge: the effect of taking some parts out, with one verdict about it.
        tell: is told how far it is.
        circuit: the parts that are left; None to search for them.

    Returns:
        The circuit, without what it is about.
    """
    order = sorted(sizes, key=sizes.__getitem__)
    found = search(order, judge, tell) if circuit is None else weighed(order, circuit, judge, tell)
    removed, trials, certificate, needed = found
    kept = [name for name in sizes if name not in removed]
    left = {name: needed[name] for name in kept}
    return Discovery(model.name, model.sha256, "", 0.0, "", kept, removed, trials, certificate, left, 0.0)


def search(
    order: Sequence[str], judge: Callable[[Sequence[str]], Found], tell: Progress
) -> tuple[list[str], list[Trial], Found | None, dict[str, Found]]:
    """Take parts out as long as a judge proves the rest faithful.

    Args:
        order: the parts, the one to try first at first.
        judge: the effect of taking some parts out, with one verdict about it.
        tell: is told how far it is.

    Returns:
        What was taken out, all trials, the judgement of all that was taken out, and that of every part that is left.
    """
    removed: list[str] = []
    trials: list[Trial] = []
    certificate: Found | None = None
    tried: dict[str, tuple[int, Found]] = {}
    while True:
        stale = [p for p in order if p not in removed and tried.get(p, (-1,))[0] != len(removed)]
        if not stale:
            return removed, trials, certificate, {part: found for part, (_, found) in tried.items()}
        for part in stale:
            tell(
                f"{len(removed)} of {len(order)} parts are out, trying {part}",
                len(trials) / (len(trials) + len(stale)),
            )
            found = judge([*removed, part])
            (verdict,) = found.verdicts
            trials.append(Trial(part, len(removed), verdict, *found.ends))
            if verdict is Verdict.HOLDS:
                removed.append(part)
                tried.pop(part, None)
                certificate = found
            else:
                tried[part] = len(removed), found


def weighed(
    order: Sequence[str], circuit: Sequence[str], judge: Callable[[Sequence[str]], Found], tell: Progress
) -> tuple[list[str], list[Trial], Found | None, dict[str, Found]]:
    """Judge a circuit, and the circuit without each of its parts; what it returns is as of `search`.

    Args:
        order: all parts.
        circuit: those that are left.
        judge: the effect of taking some parts out, with one verdict about it.
        tell: is told how far it is.
    """
    removed = [part for part in order if part not in circuit]
    certificate = judge(removed) if removed else None
    trials, needed = list[Trial](), dict[str, Found]()
    for number, part in enumerate(part for part in order if part in circuit):
        tell(f"the circuit without {part}", number / len(circuit))
        needed[part] = judge([*removed, part])
        (verdict,) = needed[part].verdicts
        trials.append(Trial(part, len(removed), verdict, *needed[part].ends))
    return removed, trials, certificate, needed


def check_circuit(parts: Sequence[str], circuit: Sequence[str] | None) -> None:
    """Raise a `ModelError` if a circuit names a part that may not be taken out.

    Args:
        parts: those that may.
        circuit: the parts of a circuit; None for none.
    """
    if strange := [name for name in circuit or () if name not in parts]:
        raise ModelError(f"{strange[0]!r} is in the circuit and none of the parts that may be taken out")


def chosen_parts(model: Transformer, parts: Sequence[str] | None) -> list[str]:
    """Return the parts that may be taken out, layer by layer; an error if there is no such part, or one twice.

    Args:
        model: the model.
        parts: their names; None for all heads and networks.
    """
    if parts is None:
        return places_of(model.architecture)
    if not parts:
        raise ModelError("no part is named: give at least one, as in 'a9.h6'")
    names = [find_place(model.architecture, part).name for part in parts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ModelError(f"{twice[0]} is named twice: name it once")
    return names


def taken_out(names: Sequence[str], edits: Held | None) -> list[str | Edit]:
    """Return the edits that take parts out.

    Args:
        names: the parts.
        edits: how they are taken out; None for at zero.
    """
    found = [(edits or {}).get(name, name) for name in names]
    if wide := [one.place for one in found if isinstance(one, Edit) and one.spread is not None]:
        raise ModelError(
            f"a circuit is found with parts at one value each: {wide[0]} is at any value of a set"
        )
    return found
