"""Capped scores in `taylor`: the expansion of c·tanh(a/c), a mixing behind it, and mutations of each of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines.taylor import Taylor, attention
from prooflens.engines.taylor.caps import CappedScores, capped_scores
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.hessian import Hessian
from prooflens.engines.taylor.mixing import MixShape
from prooflens.models.sites import Affine
from tests.engines.support import outside
from tests.engines.taylor.test_sites import PARTS, SLACK, Mixing, assert_mixings_hold
from tests.engines.test_later_steps import assert_not_crossed, question

CAPS = (0.7, 4.0)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(
    cap=st.sampled_from([0.3, 1.0, 5.0, 50.0]),
    a=st.floats(-60, 60),
    rho=st.floats(0, 20),
    E=st.floats(0, 20),
    linear=st.floats(-1, 1),
    rest=st.floats(-1, 1),
)
def test_a_cap_moves_as_its_expansion_says(
    cap: float, a: float, rho: float, E: float, linear: float, rest: float
) -> None:
    """φ(a + ℓ + e) less its tangent and ½φ″ℓ² stays below `rest`; less its tangent alone, below both."""
    found = capped_scores(cap, *(tensor(x) for x in (a, rho, E)))
    move = linear * rho + rest * E
    gap = cap * (math.tanh((a + move) / cap) - math.tanh(a / cap)) - float(found.slope) * move
    room = 1e-14 * (cap + abs(a) + rho + E)
    assert abs(gap - 0.5 * float(found.curve) * (linear * rho) ** 2) <= float(found.rest) + room
    assert abs(gap) <= float(found.straight + found.rest) + room


def test_the_rest_of_a_cap_is_of_third_order() -> None:
    for size in (1e-1, 1e-2, 1e-3):
        found = capped_scores(
            2.0, tensor(0.0, 1.0, -3.0), size * torch.ones(3).double(), torch.zeros(3).double()
        )
        assert bool((found.rest <= 0.2 * size**3 + 1e-11 * size).all())


@pytest.mark.parametrize("sizes", PARTS)
@pytest.mark.parametrize("cap", CAPS)
def test_mixings_behind_caps(sizes: list[float], cap: float) -> None:
    for heads, shared in ((1, 1), (2, 2)):
        assert_mixings_hold(sizes, heads, shared, cap, seeds=2)


@pytest.mark.parametrize("sizes", PARTS[::2])
@pytest.mark.parametrize("quick", [False, True])
def test_capped_scores_move_within_their_bounds(sizes: list[float], quick: bool) -> None:
    """Scores behind a cap beyond first and second order, centred ones beyond their linear parts, and b_e's shape."""
    for seed, cap in enumerate(CAPS):
        mixing = Mixing(seed, 2, 1 + seed, sizes, quick, cap)
        site, mix = mixing.chain.scores, mixing.chain.mix
        assert site is not None
        assert mix is not None
        assert site.capped is not None
        alpha, linear, e = mixing.moves()
        step, maps = site.step, [s for s in mixing.chain.segment.steps if isinstance(s, Affine)][:2]
        q, k = (f(mixing.u) for f in maps)
        (A_q, e_q), (A_k, e_k) = ((f(linear), f(e)) for f in maps)
        moved = mixing.capped(step(q + A_q + e_q, k + A_k + e_k)) - mixing.capped(step(q, k))
        flat = k.expand_as(A_k)
        tangent = site.slopes * (step(q, A_k + e_k) + step(A_q + e_q, flat))
        straight = torch.einsum("hijp,np->nhij", site.rows, alpha)
        bend = site.slopes * step(A_q, A_k) + 0.5 * site.capped.curve * straight.square()
        second, cross = site.products

        def centred(x: Tensor, s: Tensor = mix.s) -> Tensor:
            return x - (s * x).sum(-1, keepdim=True)

        b_e = centred(moved) - torch.einsum("hijp,np->nhij", mix.rows, alpha)
        for found, limit in (
            (moved - tangent, second + cross),
            (moved - tangent - bend, cross),
            (b_e, mix.E),
            (centred(moved - tangent), mix.E_products),
            (centred(moved - tangent - bend), mix.E_cross),
        ):
            assert bool(((found.abs() - limit)[:, :, step.mask] <= SLACK).all())
        at_q, at_k, at_v = (mixing.chain.values[name] for name in "qkv")
        for t in range(len(mixing.u)):
            shapes = MixShape(mix, at_q, at_k, at_v, [t], Grams(mix))
            K_e = shapes._nonlinear(shapes._products())[0]
            assert bool(step.mask[t, shapes.seen].all())
            assert outside(K_e, b_e[:, :, t, shapes.seen].flatten(1)) <= SLACK


def assert_hessians_hold() -> None:
    """αᵀGα of a mixing behind a cap is half its second derivative, for every direction of the next root."""
    mixing = Mixing(1, 2, 1, [0.1, 0.1, 0.1, 0.0, 0.0, 0.0], cap=0.7)
    mix = mixing.chain.mix
    assert mix is not None
    alpha, linear, _ = mixing.moves()
    for t in range(len(mixing.u)):
        reading = Hessian(mix.factors.half_widths, len(mixing.u[0]))
        reading._add_mixing(mix, t, torch.eye(len(mixing.u[0]), dtype=torch.float64))
        found = torch.einsum("np,fpr,nr->nf", alpha, reading.second.G, alpha)
        wanted = torch.stack([0.5 * mixing.bend(move)[t] for move in linear])
        assert bool((found - wanted).abs().max() <= 1e-12)


@pytest.mark.parametrize("sizes", [[0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.0, 0.0, 0.0]])
def test_a_right_cap_holds(sizes: list[float]) -> None:
    assert_cap_holds(sizes)


def assert_cap_holds(sizes: list[float]) -> None:
    assert_mixings_hold(sizes, 1, 1, 0.7)
    assert_hessians_hold()


MUTATIONS: dict[str, Callable[[CappedScores], CappedScores]] = {
    "a slope of 1": lambda at: at._replace(slope=torch.ones_like(at.slope)),
    "no curve": lambda at: at._replace(curve=0.0 * at.curve, straight=0.0 * at.straight),
    "no rest": lambda at: at._replace(rest=0.0 * at.rest),
    "a curve of the other sign": lambda at: at._replace(curve=-at.curve),
}


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_wrong_cap_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a cap's rule, spoilt, breaks a bound of these tests."""
    sizes = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0] if name == "no rest" else [0.3, 0.3, 0.3, 0.0, 0.0, 0.0]

    def wrong(cap: float, a: Tensor, rho: Tensor, E: Tensor) -> CappedScores:
        return MUTATIONS[name](capped_scores(cap, a, rho, E))

    monkeypatch.setattr(attention, "capped_scores", wrong)
    with pytest.raises(AssertionError):
        assert_cap_holds(sizes)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_capped_models_are_not_crossed(layer: int) -> None:
    for seed in range(2):
        problem, forms = question("gemma2", seed, 0.01, depth=3, layer=layer)
        assert problem.model.architecture.score_cap is not None
        assert_not_crossed(problem, forms, Taylor().bound_forms(problem, forms), seed)
