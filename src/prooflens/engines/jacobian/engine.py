"""The engines `jacobian` and `jacobian-proved`; the method is explained in the package's docstring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.forms import Forms
from prooflens.engines.jacobian.interval import interval_jacobian
from prooflens.engines.protocol import EngineBase, EngineOptions, register
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
"""How many columns of a Jacobian are computed at a time."""

Connector = Callable[[Problem, str], TensorSet | None]
"""Maps a problem and the name of a value to a set around it, over the region's factors; None if nothing is known."""


def jacobian(program: Program, name: str, region: Region, x: Float[Tensor, "S d"]) -> Float[Tensor, "p ..."]:
    """Return ∂(value)/∂α at a point, the factors first.

    It uses forward mode, or backward mode if the value has fewer numbers than there are factors.

    Args:
        program: the steps of the model.
        name: the value to differentiate.
        region: its generators map factors to inputs.
        x: the point, shape [S, d].
    """

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
    """Return the indices of the `count` columns with the largest ℓ1 norm, ascending."""
    size = J.abs().flatten(1).sum(1)
    return size.topk(min(count, len(size))).indices.sort().values


@dataclass(frozen=True)
class SampledConnector:
    """The connector of Eq. `eq:jac_zono`: a sampled remainder on one segment per token. It is an estimate.

    Attributes:
        columns: K_J, how many columns of the Jacobian are kept.
        samples: at how many points the Jacobian is compared with that at the centre.
        safety: the factor on the largest difference that was seen.
        seed: seed of the samples.
    """

    columns: int = 64
    samples: int = 30
    safety: float = 1.5
    seed: int = 0

    def remainder(self, program: Program, name: str, region: Region, J: Tensor) -> Tensor:
        """Estimate the remainder as safety · V̂, V̂_i = max_n ‖∇f_i(z_n) − ∇f_i(x₀)‖₁, in units of the factors.

        Args:
            program: the steps of the model.
            name: the value that is linearised.
            region: the input set.
            J: the Jacobian at the centre, the factors first.
        """
        points, _ = region.sample(self.samples, seed=self.seed)
        found = torch.zeros_like(J[0])
        for z in points:
            found = torch.maximum(found, (jacobian(program, name, region, z) - J).abs().sum(0))
        return self.safety * found

    def __call__(self, problem: Problem, name: str) -> TensorSet:
        """Return the zonotope around a value: K_J columns, and one segment per token for everything else."""
        region = problem.region
        program = problem.model.program(problem.n_tokens, name, problem.padding)
        center = program.run(region.center, [name])[name]
        J = jacobian(program, name, region, region.center)
        keep = leading_columns(J, self.columns)
        dropped = J.abs().sum(0) - J[keep].abs().sum(0)
        r = self.remainder(program, name, region, J) + dropped.clamp(min=0.0)
        rows = (
            r[None]
            if r.ndim == 1
            else torch.stack([torch.zeros_like(r).index_copy(0, t, r[t]) for t in _each(r)])
        )
        fresh = FactorIds(region.n_factors).fresh(len(rows), keep)
        start = TensorSet.point(center)
        return TensorSet(
            center, torch.cat((J[keep], rows)), torch.cat((keep, fresh)), start.Q, start.pairs, start.r
        )


