"""Every value of every chain of `taylor`, and every site, against what they attain: is e in its ellipsoid?

Bounds of forms add up many ellipsoids, so a term that is missing in one of them hides behind the slack of the others.
Here each ellipsoid stands alone, and is asked in the direction that it covers worst: e ∈ E(M) if and only if
|w·e| ≤ √(wᵀMw) for w = M⁻¹e.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap

from prooflens import Ball, Paraphrases
from prooflens.engines.relaxations import ellipsoids as shapes
from prooflens.engines.relaxations.ellipsoids import support
from prooflens.engines.taylor import next_root
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.remainder_sources import (
    PropagatedSource,
    RemainderSource,
    kept_apart,
    propagate,
)
from prooflens.engines.taylor.segments import FeedForward
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.models import OUTPUT
from prooflens.models.sites import Mix, Softmax
from prooflens.problem import Problem
from prooflens.regions import Region
from tests.engines.cases import input_of, model_of, problem_of, tiny_model
from tests.engines.support import center_of, random_problem, walk_of, worst_covectors

FLOAT = 1e-13
"""What evaluating the model at a point may be off by, relative to the values' size."""
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu", "tanh", "relu2"]


class Cloud(NamedTuple):
    """Points that should lie in an ellipsoid."""

    name: str
    shape: Tensor
    points: Tensor
    size: float
    bound: Callable[[Tensor], Tensor] | None = None
    """What a site says of single covectors."""


def factors_of(region: Region, seed: int) -> Tensor:
    """Samples, corners, and each factor alone."""
    alone = torch.eye(region.n_factors, dtype=torch.float64)
    return torch.cat((region.sample(150, seed, corners=0.7)[1], alone, -alone))


def clouds(problem: Problem, walk: TaylorWalk, alpha: Tensor) -> Iterator[Cloud]:
    """What each ellipsoid of the walk should hold: linear parts, e of values, remainders of sites and of mixing."""
    program = problem.model.program(problem.n_tokens, [OUTPUT], problem.padding)
    found = program.run(problem.region.point(alpha))
    moved = alpha * walk.chains[0].root.half_widths
    tokens: list[int] | None = list(range(problem.n_tokens))
    for number, chain in enumerate(walk.chains):
        points = {name: _points(found[name], tokens, problem.n_tokens) for name in chain.values}
        for name, value in chain.values.items():
            for t, u in enumerate(value.u):
                linear = moved @ (value.J[t] @ value.root.N[t]).T
                e = points[name][:, t] - u - linear
                size = float(points[name].abs().max() + linear.abs().max())
                yield Cloud(f"{name} {t}", value.shape_e[t], e, size)
                yield Cloud(f"{name} {t}, linear", value.shape_a[t], linear, 1e3 * size)
        for name, site in chain.sites.items():
            source = site.step.source if isinstance(site.step, FeedForward) else site.step.inputs[0]
            for t, u in enumerate(site.source.u):
                linear = (points[source][:, t] - u) @ site.jacobian[t].T
                rest = points[name][:, t] - chain.values[name].u[t] - linear
                size = float(points[name].abs().max() + linear.abs().max())
                bound = partial(site.bound, t=t)
                yield Cloud(f"{name} {t}, site", chain.shapes[name][t], rest, size, bound)
        if chain.mix is not None:
            after = found[walk.chains[number + 1].segment.root]
            yield from _mixed(chain, points, after)
            tokens = chain.goes_on
        if chain.pool is not None:
            tokens = None


def _points(x: Tensor, tokens: list[int] | None, n_tokens: int) -> Tensor:
    """[points, tokens, n], heads side by side; a pooled value has one token."""
    return x.reshape(len(x), 1, -1) if tokens is None else x.reshape(len(x), n_tokens, -1)[:, tokens]


