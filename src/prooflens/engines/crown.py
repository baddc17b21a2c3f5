r"""Engine `crown`: linear bounds taken back from a form of scores or outputs to the input (CROWN, Zhang et al. 2018).

f ≤ ⟨A, y⟩ + c at the last value y. Step by step from there to the input x, each step's output is replaced by linear
functions of its inputs that are above it where A is positive and below it where A is negative (`crown_steps`,
`crown_softmax`, `crown_norm`; the lines themselves in `crown_lines`). At the input, with x = x₀ + Gα, α ∈ [−1, 1]^p,

    f ≤ ⟨A, x₀⟩ + ‖GᵀA‖₁ + c + γ_N s,

s the absolute-value chain of everything that was computed: the bound is *proved*. −f gives the other side.

The lines of a step hold on a box of its inputs. These boxes come from the same method, first to last: queries, keys and
values, score differences, gates, pre-activations, and a norm's centred input and variance are forms of their own,
bounded like any other and intersected with interval arithmetic on the boxes before. Constraints of a region are
ignored.

Complexity: a form costs one pass back; all coordinates of all such values are forms, O(S d L) of them, each O(L S d²).
Forms go back in batches that fit a budget of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.base import FormBounds, Forms, Guarantee, Problem, register
from prooflens.engines.crown_lines import activation
from prooflens.engines.crown_norm import Normalise, centred, square_lines
from prooflens.engines.crown_softmax import Weights
from prooflens.engines.crown_steps import Bilinear, Curve, Parameters, Rule, linear_rule, magnitude, paired
from prooflens.engines.interval import bound_on_box, form_program, region_box
from prooflens.engines.interval_steps import apply_step
from prooflens.errors import EngineError
from prooflens.models import INPUT, OUTPUT, scores_name
from prooflens.models.program import Program
from prooflens.models.sites import AnyStep, Elementwise, Mix, Norm, Product, Scores, Softmax
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.queries import Box

BUDGET_ELEMENTS = 2**24
"""Numbers per temporary while forms go back: how many go at a time."""

AT_ONCE = 256
"""Values with so few coordinates go back whole, the others token by token."""


class Start(NamedTuple):
    """F linear functions: coefficients [F, *shape] of named values, or of one token's part of them ([F, 1, …])."""

    values: dict[str, Tensor]
    token: int | None = None

    @property
    def size(self) -> int:
        """F."""
        return len(next(iter(self.values.values())))

    def both_sides(self, part: Tensor) -> Start:
        """Some of the functions, and minus them."""
        return Start({name: torch.cat((A[part], -A[part])) for name, A in self.values.items()}, self.token)


Settle = Callable[["Walk", Start], tuple[Tensor, Tensor]]
"""How upper bounds of linear functions are found, with the sign pattern of their last coefficients."""


