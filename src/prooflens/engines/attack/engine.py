"""The engine `attack`; the method is explained in the package's docstring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.attack.search import (
    CHUNK_ELEMENTS,
    AttackBudget,
    AttackSearch,
    Landscape,
    inside,
)
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
            _landscape(problem, targets, self.fast, options), targets, late=lambda: options.late
        )
        search.run(self.budget, self.seed, _corners(self.starts))
        alpha, _ = inside(problem.region, search.alpha)
        values = attained(problem, targets, alpha)
        n = forms.size
        return FormBounds(values[:n], -values[n:], alpha[:n], alpha[n:])


def _landscape(problem: Problem, targets: Targets, fast: bool, options: EngineOptions) -> Landscape:
    """Return what the search evaluates; projections onto constraints need float64."""
    output, exact = targets.logits is not None, problem.model
    if not fast or problem.region.constraints is not None:
        return Landscape.of(problem, targets.layers, output, exact)
    rounded = options.shared("float32 model", exact, lambda: exact.to(dtype=torch.float32))
    return Landscape.of(problem, targets.layers, output, rounded)


def _corners(bounds: FormBounds | None) -> Float[Tensor, "T 1 p"] | None:
    if bounds is None or bounds.lower_corner is None or bounds.upper_corner is None:
        return None
    return torch.cat((bounds.lower_corner, bounds.upper_corner))[:, None]


def attained(problem: Problem, targets: Targets, alpha: Float[Tensor, "T p"]) -> Float[Tensor, " T"]:
    """Evaluate each target at its own point, through the model itself.

    Args:
        problem: the model and the region.
        targets: what to evaluate.
        alpha: the factors of each target's point, shape [T, p].
    """
    if not targets.size:
        return alpha.new_zeros(0)
    landscape = Landscape.of(problem, targets.layers, targets.logits is not None, problem.model)
    targets = targets.to(problem.region.center)
    parts = [
        landscape.values(targets.select(chosen), alpha[chosen][:, None])[:, 0]
        for chosen in torch.arange(targets.size, device=alpha.device).split(landscape.capacity)
    ]
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Witness:
    """A point of the region at which a claim is false.

    Attributes:
        x: the point, shape [S, d].
        alpha: its factors, shape [p].
        values: the claim's functionals there, shape [F].
    """

    x: Float[Tensor, "S d"]
    alpha: Float[Tensor, " p"]
    values: Float[Tensor, " F"]


@dataclass(frozen=True, eq=False)
class AttackResult:
    """What an attack on claims found.

    Attributes:
        witnesses: a point that breaks each claim; None where none was found.
        values: the smallest functional of each claim at the best point found.
        alpha: the factors of that point, shape [T, p].
    """

    witnesses: list[Witness | None]
    values: Float[Tensor, " T"]
    """The smallest functional of each claim at the best point found; ∞ if there was nothing to attack."""
    alpha: Float[Tensor, "T p"]


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
    found: list[Witness | None] = [None] * len(claims)
    center = problem.region.center
    if not any(f.rows or f.logits for claim in claims for f in claim.functionals):
        # nothing that a point could change
        nowhere = center.new_zeros(len(claims), problem.region.n_factors)
        return AttackResult(found, center.new_full((len(claims),), torch.inf), nowhere)
    n_outputs = 1 + max((i for claim in claims for f in claim.functionals for i in f.logits), default=-1)
    if n_outputs:
        n_outputs = int(problem.setting((), output=True).logits.shape[-1])  # type: ignore[union-attr]
    targets = Targets.of_claims(claims, problem.n_tokens, n_outputs)

    def confirm(chosen: Tensor, alpha: Tensor) -> Tensor:
        points = inside(problem.region, alpha)
        for index, factors, x in zip(chosen.tolist(), *points, strict=True):
            found[index] = _witness(problem, claims[index], factors, x)
        return torch.tensor([found[index] is not None for index in chosen.tolist()])

    search = AttackSearch(_landscape(problem, targets, fast, options), targets, confirm, lambda: options.late)
    search.run(budget, seed, _padded(starts, search.alpha))
    alpha, _ = inside(problem.region, search.alpha)
    values = attained(problem, targets, alpha) if targets.n_functionals else search.best
    return AttackResult(found, values, alpha)


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
        at = _values(problem, claims[i], problem.region.point(factors[i]))
        values[i] = at.amin()
        witnesses[i] = None if found is None else _witness(problem, claims[i], found.alpha, found.x)
    order = range(len(claims))
    return AttackResult(
        [witnesses[i] for i in order],
        torch.stack([values[i] for i in order]),
        torch.stack([factors[i] for i in order]),
    )


def _alone(problem: Problem, claim: Claim) -> tuple[Problem, list[Claim]]:
    small, asked = narrowed(problem, claim)
    return small, [asked]


def _values(problem: Problem, claim: Claim, x: Float[Tensor, "S d"]) -> Float[Tensor, " F"]:
    """Evaluate the functionals of a claim at a point."""
    layers = sorted({row.layer for f in claim.functionals for row in f.rows})
    about_output = any(f.logits for f in claim.functionals)
    with torch.no_grad():
        scores, logits = problem.values(x, layers, about_output)
    rows = {row: scores[row.layer][row.head, row.position] for f in claim.functionals for row in f.rows}
    return claim.values(rows, logits)


def _witness(
    problem: Problem, claim: Claim, alpha: Float[Tensor, " p"], x: Float[Tensor, "S d"]
) -> Witness | None:
    """Return the point as a witness, if the claim is false there."""
    values = _values(problem, claim, x)
    return Witness(x, alpha, values) if claim.broken_by(values) else None


def _padded(
    starts: Sequence[Float[Tensor, "K p"] | None] | None, alpha: Float[Tensor, "T p"]
) -> Float[Tensor, "T K p"] | None:
    """Return the starts of all claims, the same number for each; missing ones are the best point known."""
    most = max((len(s) for s in starts or () if s is not None), default=0)
    if starts is None or not most:
        return None
    padded = alpha[:, None].repeat(1, most, 1)
    for row, some in zip(padded, starts, strict=True):
        if some is not None:
            row[: len(some)] = some.to(alpha)
    return padded
