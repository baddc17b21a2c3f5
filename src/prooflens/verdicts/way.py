"""The way from one prompt to another: how far a claim is proved, where it breaks first, and its margin in between.

`certify` on a `Segment` asks whether a claim holds on the whole way. `way` draws the map: the way is cut until every
piece is proved, or surely broken somewhere and short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import Cover
from prooflens.engines.chebyshev import Search
from prooflens.engines.forms import Forms, forms_of
from prooflens.engines.protocol import EngineOptions, OutOfTimeError
from prooflens.errors import QueryError, RegionError
from prooflens.models import Prompt, Transformer, load
from prooflens.models.nearest import nearest_token
from prooflens.models.reads import READ
from prooflens.models.tails import start_at
from prooflens.problem import Problem
from prooflens.progress import shown
from prooflens.queries import Claim, Logit, Query
from prooflens.queries.rows import Token, find_tokens
from prooflens.regions import Segment, Steer
from prooflens.results.ways import Stretch, Way, Ways
from prooflens.verdicts.breaks import first_break, margins_at
from prooflens.verdicts.question import Heads, Question, as_prompt, ask
from prooflens.verdicts.settings import Options, Settings
from prooflens.verdicts.sites import Vectors

POINTS = 257
"""How many points of the way are run to draw the attained margin."""


def way(
    model: Transformer | str,
    a: Prompt | str | Tensor,
    b: Prompt | str | Tensor,
    queries: str | Query | Sequence[str | Query] = ("top1",),
    heads: Heads = None,
    *,
    layer: int | None = None,
    positions: Sequence[Token] | None = None,
    resolution: float = 1 / 64,
    vectors: Vectors | None = None,
    **options: Unpack[Options],
) -> Ways:
    """Return how far along the way from one prompt to another every claim is proved, and where it breaks first.

    Args:
        model: a model, or what `load` takes.
        a: where the way starts; claims are made there ("the same key as at a").
        b: where it ends; as many tokens.
        queries: what is asked, as in `certify`: claims that are signs of linear functionals (`top1`, `top2`, `spec`).
        heads: as in `certify`; None for all.
        layer: all heads of one layer, in place of `heads`.
        positions: query positions; None for all.
        resolution: pieces on which a claim breaks are cut down to this share of the way.
        vectors: the directions and dictionaries that queries about values inside the model name.
        options: memory, device, progress and time: see `Options`. Pieces that the time does not suffice for stay open;
            without a time the search goes on to its end.

    Returns:
        One row per claim: the share of the way that is proved from its start on, the share at which it breaks first
        (attained by a run of the model), and the pieces in between; `.plot(…)` draws one.

    Raises:
        ProoflensError: where an argument is not what it should be.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> x = model.example().x
        >>> found = pl.way(model, x, x.roll(1, 0), "0.1:top1@-1")
        >>> 0.0 <= found[0].proved <= found[0].breaks <= 1.0
        True
    """
    if not 0.0 < resolution <= 1.0:
        raise RegionError(f"the resolution is a share of the way between 0 and 1, got {resolution}")
    settings = Settings.of(**options)
    if settings.time is not None:
        settings = settings.until(time.monotonic() + settings.time, settings.time)
    question = ask(
        model,
        a,
        Segment(a, b),
        heads,
        layer=layer,
        queries=queries,
        positions=positions,
        device=settings.device,
        vectors=vectors,
    )
    question = _without_constants(question)
    problem = question.problem
    prompt = as_prompt(problem.model, a)
    for claim in question.claims:
        if claim.wants_range or not all(f.is_linear and f.constant == 0.0 for f in claim.functionals):
            raise QueryError(f"{claim.query} is no sign of linear functionals: ask `certify` on a Segment")
    with shown(settings.progress) as tell, torch.no_grad():
        functionals = [f for claim in question.claims for f in claim.functionals]
        forms = forms_of(functionals, problem.model.architecture.d_out or 0)
        asked = replace(settings.options, progress=tell)
        try:
            search, ended = _searched(problem, replace(forms, signs=True), asked, resolution)
        except OutOfTimeError as error:
            raise OutOfTimeError(
                f"{error}, before anything was known: give more (--time, in Python time=)"
            ) from error
        cover = search.cover()
        found, first = [], 0
        for claim in question.claims:
            places = torch.arange(first, first + len(claim.functionals))
            row = _drawn(problem, claim, cover.select(places))
            if row.breaks is not None and prompt.ids is not None:
                row = replace(row, nearest=_nearest(problem, prompt, row.breaks))
            found.append(row)
            first += len(claim.functionals)
    return Ways(found, question.subject, search.walks, settings.time if ended else None)


def _searched(
    problem: Problem, forms: Forms, options: EngineOptions, resolution: float
) -> tuple[Search, bool]:
    """Cut the way into pieces down to a share of it; return the pieces, and whether the time ended before."""
    search, ended = Search.start(problem, forms, options), False
    search.resolution = resolution
    while search.step():
        if options.late:
            search.stop()
            ended = True
    return search, ended


def _without_constants(question: Question) -> Question:
    """Claims about readouts with thresholds, as claims about the signs of readouts that are moved by the threshold.

    ±(w·h + b) − c becomes the output (±w)·h + b′ of the model that ends there; b′ is rounded to the strict side.
    """
    model, claims = question.problem.model, question.claims
    moved = all(f.is_linear and len(f.terms) == 1 for claim in claims for f in claim.functionals)
    if READ not in model.weights or not moved or not any(f.constant for c in claims for f in c.functionals):
        return question
    W, b = model.head
    rows, biases, found = list[Tensor](), list[float](), list[Claim]()
    for claim in claims:
        conditions = []
        for condition in claim.conditions:
            ((sign, atom),) = condition.functional.terms
            if not isinstance(atom, Logit) or abs(sign) != 1.0:
                return question
            conditions.append(
                replace(
                    condition,
                    functional=replace(condition.functional, terms=((1.0, Logit(len(rows))),), constant=0.0),
                )
            )
            rows.append(sign * W[atom.index])
            shift = sign * float(b[atom.index]) + condition.functional.constant
            biases.append(math.nextafter(shift, -math.inf) if condition.functional.constant else shift)
        found.append(replace(claim, conditions=tuple(conditions)))
    bias = torch.tensor(biases, dtype=W.dtype, device=W.device)
    problem = replace(question.problem, model=model.with_head(torch.stack(rows), bias))
    return replace(question, problem=problem, claims=found)


def _nearest(problem: Problem, prompt: Prompt, share: float) -> tuple[tuple[int, str], ...]:
    """The vocabulary's nearest token (ℓ∞ after embedding) to each token that moves, at a share of the way."""
    model, region = problem.model, problem.region
    x = region.point(torch.tensor([2.0 * share - 1.0]).to(region.center))
    assert prompt.ids is not None
    moving = (region.half_widths() != 0).any(-1).nonzero()[:, 0].tolist()
    return tuple((t, nearest_token(model, prompt.ids, t, x[t]).token) for t in moving)


