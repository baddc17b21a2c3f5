"""What a stage would take on this machine: predicted seconds and bytes, and whether both are there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch

from prooflens.durations import asked_time, written_time
from prooflens.engines import get_engine
from prooflens.engines.attack import attack_cost
from prooflens.engines.costs import Cost, Priced
from prooflens.engines.protocol import EngineOptions, Workspace
from prooflens.engines.standings import unfolded
from prooflens.memory import available, written
from prooflens.problem import Problem
from prooflens.queries import Claim, Functional
from prooflens.verdicts.evidence import ATTACK
from prooflens.verdicts.machine import speed_of
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.stages import Stage, default_budget, is_small

LAYER_SECONDS = 120.0
"""How long the portfolio may take for each layer that is asked about, unless a time is given."""

PROOF_SHARE = 0.9
"""Of the time that is left, provers may take this share where an attack comes after them."""

FIRST_ATTACK_SHARE = 0.2
"""Of the time that is left, the short attack before the dear engines may take this share."""

MARGIN = 1.5
"""By how much the time that is recommended exceeds the predicted one."""


@runtime_checkable
class GoesOn(Protocol):
    """An engine whose walk to a layer goes on from its walk to an earlier one, where a caller's workspace holds it."""

    def cost_on(self, problem: Problem, depth: int, size: int, passed: int) -> Cost:
        """Predict what a call takes that goes on from a held walk.

        Args:
            problem: the model and the region.
            depth: the deepest layer whose scores are read, or the number of layers for outputs.
            size: how many forms are asked.
            passed: the layer whose scores the held walk ends at; 0 if there is none.
        """
        ...

    def held_layer(self, problem: Problem, workspace: Workspace | None) -> int:
        """Return the layer whose scores a held walk about this problem ends at; 0 if there is none.

        Args:
            problem: the model and the region.
            workspace: what the caller's calls share.
        """
        ...

    def would_hold(self, problem: Problem, depth: int, options: EngineOptions) -> bool:
        """Return whether a call about the scores of a layer leaves its walk to later calls.

        Args:
            problem: the model and the region.
            depth: the layer.
            options: the memory that may be used.
        """
        ...


def depth_of(problem: Problem, claim: Claim) -> int:
    """Return the deepest layer that a claim reads; the number of layers if it reads outputs.

    Args:
        problem: the model and the region.
        claim: what is claimed.
    """
    if any(f.logits for f in claim.functionals):
        return problem.model.architecture.n_layers
    return max((row.layer for f in claim.functionals for row in f.rows), default=0)


DOUBT = 2.0
"""Predictions are mostly good to this factor: what may fit into the time left is asked, and stopped if it does not."""

CURVED_STEPS = 10_000.0
"""Small steps that a functional takes that is no linear form: programs over the simplex, remainders (measured)."""


def is_margin(functional: Functional) -> bool:
    """Return whether a functional is a linear form without a constant: such are asked in a call of their own.

    Args:
        functional: what is to be bounded.
    """
    return functional.is_linear and functional.constant == 0.0


def form_count(problem: Problem, functionals: Sequence[Functional]) -> int:
    """Return how many linear forms functionals take: one each, or all differences of a row for what is curved, or of an
    output to its rivals.

    Args:
        problem: the model and the region.
        functionals: what is to be bounded.
    """
    if any(f.standing is not None for f in functionals):
        functionals, _ = unfolded(functionals)
    per_row = problem.n_tokens * (problem.n_tokens + 1) // 2
    return sum(1 if f.is_linear else per_row * len(f.rows) for f in functionals)


@dataclass(frozen=True)
class Forecast:
    """What a stage would take.

    Attributes:
        seconds: predicted; None if nobody can tell.
        memory: predicted bytes; None if nobody can tell.
        margins: the part of the seconds that margins take, which are asked in a call of their own.
        others: the part that all other functionals take.
        more: the options that give it twice the time, if it should run out of it.
    """

    seconds: float | None = None
    memory: float | None = None
    margins: float | None = None
    others: float | None = None
    more: Mapping[str, str] = field(default_factory=dict)


NOTHING_EXPECTED = Forecast()
"""The forecast of a stage of which nobody can tell."""


