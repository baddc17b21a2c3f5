"""Covectors that move with the factors: they are derivatives, and the bounds that they give hold.

At the input a moving covector is the form's Hessian, which automatic differentiation gives as well. What is beyond
second order is asked alone, at points, so that no slack of another term hides it.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines import FormBounds, Forms, get_engine
from prooflens.engines.attack import AttackBudget
from prooflens.engines.protocol import EngineOptions, OutOfTimeError
from prooflens.engines.relaxations.ellipsoids import support
from prooflens.engines.taylor import Taylor, bound_part
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.hessian import Hessian
from prooflens.engines.taylor.moving import MovingCovectors
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.own_orders import own_orders
from prooflens.engines.taylor.third_order import ThirdOrder, moves_known, remainder_form, third_order_batch
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.evaluation.soundness.cases import random_case
from prooflens.evaluation.soundness.forms import try_forms
from prooflens.evaluation.soundness.record import SoundnessReport
from prooflens.models import scores_name
from prooflens.problem import Problem
from prooflens.queries import Row
from prooflens.regions import Region
from tests.engines.cases import MODELS, RANDOM_MODELS, input_of, model_of, problem_of, tiny_model
from tests.engines.support import assert_contains, attained, random_forms, random_problem
from tests.engines.taylor.test_hessian import differentiated, output_of


def walked(problem: Problem, forms: Forms) -> tuple[TaylorWalk, Tensor]:
    with torch.no_grad():
        walk = Taylor().walk(problem, forms)
    return walk, walk.chains[0].root.half_widths


def known(name: str) -> bool:
    problem = problem_of(name, 1e-3)
    return moves_known(walked(problem, random_forms(problem, 1, 1, seed=0))[0])


MOVING = [name for name in MODELS if known(name)]


def test_most_families_are_known() -> None:
    """Only norms of single heads and caps of scores are not."""
    assert set(MODELS) - set(MOVING) == {
        name for name in MODELS if name in {"gemma2", "gemma3_text", "olmo2", "qwen3"}
    }


def test_caps_are_not_known_without_norms_either() -> None:
    """A chain without a single site still has its cap."""
    model = tiny_model(0, n_layers=2, activation="gelu", norm_place="none", pool="none", score_cap=5.0)
    problem = random_problem(model, 3, 1e-3, 0)
    assert not any(moves_known(walked(problem, random_forms(problem, i, 1, seed=0))[0]) for i in (0, 1))


@pytest.mark.parametrize("name", [name for name in MOVING if name not in {"toy", "opt"}])
@pytest.mark.parametrize("where", [1, "output"])
def test_at_the_input_a_moving_covector_is_the_hessian(
    name: str, where: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ReLUs are left out: their stand-ins are chords."""
    problem = problem_of(name, 1e-4)
    forms = output_of(problem) if where == "output" else random_forms(problem, int(where), 3, seed=2)
    walk, half_widths = walked(problem, forms)
    found: dict[int, Tensor] = {}
    through = MovingCovectors._through

    def spied(self: MovingCovectors, chain: Chain, t: int, moves: dict[str, Tensor]) -> Tensor | None:
        W = through(self, chain, t, moves)
        if chain is walk.chains[0] and W is not None:
            found[t] = W
        return W

    monkeypatch.setattr(MovingCovectors, "_through", spied)
    with torch.no_grad():
        bound_part(walk, problem, forms, ThirdOrder(half_widths, forms.size))
    _, H = differentiated(problem, forms)
    N = walk.chains[0].root.N * half_widths
    mine = sum(torch.einsum("fpd,dq->fpq", W, N[t, :, : W.shape[1]]) for t, W in found.items())
    assert isinstance(mine, Tensor)
    p = mine.shape[1]
    assert torch.allclose(mine, H[:, :p, :p], rtol=1e-8, atol=1e-9 * float(H.abs().max()))
    assert float(H[:, p:].abs().sum()) == 0.0


class _Beyond(ThirdOrder):
    """A reading that leaves the quadratic part out."""

    def linear_range(self, slope: Tensor) -> Tensor:
        return slope.new_zeros(len(slope), 2)


