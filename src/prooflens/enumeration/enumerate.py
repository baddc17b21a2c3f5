"""`pl.family`: how many members of a family of prompts satisfy claims, which do not, and what that is worth."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from prooflens.certificate.store import RunWriter
from prooflens.enumeration import confirm as balls
from prooflens.enumeration.claims import check_query
from prooflens.enumeration.deployed import FamilyPrecision
from prooflens.enumeration.tally import Listed, Tally
from prooflens.enumeration.walk import Plan, Walk, part_file
from prooflens.errors import EngineError, ModelError, PromptError, QueryError, RunError
from prooflens.families import Family, Given, Member
from prooflens.memory import parse_memory
from prooflens.models import Transformer, load
from prooflens.models.deployed import checked_precision
from prooflens.progress import Show, shown
from prooflens.queries import Query, parse_heads
from prooflens.queries.attention import RowQuery
from prooflens.queries.circuit import Circuit
from prooflens.results.families import (
    ENUMERATED,
    ESTIMATED,
    INCOMPLETE,
    PROVED,
    FamilyResults,
    FamilyRow,
    Judged,
)
from prooflens.statistics import clopper_pearson
from prooflens.verdicts.question import as_queries, source_of
from prooflens.verdicts.settings import checked_device
from prooflens.verdicts.sites import Vectors, explicit

MOST_MEMBERS = 10**12
"""Larger families are not enumerated."""


def family(
    model: Transformer | str,
    prompts: Given,
    queries: str | Query | Sequence[str | Query],
    *,
    sample: int | None = None,
    seed: int = 0,
    early: bool = False,
    nearest: int = 8,
    confirm: float = 30.0,
    keep: int = 1000,
    tree: bool = True,
    batch: int | None = None,
    memory: int | str | None = None,
    device: str | None = None,
    out: Path | str | None = None,
    part: tuple[int, int] = (1, 1),
    join: bool = True,
    configuration: Mapping[str, Any] | None = None,
    vectors: Vectors | None = None,
    deployed: str | None = None,
    progress: Show = False,
) -> FamilyResults:
    """Run every member of a family of prompts and count how many satisfy each claim.

    All claims are read in one pass, which stops at the deepest layer that one of them reads. A causal model runs the
    prompts as a prefix tree: every prefix once.

    Args:
        model: a model, or what `load` takes.
        prompts: a `Template`, `Swaps`, `Prompts`, or one of these in the model (`.of(model)`).
        queries: claims that name their heads, and tokens by role, as in `"18.6:top1={B.1}@-1"`,
            `"8.0:mass>=0.5@{A}@-1"`, `"logit{A}>logit{B}"`, `"argmax={A}"`, `"neuron 5.12>0@{A}"`.
        sample: run so many members drawn by chance instead of all: the share is then `estimated`.
        seed: of the sample.
        early: stop when every claim has failed once; without it the share is exact.
        nearest: how many members nearest to zero are remembered, and confirmed in ball arithmetic.
        confirm: how many seconds that may take per claim. A member of a large model takes minutes: where one would
            take longer than this, none is confirmed.
        keep: how many failures are listed; all are counted.
        tree: run every prefix once; False runs every member by itself.
        batch: members of one batch; None for as many as fit.
        memory: bytes that a batch may take, as in "8GB"; None for what there is.
        device: where to run; None for where the model is.
        out: a run directory to write. What was counted so far is kept beside it until it is complete: the same call
            goes on from there.
        part: (i, n): run only the i-th of n parts and keep its counts beside `out`. When all parts are there, the
            call that ends last writes the run.
        join: write the run when all parts are there; False only counts, and leaves that to another call.
        configuration: what else `run.json` keeps of what was asked for.
        vectors: the directions and dictionaries that claims about values inside the model name.
        deployed: `"bfloat16"` or `"float32"`: also measure how far margins of the members nearest to zero, and of some
            drawn by chance, move in that precision. That is measured, not proved.
        progress: show how far it is, or a function that is told.

    Returns:
        One row per claim. Its word is `proved` if every member was confirmed over the reals, `enumerated` if every
            member was run in float64, `estimated` if a sample was, `incomplete` if it was stopped or is a part.

    Raises:
        ProoflensError: where an argument is not what it should be; the message says what to do.

    Example:
        >>> import prooflens as pl
        >>> template = pl.Template("When{A} and{B} met,{B} spoke", A=pl.NAMES, B=pl.NAMES, differ=[("A", "B")])
        >>> pl.family("smollm2", template, "8.0:top1={B.1}@{B.2}")  # doctest: +SKIP
    """
    begin = time.perf_counter()
    source = source_of(model)
    held = load(model) if device is None else load(model).to(checked_device(device))
    members = bound_family(prompts, held)
    asked = [explicit(query, vectors) for query in as_queries(queries, members.slots)]
    for query in asked:
        check_query(query)
    _check(members, sample, early, nearest, keep, part, out)
    low = None if deployed is None else FamilyPrecision(members, checked_precision(deployed), source, vectors)
    plan = Plan(early, tree, batch, parse_memory(memory), part)
    sizes = {slot: len(words) for slot, words in members.words.items()}
    state = None if out is None or sample is not None else part_file(Path(out), part)
    lock = FileLock(f"{out}.lock") if part[1] > 1 and join else nullcontext()
    with shown(progress) as tell:
        tallies = [Tally(sizes, keep, nearest) for _ in asked]
        walk = Walk(members, asked, tallies, plan, state, tell, vectors=vectors)
        walk.check()
        if low is not None and walk.compares_hooks:
            raise QueryError(
                "the deployed precision is not measured of readouts at two hooks or tokens: ask without `deployed`"
            )
        if sample is not None:
            walk.sample(sample, seed)
        else:
            walk.enumerate()
        with lock:  # of parts that end together one writes the run
            others = _joined(walk, Path(out)) if out is not None and part[1] > 1 and join else []
            rows = [
                _row(walk, query, tally, confirm if join and sample is None else 0.0, sample is not None)
                for query, tally in zip(asked, walk.tallies, strict=True)
            ]
            if low is not None and (sample is not None or rows[0].asked == members.size):
                tell(f"running members in {low.precision}", 1.0)
                rows = [
                    _with_precision(low, query, tally, row)
                    for query, tally, row in zip(asked, walk.tallies, rows, strict=True)
                ]
            facts = {
                "queries": [str(query) for query in asked],
                "sample": sample,
                "seed": seed,
                "early": early,
                **({} if deployed is None else {"deployed": deployed}),
                **(configuration or {}),
            }
            seconds = time.perf_counter() - begin
            found = FamilyResults(members, rows, source, seconds, facts, walk.directions)
            if out is not None and (sample is not None or walk.stopped or rows[0].asked == members.size):
                found.save(out)
                for path in others if state is None else [state, *others]:
                    path.unlink(missing_ok=True)
                Path(f"{out}.lock").unlink(missing_ok=True)
    return found


def check_values(model: Transformer) -> None:
    """Raise a `ModelError` if a model holds parts at any value of a set: members are counted at one value.

    Args:
        model: the model.
    """
    if model.architecture.free:
        raise ModelError(
            f"{model.name}: over a family parts are held at one value each; at any value of a set they are on a region"
        )


def bound_family(prompts: Given, model: Transformer) -> Family:
    """Return a family of prompts in a model; an error if it is none, or another model's.

    Args:
        prompts: a family, or what makes one in a model.
        model: the model.
    """
    check_values(model)
    if isinstance(prompts, Family):
        if prompts.model.sha256 != model.sha256:
            raise PromptError(
                "the family was made for another model: give the template, or the family's own model"
            )
        return replace(prompts, model=model)
    if not hasattr(prompts, "of"):
        raise PromptError(
            f"a {type(prompts).__name__} is no family of prompts: give a Template, Swaps or Prompts, as in "
            'pl.Template("When{A} met{B}", A=[…], B=[…])'
        )
    return prompts.of(model)


def _check(
    members: Family,
    sample: int | None,
    early: bool,
    nearest: int,
    keep: int,
    part: tuple[int, int],
    out: Path | str | None,
) -> None:
    if members.model.dtype.itemsize != 8:
        raise EngineError(
            f"families are run in float64, {members.model.name} is {members.model.dtype}: do not convert it"
        )
    if nearest < 1 or keep < 0:
        raise EngineError("nearest must be at least 1 and keep at least 0")
    size = sum(shape.combinations for shape in members.shapes)
    if sample is None and size > MOST_MEMBERS:
        raise PromptError(
            f"the family has {members.size:.3g} members, more than 10¹²: give shorter lists, or run a sample of them"
        )
    if not 1 <= part[0] <= part[1]:
        raise RunError(f"a part is the i-th of n, as in (1, 4), got {part}")
    if part[1] > 1 and (out is None or sample is not None or early):
        raise RunError(
            "parts are of a whole family and are kept beside a run: give out, and neither sample nor early"
        )
    if out is not None:
        RunWriter.check_room(Path(out))


def _joined(walk: Walk, out: Path) -> list[Path]:
    """Add the counts of all other parts, if all are there and complete; else leave the part's own."""
    parts = walk.plan.part[1]
    others = [number for number in range(1, parts + 1) if number != walk.plan.part[0]]
    paths = [part_file(out, (number, parts)) for number in others]
    if not walk.done or not all(path.is_file() for path in paths):
        return []
    read = []
    for number, path in zip(others, paths, strict=True):
        tallies = [Tally(tally.sizes, tally.keep, tally.close) for tally in walk.tallies]
        other = replace(walk, tallies=tallies, plan=replace(walk.plan, part=(number, parts)), cursor=(0, 0))
        other.resume(path)
        if not other.done:
            return []
        read.append(other)
    for other in read:
        for tally, more in zip(walk.tallies, other.tallies, strict=True):
            tally.merge(more)
    return paths


