"""A walk of `chebyshev` through a program: from the runs of a piece to its scores and its output."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.chebyshev.attention import (
    Prefix,
    ScoreValue,
    Weights,
    capped,
    scores,
    softmax,
)
from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.chebyshev.mixing import mix
from prooflens.engines.chebyshev.norms import norm
from prooflens.engines.chebyshev.solu import solu
from prooflens.engines.chebyshev.tokens import added, affine, elementwise, opened, product, rotary, shifted
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
    Shift,
    Softcap,
    Softmax,
    Solu,
)
from prooflens.numerics import gamma
from prooflens.progress import Progress, silent

AnyValue = Value | ScoreValue | Weights

HIDDEN = "hidden"
"""The name of what the head reads, or of the output itself where there is no head."""


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
        tell: is told before every step which layer is walked and which share of the steps is done; may end the walk.
    """

    program: Program
    first: int = 0
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    wanted: frozenset[str] = frozenset()
    kept: dict[str, Prefix] = field(default_factory=dict)
    values: dict[str, AnyValue] = field(default_factory=dict)
    tell: Progress = silent

    def run(
        self, grid: Grid, points: Float[Tensor, "b N S d"], around: Float[Tensor, "S d"]
    ) -> dict[str, AnyValue]:
        """Walk pieces from their runs at the input.

        Args:
            grid: the points of the factors.
            points: the inputs at the points of the grid.
            around: how far these may be off.
        """
        piece = Piece(grid)
        around = grow(grid.lebesgue * around.expand(points[:, 0].shape)) + 2.0**-400
        values: dict[str, AnyValue] = {INPUT: Value(INPUT, piece, points, {}, around).settled()}
        last_use = {name: i for i, step in enumerate(self.program.steps) for name in step.inputs}
        for i, step in enumerate(self.program.steps):
            if isinstance(step, Affine) and step.out == OUTPUT:
                values[HIDDEN] = values[step.inputs[0]]
                break
            self.tell(_stage(step.out), i / len(self.program.steps))
            made = self._step(step, [values[name] for name in step.inputs])
            self._keep(step, made, values)
            values[step.out] = made
            for name in step.inputs:
                if last_use[name] == i and name not in self.wanted:
                    values.pop(name, None)
            if isinstance(step, Add) and isinstance(made, Value):
                values[step.out] = made.settled()
                piece.forget(values.values())
        return values

    def _keep(self, step: AnyStep, made: AnyValue, values: dict[str, AnyValue]) -> None:
        """Keep keys and values of constants: a walk of one point is for the tokens behind it."""
        if isinstance(made, ScoreValue) and isinstance(step, Scores) and made.piece.grid.size == 1:
            mixes = (other for other in self.program.steps if isinstance(other, Mix))
            names = [mix.inputs[1] for mix in mixes if _layer(mix.out) == _layer(step.out)]
            v = values.get(names[0]) if names else None
            self.kept[_layer(step.out)] = Prefix.of(made.k, v if isinstance(v, Value) else made.k)

    def _step(self, step: AnyStep, given: list[AnyValue]) -> AnyValue:
        tokens = slice(self.first, None)
        if not isinstance(step, Affine | Product):  # all others read errors as atoms alone
            given = [opened(value) if isinstance(value, Value) else value for value in given]
        match step, given:
            case Affine(), [Value() as x]:
                return affine(step, x)
            case Rotary(), [Value() as x]:
                return rotary(step, x, tokens)
            case Shift(), [Value() as x]:
                return shifted(step, x, tokens)
            case Add(), [Value() as x, Value() as y]:
                return added(step.out, x, y)
            case Norm(), [Value() as x]:
                return norm(step, x)
            case Elementwise(), [Value() as x]:
                return elementwise(step.out, step.function, x)
            case Solu(), [Value() as x]:
                return solu(step, x)
            case Product(), [Value() as x, Value() as y]:
                return product(step.out, x, y)
            case Scores(), [Value() as q, Value() as k]:
                return scores(step, q, k, tokens, self.prefixes.get(_layer(step.out)))
            case Softcap(), [ScoreValue() as a]:
                return capped(step, a)
            case Softmax(), [ScoreValue() as a]:
                return softmax(a)
            case Mix(), [Weights() as p, Value() as v]:
                return mix(step.out, p, v)
            case Pool(), [Value() as x]:
                return pooled(step, x, self.first)
        raise EngineError(f"chebyshev has no rule for the step that makes {step.out}")


def _stage(name: str) -> str:
    """The layer of a value, in words."""
    layer = re.match(r"blocks\.(\d+)\.", name)
    return f"layer {layer[1]}" if layer else "output"


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