def forecast(
    stage: Stage, problem: Problem, claims: Sequence[Claim], settings: Settings, passed: int | None = None
) -> Forecast:
    """Predict what a stage takes for claims that are all open.

    Args:
        stage: the engine, or the attack.
        problem: the model and the region.
        claims: what is open.
        settings: the budget of the attack, and the workspace that may hold a walk to go on from.
        passed: the layer whose scores such a walk ends at; None for what the workspace holds.
    """
    left = settings.left
    more = {} if left is None else _more_time(2.0 * left, left, settings)
    depth = max((depth_of(problem, claim) for claim in claims), default=0)
    speed = speed_of(problem.model.device)
    if stage.engine == ATTACK:
        budget = (settings.budget or default_budget(problem)).part(stage.share)
        cost = attack_cost(problem, depth, len(claims), budget, not is_small(problem))
        return Forecast(speed.seconds(cost), cost.memory, more=more)
    engine = get_engine(stage.engine)
    if not isinstance(engine, Priced):
        return Forecast(more=more)
    taken, memory = {True: 0.0, False: 0.0}, 0.0
    for linear in taken:
        functionals = [f for claim in claims for f in claim.functionals if is_margin(f) is linear]
        size = form_count(problem, functionals)
        if isinstance(engine, GoesOn):
            held = engine.held_layer(problem, settings.workspace) if passed is None else passed
            cost = engine.cost_on(problem, depth, size, held if held <= depth else 0)
        else:
            cost = engine.cost(problem, depth, size)
        curved = CURVED_STEPS * sum(not f.is_linear for f in functionals)
        taken[linear] = speed.seconds(replace(cost, steps=cost.steps + curved)) if functionals else 0.0
        memory = max(memory, cost.memory)
    return Forecast(sum(taken.values()), memory, taken[True], taken[False], more)


@dataclass(frozen=True)
class Obstacle:
    """Why a stage is not asked, and the options with which it would be."""

    why: str
    options: dict[str, str]


def obstacle(stage: Stage, problem: Problem, expected: Forecast, settings: Settings) -> Obstacle | None:
    """Say why an engine is not asked: too large a problem, too little time or memory; None if it is asked.

    Args:
        stage: the engine.
        problem: the model and the region.
        expected: what it would take.
        settings: what is allowed, and until when.
    """
    if large := stage.too_large(problem):
        return Obstacle(large, {})
    options: dict[str, str] = {}
    why = []
    left = settings.left
    if left is not None and (left <= 0.0 or (expected.seconds or 0.0) > DOUBT * left):
        options |= _more_time(expected.seconds or 0.0, left, settings)
        why.append(f"{written_time(max(left, 0.0))} were left{_on_a_gpu(problem)}")
    allowed = _allowed_memory(problem, settings)
    if allowed is not None and len(settings.engines) > 1 and (expected.memory or 0.0) > allowed:
        options |= more_memory(problem, expected.memory or 0.0)
        why.append(f"{written(allowed)} may be used")
    return Obstacle(" and ".join(why), options) if why else None


def _more_time(seconds: float, left: float, settings: Settings) -> dict[str, str]:
    """The time of a whole call in which a stage would have had enough: all shares grow alike."""
    whole = settings.allotted or LAYER_SECONDS
    share = min(1.0, max(left, 0.0) / whole)
    needed = MARGIN * seconds / share if share > 0.05 else whole + MARGIN * seconds
    return {"time": asked_time(max(needed, 1.1 * whole))}


def more_memory(problem: Problem, need: float) -> dict[str, str]:
    """Return the option that allows so much memory; nothing where the machine does not have it.

    Args:
        problem: the model and the region.
        need: bytes.
    """
    free = available() if problem.model.device.type == "cpu" else None
    if free is not None and need > free:
        return {}
    return {"memory": f"{int(1.05 * need / 1e9) + 1}GB"}


def _allowed_memory(problem: Problem, settings: Settings) -> float | None:
    free = available() if problem.model.device.type == "cpu" else None
    return min((size for size in (settings.memory, free) if size is not None), default=None)


def _on_a_gpu(problem: Problem) -> str:
    """Say that a GPU would be faster, and how to use it where there is one."""
    if problem.model.device.type == "cuda":
        return ""
    return ", --device cuda is faster" if torch.cuda.is_available() else ", a GPU is faster"


def deadline_of(settings: Settings, problem: Problem, claims: Sequence[Claim], times: int = 1) -> Settings:
    """Return settings with a deadline: the one they have, the time that was given, or the portfolio's default.

    Args:
        settings: how claims are decided.
        problem: the model and the region.
        claims: what is asked; the default goes with the number of layers that they read.
        times: how often all of it is asked, each with the portfolio's default.
    """
    if settings.deadline is not None or (settings.time is None and not settings.planned):
        return settings
    layers = {depth_of(problem, claim) for claim in claims}
    seconds = settings.time or LAYER_SECONDS * max(1, len(layers)) * times
    return settings.until(time.monotonic() + seconds, seconds)


def stage_end(stage: Stage, later: Sequence[Stage], settings: Settings) -> Settings:
    """Return the settings of one stage, whose deadline leaves time for the attack after it.

    Args:
        stage: who is asked now.
        later: who is asked after that.
        settings: with the deadline of all stages.
    """
    left = settings.left
    if left is None:
        return settings
    followed = any(other.engine == ATTACK for other in later)
    share = 1.0
    if followed:
        share = FIRST_ATTACK_SHARE if stage.engine == ATTACK else PROOF_SHARE
    return settings.until(time.monotonic() + share * left, settings.allotted)
