"""Fourth orders as squares: every square is above what it stands for at points of the region, and forms stay tight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines.taylor import Taylor, bound_part, fourth_order, source_squares
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.fourth_order import FourthOrder, above_both, axes_of, balanced, roots
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.hessian import Hessian
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.mixing_squares import MixSquares
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.source_squares import SourceSquare, network_square, norm_square, shares
from prooflens.engines.taylor.squares import half_form, remainder_form
from prooflens.engines.taylor.third_order import ThirdOrder
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.models import scores_name
from prooflens.problem import Problem
from tests.engines.cases import problem_of, tiny_model
from tests.engines.support import random_forms, random_problem
from tests.engines.taylor.points import missed_at_points

POINTS, SHAPES = 300, 3


def walked(problem: Problem, seed: int = 0, layer: int = 2) -> TaylorWalk:
    with torch.no_grad():
        return Taylor().walk(problem, random_forms(problem, layer, 1, seed=seed))


def shapes(n: int, rank: int, seed: int) -> Tensor:
    """Some positive semidefinite matrices."""
    generator = torch.Generator().manual_seed(seed)
    L = torch.randn(SHAPES, n, rank, generator=generator, dtype=torch.float64)
    return L @ L.mT


def half(M: Tensor, x: Tensor) -> Tensor:
    """½xᵀMx of every matrix at every point."""
    return 0.5 * torch.einsum("ni,fij,nj->nf", x, M, x)


def at_site(problem: Problem, chain: Chain, kind: type, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """½rᵀXr at points, and the square above it."""
    name, site = next((n, s) for n, s in chain.sites.items() if isinstance(s, kind))
    assert isinstance(site, NetworkSite | NormSite)
    t = len(chain.root.u) - 1
    alpha = problem.region.sample(POINTS, seed, corners=0.5)[1]
    eye = torch.eye(chain.values[name].u.shape[1], dtype=torch.float64)
    u, r = missed_at_points(problem, chain, name, t, eye, alpha)
    X = shapes(r.shape[1], rank, seed)
    corner = u[:SHAPES]
    square = network_square if isinstance(site, NetworkSite) else norm_square
    found: SourceSquare = square(site, X, t, corner)  # type: ignore[arg-type]
    return half(X, r), (half(found.R, u) + found.rest).nan_to_num(nan=torch.inf)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gated=st.booleans(),
    activation=st.sampled_from(["gelu", "gelu_tanh", "silu", "relu2", "tanh", "relu"]),
    eps=st.sampled_from([0.002, 0.02, 0.2, 1.0]),
    chain=st.integers(0, 2),
    rank=st.sampled_from([1, 4]),
)
def test_squares_of_networks_are_above_at_every_point(
    seed: int, gated: bool, activation: str, eps: float, chain: int, rank: int
) -> None:
    model = tiny_model(seed, n_layers=3, activation=activation, norm_place="none", pool="none", gated=gated)
    problem = random_problem(model, 2, eps, seed)
    chains = walked(problem, seed).chains
    with torch.no_grad():
        real, above = at_site(problem, chains[max(1, chain)], NetworkSite, seed, rank)
    assert bool((real <= above * (1.0 + 1e-9) + 1e-20).all())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["layer", "rms"]),
    place=st.sampled_from(["pre", "post"]),
    eps=st.sampled_from([0.002, 0.02, 0.2]),
    chain=st.integers(1, 2),
    rank=st.sampled_from([1, 6]),
)
def test_squares_of_norms_are_above_at_every_point(
    seed: int, kind: str, place: str, eps: float, chain: int, rank: int
) -> None:
    model = tiny_model(seed, n_layers=3, activation="gelu", norm_place=place, norm_kind=kind, d_model=6)
    problem = random_problem(model, 2, eps, seed)
    chains = walked(problem, seed).chains
    with torch.no_grad():
        real, above = at_site(problem, chains[chain], NormSite, seed, rank)
    assert bool((real <= above * (1.0 + 1e-9) + 1e-20).all())


def at_mixing(problem: Problem, number: int, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """½rᵀXr of the mixing behind a chain at points, and what is above it."""
    walk = walked(problem, seed)
    chain, after = walk.chains[number], walk.chains[number + 1]
    mix, names = chain.mix, chain.segment.attention
    assert mix is not None
    assert names is not None
    place = len(chain.goes_on) - 1
    t = chain.goes_on[place]
    q, k, v = (chain.values[name] for name in (names.q, names.k, names.v))
    at = MixSquares(mix, q, k, v, [t], Grams(mix, 2**20))
    alpha = problem.region.sample(POINTS, seed, corners=0.5)[1]
    run = problem.model.program(problem.n_tokens, [scores_name(2)]).run(problem.region.point(alpha))

    def moved(name: str, token: int) -> Tensor:
        return run[name][:, token].flatten(1) - chain.values[name].u[token]

    eye = torch.eye(len(mix.out), dtype=torch.float64)
    pulled = mix.pull(eye, t)
    r = run[after.segment.root][:, t].flatten(1) - after.root.u[place] - moved(names.stream, t)
    r = r - moved(names.q, t) @ pulled["q"].flatten(1).T
    for name, heads, w in ((names.k, mix.scores.k, pulled["k"]), (names.v, mix.v, pulled["v"])):
        moves = torch.stack([moved(name, j) for j in range(len(heads.u))], 1)
        moves = moves.unflatten(2, (heads.source.heads, -1)).repeat_interleave(heads.share, 2)
        r = r - torch.einsum("njhc,fjhc->nf", moves, w)
    factors = alpha * walk.chains[0].root.half_widths
    found = at.square(shapes(len(mix.out), rank, seed), factors[:SHAPES])
    b = factors @ mix.rows[:, t, at.seen].flatten(0, 1).T
    x = factors @ mix.scores.q.A[t].flatten(0, 1).T
    above = half(found.Z, b) + half(found.Y, x) + found.rest
    return half(shapes(len(mix.out), rank, seed), r), above.nan_to_num(nan=torch.inf)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    causal=st.booleans(),
    place=st.sampled_from(["none", "pre", "post"]),
    eps=st.sampled_from([0.002, 0.02, 0.2]),
    number=st.integers(0, 1),
    rank=st.sampled_from([1, 4]),
)
def test_squares_of_mixings_are_above_at_every_point(
    seed: int, causal: bool, place: str, eps: float, number: int, rank: int
) -> None:
    model = tiny_model(
        seed, n_heads=2, n_layers=3, activation="gelu", norm_place=place, pool="none", causal=causal
    )
    problem = random_problem(model, 3, eps, seed)
    with torch.no_grad():
        real, above = at_mixing(problem, number, seed, rank)
    assert bool((real <= above * (1.0 + 1e-9) + 1e-20).all())


@pytest.mark.parametrize("site", ["network_square", "norm_square"])
def test_without_a_square_something_is_missed(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that takes a source's square for nothing says less than one that does not."""
    problem = random_problem(tiny_model(3, n_layers=2, activation="gelu"), 2, 0.05, 0)
    forms = random_forms(problem, 1, 4, seed=3)
    walk = walked(problem, layer=1)
    half_widths = walk.chains[0].root.half_widths

    def spread() -> Tensor:
        with torch.no_grad():
            part = bound_part(walk, problem, forms, ThirdOrder(half_widths, forms.size))
        return part.upper - part.lower

    whole = spread()
    made = getattr(fourth_order, site)

    def nothing(*asked: object) -> SourceSquare:
        found: SourceSquare = made(*asked)
        return SourceSquare(torch.zeros_like(found.R), torch.zeros_like(found.rest))

    monkeypatch.setattr(fourth_order, site, nothing)
    assert bool((spread() < whole).any())


