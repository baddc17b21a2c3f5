r"""The search behind `attack`: samples, then projected gradient descent on every target at once.

Minimise v_t(α) over α ∈ [−1, 1]ᵖ (and the region's constraints) for targets t = 1 … T.

1. **Samples** of the region, half at corners and half uniform; all targets are read off the same forward pass.
2. **PGD** with R restarts per target, all targets and restarts in one batch per step:
   α ← Π(α − η_k d), η_k from 1 to 0 along a half cosine, d = sign ∇v in even restarts (sign steps) and the sign of
   the running mean μd + ∇v/‖∇v‖₁ in odd ones (momentum steps). Under constraints the slopes themselves, projected onto
   the equalities, take the place of their signs.
   Starts: the sign of the gradient at the centre, one for each functional of a target, nearest first; the best sample;
   the corners that the caller gives; random corners.

It may run in float32. What it returns is moved into the region and is to be evaluated again in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.engines.attack.landscape import CHUNK_ELEMENTS, Landscape
from prooflens.engines.attack.targets import Targets
from prooflens.errors import EngineError
from prooflens.regions import Region

CORNER_SHARE = 0.5
"""The share of samples at corners of the region (the paper: half corner-biased, half uniform)."""

MOMENTUM = 0.9
"""μ, the share of the running mean of gradients that is kept from step to step."""

SHRINKS = tuple(2.0**-exponent for exponent in (50, 44, 38, 32, 26, 20))
"""By how much, relatively, factors are pulled in if rounding puts a point outside the region."""


@dataclass(frozen=True)
class AttackBudget:
    """How hard an attack tries.

    Attributes:
        samples: how many points are sampled.
        restarts: how often PGD starts for each target.
        steps: how many PGD steps each start takes.
    """

    samples: int
    restarts: int
    steps: int

    def __post_init__(self) -> None:
        if self.samples < 0 or self.restarts < 0 or self.steps < 0:
            raise EngineError(f"a budget has no negative numbers, got {self}")

    def part(self, share: float) -> AttackBudget:
        """Return a share of this budget, at least one of everything that it has."""
        if share == 1.0:
            return self
        whole = (self.samples, self.restarts, self.steps)
        return AttackBudget(*(min(n, max(1, round(share * n))) for n in whole))


def inside(
    region: Region, alpha: Float[Tensor, "n p"]
) -> tuple[Float[Tensor, "n p"], Float[Tensor, "n S d"]]:
    """Return factors near the given ones whose float points x₀ + Gα lie in the region, and those points."""
    alpha = alpha.to(region.center).clamp(-1.0, 1.0)
    x = region.point(alpha)
    if region.radius is None:
        return alpha, x
    for shrink in (*SHRINKS, 1.0):
        outside = ((x - region.center).abs() > region.radius).flatten(-2)[..., region.moving]
        if not bool(outside.any()):
            break
        alpha = torch.where(outside, alpha * (1.0 - shrink), alpha)
        x = region.point(alpha)
    return alpha, x


class _Descent(NamedTuple):
    """Targets that go down together, their numbers in the whole search, and what they need of the model."""

    landscape: Landscape
    targets: Targets
    chunk: Int[Tensor, " T"]


Confirm = Callable[[Int[Tensor, " M"], Float[Tensor, "M p"]], Bool[Tensor, " M"]]
"""Told which targets seem to be below 0 and where; returns which of them are done."""


@dataclass(eq=False)
class AttackSearch:
    """The smallest values found so far and where; targets that `confirm` is done with drop out."""

    landscape: Landscape
    targets: Targets
    confirm: Confirm | None = None
    late: Callable[[], bool] = lambda: False
    """Whether it is time to stop; what was found by then is kept."""

    def __post_init__(self) -> None:
        center = self.landscape.region.center
        self.targets = self.targets.to(center)
        self.best = center.new_full((self.targets.size,), torch.inf)
        self.alpha = center.new_zeros(self.targets.size, self.landscape.region.n_factors)
        self.open = self.targets.owner.bincount(minlength=self.targets.size) > 0
        self._known = self._one_feasible()

    def run(self, budget: AttackBudget, seed: int, starts: Float[Tensor, "T K p"] | None = None) -> None:
        """Spend a budget.

        Args:
            budget: samples, restarts and steps.
            seed: seed of the search.
            starts: factors to start from, shape [T, K, p]; None for none.
        """
        if not self.targets.n_functionals:
            return
        self._sample(budget.samples, seed)
        restarts = budget.restarts + (0 if starts is None else starts.shape[1])
        if not restarts:
            return
        for group, members in self._groups():
            for number, chunk in self._parts(group, members, restarts):
                if len(chunk) and not self.late():
                    given = None if starts is None else starts.to(self.alpha)[chunk]
                    descent = _Descent(group, self._chosen(group, chunk), chunk)
                    self._descend(descent, self._starts(descent, budget, seed + number, given), budget.steps)

    def _parts(
        self, group: Landscape, members: Int[Tensor, " M"], restarts: int
    ) -> Iterator[tuple[int, Int[Tensor, " N"]]]:
        """Yield open targets that go down together, and which part of their prompts' targets they are.

        The targets of each prompt are cut as they would be without the others, so that they start at the same points.
        """
        prompt, most = self.targets.prompt, group.capacity
        cut: list[tuple[Tensor, ...]] = []
        for number in prompt[members].unique().tolist():
            own = prompt == number
            functionals = max(1, int(own[self.targets.owner].sum()) // max(1, int(own.sum())))
            step = max(1, group.capacity // max(restarts, functionals))
            cut.append(members[own[members]].split(step))
            most = min(most, step)
        for number, parts in enumerate(itertools.zip_longest(*cut, fillvalue=members[:0])):
            held = members[:0]
            for part in parts:
                part = part[self.open[part]]
                if len(held) + len(part) > most:
                    yield number, held
                    held = members[:0]
                held = torch.cat((held, part))
            yield number, held

    def _groups(self) -> list[tuple[Landscape, Int[Tensor, " M"]]]:
        """Return targets with what they need of the model: those of one head need no other head of the last layer."""
        everyone = torch.arange(self.targets.size, device=self.open.device)
        if self.targets.heads is None:
            return [(self.landscape, everyone)]
        heads = torch.tensor(self.targets.heads, device=self.open.device)
        return [
            (self.landscape.of_one_head(head), everyone[heads == head])
            for head in sorted(set(self.targets.heads) - {-1})
        ]

    def _chosen(self, group: Landscape, chunk: Tensor) -> Targets:
        chosen = self.targets.select(chunk)
        return chosen if group is self.landscape else chosen.of_one_head()

    def _one_feasible(self) -> Float[Tensor, "1 p"]:
        """Return the centre, or the first sample that satisfies the constraints."""
        region = self.landscape.region
        center = self.alpha[:1] * 0 if len(self.alpha) else region.center.new_zeros(1, region.n_factors)
        for candidate in (center, region.sample(64, seed=0)[1]):
            if len(found := region.feasible(candidate)):
                return found[:1]
        raise EngineError("no point of the region was found: its constraints may contradict each other")

    def _record(self, chunk: Tensor, values: Float[Tensor, "T R"], alpha: Float[Tensor, "T R p"]) -> Tensor:
        """Keep improvements; return which targets of the chunk are still open."""
        least, place = values.nan_to_num(torch.inf).min(-1)
        better = least < self.best[chunk]
        where = (
            alpha[0, place]
            if alpha.shape[0] == 1
            else alpha[torch.arange(len(chunk), device=place.device), place]
        )
        self.best[chunk] = torch.where(better, least, self.best[chunk])
        self.alpha[chunk] = torch.where(better[:, None], where, self.alpha[chunk])
        below = chunk[(least <= 0) & better & self.open[chunk]]
        if self.confirm is not None and len(below):
            done = self.confirm(below, self.alpha[below])
            self.open[below[done.to(below.device)]] = False
        return self.open[chunk]

    def _sample(self, samples: int, seed: int) -> None:
        """Evaluate every target at corner-biased and uniform points, the centre first; every prompt has the same."""
        region, prompt = self.landscape.region, self.targets.prompt
        self._look(self._known, prompt >= 0)
        for size, own in self._sizes():
            for number, begin in enumerate(range(0, samples, size)):
                if not bool(self.open[own].any()) or self.late():
                    break
                _, alpha = region.sample(min(size, samples - begin), seed=seed + number, corners=CORNER_SHARE)
                if len(alpha):
                    self._look(alpha, own)

    def _sizes(self) -> list[tuple[int, Bool[Tensor, " T"]]]:
        """Return how many samples are drawn at a time, and the targets of all prompts of which as many are."""
        prompt, found = self.targets.prompt, dict[int, Tensor]()
        for number in prompt.unique().tolist():
            own = prompt == number
            wide = int(own[self.targets.owner].sum()) + self._keys_of(own)
            size = max(1, min(self.landscape.capacity, CHUNK_ELEMENTS // max(1, wide)))
            found[size] = found[size] | own if size in found else own
        return list(found.items())

    def _keys_of(self, own: Bool[Tensor, " T"]) -> int:
        """Return how many keys the terms of some targets have."""
        targets = self.targets
        return int(own[targets.owner[targets.function]].sum()) * targets.keys.shape[1]

    def _look(self, alpha: Float[Tensor, "n p"], own: Bool[Tensor, " T"]) -> None:
        """Evaluate the open ones of some targets at the same factors, as many prompts at a time as fit."""
        prompt = self.targets.prompt
        for some in prompt[own].unique().split(max(1, self.landscape.capacity // len(alpha))):
            chunk = (self.open & own & torch.isin(prompt, some)).nonzero()[:, 0]
            if len(chunk):
                targets = self.targets if len(chunk) == self.targets.size else self.targets.select(chunk)
                self._record(chunk, self.landscape.values(targets, alpha[None]), alpha[None])

    def _starts(
        self, descent: _Descent, budget: AttackBudget, seed: int, given: Float[Tensor, "T K p"] | None
    ) -> Float[Tensor, "T R p"]:
        """Return starts: gradient signs for up to half, the best sample, the given corners, random corners."""
        chunk, restarts, p = descent.chunk, budget.restarts, self.alpha.shape[-1]
        corners = [
            torch.randint(0, 2, (count, restarts, p), generator=torch.Generator().manual_seed(seed)) * 2 - 1
            for count in descent.targets.prompt.unique_consecutive(return_counts=True)[1].tolist()
        ]
        starts = torch.cat(corners).to(self.alpha)
        if restarts:
            self._gradient_signs(descent, starts[:, : max(1, restarts // 2)])
        if restarts > 1 and budget.samples:
            starts[:, -1] = self.alpha[chunk]
        starts = starts if given is None else torch.cat((given.clamp(-1.0, 1.0), starts), 1)
        return self._project(starts, self._known.expand_as(starts))

    def _gradient_signs(self, descent: _Descent, starts: Float[Tensor, "T R p"]) -> None:
        """Fill starts with −sign ∇f(centre) of each target's functionals, those that get lowest first."""
        landscape, owners = descent.landscape, descent.targets.owner
        each = descent.targets.each()
        _, gradient = landscape.descent(each, self._known[None].expand(each.size, -1, -1))
        corner = -landscape.direction(gradient)
        order = landscape.values(each, corner)[:, 0].argsort(stable=True)
        order = order[owners[order].argsort(stable=True)]
        owner = owners[order]
        first = torch.searchsorted(owner, owner)
        rank = torch.arange(len(owner), device=owner.device) - first
        kept = rank < starts.shape[1]
        starts[owner[kept], rank[kept]] = corner[order[kept], 0]

    def _descend(self, descent: _Descent, alpha: Float[Tensor, "T R p"], steps: int) -> None:
        landscape, targets, chunk = descent
        velocity = torch.zeros_like(alpha)
        with_momentum = (torch.arange(alpha.shape[1], device=alpha.device) % 2 == 1)[:, None]
        for k in range(steps):
            if self.late():
                return
            values, gradient = landscape.descent(targets, alpha)
            still = self._record(chunk, values, alpha)
            if not bool(still.all()):
                chunk, targets = chunk[still], targets.select(still.nonzero()[:, 0])
                alpha, velocity, gradient = alpha[still], velocity[still], gradient[still]
                if not len(chunk):
                    return
            length = gradient.abs().sum(-1, keepdim=True)
            velocity = MOMENTUM * velocity + gradient / length.clamp(min=torch.finfo(length.dtype).tiny)
            direction = landscape.direction(torch.where(with_momentum, velocity, gradient))
            step = 0.5 + 0.5 * math.cos(math.pi * k / steps)
            alpha = self._project(alpha - step * direction, alpha)
        self._record(chunk, landscape.values(targets, alpha), alpha)

    def _project(
        self, alpha: Float[Tensor, "T R p"], before: Float[Tensor, "T R p"]
    ) -> Float[Tensor, "T R p"]:
        """Project into the box and the constraints; where that fails, go back to where the point was."""
        if self.landscape.region.constraints is None:
            return alpha.clamp(-1.0, 1.0)
        return _feasible_or(self.landscape.region, alpha.flatten(0, 1), before.flatten(0, 1)).reshape(
            alpha.shape
        )


def _feasible_or(
    region: Region, alpha: Float[Tensor, "n p"], before: Float[Tensor, "n p"]
) -> Float[Tensor, "n p"]:
    """Return feasible points, or the points before; halving finds those that `Region.feasible` drops."""
    kept = region.feasible(alpha)
    if len(kept) == len(alpha):
        return kept
    if len(alpha) == 1:
        return before
    half = len(alpha) // 2
    return torch.cat(
        (_feasible_or(region, alpha[:half], before[:half]), _feasible_or(region, alpha[half:], before[half:]))
    )
