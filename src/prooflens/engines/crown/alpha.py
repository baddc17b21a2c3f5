r"""Engine `alpha-crown`: CROWN with its lines and planes chosen for each form (α-CROWN, Xu et al. 2021).

`crown`'s bound of a form is proved for every τ ∈ [−1, 1] of every line and every McCormick plane, so

    f ≤ min_τ bound(τ),

and any τ that a search visits gives a proof. The search is projected gradient descent (Adam's steps, clamped) from
τ = 0, a fixed number of steps, with τ per form where memory allows, else shared by the batch. The least bound of all
steps counts: never looser than `crown` on the same boxes. The boxes inside the network are optimised the same way, in
fewer steps, where there are few enough of them; lines on smaller boxes are other lines, so `crown`'s own bounds are
intersected then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.crown.engine import bound_by
from prooflens.engines.crown.walk import Concretise, LineWalk, Start, plain, proved, signs
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import NO_OPTIONS, EngineBase, EngineOptions, register
from prooflens.problem import Problem

PARAMETERS = 2**23
"""Up to this many numbers in a batch, τ is kept per form; beyond, it is shared by the batch."""

RATE = 0.5
"""The first step of a search from τ = 0; the last one is a tenth of it."""

BETAS = (0.9, 0.98)


Key = tuple[str, str]
"""The step and the name of a parameter."""


class Descent(NamedTuple):
    """The least bounds that a search found, their corners, and the parameters that they belong to."""

    best: Float[Tensor, " F"]
    corner: Float[Tensor, "F p"]
    tau: dict[Key, Tensor]


def descend(
    walk: LineWalk,
    start: Start,
    tau: Mapping[Key, Tensor],
    steps: int,
    made: Callable[[Mapping[Key, Tensor]], Mapping[str, dict[str, Tensor]]],
    rate: float = RATE,
    options: EngineOptions = NO_OPTIONS,
) -> Descent:
    """Minimise the bounds of linear functions by projected gradient descent; every visited point is a proof.

    Args:
        walk: boxes and rules.
        start: the linear functions.
        tau: where to begin, with a leading dimension of 1 or of the number of functions; names `beta` are kept ≥ 0,
            all others in [−1, 1].
        steps: how many points to visit.
        made: the walk's parameters, by step, from those that are moved.
        rate: the first step; the last one is a tenth of it.
        options: the time; one point is always visited.
    """
    free = {key: part.detach().clone().requires_grad_() for key, part in tau.items()}
    kept = {key: part.detach().clone() for key, part in tau.items()}
    best: Tensor | None = None
    corner = torch.zeros(0)
    with torch.enable_grad():
        optimiser = torch.optim.Adam(free.values(), lr=rate, betas=BETAS)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.1 ** (1.0 / steps))
        for _ in range(steps):
            bound, pulled = walk.back(start, made(free))
            found = proved(bound)
            if best is None:
                best, corner = torch.full_like(found, torch.inf), signs(pulled)
            better = found < best
            best = torch.where(better, found, best)
            corner = torch.where(better[:, None], signs(pulled), corner)
            for key, part in free.items():
                chosen = better if len(part) == len(better) else better.any()[None]
                kept[key] = torch.where(chosen.reshape(-1, *(1,) * (part.ndim - 1)), part.detach(), kept[key])
            usable = bound[bound.detach().isfinite()]
            if not len(usable) or options.late:
                break
            optimiser.zero_grad()
            usable.sum().backward()
            optimiser.step()
            decay.step()
            with torch.no_grad():
                for (_, name), part in free.items():
                    part.nan_to_num_(0.0)
                    part.clamp_(min=0.0) if name == "beta" else part.clamp_(-1.0, 1.0)
    assert best is not None
    return Descent(best, corner, kept)


@dataclass(frozen=True)
class SlopeSearch:
    """Projected gradient descent on τ for a batch of linear functions.

    Attributes:
        steps: how many steps to take.
        options: the time.
    """

    steps: int
    options: EngineOptions = NO_OPTIONS

    def __call__(self, walk: LineWalk, start: Start) -> tuple[Float[Tensor, " F"], Float[Tensor, "F p"]]:
        """Return the least proved bound over all steps, with the corner it belongs to."""
        best, corner = plain(walk, start)
        found = self.search(walk, start)
        if found is None:
            return best, corner
        better = found.best < best
        return torch.where(better, found.best, best), torch.where(better[:, None], found.corner, corner)

    def search(self, walk: LineWalk, start: Start) -> Descent | None:
        """Search from τ = 0; None where there is nothing to search for.

        Args:
            walk: boxes and rules.
            start: the linear functions.
        """
        n = start.size
        shapes = _shapes(walk, start)
        total = sum(torch.Size(shape).numel() for shape in shapes.values())
        if not self.steps or not total:
            return None
        lead = n if n * total <= PARAMETERS else 1
        like = next(iter(start.values.values()))
        zero = {key: like.new_zeros(lead, *shape) for key, shape in shapes.items()}
        return descend(walk, start, zero, self.steps, by_step, options=self.options)


def _shapes(walk: LineWalk, start: Start) -> dict[Key, tuple[int, ...]]:
    """Return the τ of all steps that a linear function goes back through."""
    return {
        (step.out, name): shape for step, rule in walk.path(start) for name, shape in rule.parameters.items()
    }


def by_step(tau: Mapping[Key, Tensor]) -> Mapping[str, dict[str, Tensor]]:
    """Return parameters by step and name.

    Args:
        tau: parameters by step and name together.
    """
    made: dict[str, dict[str, Tensor]] = {}
    for (step, name), part in tau.items():
        made.setdefault(step, {})[name] = part
    return made


def best_of(first: FormBounds, second: FormBounds) -> FormBounds:
    """Return the better of two bounds at each end, with its own corner."""
    low, high = second.lower > first.lower, second.upper < first.upper
    corners = (first.lower_corner, second.lower_corner, first.upper_corner, second.upper_corner)
    below, other_below, above, other_above = (corner for corner in corners if corner is not None)
    return FormBounds(
        torch.where(low, second.lower, first.lower),
        torch.where(high, second.upper, first.upper),
        torch.where(low[:, None], other_below, below),
        torch.where(high[:, None], other_above, above),
    )


@register("alpha-crown")
@dataclass(frozen=True)
class AlphaCrown(EngineBase):
    """Bound linear forms as `crown` does, with the lines optimised form by form; the bounds are proved.

    Attributes:
        name: the engine's name in the registry.
        guarantee: proved.
        steps: how many steps the search takes for each form.
        inner_steps: how many it takes for the boxes inside a small network.
        inner_limit: up to how many coordinates S·d_ff a network counts as small.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(0, 1, 3), 2, 1.0), (0, Row(0, 1, 3), 0, -1.0)], size=1)
        >>> found = AlphaCrown(steps=2, inner_steps=0).bound_forms(problem, margin)
        >>> 0.32 < found.lower.item() < found.upper.item() < 0.40
        True
    """

    name: str = "alpha-crown"
    guarantee: Guarantee = Guarantee.PROVED
    steps: int = 20
    inner_steps: int = 10
    """Steps for the boxes inside the network, if it is small."""
    inner_limit: int = 256
    """The largest number of coordinates S·d_ff of a hidden value for which the boxes are optimised."""

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form, never looser than `crown`, with corners."""
        hidden = problem.n_tokens * problem.model.architecture.d_ff
        small = bool(self.inner_steps) and hidden <= self.inner_limit
        inner: Concretise = SlopeSearch(self.inner_steps, options) if small else plain
        found = bound_by(problem, forms, inner, SlopeSearch(self.steps, options))
        return best_of(found, bound_by(problem, forms, plain)) if small else found