def _row(walk: Walk, query: Query, tally: Tally, confirm: float, sampled: bool) -> FamilyRow:
    """What a tally says, with the members nearest to zero confirmed where that can be done."""
    family = walk.family
    close, note = _confirmed(walk, query, tally.nearest, confirm)
    sure = sum(judged.confirmed == "confirmed" for judged in close)
    word = INCOMPLETE if tally.asked < family.size else ENUMERATED if sure < family.size else PROVED
    return FamilyRow(
        str(query),
        query.unit,
        ESTIMATED if sampled else word,
        family.size,
        tally.asked,
        tally.held,
        clopper_pearson(tally.held, tally.asked) if sampled else None,
        _judged(tally.failures, _members(family, tally.failures)),
        _judged(tally.worst, _members(family, tally.worst)),
        close,
        tally.by_slot,
        tally.by_pair,
        (2.0**tally.histogram.exponent, tally.histogram.counts),
        note,
    )


def _with_precision(low: FamilyPrecision, query: Query, tally: Tally, row: FamilyRow) -> FamilyRow:
    """The row with what the deployed precision changes at the members nearest to zero, and at some others."""
    found = low.measured(query, _members(low.family, tally.nearest))
    return replace(row, deployed=found, note=f"{row.note}; {found}")


def _members(family: Family, listed: Listed) -> list[Member]:
    """The members that a tally remembers."""
    found = list[Member]()
    for number, *fillers in listed.members.tolist():
        shape = family.shapes[number]
        pairs = zip(shape.slots, fillers, strict=True)
        digits = [int(np.flatnonzero(shape.fillers[slot] == filler)[0]) for slot, filler in pairs]
        found += family.members(shape, np.array([digits]))
    return found


