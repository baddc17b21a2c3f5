"""The engine `layer0`; the method is explained in the package's docstring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.costs import FORM_STEPS, Cost
from prooflens.engines.first_layer.entries import Entries, Moves, Point
from prooflens.engines.first_layer.layer import FirstLayer
from prooflens.engines.forms import Forms
from prooflens.engines.layer0.curvature import (
    JOINT_SIZE,
    joint_curvatures,
    shaped_curvature,
    uniform_curvature,
)
from prooflens.engines.layer0.normed import NormedScores, no_rule, one_row
from prooflens.engines.protocol import EngineBase, EngineOptions, register
from prooflens.engines.relaxations.interval_walk import score_boxes
from prooflens.models.held import edits_first_scores
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.problem import Problem
from prooflens.regions import Region

SIGN_STEPS = 2
"""How often a corner is replaced by the signs of the gradient there; any corner gives a bound."""

PASSES, NORM_PASSES = 900, 1000
"""How often all numbers of forms by tokens by coordinates are read or written, both sides together, and how often more
where a norm stands before the scores (measured)."""

NORMED_FORMS = 3
"""By how much more forms are bounded where queries and keys are normed: single scores, and rows in two ways."""

CACHED_ELEMENTS = 2**23
"""Beyond so many numbers a pass takes about twice as long: each temporary is mapped anew (measured)."""

CHUNK_ELEMENTS = 2**24
"""How many numbers of a temporary are worked on at a time (128 MiB)."""


@register("layer0")
@dataclass(frozen=True)
class Layer0(EngineBase):
    """Bound linear forms of layer-0 scores, nearly exactly; the bounds are proved.

    Attributes:
        name: the engine's name in the registry.
        guarantee: proved.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(0, 1, 3), 2, 1.0), (0, Row(0, 1, 3), 0, -1.0)], size=1)
        >>> found = Layer0().bound_forms(problem, margin)
        >>> 0.32 < found.lower.item() < found.upper.item() < 0.40
        True
    """

    name: str = "layer0"
    guarantee: Guarantee = Guarantee.PROVED

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        """Refuse deeper layers, outputs, LayerNorms of queries and keys, and capped scores that are no margins."""
        if forms.logits is not None or any(layer != 0 for layer in forms.layers):
            return "layer0 bounds scores of layer 0 only"
        architecture = problem.model.architecture
        if architecture.qk_norm != "none" and (reason := no_rule(problem)):
            return reason
        if architecture.head_positions:
            return (
                "layer0 has no rule for positions of queries and keys (head_positions): ask taylor or crown"
            )
        if edits_first_scores(problem.model.weights) or architecture.free:
            return "layer0 has no rule for an edited stream in front of block 0: ask taylor or crown"
        if architecture.score_cap is not None and not forms.are_margins:
            return "layer0 bounds capped scores (score_cap) in differences of two of them only"
        return None

    def cost(self, problem: Problem, depth: int, size: int) -> Cost:
        """Predict passes over forms by tokens by coordinates, and products with one head's weights for each form."""
        numbers = problem.region.center.numel()
        head = problem.model.architecture.head_dim * problem.model.architecture.d_model
        chunk = min(size * numbers, CHUNK_ELEMENTS)
        normed = problem.model.architecture.norm_place in ("pre", "sandwich")
        passes = PASSES + (NORM_PASSES if normed else 0)
        steps = 3000.0 * problem.model.architecture.n_layers + FORM_STEPS * size
        if problem.model.architecture.qk_norm != "none":
            size *= NORMED_FORMS
        passes *= 2 if size * numbers > CACHED_ELEMENTS else 1
        return Cost(36.0 * size * head, 8.0 * passes * size * numbers, steps, 8.0 * 12 * chunk)

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form, with the corners they were expanded around."""
        if problem.model.architecture.qk_norm == "none":
            lower, upper, lower_corner, upper_corner = _range(FirstLayer.of(problem, options), forms)
        else:
            lower, upper, lower_corner, upper_corner = _normed_range(NormedScores.of(problem, options), forms)
        if (cap := problem.model.architecture.score_cap) is not None:
            lower, upper = _capped(problem, cap, lower, upper)
        return FormBounds(lower, upper, lower_corner, upper_corner)


def _range(view: FirstLayer, forms: Forms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return proved lower and upper bounds of forms of plain scores, and their corners, chunk by chunk.

    Forms of a chunk read equally many tokens. Every form of a chunk has as many slots as its widest one, so a margin,
    which reads three tokens, would pay for the tangent of a mass, which reads all of them.
    """
    region = view.problem.region
    bounds = view.center.new_zeros(2, forms.size)
    corners = view.center.new_zeros(2, forms.size, region.n_factors)
    for chosen in _chunks(view, forms):
        entries = Entries.of(view, forms.select(chosen))
        moves = Moves(entries, region)
        # A form and its negative have the same chains, and the same slope at the centre but for its sign.
        errors = _Errors.of(entries, moves)
        slope = entries.evaluate(region.center[entries.tokens])[1]
        at = chosen.to(bounds.device)
        for side, one, along in ((0, entries.negated(), -slope), (1, entries, slope)):
            bounds[side, at], corners[side, at] = _maximise(one, moves, errors, along)
    return -bounds[0], bounds[1], corners[0], corners[1]


