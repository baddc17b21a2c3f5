"""Forms read off the end of a walk: scores of some layers, and the output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.chebyshev.attention import Prefix, ScoreValue
from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.chebyshev.tokens import opened
from prooflens.engines.chebyshev.values import Value
from prooflens.engines.chebyshev.walk import HIDDEN, ChebyshevWalk
from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.ellipsoids import supports_of
from prooflens.engines.relaxations.norms import grow, length
from prooflens.models.program import OUTPUT, Program, scores_name
from prooflens.models.sites import Affine
from prooflens.models.tree import restricted
from prooflens.numerics import gamma
from prooflens.problem import Problem
from prooflens.progress import Progress, silent

BLUR = 2.0**-46
"""How far an input may be off, relative to |c| + Σ|G|: points of the grid, factors and sums of six are rounded."""


def blurred(problem: Problem) -> Float[Tensor, "S d"]:
    """How far computed inputs may be from those of the region at the exact points."""
    return BLUR * (problem.region.center.abs() + problem.region.half_widths())


def last_token(problem: Problem) -> int:
    """The token whose output is read where outputs are not pooled over all: the last that is no padding."""
    return problem.n_tokens - 1 if problem.padding is None else int(problem.padding.nonzero().max())


def first_moving(problem: Problem) -> int:
    """The first token that moves, if all before it are constants at every depth; 0 if tokens see later ones.

    No later than the token whose output is read, so that one is walked in any case.
    """
    architecture = problem.model.architecture
    if not architecture.causal or architecture.pool not in ("none", "last"):
        return 0
    moves = (problem.region.half_widths() != 0).any(-1).nonzero()
    return min(int(moves[0, 0]), last_token(problem)) if len(moves) else last_token(problem)


def piece_memory(problem: Problem, grid: Grid, first: int) -> int:
    """About how many bytes one piece takes: maps of errors, and runs on the grid and on the finer one.

    Args:
        problem: the model and the region.
        grid: the points of a piece.
        first: the first token that is walked.
    """
    architecture = problem.model.architecture
    d, tokens = architecture.d_model, problem.n_tokens - first
    wide = architecture.d_ff if architecture.has_network else d
    keys = problem.n_tokens * architecture.n_heads * architecture.head_dim
    runs = grid.size * (30 * wide + 6 * keys) + grid.finer.grid.size * 6 * wide
    neurons = 16 * wide * wide if architecture.activation == "solu" else 0  # their errors are dense
    return 8 * tokens * (5 * wide * d + 16 * d * d + neurons + runs)


@dataclass(eq=False)
class Reading:
    """Walks pieces and reads forms off.

    Attributes:
        problem: the model and the region.
        forms: what is asked.
        program: the steps up to what the forms read.
        first: the first token that is walked.
        prefixes: what later tokens read of the constants before it.
        fixed: the scores of the constants, by layer.
        tell: is told of every step of a piece.
    """

    problem: Problem
    forms: Forms
    program: Program
    first: int
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    fixed: dict[int, ScoreValue] = field(default_factory=dict)
    tell: Progress = silent

    def read(
        self, grid: Grid, points: Float[Tensor, "b N S d"]
    ) -> tuple[Float[Tensor, "b N F"], Float[Tensor, "b F"]]:
        """Return the forms at the points of the grid, and how far they may be from the polynomial through these.

        Args:
            grid: the points of the factors.
            points: the inputs there.
        """
        wanted = frozenset(scores_name(layer) for layer in self.forms.layers)
        walk = ChebyshevWalk(self.program, self.first, self.prefixes, wanted, tell=self.tell)
        values = walk.run(grid, points[:, :, self.first :], blurred(self.problem)[self.first :])
        b, F = len(points), self.forms.size
        runs, missed = points.new_zeros(b, grid.size, F), points.new_zeros(b, F)
        for layer in self.forms.layers:
            made = values[scores_name(layer)]
            assert isinstance(made, ScoreValue)
            more, off = self._scores(layer, made)
            runs, missed = runs + more, missed + off
        if self.forms.logits is not None:
            value = values.get(HIDDEN, values.get(OUTPUT))
            assert isinstance(value, Value)
            more, off = self._output(opened(value))
            runs, missed = runs + more, missed + off
        parts = len(self.forms.layers) + (self.forms.logits is not None)
        rounding = grid.lebesgue * gamma(8 + parts) * runs.abs().amax(1)
        return runs, grow(missed + rounding) + 2.0**-400

    def told(self, tell: Progress) -> None:
        """Tell of the steps of pieces from here on.

        Args:
            tell: is told of every step, and may end the walk.
        """
        self.tell = tell

    def _scores(self, layer: int, made: ScoreValue) -> tuple[Tensor, Tensor]:
        here = self.forms.layer == layer
        device = made.runs.device
        form, h, i, j = (
            x[here].to(device)
            for x in (self.forms.index, self.forms.head, self.forms.position, self.forms.key)
        )
        weight = self.forms.weight[here].to(made.runs)
        b, N, F = len(made.runs), made.runs.shape[1], self.forms.size
        constant = i < self.first
        row = (i - self.first).clamp(min=0)
        entries, errors = made.runs[:, :, h, row, j], made.error[:, h, row, j]
        if bool(constant.any()):
            fixed = self.fixed[layer]
            row, key = i.clamp(max=self.first - 1), j.clamp(max=self.first - 1)
            entries = torch.where(constant, fixed.runs[:, :1, h, row, key], entries)
            errors = torch.where(constant, fixed.error[:, h, row, key], errors)
        runs = made.runs.new_zeros(b, N, F).index_add(2, form, entries * weight)
        missed = made.runs.new_zeros(b, F).index_add(1, form, errors * weight.abs())
        sizes = made.runs.new_zeros(b, F).index_add(1, form, (entries.abs().amax(1) + errors) * weight.abs())
        rounding = made.piece.grid.lebesgue * gamma(2 * len(form) + 16) * sizes
        return runs, missed + rounding

    def _output(self, value: Value) -> tuple[Tensor, Tensor]:
        """The output of the last token, or the pooled one."""
        assert self.forms.logits is not None
        weights = self.forms.logits.to(value.runs)
        head = self.program.steps[-1]
        t = self._token(value)
        covectors, bias = weights, None
        if isinstance(head, Affine) and head.out == OUTPUT:
            covectors = weights @ head.weight
            bias = None if head.bias is None else weights @ head.bias
        hidden = value.runs[:, :, t]
        runs = hidden @ covectors.T
        runs = runs if bias is None else runs + bias
        missed = supports_of(value.shape[:, t], covectors)
        largest = length(hidden).amax(1)[:, None]
        size = length(covectors) * largest
        if isinstance(head, Affine) and head.out == OUTPUT:
            used = (weights != 0).any(0)
            rows = torch.linalg.vector_norm(head.weight[used], dim=-1)
            size = size + (weights[:, used].abs() @ rows) * 2.0 * (
                largest + value.reach[:, t].square().sum(-1).sqrt()[:, None]
            )
            if head.bias is not None:
                size = size + weights[:, used].abs() @ head.bias[used].abs()
        terms = weights.shape[-1] + covectors.shape[-1] + 64
        return runs, missed + value.piece.grid.lebesgue * gamma(4 * terms) * size

    def _token(self, value: Value) -> int:
        if self.problem.model.architecture.pool != "none":
            return 0
        return last_token(self.problem) - self.first


@dataclass(eq=False)
class RivalReading(Reading):
    """Reads one output's margins over all others: form c is logit(winner) − logit(c), the winner's own is 1.

    Attributes:
        winner: the output that is to be the largest.
    """

    winner: int = 0

    def _output(self, value: Value) -> tuple[Tensor, Tensor]:
        head = self.program.steps[-1]
        assert isinstance(head, Affine)
        t = self._token(value)
        covectors = head.weight[self.winner] - head.weight
        hidden = value.runs[:, :, t]
        runs = hidden @ covectors.T
        size = length(covectors) * length(hidden).amax(1)[:, None]
        far = torch.linalg.vector_norm(value.reach[:, t], dim=-1)[:, None]
        size = size + (length(head.weight) + length(head.weight[self.winner])) * far
        if head.bias is not None:
            shift = head.bias[self.winner] - head.bias
            runs, size = runs + shift, size + head.bias[self.winner].abs() + head.bias.abs()
        missed = torch.cat([supports_of(value.shape[:, t], some) for some in covectors.split(ROWS)], -1)
        missed = missed + value.piece.grid.lebesgue * gamma(2 * covectors.shape[-1] + 64) * size
        runs[..., self.winner], missed[..., self.winner] = 1.0, 0.0
        return runs, missed


@dataclass(eq=False)
class EffectReading(Reading):
    """Reads what forms of one model are more than those of another, on the same pieces.

    Polynomials are subtracted before their range is taken; errors add up.

    Attributes:
        edited: reads the other model.
    """

    edited: Reading = field(kw_only=True)

    @classmethod
    def of(cls, reading: Reading, edited: Problem, forms: Forms, tell: Progress = silent) -> EffectReading:
        """Prepare to read another model beside one: it walks its own tokens that do not move.

        Args:
            reading: reads the model.
            edited: the other model and the same region.
            forms: what is asked of it.
            tell: is told of every step of that walk.
        """
        return cls(**vars(reading), edited=reading_of(edited, forms, tell=tell))

    def told(self, tell: Progress) -> None:
        """Let both readings tell of the steps of a piece."""
        super().told(tell)
        self.edited.told(lambda stage, share: tell(f"{stage} of the other model", share))

    def read(
        self, grid: Grid, points: Float[Tensor, "b N S d"]
    ) -> tuple[Float[Tensor, "b N F"], Float[Tensor, "b F"]]:
        """Return the differences at the points of the grid, and how far they may be from the polynomial.

        Args:
            grid: the points of the factors.
            points: the inputs there.
        """
        runs, missed = super().read(grid, points)
        others, off = self.edited.read(grid, points)
        rounding = grid.lebesgue * gamma(8) * (runs.abs() + others.abs()).amax(1)
        return runs - others, grow(missed + off + rounding)


ROWS = 2**14
"""How many outputs are read at a time."""


def constants(
    problem: Problem, program: Program, first: int, wanted: frozenset[str], tell: Progress = silent
) -> ChebyshevWalk:
    """Walk the tokens that do not move.

    Args:
        problem: the model and the region.
        program: the steps for all tokens.
        first: the first token that moves.
        wanted: names of values that are kept.
        tell: is told of every step.
    """
    steps = tuple(
        restricted(step, 0, first) for step in program.steps
    )  # tokens of edits count from the end of all
    short = Program(steps, first, program.mask[:first, :first])
    walk = ChebyshevWalk(short, 0, {}, wanted, tell=tell)
    grid = Grid((), problem.region.center)
    walk.values = walk.run(grid, problem.region.center[None, None, :first], blurred(problem)[:first])
    return walk


def reading_of(problem: Problem, forms: Forms, winner: int | None = None, tell: Progress = silent) -> Reading:
    """Prepare to read forms off pieces of a region: walk the tokens that do not move, once.

    Args:
        problem: the model and the region.
        forms: what is asked.
        winner: the output whose margins over all others are read, in place of forms of outputs; None for none.
        tell: is told of every step of that walk.
    """
    names = [scores_name(layer) for layer in forms.layers]
    wanted = names + ([OUTPUT] if forms.logits is not None else [])
    program = problem.model.program(problem.n_tokens, wanted, problem.padding)
    first = first_moving(problem)
    reading = Reading(problem, forms, program, first)
    if winner is not None:
        reading = RivalReading(problem, forms, program, first, winner=winner)
    if first:
        walk = constants(problem, program, first, frozenset(names), tell)
        reading.prefixes = walk.kept
        for layer in forms.layers:
            made = walk.values[scores_name(layer)]
            assert isinstance(made, ScoreValue)
            reading.fixed[layer] = made
    return reading
