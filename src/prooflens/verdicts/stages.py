"""The portfolio as data: which engine is worth asking where, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from prooflens.engines import engine_names
from prooflens.engines.attack import AttackBudget
from prooflens.engines.chebyshev import MOST_FACTORS
from prooflens.engines.crown import crown_work
from prooflens.engines.taylor import taylor_work
from prooflens.errors import EngineError
from prooflens.problem import Problem
from prooflens.queries.rows import suggestion
from prooflens.verdicts.evidence import ATTACK

SMALL_FACTORS = 2000
SMALL_WIDTH = 128
"""Up to this many factors and this width polynomial zonotopes are affordable and attacks may be thorough."""

MOST_WORK = 1e12
"""Multiplications that a stage of the portfolio may take: about a minute on one core."""


def is_small(problem: Problem) -> bool:
    """Whether a problem is small enough for engines that keep one generator per factor."""
    return problem.region.n_factors <= SMALL_FACTORS and problem.model.architecture.d_model <= SMALL_WIDTH


def has_few(problem: Problem) -> bool:
    """Whether a region has so few factors that polynomials in them are affordable: segments, hulls, spans."""
    return problem.region.n_factors <= MOST_FACTORS


@dataclass(frozen=True)
class Stage:
    """One line of the portfolio: an engine, the depths it is asked about, and whether only for small problems."""

    engine: str
    depths: range = range(10**6)
    small_only: bool = False
    share: float = 1.0
    """Of an attack: the share of the whole budget."""
    few: bool | None = None
    """Whether it is for regions of few factors, or for all others; None for both."""
    work: Callable[[Problem, int], float] | None = None
    """About how many multiplications it takes at a depth; beyond `MOST_WORK` it is not asked."""

    def applies(self, problem: Problem, depth: int) -> bool:
        """Whether it is worth asking; depth is the deepest layer read, the number of layers for outputs."""
        known = self.engine == ATTACK or self.engine in engine_names()
        cheap = self.work is None or self.work(problem, depth) <= MOST_WORK
        small = is_small(problem) or not self.small_only
        return known and depth in self.depths and cheap and small and self.few in (None, has_few(problem))


def work_of_lines(problem: Problem, depth: int) -> float:
    """What `crown` costs; where the first scores are exactly quadratic it has nothing to add to `layer0`."""
    architecture = problem.model.architecture
    exact = architecture.norm_place in ("post", "none", "output") and architecture.qk_norm == "none"
    return math.inf if depth == 0 and exact else crown_work(problem, depth)


def work_of_walks(problem: Problem, depth: int) -> float:
    """What `taylor` costs, in the time that one core takes for `MOST_WORK`: minutes are allowed, and a GPU counts."""
    return taylor_work(problem, depth) / (1000.0 if problem.model.device.type == "cuda" else 10.0)


DEEPER = range(1, 10**6)
PORTFOLIO: tuple[Stage, ...] = (
    Stage("layer0", range(1)),
    Stage("interval"),
    Stage(ATTACK, share=0.2),
    Stage("chebyshev", few=True),
    Stage("taylor", DEEPER, few=False, work=work_of_walks),
    Stage("crown", work=work_of_lines),
    Stage("cpz", small_only=True),
    Stage(ATTACK),
)


def stages_of(engine: str) -> tuple[Stage, ...]:
    """Return the stages that a name means: the portfolio for `auto`, the attack alone, or one engine and the attack.

    Raises:
        EngineError: if there is no engine of that name.
    """
    if engine == "auto":
        return PORTFOLIO
    if engine == ATTACK:
        return (Stage(ATTACK),)
    if engine not in engine_names():
        known = ["auto", *engine_names()]
        raise EngineError(
            f"there is no engine {engine!r}{suggestion(str(engine), known) or '; engines: ' + ', '.join(known)}"
        )
    return (Stage(engine), Stage(ATTACK))


def default_budget(problem: Problem) -> AttackBudget:
    """How hard to attack: thorough on small problems, minutes rather than hours on pretrained ones."""
    return AttackBudget(2000, 10, 50) if is_small(problem) else AttackBudget(128, 2, 16)