@dataclass(eq=False)
class Walk:
    """Rules and boxes of the steps so far, in order."""

    problem: Problem
    settle: Settle
    boxes: dict[str, Box] = field(default_factory=dict)
    rules: list[tuple[AnyStep, Rule]] = field(default_factory=list)

    @classmethod
    def through(cls, problem: Problem, program: Program, settle: Settle) -> Walk:
        """Relax every step of a program; the last one's inputs have their boxes then."""
        walk = cls(problem, settle)
        walk.boxes[INPUT] = region_box(problem.region)
        for step in program.steps:
            walk.rules.append((step, walk.relax(step)))
        return walk

    def relax(self, step: AnyStep) -> Rule:
        """The rule of a step, on boxes as tight as the method gives, and the box of its output."""
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
            case _:
                for name in step.inputs:
                    self.tighten(name)
        boxes = [self.boxes[name] for name in step.inputs]
        self.boxes[step.out] = apply_step(step, *boxes)
        if isinstance(step, Elementwise):
            return Curve.of(activation(step.function, boxes[0]), boxes[0])
        assert isinstance(step, Scores | Mix | Product)
        return Bilinear.of(step, *boxes)

    def tighten(self, name: str) -> None:
        """Bound every coordinate of a value and intersect with its box."""
        box = self.boxes[name]
        if name == INPUT or self._from_input(name):
            return
        self.boxes[name] = _cut(box, *self.coordinates(name))

    def coordinates(self, name: str, centre: bool = False) -> Box:
        """Bounds of every coordinate of a value, of x − mean(x) with `centre`, token by token."""
        like = self.boxes[name].lower
        if like.numel() <= AT_ONCE or like.ndim == 1:
            eye = torch.eye(like.numel(), dtype=like.dtype, device=like.device).reshape(-1, *like.shape)
            starts = [Start({name: centred(eye) if centre else eye})]
        else:
            eye = torch.eye(like[0].numel(), dtype=like.dtype, device=like.device)
            eye = eye.reshape(-1, 1, *like.shape[1:])
            rows = centred(eye) if centre else eye
            starts = [Start({name: rows}, token) for token in range(len(like))]
        found = [self.bounds(start) for start in starts]
        lower, upper = (torch.cat([getattr(part, end) for part in found]) for end in ("lower", "upper"))
        return Box(lower.reshape(like.shape), upper.reshape(like.shape))

    def _from_input(self, name: str) -> bool:
        """An affine image of a ball: its interval box is already exact."""
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
        if not bool((v.lower > 0).all()):
            v = Box(torch.where(v.lower > 0, v.lower, TINY), torch.where(v.lower > 0, v.upper, torch.inf))
        # Pm = m, so the same norm without centring, on the box of m, bounds the output as well.
        y = _cut(apply_step(step, x), *apply_step(replace(step, centred=False), m))
        self.boxes[step.out] = y
        return Normalise.of(step, x, m, v, y)

    def _variance(self, step: Norm, name: str, m: Box) -> Box:
        """v = Σ m²/d + ε from the squares' middle lines taken back, and from m's box."""
        S, d = m.lower.shape
        least = torch.where((m.lower <= 0) & (m.upper >= 0), 0.0, torch.minimum(m.lower.abs(), m.upper.abs()))
        most = magnitude(m)
        grow = gamma(4 * d + 32)
        box = Box(
            least.square().mean(-1) * (1.0 - grow) + step.eps * (1.0 - grow),
            (most.square().mean(-1) + step.eps) * (1.0 + grow) + TINY,
        )
        lines = square_lines(m)
        tokens = torch.arange(S, device=m.lower.device)
        x = magnitude(self.boxes[name])
        ends = []
        for side, keep in ((lines.upper, True), (lines.lower, False)):
            slope = side.slope[1] / d
            A = m.lower.new_zeros(S, S, d)
            A[tokens, tokens] = centred(slope) if step.centred else slope
            found = self.bounds(Start({name: A}))
            size = (slope.abs() * (x + x.mean(-1, keepdim=True)) + side.offset[1].abs() / d).sum(
                -1
            ) + step.eps
            constant = side.offset[1].mean(-1) + step.eps
            slack = 4.0 * grow * size + TINY
            ends.append(
                up(up(found.upper + constant) + slack) if keep else down(down(found.lower + constant) - slack)
            )
        return _cut(box, ends[1], ends[0])

    def _softmax(self, step: Softmax) -> Rule:
        name = step.inputs[0]
        scores = self.boxes[name]
        H, S, _ = scores.lower.shape
        D = up(scores.upper[..., :, None] - scores.lower[..., None, :])
        at_once = scores.lower.numel() <= AT_ONCE
        pairs = (step.mask[:, :, None] & step.mask[:, None, :]).triu(1).nonzero()
        for token in [None] if at_once else range(S):
            chosen = pairs if token is None else pairs[pairs[:, 0] == token]
            if not len(chosen):
                continue
            h = torch.arange(H, device=pairs.device).repeat_interleave(len(chosen))
            i, j, k = chosen.repeat(H, 1).unbind(-1)
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
        """How many forms, both sides counted, go back at a time."""
        largest = max((box.lower.numel() for box in self.boxes.values()), default=1)
        return max(1, BUDGET_ELEMENTS // (2 * largest))

    def bounds(self, start: Start) -> FormBounds:
        """Bounds of linear functions of the values so far, with the corners where their last lines are attained."""
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
        """The steps that linear functions go back through, last first; for one token with its share of the rules."""
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
        """Upper bounds of linear functions, rounding included, and their coefficients GᵀA of the factors.

        Differentiable in τ; rounded up by the caller's last step, `proved`.
        """
        live = dict(start.values)
        first = next(iter(live.values()))
        constant, size = (first.new_zeros(len(first)) for _ in range(2))
        roundings = 64 + 4 * len(self.rules)
        for step, rule in self.path(start):
            passed = rule.back(live.pop(step.out), {} if tau is None else tau.get(step.out, {}))
            for name, part in zip(step.inputs, passed.inputs, strict=True):
                live[name] = _sum(live[name], part, start.token) if name in live else part
            constant, size = constant + passed.constant, size + passed.size
            roundings = max(roundings, rule.roundings + 4 * len(self.rules) + 64)
        region = self.problem.region
        whole = first.new_zeros(len(first), *region.center.shape)
        A = _sum(whole, live[INPUT], start.token) if INPUT in live else whole
        pulled = region.pullback(A)
        size = size + paired(A.abs(), magnitude(self.boxes[INPUT]) + region.spread())
        roundings = max(roundings, 4 * (region.center.numel() + region.n_factors))
        moved = paired(A, region.center) + pulled.abs().sum(-1)
        return moved + constant + gamma(4 * roundings) * size, pulled


def _sum(first: Tensor, second: Tensor, token: int | None) -> Tensor:
    """Coefficients of one value from two readers; those of one token are put in their place first."""
    if first.shape == second.shape:
        return first + second
    whole, single = (first, second) if first.shape[1] > 1 else (second, first)
    place = torch.tensor([token], device=whole.device)
    return whole + torch.zeros_like(whole).index_copy(1, place, single)


def proved(bound: Tensor) -> Tensor:
    """The last rounding; what is not a number says nothing."""
    made = up(bound.detach() + bound.detach().abs() * gamma(64)) + TINY
    return torch.where(made.isnan(), torch.inf, made)


def signs(pulled: Tensor) -> Tensor:
    """The corner of the factor box at which a linear function is largest."""
    return torch.where(pulled.detach() >= 0, 1.0, -1.0).to(pulled)


def plain(walk: Walk, start: Start) -> tuple[Tensor, Tensor]:
    """CROWN: the middle lines."""
    bound, pulled = walk.back(start)
    return proved(bound), signs(pulled)


def _cut(box: Box, lower: Tensor, upper: Tensor) -> Box:
    """Both boxes at once; NaN says nothing."""
    low = torch.where(lower > box.lower, lower, box.lower)
    high = torch.where(upper < box.upper, upper, box.upper)
    return Box(low, high)


def _plain_centre(step: Norm, x: Box) -> Box:
    """m = Px from the box of x: x_k − mean, both apart."""
    if not step.centred:
        return x
    d = x.lower.shape[-1]
    slack = gamma(4 * d + 32) * (magnitude(x) + magnitude(x).mean(-1, keepdim=True)) + TINY
    low = x.lower - x.upper.mean(-1, keepdim=True)
    high = x.upper - x.lower.mean(-1, keepdim=True)
    return Box(down(low - slack), up(high + slack))


def starts(problem: Problem, walk: Walk, forms: Forms) -> Iterator[tuple[Tensor, Start]]:
    """The forms as linear functions of scores and output, some at a time."""
    device = problem.model.device
    shape = (problem.model.architecture.n_heads, problem.n_tokens, problem.n_tokens)
    for part in torch.arange(forms.size).split(walk.chunk()):
        some = forms.select(part)
        made: dict[str, Tensor] = {}
        for layer in some.layers:
            here = some.layer == layer
            A = torch.zeros(len(part), *shape, dtype=torch.float64, device=device)
            place = tuple(t[here].to(device) for t in (some.index, some.head, some.position, some.key))
            A.index_put_(place, some.weight[here].to(device), accumulate=True)
            made[scores_name(layer)] = A
        if some.logits is not None:
            output = walk.boxes[OUTPUT].lower
            A = torch.zeros(len(part), *output.shape, dtype=torch.float64, device=device)
            problem.read_output(A)[...] = some.logits.to(device)
            made[OUTPUT] = A
        if made:
            yield part, Start(made)


def bound_by(problem: Problem, forms: Forms, settle: Settle, last: Settle | None = None) -> FormBounds:
    """Bounds of forms with a way to settle linear functions, and another for the forms themselves."""
    program = form_program(problem, forms)
    walk = Walk.through(problem, program, settle)
    walk.settle = last or settle
    lower, upper = bound_on_box(problem, program, forms, region_box(problem.region))
    bottom, top = (
        torch.ones(forms.size, problem.region.n_factors, dtype=torch.float64, device=lower.device)
        for _ in range(2)
    )
    size = (forms.index.bincount(minlength=forms.size)).to(lower)
    for part, start in starts(problem, walk, forms):
        found = walk.bounds(start)
        # Repeated entries of a form were added up in floats.
        slack = (
            gamma(8)
            * size[part]
            * sum(paired(A.abs(), magnitude(walk.boxes[name])) for name, A in start.values.items())
        )
        place = part.to(lower.device)
        lower[place] = torch.maximum(lower[place], down(found.lower - slack))
        upper[place] = torch.minimum(upper[place], up(found.upper + slack))
        assert found.lower_corner is not None
        assert found.upper_corner is not None
        bottom[place], top[place] = found.lower_corner, found.upper_corner
    return FormBounds(lower, upper, bottom, top)


def crown_work(problem: Problem, depth: int) -> float:
    """About how many multiplications `crown` takes for the scores of layer `depth`.

    Every hidden coordinate goes back twice through the layers before it, and about a third of its own layer.
    """
    shape = problem.model.architecture
    d, d_ff, S = shape.d_model, shape.d_ff, problem.n_tokens
    coordinates = S * (5 * d + 2 * d_ff)
    layer = S * (4 * d * d + (3 if shape.gated else 2) * d * d_ff)
    return 2.0 * coordinates * layer * sum(before + 1.0 / 3.0 for before in range(depth))


@register("crown")
@dataclass(frozen=True)
class Crown:
    """Proved bounds of linear forms of any scores and outputs by backward linear bounds."""

    name: str = "crown"
    guarantee: Guarantee = Guarantee.PROVED

    def refuses(self, problem: Problem, forms: Forms) -> str | None:
        """Only models that are not in float64."""
        return None if problem.model.dtype == torch.float64 else "proofs need a float64 model"

    def bound_forms(self, problem: Problem, forms: Forms) -> FormBounds:
        """Bounds of every form, never looser than `interval`, with corners."""
        if reason := self.refuses(problem, forms):
            raise EngineError(reason)
        with torch.no_grad():
            return bound_by(problem, forms, plain)
