"""What would be asked: every stage of the portfolio with predicted seconds and bytes, before anything is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Unpack

from torch import Tensor

from prooflens.durations import written_time
from prooflens.engines import get_engine
from prooflens.engines.functionals import refusal
from prooflens.memory import written
from prooflens.models import Prompt, Transformer
from prooflens.problem import Problem
from prooflens.queries import Claim, Query
from prooflens.queries.rows import Token
from prooflens.verdicts.certify import part_of_time
from prooflens.verdicts.chunks import chunks
from prooflens.verdicts.evidence import ATTACK, Evidence
from prooflens.verdicts.forecast import (
    Forecast,
    GoesOn,
    deadline_of,
    depth_of,
    forecast,
    obstacle,
    stage_end,
)
from prooflens.verdicts.question import Heads, Place, Question, ask
from prooflens.verdicts.settings import Options, Settings
from prooflens.verdicts.sites import Vectors
from prooflens.verdicts.stages import Stage


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan.

    Attributes:
        layer: the deepest layer that its claims read; the number of layers for outputs.
        engine: who would be asked.
        claims: of how many claims, if all of them are still open by then.
        seconds: predicted; None if nobody can tell.
        gib: predicted GiB; None if nobody can tell.
        fits: whether it would be asked.
        why: why not.
    """

    layer: int
    engine: str
    claims: int
    seconds: float | None
    gib: float | None
    fits: bool
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """What would be asked, in order.

    Attributes:
        stages: the stages.
        allotted: how many seconds there are; None for no limit.
    """

    stages: tuple[PlannedStage, ...]
    allotted: float | None

    @property
    def seconds(self) -> float:
        """The predicted seconds of all stages that would be asked, if none decides anything."""
        return sum(stage.seconds or 0.0 for stage in self.stages if stage.fits)

    @property
    def line(self) -> str:
        """The plan in a sentence."""
        limit = "no limit" if self.allotted is None else f"{written_time(self.allotted)} allowed"
        most = max((stage.gib or 0.0 for stage in self.stages if stage.fits), default=0.0)
        return f"at most about {written_time(self.seconds)} ({limit}) and {written(most * 2**30)}"

    def __str__(self) -> str:
        """A line for every stage, and the plan in a sentence."""
        lines = [
            f"layer {stage.layer}: {stage.engine}, {stage.claims} {'claim' if stage.claims == 1 else 'claims'}"
            + ("" if stage.seconds is None else f", about {written_time(stage.seconds)}")
            + ("" if stage.fits else f"; not asked: {stage.why}")
            for stage in self.stages
        ]
        return "\n".join([*lines, self.line])

    def to_dict(self) -> dict[str, Any]:
        """Return `{"stages": […], "seconds": …, "allotted": …}`."""
        stages = [asdict(stage) for stage in self.stages]
        return {"stages": stages, "seconds": self.seconds, "allotted": self.allotted}


def plan(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    heads: Heads = None,
    *,
    layer: int | None = None,
    queries: str | Query | Sequence[str | Query] = ("top1",),
    positions: Sequence[Token] | None = None,
    vectors: Vectors | None = None,
    **options: Unpack[Options],
) -> Plan:
    """Return what `certify` would ask with the same arguments, with predicted seconds and memory; nothing is proved.

    Predictions are those of this machine, which is measured once. A stage is asked about what the stages before it
    leave open, so the seconds are those of the worst case.

    Args:
        model: as in `certify`.
        prompt: as in `certify`.
        region: as in `certify`.
        heads: as in `certify`.
        layer: as in `certify`.
        queries: as in `certify`.
        positions: as in `certify`.
        vectors: as in `certify`.
        options: as in `certify`.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> found = pl.plan(model, model.example(), pl.Ball(0.02), "1.0", positions=[-1])
        >>> [stage.engine for stage in found.stages if stage.fits]
        ['interval', 'attack', 'taylor', 'crown', 'cpz', 'attack']
    """
    settings = Settings.of(**options)
    question = ask(
        model,
        prompt,
        region,
        heads,
        layer=layer,
        queries=queries,
        positions=positions,
        device=settings.device,
        vectors=vectors,
    )
    return plan_question(question, settings)


