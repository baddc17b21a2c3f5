"""The four sites: what their stand-ins miss, against the sites themselves."""

from typing import Any

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens.checker.depth.activations import KINKED, SMOOTH, expansion
from prooflens.checker.depth.moving import Moving
from prooflens.checker.depth.networks import NetworkSite
from prooflens.checker.depth.norms import NormSite
from prooflens.checker.depth.row import tail
from prooflens.checker.depth.scores import Heads, ScoreSite
from prooflens.checker.depth.shapes import Array, ball, supports
from prooflens.checker.depth.solu import SoluSite
from prooflens.checker.depth.values import ROOT, Chain
from prooflens.checker.network import _ACTIVATIONS
from prooflens.checker.plain import PlainNetwork
from tests.checker.depth.cases import Case

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted({*SMOOTH, *KINKED})),
    st.floats(-6, 6),
    st.sampled_from([0.0, 1e-9, 1e-3, 0.1, 1.0, 5.0]),
    st.lists(st.floats(-1, 1), min_size=1, max_size=6),
)
def test_activations_stay_within_their_rest(name: str, h: float, b: float, shares: list[float]) -> None:
    at = expansion(name, np.array([h]), np.array([b]))
    value, slope, second, third, rest = (
        float(x[0]) for x in (at.value, at.slope, at.second, at.third, at.rest)
    )
    with ctx.workprec(200):
        for share in (-1.0, 1.0, *shares):
            u = arb(share) * b
            left = _ACTIVATIONS[name](arb(h) + u) - value - slope * u - second * u**2 - third * u**3
            assert not abs(left) > rest
    assert b > 0.1 or rest <= 4.0 * b + 1e-13


@pytest.mark.parametrize("name", sorted({*SMOOTH, *KINKED}))
def test_what_moves_without_end_proves_nothing(name: str) -> None:
    at = expansion(name, np.array([0.3, 0.3, 50.0]), np.array([np.inf, np.nan, 1e300]))
    assert (at.rest[:2] == np.inf).all()
    assert at.rest[2] > 1e100


@settings(max_examples=200, deadline=None)
@given(st.floats(-2.6, 2.6), st.integers(1, 3))
def test_tails_of_the_exponential(b: float, n: int) -> None:
    beta = abs(b)
    with ctx.workprec(200):
        x = arb(b)
        rest = x.exp() - sum((x**k / arb(k).fac() for k in range(n)), arb(0))
        found = float(tail(np.array(beta), n))
        assert found == np.inf or not abs(rest) > found * arb(beta) ** n


def chain(seed: int, d: int, p: int, far: float, off: float) -> tuple[Chain, Array, Array]:
    """A root of two tokens, factors, and members of it at those factors."""
    rng = np.random.default_rng(seed)
    c, N = rng.standard_normal((2, d)) + 0.3, far * rng.standard_normal((2, d, p))
    held = Chain(c, N, {ROOT: np.stack([ball(np.asarray(off), d)] * 2)})
    alpha = np.sign(rng.standard_normal((120, p))) * rng.choice([1.0, 0.5], (120, 1))
    e = rng.standard_normal((120, 2, d))
    e = off * e / np.linalg.norm(e, axis=-1, keepdims=True)
    return held, alpha, e


def used(site: NormSite | NetworkSite | SoluSite, out: Array, alpha: Array, e: Array, seed: int) -> float:
    """The largest share that is used of a site's ellipsoid, and of its bounds of what second order leaves."""
    held, most = site.source.chain, 0.0
    linear = np.einsum("sdp,bp->bsd", held.N, alpha)
    u = linear + e
    output = site.post @ site.down[0].T + site.down[1] if isinstance(site, NetworkSite) else site.output
    r = out - output - np.einsum("sod,bsd->bso", site.jacobian, u)
    rng = np.random.default_rng(seed)
    for t in range(2):
        W = np.concatenate(
            (rng.standard_normal((6, r.shape[-1])), r[:4, t] / (np.abs(r[:4, t]).max() + 1e-300))
        )
        seen = r[:, t] @ W.T
        slack = 1e-13 * (1.0 + np.abs(out[:, t]) @ np.abs(W).T)
        most = max(most, float(((np.abs(seen) - slack) / supports(site.shape[t], W)).max()))
        form = site.quadratic(t)
        # What second order leaves at Aα, and at Aα + e.
        for x, rest in ((linear, site.rest), (u, site.rest_alone)):
            second = ((x[:, t] @ form.L.T) * (x[:, t] @ form.R.T)) @ form.C.T
            rests = np.array([rest(w, t) for w in W])
            most = max(most, float(((np.abs((r[:, t] - second) @ W.T) - slack) / rests).max()))
        H, error = form.hessian(W[0])
        moving = Moving(held)
        moving.site(site.source, t, H, error)
        met = np.einsum("bi,ij,bj->b", linear[:, t], H, e[:, t]) + 0.5 * np.einsum(
            "bi,ij,bj->b", e[:, t], H, e[:, t]
        )
        most = max(most, shared(moving, alpha, met, rng) if np.isfinite(met).all() else 0.0)
    return most


