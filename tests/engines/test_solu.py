"""SoLU in every engine: its expansion, boxes, planes, sets and slopes, polynomials on segments, mutations."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.checker.network import Network
from prooflens.checker.plain import PlainNetwork
from prooflens.engines import Forms, forms_of, get_engine
from prooflens.engines.crown.solu import Softened
from prooflens.engines.relaxations.interval_steps import apply_step
from prooflens.engines.relaxations.solu import Expansion, expansion, solu_box
from prooflens.engines.tensor_sets.relax import solu as solu_set
from prooflens.engines.tensor_sets.tensor_set import TensorSet
from prooflens.evaluation.soundness.cases import SOLU, random_case, random_model
from prooflens.evaluation.soundness.forms import random_functionals
from prooflens.models import Architecture
from prooflens.models.sites import Solu
from prooflens.problem import Problem
from prooflens.queries import Box
from prooflens.regions import Ball, Segment
from prooflens.verdicts.certify import certify
from tests.engines.test_later_steps import assert_not_crossed

STEP = Solu("y", ("x",))
CASES = {
    "n": st.integers(1, 6),
    "large": st.floats(0.0, 40.0),
    "spread": st.sampled_from((0.0, 1e-9, 1e-3, 0.1, 1.0, 5.0, 400.0)),
    "seed": st.integers(0, 10**6),
}


def drawn(n: int, large: float, spread: float, seed: int) -> tuple[Box, Tensor]:
    """A box of two tokens' neurons, and points of it, corners among them."""
    generator = torch.Generator().manual_seed(seed)
    c = large * torch.randn(2, n, generator=generator, dtype=torch.float64)
    r = spread * torch.rand(2, n, generator=generator, dtype=torch.float64)
    share = 2.0 * torch.rand(300, 2, n, generator=generator, dtype=torch.float64) - 1.0
    share[::2] = share[::2].sign()
    box = Box(c - r, c + r)
    return box, torch.minimum(torch.maximum(c + share * r, box.lower), box.upper)


def room(x: Tensor) -> Tensor:
    """What float64 itself errs by when it evaluates SoLU."""
    return 1e-13 * (1.0 + x.abs().amax() ** 2)


def missed(made: Expansion, x: Tensor) -> Tensor:
    return (STEP(x) - made.value - made.linear(x - made.center)).abs()


@settings(deadline=None, max_examples=60)
@given(**CASES)
def test_the_expansion_boxes_planes_and_sets_hold(n: int, large: float, spread: float, seed: int) -> None:
    box, x = drawn(n, large, spread, seed)
    y = STEP(x)
    made = expansion(box)
    assert bool((missed(made, x) <= made.rest + room(x)).all())
    found = apply_step(STEP, box)
    assert bool(((y >= found.lower - room(x)) & (y <= found.upper + room(x))).all())
    assert bool((found.upper - found.lower).isfinite().all())
    rule = Softened.of(box, found)
    A = torch.randn(5, 2, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    passed = rule.back(A, {})
    above = torch.einsum("fsn,psn->pf", passed.inputs[0], x) + passed.constant
    assert bool((torch.einsum("fsn,psn->pf", A, y) <= above + 1e-10 * (1.0 + passed.size)).all())
    radius = torch.maximum(box.upper - made.center, made.center - box.lower)
    L = torch.diag_embed(radius.flatten()).reshape(-1, 2, n)
    start = TensorSet.point(made.center)
    given_set = TensorSet(start.c, L, torch.arange(len(L)), start.Q, start.pairs, start.r)
    low, high = solu_set(given_set).hull()
    assert bool(((y >= low - room(x)) & (y <= high + room(x))).all())


@settings(deadline=None, max_examples=25)
@given(n=st.integers(2, 6), large=st.floats(0.0, 3.0), seed=st.integers(0, 10**6))
def test_what_is_beyond_first_order_is_of_second(n: int, large: float, seed: int) -> None:
    box, _ = drawn(n, large, 1e-3, seed)
    other = Box(*(0.5 * (end + 0.5 * box.lower + 0.5 * box.upper) for end in box))
    wide, narrow = expansion(box).rest, expansion(other).rest
    assert bool((narrow <= 0.3 * wide + 1e-12).all())


def half(rest: Callable[[Box], Expansion]) -> Callable[[Box], Expansion]:
    def made(box: Box) -> Expansion:
        found = rest(box)
        return Expansion(**(vars(found) | {"rest": 0.2 * found.rest}))

    return made


def unpulled(rest: Callable[[Box], Expansion]) -> Callable[[Box], Expansion]:
    def made(box: Box) -> Expansion:
        found = rest(box)
        return Expansion(**(vars(found) | {"pull": 0.0 * found.pull}))

    return made


@pytest.mark.parametrize("mutation", [half, unpulled])
def test_a_changed_expansion_is_caught(mutation: Callable[..., Callable[[Box], Expansion]]) -> None:
    wrong = 0
    for seed in range(20):
        box, x = drawn(4, 1.0, 0.3, seed)
        made = mutation(expansion)(box)
        wrong += int((missed(made, x) > made.rest + room(x)).any())
    assert wrong > 0


def test_nothing_is_said_where_nothing_is_known() -> None:
    infinite = torch.full((1, 3), torch.inf, dtype=torch.float64)
    found = solu_box(Box(-infinite, infinite))
    assert bool((found.upper == torch.inf).all() & (found.lower == -torch.inf).all())
    assert bool((expansion(Box(-infinite, infinite)).rest == torch.inf).all())


def question(seed: int, eps: float, layer: int, normed: bool = True) -> tuple[Problem, Forms]:
    choose = random.Random(seed)
    model = random_model(SOLU, choose, 2)
    while model.architecture.network_norm != normed:
        model = random_model(SOLU, choose, 2)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, model.architecture.d_model, generator=generator, dtype=torch.float64)
    problem = Problem(model, Ball(eps).around(x))
    found = [f for f in random_functionals(problem, layer, choose) if f.name == "margin"][:8]
    return problem, forms_of(found, model.architecture.d_out or 0)


