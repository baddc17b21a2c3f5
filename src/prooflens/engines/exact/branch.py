r"""Branch and bound over the factor box: the largest value of one form, with a certificate, at any time.

The box [−1, 1]ᵖ is cut into cells; every cell has an upper bound of the form. Cells whose bound is not above the best
value attained so far, by more than the tolerance, are closed; the others are halved, the highest first. At any time

    best attained value  ≤  maximum  ≤  largest bound of all open and closed cells.

Three ways to bound cells:

* **Quadratic** (layer 0 without a norm): f(α) = c + aᵀα + αᵀHα, coefficients written out. Around the middle m of a
  cell with half-widths h and g = a + 2Hm,
  f ≤ f(m) + Σ_k max_{|δ|≤h_k}(g_kδ + H_kkδ²) + Σ_{k≠l} |H_kl|h_kh_l   (`lem:quadratic_bound`, exact in the diagonal),
  and a coordinate with |g_k| > 2Σ_l |H_kl|h_l is monotone: its face is all that matters. The coefficients and all of
  this err by at most γ_N times the form's absolute-value chain, which is added once.
* **Layer 0 with a norm**: engine `layer0` on each cell of a ball, intersected with intervals.
* **Everything else**: engine `interval`, all cells at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.attack.landscape import Landscape
from prooflens.engines.attack.targets import Targets
from prooflens.engines.first_layer.entries import Entries
from prooflens.engines.first_layer.layer import FirstLayer
from prooflens.engines.forms import Forms
from prooflens.engines.layer0 import Layer0
from prooflens.engines.relaxations.interval_steps import linear_box
from prooflens.engines.relaxations.interval_walk import bound_on_box, form_program
from prooflens.models.program import Program
from prooflens.models.sites import Affine
from prooflens.numerics.rounding import TINY, gamma, up
from prooflens.problem import Problem
from prooflens.queries import Box
from prooflens.regions import Region

CELLS_AT_ONCE = 256
"""How many cells are halved in one round."""


class Cells(NamedTuple):
    """Boxes of factors."""

    lower: Float[Tensor, "N p"]
    upper: Float[Tensor, "N p"]

    @property
    def middle(self) -> Float[Tensor, "N p"]:
        """A point of each cell: the floats halfway."""
        return 0.5 * (self.lower + self.upper)

    @property
    def half(self) -> Float[Tensor, "N p"]:
        """Half-widths around `middle`, up to rounding."""
        return 0.5 * (self.upper - self.lower)

    def select(self, chosen: Tensor) -> Cells:
        """Return some of the cells."""
        return Cells(self.lower[chosen], self.upper[chosen])


class Assessment(NamedTuple):
    """What is known of cells: bounds, a good point of each, where to cut it, and cells that may be smaller."""

    bound: Float[Tensor, " N"]
    point: Float[Tensor, "N p"]
    value: Float[Tensor, " N"]
    cut: Tensor
    cells: Cells


class Bounder(Protocol):
    """Bounds one form from above on cells."""

    @property
    def slack(self) -> float:
        """What must be added to a bound for it to be proved."""
        ...

    def assess(self, cells: Cells) -> Assessment:
        """Bound the form on cells; the maximum over a cell is attained in the cell that is returned for it."""
        ...


class Maximum(NamedTuple):
    """A proved upper bound, the largest value that was attained (in floats), where, and the cells it took."""

    bound: float
    attained: float
    alpha: Float[Tensor, " p"]
    cells: int


def maximise(
    bounder: Bounder,
    first: Float[Tensor, "n p"],
    tolerance: float,
    max_cells: int,
    late: Callable[[], bool] = lambda: False,
) -> Maximum:
    """Maximise a form by branch and bound from the whole box.

    Args:
        bounder: bounds the form on cells.
        first: points to begin with, as cells of width 0.
        tolerance: the gap at which to stop.
        max_cells: how many cells may be visited.
        late: whether it is time to stop; the bound of the cells so far is returned.
    """
    p = first.shape[-1]
    seen = bounder.assess(Cells(first, first))
    best = int(seen.value.argmax())
    attained, alpha = float(seen.value[best]), first[best]
    whole = first.new_ones(1, p)
    open_ = bounder.assess(Cells(-whole, whole))
    used, closed = 1, -torch.inf
    while True:
        top = int(open_.value.argmax())
        if float(open_.value[top]) > attained:
            attained, alpha = float(open_.value[top]), open_.point[top]
        finished = (open_.bound <= attained + tolerance) | ((open_.cells.upper == open_.cells.lower).all(-1))
        if bool(finished.any()):
            closed = max(closed, float(open_.bound[finished].max()))
            open_ = _choose(open_, (~finished).nonzero()[:, 0])
        if not len(open_.bound):
            return Maximum(_proved(closed, bounder.slack), attained, alpha, used)
        if used >= max_cells or late():
            most = max(closed, float(open_.bound.max()))
            return Maximum(_proved(most, bounder.slack), attained, alpha, used)
        order = open_.bound.argsort(descending=True)
        many = max(1, min(CELLS_AT_ONCE, (max_cells - used) // 2))
        now, later = order[:many], order[many:]
        children, parents = _halve(_choose(open_, now))
        found = bounder.assess(children)
        found = found._replace(bound=torch.minimum(found.bound, parents))
        used += len(found.bound)
        open_ = _join(_choose(open_, later), found)


def _proved(bound: float, slack: float) -> float:
    """Return the bound with its slack; ∞ where either has left the numbers."""
    made = up(bound + slack)
    return made if made > -math.inf else math.inf


def _choose(some: Assessment, chosen: Tensor) -> Assessment:
    return Assessment(
        some.bound[chosen],
        some.point[chosen],
        some.value[chosen],
        some.cut[chosen],
        some.cells.select(chosen),
    )


def _join(one: Assessment, other: Assessment) -> Assessment:
    bound, point, value, cut = (torch.cat(parts) for parts in zip(one[:4], other[:4], strict=True))
    lower, upper = (torch.cat(ends) for ends in zip(one.cells, other.cells, strict=True))
    return Assessment(bound, point, value, cut, Cells(lower, upper))


def _halve(some: Assessment) -> tuple[Cells, Float[Tensor, " 2N"]]:
    """Return both halves of each cell, cut at its middle, and the bound of the whole."""
    at = torch.nn.functional.one_hot(some.cut, some.point.shape[-1]).bool()
    middle = some.cells.middle
    lower = torch.cat((some.cells.lower, torch.where(at, middle, some.cells.lower)))
    upper = torch.cat((torch.where(at, middle, some.cells.upper), some.cells.upper))
    return Cells(lower, upper), some.bound.repeat(2)


@dataclass(frozen=True, eq=False)
class Quadratic:
    """A form c + aᵀα + αᵀHα with H symmetric, off by at most `slack` everywhere."""

    c: Float[Tensor, ""]
    a: Float[Tensor, " p"]
    H: Float[Tensor, "p p"]
    slack: float
    sure: float
    """A slope of at least this size has the sign that it seems to have."""

    @classmethod
    def of(cls, view: FirstLayer, forms: Forms) -> Quadratic:
        """Write out the coefficients of a single form of layer-0 scores, for a model without a norm before them."""
        region = view.problem.region
        G = region.dense_generators()
        p = region.n_factors
        c, a, H = G.new_zeros(()), G.new_zeros(p), G.new_zeros(p, p)
        columns = (forms.head, forms.position, forms.key, forms.weight)
        for head, i, j, weight in zip(*(column.tolist() for column in columns), strict=True):
            q, Q = _affine(view, head, i, view.q, G)
            k, K = _affine(view, head, j, view.k, G)
            scale = weight * view.scores.scale
            c = c + scale * (q @ k)
            if view.scores.bias is not None:
                c = c + weight * view.scores.bias[head, i, j]
            a = a + scale * (Q @ k + K @ q)
            H = H + scale * (Q @ K.T)
        H = 0.5 * (H + H.T)
        entries = Entries.of(view, forms)
        chain = float(entries.value_size()[0])
        total = float(c.abs() + a.abs().sum() + H.abs().sum())
        # Slopes and bounds are sums of at most 4(p + 4) terms with at most 4 times this absolute value; the middle and
        # the half-widths of a cell, off by u, count among their roundings.
        sure = up(gamma(16 * p + 128) * 8.0 * total + TINY)
        slack = up(up(view.roundoff(entries.longest + p) * chain) + sure)
        return cls(c, a, H, slack, sure)

    def assess(self, cells: Cells) -> Assessment:
        """Bound cells in two rounds: the second on the faces that monotone coordinates leave."""
        for _ in range(2):
            slope = self.a + 2.0 * cells.middle @ self.H
            spread = 2.0 * cells.half @ self.H.abs()
            rising, falling = slope - spread > self.sure, slope + spread < -self.sure
            cells = Cells(
                torch.where(rising, cells.upper, cells.lower), torch.where(falling, cells.lower, cells.upper)
            )
        m, h = cells.middle, cells.half
        slope = self.a + 2.0 * m @ self.H
        diagonal = self.H.diagonal()
        bend = slope.square() / (-4.0 * diagonal).clamp(min=TINY)
        inner = (diagonal < 0) & (slope.abs() < -2.0 * diagonal * h)
        along = torch.where(inner, bend, slope.abs() * h + diagonal * h.square())
        couplings = self.H.abs() - torch.diag(diagonal.abs())
        across = (h @ couplings) * h
        bound = self._value(m) + along.sum(-1) + across.sum(-1)
        top = torch.where(inner, slope / (-2.0 * diagonal).clamp(min=TINY), h * slope.sign())
        point = torch.minimum(torch.maximum(m + top, cells.lower), cells.upper)
        # A cut helps where it takes away couplings; the widest factor when there are none left.
        cut = (across + TINY * h).argmax(-1)
        bound = torch.where(bound.isnan(), torch.inf, bound)
        return Assessment(bound, point, self._value(point), cut, cells)

    def _value(self, alpha: Float[Tensor, "N p"]) -> Float[Tensor, " N"]:
        value: Tensor = self.c + alpha @ self.a + ((alpha @ self.H) * alpha).sum(-1)
        return value


def _affine(
    view: FirstLayer, head: int, token: int, step: Affine, G: Float[Tensor, "p S d"]
) -> tuple[Float[Tensor, " d_h"], Float[Tensor, "p d_h"]]:
    """Return a query or key of one token as a function of the factors: constant and slopes."""
    weight, bias = view.head_weight(step, head), view.head_bias(step, head)
    constant = torch.nn.functional.linear(view.center[token][None], weight, bias)
    at = torch.full((len(G) + 1,), token, device=G.device)
    turned = view.turn(torch.cat((constant, G[:, token] @ weight.T)), at)
    return turned[0], turned[1:]


@dataclass(frozen=True, eq=False)
class ByEngines:
    """Cells bounded by `interval`, all at once, and by `layer0`, one by one, where it applies."""

    problem: Problem
    forms: Forms
    program: Program
    landscape: Landscape
    target: Targets
    by_layer0: bool
    slack: float = 0.0

    @classmethod
    def of(cls, problem: Problem, forms: Forms) -> ByEngines:
        """Make a bounder for a single form."""
        about_output = forms.logits is not None
        landscape = Landscape.of(problem, forms.layers, about_output, problem.model)
        target = Targets.of_forms(forms, problem.n_tokens).to(problem.region.center)
        applies = problem.region.generators is None and Layer0().refuses(problem, forms) is None
        program = form_program(problem, forms)
        return cls(problem, forms, program, landscape, target.select(torch.tensor([0])), applies)

    def assess(self, cells: Cells) -> Assessment:
        """Bound cells by both engines; the point is the corner of the cell that the slope at its middle points to."""
        m, h = cells.middle, cells.half
        _, slope = self.landscape.descent(self.target, m[None])
        point = torch.minimum(torch.maximum(m + h * slope[0].sign(), cells.lower), cells.upper)
        value = self.landscape.values(self.target, point[None])[0]
        # The longest edge in the model's input: rules by slopes leave some edge uncut and its nonlinearity with it.
        cut = (h * self.problem.region.dense_generators().abs().sum((-2, -1))).argmax(-1)
        return Assessment(self._bound(self._box(cells)), point, value, cut, cells)

    def _box(self, cells: Cells) -> Box:
        """Return x₀ + Gα over the cells."""
        region = self.problem.region
        G = region.dense_generators().flatten(1).T
        flat = linear_box(Box(*cells), G, region.center.flatten())
        return Box(*(end.reshape(-1, *region.center.shape) for end in flat))

    def _bound(self, box: Box) -> Float[Tensor, " N"]:
        with torch.no_grad():
            bound = bound_on_box(self.problem, self.program, self.forms, box)[1][..., 0]
        if not self.by_layer0:
            return bound
        found = [self._layer0(Box(*ends)) for ends in zip(*box, strict=True)]
        return torch.minimum(bound, torch.stack(found))

    def _layer0(self, box: Box) -> Float[Tensor, ""]:
        center = 0.5 * box.lower + 0.5 * box.upper
        radius = torch.maximum(up(box.upper - center), up(center - box.lower))
        part = Problem(self.problem.model, Region(center, radius=radius), self.problem.padding)
        return Layer0().bound_forms(part, self.forms).upper[0]
