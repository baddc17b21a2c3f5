"""Radii: the largest ε that is proved and the smallest that is broken, certified ≤ true ≤ attack.

All claims share one grid of ε, equally spaced in log ε, and each bisects on it (`radius_search`): a call of an engine
at one ε serves every claim whose next question is that ε.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import pyarrow as pa
from torch import Tensor

from prooflens.errors import EngineError, QueryError, RegionError
from prooflens.models import Prompt, Transformer
from prooflens.models.nearest import yardstick
from prooflens.progress import Progress, shown
from prooflens.queries import Query
from prooflens.queries.rows import Token, find_tokens
from prooflens.regions import Ball, Region, listed
from prooflens.results import Radii
from prooflens.results.radii import RadiusEvidence
from prooflens.verdicts.deployed import Precision
from prooflens.verdicts.forecast import deadline_of
from prooflens.verdicts.question import Heads, Question, ask
from prooflens.verdicts.radius_search import RadiusSearch
from prooflens.verdicts.settings import Options, Settings
from prooflens.verdicts.sites import Vectors

SMALLEST, LARGEST = 1e-7, 10.0
"""The ends of the grid of ε, unless others are asked for."""


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C during `radius`; `radii` has what is proved and broken so far, which is sound but not the end of it."""

    def __init__(self, radii: Radii) -> None:
        super().__init__("interrupted")
        self.radii = radii


def radius(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    queries: str | Query | Sequence[str | Query] = ("top1",),
    heads: Heads = None,
    *,
    layer: int | None = None,
    positions: Sequence[Token] | None = None,
    tokens: Sequence[Token] | None = None,
    per_token: bool = False,
    tolerance: float = 0.1,
    between: tuple[float, float] = (SMALLEST, LARGEST),
    nearest: bool | None = None,
    vectors: Vectors | None = None,
    deployed: str | None = None,
    **options: Unpack[Options],
) -> Radii:
    """Return the certified and the attacked radius of every claim: proved for all of the ball of radius `certified`.

    Args:
        model: a model, or what `load` takes.
        prompt: a text, `model.prompt(text)`, or an input of shape [S, d].
        queries: what is asked, as in `certify`; `"2.4:top1@-1"` is one head at one position.
        heads: as in `certify`; None for all.
        layer: all heads of one layer, in place of `heads`.
        positions: query positions; None for all.
        tokens: the tokens that move; None for all.
        per_token: move one token at a time, with a row for each.
        tolerance: radii lie on a grid with steps of a factor 1 + tolerance.
        between: the ends of the grid.
        nearest: whether to measure radii by the distance to the nearest other token, a pass over the vocabulary; None
            for where that takes a second or two.
        vectors: the directions and dictionaries that queries about values inside the model name.
        deployed: `"bfloat16"` or `"float32"`: also measure how far each margin moves in that precision, at the clean
            input, at the witness, and at 64 points of the ball of the certified radius. That is measured, not proved.
        options: engine, memory, time, device, progress, seed and budget: see `Options`.

    Returns:
        A table with one row per claim. A certified radius of 0 means that nothing is proved at the smallest ε, an
        attack of null that nothing was broken at the largest.

    Raises:
        SearchInterrupted: after Ctrl-C, with the radii so far.
        ProoflensError: where an argument is not what it should be, or the engine only estimates.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> rad = pl.radius(model, model.example(), "0.1:top1@-1")
        >>> 0 < rad.certified <= rad.attack
        True
    """
    settings, grid = Settings.of(**options), _grid(between, tolerance)
    if not settings.proves:
        raise EngineError(
            f"{'+'.join(settings.engines)} only estimates: a certified radius needs an engine that proves"
        )
    question = ask(
        model,
        prompt,
        Ball(1.0, tokens),
        heads,
        layer=layer,
        queries=queries,
        positions=positions,
        device=settings.device,
        vectors=vectors,
    )
    if ranged := next((claim for claim in question.claims if claim.wants_range), None):
        raise QueryError(f"{ranged.query} has no radius: give a threshold, as in 'entropy<=1.5'")
    size = len(question.problem.region.center)
    places = None if tokens is None else find_tokens(listed(tokens), size, question.subject.tokens)
    moves: list[int | None] = [*(range(size) if places is None else places)] if per_token else [None]
    measured = yardstick(question.problem.model, question.prompt, nearest)
    precision = Precision.of(question, deployed)
    frames: list[pa.Table] = []
    evidence: list[RadiusEvidence] = []
    with shown(settings.progress) as tell:
        settings = deadline_of(settings, question.problem, question.claims, len(moves))
        for number, token in enumerate(moves):
            told = replace(
                _share(settings, len(moves) - number), progress=_part(tell, number, len(moves), token)
            )
            moving = places if token is None else [token]
            search = _search(question, told, grid, moving)
            shares = partial(measured.shares, moving=moving)
            try:
                search.run()
            except KeyboardInterrupt:
                found = search.table(question.subject, token, "; the search was interrupted", shares)
                frames.append(search.measured(found, precision))
                evidence += search.evidence
                raise SearchInterrupted(Radii(pa.concat_tables(frames), question.subject, evidence)) from None
            found = search.table(question.subject, token, shares=shares)
            frames.append(search.measured(found, precision))
            evidence += search.evidence
    return Radii(pa.concat_tables(frames), question.subject, evidence)


def _grid(between: tuple[float, float], tolerance: float) -> list[float]:
    """The radii that are asked about, smallest first."""
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise RegionError(f"the tolerance must be a positive number, got {tolerance}")
    low, high = between
    if not (0 < low < high and high / low < math.inf):
        raise RegionError(
            f"radii are searched between two positive numbers with a finite quotient, got {low} and {high}"
        )
    count = math.ceil(math.log(high / low) / math.log1p(tolerance))
    return [low * (high / low) ** (k / count) for k in range(count + 1)]


def _search(
    question: Question, settings: Settings, grid: list[float], moving: Sequence[int] | None
) -> RadiusSearch:
    """A search over balls in which some tokens move; None for all."""

    def ball(eps: float) -> Region:
        return Ball(eps, moving).around(question.problem.region.center)

    return RadiusSearch(question.problem, question.claims, grid, ball, settings)


def _share(settings: Settings, searches: int) -> Settings:
    """The settings of the next of several searches: an equal part of the time that is left."""
    left = settings.left
    return settings if left is None else settings.until(time.monotonic() + left / searches, settings.allotted)


def _part(tell: Progress, number: int, total: int, token: int | None) -> Progress:
    """Progress of search `number` of `total`, as a share of all."""
    name = "" if token is None else f"token {token} "
    return lambda stage, share: tell(name + stage, (number + share) / total)