def beyond(problem: Problem, forms: Forms) -> Tensor:
    """The largest |f(α) − f(0) − a·α − ½αᵀHα| at points."""
    a, H = differentiated(problem, forms)
    alpha = problem.region.sample(300, 4, corners=0.7)[1]
    values = attained(problem, forms, alpha)
    center = attained(problem, forms, torch.zeros_like(alpha[:1]))
    model = alpha @ a.T + 0.5 * torch.einsum("np,fpq,nq->nf", alpha, H, alpha)
    return (values - center - model).abs().amax(0)


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("eps", [1e-3, 2e-2])
def test_what_is_beyond_second_order_is_covered(name: str, eps: float) -> None:
    problem = problem_of(name, eps)
    forms = random_forms(problem, 1, 4, seed=3)
    walk, half_widths = walked(problem, forms)
    with torch.no_grad():
        part = bound_part(walk, problem, forms, _Beyond(half_widths, forms.size))
    assert bool((beyond(problem, forms) <= 0.5 * (part.upper - part.lower) + 1e-12).all())


def test_without_moving_covectors_it_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares of squares: no site has a third order of its own, and a bound without the moving covectors breaks."""
    model = tiny_model(3, n_layers=3, activation="relu2", norm_place="none", pool="none")
    problem = random_problem(model, 1, 1e-3, 0)
    forms = Forms.of([(0, Row(2, 0, 0), 0, 1.0)], size=1)
    real = beyond(problem, forms)
    walk, half_widths = walked(problem, forms)
    with torch.no_grad():
        part = bound_part(walk, problem, forms, _Beyond(half_widths, 1))
        assert bool((real <= 0.5 * (part.upper - part.lower)).all())
        monkeypatch.setattr(ThirdOrder, "moving", lambda *_: 0.0)
        part = bound_part(walk, problem, forms, _Beyond(half_widths, 1))
        assert bool((real > 0.5 * (part.upper - part.lower)).all())


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), eps=st.sampled_from([1e-3, 3e-2]), **RANDOM_MODELS)
def test_forms_of_random_models_are_contained(
    seed: int, eps: float, activation: str, place: str, kind: str, gated: bool
) -> None:
    model = tiny_model(
        seed, n_heads=2, n_layers=2, activation=activation, norm_place=place, norm_kind=kind, gated=gated
    )
    problem = random_problem(model, 3, eps, seed)
    for forms in (output_of(problem), random_forms(problem, 1, 4, seed=seed)):
        walk, half_widths = walked(problem, forms)
        with torch.no_grad():
            part = bound_part(walk, problem, forms, ThirdOrder(half_widths, forms.size))
        found = FormBounds(part.lower, part.upper, -part.corner, part.corner)
        assert_contains(problem, forms, found, seed=seed)


def test_remainders_shrink_where_second_order_meets_second_order() -> None:
    """On a model of four layers the bound is tighter than with ellipsoids alone."""
    problem = problem_of("llama", 1e-2)
    forms = random_forms(problem, 1, 4, seed=3)
    walk, half_widths = walked(problem, forms)
    with torch.no_grad():
        new, old = (
            bound_part(walk, problem, forms, reading(half_widths, forms.size))
            for reading in (ThirdOrder, Hessian)
        )
    assert bool((new.upper - new.lower < old.upper - old.lower).all())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 6))
def test_quadratic_forms_of_remainders_are_contained(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    T, Q, e = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((n, n), (2, n, n), (n, 300))
    )
    e = T @ (e / e.norm(dim=0))
    values = 0.5 * torch.einsum("ip,fij,jp->fp", e, 0.5 * (Q + Q.mT), e).abs().amax(1)
    found = remainder_form(T @ T.T, 0.5 * (Q + Q.mT), torch.zeros(2, dtype=torch.float64))
    assert bool((values <= found).all())
    assert bool((found <= 30.0 * values.clamp(min=1e-12)).any())


def test_no_matrix_is_made_that_does_not_fit() -> None:
    problem = problem_of("bert", 1e-3)
    walk, _ = walked(problem, random_forms(problem, 1, 1, seed=0))
    walk.memory = 1000
    assert third_order_batch(walk) == 0


def own_and_bound(seed: int, gated: bool, activation: str, eps: float) -> tuple[Tensor, Tensor]:
    """|v·r(u) − ½uᵀQu| of a network at points, at its largest, and its bound by eigenvalues."""
    model = tiny_model(seed, n_layers=2, activation=activation, norm_place="none", pool="none", gated=gated)
    problem = random_problem(model, 1, eps, seed)
    chain = walked(problem, random_forms(problem, 1, 1, seed=seed))[0].chains[1]
    ((name, site),) = [(n, s) for n, s in chain.sites.items() if isinstance(s, NetworkSite)]
    v = torch.randn(3, site.down.shape[0], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    alpha = problem.region.sample(200, seed, corners=0.5)[1]
    source = site.step.source
    run = model.program(1, [scores_name(1)]).run(problem.region.point(alpha))
    u = run[source][:, 0] - chain.values[source].u[0]
    r = (run[name][:, 0] - chain.values[name].u[0]) @ v.T - u @ site.pull(v, 0).T
    Q, _ = site.quadratic(v, 0, torch.eye(u.shape[1], dtype=torch.float64))
    own = (r - 0.5 * torch.einsum("ni,fij,nj->nf", u, Q, u)).abs().amax(0)
    with torch.no_grad():
        found, noise = own_orders(site, v, 0), site.noise(v, 0)
        assert found is not None
        assert bool((site.own_rest(v, 0) <= support(site.own_shape[0], v) + noise).all())
    return own, found + noise


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gated=st.booleans(),
    activation=st.sampled_from(["gelu", "silu", "relu2", "tanh"]),
    eps=st.sampled_from([0.02, 0.2]),
)
def test_own_orders_of_networks_are_contained(seed: int, gated: bool, activation: str, eps: float) -> None:
    own, found = own_and_bound(seed, gated, activation, eps)
    assert bool((own <= found).all())


def test_a_network_without_its_own_third_order_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cubes are a real part of a network: without them the bound breaks at points."""
    monkeypatch.setattr("prooflens.engines.taylor.own_orders.largest", lambda K: torch.zeros(len(K)).double())
    pairs = [own_and_bound(seed, False, "tanh", 0.2) for seed in range(10)]
    assert any(bool((own > found).any()) for own, found in pairs)


