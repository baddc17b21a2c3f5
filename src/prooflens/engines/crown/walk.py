"""The walk of `crown`: boxes and rules of all steps, first to last, and linear functions taken back through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import FormBounds
from prooflens.engines.crown.lines import activation, softcap
from prooflens.engines.crown.norm import Normalise, centred, square_lines
from prooflens.engines.crown.softmax import Weights
from prooflens.engines.crown.solu import Softened
from prooflens.engines.crown.steps import (
    Bilinear,
    Curve,
    Parameters,
    Passed,
    Rule,
    cut,
    linear_rule,
    magnitude,
    paired,
)
from prooflens.engines.relaxations.interval_steps import apply_step
from prooflens.engines.relaxations.interval_walk import region_box
from prooflens.models import INPUT
from prooflens.models.program import Program
from prooflens.models.sites import AnyStep, Elementwise, Mix, Norm, Product, Scores, Softcap, Softmax, Solu
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.problem import Problem
from prooflens.queries import Box

BUDGET_ELEMENTS = 2**24
"""How many numbers a temporary may hold while forms go back; it decides how many go at a time."""

LARGEST_VARIANCE = 2.0**200
"""The largest variance for which lines of v^{-½} are drawn, and the inverse of the smallest."""

LEAST_SLOPE = 2.0**-800
"""How large every value counts at least for rounding, relative to the largest: it covers products of tiny numbers."""

AT_ONCE = 256
"""Values with at most this many coordinates go back whole, the others token by token."""


class Start(NamedTuple):
    """F linear functions: coefficients [F, *shape] of named values, or of one token's part of them ([F, 1, …])."""

    values: dict[str, Tensor]
    token: int | None = None

    @property
    def size(self) -> int:
        """The number of functions, F."""
        return len(next(iter(self.values.values())))

    def both_sides(self, part: Tensor) -> Start:
        """Return some of the functions, and minus them."""
        return Start({name: torch.cat((A[part], -A[part])) for name, A in self.values.items()}, self.token)


Concretise = Callable[["LineWalk", Start], tuple[Tensor, Tensor]]
"""Finds upper bounds of linear functions, with the sign pattern of their last coefficients."""


