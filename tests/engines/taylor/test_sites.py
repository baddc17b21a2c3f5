"""Norms and networks of `taylor` one by one, where their input moves in few directions.

In a model shapes have many half-axes, and what one term leaves out hides behind the slack of the others. Here the
linear part and e are segments or planar, so every term is nearly attained, and each site's ellipsoid, its bound of a
covector and what it leaves beyond its second order are asked alone.
"""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap

from prooflens.engines.relaxations.derivatives import derivatives
from prooflens.engines.taylor.attention import Heads, ScoreSite
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.mixing import MixShape
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.segments import Attention, FeedForward, Segment
from prooflens.engines.taylor.values import FactorBox, Root, Value
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.models.architecture import Activation
from prooflens.models.sites import ACTIVATIONS, Affine, Mix, Norm, Scores, Softcap, Softmax
from tests.engines.support import outside

SLACK = 1e-14
SIZES = [(0.3, 0.003), (0.003, 0.3), (0.1, 0.1), (1.0, 1.0), (1e-3, 1e-4)]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def value_of(u: Tensor, a: Tensor, b: Tensor) -> Value:
    """u + aα + e with |α_k| ≤ 1 and e = bη, ‖η‖ ≤ 1, for one token."""
    p = a.shape[1]
    factors = FactorBox(torch.ones(p, dtype=torch.float64), torch.zeros(p, dtype=torch.long), 1)
    B = (b @ b.T)[None]
    eye = torch.eye(len(u), dtype=torch.float64)[None]
    return Value(u[None], eye, Root(u[None], a[None], B, factors), {}, {}, torch.zeros(1).double())


