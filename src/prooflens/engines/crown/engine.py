"""The engine `crown`; the method is explained in the package's docstring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.costs import FORM_STEPS, Cost
from prooflens.engines.crown.steps import magnitude
from prooflens.engines.crown.walk import BUDGET_ELEMENTS, Concretise, LineWalk, Start, plain
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineBase, EngineOptions, register
from prooflens.engines.relaxations.interval_walk import bound_on_box, form_program, region_box
from prooflens.models import OUTPUT, scores_name
from prooflens.numerics import down, gamma, up
from prooflens.problem import Problem


def starts(problem: Problem, walk: LineWalk, forms: Forms) -> Iterator[tuple[Tensor, Start]]:
    """Yield the forms as linear functions of scores and output, some at a time."""
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


def repeated(walk: LineWalk, forms: Forms) -> Float[Tensor, " F"]:
    """Bound what adding up a form's repeated entries in floats may lose: γ_n Σ|w||a| for its n entries.

    Args:
        walk: boxes of the scores.
        forms: the forms.
    """
    size = torch.zeros(forms.size, dtype=torch.float64)
    for layer in forms.layers:
        here = forms.layer == layer
        most = magnitude(walk.boxes[scores_name(layer)]).cpu()
        terms = forms.weight[here].abs() * most[forms.head[here], forms.position[here], forms.key[here]]
        size.index_add_(0, forms.index[here], terms)
    return gamma(2 * len(forms.index) + 8) * size


def bound_by(
    problem: Problem, forms: Forms, settle: Concretise, last: Concretise | None = None
) -> FormBounds:
    """Bound forms by backward linear bounds.

    Args:
        problem: the model and the region.
        forms: what to bound.
        settle: finds upper bounds of linear functions of hidden values.
        last: finds upper bounds of the forms themselves; None for `settle`.
    """
    walk = LineWalk.through(problem, form_program(problem, forms), settle)
    walk.settle = last or settle
    return bound_on(walk, forms)


def bound_on(walk: LineWalk, forms: Forms) -> FormBounds:
    """Bound forms on the boxes of a walk, never looser than by intervals.

    Args:
        walk: boxes and rules of all steps that the forms read, and how linear functions are bounded.
        forms: what to bound.
    """
    problem = walk.problem
    program = form_program(problem, forms)
    lower, upper = bound_on_box(problem, program, forms, region_box(problem.region))
    bottom, top = (
        torch.ones(forms.size, problem.region.n_factors, dtype=torch.float64, device=lower.device)
        for _ in range(2)
    )
    slack = repeated(walk, forms).to(lower)
    for part, start in starts(problem, walk, forms):
        found = walk.bounds(start)
        place = part.to(lower.device)
        lower[place] = torch.maximum(lower[place], down(found.lower - slack[place]))
        upper[place] = torch.minimum(upper[place], up(found.upper + slack[place]))
        assert found.lower_corner is not None
        assert found.upper_corner is not None
        bottom[place], top[place] = found.lower_corner, found.upper_corner
    return FormBounds(lower, upper, bottom, top)


def crown_work(problem: Problem, depth: int) -> float:
    """Estimate how many multiplications `crown` takes for the scores of layer `depth`.

    Every hidden coordinate goes back twice through the layers before it, and about a third of its own layer; in the
    layer of the scores only queries and keys do.
    """
    shape = problem.model.architecture
    d, d_ff, S = shape.d_model, shape.d_ff, problem.n_tokens
    coordinates = S * (5 * d + 2 * d_ff)
    layer = S * (4 * d * d + (3 if shape.gated else 2) * d * d_ff)
    last = 2.0 * 2 * S * d * d * d
    return last + 2.0 * coordinates * layer * sum(before + 1.0 / 3.0 for before in range(depth))


PASSES = 2200
"""How often all numbers of forms by tokens by coordinates are read or written in a layer (measured)."""


GATE_SHARE = 1.4
"""By how much networks with gates cost more: their products are bounded from two sides (measured)."""


@register("crown")
@dataclass(frozen=True)
class Crown(EngineBase):
    """Bound linear forms of any scores and outputs by backward linear bounds (CROWN); the bounds are proved.

    Attributes:
        name: the engine's name in the registry.
        guarantee: proved.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(1, 0, 3), 2, 1.0), (0, Row(1, 0, 3), 0, -1.0)], size=1)
        >>> found = Crown().bound_forms(problem, margin)
        >>> 0.02 < found.lower.item() < found.upper.item() < 0.11
        True
    """

    name: str = "crown"
    guarantee: Guarantee = Guarantee.PROVED

    def cost(self, problem: Problem, depth: int, size: int) -> Cost:
        """Predict the way back of every hidden coordinate, and of the forms themselves."""
        numbers = problem.region.center.numel()
        traffic = 8.0 * PASSES * size * numbers * (depth + 1)
        steps = 2000.0 * problem.n_tokens * (depth + 1) ** 2 + FORM_STEPS * size
        widest = problem.n_tokens * max(problem.model.architecture.d_model, problem.model.architecture.d_ff)
        memory = 8.0 * (12 * min(BUDGET_ELEMENTS, widest * numbers) + 4 * size * numbers)
        gates = GATE_SHARE if problem.model.architecture.gated else 1.0
        return Cost(gates * crown_work(problem, depth), traffic, steps, memory)

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form, never looser than `interval`, with corners."""
        return bound_by(problem, forms, plain)