def shared(moving: Moving, alpha: Array, met: Array, rng: np.random.Generator) -> float:
    """The largest share that is used of what is left, at any factors and at each: `met` is what it should hold."""
    left = moving.left(np.sign(rng.standard_normal(alpha.shape[1])))
    at = np.sqrt(np.einsum("bp,pq,bq->b", alpha, left.K.H, alpha).clip(0.0)) + left.rest
    return float(max((np.abs(met) / at).max(), np.abs(met).max() / left.most))


def norm_of(x: Array, site: NormSite) -> Array:
    m = x - x.mean(-1, keepdims=True) if site.centred else x
    return np.asarray(m / np.sqrt((m * m).mean(-1, keepdims=True) + site.eps) * site.gain + site.bias)


def try_norm(seed: int) -> float:
    rng = np.random.default_rng(seed)
    d, p = int(rng.integers(2, 7)), int(rng.integers(1, 8))
    held, alpha, e = chain(seed, d, p, 10.0 ** rng.uniform(-3, -1), 10.0 ** rng.uniform(-4, -1.5))
    gain, bias = rng.standard_normal((2, d))
    site = NormSite(held.start, gain, bias, float(rng.choice([1e-12, 1e-5, 0.1, 1.0])), bool(rng.integers(2)))
    x = held.c + np.einsum("sdp,bp->bsd", held.N, alpha) + e
    with np.errstate(all="ignore"):
        return used(site, norm_of(x, site), alpha, e, seed)


def try_turning(seed: int) -> float:
    """A norm of an input that may turn around, or of nothing but what moves it."""
    rng = np.random.default_rng(seed)
    d, p, nothing = int(rng.integers(2, 7)), int(rng.integers(1, 8)), bool(rng.integers(2))
    held, alpha, e = chain(seed, d, p, 10.0 ** rng.uniform(-6, 1), 10.0 ** rng.uniform(-9, 0))
    if nothing:
        held = Chain(np.zeros_like(held.c), held.N, held.shapes)
    gain, bias = rng.standard_normal((2, d))
    site = NormSite(held.start, gain, bias, float(rng.choice([1e-5, 0.1, 1.0])), bool(rng.integers(2)))
    x = held.c + np.einsum("sdp,bp->bsd", held.N, alpha) + e
    with np.errstate(all="ignore"):
        assert np.isfinite(site.shape).all()
        assert np.isfinite(site.rest(np.ones(d), 0))
        return used(site, norm_of(x, site), alpha, e, seed)


def try_network(seed: int) -> float:
    rng = np.random.default_rng(seed)
    name = str(rng.choice(sorted({*SMOOTH, *KINKED})))
    d, p, n, o = (int(k) for k in rng.integers(2, 7, 4))
    held, alpha, e = chain(seed, d, p, 10.0 ** rng.uniform(-3, -0.5), 10.0 ** rng.uniform(-4, -1))
    maps = [(rng.standard_normal((a, b)), rng.standard_normal(a)) for a, b in ((n, d), (n, d), (o, n))]
    gate = maps[1] if rng.integers(2) else None
    site = NetworkSite(held.start, name, maps[0], maps[2], gate)
    x = held.c + np.einsum("sdp,bp->bsd", held.N, alpha) + e
    pre = x @ maps[0][0].T + maps[0][1]
    post = np.vectorize(lambda v: float(_ACTIVATIONS[name](arb(v)).mid()))(pre)
    post = post if gate is None else post * (x @ gate[0].T + gate[1])
    with np.errstate(all="ignore"):
        return used(site, post @ maps[2][0].T + maps[2][1], alpha, e, seed)


def try_solu(seed: int) -> float:
    rng = np.random.default_rng(seed)
    n, p = int(rng.integers(1, 7)), int(rng.integers(1, 8))
    held, alpha, e = chain(seed, n, p, 10.0 ** rng.uniform(-3, 0), 10.0 ** rng.uniform(-4, -1))
    x = held.c + np.einsum("sdp,bp->bsd", held.N, alpha) + e
    weights = np.exp(x - x.max(-1, keepdims=True))
    with np.errstate(all="ignore"):
        return used(SoluSite(held.start), x * weights / weights.sum(-1, keepdims=True), alpha, e, seed)