@pytest.mark.parametrize("layer", [0, 1])
def test_forms_that_nothing_moves(layer: int) -> None:
    """The first token of a causal model does not see the last, which alone moves."""
    x = input_of("gpt2")
    radius = torch.zeros_like(x)
    radius[-1] = 1e-2
    problem = Problem(model_of("gpt2"), Region(x, radius=radius))
    forms = Forms.of([(0, Row(layer, 0, 0), 0, 1.0)], size=1)
    walk, half_widths = walked(problem, forms)
    with torch.no_grad():
        part = bound_part(walk, problem, forms, ThirdOrder(half_widths, 1))
    assert float(part.upper - part.lower) < 1e-8


def test_no_time_for_third_orders_loses_nothing() -> None:
    """Where the time ends inside the fourth reading, what the third found stands."""
    problem = problem_of("llama", 1e-2)
    forms = random_forms(problem, 1, 4, seed=3)

    def ended(stage: str, share: float) -> None:
        if "third orders" in stage:
            raise OutOfTimeError(stage)

    walk, half_widths = walked(problem, forms)
    with torch.no_grad():
        third = bound_part(walk, problem, forms, Hessian(half_widths, forms.size))
    found = Taylor().bound_forms(problem, forms, EngineOptions(progress=ended))
    assert torch.allclose(found.upper, third.upper, rtol=1e-9)


def test_a_mixing_passes_tokens_that_move_where_its_own_does_not() -> None:
    """A readout behind one mixing at a token that stands still: its third order is that of the tokens before."""
    case, report = random_case(41000109), SoundnessReport()
    try_forms(case, [get_engine("taylor")], AttackBudget(64, 2, 10), report, "reads")
    assert report.bounds > 300
    assert report.violations == []