def test_half_of_the_second_order_of_neurons_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one dimension there is no room: at the end of its reach the square is attained."""
    model = tiny_model(1, n_layers=2, activation="relu2", norm_place="none", pool="none", d_model=1)
    broken = 0
    neurons = source_squares._neurons
    monkeypatch.setattr(source_squares, "_neurons", lambda *asked: [0.3 * R for R in neurons(*asked)])
    for seed in range(30):
        chain = walked(random_problem(model, 1, 0.05, seed), layer=1).chains[-1]
        with torch.no_grad():
            site = next(site for site in chain.sites.values() if isinstance(site, NetworkSite))
            u = site.source.shape[0].sqrt()
            r = (0.5 * site.second[0] * (u @ site.step.bent.weight.T).square()) @ site.down.T
            found = network_square(site, torch.ones(1, 1, 1, dtype=torch.float64), 0, u)
            broken += int(
                (half(torch.ones(1, 1, 1, dtype=torch.float64), r) > half(found.R, u) + found.rest).any()
            )
    assert broken > 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 6), short=st.sampled_from([1.0, 1e-3, 1e-9, 0.0]))
def test_what_is_above_a_form_is_hardly_more(seed: int, n: int, short: float) -> None:
    """|Q| as its ellipsoid sees it: above ±Q, and at most hardly more than Q is there."""
    generator = torch.Generator().manual_seed(seed)
    T = torch.randn(n, n, generator=generator, dtype=torch.float64)
    T[:, :1] *= short
    Q = torch.randn(2, n, n, generator=generator, dtype=torch.float64)
    Q, zero = Q + Q.mT, torch.zeros(2, dtype=torch.float64)
    X = above_both(T @ T.T, Q, zero)
    for sign in (1.0, -1.0):
        assert float(torch.linalg.eigvalsh(X + sign * Q)[..., 0].min()) >= -1e-12 * float(Q.abs().max())
    if short == 1.0:
        assert bool((remainder_form(T @ T.T, X, zero) <= 1.1 * remainder_form(T @ T.T, Q, zero) + 1e-9).all())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), c=st.integers(1, 6), scale=st.sampled_from([1e-6, 1.0, 1e4]))
def test_products_are_below_balanced_squares(seed: int, c: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    L, K = torch.randn(2, 3, c, c, generator=generator, dtype=torch.float64)
    K = scale * K
    X, Y, off = balanced(L @ L.mT, K @ K.mT)
    directions = torch.randn(2, 3, c, 200, generator=generator, dtype=torch.float64)
    directions = directions / directions.norm(dim=2, keepdim=True)
    x, y = L @ directions[0], K @ directions[1]
    above = 0.5 * torch.einsum("eip,eij,ejp->ep", x, X, x) + 0.5 * torch.einsum("eip,eij,ejp->ep", y, Y, y)
    above = above + off[:, None] * x.norm(dim=1) * y.norm(dim=1)
    assert bool(((x * y).sum(1).abs() <= above * (1.0 + 1e-9)).all())
    most = torch.linalg.matrix_norm(L.mT @ K, 2)
    zero = torch.zeros(3, dtype=torch.float64)
    reached = torch.stack([remainder_form(M, S[None], zero[:1])[0] for M, S in zip(L @ L.mT, X, strict=True)])
    assert bool((reached <= 0.75 * most + 1e-9).all())


def test_what_is_not_finite_is_not_known() -> None:
    M = torch.full((2, 2), torch.nan, dtype=torch.float64)
    root, back = roots(M)
    assert torch.isfinite(root).all()
    assert torch.isfinite(back).all()
    found = above_both(M, torch.eye(2, dtype=torch.float64)[None], torch.zeros(1, dtype=torch.float64))
    assert not bool(found.isfinite().all())


def test_where_no_axes_are_found_the_coordinates_stand_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("no convergence")  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    M = torch.eye(3, dtype=torch.float64).expand(2, -1, -1) * 4.0
    values, V = axes_of(M)
    assert torch.equal(values, torch.full((2, 3), 4.0, dtype=torch.float64))
    assert torch.equal(V, torch.eye(3, dtype=torch.float64).expand(2, -1, -1))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), ratio=st.sampled_from([0.0, 1e-300, 1e-3, 1.0, 1e6]))
def test_shares_are_those_of_a_sum(seed: int, ratio: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 50, 4, generator=generator, dtype=torch.float64)
    y = ratio * y
    one, other = shares(x.square().sum(-1), y.square().sum(-1))
    whole = (x + y).square().sum(-1)
    assert bool((whole <= one * x.square().sum(-1) + other * y.square().sum(-1)).all())


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_squares_make_bounds_tighter_than_constants(name: str) -> None:
    """With fourth orders as squares a form's range is less than half as far from its linear part."""
    problem = problem_of(name, 1e-2)
    forms = random_forms(problem, 1, 4, seed=3)
    walk = walked(problem, layer=1)
    half_widths = walk.chains[0].root.half_widths
    with torch.no_grad():
        new, old = (
            bound_part(walk, problem, forms, reading(half_widths, forms.size))
            for reading in (ThirdOrder, Hessian)
        )
    assert bool((new.upper - new.lower < old.upper - old.lower).all())


def test_forms_without_remainders_have_no_squares() -> None:
    """Nothing is added where nothing was taken."""
    problem = problem_of("bert", 1e-3)
    walk = walked(problem, layer=1)
    fourth = FourthOrder(walk.chains[0].root.half_widths, 2)
    with torch.no_grad():
        fourth.walk_back(walk, torch.ones(2, len(fourth.half_widths), dtype=torch.float64))
    J, error = fourth.above.taken()
    assert float(J.abs().max()) == 0.0
    assert float(fourth.rest.abs().max()) == 0.0
    assert float(error.max()) < 1e-100
    assert float(half_form(torch.eye(2).double()[None], torch.ones(1, 2).double())) == 1.0
