r"""The effect of an edit: bounds of f(M(x)) − f(M′(x)) over a region that both models read.

Alone, each model is bounded by itself and the ends are subtracted. Jointly, an engine subtracts what both have in
common first:

| engine | what is subtracted before bounds are taken |
|---|---|
| `chebyshev` | the polynomials of both on the same piece (`chebyshev.readings.EffectReading`) |
| `taylor` | values, linear parts, Hessians, and covectors at all sites before the edit (`taylor.effects`) |
| others | nothing: both alone |

An engine gives joint bounds through a method `bound_effects(problem, edited, forms)`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from prooflens.engines.bounds import FormBounds, tighter
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import NO_OPTIONS, Engine, EngineOptions
from prooflens.errors import EngineError
from prooflens.numerics import down, up
from prooflens.problem import Problem


@runtime_checkable
class BoundsEffects(Protocol):
    """An engine that bounds differences of two models jointly."""

    def bound_effects(
        self,
        problem: Problem,
        edited: Problem,
        forms: Forms,
        options: EngineOptions = NO_OPTIONS,
        other: Forms | None = None,
    ) -> FormBounds | None:
        """Bound f(M) − f′(M′) of every form over the whole region; None if it cannot be done jointly.

        Args:
            problem: the model M and the region.
            edited: the model M′ and the same region.
            forms: f, what is asked of M.
            options: memory that may be used, and who is told of progress.
            other: f′, what is asked of M′, of the same layers; None for the same forms.
        """
        ...


def bound_effects(
    engine: Engine,
    problem: Problem,
    edited: Problem,
    forms: Forms,
    options: EngineOptions = NO_OPTIONS,
    alone: bool = False,
    other: Forms | None = None,
) -> FormBounds:
    """Bound the difference of every form between two models, f(M(x)) − f′(M′(x)), with the engine's guarantee.

    Args:
        engine: who bounds.
        problem: the model M and the region.
        edited: the model M′ and the same region.
        forms: f, what is asked of M.
        options: memory that may be used, and who is told of progress.
        alone: bound both alone as well and take the better ends, so that a joint bound is never looser.
        other: f′, what is asked of M′, of the same layers; None for the same forms.

    Raises:
        EngineError: if the engine refuses, or the two are not about the same inputs and outputs.
    """
    check_pair(problem, edited)
    joint = None
    if isinstance(engine, BoundsEffects):
        joint = engine.bound_effects(problem, edited, forms, options, other)
    if joint is not None and not alone:
        return joint
    apart = both_alone(engine, problem, edited, forms, options, other)
    if joint is None:
        return apart
    ends = (joint.lower, joint.upper), (apart.lower, apart.upper)
    lower, upper, *_ = tighter(*ends, engine.guarantee, f"{engine.name}, jointly and alone,")
    return FormBounds(lower, upper, joint.lower_corner, joint.upper_corner)


def both_alone(
    engine: Engine,
    problem: Problem,
    edited: Problem,
    forms: Forms,
    options: EngineOptions = NO_OPTIONS,
    other: Forms | None = None,
) -> FormBounds:
    """Bound two models each by itself and subtract the ends.

    Args:
        engine: who bounds.
        problem: the model M and the region.
        edited: the model M′ and the same region.
        forms: what is asked of M.
        options: memory that may be used, and who is told of progress.
        other: what is asked of M′; None for the same forms.
    """
    check_pair(problem, edited)
    one = engine.bound_forms(problem, forms, options)
    two = engine.bound_forms(edited, forms if other is None else other, options)
    lower, upper = down(one.lower - two.upper), up(one.upper - two.lower)
    return FormBounds(lower, upper, one.lower_corner, one.upper_corner)


def check_pair(problem: Problem, edited: Problem) -> None:
    """Raise an `EngineError` unless two problems are about the same inputs, and models with as many outputs.

    Args:
        problem: a model and a region.
        edited: another model and the same region.
    """
    one, other = problem.model.architecture, edited.model.architecture
    if problem.region is not edited.region:
        raise EngineError("an effect is over one region: give both models the same one")
    padded = [p.padding if p.padding is not None else torch.ones(p.n_tokens) for p in (problem, edited)]
    if one != other or not torch.equal(*(mask.bool().cpu() for mask in padded)):
        raise EngineError(f"{edited.model.name} is no edit of {problem.model.name}: they read other inputs")