def _normed_range(scores: NormedScores, forms: Forms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same of forms of scores whose queries and keys are normed (`layer0.normed`).

    Forms that read one row are bounded without their query's scalar, which decides signs, and with it, which is
    narrower; where only signs are wanted the first is enough.
    """
    each, which = scores.single_scores(forms)
    low, high, *_ = _range(scores.view, each)
    alone = one_row(forms)
    lower, upper = (low.new_full((forms.size,), end) for end in (-torch.inf, torch.inf))
    corners = [low.new_zeros(forms.size, scores.view.problem.region.n_factors) for _ in range(2)]
    for single in (True, False):
        asked = alone if single else ~alone if forms.signs else torch.ones_like(alone)
        chosen = asked.nonzero()[:, 0]
        if not len(chosen):
            continue
        some, read = forms.select(chosen), which[asked[forms.index]].to(low.device)
        plain, slack = scores.frozen(some, low[read], high[read], single)
        least, most, *ends = _range(scores.drifting(single), plain)
        at = chosen.to(low.device)
        least, most = scores.thawed(some, down(least - slack), up(most + slack), single)
        lower[at], upper[at] = torch.maximum(lower[at], least), torch.minimum(upper[at], most)
        for corner, end in zip(corners, ends, strict=True):
            corner[at] = end
    return lower, upper, corners[0], corners[1]


def _capped(problem: Problem, cap: float, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Bound ψ(a) − ψ(b) for ψ(x) = c·tanh(x/c) by bounds of a − b.

    By the mean value theorem the quotient of both is ψ'(ξ) = 1 − tanh²(ξ/c) for a ξ between a and b: at most 1, and
    at least its value at the largest |score| of the region.
    """
    box = score_boxes(problem, [0], capped=False)[0]
    largest = float(torch.maximum(box.lower.abs(), box.upper.abs()).max())
    steep = torch.tanh(torch.tensor(up(largest / cap), dtype=torch.float64))
    least = float((1.0 - up(steep * (1.0 + gamma(64))).square() - gamma(64)).clamp(min=0.0))
    return (
        torch.where(lower > 0.0, down(lower * least), lower),
        torch.where(upper < 0.0, up(upper * least), upper),
    )


class _Errors(NamedTuple):
    """What rounding adds to the values and to the slopes of forms and of their negatives."""

    value: Float[Tensor, " F"]
    slope: Float[Tensor, "F n"]

    @classmethod
    def of(cls, entries: Entries, moves: Moves) -> _Errors:
        """Take the chains of absolute values times the relative error of each."""
        roundoff = entries.view.roundoff(entries.longest)
        return cls(
            up(roundoff * entries.value_size() + TINY), up(roundoff * moves.pull_size(entries.slope_size()))
        )


def _chunks(view: FirstLayer, forms: Forms) -> Iterator[Int[Tensor, " M"]]:
    """Yield the numbers of forms that read equally many tokens, `CHUNK_ELEMENTS` coordinates at a time."""
    S, d = view.center.shape
    coupled = view.problem.region.generators is not None
    widths = torch.full((forms.size,), S) if coupled else forms.tokens_read(S).sum(-1)
    for width in widths.unique().tolist():
        alike = (widths == width).nonzero()[:, 0]
        yield from alike.split(max(1, CHUNK_ELEMENTS // (max(1, width) * d)))


def _maximise(
    entries: Entries, moves: Moves, errors: _Errors, slope: Float[Tensor, "F T d"]
) -> tuple[Float[Tensor, " F"], Float[Tensor, "F p"]]:
    """Return proved upper bounds of the forms and their corners, from their slopes at the centre."""
    best = _climb(entries, moves, slope)
    bound = _bound(moves, errors, best, uniform_curvature(entries, best))
    # Only these can still change sides: the corner is below 0, the bound is not.
    open_ = ((best.value < 0) & (bound >= 0)).nonzero()[:, 0]
    if len(open_) and moves.region.generators is None:
        refined = _refined(entries.select(open_), moves.region, best.select(open_))
        bound = bound.index_copy(0, open_, torch.minimum(bound[open_], refined))
    return bound, moves.factors(best.signs)


def _refined(entries: Entries, region: Region, point: Point) -> Float[Tensor, " F"]:
    """Return the best bound of the shaped curvatures; on small models without a norm also of the whole Hessian."""
    moves = Moves(entries, region)
    errors = _Errors.of(entries, moves)
    best = _bound(moves, errors, point, shaped_curvature(entries, point))
    if entries.view.norm is None and entries.view.rotary is None and point.x[0].numel() <= JOINT_SIZE:
        for curvature in joint_curvatures(entries, point):
            best = torch.minimum(best, _bound(moves, errors, point, curvature))
    return best


def _climb(entries: Entries, moves: Moves, slope: Float[Tensor, "F T d"]) -> Point:
    """Find a good corner for each form: the signs of the slope at the centre, then of the gradient there."""
    best: Point | None = None
    for _ in range(SIGN_STEPS):
        signs = torch.where(moves.pull(slope) >= 0, 1.0, -1.0).to(slope)
        x = moves.point(signs)
        value, slope, read = entries.evaluate(x)
        found = Point(signs, value, x, slope, read)
        best = found if best is None else best.better_of(found)
    assert best is not None
    return best


def _bound(
    moves: Moves, errors: _Errors, point: Point, curvature: Float[Tensor, "F T d"]
) -> Float[Tensor, " F"]:
    """Return f(s) + Σ max(0, 2(D − G)) with the rounding of f(s) and G added; ∞ where anything is not finite."""
    G = point.signs * moves.pull(point.slope)
    excess = 2.0 * up(moves.curvature(curvature) + up(errors.slope - G)).clamp(min=0.0)
    slack = up(excess.sum(-1) * (1.0 + gamma(2 * excess.shape[-1] + 16)) + TINY)
    bound = up(up(point.value + errors.value) + slack)
    # A slope that has overflowed would take all of the slack away.
    known = point.value.isfinite() & G.isfinite().all(-1) & bound.isfinite()
    return torch.where(known, bound, torch.inf)
