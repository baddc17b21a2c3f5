"""The engine: how the pages of `jacobian` are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.forms import Forms
from prooflens.engines.jacobian.interval import interval_jacobian
from prooflens.engines.protocol import EngineBase, EngineOptions, register, unknown_steps
from prooflens.engines.relaxations.affine import through_rotary
from prooflens.engines.tensor_sets.steps import SetOptions, affine
from prooflens.engines.tensor_sets.tensor_set import FactorIds, TensorSet
from prooflens.engines.tensor_sets.walk import SetWalk, bound_from, propagate, score_steps
from prooflens.models import OUTPUT
from prooflens.models.program import INPUT, Program
from prooflens.models.sites import Affine, Rotary, Scores
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.problem import Problem
from prooflens.queries.simplex import Box
from prooflens.regions import Region

COLUMN_CHUNK = 512
"""Columns of a Jacobian that are computed at a time."""

Connector = Callable[[Problem, str], TensorSet | None]
"""From a problem and the name of a value to a set around it, over the region's factors; None if nothing is known."""


def jacobian(program: Program, name: str, region: Region, x: Float[Tensor, "S d"]) -> Float[Tensor, "p ..."]:
    """∂(value)/∂α at x, the factors first: by forward mode, or backward where the value has fewer numbers than that."""

    def value(point: Tensor) -> Tensor:
        return program.run(point, [name])[name]

    with torch.enable_grad():
        found, pull, *_ = torch.func.vjp(value, x)
    if found.numel() < region.n_factors:
        seeds = torch.eye(found.numel()).to(found).reshape(-1, *found.shape)
        rows: Tensor = torch.func.vmap(lambda seed: pull(seed)[0])(seeds)
        J: Tensor = torch.tensordot(region.dense_generators(), rows, ([1, 2], [1, 2]))
        return J.reshape(-1, *found.shape).detach()

    def column(tangent: Tensor) -> Tensor:
        pushed: Tensor = torch.func.jvp(value, (x,), (tangent,))[1]
        return pushed

    tangents = region.dense_generators()
    columns: Tensor = torch.func.vmap(column, chunk_size=COLUMN_CHUNK)(tangents)
    return columns


def leading_columns(J: Float[Tensor, "p ..."], count: int) -> Tensor:
    """The indices of the `count` columns with the largest ℓ1 norm, ascending."""
    size = J.abs().flatten(1).sum(1)
    return size.topk(min(count, len(size))).indices.sort().values


@dataclass(frozen=True)
class SampledConnector:
    """Eq. `eq:jac_zono` with the sampled remainder on one segment per token: an estimate."""

    columns: int = 64
    samples: int = 30
    safety: float = 1.5
    seed: int = 0

    def remainder(self, program: Program, name: str, region: Region, J: Tensor) -> Tensor:
        """safety · V̂, V̂_i = max_n ‖∇f_i(z_n) − ∇f_i(x₀)‖₁ (in units of the factors)."""
        points, _ = region.sample(self.samples, seed=self.seed)
        found = torch.zeros_like(J[0])
        for z in points:
            found = torch.maximum(found, (jacobian(program, name, region, z) - J).abs().sum(0))
        return self.safety * found

    def __call__(self, problem: Problem, name: str) -> TensorSet:
        """The zonotope around a value: K_J columns and one remainder generator per token."""
        region = problem.region
        program = problem.model.program(problem.n_tokens, name, problem.padding)
        center = program.run(region.center, [name])[name]
        J = jacobian(program, name, region, region.center)
        keep = leading_columns(J, self.columns)
        dropped = J.abs().sum(0) - J[keep].abs().sum(0)
        r = self.remainder(program, name, region, J) + dropped.clamp(min=0.0)
        rows = r[None] if r.ndim == 1 else torch.diag_embed(torch.ones_like(r[:, 0]))[..., None] * r
        fresh = FactorIds(region.n_factors).fresh(len(rows), keep)
        start = TensorSet.point(center)
        return TensorSet(
            center, torch.cat((J[keep], rows)), torch.cat((keep, fresh)), start.Q, start.pairs, start.r
        )


