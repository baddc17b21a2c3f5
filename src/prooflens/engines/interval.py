r"""Engine `interval`: interval bounds of every value of a model (IBP), for every family, layer and output.

Each value gets a box; `relaxations.interval_steps` says how a step maps boxes to a box. Dependence between
coordinates is forgotten, so boxes widen with depth, but the structural facts (`thm:ln`, `thm:convex`, weights on the
simplex) keep them finite. A linear form Σ w·a of values in boxes lies in

    [ Σ w⁺a̲ − w⁻ā,   Σ w⁺ā − w⁻a̲ ],

rounded outward. Constraints of a region are ignored, which only makes it larger.
"""

from __future__ import annotations

from dataclasses import dataclass

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.costs import FORM_STEPS, Cost, weights_before
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineBase, EngineOptions, register
from prooflens.engines.relaxations.interval_walk import bound_on_box, form_program, region_box
from prooflens.problem import Problem


@register("interval")
@dataclass(frozen=True)
class IntervalEngine(EngineBase):
    """Bound linear forms of any scores and outputs by interval arithmetic; the bounds are proved.

    It is the fastest engine and the loosest one.

    Attributes:
        name: the engine's name in the registry.
        guarantee: proved.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(0, 1, 3), 2, 1.0), (0, Row(0, 1, 3), 0, -1.0)], size=1)
        >>> found = IntervalEngine().bound_forms(problem, margin)
        >>> 0.25 < found.lower.item() < found.upper.item() < 0.45
        True
    """

    name: str = "interval"
    guarantee: Guarantee = Guarantee.PROVED

    def cost(self, problem: Problem, depth: int, size: int) -> Cost:
        """Predict a walk of boxes: three products with each weight matrix, and one with its absolute values."""
        architecture, S = problem.model.architecture, problem.n_tokens
        weights = weights_before(architecture, depth)
        values = S * (12 * architecture.d_model + 4 * architecture.d_ff) + architecture.n_heads * S * S * 8
        steps = 4000.0 * (depth + 1) + 1500.0 * architecture.n_layers + FORM_STEPS * size
        held = 8.0 * (4 * architecture.d_model * architecture.d_ff + values)
        return Cost(4.0 * S * weights, 8.0 * (6 * weights + 20 * (depth + 1) * values), steps, held)

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form; ±∞ where a value could not be bounded."""
        program = form_program(problem, forms)
        bounds = bound_on_box(problem, program, forms, region_box(problem.region))
        return FormBounds(*bounds)