def _mixed(chain: Chain, points: dict[str, Tensor], after: Tensor) -> Iterator[Cloud]:
    """What the mixing's tangent misses, with a tangent by forward differentiation."""
    mix = chain.mix
    assert mix is not None
    assert chain.mixed is not None
    names = mix.attention
    step, S, c = mix.scores.step, mix.z.shape[0], mix.z.shape[2]

    def attend(q: Tensor, k: Tensor, v: Tensor, stream: Tensor) -> Tensor:
        scores = step(q.reshape(S, -1, c), k.reshape(S, -1, c))
        pattern = Softmax("pattern", ("scores",), step.mask)(scores)
        return stream + names.output(Mix("z", ("pattern", "v"))(pattern, v.reshape(S, -1, c)))

    read = (names.q, names.k, names.v, names.stream)
    center = tuple(chain.values[name].u for name in read)
    moves = tuple(points[name] - u for name, u in zip(read, center, strict=True))
    linear = vmap(lambda *move: jvp(attend, center, move)[1])(*moves)
    rest = after - attend(*center) - linear
    size = float(after.abs().max() + linear.abs().max())
    for place, t in enumerate(chain.goes_on):
        yield Cloud(f"{names.stream} {t}, mixing", chain.mixed[place], rest[:, t], size)


def assert_holds(problem: Problem, seed: int = 0) -> int:
    """No cloud leaves its ellipsoid, asked in random directions and, point by point, in the worst one; also quickly.

    Returns how many ellipsoids were finite.
    """
    alpha = factors_of(problem.region, seed)
    generator = torch.Generator().manual_seed(seed)
    known = 0
    with torch.no_grad():
        for name, M, points, size, bound in itertools.chain.from_iterable(
            clouds(problem, walk_of(problem, quick), alpha) for quick in (False, True)
        ):
            if not bool(M.isfinite().all()):
                continue
            known += 1
            worst = worst_covectors(M, points)
            random = torch.randn(len(points), len(M), generator=generator, dtype=torch.float64)
            slack = FLOAT * (1.0 + size)
            for w in (worst, random):
                w = w / torch.linalg.vector_norm(w, dim=-1, keepdim=True).clamp(min=1e-280)
                beyond = float(((w * points).sum(-1).abs() - support(M, w)).max())
                assert beyond <= slack, f"{name} leaves its ellipsoid by {beyond:.2e}"
                if bound is not None:
                    far = points @ w[:8].T
                    limit = bound(w[:8])
                    beyond = float((torch.stack((far.amax(0), -far.amin(0)), -1) - limit).max())
                    assert not beyond > slack, f"{name} leaves its bound by {beyond:.2e}"
    return known


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eps", [1e-3, 0.03, 0.3])
def test_values_of_every_activation(activation: str, gated: bool, eps: float) -> None:
    for seed, (place, kind) in enumerate([("pre", "rms"), ("post", "layer"), ("post", "rms")]):
        model = tiny_model(
            seed, n_heads=2, activation=activation, gated=gated, norm_place=place, norm_kind=kind
        )
        assert assert_holds(Problem(model, Ball(eps).around(center_of(model, 3, seed))), seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "mpnet", "gpt2", "llama"])
@pytest.mark.parametrize("eps", [1e-4, 5e-3])
def test_values_of_every_family(name: str, eps: float) -> None:
    """Relative biases, causal masks, rotations, shared heads, poolers; two layers."""
    assert assert_holds(problem_of(name, eps))


@pytest.mark.slow
def test_values_over_hulls_and_mixed_regions() -> None:
    for name in ("bert", "llama"):
        x = input_of(name)
        hull = Paraphrases([x, x + 0.01, x - 0.005 * torch.sign(x)]).region()
        one = torch.zeros(2, *x.shape, dtype=torch.float64)
        one[0, 1, 3] = one[1, 2, 0] = 0.02
        assert hull.generators is not None
        mixed = Region(hull.center, generators=torch.cat((hull.generators, one)))
        for region in (hull, mixed, Ball(0.01, tokens=[0, 2]).around(x)):
            assert assert_holds(Problem(model_of(name), region))


def test_values_beside_padding_and_of_one_token() -> None:
    for pool in ("mean", "first", "last", "none"):
        model = tiny_model(3, n_heads=2, activation="gelu", pool=pool, pooler=pool == "first")
        x = center_of(model, 4, 0)
        padding = torch.tensor([True, True, True, False])
        assert assert_holds(Problem(model, Ball(0.02).around(x), padding))
        assert assert_holds(Problem(model, Ball(0.02).around(x[:1])))