def _drawn(problem: Problem, claim: Claim, cover: Cover) -> Way:
    """One claim's map: its weakest functional on every piece, and the margin that the model itself has."""
    order = cover.low[:, 0].argsort()
    starts, ends = (0.5 * (side[order, 0] + 1.0) for side in (cover.low, cover.high))
    lower, upper = cover.lower[order].amin(-1), cover.upper[order].amin(-1)
    pieces = [
        Stretch(*numbers)
        for numbers in zip(*(side.tolist() for side in (starts, ends, lower, upper)), strict=True)
    ]
    shares = torch.linspace(0.0, 1.0, POINTS, dtype=torch.float64)
    margins = margins_at(problem, claim, shares)
    breaks = None
    if bool((margins <= 0.0).any()):
        breaks = first_break(problem, claim, shares, margins)
    return Way(claim, pieces, shares.tolist(), margins.tolist(), breaks)


def steer(
    model: Transformer | str,
    prompt: Prompt | str,
    layer: int,
    direction: Float[Tensor, " d"],
    c: tuple[float, float] = (0.0, 8.0),
    queries: str | Query | Sequence[str | Query] = ("top1",),
    *,
    at: Sequence[Token] | None = (-1,),
    positions: Sequence[Token] | None = None,
    resolution: float = 1 / 64,
    vectors: Vectors | None = None,
    **options: Unpack[Options],
) -> Ways:
    """Return for which strengths of a steering vector every claim is proved: the stream h + c·v for all c of a range.

    Claims are about the model's tail from the block on (`start_at`): layer l there is layer l + `layer` of the model.
    The share s of the way is the strength c₀ + s (c₁ − c₀).

    Args:
        model: a model, or what `load` takes.
        prompt: a text or a prompt of it.
        layer: the block in front of which the stream is steered.
        direction: v, shape [d].
        c: the least and the largest strength.
        queries: what is asked, as in `way`.
        at: the tokens that are steered; None for all.
        positions: query positions; None for all.
        resolution: as in `way`.
        vectors: directions and dictionaries that queries name.
        options: memory, device and progress: see `Options`.

    Raises:
        ProoflensError: where an argument is not what it should be.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> v = torch.ones(model.architecture.d_model).double()
        >>> found = pl.steer(model, model.example(), 1, v, (0.0, 0.5), "0.1:top1@-1")
        >>> 0.0 <= found[0].proved <= 1.0
        True
    """
    held = load(model)
    tail, stream = start_at(held, layer, as_prompt(held, prompt))
    assert stream is not None
    steered = None if at is None else find_tokens(at, len(stream), stream.tokens)
    ends = Steer(stream, direction, c, steered).ends()
    return way(
        tail,
        ends[0],
        ends[1],
        queries,
        positions=positions,
        resolution=resolution,
        vectors=vectors,
        **options,
    )
