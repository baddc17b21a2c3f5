"""The engine `attack`; the method is explained in the package's docstring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.attack.cases import (
    AttackCase,
    AttackResult,
    Witness,
    attack_cases,
    attained,
    landscape_of,
    values_at,
    witness_at,
)
from prooflens.engines.attack.landscape import CHUNK_ELEMENTS
from prooflens.engines.attack.search import AttackBudget, AttackSearch, inside
from prooflens.engines.attack.targets import Targets
from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.costs import FORM_STEPS, Cost, block_weights, weights_before
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions, register
from prooflens.engines.rivals import is_tail
from prooflens.engines.vocabulary import narrowed
from prooflens.problem import Problem
from prooflens.queries import Claim

BUDGETS: Mapping[str, AttackBudget] = MappingProxyType(
    {
        "synthetic": AttackBudget(500_000, 20, 50),
        "multilayer": AttackBudget(500_000, 20, 50),
        "bert-output": AttackBudget(2_000, 5, 30),
        "layer0": AttackBudget(5_000, 10, 50),
        "gpt2-layer1": AttackBudget(5_000, 10, 50),
        "next-token": AttackBudget(2_000, 10, 50),
        "pruning": AttackBudget(0, 20, 50),
    }
)
"""The rows of Tab. `mc_budgets`, the larger number where the paper gives a range."""


@register("attack")
@dataclass(frozen=True, eq=False)
class Attack:
    """Search for the smallest and largest values of linear forms; the values are attained, not bounds.

    Attributes:
        name: the engine's name in the registry.
        guarantee: estimated.
        budget: how many samples, restarts and steps.
        seed: seed of the search.
        fast: search in float32.
        starts: another engine's bounds, whose corners PGD also starts from.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(0, 1, 3), 2, 1.0), (0, Row(0, 1, 3), 0, -1.0)], size=1)
        >>> found = Attack(budget=AttackBudget(100, 2, 10)).bound_forms(problem, margin)
        >>> 0.32 < found.lower.item() < found.upper.item() < 0.40
        True
    """

    name: str = "attack"
    guarantee: Guarantee = Guarantee.ESTIMATED
    budget: AttackBudget = BUDGETS["layer0"]
    seed: int = 0
    fast: bool = False
    """Search in float32; reported values are float64 all the same."""
    starts: FormBounds | None = None
    """Another engine's bounds, whose corners PGD also starts from."""

    def refuses(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> str | None:
        """Refuse nothing."""
        return None

    def bound_forms(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> FormBounds:
        """Return attained values of every form, and the factors that attain them.

        Args:
            problem: the model and the region.
            forms: what to search.
            options: the deadline; memory is not looked at.
        """
        targets = Targets.of_forms(forms, problem.n_tokens)
        search = AttackSearch(
            landscape_of(problem, targets, self.fast, options), targets, late=lambda: options.late
        )
        search.run(self.budget, self.seed, _corners(self.starts))
        alpha, _ = inside(problem.region, search.alpha)
        values = attained(problem, targets, alpha)
        n = forms.size
        return FormBounds(values[:n], -values[n:], alpha[:n], alpha[n:])


def _corners(bounds: FormBounds | None) -> Float[Tensor, "T 1 p"] | None:
    if bounds is None or bounds.lower_corner is None or bounds.upper_corner is None:
        return None
    return torch.cat((bounds.lower_corner, bounds.upper_corner))[:, None]


def break_claims(
    problem: Problem,
    claims: Sequence[Claim],
    budget: AttackBudget,
    seed: int = 0,
    starts: Sequence[Float[Tensor, "K p"] | None] | None = None,
    fast: bool = False,
) -> list[Witness | None]:
    """Return the witnesses of `attack_claims`; None means that nothing was found.

    Args:
        problem: the model and the region.
        claims: what is claimed.
        budget: how many samples, restarts and steps.
        seed: seed of the search.
        starts: factors to start from, for each claim.
        fast: search in float32.
    """
    return attack_claims(problem, claims, budget, seed, starts, fast).witnesses


def attack_claims(
    problem: Problem,
    claims: Sequence[Claim],
    budget: AttackBudget,
    seed: int = 0,
    starts: Sequence[Float[Tensor, "K p"] | None] | None = None,
    fast: bool = False,
    options: EngineOptions = NO_OPTIONS,
) -> AttackResult:
    """Try to falsify every claim; a claim is left alone as soon as it is broken.

    Each claim's smallest functional is made small. A break counts if `claim.broken_by` is true at a float64 point of
    the region: a value ≤ 0 where > 0 is claimed, or a value < 0 where ≥ 0 is, by more than a threshold's rounding. Of
    a whole vocabulary the nearest tokens are attacked.

    Args:
        problem: the model and the region.
        claims: what is claimed.
        budget: how many samples, restarts and steps.
        seed: seed of the search.
        starts: factors to start from, for each claim.
        fast: search in float32.
        options: the deadline; what is found by then is returned.
    """
    if tails := [i for i, claim in enumerate(claims) if any(map(is_tail, claim.functionals))]:
        return _attack_tails(problem, claims, tails, budget, seed, starts, fast, options)
    case = AttackCase(problem, claims, starts)
    return attack_cases([case], budget, seed, fast, options)[0]


CONVERSION = 0.01
"""Small steps that converting a weight to float32 counts for (measured)."""


def attack_cost(problem: Problem, depth: int, claims: int, budget: AttackBudget, fast: bool) -> Cost:
    """Predict what `attack_claims` takes: samples once through the model, and every step of PGD there and back.

    Args:
        problem: the model and the region.
        depth: the deepest layer whose scores are read, or the number of layers for outputs.
        claims: how many claims are attacked.
        budget: how many samples, restarts and steps.
        fast: search in float32.
    """
    architecture, S = problem.model.architecture, problem.n_tokens
    runs = budget.samples + 3.0 * claims * (budget.restarts + 1) * budget.steps
    values = S * (12 * architecture.d_model + 4 * architecture.d_ff) + 4 * architecture.n_heads * S * S
    share, width = (0.5, 4.0) if fast else (1.0, 8.0)
    traffic = runs * width * 4 * (depth + 1) * values
    steps = 2000.0 * (depth + 1) * (budget.steps + 1) + FORM_STEPS * claims
    if fast:  # the model is converted first
        steps += CONVERSION * architecture.n_layers * block_weights(architecture)
    memory = 2.0 * width * min(CHUNK_ELEMENTS, runs * values * (depth + 1))
    return Cost(share * runs * S * weights_before(architecture, depth), traffic, steps, memory)


def _attack_tails(
    problem: Problem,
    claims: Sequence[Claim],
    tails: Sequence[int],
    budget: AttackBudget,
    seed: int,
    starts: Sequence[Float[Tensor, "K p"] | None] | None,
    fast: bool,
    options: EngineOptions,
) -> AttackResult:
    """Attack claims with a tail one by one, on the outputs that matter; what is found is run through the model."""
    starts = starts or [None] * len(claims)
    others = [i for i in range(len(claims)) if i not in tails]
    rest = attack_claims(
        problem, [claims[i] for i in others], budget, seed, [starts[i] for i in others], fast, options
    )
    witnesses = dict(zip(others, rest.witnesses, strict=True))
    values, factors = dict(zip(others, rest.values, strict=True)), dict(zip(others, rest.alpha, strict=True))
    for i in tails:
        result = attack_claims(*_alone(problem, claims[i]), budget, seed, [starts[i]], fast, options)
        found = result.witnesses[0]
        factors[i] = result.alpha[0] if found is None else found.alpha
        at = values_at(problem, claims[i], problem.region.point(factors[i]))
        values[i] = at.amin()
        witnesses[i] = None if found is None else witness_at(problem, claims[i], found.alpha, found.x)
    order = range(len(claims))
    return AttackResult(
        [witnesses[i] for i in order],
        torch.stack([values[i] for i in order]),
        torch.stack([factors[i] for i in order]),
    )


def _alone(problem: Problem, claim: Claim) -> tuple[Problem, list[Claim]]:
    small, asked = narrowed(problem, claim)
    return small, [asked]