def _judged(listed: Listed, members: Sequence[Member]) -> list[Judged]:
    rows = zip(members, listed.margins.tolist(), listed.held.tolist(), strict=True)
    return [Judged(one.text, one.ids, one.fillers, margin, held) for one, margin, held in rows]


def _confirmed(walk: Walk, query: Query, listed: Listed, seconds: float) -> tuple[list[Judged], str]:
    """The members nearest to zero with what ball arithmetic says of them, and the same as a sentence."""
    family, members = walk.family, _members(walk.family, listed)
    model, close = family.model, _judged(listed, members)
    if seconds <= 0.0:
        return close, "nothing was confirmed in ball arithmetic"
    longest = max(shape.n_tokens for shape in family.shapes)
    if (each := balls.seconds_for(model, *_depth(query, model), longest)) > seconds:
        return close, f"not confirmed in ball arithmetic: a member takes about {each:.0f} s there"
    walk.tell(f"confirming {len(close)} members of {query} in ball arithmetic", 1.0)
    asked = list(zip(members, listed.held.tolist(), strict=True))
    words = balls.confirm(balls.network_of(model), family, query, asked, seconds, walk.vectors)
    found = [replace(judged, confirmed=word) for judged, word in zip(close, words, strict=True)]
    counts = {word or "not reached": words.count(word) for word in dict.fromkeys(words)}
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    return found, f"of the {len(close)} members nearest to zero, in ball arithmetic: {told}"


def _depth(query: Query, model: Transformer) -> tuple[int, bool]:
    """How many layers a query reads, and whether it reads the output."""
    architecture = model.architecture
    parts = query.parts if isinstance(query, Circuit) else (query,)
    heads = [part.heads for part in parts if isinstance(part, RowQuery) and part.heads is not None]
    layers = [n for text in heads for n, _ in parse_heads(text, architecture.n_layers, architecture.n_heads)]
    output = any(not isinstance(part, RowQuery) for part in parts)  # a readout may be as deep
    return architecture.n_layers if output else 1 + max(layers), output