def moves(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """aα at corners and inside, each with e at both ends of its half-axes and in between."""
    corners = torch.tensor(list(itertools.product([-1.0, -0.4, 0.0, 1.0], repeat=a.shape[1]))).double()
    angles = torch.linspace(0.0, 6.283185307179586, 17, dtype=torch.float64)[:-1]
    circle = torch.stack((angles.cos(), angles.sin()), -1)[:, : b.shape[1]]
    linear, e = corners @ a.T, circle @ b.T
    return linear.repeat_interleave(len(e), 0), e.repeat(len(linear), 1)


def assert_site_holds(site: NormSite | NetworkSite, linear: Tensor, rest: Tensor) -> None:
    """r lies in the ellipsoid and below its bounds, less second order below what is left; covectors go back by J."""
    assert outside(site.shape[0], rest) <= SLACK
    u = site.source.u[0]
    some = (
        torch.cat((u[None], normal(1, 6, len(u))))
        if isinstance(site, NormSite)
        else normal(1, 6, rest.shape[1])
    )
    v = torch.cat((some, rest[:: max(1, len(rest) // 40)]))
    v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=1e-280)
    assert torch.allclose(site.pull(v, 0), v @ site.jacobian[0], rtol=1e-12, atol=1e-12)
    far = rest @ v.T
    limit = site.bound(v, 0)
    assert bool((far.amax(0) <= limit[:, 0] + SLACK).all())
    assert bool((-far.amin(0) <= limit[:, 1] + SLACK).all())
    beyond = far - 0.5 * torch.einsum("ni,fij,nj->nf", linear, site.quadratic(v, 0)[0], linear)
    assert bool((beyond.abs().amax(0) <= site.rest(v, 0) + SLACK).all())


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_norms(centred: bool, sizes: tuple[float, float]) -> None:
    d = 6
    for seed in range(12):
        u, a, b = 2.0 * normal(seed, d), normal(seed + 50, d, 1), normal(seed + 100, d, 1 + seed % 2)
        if seed % 3:
            # Along u nothing moves, so that ‖Pu‖² is all there is.
            m = (u - u.mean() if centred else u)[:, None]
            a, b = (x - m * (m.T @ x) / (m.T @ m) for x in (a, b))
        if seed % 3 == 2:
            b = b - a * (a.T @ b) / (a.T @ a)
        a, b = (size * x / torch.linalg.vector_norm(x) for size, x in zip(sizes, (a, b), strict=True))
        step = Norm("n", ("r",), 1.0 + 0.3 * normal(seed + 150, d), normal(seed, d), 1e-5, centred)
        site = NormSite(step, value_of(u, a, b))
        linear, e = moves(a, b)
        rest = step(u + linear + e) - step(u) - (linear + e) @ site.jacobian[0].T
        assert_site_holds(site, linear, rest)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["relu", "gelu", "gelu_tanh", "silu", "tanh", "relu2"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_networks(function: Activation, gated: bool, sizes: tuple[float, float]) -> None:
    d, n = 3, 4
    for seed in range(6):
        u, a, b = normal(seed, d), normal(seed + 50, d, 1), normal(seed + 100, d, 1 + seed % 2)
        a, b = (size * x / torch.linalg.vector_norm(x) for size, x in zip(sizes, (a, b), strict=True))
        up, gate = (
            Affine("h", ("r",), normal(seed + k, n, d), normal(seed + k + 1, n), 1, (n,)) for k in (200, 300)
        )
        down = Affine("n", ("p",), normal(seed + 400, 5, n), normal(seed, 5), 1, (5,)) if seed % 2 else None
        step = FeedForward("n", "r", function, up, gate if gated else None, down)
        site = NetworkSite(step, value_of(u, a, b))

        def run(x: Tensor, step: FeedForward = step) -> Tensor:
            post = ACTIVATIONS[step.function](step.bent(x))
            post = post if step.gate is None else post * step.up(x)
            return post if step.down is None else step.down(post)

        linear, e = moves(a, b)
        rest = run(u + linear + e) - site.output[0] - (linear + e) @ site.jacobian[0].T
        assert_site_holds(site, linear, rest)


def test_a_chord_stands_for_a_relu_whose_kink_is_in_reach() -> None:
    """Off by (b² − h²)/4b at both ends and at the kink, which is at most half of what the tangent misses."""
    for h in (-1.2, -0.999, -0.5, 0.0, 0.3, 0.999, 1.2):
        up = Affine("h", ("r",), torch.ones(1, 1).double(), torch.ones(1).double() * h, 1, (1,))
        far = torch.ones(1, 1).double()
        site = NetworkSite(FeedForward("n", "r", "relu", up, None, None), value_of(far[0] * 0, far, far * 0))
        u = torch.tensor([[-1.0], [-h], [1.0]], dtype=torch.float64).clamp(-1.0, 1.0)
        rest = (h + u).clamp(min=0.0) - site.output[0] - u @ site.jacobian[0].T
        height = max(0.0, (1.0 - h * h) / 4.0)
        assert torch.allclose(rest.abs(), torch.full_like(rest, height), atol=1e-9)
        assert float(site.kink[0, 0]) >= height - 1e-15
        assert float(site.kink[0, 0]) <= max(0.0, 0.5 * (1.0 - abs(h))) + 1e-9
        assert_site_holds(site, u, rest)


def test_a_chord_is_off_by_no_more_than_its_kink_in_exact_arithmetic() -> None:
    """As computed, with its own rounding: kinks hardly in reach or in the middle, of small and large moves."""
    far = torch.ones(1, 1).double()
    near = [1.0 - 2.0**-k for k in (1, 3, 20, 30, 40, 50)] + [2.0**-k for k in (30, 60)] + [0.0, 1.0 / 3.0]
    for size, h in itertools.product((1e-60, 0.3, 1.0, 7e5), [*near, *(-x for x in near)]):
        up = Affine("h", ("r",), far, far[0] * h * size, 1, (1,))
        site = NetworkSite(
            FeedForward("n", "r", "relu", up, None, None), value_of(far[0] * 0, size * far, far * 0)
        )
        at, b, first, post, kink = (
            Fraction(float(x[0, 0])) for x in (site.h, site.b, site.first, site.post, site.kink)
        )
        assert b > abs(at)
        assert kink < Fraction(1.0 + 1e-9) * (b * b - at * at) / (4 * b) + b * Fraction(1e-14)
        for u in (-b, -at, b):
            assert abs(max(Fraction(0), at + u) - post - first * u) <= kink


@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "silu", "tanh"])
@pytest.mark.parametrize("gated", [False, True])
def test_networks_that_move_too_far_to_be_expanded(function: Activation, gated: bool) -> None:
    """Where φ″ = 0, what the expansion leaves is all there is of one neuron, and of one that another holds up."""
    low, high = (-0.1, 0.1) if function == "tanh" else (1.0, 4.0)
    for _ in range(80):
        x = 0.5 * (low + high)
        bends = float(derivatives(function, torch.tensor(x, dtype=torch.float64)).second) > 0
        low, high = (x, high) if bends else (low, x)
    moving = Affine("h", ("r",), torch.tensor([[1.0, 0.0]]).double(), torch.tensor([x]).double(), 1, (1,))
    still = Affine("h", ("r",), torch.zeros(1, 2).double(), torch.tensor([-3.0]).double(), 1, (1,))
    step = FeedForward("n", "r", function, still if gated else moving, moving if gated else None, None)
    for size, size_e in ((30.0, 0.0), (0.0, 30.0)):
        a, b = (torch.tensor([[far], [0.0]]).double() for far in (size, size_e))
        site = NetworkSite(step, value_of(torch.zeros(2).double(), a, b))
        linear, e = moves(a, b)
        post = ACTIVATIONS[function](moving(linear + e)) - ACTIVATIONS[function](
            moving(torch.zeros(2).double())
        )
        rest = post * (-3.0 if gated else 1.0) - (linear + e) @ site.jacobian[0].T
        assert_site_holds(site, linear, rest)
        assert float(rest.abs().max()) > 0.5 * float(site.shape[0].sqrt())


class Mixing:
    """An attention whose queries, keys and values read coordinates of their own, each of which moves as it is told."""

    def __init__(
        self,
        seed: int,
        heads: int,
        shared: int,
        sizes: list[float],
        quick: bool = False,
        cap: float | None = None,
    ) -> None:
        S, c, linear, e = 3, 2, sizes[:3], sizes[3:]
        widths = [heads * c, heads * c // shared, heads * c // shared]
        d = sum(widths)
        size, size_e = (
            torch.cat([torch.full((n,), x) for n, x in zip(widths, sizes, strict=True)]).double()
            for sizes in (linear, e)
        )
        maps = torch.eye(d, dtype=torch.float64).split(widths)
        projections = [
            Affine(name, ("r",), W, None, 1, (len(W) // c, c)) for name, W in zip("qkv", maps, strict=True)
        ]
        mask = torch.ones(S, S, dtype=torch.bool).tril() if seed % 2 else torch.ones(S, S, dtype=torch.bool)
        scores = Scores("scores", ("q", "k"), 0.7, None, mask)
        output = Affine("o", ("z",), normal(seed + 300, d, heads * c), normal(seed, d), 2, (d,))
        attention = Attention("q", "k", "v", "r", output)
        segment = Segment("r", list(projections), 0, scores, cap, attention)
        p = 1 + seed % 2
        factors = FactorBox(torch.ones(p, dtype=torch.float64), torch.zeros(p, dtype=torch.long), 1)
        self.N = normal(seed + 100, S, d, p) * size[:, None] / p
        self.b = normal(seed + 200, S, d) * size_e
        # Without queries and keys at the centre, scores are their products and nothing else.
        self.u = normal(seed, S, d) * (torch.arange(d) >= (sum(widths[:2]) if seed == 2 else 0))
        B = self.b[:, :, None] * self.b[:, None, :]
        self.chain = Chain(segment, Root(self.u, self.N, B, factors), goes_on=list(range(S)))
        walk = TaylorWalk(2**30, quick=quick)
        walk._start(self.chain)
        for step in segment.steps:
            walk._step(self.chain, step)
        q, k = self.chain.values["q"], self.chain.values["k"]
        parts = Heads.of(q, heads), Heads.of(k, heads)
        self.chain.scores = ScoreSite(scores, ("q", "k"), *parts, factors.half_widths, quick, cap)
        self.after = walk._next(self.chain, lambda share: None)

    def __call__(self, x: Tensor) -> Tensor:
        segment = self.chain.segment
        assert segment.attention is not None
        assert segment.scores is not None
        q, k, v = (step(x) for step in segment.steps if isinstance(step, Affine))
        pattern = Softmax("pattern", ("scores",), segment.scores.mask)(self.capped(segment.scores(q, k)))
        return x + segment.attention.output(Mix("z", ("pattern", "v"))(pattern, v))

    def capped(self, scores: Tensor) -> Tensor:
        """Scores as softmax reads them."""
        cap = self.chain.segment.cap
        return scores if cap is None else Softcap("capped", ("scores",), cap)(scores)

    def slope(self, move: Tensor, x: Tensor | None = None) -> Tensor:
        """The derivative along a move, at the centre or at x."""
        found: Tensor = jvp(self, (self.u if x is None else x,), (move,))[1]
        return found

    def bend(self, move: Tensor) -> Tensor:
        """The second derivative along a move, at the centre."""
        found: Tensor = jvp(lambda x: self.slope(move, x), (self.u,), (move,))[1]
        return found

    def moves(self) -> tuple[Tensor, Tensor, Tensor]:
        """FactorBox, linear parts, and e at one end for each token."""
        S, _, p = self.N.shape
        alpha = torch.tensor(list(itertools.product([-1.0, 0.5, 1.0], repeat=p))).double()
        signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=S))).double()
        alpha, signs = alpha.repeat_interleave(len(signs), 0), signs.repeat(len(alpha), 1)
        return alpha, torch.einsum("sdp,np->nsd", self.N, alpha), signs[:, :, None] * self.b


PARTS = [
    [0.3, 0.3, 0.3, 0.0, 0.0, 0.0],
    [0.3, 0.0, 0.0, 0.0, 0.3, 0.0],
    [0.0, 0.3, 0.0, 0.3, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.3, 0.3, 0.0],
    [0.3, 0.0, 0.0, 0.0, 0.0, 0.3],
    [0.0, 0.0, 0.0, 0.3, 0.0, 0.3],
    [0.0, 0.0, 0.3, 0.0, 0.3, 0.0],
    [0.0, 0.3, 0.3, 0.02, 0.02, 0.02],
    [0.02, 0.02, 0.02, 0.3, 0.3, 0.3],
    [1.5, 0.3, 0.3, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 1.5, 0.0, 1.0],
    [1.0, 0.0, 0.0, 1.0, 0.0, 1.0],
    [1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3],
]
"""How far the linear parts of queries, keys and values move, and how far their e."""


def assert_mixings_hold(
    sizes: list[float], heads: int, shared: int, cap: float | None = None, seeds: int = 3
) -> None:
    """What a mixing misses lies in its ellipsoids: all of it, beyond second order, and at the next root."""
    for seed in range(seeds):
        mixing, quick = (Mixing(seed, heads, shared, sizes, way, cap) for way in (False, True))
        chain, u = mixing.chain, mixing.u
        alpha, linear, e = mixing.moves()
        rest = mixing(u + linear + e) - mixing(u) - vmap(mixing.slope)(linear + e)
        beyond = rest - 0.5 * vmap(mixing.bend)(linear)
        last = mixing(u + linear + e) - mixing.after.u - torch.einsum("sdp,np->nsd", mixing.after.N, alpha)
        assert chain.mixed is not None
        assert chain.beyond is not None
        assert quick.chain.mixed is not None
        for t in range(len(u)):
            for M in (chain.mixed[t], quick.chain.mixed[t]):
                assert outside(M, rest[:, t]) <= SLACK
            assert outside(chain.beyond[t], beyond[:, t]) <= SLACK
            for M in (mixing.after.B[t], quick.after.B[t]):
                assert outside(M, last[:, t]) <= SLACK


@pytest.mark.slow
@pytest.mark.parametrize("sizes", PARTS)
@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (2, 1), (2, 2)])
def test_mixings(sizes: list[float], heads: int, shared: int) -> None:
    assert_mixings_hold(sizes, heads, shared)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", PARTS)
@pytest.mark.parametrize("quick", [False, True])
def test_scores(sizes: list[float], quick: bool) -> None:
    """Products of q and k beyond first order, those with e alone, and centred scores beyond their linear parts."""
    for seed in range(4):
        mixing = Mixing(seed, 2, 1 + seed // 2, sizes, quick)
        site, mix = mixing.chain.scores, mixing.chain.mix
        assert site is not None
        assert mix is not None
        _, linear, e = mixing.moves()
        step, maps = site.step, [s for s in mixing.chain.segment.steps if isinstance(s, Affine)][:2]
        q, k = (f(mixing.u) for f in maps)
        (A_q, e_q), (A_k, e_k) = ((f(linear), f(e)) for f in maps)
        whole, own = step(A_q + e_q, A_k + e_k), step(A_q, A_k)
        second, cross = site.products
        first = (
            step(q, A_k + e_k)
            + step(A_q + e_q, k.expand_as(A_k))
            - step(q, A_k)
            - step(A_q, k.expand_as(A_k))
        )

        def centred(x: Tensor, s: Tensor = mix.s) -> Tensor:
            return x - (s * x).sum(-1, keepdim=True)

        for found, limit in (
            (whole, second + cross),
            (whole - own, cross),
            (centred(whole + first), mix.E),
            (centred(whole), mix.E_products),
            (centred(whole - own), mix.E_cross),
        ):
            assert bool(((found.abs() - limit)[:, :, step.mask] <= SLACK).all())
        at_q, at_k, at_v = (mixing.chain.values[name] for name in "qkv")
        for t in range(len(mixing.u)):
            shapes = MixShape(mix, at_q, at_k, at_v, [t], Grams(mix))
            K_e = shapes._nonlinear(shapes._products())[0]
            b_e = centred(whole + first)[:, :, t, shapes.seen].flatten(1)
            assert bool(step.mask[t, shapes.seen].all())
            assert outside(K_e, b_e) <= SLACK