def plan_question(question: Question, settings: Settings) -> Plan:
    """Plan the work on the claims of a question.

    Args:
        question: the claims.
        settings: how they would be decided.
    """
    problem = question.problem
    centred = problem.region.holds_reference
    claims = [claim for claim in question.claims if Evidence.about(claim, centred).open]
    allowed = deadline_of(settings, problem, claims)
    waiting = [chunk for chunk in chunks(problem, claims, settings.memory) if chunk]
    made: list[PlannedStage] = []
    spent, passed = 0.0, dict[str, int]()
    while waiting:
        left = None if allowed.allotted is None else allowed.allotted - spent
        now = allowed if left is None else allowed.until(time.monotonic() + left, allowed.allotted)
        share = part_of_time(problem, claims, waiting, now)
        chunk = [claims[i] for i in waiting.pop(0)]
        stages = _planned(problem, chunk, share, passed)
        spent += sum(stage.seconds or 0.0 for stage in stages if stage.fits)
        made += stages
    return Plan(tuple(_together(made)), allowed.allotted)


def _planned(
    problem: Problem, claims: Sequence[Claim], settings: Settings, passed: dict[str, int]
) -> list[PlannedStage]:
    """The stages of one chunk; those that fit take their time from those after them.

    `passed` has the layer that each engine's walk would end at by then, and is brought up to date.
    """
    depth = max(depth_of(problem, claim) for claim in claims)
    stages = [stage for stage in settings.stages if stage.applies(problem, depth)]
    made = []
    for place, stage in enumerate(stages):
        expected = forecast(stage, problem, claims, settings, passed.get(stage.engine, 0))
        why = _why_not(stage, problem, claims, expected, stage_end(stage, stages[place + 1 :], settings))
        gib = None if expected.memory is None else expected.memory / 2**30
        made.append(PlannedStage(depth, stage.engine, len(claims), expected.seconds, gib, not why, why))
        if not why and stage.engine != ATTACK:
            engine = get_engine(stage.engine)
            if isinstance(engine, GoesOn) and engine.would_hold(problem, depth, settings.options):
                passed[stage.engine] = depth
        if not why and settings.deadline is not None:
            taken = min(expected.seconds or 0.0, max(0.0, settings.left or 0.0))
            settings = settings.until(settings.deadline - taken, settings.allotted)
    return made


def _why_not(
    stage: Stage, problem: Problem, claims: Sequence[Claim], expected: Forecast, settings: Settings
) -> str:
    if stage.engine == ATTACK:
        return "" if settings.left is None or settings.left > 0.0 else "no time is left"
    if hindered := obstacle(stage, problem, expected, settings):
        return hindered.why
    functionals = [f for claim in claims for f in claim.functionals]
    return refusal(get_engine(stage.engine), problem, functionals, settings.options) or ""


def _together(stages: Sequence[PlannedStage]) -> list[PlannedStage]:
    """Chunks of one layer as one: claims and seconds add up, memory does not."""
    groups: dict[tuple[int, str, bool, int], list[PlannedStage]] = {}
    before: dict[tuple[int, str], int] = {}
    for stage in stages:
        # The attack comes twice in a chunk: its first turn and its last stay apart.
        turn = before.get((stage.layer, stage.engine), 0) % 2 if stage.engine == ATTACK else 0
        before[stage.layer, stage.engine] = before.get((stage.layer, stage.engine), 0) + 1
        groups.setdefault((stage.layer, stage.engine, stage.fits, turn), []).append(stage)
    return [_sum(group) for group in groups.values()]


def _sum(group: Sequence[PlannedStage]) -> PlannedStage:
    first = group[0]
    seconds = [stage.seconds for stage in group if stage.seconds is not None]
    gib = [stage.gib for stage in group if stage.gib is not None]
    return PlannedStage(
        first.layer,
        first.engine,
        sum(stage.claims for stage in group),
        sum(seconds) if seconds else None,
        max(gib) if gib else None,
        first.fits,
        first.why,
    )