@pytest.mark.slow
def test_values_of_models_that_bounds_find_hard() -> None:
    """Sharp softmax, large weights, inputs that a norm hardly sees: ellipsoids may be infinite, never too small."""
    for seed in range(3):
        model = tiny_model(seed, n_heads=1 + seed % 2, activation=ACTIVATIONS[seed % 5], norm_place="pre")
        for keys, all_, eps in ((30.0, 1.0, 1e-3), (1.0, 5.0, 0.01), (4.0, 1.0, 1.0)):
            weights = {
                name: tensor * (keys if name.endswith(("q.weight", "k.weight")) else all_)
                for name, tensor in model.weights.items()
            }
            x = center_of(model, 3, seed)
            flat = 1.0 + 1e-4 * x
            for center, radius in ((x, eps), (flat, eps * 1e-3)):
                assert_holds(Problem(replace(model, weights=weights), Ball(radius).around(center)), seed)


@pytest.mark.slow
def test_values_of_random_regions() -> None:
    for seed in range(6):
        model = tiny_model(seed, n_heads=2, activation="gelu", d_model=6, gated=seed % 2 == 1)
        for eps in (0.01, 0.1):
            assert_holds(random_problem(model, 3, eps, seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("left", [0.0, 1e-12])
def test_neurons_that_nothing_reads_cost_nothing(gated: bool, left: float) -> None:
    model = tiny_model(1, n_heads=2, activation="gelu", gated=gated)
    name = "blocks.0.down.weight"
    dead = model.weights[name].clone()
    dead[:, 0] *= left
    found = []
    for weight in (model.weights[name], dead):
        changed = replace(model, weights={**model.weights, name: weight})
        problem = Problem(changed, Ball(0.01).around(center_of(model, 3, 0)))
        assert assert_holds(problem)
        found.append(walk_of(problem).chains[1].values["blocks.0.hook_mlp_out"].e)
    assert (found[1] < 1.2 * found[0]).all()


def test_weights_of_long_sums_are_weights() -> None:
    """Σ 1/c ≤ 1 in exact arithmetic, for as many summands as there are factors, however uneven."""
    generator = torch.Generator().manual_seed(0)
    for n in (1, 100, 100_000):
        sizes = torch.exp(8.0 * torch.randn(n, generator=generator, dtype=torch.float64))
        assert math.fsum((1.0 / shapes.weights_of_sum(sizes)).tolist()) <= 1.0


def test_tiny_ellipsoids_do_not_vanish() -> None:
    """Squares of half-axes may underflow; the ellipsoids still hold what they are made of."""
    for size in (1e-140, 1e-170, 1e-300):
        w = torch.tensor([[0.6, -0.8]], dtype=torch.float64)
        A = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=torch.float64) * size
        assert float(support(shapes.ball(torch.tensor(size, dtype=torch.float64), 2), w)) >= size
        far = float(torch.linalg.vector_norm(w @ A / size)) * size
        assert float(support(shapes.gram(A), w)) >= far


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "room"), [(0, 0), (1, 1), (2, 2), (3, 9)])
def test_five_layers(seed: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What four mixings carry on, kept apart as far as there is room, and let go of once it was carried on."""
    counts: list[int] = []

    def keep(
        origins: list[PropagatedSource], shapes: list[Tensor], missed: Tensor, room: int
    ) -> list[RemainderSource]:
        found = kept_apart(origins, shapes, missed, room)
        counts.append(len(found))
        return found

    def carry(
        origins: list[RemainderSource], A: Tensor, error: Tensor, reads: Tensor
    ) -> tuple[list[PropagatedSource], Tensor]:
        assert not bool((A[~reads] != 0).any()), "a block of the Jacobian is not 0 and would be left out"
        return propagate(origins, A, error, reads)

    monkeypatch.setattr(next_root, "sources_room", lambda memory, numbers: room)
    monkeypatch.setattr(next_root, "kept_apart", keep)
    monkeypatch.setattr(next_root, "propagate", carry)
    kinds: list[dict[str, object]] = [
        {"activation": "silu", "gated": True, "norm_kind": "rms", "norm_place": "pre", "causal": True},
        {"activation": "gelu"},
        {"activation": "tanh", "norm_place": "pre"},
        {"activation": "relu"},
    ]
    model = tiny_model(40 + seed, d_model=6, n_heads=2, n_layers=5, **kinds[seed])
    problem = random_problem(model, 4, 2e-4, seed)
    walk = walk_of(problem)
    assert counts == [1 if room == 0 else min(room, number) + 1 for number in range(5)]
    assert not any(chain.root.origins for chain in walk.chains[:-1])
    assert assert_holds(problem, seed) > 500
