"""Covectors that move with the factors: they are derivatives, and the bounds that they give hold.

At the input a moving covector is the form's Hessian, which automatic differentiation gives as well. What is beyond
second order is asked alone, at points, so that no slack of another term hides it.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines import FormBounds, Forms, get_engine
from prooflens.engines.attack import AttackBudget
from prooflens.engines.protocol import EngineOptions, OutOfTimeError
from prooflens.engines.taylor import Taylor, bound_part
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.corners import Majorised, ranges
from prooflens.engines.taylor.hessian import Hessian
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.moving import Moved, MovingCovectors
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.parts import collect
from prooflens.engines.taylor.solu import SoluSite
from prooflens.engines.taylor.squares import Squares, remainder_form
from prooflens.engines.taylor.third_order import ThirdOrder, moves_known, third_order_batch
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.evaluation.soundness.cases import random_case
from prooflens.evaluation.soundness.forms import try_forms
from prooflens.evaluation.soundness.record import SoundnessReport
from prooflens.problem import Problem
from prooflens.queries import Row
from prooflens.regions import Region
from tests.engines.cases import MODELS, RANDOM_MODELS, input_of, model_of, problem_of, tiny_model
from tests.engines.support import assert_contains, attained, random_forms, random_problem
from tests.engines.taylor.points import missed_at_points
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


def test_what_a_mean_rounds_by_is_seen_by_moving_covectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooler behind a mean: what the mean is off by, here far more than by rounding, meets W at its root."""
    model = tiny_model(0, n_layers=1, activation="gelu", pool="mean", pooler=True)
    problem = random_problem(model, 3, 1e-3, 0)
    walk, half_widths = walked(problem, forms := output_of(problem))
    made, before = list[Moved](), MovingCovectors._before
    roots = list[Tensor]()

    def spied(self: MovingCovectors, chain: Chain, behind: dict[int, Tensor]) -> dict[int, dict[str, Tensor]]:
        roots.extend([behind[0]] if chain.pool is not None else [])
        return before(self, chain, behind)

    monkeypatch.setattr(MovingCovectors, "_before", spied)
    (pooled,) = (chain for chain in walk.chains if chain.pool is not None)
    for noise in (0.0, 1.0):
        assert pooled.noise is not None
        pooled.noise = torch.full_like(pooled.noise, noise)
        reading = ThirdOrder(half_widths, forms.size)
        with torch.no_grad():
            collect(walk, problem, forms, reading)
        assert reading.moves is not None
        made.append(reading.moves)
    corners = torch.where(roots[0].sum(-1) >= 0.0, 1.0, -1.0).to(half_widths)
    far = torch.einsum("fpd,fp->fd", roots[0], corners).norm(dim=-1)
    assert bool((far > 0.0).all())
    assert bool((made[1].rest - made[0].rest >= 0.99 * far).all())


class Parts(NamedTuple):
    """What a reading knows of forms: a·α, ½αᵀHα, the squares above the rest, and constants."""

    slope: Tensor
    H: Tensor
    above: list[Majorised]
    missed: Tensor