@dataclass(eq=False)
class LineWalk:
    """Rules and boxes of the steps so far, in order.

    Attributes:
        problem: the model and the region.
        settle: finds upper bounds of linear functions.
        boxes: a box per value.
        rules: steps and their rules.
        faint: what each step counts for underflow.
    """

    problem: Problem
    settle: Concretise
    boxes: dict[str, Box] = field(default_factory=dict)
    rules: list[tuple[AnyStep, Rule]] = field(default_factory=list)
    faint: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def through(cls, problem: Problem, program: Program, settle: Concretise) -> LineWalk:
        """Relax every step of a program; the inputs of the last one have their boxes then.

        Args:
            problem: the model and the region.
            program: the steps.
            settle: finds upper bounds of linear functions.
        """
        walk = cls(problem, settle)
        walk.boxes[INPUT] = region_box(problem.region)
        for step in program.steps:
            walk.rules.append((step, walk.relax(step)))
        return walk

    def relax(self, step: AnyStep) -> Rule:
        """Return the rule of a step, on boxes as tight as the method gives; keep the box of its output."""
        boxes = [self.boxes[name] for name in step.inputs]
        if rule := linear_rule(step, *boxes):
            self.boxes[step.out] = apply_step(step, *boxes)
            return rule
        match step:
            case Norm():
                return self._norm(step)
            case Softmax():
                return self._softmax(step)
            case Mix():
                self.tighten(step.inputs[1])
            case Softcap():
                self.tighten(step.inputs[0], self._tokens(step))
            case _:
                for name in step.inputs:
                    self.tighten(name)
        boxes = [self.boxes[name] for name in step.inputs]
        self.boxes[step.out] = apply_step(step, *boxes)
        if isinstance(step, Elementwise):
            return Curve.of(activation(step.function, boxes[0]), boxes[0])
        if isinstance(step, Solu):
            return Softened.of(boxes[0], self.boxes[step.out])
        if isinstance(step, Softcap):
            return Curve.of(softcap(step.cap, boxes[0]), boxes[0], self._tokens(step))
        assert isinstance(step, Scores | Mix | Product)
        return Bilinear.of(step, *boxes)

    def _tokens(self, step: Softcap) -> int:
        """Return the dimension that counts tokens in what a cap reads: scores [H, S, S] have heads before them."""
        made = {before.out: before for before, _ in self.rules}
        return 1 if isinstance(made.get(step.inputs[0]), Scores) else 0

    def tighten(self, name: str, dim: int = 0) -> None:
        """Bound every coordinate of a value and intersect with its box."""
        box = self.boxes[name]
        if name == INPUT or self._from_input(name):
            return
        self.boxes[name] = _cut(box, *self.coordinates(name, dim=dim))

    def coordinates(self, name: str, centre: bool = False, dim: int = 0) -> Box:
        """Bound every coordinate of a value or, with `centre`, of x − mean(x), token by token along a dimension."""
        like = self.boxes[name].lower
        if like.numel() <= AT_ONCE or like.ndim == 1:
            eye = torch.eye(like.numel(), dtype=like.dtype, device=like.device).reshape(-1, *like.shape)
            starts = [Start({name: centred(eye) if centre else eye})]
        else:
            one = like.select(dim, 0)
            eye = torch.eye(one.numel(), dtype=like.dtype, device=like.device)
            eye = eye.reshape(-1, *one.shape).unsqueeze(dim + 1)
            rows = centred(eye) if centre else eye
            starts = [Start({name: rows}, token) for token in range(like.shape[dim])]
        found = [self.bounds(start) for start in starts]
        if len(found) == 1:
            return Box(*(end.reshape(like.shape) for end in (found[0].lower, found[0].upper)))
        ends = zip(*((part.lower, part.upper) for part in found), strict=True)
        return Box(*(torch.stack([end.reshape(one.shape) for end in side], dim) for side in ends))

    def _from_input(self, name: str) -> bool:
        """Say whether a value is an affine image of a ball: its interval box is exact then."""
        made = {step.out: step for step, _ in self.rules}
        step = made.get(name)
        exact = step is not None and linear_rule(step, *(self.boxes[i] for i in step.inputs)) is not None
        return (
            exact and step is not None and step.inputs == (INPUT,) and self.problem.region.generators is None
        )

    def _norm(self, step: Norm) -> Rule:
        name = step.inputs[0]
        x = self.boxes[name]
        d = x.lower.shape[-1]
        low, high = self.coordinates(name, step.centred)
        size = magnitude(x)
        slack = gamma(4 * d + 32) * (size + size.mean(-1, keepdim=True)) + TINY
        m = _cut(_plain_centre(step, x), down(low - slack), up(high + slack))
        v = self._variance(step, name, m)
        usable = (v.lower > 1.0 / LARGEST_VARIANCE) & (v.upper < LARGEST_VARIANCE)
        v = Box(*(torch.where(usable, end, 1.0) for end in v))
        # Pm = m, so the same norm without centring, on the box of m, bounds the output as well.
        y = _cut(apply_step(step, x), *apply_step(replace(step, centred=False), m))
        self.boxes[step.out] = y
        return Normalise.of(step, x, m, v, y, usable)

    def _variance(self, step: Norm, name: str, m: Box) -> Box:
        """Bound v = Σ m²/d + ε by the squares' middle lines taken back, and by m's box."""
        *tokens, d = m.lower.shape  # a head of queries or keys is a token of its own here
        count = math.prod(tokens)
        least = torch.where((m.lower <= 0) & (m.upper >= 0), 0.0, torch.minimum(m.lower.abs(), m.upper.abs()))
        most = magnitude(m)
        grow = gamma(4 * d + 32)
        box = Box(
            least.square().mean(-1) * (1.0 - grow) + step.eps * (1.0 - grow),
            (most.square().mean(-1) + step.eps) * (1.0 + grow) + TINY,
        )
        lines = square_lines(m)
        x = magnitude(self.boxes[name])
        ends = []
        for side, keep in ((lines.upper, True), (lines.lower, False)):
            slope = side.slope[1] / d
            A = torch.diag_embed((centred(slope) if step.centred else slope).reshape(count, d).T)
            found = self.bounds(Start({name: A.permute(1, 2, 0).reshape(count, *tokens, d)}))
            size = (slope.abs() * (x + x.mean(-1, keepdim=True)) + side.offset[1].abs() / d).sum(
                -1
            ) + step.eps
            constant = side.offset[1].mean(-1) + step.eps
            slack = 4.0 * grow * size + TINY
            ends.append(
                up(up(found.upper.reshape(tokens) + constant) + slack)
                if keep
                else down(down(found.lower.reshape(tokens) + constant) - slack)
            )
        return _cut(box, ends[1], ends[0])

    def _softmax(self, step: Softmax) -> Rule:
        name = step.inputs[0]
        scores = self.boxes[name]
        H, S, _ = scores.lower.shape
        D = up(scores.upper[..., :, None] - scores.lower[..., None, :])
        at_once = scores.lower.numel() <= AT_ONCE
        mask = step.mask.expand(H, S, S)
        pairs = (mask[..., :, None] & mask[..., None, :]).triu(1).nonzero()
        for token in [None] if at_once else range(S):
            chosen = pairs if token is None else pairs[pairs[:, 1] == token]
            if not len(chosen):
                continue
            h, i, j, k = chosen.unbind(-1)
            A = scores.lower.new_zeros(len(h), H, S if token is None else 1, S)
            row, place = torch.arange(len(h), device=pairs.device), i if token is None else 0
            A[row, h, place, j], A[row, h, place, k] = 1.0, -1.0
            found = self.bounds(Start({name: A}, token))
            D[h, i, j, k] = torch.minimum(D[h, i, j, k], found.upper)
            D[h, i, k, j] = torch.minimum(D[h, i, k, j], -found.lower)
        rule = Weights.of(step.mask, scores, D)
        self.boxes[step.out] = rule.box
        return rule

    def chunk(self) -> int:
        """Return how many forms, both sides counted, go back at a time."""
        largest = max((box.lower.numel() for box in self.boxes.values()), default=1)
        return max(1, BUDGET_ELEMENTS // (2 * largest))

    def bounds(self, start: Start) -> FormBounds:
        """Bound linear functions of the values so far, with the corners where their last lines are attained."""
        lows, highs, bottoms, tops = [], [], [], []
        for part in torch.arange(start.size).split(self.chunk()):
            bound, corner = self.settle(self, start.both_sides(part))
            n = len(part)
            highs.append(bound[:n])
            lows.append(-bound[n:])
            tops.append(corner[:n])
            bottoms.append(corner[n:])
        return FormBounds(torch.cat(lows), torch.cat(highs), torch.cat(bottoms), torch.cat(tops))

    def path(self, start: Start) -> list[tuple[AnyStep, Rule]]:
        """Return the steps that linear functions go back through, last first, for one token with its share of the
        rules."""
        alone = dict.fromkeys(start.values, start.token is not None)
        found = []
        for step, rule in reversed(self.rules):
            if step.out not in alone:
                continue
            single = alone[step.out]
            used = rule if start.token is None or not single else rule.at(start.token)
            found.append((step, used))
            for name, stays in zip(step.inputs, rule.stays, strict=True):
                alone[name] = single and stays and alone.get(name, True)
        return found

    def back(
        self, start: Start, tau: Mapping[str, Parameters] | None = None
    ) -> tuple[Float[Tensor, " F"], Float[Tensor, "F p"]]:
        """Return upper bounds of linear functions, rounding included, and their coefficients GᵀA of the factors.

        The result is differentiable in τ; the last rounding is the caller's (`proved`).

        Args:
            start: the linear functions.
            tau: τ by step and name; None for the middle lines.
        """
        live = dict(start.values)
        first = next(iter(live.values()))
        constant, size = (first.new_zeros(len(first)) for _ in range(2))
        roundings = 64 + 4 * len(self.rules)
        for step, rule, _, passed in self.passes(start, live, tau or {}):
            constant, size = constant + passed.constant, size + passed.size + self._faint(step)
            roundings = max(roundings, rule.roundings + 4 * len(self.rules) + 64)
        A = live.get(INPUT, first.new_zeros(len(first), *self.problem.region.center.shape))
        moved, pulled, reach = self._at_input(A, start.token)
        roundings = max(roundings, 4 * (self.problem.region.center.numel() + self.problem.region.n_factors))
        return moved + constant + gamma(4 * roundings) * (size + reach), pulled

    def passes(
        self, start: Start, live: dict[str, Tensor], tau: Mapping[str, Parameters]
    ) -> Iterator[tuple[AnyStep, Rule, Tensor, Passed]]:
        """Yield every step on the way back, with the coefficients of its output and what becomes of them.

        Args:
            start: the linear functions.
            live: their coefficients by value; those of the input are left in it at the end.
            tau: τ by step and name; empty for the middle lines.
        """
        for step, rule in self.path(start):
            A = live.pop(step.out)
            passed = rule.back(A, tau.get(step.out, {}))
            for name, part in zip(step.inputs, passed.inputs, strict=True):
                live[name] = _sum(live[name], part, start.token) if name in live else part
            yield step, rule, A, passed

    def _faint(self, step: AnyStep) -> Tensor:
        """Return a size for what coefficients of a step's inputs lose to underflow; infinite ones count elsewhere."""
        if step.out not in self.faint:
            most = [magnitude(self.boxes[name]) for name in step.inputs]
            known = [torch.where(x.isfinite(), x, 0.0).sum() for x in most]
            self.faint[step.out] = LEAST_SLOPE * (1.0 + sum(known[1:], known[0]))
        return self.faint[step.out]

    def _at_input(self, A: Tensor, token: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return ⟨A, x₀⟩ + ‖GᵀA‖₁, GᵀA and the size of it all; of a ball only the coordinates of A's token."""
        region = self.problem.region
        x, spread = region.center, region.half_widths()
        if A.shape[1] != len(x) and token is not None and region.radius is not None:
            x, spread = cut(x, token), cut(spread, token)
            pulled = (A * spread).flatten(1)
        else:
            A = _sum(A.new_zeros(len(A), *x.shape), A, token)
            pulled = region.pullback(A)
        return paired(A, x) + pulled.abs().sum(-1), pulled, 2.0 * paired(A.abs(), x.abs() + spread)


def _sum(first: Tensor, second: Tensor, token: int | None) -> Tensor:
    """Add coefficients of one value from two readers; those of one token are put in their place first."""
    if first.shape == second.shape:
        return first + second
    whole, single = (first, second) if first.shape[1] > 1 else (second, first)
    place = torch.tensor([token], device=whole.device)
    return whole + torch.zeros_like(whole).index_copy(1, place, single)


def proved(bound: Tensor) -> Tensor:
    """Round the bound up for the last time; NaN becomes ∞."""
    made = up(bound.detach() + bound.detach().abs() * gamma(64)) + TINY
    return torch.where(made.isnan(), torch.inf, made)


def signs(pulled: Tensor) -> Tensor:
    """Return the corner of the factor box at which a linear function is largest."""
    return torch.where(pulled.detach() >= 0, 1.0, -1.0).to(pulled)


def plain(walk: LineWalk, start: Start) -> tuple[Tensor, Tensor]:
    """Bound linear functions by the middle lines, as CROWN does."""
    bound, pulled = walk.back(start)
    return proved(bound), signs(pulled)


def _cut(box: Box, lower: Tensor, upper: Tensor) -> Box:
    """Intersect a box with new bounds; NaN says nothing."""
    low = torch.where(lower > box.lower, lower, box.lower)
    high = torch.where(upper < box.upper, upper, box.upper)
    return Box(low, high)


def _plain_centre(step: Norm, x: Box) -> Box:
    """Bound m = Px by the box of x: x_k − mean, both apart."""
    if not step.centred:
        return x
    d = x.lower.shape[-1]
    slack = gamma(4 * d + 32) * (magnitude(x) + magnitude(x).mean(-1, keepdim=True)) + TINY
    low = x.lower - x.upper.mean(-1, keepdim=True)
    high = x.upper - x.lower.mean(-1, keepdim=True)
    return Box(down(low - slack), up(high + slack))
