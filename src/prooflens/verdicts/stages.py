"""The portfolio as data: which engine is worth asking where, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prooflens.engines import engine_names
from prooflens.engines.attack import AttackBudget
from prooflens.engines.chebyshev import MOST_FACTORS
from prooflens.errors import EngineError
from prooflens.problem import Problem
from prooflens.queries.rows import suggestion
from prooflens.verdicts.evidence import ATTACK

SMALL_FACTORS = 2000
SMALL_WIDTH = 128
"""Up to this many factors and this width polynomial zonotopes are affordable and attacks may be thorough."""


def is_small(problem: Problem) -> bool:
    """Whether a problem is small enough for engines that keep one generator per factor.

    Args:
        problem: the model and the region.
    """
    return problem.region.n_factors <= SMALL_FACTORS and problem.model.architecture.d_model <= SMALL_WIDTH


def has_few(problem: Problem) -> bool:
    """Whether a region has so few factors that polynomials in them are affordable: segments, hulls, spans.

    Args:
        problem: the model and the region.
    """
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
    useful: Callable[[Problem, int], bool] | None = None
    """Whether it can add anything at a depth to the stages before it; None: always."""

    def applies(self, problem: Problem, depth: int) -> bool:
        """Whether it has anything to say; depth is the deepest layer read, the number of layers for outputs.

        Args:
            problem: the model and the region.
            depth: the deepest layer that is read; the number of layers for outputs.
        """
        known = self.engine == ATTACK or self.engine in engine_names()
        adds = self.useful is None or self.useful(problem, depth)
        return known and depth in self.depths and adds and self.few in (None, has_few(problem))

    def too_large(self, problem: Problem) -> str | None:
        """Say why a problem is too large for it, whatever the time; None if it is not.

        Args:
            problem: the model and the region.
        """
        if not self.small_only or is_small(problem):
            return None
        return f"meant for at most {SMALL_FACTORS} factors and width {SMALL_WIDTH}"


def adds_lines(problem: Problem, depth: int) -> bool:
    """Whether `crown` can add anything: not where first scores are exactly quadratic, or cases began with its lines.

    Args:
        problem: the model and the region.
        depth: the deepest layer that is read.
    """
    architecture = problem.model.architecture
    exact = architecture.norm_place in ("post", "none", "output") and architecture.qk_norm == "none"
    return (depth > 0 or not exact) and not cases_first(problem, depth)


def adds_tangents(problem: Problem, depth: int) -> bool:
    """Whether `taylor` can add anything: at layer 0 where `layer0` has no rule for how queries and keys are made.

    Args:
        problem: the model and the region.
        depth: the deepest layer that is read.
    """
    architecture = problem.model.architecture
    return depth > 0 or architecture.qk_norm != "none" or architecture.head_positions


def has_cases(problem: Problem, depth: int) -> bool:
    """Whether cases of ReLUs can add to lines: without norms, ReLUs are where lines lose most.

    Args:
        problem: the model and the region.
        depth: the deepest layer that is read.
    """
    architecture = problem.model.architecture
    return depth > 0 and architecture.activation == "relu" and architecture.norm_place == "none"


def cases_first(problem: Problem, depth: int) -> bool:
    """Whether cases of ReLUs come before `taylor`: where it would take most of the time, and they decide most.

    Args:
        problem: the model and the region.
        depth: the deepest layer that is read.
    """
    return has_cases(problem, depth) and not is_small(problem)


def cases_last(problem: Problem, depth: int) -> bool:
    """Whether cases of ReLUs come after `taylor` and `crown`: on small problems these take no time.

    Args:
        problem: the model and the region.
        depth: the deepest layer that is read.
    """
    return has_cases(problem, depth) and is_small(problem)


PORTFOLIO: tuple[Stage, ...] = (
    Stage("layer0", range(1)),
    Stage("interval"),
    Stage(ATTACK, share=0.2),
    Stage("chebyshev", few=True),
    Stage("beta-crown", useful=cases_first),
    Stage("taylor", few=False, useful=adds_tangents),
    Stage("crown", useful=adds_lines),
    Stage("beta-crown", useful=cases_last),
    Stage("cpz", small_only=True),
    Stage(ATTACK),
)


def stages_of(engine: str) -> tuple[Stage, ...]:
    """Return the stages that a name means: the portfolio for `auto`, the attack alone, or one engine and the attack.

    Args:
        engine: `auto`, `attack`, or the name of an engine.

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
    """How hard to attack: thorough on small problems, minutes rather than hours on pretrained ones.

    Args:
        problem: the model and the region.
    """
    return AttackBudget(2000, 10, 50) if is_small(problem) else AttackBudget(128, 2, 16)
