"""SoLU as a site of `taylor`: its orders against the step itself, all readings against attacks, and mutations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens import Ball
from prooflens.engines.relaxations.ellipsoids import support
from prooflens.engines.taylor import Taylor
from prooflens.engines.taylor.hessian import Hessian
from prooflens.engines.taylor.parts import bound_part
from prooflens.engines.taylor.remainder_bounds import Eigenvalues, Supports
from prooflens.engines.taylor.solu import SoluSite, Spread
from prooflens.engines.taylor.third_order import ThirdOrder, moves_known
from prooflens.engines.taylor.values import Value, input_root
from prooflens.evaluation.soundness.cases import SOLU, random_case, random_model
from prooflens.models.sites import Solu
from prooflens.problem import Problem
from tests.engines.support import assert_contains, center_of, random_forms
from tests.engines.taylor.test_values import assert_holds

STEP = Solu("y", ("x",))


def site_of(n: int, large: float, spread: float, seed: int) -> tuple[SoluSite, Tensor]:
    """A site of two tokens whose neurons move by three factors and rounding alone, and moves of the neurons."""
    generator = torch.Generator().manual_seed(seed)
    c = large * torch.randn(2, n, generator=generator, dtype=torch.float64)
    G = spread * torch.randn(2, n, 3, generator=generator, dtype=torch.float64)
    root = input_root(c, G, torch.ones(3, dtype=torch.float64), 0.0)
    alpha = 2.0 * torch.rand(200, 3, generator=generator, dtype=torch.float64) - 1.0
    alpha[::2] = alpha[::2].sign()
    source = Value(root.u, root.eye, root, {}, {}, c.new_zeros(2))
    return SoluSite(STEP, source), torch.einsum("snp,ap->asn", G, alpha)


def beyond(site: SoluSite, u: Tensor, v: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """v·r and what v's second order leaves of it, for every move of a token."""
    move = u[:, t]
    c = site.source.u[t]
    r = STEP(c + move) - site.output[t] - move @ site.jacobian[t].T
    Q, _ = site.quadratic(v, t)
    second = 0.5 * torch.einsum("an,fnm,am->af", move, Q, move)
    return r @ v.T, r @ v.T - second


def room(site: SoluSite, u: Tensor) -> float:
    """What float64 errs by when it evaluates all of this."""
    return float(1e-13 * (1.0 + site.source.u.abs().amax() + u.abs().amax()) ** 3)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 6),
    large=st.floats(0.0, 20.0),
    spread=st.sampled_from((0.0, 1e-9, 1e-4, 0.01, 0.3, 2.0)),
    seed=st.integers(0, 10**6),
)
def test_every_order_holds(n: int, large: float, spread: float, seed: int) -> None:
    site, u = site_of(n, large, spread, seed)
    v = torch.randn(5, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    slack = room(site, u)
    for t in (0, 1):
        whole, third = beyond(site, u, v, t)
        assert bool((whole.abs() <= support(site.shape[t], v) + slack).all())
        assert bool((whole <= site.bound(v, t)[:, 0] + slack).all())
        assert bool((-whole <= site.bound(v, t)[:, 1] + slack).all())
        assert bool((third.abs() <= site.own_rest(v, t) + slack).all())
        assert bool((third.abs() <= site.rest(v, t) + slack).all())
        U, W = site.moves
        b = u - (site.s * u).sum(-1, keepdim=True)
        assert bool((u.abs() <= U + slack).all() & (b.abs() <= W + slack).all())
        assert bool(((site.s * b.square()).sum(-1) <= site.spread.whole + slack).all())


def test_what_is_beyond_second_order_is_of_third() -> None:
    for seed in range(10):
        wide, narrow = (site_of(5, 1.0, spread, seed)[0].box for spread in (1e-2, 5e-3))
        assert bool((narrow <= 0.14 * wide).all())


def unspread(site: SoluSite) -> None:
    site.__dict__["spread"] = Spread(*(0.0 * part for part in site.spread))


def unboxed(site: SoluSite) -> None:
    site.__dict__["box"] = 0.1 * site.box


def unmoved(site: SoluSite) -> None:
    U, W = site.moves
    site.__dict__["moves"] = (U, 0.3 * W)


def undragged(site: SoluSite) -> None:
    site.drag = 0.5 * site.drag


@pytest.mark.parametrize("mutation", [unspread, unboxed, unmoved, undragged])
def test_a_changed_rule_is_caught(mutation: Callable[[SoluSite], None]) -> None:
    wrong = 0
    for seed in range(40):
        site, u = site_of(2 + seed % 4, 1.5, 0.3, seed)
        mutation(site)
        v = torch.eye(site.n, dtype=torch.float64)
        for t in (0, 1):
            whole, third = beyond(site, u, v, t)
            wrong += int((whole.abs() > support(site.shape[t], v) + room(site, u)).any())
            wrong += int((third.abs() > site.own_rest(v, t) + room(site, u)).any())
    assert wrong > 0


def test_nothing_is_said_of_neurons_that_move_too_far() -> None:
    site, _ = site_of(4, 1.0, 500.0, 0)
    assert bool((site.box == torch.inf).all())


def problem_with(seed: int, eps: float, normed: bool) -> Problem:
    choose = random.Random(seed)
    model = random_model(SOLU, choose, 2)
    while model.architecture.network_norm != normed:
        model = random_model(SOLU, choose, 2)
    return Problem(model, Ball(eps).around(center_of(model, 3, seed)))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("eps", [1e-3, 0.05])
def test_values_of_chains_with_solu(normed: bool, eps: float) -> None:
    assert assert_holds(problem_with(3, eps, normed), 3)


@pytest.mark.parametrize("normed", [True, False])
def test_every_reading_holds(normed: bool) -> None:
    for seed, eps in ((1, 1e-3), (3, 5e-3), (4, 0.02)):
        problem = problem_with(seed, eps, normed)
        forms = random_forms(problem, 1, 6, seed)
        engine = Taylor()
        found = engine.bound_forms(problem, forms)
        assert_contains(problem, forms, found, seed)
        walk = engine.walk(problem, forms)
        assert moves_known(walk)
        widths = walk.chains[0].root.half_widths
        readings = [Supports(), Eigenvalues(), Hessian(widths, 6), ThirdOrder(widths, 6)]
        for reading in readings:
            part = bound_part(walk, problem, forms, reading)
            assert_contains(problem, forms, replace(found, lower=part.lower, upper=part.upper), seed)
        assert bool((found.upper - found.lower).isfinite().all())


def test_the_soundness_run_asks_taylor() -> None:
    case = next(random_case(seed) for seed in range(50, 60) if random_case(seed).family == SOLU)
    forms = random_forms(case.problem, case.problem.model.architecture.n_layers - 1, 2, 0)
    assert Taylor().refuses(case.problem, forms) is None
