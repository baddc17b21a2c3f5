"""A walk of `chebyshev` through a program: from the runs of a piece to its scores and its output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.chebyshev.attention import (
    Prefix,
    ScoreValue,
    Weights,
    capped,
    mix,
    scores,
    softmax,
)
from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.chebyshev.tokens import added, affine, elementwise, norm, product, rotary
from prooflens.engines.chebyshev.values import Atom, Piece, Value
from prooflens.engines.relaxations.ellipsoids import total_along
from prooflens.engines.relaxations.norms import grow
from prooflens.errors import EngineError
from prooflens.models.program import INPUT, OUTPUT, Program
from prooflens.models.sites import (
    Add,
    Affine,
    AnyStep,
    Elementwise,
    Mix,
    Norm,
    Pool,
    Product,
    Rotary,
    Scores,
    Softcap,
    Softmax,
)
from prooflens.numerics import gamma

Any = Value | ScoreValue | Weights


@dataclass(eq=False)
class ChebyshevWalk:
    """All values of a piece, each kept while a later step reads it.

    Attributes:
        program: the steps.
        first: the first token that is walked; those before it are constants.
        prefixes: keys and values of the constants, by the name of the pattern that reads them.
        wanted: names of values that are kept to the end.
        kept: keys and values of this walk, for the tokens behind: only of a walk without factors.
        values: what the walk ended with.
    """

    program: Program
    first: int = 0
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    wanted: frozenset[str] = frozenset()
    kept: dict[str, Prefix] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def run(self, grid: Grid, points: Float[Tensor, "b N S d"], blur: float) -> dict[str, Any]:
        """Walk pieces from their runs at the input.

        Args:
            grid: the points of the factors.
            points: the inputs at the points of the grid.
            blur: how far these may be off, per coordinate, relative to the largest of them.
        """
        piece = Piece(grid)
        largest = points.abs().amax(1)
        around = grow(grid.lebesgue * blur * largest) + 2.0**-400
        values: dict[str, Any] = {INPUT: Value(INPUT, piece, points, {}, around)}
        values[INPUT] = values[INPUT].settled()
        last_use = {name: i for i, step in enumerate(self.program.steps) for name in step.inputs}
        for i, step in enumerate(self.program.steps):
            if isinstance(step, Affine) and step.out == OUTPUT:
                values["head"] = values[step.inputs[0]]
                break
            values[step.out] = self._step(step, values)
            self._keep(step, values)
            for name in step.inputs:
                if last_use[name] == i and name not in self.wanted:
                    values.pop(name, None)
            if isinstance(step, Add):
                values[step.out] = values[step.out].settled()
                piece.forget(values.values())
        return values

    def _keep(self, step: AnyStep, values: dict[str, Any]) -> None:
        """Keep keys and values of constants."""
        if isinstance(step, Scores) and self.first == 0 and values[step.out].piece.grid.size == 1:
            made = values[step.out]
            name = f"{_layer(step.out)}.attn.hook_v"
            self.kept[_layer(step.out)] = Prefix.of(made.k, values.get(name, made.k))

    def _step(self, step: AnyStep, values: dict[str, Any]) -> Any:
        tokens = slice(self.first, None)
        given = [values[name] for name in step.inputs]
        match step:
            case Affine():
                return affine(step, given[0])
            case Rotary():
                return rotary(step, given[0], tokens)
            case Add():
                return added(step.out, given[0], given[1])
            case Norm():
                return norm(step, given[0])
            case Elementwise():
                return elementwise(step.out, step.function, given[0])
            case Product():
                return product(step.out, given[0], given[1])
            case Scores():
                return scores(step, given[0], given[1], tokens, self.prefixes.get(_layer(step.out)))
            case Softcap():
                return capped(step, given[0])
            case Softmax():
                return softmax(given[0]), given[0]
            case Mix():
                weights, made = given[0]
                return mix(step.out, made, weights, given[1])
            case Pool():
                return pooled(step, given[0], self.first)
        raise EngineError(f"chebyshev has no rule for the step that makes {step.out}")


def _layer(name: str) -> str:
    return name.split(".attn.")[0]


def pooled(step: Pool, value: Value, first: int) -> Value:
    """A weighted sum over tokens."""
    weights = step.weights[first:]
    runs = torch.einsum("s,bnsd->bnd", weights, value.runs)[:, :, None]
    shapes = value.shape * weights.square()[None, :, None, None] * (1.0 + 2.0**-40)
    atom = Atom(total_along(shapes)[:, None])
    value.piece.atoms[step.out] = atom
    rounding = torch.einsum("s,bsd->bd", weights.abs(), value.runs.abs().amax(1))[:, None]
    around = grow(value.piece.grid.lebesgue * gamma(len(weights) + 8) * rounding)
    return Value(step.out, value.piece, runs, {step.out: None}, around)
