"""Attack on the effect of an edit: the least and the greatest f(M(x)) − f(M′(x)) that points of a region attain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.attack.search import AttackBudget, AttackSearch, Landscape, inside
from prooflens.engines.attack.targets import Targets
from prooflens.engines.bounds import FormBounds
from prooflens.engines.forms import Forms
from prooflens.errors import EngineError
from prooflens.models import OUTPUT
from prooflens.models.program import Program
from prooflens.problem import Problem


@dataclass(frozen=True, eq=False)
class PairLandscape(Landscape):
    """The outputs of two models side by side, as functions of the same factors."""

    edited: Program

    @classmethod
    def of_pair(cls, problem: Problem, edited: Problem) -> PairLandscape:
        """Prepare runs of both models up to their outputs, in their own precision.

        Args:
            problem: the model and the region.
            edited: the other model and the same region.
        """
        one, other = (Landscape.of(asked, (), True, asked.model) for asked in (problem, edited))
        return cls(**vars(one), edited=other.program)

    def observe(self, alpha: Float[Tensor, "... p"]) -> tuple[dict[int, Tensor], Float[Tensor, "... C"]]:
        """Return the outputs of both models at points of the region; differentiable."""
        _, output = super().observe(alpha)
        found = self.edited.run(self.region.point(alpha), [OUTPUT])
        assert output is not None
        return {}, torch.cat((output, self.problem.read_output(found[OUTPUT])), -1)


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
) -> FormBounds:
    """Return attained values of f(M) − f(M′) for every form, and the factors that attain them; no proof.

    Args:
        problem: the model M and the region.
        edited: the model M′ and the same region.
        forms: what is asked of the outputs of both.
        budget: how many samples, restarts and steps.
        seed: seed of the search.
        starts: bounds whose corners the search also starts from, where they have some.

    Raises:
        EngineError: if a form reads attention.
    """
    if forms.logits is None or forms.layers:
        raise EngineError("effects are attacked on outputs and readouts, not on attention scores")
    both = replace(forms, logits=torch.cat((forms.logits, -forms.logits), -1))
    landscape, targets = PairLandscape.of_pair(problem, edited), Targets.of_forms(both, problem.n_tokens)
    search = AttackSearch(landscape, targets)
    search.run(budget, seed, corners_of(starts))
    alpha, _ = inside(problem.region, search.alpha)
    values = landscape.values(search.targets, alpha[:, None])[:, 0]
    n = forms.size
    return FormBounds(values[:n], -values[n:], alpha[:n], alpha[n:])