@pytest.mark.parametrize(
    "name", ["interval", "crown", "alpha-crown", "taylor", "cpz", "zonotope", "jacobian-proved"]
)
@pytest.mark.parametrize("normed", [True, False])
def test_engines_are_not_crossed_and_bound_something(name: str, normed: bool) -> None:
    problem, forms = question(3, 1e-3, 1, normed)
    bounds = get_engine(name).bound_forms(problem, forms)
    assert_not_crossed(problem, forms, bounds)
    assert name == "interval" or bool((bounds.upper - bounds.lower).isfinite().all())


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("layer", [0, 1])
def test_segments_are_bounded_tightly(normed: bool, layer: int) -> None:
    problem, forms = question(3, 1e-3, layer, normed)
    x = problem.region.center
    way = Problem(problem.model, Segment(x, x + 0.2 * x.flip(0)).region())
    bounds = get_engine("chebyshev").bound_forms(way, forms)
    assert_not_crossed(way, forms, bounds)
    scores, output = way.values(way.region.sample(400, 0)[0], forms.layers, False)
    seen = forms.evaluate(scores, output)
    wide = (seen.amax(0) - seen.amin(0)).sum()
    assert bool((bounds.upper - bounds.lower).sum() < 1.1 * wide + 1e-9)


def test_certify_proves_and_says_who_was_not_asked() -> None:
    problem, _ = question(3, 1e-3, 1)
    found = certify(problem.model, problem.region.center, Ball(1e-4), layer=1, budget="32/1/8")
    assert "holds" in {str(verdict) for verdict in found.table["verdict"].to_pylist()}


@pytest.mark.parametrize("normed", [True, False])
def test_the_checker_computes_the_same(normed: bool) -> None:
    problem, _ = question(5, 1e-3, 1, normed)
    model, x = problem.model, problem.region.center
    arch = model.architecture.to_dict()
    net = Network.made(arch, {name: tensor.numpy() for name, tensor in model.weights.items()})
    assert net.sha256 == model.sha256
    ball = np.frompyfunc(arb, 1, 1)
    balls = net.run([ball(x.numpy().astype(object))], [1], output=True)[0]
    wanted = model.run(x, "blocks.1.attn.hook_attn_scores")["blocks.1.attn.hook_attn_scores"]
    mask = torch.ones(3, 3).tril().bool()
    for h, i, j in mask.expand_as(wanted).nonzero().tolist():
        assert abs(float(balls[1][h, i, j].mid()) - float(wanted[h, i, j])) < 1e-9
    hidden = torch.randn(2, model.architecture.d_model, dtype=torch.float64)
    plain = PlainNetwork(net)._network("blocks.0", hidden.numpy())
    exact = net._network("blocks.0", ball(hidden.numpy().astype(object)), {}, len(hidden))
    for one, other in zip(plain.ravel(), exact.ravel(), strict=True):
        assert abs(one - float(other.mid())) < 1e-10


def test_gates_and_poolers_have_no_solu() -> None:
    from prooflens.errors import ModelError

    base = {"family": "x", "n_layers": 1, "n_heads": 1, "d_model": 2, "d_ff": 2}
    with pytest.raises(ModelError, match="gated"):
        Architecture.from_dict({**base, "activation": "solu", "gated": True})
    with pytest.raises(ModelError, match="pooler_activation"):
        Architecture.from_dict({**base, "activation": "relu", "pooler_activation": "solu"})


def test_the_soundness_run_draws_it() -> None:
    assert [random_case(seed).family for seed in range(50, 60)].count(SOLU) == 5