@dataclass(frozen=True)
class ProvedConnector:
    """The same linearisation with a proved remainder in a box."""

    columns: int = 1024
    options: SetOptions = field(default_factory=SetOptions)

    def remainder(self, problem: Problem, walk: SetWalk, name: str, J: Tensor) -> Tensor:
        """Σ_j sup|∂_jf_i − J_ij| over the region, or the local spectral form where that is smaller."""
        program = problem.model.program(problem.n_tokens, name, problem.padding)
        slope = interval_jacobian(program, walk.sets, problem.region.dense_generators(), name)
        p = len(J)
        grow = 1.0 + gamma(2 * p + 32)
        apart = ((slope.mid - J).abs() + slope.rad).sum(0) * grow + TINY
        steepest, here = slope.size.square().sum(0).sqrt(), J.square().sum(0).sqrt()
        return torch.minimum(apart, (steepest + here) * p**0.5 * grow + TINY)

    def deviation(self, problem: Problem, name: str, J: Tensor) -> Box | None:
        """A box around f − Jα over the region: f(x₀) ± remainder, intersected with the hull of the set − Jα."""
        program = problem.model.program(problem.n_tokens, name, problem.padding)
        names = [INPUT, *(step.out for step in program.steps)]
        walk = propagate(program, problem.region, self.options, names)
        still = Region(problem.region.center, radius=torch.zeros_like(problem.region.center))
        start = propagate(program, still, self.options, [name])
        if not (walk.bounded and start.bounded):
            return None
        f, zero = walk.sets[name], TensorSet.point(torch.zeros_like(J[0]))
        minus = TensorSet(zero.c, -J, torch.arange(len(J), device=J.device), zero.Q, zero.pairs, zero.r)
        made, clean = (f + minus).hull(), start.sets[name].hull()
        rest = self.remainder(problem, walk, name, J).nan_to_num(nan=torch.inf)
        lower = torch.maximum(made.lower, down(clean.lower - rest))
        return Box(lower, torch.minimum(made.upper, up(clean.upper + rest)))

    def __call__(self, problem: Problem, name: str) -> TensorSet | None:
        """The zonotope around a value: K_J columns, everything else one factor per coordinate."""
        region = problem.region
        program = problem.model.program(problem.n_tokens, name, problem.padding)
        J = jacobian(program, name, region, region.center)
        apart = self.deviation(problem, name, J)
        if apart is None:
            return None
        center = 0.5 * apart.lower + 0.5 * apart.upper
        keep = leading_columns(J, self.columns)
        lost = torch.ones(len(J), dtype=torch.bool, device=J.device)
        lost[keep] = False
        r = torch.maximum(apart.upper - center, center - apart.lower) + J[lost].abs().sum(0)
        r = r * (1.0 + gamma(len(J) + 16)) + TINY
        point = TensorSet.point(center)
        made = TensorSet(center, J[keep], keep, point.Q, point.pairs, r)
        return made.absorbed(FactorIds(region.n_factors)) if made.finite else None


@dataclass(frozen=True)
class Jacobian(EngineBase):
    """Bounds of linear forms by one linearisation per layer; what they are worth depends on the connector."""

    name: str
    guarantee: Guarantee
    connector: Connector

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        """Any form over a region that is more than a point."""
        if problem.region.n_factors == 0:
            return "the connector needs a region that moves: at a point any other engine is as good"
        return unknown_steps(problem.model.architecture, self.name)

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bounds of every form; `jacobian` uses the paper's lemma, `jacobian-proved` the improved one."""
        steps = score_steps(problem, forms)
        sets: dict[str, TensorSet] = {}
        for scores in steps.values():
            assert isinstance(scores, Scores)
            sets |= self._read(problem, scores)
        if forms.logits is not None and (output := self.connector(problem, OUTPUT)) is not None:
            sets[OUTPUT] = output
        lemma = self.guarantee is Guarantee.ESTIMATED
        return bound_from(sets, problem, forms, steps, lemma=lemma)

    def _read(self, problem: Problem, scores: Scores) -> dict[str, TensorSet]:
        """Queries and keys of a layer from the connector's set of what they read."""
        program = problem.model.program(problem.n_tokens, scores.inputs, problem.padding)
        made_by = {step.out: step for step in program.steps}
        found: dict[str, TensorSet] = {}
        around: TensorSet | None = None
        for name in scores.inputs:
            step = made_by[name]
            turn = step if isinstance(step, Rotary) else None
            linear = made_by[step.inputs[0]] if turn is not None else step
            assert isinstance(linear, Affine)
            around = around or self.connector(problem, linear.inputs[0])
            if around is None:
                return {}
            read = affine(linear, around)
            found[name] = read if turn is None else read.linear(turn, through_rotary(turn), 3)
        return found


@register("jacobian")
def _estimated() -> Jacobian:
    return Jacobian("jacobian", Guarantee.ESTIMATED, SampledConnector())


@register("jacobian-proved")
def _proved() -> Jacobian:
    return Jacobian("jacobian-proved", Guarantee.PROVED, ProvedConnector())
