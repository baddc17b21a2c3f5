r"""Where the vector lies that the head reads: one enclosure from which every logit difference can be bounded.

    h(x) = h₀ + Aα + e,     α ∈ [−1, 1]ᵖ,   |e| ≤ E  coordinate by coordinate,   for every x of the region,

(and e in an ellipsoid, |w·e| ≤ √(wᵀMw), where the engine knows one),

so that for any covector w

    |w·h − w·h₀|  ≤  ‖wA‖₁ + |w|·E  ≤  |w|·(ρ + E),   ρ_k = ‖A_k‖₁,       and  ≤ ‖w‖₂ · sup‖h − h₀‖₂.

An engine gives it through a method `bound_hidden(problem) -> HiddenBounds` about `problem.model.headless`. One that
has no such method is asked for every coordinate as a linear form, which gives A = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import FormBounds
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import NO_OPTIONS, Engine, EngineOptions
from prooflens.engines.relaxations.ellipsoids import support
from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.problem import Problem

Reach = Callable[[Float[Tensor, "n d"]], Float[Tensor, " n"]]
"""Maps covectors w to proved upper bounds of ‖wA‖₁."""


@dataclass(frozen=True, eq=False)
class HiddenBounds:
    """An enclosure h ∈ h₀ + A[−1, 1]ᵖ ± E of the vector that the head reads, proved with rounding.

    Attributes:
        h0: the vector at the centre, shape [d].
        E: what the linear part misses, per coordinate, shape [d].
        A: the linear part, shape [d, p]; None if there is none, or if it is too large to keep.
        reach: bounds ‖wA‖₁ in place of an A that is too large to keep.
        rho: bounds ‖A_k‖₁ per coordinate; made from A if not given.
        radius: bounds sup‖h − h₀‖₂, if it is known.
        shape: M with |w·e| ≤ √(wᵀMw) for the part e that the linear part misses, if it is known.

    Example:
        >>> h0, E, w = torch.tensor([[0.0, 0.0], [0.5, 0.0], [1.0, -1.0]]).double()
        >>> known = HiddenBounds(h0, E, A=torch.tensor([[1.0], [2.0]]).double())
        >>> round(known.reach_linear(w[None]).item(), 9)  # |1 − 2| + 0.5
        1.5
        >>> round(known.reach_box(w[None]).item(), 9)  # (1 + 0.5) + 2
        3.5
    """

    h0: Float[Tensor, " d"]
    E: Float[Tensor, " d"]
    A: Float[Tensor, "d p"] | None = None
    reach: Reach | None = None
    rho: Float[Tensor, " d"] | None = None
    radius: float | None = None
    shape: Float[Tensor, "d d"] | None = None

    def rest(self, w: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Return sup |w·e| for covectors w [n, d]."""
        found = up(w.abs() @ self.E * (1.0 + gamma(w.shape[-1] + 8)) + TINY)
        return found if self.shape is None else torch.minimum(found, support(self.shape, w) + TINY)

    @cached_property
    def box(self) -> Float[Tensor, " d"]:
        """ρ + E ≥ |h − h₀| per coordinate, rounded up."""
        if self.rho is not None:
            return up(self.rho + self.E)
        if self.A is None:
            if self.reach is None:
                return self.E
            return up(self.reach(torch.eye(len(self.h0)).to(self.h0)) + self.E)
        return up(up(self.A.abs().sum(-1) * (1.0 + gamma(self.A.shape[-1] + 4)) + TINY) + self.E)

    def reach_box(self, w: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Bound |w·(h − h₀)| by |w|·(ρ + E), or by norms if that is smaller, for covectors w [n, d]."""
        grow = 1.0 + gamma(w.shape[-1] + 8)
        found = up(w.abs() @ self.box * grow + TINY)
        if self.radius is None:
            return found
        return torch.minimum(found, up(w.square().sum(-1).sqrt() * self.radius * grow + TINY))

    def reach_linear(self, w: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Bound |w·(h − h₀)| by ‖wA‖₁ + |w|·E, for covectors w [n, d]; without A this is the box."""
        grow = 1.0 + gamma(w.shape[-1] + 8)
        rest = self.rest(w)
        if self.A is not None:
            p = self.A.shape[-1]
            # Every entry of wA errs by γ_d|w||A|, together no more than γ_d|w|·ρ.
            slack = gamma(w.shape[-1] + 4) * (w.abs() @ self.box) * grow
            return up(up((w @ self.A).abs().sum(-1) * (1.0 + gamma(p + 8)) + slack * 2.0 + TINY) + rest)
        if self.reach is not None:
            return up(self.reach(w) + rest)
        return rest

    @property
    def is_box(self) -> bool:
        """Whether there is no linear part, so that nothing is gained beyond `reach_box`."""
        return self.A is None and self.reach is None

    @property
    def largest(self) -> Float[Tensor, " d"]:
        """sup|h| per coordinate."""
        return up(self.h0.abs() + self.box)


@runtime_checkable
class BoundsHidden(Protocol):
    """An engine that has an enclosure of its own of the vector that the head reads."""

    def bound_hidden(self, problem: Problem, options: EngineOptions = NO_OPTIONS) -> HiddenBounds:
        """Enclose the output [d] of `problem.model.headless` over the whole region; ∞ where nothing is known."""
        ...


def headless(problem: Problem) -> Problem:
    """Return the same region for the model without its head."""
    return replace(problem, model=problem.model.headless)


def output_forms(weights: Float[Tensor, "F C"]) -> Forms:
    """Return linear forms of the output alone.

    Args:
        weights: one row per form, shape [F, C].
    """
    return replace(Forms.of([], len(weights)), logits=weights)


def nothing_known(problem: Problem) -> HiddenBounds:
    """Return an enclosure that says nothing."""
    zero = problem.region.center.new_zeros(problem.model.architecture.d_model)
    return HiddenBounds(zero, torch.full_like(zero, torch.inf))


def hidden_bounds(engine: Engine, problem: Problem, options: EngineOptions = NO_OPTIONS) -> HiddenBounds:
    """Enclose the vector that the head reads, with the engine's guarantee.

    An engine without a method for it is asked about every coordinate.

    Args:
        engine: who is asked.
        problem: the model and the region.
        options: memory that may be used, and who is told of progress.

    Raises:
        EngineError: if the engine refuses.
    """
    if isinstance(engine, BoundsHidden):
        return engine.bound_hidden(problem, options)
    d = problem.model.headless.architecture.d_model
    found = engine.bound_forms(headless(problem), output_forms(torch.eye(d, dtype=torch.float64)), options)
    return of_box(found)


def of_box(found: FormBounds) -> HiddenBounds:
    """Make an enclosure without a linear part from intervals per coordinate."""
    center = 0.5 * found.lower + 0.5 * found.upper
    half = up(torch.maximum(found.upper - center, center - found.lower)) + TINY
    known = center.isfinite() & half.isfinite()
    return HiddenBounds(torch.where(known, center, 0.0), torch.where(known, half, torch.inf))