def parts_of(problem: Problem, forms: Forms, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """All that goes into the last step of the reading, before it is bounded over the box."""
    walk, half_widths = walked(problem, forms)
    found: list[tuple[Tensor, list[Majorised]]] = []

    def spied(
        slope: Tensor, H: Tensor, error: Tensor, remainders: Callable[[slice], list[Majorised]]
    ) -> Tensor:
        found.append((H, remainders(slice(None))))
        return ranges(slope, H, error, remainders)

    monkeypatch.setattr("prooflens.engines.taylor.third_order.ranges", spied)
    with torch.no_grad():
        reading = ThirdOrder(half_widths, forms.size)
        collected = collect(walk, problem, forms, reading)
        reading.linear_range(collected.linear * half_widths)
    ((H, above),) = found
    return Parts(collected.linear * half_widths, H, above, collected.missed.amax(-1) + collected.noise)


def beyond(problem: Problem, forms: Forms, slope: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    """Points of the region, and |f(α) − f(0) − a·α − ½αᵀHα| there."""
    alpha = problem.region.sample(300, 4, corners=0.7)[1]
    values = attained(problem, forms, alpha)
    center = attained(problem, forms, torch.zeros_like(alpha[:1]))
    model = alpha @ slope.T + 0.5 * torch.einsum("np,fpq,nq->nf", alpha, H, alpha)
    return alpha, (values - center - model).abs()


def over(parts: Parts, alpha: Tensor) -> list[Tensor]:
    """The squares and constants of a reading at points, for each choice that it has."""
    found = []
    for J, error, rest in parts.above:
        assert J is not None
        square = 0.5 * torch.einsum("np,fpq,nq->nf", alpha, J, alpha)
        found.append(square + 0.5 * error * alpha.square().sum(-1, keepdim=True) + rest + parts.missed)
    return found


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("eps", [1e-3, 2e-2])
def test_squares_are_above_what_is_beyond_second_order(
    name: str, eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every point by itself."""
    problem = problem_of(name, eps)
    forms = random_forms(problem, 1, 4, seed=3)
    parts = parts_of(problem, forms, monkeypatch)
    alpha, real = beyond(problem, forms, parts.slope, parts.H)
    for square in over(parts, alpha):
        assert bool((real <= square.nan_to_num(nan=torch.inf) + 1e-12).all())


def test_without_moving_covectors_it_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares of squares: no site has a third order of its own, and a bound without the moving covectors breaks."""
    model = tiny_model(3, n_layers=3, activation="relu2", norm_place="none", pool="none")
    problem = random_problem(model, 1, 1e-3, 0)
    forms = Forms.of([(0, Row(2, 0, 0), 0, 1.0)], size=1)
    parts = parts_of(problem, forms, monkeypatch)
    alpha, real = beyond(problem, forms, parts.slope, parts.H)
    assert all(bool((real <= square).all()) for square in over(parts, alpha))
    zero = torch.zeros(1, dtype=torch.float64)
    monkeypatch.setattr(MovingCovectors, "moved", lambda _: Moved(None, zero, zero, zero))
    parts = parts_of(problem, forms, monkeypatch)
    assert any(bool((real > square).any()) for square in over(parts, alpha))


@pytest.mark.parametrize("site", [NetworkSite, NormSite])
def test_without_the_squares_of_a_site_it_is_not_covered(site: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sites leave of second order is a real part: a reading that forgets it is broken by points."""
    problem = random_problem(tiny_model(3, n_layers=2, activation="gelu"), 2, 0.05, 0)
    forms = random_forms(problem, 1, 4, seed=3)
    parts = parts_of(problem, forms, monkeypatch)
    alpha, real = beyond(problem, forms, parts.slope, parts.H)
    assert all(bool((real <= square).all()) for square in over(parts, alpha))
    squares = site.squares  # type: ignore[attr-defined]

    def nothing(self: NormSite | NetworkSite, v: Tensor, t: int) -> Squares:
        return Squares.none(squares(self, v, t).R.shape[-1], torch.zeros_like(v[:, 0]))

    monkeypatch.setattr(site, "squares", nothing)
    alone = parts_of(problem, forms, monkeypatch)
    assert any(
        bool((found < square).any())
        for found, square in zip(over(alone, alpha), over(parts, alpha), strict=True)
    )


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


class AtPoints(NamedTuple):
    """What a site leaves of covectors beyond the second order that it states, at points, and what is above it."""

    left: Tensor
    above: Tensor


def site_at_points(problem: Problem, kind: type, number: int, seed: int) -> AtPoints:
    """A site of a chain: what it leaves, and ½uᵀRu + (uᵀBu)^½ + rest; [n, F] each."""
    chain = walked(problem, random_forms(problem, 2, 1, seed=seed))[0].chains[number]
    name, site = next((n, s) for n, s in chain.sites.items() if isinstance(s, kind))
    assert isinstance(site, NetworkSite | NormSite | SoluSite)
    t = len(chain.root.u) - 1
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(3, chain.values[name].u.shape[1], generator=generator, dtype=torch.float64)
    alpha = problem.region.sample(300, seed, corners=0.5)[1]
    u, r = missed_at_points(problem, chain, name, t, v, alpha)
    Q, _ = site.secant(v, t, torch.eye(u.shape[1], dtype=torch.float64))
    found = site.squares(v, t)

    def form(M: Tensor, x: Tensor, missed: Tensor) -> Tensor:
        return torch.einsum("ni,fij,nj->nf", x, M, x) + missed * x.square().sum(-1, keepdim=True)

    above = 0.5 * form(found.R, u, found.error) + found.rest
    if found.B is not None and found.missed is not None:
        above = above + form(found.B, u, found.missed).clamp(min=0.0).sqrt()
    left = (r - 0.5 * torch.einsum("ni,fij,nj->nf", u, Q, u)).abs()
    # What is not known is no bound.
    return AtPoints(left, above.nan_to_num(nan=torch.inf))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gated=st.booleans(),
    activation=st.sampled_from(["gelu", "gelu_tanh", "silu", "relu2", "tanh", "relu"]),
    eps=st.sampled_from([0.002, 0.02, 0.2, 1.0]),
    chain=st.integers(1, 2),
)
def test_squares_of_networks_are_above_at_every_point(
    seed: int, gated: bool, activation: str, eps: float, chain: int
) -> None:
    model = tiny_model(seed, n_layers=3, activation=activation, norm_place="none", pool="none", gated=gated)
    with torch.no_grad():
        found = site_at_points(random_problem(model, 2, eps, seed), NetworkSite, chain, seed)
    assert bool((found.left <= found.above + 1e-13).all())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["layer", "rms"]),
    place=st.sampled_from(["pre", "post"]),
    eps=st.sampled_from([0.002, 0.02, 0.2]),
    chain=st.integers(1, 2),
)
def test_squares_of_norms_are_above_at_every_point(
    seed: int, kind: str, place: str, eps: float, chain: int
) -> None:
    model = tiny_model(seed, n_layers=3, activation="gelu", norm_place=place, norm_kind=kind, d_model=6)
    with torch.no_grad():
        found = site_at_points(random_problem(model, 2, eps, seed), NormSite, chain, seed)
    assert bool((found.left <= found.above + 1e-12).all())


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