@dataclass(frozen=True)
class ProvedConnector:
    """The connector with the same linearisation and a proved remainder in a box.

    Attributes:
        columns: K_J, how many columns of the Jacobian are kept.
        options: how sets are propagated for the ranges that the proof needs.
    """

    columns: int = 1024
    options: SetOptions = field(default_factory=SetOptions)

    def remainder(self, problem: Problem, walk: SetWalk, name: str, J: Tensor) -> Tensor:
        """Bound Σ_j sup|∂_jf_i − J_ij| over the region, or take the local spectral form if that is smaller.

        Args:
            problem: the model and the region.
            walk: sets of all values over the region.
            name: the value that is linearised.
            J: its Jacobian at the centre, the factors first.
        """
        program = problem.model.program(problem.n_tokens, name, problem.padding)
        slope = interval_jacobian(program, walk.sets, problem.region.dense_generators(), name)
        p = len(J)
        grow = 1.0 + gamma(2 * p + 32)
        apart = ((slope.mid - J).abs() + slope.rad).sum(0) * grow + TINY
        steepest, here = slope.size.square().sum(0).sqrt(), J.square().sum(0).sqrt()
        return torch.minimum(apart, (steepest + here) * p**0.5 * grow + TINY)

    def deviation(self, problem: Problem, name: str, J: Tensor) -> Box | None:
        """Bound f − Jα over the region: f(x₀) ± remainder, intersected with the hull of the set − Jα."""
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
        """Return the zonotope around a value: K_J columns, and one factor per coordinate for everything else."""
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
    """Bound linear forms by one linearisation per layer; the connector decides what the bounds are worth.

    Attributes:
        name: the engine's name in the registry: `jacobian` or `jacobian-proved`.
        guarantee: estimated or proved.
        connector: makes the set around the value that a layer's queries and keys read.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(0, 1, 3), 2, 1.0), (0, Row(0, 1, 3), 0, -1.0)], size=1)
        >>> found = Jacobian("jacobian-proved", Guarantee.PROVED, ProvedConnector()).bound_forms(problem, margin)
        >>> 0.32 < found.lower.item() < found.upper.item() < 0.40
        True
    """

    name: str
    guarantee: Guarantee
    connector: Connector

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        """Refuse a region that is a point."""
        if problem.region.n_factors == 0:
            return "the connector needs a region that moves: at a point any other engine is as good"
        return None

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form; `jacobian` uses the paper's lemma, `jacobian-proved` the improved one."""
        steps = score_steps(problem, forms)
        sets: dict[str, TensorSet] = {}
        for scores in steps.values():
            if isinstance(scores, Scores):
                sets |= self._read(problem, scores)
            elif (capped := self.connector(problem, scores.out)) is not None:
                sets[scores.out] = capped
        if forms.logits is not None and (output := self.connector(problem, OUTPUT)) is not None:
            sets[OUTPUT] = output
        lemma = self.guarantee is Guarantee.ESTIMATED
        return bound_from(sets, problem, forms, steps, lemma=lemma)

    def _read(self, problem: Problem, scores: Scores) -> dict[str, TensorSet]:
        """Return queries and keys of a layer, from the connector's set of what they read.

        Where they are no affine maps of it (norms of queries and keys, positions of heads) each is linearised itself.
        """
        program = problem.model.program(problem.n_tokens, scores.inputs, problem.padding)
        made_by = {step.out: step for step in program.steps}
        found: dict[str, TensorSet] = {}
        around: TensorSet | None = None
        for name in scores.inputs:
            step = made_by[name]
            turn = step if isinstance(step, Rotary) else None
            linear = made_by[step.inputs[0]] if turn is not None else step
            if problem.model.architecture.qk_norm != "none" or not isinstance(linear, Affine):
                own = self.connector(problem, linear.out)
                read = own and _apart(own, problem.region.n_factors, len(found))
            else:
                around = around or self.connector(problem, linear.inputs[0])
                read = around and affine(linear, around)
            if read is None:
                return {}
            found[name] = read if turn is None else read.linear(turn, through_rotary(turn), 3)
        return found


def _each(r: Tensor) -> list[Tensor]:
    """The numbers of the rows of a tensor, each as a tensor of one."""
    return list(torch.arange(len(r), device=r.device).split(1))


def _apart(made: TensorSet, n_region: int, number: int) -> TensorSet:
    """Return a set whose fresh factors no other set has: queries' and keys' remainders are independent.

    Args:
        made: a set of a connector.
        n_region: how many factors the region has; those are shared.
        number: the place of the set among those that are used together.
    """
    fresh = made.ids >= n_region
    return replace(
        made, ids=torch.where(fresh, made.ids + number * (made.c.numel() + len(made.ids)), made.ids)
    )


@register("jacobian")
def _estimated() -> Jacobian:
    return Jacobian("jacobian", Guarantee.ESTIMATED, SampledConnector())


@register("jacobian-proved")
def _proved() -> Jacobian:
    return Jacobian("jacobian-proved", Guarantee.PROVED, ProvedConnector())
