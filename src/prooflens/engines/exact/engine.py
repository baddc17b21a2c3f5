"""The engine `exact`; the method is explained in the package's docstring."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.attack import Attack, attained
from prooflens.engines.attack.search import AttackBudget, inside
from prooflens.engines.attack.targets import Targets
from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.exact.branch import Bounder, ByEngines, Quadratic, maximise
from prooflens.engines.first_layer.entries import Entries
from prooflens.engines.first_layer.layer import FirstLayer
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import NO_OPTIONS, EngineBase, EngineOptions, register, unknown_steps
from prooflens.errors import EngineError
from prooflens.models.held import edits_first_scores
from prooflens.numerics.rounding import TINY, up
from prooflens.problem import Problem

MOST_FACTORS = 64
"""Branch and bound refuses more factors than this."""

MOST_QUERY_FACTORS = 16
"""Vertex enumeration visits 2ᵈ points of the query token, for d up to this."""

VERTICES_AT_ONCE = 2**12
"""How many vertices are evaluated in one batch."""

FIRST_LOOK = AttackBudget(200, 6, 20)
"""The budget of the attack that gives branch and bound its first attained values."""


@dataclass(frozen=True, eq=False)
class ExactBounds:
    """Proved bounds and the values that are attained.

    Attributes:
        lower: proved lower bounds, shape [F].
        upper: proved upper bounds, shape [F].
        attained_lower: the smallest values that were attained, shape [F].
        attained_upper: the largest values that were attained, shape [F].
        lower_alpha: the factors of the smallest values, shape [F, p].
        upper_alpha: the factors of the largest values, shape [F, p].
        visited: how many cells or vertices were visited, shape [F].
    """

    lower: Float[Tensor, " F"]
    upper: Float[Tensor, " F"]
    attained_lower: Float[Tensor, " F"]
    attained_upper: Float[Tensor, " F"]
    lower_alpha: Float[Tensor, "F p"]
    upper_alpha: Float[Tensor, "F p"]
    visited: Int[Tensor, " F"]


@register("exact")
@dataclass(frozen=True)
class Exact(EngineBase):
    """Bound forms on small instances, attained up to the tolerance; the bounds are proved.

    Attributes:
        name: the engine's name in the registry.
        guarantee: proved.
        tolerance: the gap between bound and attained value at which branch and bound stops.
        max_cells: how many cells branch and bound may visit.
        max_slow_cells: the same if `layer0` bounds cells one by one.
        seed: seed of the attack that finds the first values.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(0, 1, 3), 2, 1.0), (0, Row(0, 1, 3), 0, -1.0)], size=1)
        >>> found = Exact().solve(problem, margin)
        >>> 0.0 <= found.attained_lower.item() - found.lower.item() < 1e-6
        True
    """

    name: str = "exact"
    guarantee: Guarantee = Guarantee.PROVED
    tolerance: float = 1e-6
    max_cells: int = 4096
    max_slow_cells: int = 128
    """How many cells may be visited if `layer0` bounds them one by one, in some milliseconds each."""
    seed: int = 0

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        """Refuse unknown steps, a point, constraints, and more than 64 factors unless all forms can be enumerated."""
        if edits_first_scores(problem.model.weights) or problem.model.architecture.free:
            return "exact has no rule for an edited stream in front of block 0: ask taylor or crown"
        if reason := unknown_steps(problem.model.architecture, self.name):
            return reason
        if not problem.model.architecture.has_attention:
            return "exact bounds start from attention scores, and the model has none: ask crown or taylor"
        if problem.region.constraints is not None:
            return "exact bounds need a region without constraints"
        if problem.region.n_factors == 0:
            return "exact bounds need a region that moves: at a point any other engine is as good"
        if problem.region.n_factors > MOST_FACTORS and not bool(enumerable(problem, forms).all()):
            return (
                f"exact bounds need at most {MOST_FACTORS} factors, the region has {problem.region.n_factors}"
            )
        return None

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Return the proved bounds of `solve`, with the factors of its witnesses as corners."""
        found = self.solve(problem, forms, options)
        return FormBounds(found.lower, found.upper, found.lower_alpha, found.upper_alpha)

    def solve(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> ExactBounds:
        """Bound every form on both sides, and give attained values with their witnesses.

        Args:
            problem: the model and the region.
            forms: what to bound.
            options: the deadline; cells that were not halved by then keep the bounds they have.

        Raises:
            EngineError: if the instance is too large.
        """
        if reason := self.refuses(problem, forms, options):
            raise EngineError(reason)
        with torch.no_grad():
            solved = [self._maximise(problem, side, options) for side in (forms.negated(), forms)]
            (minus, lower_alpha, below), (upper, upper_alpha, above) = solved
            alpha, _ = inside(problem.region, torch.cat((lower_alpha, upper_alpha)))
            values = attained(problem, Targets.of_forms(forms, problem.n_tokens), alpha)
        n = forms.size
        return ExactBounds(-minus, upper, values[:n], -values[n:], alpha[:n], alpha[n:], below + above)

    def _maximise(
        self, problem: Problem, forms: Forms, options: EngineOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return proved upper bounds of the forms, the factors that (nearly) attain them, and the work."""
        center = problem.region.center
        bounds = center.new_zeros(forms.size)
        alpha = center.new_zeros(forms.size, problem.region.n_factors)
        visited = torch.zeros(forms.size, dtype=torch.long)
        listed = enumerable(problem, forms)
        view = FirstLayer.of(problem)
        first = self._first_points(problem, forms, ~listed)
        for number in range(forms.size):
            form = forms.select(torch.tensor([number]))
            if bool(listed[number]):
                bounds[number], alpha[number] = _enumerate(view, form)
                visited[number] = 2 ** len(_query_factors(problem, int(form.position[0])))
            else:
                bounder, most = self._bounder(view, form)
                found = maximise(bounder, first[number], self.tolerance, most, lambda: options.late)
                bounds[number], alpha[number], visited[number] = found.bound, found.alpha, found.cells
        return bounds, alpha, visited

    def _bounder(self, view: FirstLayer, form: Forms) -> tuple[Bounder, int]:
        """Return how the cells of a form are bounded, and how many of them there may be."""
        if _is_quadratic(view, form):
            return Quadratic.of(view, form), self.max_cells
        engines = ByEngines.of(view.problem, form)
        return engines, min(self.max_cells, self.max_slow_cells) if engines.by_layer0 else self.max_cells

    def _first_points(self, problem: Problem, forms: Forms, wanted: Tensor) -> Float[Tensor, "F n p"]:
        """Return the centre and the best point of a short attack, for the forms that are branched on."""
        region = problem.region
        points = region.center.new_zeros(forms.size, 1, region.n_factors)
        chosen = wanted.nonzero()[:, 0]
        if not len(chosen):
            return points
        found = Attack(budget=FIRST_LOOK, seed=self.seed).bound_forms(problem, forms.select(chosen))
        assert found.upper_corner is not None
        best = points.clone()
        best[chosen, 0] = found.upper_corner
        return torch.cat((points, best), 1)


def _is_quadratic(view: FirstLayer, forms: Forms) -> bool:
    return view.norm is None and forms.logits is None and all(layer == 0 for layer in forms.layers)


def _query_factors(problem: Problem, position: int) -> Int[Tensor, " m"]:
    """Return the factors of a ball that move one token."""
    token = torch.div(problem.region.moving, problem.region.center.shape[-1], rounding_mode="floor")
    return (token == position).nonzero()[:, 0]


def enumerable(problem: Problem, forms: Forms) -> Tensor:
    """Say for which forms vertex enumeration is exact: those with one query token, which is not one of the keys."""
    region = problem.region
    view = FirstLayer.of(problem)
    fit = torch.zeros(forms.size, dtype=torch.bool)
    if region.radius is None or not _is_quadratic(view, forms):
        return fit
    for number in range(forms.size):
        here = forms.index == number
        queries = set(forms.position[here].tolist())
        if len(queries) == 1 and not queries & set(forms.key[here].tolist()):
            (position,) = queries
            fit[number] = len(_query_factors(problem, position)) <= MOST_QUERY_FACTORS
    return fit


def _enumerate(view: FirstLayer, form: Forms) -> tuple[Tensor, Tensor]:
    """Return the largest value of a single form, rounding added, and the factors that attain it."""
    problem, region = view.problem, view.problem.region
    assert region.radius is not None
    position = int(form.position[0])
    factors = _query_factors(problem, position)
    corners = list(itertools.product((-1.0, 1.0), repeat=len(factors)))
    signs = torch.tensor(corners).reshape(len(corners), len(factors)).to(region.center)
    best, alpha = region.center.new_full((), -torch.inf), region.center.new_zeros(region.n_factors)
    for some in signs.split(VERTICES_AT_ONCE):
        vertex = region.center.new_zeros(len(some), region.n_factors)
        vertex[:, factors] = some
        value, slope = _solved_for_keys(view, form, region.point(vertex)[:, position])
        value = torch.where(value.isnan(), torch.inf, value)
        top = int(value.argmax())
        if float(value[top]) > float(best):
            move = region.pullback(slope[top]).sign()
            move[factors] = some[top]
            best, alpha = value[top], move
    entries = Entries.of(view, form)
    error = up(view.roundoff(entries.longest) * entries.value_size()[0] + TINY)
    bound = up(best + error)
    return torch.where(bound.isnan(), torch.inf, bound), alpha


def _solved_for_keys(
    view: FirstLayer, form: Forms, x: Float[Tensor, "V d"]
) -> tuple[Float[Tensor, " V"], Float[Tensor, "V S d"]]:
    """Return r + Σ_j (c_j·x⁰_j + Σ ε|c_j|) at query tokens x, and the slopes c."""
    radius = view.problem.region.half_widths()
    slope = x.new_zeros(len(x), *radius.shape)
    value = x.new_zeros(len(x))
    columns = (form.head, form.position, form.key, form.weight)
    for head, i, j, weight in zip(*(column.tolist() for column in columns), strict=True):
        at_i, at_j = (torch.full((len(x),), token, device=x.device) for token in (i, j))
        q = torch.nn.functional.linear(x, view.head_weight(view.q, head), view.head_bias(view.q, head))
        q = weight * view.scores.scale * view.turn(view.turn(q, at_i), at_j, back=True)
        bias = view.head_bias(view.k, head)
        value = value if bias is None else value + q @ bias
        if view.scores.bias is not None:
            value = value + weight * view.scores.bias[head, i, j]
        slope[:, j] += q @ view.head_weight(view.k, head)
    return value + (slope * view.center).sum((-2, -1)) + (slope.abs() * radius).sum((-2, -1)), slope
