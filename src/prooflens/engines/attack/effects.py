"""Attack on the effect of an edit: the least and the greatest f(M(x)) − f(M′(x)) that points of a region attain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.attack.landscape import Landscape
from prooflens.engines.attack.search import AttackBudget, AttackSearch, inside
from prooflens.engines.attack.targets import Targets
from prooflens.engines.bounds import FormBounds
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions
from prooflens.errors import EngineError
from prooflens.models import OUTPUT
from prooflens.models.program import Program
from prooflens.problem import Problem

Metrics = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What is measured on a model and on an edit of it, from the outputs of both."""


@dataclass(frozen=True, eq=False)
class PairLandscape(Landscape):
    """The outputs of two models side by side, as functions of the same factors."""

    edited: Program = field(kw_only=True)

    @classmethod
    def of_pair(cls, problem: Problem, edited: Problem) -> PairLandscape:
        """Prepare runs of both models up to their outputs, in their own precision.

        Args:
            problem: the model and the region.
            edited: the other model and the same region.
        """
        one, other = (Landscape.of(asked, (), True, asked.model) for asked in (problem, edited))
        return cls(**vars(one), edited=other.program)

    def observe(self, x: Float[Tensor, "... S d"]) -> tuple[dict[int, Tensor], Float[Tensor, "... C"]]:
        """Return the outputs of both models at points; differentiable."""
        _, output = super().observe(x)
        found = self.edited.run(x, [OUTPUT])
        assert output is not None
        return {}, torch.cat((output, self.problem.read_output(found[OUTPUT])), -1)


@dataclass(frozen=True, eq=False)
class MetricLandscape(PairLandscape):
    """The effect on a metric of both outputs, as the one output of a model.

    Attributes:
        metrics: what is measured on both models, from the outputs of both; differentiable.
    """

    metrics: Metrics = field(kw_only=True)

    def observe(self, x: Float[Tensor, "... S d"]) -> tuple[dict[int, Tensor], Float[Tensor, "... 1"]]:
        """Return the effect at points; differentiable."""
        _, outputs = super().observe(x)
        first, second = self.metrics(*outputs.chunk(2, -1))
        return {}, (first - second)[..., None]


def corners_of(known: Sequence[FormBounds]) -> Float[Tensor, "T K p"] | None:
    """Return the corners of all bounds that have some, for lower and upper ends of every form; None if none has.

    Args:
        known: bounds of the same forms.
    """
    found = [
        torch.cat((bounds.lower_corner, bounds.upper_corner))
        for bounds in known
        if bounds.lower_corner is not None and bounds.upper_corner is not None
    ]
    return torch.stack(found, 1) if found else None


def attack_effects(
    problem: Problem,
    edited: Problem,
    forms: Forms,
    budget: AttackBudget,
    seed: int = 0,
    starts: Sequence[FormBounds] = (),
    options: EngineOptions = NO_OPTIONS,
) -> FormBounds:
    """Return attained values of f(M) − f(M′) for every form, and the factors that attain them; no proof.

    Args:
        problem: the model M and the region.
        edited: the model M′ and the same region.
        forms: what is asked of the outputs of both.
        budget: how many samples, restarts and steps.
        seed: seed of the search.
        starts: bounds whose corners the search also starts from, where they have some.
        options: the deadline; what is found by then is returned.

    Raises:
        EngineError: if a form reads attention.
    """
    if forms.logits is None or forms.layers:
        raise EngineError("effects are attacked on outputs and readouts, not on attention scores")
    both = replace(forms, logits=torch.cat((forms.logits, -forms.logits), -1))
    landscape, targets = PairLandscape.of_pair(problem, edited), Targets.of_forms(both, problem.n_tokens)
    return _searched(landscape, targets, budget, seed, starts, options)


def attack_metric(
    problem: Problem,
    edited: Problem,
    metrics: Metrics,
    budget: AttackBudget,
    seed: int = 0,
    starts: Sequence[FormBounds] = (),
    options: EngineOptions = NO_OPTIONS,
) -> FormBounds:
    """Return the least and the greatest m(M) − m(M′) that points were found to have, and their factors; no proof.

    Args:
        problem: the model M and the region.
        edited: the model M′ and the same region.
        metrics: m of both models, from the outputs of both; differentiable.
        budget: how many samples, restarts and steps.
        seed: seed of the search.
        starts: bounds of the effect whose corners the search also starts from, where they have some.
        options: the deadline; what is found by then is returned.
    """
    pair = PairLandscape.of_pair(problem, edited)
    one = replace(Forms.of([], 1), logits=torch.ones(1, 1, dtype=torch.float64))
    landscape = MetricLandscape(**vars(pair), metrics=metrics)
    return _searched(landscape, Targets.of_forms(one, problem.n_tokens), budget, seed, starts, options)


def _searched(
    landscape: PairLandscape,
    targets: Targets,
    budget: AttackBudget,
    seed: int,
    starts: Sequence[FormBounds],
    options: EngineOptions,
) -> FormBounds:
    """What points attain of targets, the first half those of the forms, the second those of their negatives."""
    search = AttackSearch(landscape, targets, late=lambda: options.late)
    search.run(budget, seed, corners_of(starts))
    alpha, _ = inside(landscape.region, search.alpha)
    values = landscape.values(search.targets, alpha[:, None])[:, 0]
    n = targets.size // 2
    return FormBounds(values[:n], -values[n:], alpha[:n], alpha[n:])
