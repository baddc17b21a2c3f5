r"""Engines `pz`, `cpz` and their ablations: sequential propagation of constrained polynomial zonotopes.

The paper's "CPZ Propagation Through the Transformer Block", step by step through whole blocks, with every unsound
step replaced (soundness.md, rows 4 and 11) and rounding accounted for: the guarantee is *proved*.
`tensor_sets.tensor_set` says what is propagated, `tensor_sets.steps` what each step does, `tensor_sets.forms` how
scores become bounds.

| name | simplex constraint | norm constraint | softmax |
|---|---|---|---|
| `pz` | – | – | centre–residual |
| `pz-simplex` | yes | – | Taylor |
| `pz-norm` | – | yes | centre–residual |
| `cpz` | yes | yes | Taylor |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.forms import Forms
from prooflens.engines.hidden import HiddenBounds, headless, nothing_known
from prooflens.engines.protocol import NO_OPTIONS, EngineBase, EngineOptions, register
from prooflens.engines.tensor_sets.steps import SetOptions
from prooflens.engines.tensor_sets.tensor_set import TensorSet
from prooflens.engines.tensor_sets.walk import SetWalk, bound_from, propagate, read_names, score_steps
from prooflens.models import OUTPUT
from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.problem import Problem


@dataclass(frozen=True)
class PolyZono(EngineBase):
    """Bound linear forms of any layer's scores and of the output by propagating polynomial zonotopes; proved.

    Attributes:
        name: the engine's name in the registry: `pz`, `pz-simplex`, `pz-norm` or `cpz`.
        options: which constraints and relaxations are used.
        guarantee: proved.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(0, 1, 3), 2, 1.0), (0, Row(0, 1, 3), 0, -1.0)], size=1)
        >>> found = PolyZono().bound_forms(problem, margin)
        >>> 0.32 < found.lower.item() < found.upper.item() < 0.40
        True
    """

    name: str = "cpz"
    options: SetOptions = field(default_factory=SetOptions)
    guarantee: Guarantee = Guarantee.PROVED

    def walk(self, problem: Problem, keep: Iterable[str]) -> SetWalk:
        """Propagate sets through the program and keep those of some named values, with the record of all stages.

        Args:
            problem: the model and the region.
            keep: the names of the values whose sets are wanted.
        """
        names = tuple(keep)
        program = problem.model.program(problem.n_tokens, names, problem.padding)
        with torch.no_grad():
            return propagate(program, problem.region, self.options, names)

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form, with the corners of the region they were expanded around."""
        steps = score_steps(problem, forms)
        names = read_names(steps)
        if forms.logits is not None:
            names.add(OUTPUT)
        return bound_from(self.walk(problem, sorted(names)).sets, problem, forms, steps)

    def bound_hidden(self, problem: Problem, options: EngineOptions = NO_OPTIONS) -> HiddenBounds:
        """Enclose the vector that the head reads: monomials of its set become generators, the rest the box."""
        made = self.walk(headless(problem), [OUTPUT]).sets.get(OUTPUT)
        return nothing_known(problem) if made is None else hidden_of(made)


def hidden_of(x: TensorSet) -> HiddenBounds:
    """Return a polynomial zonotope as an enclosure: every monomial is a generator, squares around their middle."""
    squares = x.pairs[:, 0] == x.pairs[:, 1]
    half = 0.5 * x.Q[squares]
    A = torch.cat((x.L, x.Q[~squares], half)).T
    h0 = x.c + half.sum(0)
    slack = gamma(len(half) + 4) * (x.c.abs() + half.abs().sum(0))
    made = HiddenBounds(h0, up(x.r + up(2.0 * slack + TINY)), A)
    if x.box is None:
        return made
    # The box holds too: where it is narrower it is all that is kept of a coordinate.
    center = 0.5 * x.box.lower + 0.5 * x.box.upper
    width = up(torch.maximum(x.box.upper - center, center - x.box.lower)) + TINY
    narrow = width < made.box
    return HiddenBounds(
        torch.where(narrow, center, h0),
        torch.where(narrow, width, made.E),
        torch.where(narrow[:, None], 0.0, A),
    )


VARIANTS = {
    "pz": SetOptions(simplex=False, norm=False, taylor=False),
    "pz-simplex": SetOptions(norm=False),
    "pz-norm": SetOptions(simplex=False, taylor=False),
    "cpz": SetOptions(),
}
"""The registered engines: neither constraint, each alone, both."""

for _name, _options in VARIANTS.items():
    register(_name)(partial(PolyZono, _name, _options))
