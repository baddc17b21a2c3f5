"""Claims under attack: what is searched about one prompt, and about several of one length at a time.

Several prompts share every pass of the search: points about all of them go through the model there and back together.
Each prompt has the samples, starts and steps that it has alone, so that only the rounding of the search may differ. A
witness counts only once the model has been run in float64 at it, about its own prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.attack.landscape import Landscape
from prooflens.engines.attack.search import AttackBudget, AttackSearch, inside
from prooflens.engines.attack.targets import Targets
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions
from prooflens.problem import Problem
from prooflens.queries import Claim


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


@dataclass(frozen=True, eq=False)
class AttackCase:
    """Claims about one prompt that an attack tries to break.

    Attributes:
        problem: the model and the region.
        claims: what is claimed.
        starts: factors to start from, for each claim.
    """

    problem: Problem
    claims: Sequence[Claim]
    starts: Sequence[Float[Tensor, "K p"] | None] | None = None

    @cached_property
    def targets(self) -> Targets:
        """What the search makes small."""
        claims, problem = self.claims, self.problem
        n_outputs = 1 + max((i for claim in claims for f in claim.functionals for i in f.logits), default=-1)
        if n_outputs:
            n_outputs = int(problem.setting((), output=True).logits.shape[-1])  # type: ignore[union-attr]
        return Targets.of_claims(claims, problem.n_tokens, n_outputs)

    @property
    def n_starts(self) -> int:
        """How many starts the claim with most of them has."""
        return max((len(some) for some in self.starts or () if some is not None), default=0)

    @property
    def can_change(self) -> bool:
        """Whether a point could change anything that is claimed."""
        return any(f.rows or f.logits for claim in self.claims for f in claim.functionals)

    def is_like(self, other: AttackCase) -> bool:
        """Say whether both can be searched in the same passes: balls of one shape and radius, scores of one layer.

        Args:
            other: claims about another prompt.
        """
        one, two = self.problem, other.problem
        return (
            one.model is two.model
            and one.padding is None
            and two.padding is None
            and _is_ball_like(one, two)
            and self.n_starts == other.n_starts
            and self.targets.layers == other.targets.layers
            and self.targets.heads is not None
            and other.targets.heads is not None
        )


def _is_ball_like(one: Problem, two: Problem) -> bool:
    """Whether two regions are boxes with the same radii about two centres."""
    radii = one.region.radius, two.region.radius
    free = one.region.constraints is None and two.region.constraints is None
    return free and radii[0] is not None and radii[1] is not None and torch.equal(radii[0], radii[1])


def attack_cases(
    cases: Sequence[AttackCase],
    budget: AttackBudget,
    seed: int = 0,
    fast: bool = False,
    options: EngineOptions = NO_OPTIONS,
) -> list[AttackResult]:
    """Try to falsify every claim of several prompts, those that are alike in the same passes through the model.

    Args:
        cases: claims about each prompt, without tails over a vocabulary.
        budget: how many samples, restarts and steps, for every prompt.
        seed: seed of the search; every prompt has the points that it has alone.
        fast: search in float32.
        options: the deadline; what is found by then is returned.
    """
    groups: list[list[int]] = []
    for number, case in enumerate(cases):
        alike = next((group for group in groups if case.is_like(cases[group[0]])), None)
        if alike is None:
            groups.append([number])
        else:
            alike.append(number)
    results = dict[int, AttackResult]()
    for group in groups:
        found = _attack_alike([cases[number] for number in group], budget, seed, fast, options)
        results |= dict(zip(group, found, strict=True))
    return [results[number] for number in range(len(cases))]


def _attack_alike(
    cases: list[AttackCase], budget: AttackBudget, seed: int, fast: bool, options: EngineOptions
) -> list[AttackResult]:
    """Attack cases that are alike, or a single one."""
    problem = cases[0].problem
    if not cases[0].can_change:
        return [_nothing(case) for case in cases]
    claims = [claim for case in cases for claim in case.claims]
    found: list[Witness | None] = [None] * len(claims)
    targets = cases[0].targets if len(cases) == 1 else _targets_of(cases)

    def confirm(chosen: Tensor, alpha: Tensor) -> Tensor:
        whose = targets.prompt[chosen.cpu()]
        for number in whose.unique().tolist():
            own, asked = (whose == number).to(chosen.device), cases[number].problem
            points = inside(asked.region, alpha[own])
            for index, factors, x in zip(chosen[own].tolist(), *points, strict=True):
                found[index] = witness_at(asked, claims[index], factors, x)
        return torch.tensor([found[index] is not None for index in chosen.tolist()])

    landscape = landscape_of(problem, targets, fast, options)
    if cases[1:]:
        landscape = landscape.about(torch.stack([case.problem.region.center for case in cases]))
    search = AttackSearch(landscape, targets, confirm, lambda: options.late)
    starts = [some for case in cases for some in case.starts or [None] * len(case.claims)]
    search.run(budget, seed, _padded(starts, search.alpha))
    results, first = list[AttackResult](), 0
    for case in cases:
        own = slice(first, first + len(case.claims))
        alpha, _ = inside(case.problem.region, search.alpha[own])
        reached = (
            attained(case.problem, case.targets, alpha) if case.targets.n_functionals else search.best[own]
        )
        results.append(AttackResult(found[own], reached, alpha))
        first += len(case.claims)
    return results


def _targets_of(cases: list[AttackCase]) -> Targets:
    """Return the targets of all cases, each with the number of its case."""
    claims = [claim for case in cases for claim in case.claims]
    whose = torch.arange(len(cases)).repeat_interleave(torch.tensor([len(case.claims) for case in cases]))
    return replace(Targets.of_claims(claims, cases[0].problem.n_tokens, 0), prompt=whose)


def _nothing(case: AttackCase) -> AttackResult:
    """What is found where no point could change anything."""
    center, claims = case.problem.region.center, len(case.claims)
    nowhere = center.new_zeros(claims, case.problem.region.n_factors)
    return AttackResult([None] * claims, center.new_full((claims,), torch.inf), nowhere)


def landscape_of(problem: Problem, targets: Targets, fast: bool, options: EngineOptions) -> Landscape:
    """Return what the search evaluates; projections onto constraints need float64.

    Args:
        problem: the model and the region.
        targets: what the search makes small.
        fast: search in float32.
        options: the workspace that may hold the model in float32.
    """
    output, exact = targets.logits is not None, problem.model
    if not fast or problem.region.constraints is not None:
        return Landscape.of(problem, targets.layers, output, exact)
    rounded = options.shared("float32 model", exact, lambda: exact.to(dtype=torch.float32))
    return Landscape.of(problem, targets.layers, output, rounded)


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


def values_at(problem: Problem, claim: Claim, x: Float[Tensor, "S d"]) -> Float[Tensor, " F"]:
    """Evaluate the functionals of a claim at a point.

    Args:
        problem: the model and the region.
        claim: what is claimed.
        x: the point.
    """
    layers = sorted({row.layer for f in claim.functionals for row in f.rows})
    about_output = any(f.logits for f in claim.functionals)
    with torch.no_grad():
        scores, logits = problem.values(x, layers, about_output)
    rows = {row: scores[row.layer][row.head, row.position] for f in claim.functionals for row in f.rows}
    return claim.values(rows, logits)


def witness_at(
    problem: Problem, claim: Claim, alpha: Float[Tensor, " p"], x: Float[Tensor, "S d"]
) -> Witness | None:
    """Return the point as a witness, if the claim is false there.

    Args:
        problem: the model and the region.
        claim: what is claimed.
        alpha: the point's factors.
        x: the point itself, in the region.
    """
    values = values_at(problem, claim, x)
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