def try_products(seed: int) -> float:
    """What e brings to products of queries and keys, of a margin between two keys."""
    rng = np.random.default_rng(seed)
    d, p, n = (int(k) for k in rng.integers(2, 7, 3))
    held, alpha, e = chain(seed, d, p, 10.0 ** rng.uniform(-2, 0), 10.0 ** rng.uniform(-3, 0))
    W = rng.standard_normal((2, 2 * n, d))
    q, k = (Heads(held.start.mapped(one), 2, 2) for one in W)
    site = ScoreSite(q, k, 0.5, np.zeros((2, 2, 2)), np.ones((2, 2, 2), bool))
    terms = [(1.0, 1, 0, 0), (float(rng.choice([-1.0, 0.7])), 1, 0, 1)]
    moving = Moving(held)
    moving.products(site, terms)
    linear = np.einsum("sdp,bp->bsd", held.N, alpha)
    met = np.zeros(len(alpha))
    for w, h, i, j in terms:
        rows = slice(h * n, (h + 1) * n)
        (a_q, e_q), (a_k, e_k) = (
            (linear[:, t] @ one[rows].T, e[:, t] @ one[rows].T) for t, one in zip((i, j), W, strict=True)
        )
        met += w * 0.5 * (a_q * e_k + e_q * a_k + e_q * e_k).sum(-1)
    return shared(moving, alpha, met, rng)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_products_of_moves(seed: int) -> None:
    assert try_products(seed) <= 1.0


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_solu(seed: int) -> None:
    assert try_solu(seed) <= 1.0


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_norms(seed: int) -> None:
    assert try_norm(seed) <= 1.0


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_norms_whose_input_may_turn_around(seed: int) -> None:
    assert try_turning(seed) <= 1.0


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_networks(seed: int) -> None:
    assert try_network(seed) <= 1.0


def try_mixing(family: str, seed: int, **arch: Any) -> float:
    """The root behind every mixing against the stream there: its ellipsoid, and what second order leaves."""
    case = Case.of(family, seed, eps=0.03, depth=3, **arch)
    walk, plain = case.walk, PlainNetwork(case.net)
    with np.errstate(all="ignore"):
        walk.layer(2)
    alpha = case.samples(60)
    x = walk.center + np.einsum("sdp,bp->bsd", walk.generators, alpha)
    rng, most = np.random.default_rng(seed), 0.0
    for layer in range(2):
        attended = stream_behind(plain, layer, x)
        mix, chain = walk.kept(layer).mix, walk.kept(layer + 1).chain
        assert mix is not None
        for t in range(x.shape[1]):
            e = attended[:, t] - chain.c[t] - alpha @ chain.N[t].T
            W = np.concatenate((rng.standard_normal((6, e.shape[1])), e[:3] / (np.abs(e[:3]).max() + 1e-300)))
            slack = 1e-13 * (1.0 + np.abs(attended[:, t]) @ np.abs(W).T)
            bound = supports(chain.shapes[ROOT][t], W)
            most = max(most, np.nan_to_num((np.abs(e @ W.T) - slack) / bound).max())
            for w in W if layer == 0 and len(walk.kept(0).sites) == 0 else ():
                form, _ = mix.form(w, t)
                second = ((alpha @ form.L.T) * (alpha @ form.R.T)).sum(1)
                rest = supports(mix.beyond[t], w[None])[0]
                most = max(most, np.nan_to_num((np.abs(e @ w - second) - slack.max()) / rest).max())
        x = plain._block(layer, x)[0]
    return float(most)


def stream_behind(plain: PlainNetwork, layer: int, x: Array) -> Array:
    """The stream behind a layer's attention, in float64."""
    inner, block = plain._before(layer, x, 1), f"blocks.{layer}"
    masked = np.where(plain.net.mask(x.shape[1], layer), plain._scores(layer, (inner, inner)), -np.inf)
    e = np.exp(masked - masked.max(-1, keepdims=True))
    mixed = (e / e.sum(-1, keepdims=True)) @ plain._heads(plain._affine(f"{block}.v", inner))
    return np.asarray(x + plain._affine(f"{block}.o", mixed.swapaxes(1, 2).reshape(*x.shape[:2], -1)))


@pytest.mark.parametrize("family", ["encoder", "bert", "mpnet", "gpt2", "llama"])
@pytest.mark.parametrize("seed", range(3))
def test_mixings(family: str, seed: int) -> None:
    assert try_mixing(family, seed) <= 1.0
