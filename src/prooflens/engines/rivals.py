"""One output against all others, for engines that bound every margin by themselves.

Most engines bound the vector that the head reads, once, and the margins over a vocabulary through it (`vocabulary`). An
engine that cuts its region has another enclosure on every piece, and takes all margins along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from prooflens.engines.bounds import Bounds, FormBounds, Tail
from prooflens.engines.forms import forms_of
from prooflens.engines.protocol import NO_OPTIONS, Engine, EngineOptions, Stopwatch
from prooflens.numerics import down, up
from prooflens.problem import Problem
from prooflens.queries import Functional
from prooflens.queries.functionals import LargestLogit, Logit


def is_tail(functional: Functional) -> bool:
    """Say whether a functional is a winner's margin over the largest of many outputs."""
    return any(isinstance(atom, LargestLogit) for _, atom in functional.terms)


def tail_parts(functional: Functional) -> tuple[int, tuple[int, ...]]:
    """Return the winner, and the outputs that are not in the tail."""
    match functional.terms:
        case ((1.0, Logit(index=winner)), (-1.0, LargestLogit(but=left))):
            return winner, left
    raise AssertionError(f"{functional.name!r} is no tail")


@runtime_checkable
class BoundsRivals(Protocol):
    """An engine that bounds an output's margins over all others by itself: no single enclosure would do for it."""

    def bound_rivals(self, problem: Problem, winner: int, options: EngineOptions = NO_OPTIONS) -> FormBounds:
        """Bound logit(winner) − logit(c) for every output c over the whole region."""
        ...


def _rivals(
    engine: BoundsRivals, problem: Problem, functionals: Sequence[Functional], options: EngineOptions
) -> tuple[Tensor, Tensor, Tail]:
    """Bound a winner's margins, over named outputs and over the tail, in one go.

    Args:
        engine: who is asked.
        problem: the model and the region.
        functionals: one tail, and margins of the same winner.
        options: memory that may be used, and who is told of progress.
    """
    winner, _ = tail_parts(next(f for f in functionals if is_tail(f)))
    found = engine.bound_rivals(problem, winner, options)
    lower, upper = (torch.empty(len(functionals), dtype=torch.float64) for _ in range(2))
    tail = Tail()
    for i, functional in enumerate(functionals):
        if is_tail(functional):
            rest = torch.ones(len(found.lower), dtype=torch.bool)
            rest[list(tail_parts(functional)[1])] = False
            low, high = found.lower.cpu()[rest], found.upper.cpu()[rest]
            open_ = int((~(low > 0.0)).sum())
            tail = Tail(direct=len(low) - open_, open=open_)
        else:
            rival = next(
                atom.index for weight, atom in functional.terms if isinstance(atom, Logit) and weight < 0
            )
            low, high = found.lower.cpu()[[rival]], found.upper.cpu()[[rival]]
        lower[i], upper[i] = down(low.min() + functional.constant), up(high.min() + functional.constant)
    return lower, upper, tail


def _is_margin_of(functional: Functional, winner: int) -> bool:
    """Whether a functional is a winner's margin over one output."""
    match functional.terms:
        case ((1.0, Logit(index=first)), (-1.0, Logit())):
            return first == winner
    return False


def bound_by_itself(
    engine: Engine, problem: Problem, functionals: Sequence[Functional], options: EngineOptions = NO_OPTIONS
) -> Bounds | None:
    """Bound functionals of the output by an engine that needs no enclosure of what the head reads.

    Args:
        engine: who is asked; a `BoundsRivals`.
        problem: the model and the region.
        functionals: functionals of the outputs.
        options: memory that may be used, and who is told of progress.

    Returns:
        The bounds; None for tails of several winners, or with other functionals among them.
    """
    watch = Stopwatch(problem.model.device)
    tails = [f for f in functionals if is_tail(f)]
    if not tails:
        forms = replace(forms_of(functionals, len(problem.model.head[0])), signs=True)
        found = engine.bound_forms(problem, forms, options)
        constants = torch.tensor([f.constant for f in functionals], dtype=torch.float64)
        return Bounds(
            down(found.lower.cpu() + constants),
            up(found.upper.cpu() + constants),
            engine.guarantee,
            engine.name,
            watch.seconds(),
            found.lower_corner,
            found.upper_corner,
            cover=None if bool(constants.any()) else found.cover,
        )
    winner = tail_parts(tails[0])[0]
    same = len(tails) == 1 and all(is_tail(f) or _is_margin_of(f, winner) for f in functionals)
    if not same or not isinstance(engine, BoundsRivals):
        return None
    lower, upper, tail = _rivals(engine, problem, functionals, options)
    return Bounds(lower, upper, engine.guarantee, engine.name, watch.seconds(), tail=tail)
