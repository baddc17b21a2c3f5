"""Norms of `taylor` that are split along and across their centre, term by term and attacked by gradients.

Tokens are made so that one term is nearly all there is: a move exactly along m with either sign, exactly across, or as
much of both as leaves the norm where it was; small and large, in the linear part, in e, or in both; eps from nothing to
more than the token, so that η goes from 0 past ½. Scalars are held against their definitions, and covectors against
dense moves and ascent.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from flint import arb, ctx
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import support
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.values import FactorBox, Root, Value
from prooflens.models.sites import Norm
from tests.engines.support import outside
from tests.engines.taylor.test_sites import normal

SLACK = 2e-14
ETAS = [0.0, 1e-6, 0.05, 0.3, 0.47, 0.499999, 0.5, 0.8]
MOVES = [
    (0.02, 0.0),
    (0.0, 0.02),
    (0.01, 0.03),
    (0.3, 0.0),
    (0.0, 0.6),
    (0.3, 0.714),
    (0.3, 0.2),
    (0.8, 0.1),
    (1.3, 0.2),
]
"""How far along m, by ‖m‖, and across, by √q."""
SHARES = [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.96, 0.04), (0.04, 0.96)]
"""What of it is in the linear part, and what in e."""
KINDS = [(1.0, 1.0, 1.0, 1.0), (1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 1.0, 0.0)]
"""Whether the linear part and e go along, and whether they go across: both, or one each."""


class Tokens(NamedTuple):
    """Tokens u + aα + bζ with |α_k| ≤ 1 and ‖ζ‖ ≤ 1, all with one eps."""

    u: Tensor
    a: Tensor
    b: Tensor

    @property
    def value(self) -> Value:
        """What a site is given."""
        S, d, p = self.a.shape
        factors = FactorBox(torch.ones(p, dtype=torch.float64), torch.zeros(p, dtype=torch.long), 1)
        eye = torch.eye(d, dtype=torch.float64).expand(S, d, d)
        B = self.b @ self.b.mT
        noise = torch.zeros(S, dtype=torch.float64)
        return Value(self.u, eye, Root(self.u, self.a, B, factors), {}, {}, noise)

    def moved(self, alpha: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
        """The linear part and e of each token at many α and ζ."""
        return torch.einsum("sdp,nsp->nsd", self.a, alpha), torch.einsum("sdk,nsk->nsd", self.b, zeta)


def centre_of(x: Tensor, centred: bool) -> Tensor:
    return x - x.mean(-1, keepdim=True) if centred else x


def tokens_of(seed: int, d: int, centred: bool, eta: float) -> tuple[Tokens, float]:
    """Every move, share and kind, and the eps that makes η; e goes along m as the linear part does, or against it."""
    cases = list(itertools.product(MOVES, SHARES, KINDS))
    S = len(cases)
    m = centre_of(normal(seed, S, d), centred)
    m = 2.0 * m / torch.linalg.vector_norm(m, dim=-1, keepdim=True)
    eps = 4.0 * eta / (1.0 - eta) / d if eta else 1e-14
    across = centre_of(normal(seed + 1, S, d), centred)
    across = across - m * (across * m).sum(-1, keepdim=True) / 4.0
    long = torch.linalg.vector_norm(across, dim=-1, keepdim=True)
    # Two centred coordinates leave nothing across.
    across = torch.where(long > 1e-9, across / long, 0.0) * (4.0 + d * eps) ** 0.5
    move, share, kind = (torch.tensor([case[i] for case in cases]).double() for i in range(3))
    sign = torch.where(torch.arange(S) % 2 == 0, -1.0, 1.0).double()
    size = move[:, :, None] * share[:, None, :] * kind.reshape(S, 2, 2)
    size[:, 0, 1] *= sign
    size = size[..., None]
    a, b = (size[:, 0, i] * m - size[:, 1, i] * across for i in range(2))
    # What all coordinates share is not seen.
    u, a, b = (x + 0.5 * centred * normal(seed + i, S, 1) for i, x in enumerate((m, a, b), 2))
    return Tokens(u, a[..., None], b[..., None]), eps


def ends(S: int) -> tuple[Tensor, Tensor]:
    """α and ζ in [−1, 1] on a grid, the same for all tokens."""
    line = torch.linspace(-1.0, 1.0, 21, dtype=torch.float64)
    alpha, zeta = (x.reshape(-1, 1, 1).expand(-1, S, 1) for x in torch.meshgrid(line, line, indexing="ij"))
    return alpha, zeta


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize("d", [2, 3, 4])
def test_scalars_are_what_they_bound(centred: bool, eta: float, d: int) -> None:
    """κ, R, s, s′ and m's scalar by their definitions."""
    tokens, eps = tokens_of(d, d, centred, eta)
    site = NormSite(Norm("n", ("r",), None, None, eps, centred), tokens.value)
    linear, e = tokens.moved(*ends(len(tokens.u)))
    m = centre_of(tokens.u, centred)
    q = m.square().sum(-1) + d * eps
    split = d * eps / q < 0.5 - 1e-9
    assert bool((site.split == split).all()) or eta == 0.5

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = centre_of(x, centred)
        y = (x * m).sum(-1) / m.square().sum(-1)
        across = x - site.split[:, None] * y[..., None] * m
        return y, across, across.square().sum(-1) / q

    y, _, kappa = parts(linear + e)
    R = ((m + centre_of(linear + e, centred)).square().sum(-1) + d * eps) / q
    s = R**-0.5 - 1.0
    ell = 2.0 * (m * (linear + e)).sum(-1) / q
    bent = s + 0.5 * ell
    scalar = torch.where(site.split, (1.0 + y) * R**-0.5 - 1.0 - d * eps / q * y, bent)
    l_a, l_e, most, bottom = site.ranges
    reach_a, reach_e = site.reaches
    pairs = (
        (2.0 * (m * linear).sum(-1).abs() / q, l_a),
        (2.0 * (m * e).sum(-1).abs() / q, l_e),
        (kappa, most),
        (bottom, R),
        (s.abs(), site.slope),
        (bent.abs(), site.bend),
        (scalar.abs(), site.twist[0]),
        (torch.linalg.vector_norm(parts(linear)[1], dim=-1), reach_a),
        (torch.linalg.vector_norm(parts(e)[1], dim=-1), reach_e),
        ((parts(linear)[1] * parts(e)[1]).sum(-1).abs(), site.inner),
    )
    for found, limit in pairs:
        assert bool((found <= limit + SLACK).all())


def covectors(tokens: Tokens, centred: bool, t: int, gain: Tensor, seed: int) -> Tensor:
    """v with γ ⊙ v along m, across it where the moves go, and both, with either sign; where the gain lets it be."""
    m = centre_of(tokens.u[t], centred)
    moves = centre_of(torch.cat((tokens.a[t], tokens.b[t]), -1).T, centred)
    across = moves - m * (moves @ m)[:, None] / (m @ m)
    across = across / torch.linalg.vector_norm(across, dim=-1, keepdim=True).clamp(min=1e-6)
    m = m / torch.linalg.vector_norm(m)
    w = torch.cat((m[None], across, 0.3 * m + across, m - 0.3 * across, normal(seed, 2, len(m))))
    v = w / torch.where(gain == 0, 1.0, gain)
    unit: Tensor = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=1e-6)
    return unit


def beyond(step: Norm, site: NormSite, t: int, linear: Tensor, e: Tensor) -> Tensor:
    """r at moves of token t."""
    u, move = site.source.u[t], linear + e
    return step(u + move) - step(u) - move @ site.jacobian[t].T


def assert_covectors_hold(
    step: Norm, site: NormSite, t: int, linear: Tensor, e: Tensor, v: Tensor, slack: float = SLACK
) -> None:
    """v·r below its bounds, with and without its second order, and r in its ellipsoid."""
    r = beyond(step, site, t, linear, e)
    found, limit = r @ v.T, site.bound(v, t)
    assert not bool((found.amax(0) > limit[:, 0] + slack).any())
    assert not bool((-found.amin(0) > limit[:, 1] + slack).any())
    second = 0.5 * torch.einsum("ni,fij,nj->nf", linear, site.quadratic(v, t)[0], linear)
    assert not bool(((found - second).abs().amax(0) > site.rest(v, t) + slack).any())
    assert outside(site.shape[t], r) <= slack


@pytest.mark.slow
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("eta", ETAS)
def test_covectors_of_single_terms(centred: bool, eta: float) -> None:
    for d in (2, 4):
        tokens, eps = tokens_of(d + 10, d, centred, eta)
        gain = normal(d, d) if d == 4 else None
        step = Norm("n", ("r",), gain, None, eps, centred)
        site = NormSite(step, tokens.value)
        linear, e = tokens.moved(*ends(len(tokens.u)))
        for t in range(len(tokens.u)):
            v = covectors(tokens, centred, t, torch.ones(d).double() if gain is None else gain, t)
            assert_covectors_hold(step, site, t, linear[:, t], e[:, t], v)


def ascend(
    step: Norm, site: NormSite, tokens: Tokens, t: int, v: Tensor, rest: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """α and ζ that make ±v·r large, or ±(v·r − ½xᵀQx), for each covector: projected ascent from random points."""
    p, k = tokens.a.shape[-1], tokens.b.shape[-1]
    Q = site.quadratic(v, t)[0].repeat(2, 1, 1) * float(rest)
    signed = torch.cat((v, -v))
    Q = Q * torch.tensor([1.0, -1.0]).double().repeat_interleave(len(v))[:, None, None]
    alpha = normal(seed, 3, len(signed), p).clamp(-1.0, 1.0)
    zeta = normal(seed + 1, 3, len(signed), k)
    zeta = zeta / torch.linalg.vector_norm(zeta, dim=-1, keepdim=True)
    for i in range(40):
        alpha, zeta = alpha.detach().requires_grad_(), zeta.detach().requires_grad_()
        linear, e = alpha @ tokens.a[t].T, zeta @ tokens.b[t].T
        value = (beyond(step, site, t, linear, e) * signed).sum(-1)
        value = value - 0.5 * torch.einsum("nfi,fij,nfj->nf", linear, Q, linear)
        up_alpha, up_zeta = torch.autograd.grad(value.sum(), (alpha, zeta))
        with torch.no_grad():
            size = 0.5 * 0.93**i
            up_alpha = up_alpha / up_alpha.abs().amax(-1, keepdim=True).clamp(min=1e-280)
            alpha = (alpha + size * up_alpha).clamp(-1.0, 1.0)
            zeta = zeta + size * up_zeta / torch.linalg.vector_norm(up_zeta, dim=-1, keepdim=True).clamp(
                min=1e-280
            )
            zeta = zeta / torch.linalg.vector_norm(zeta, dim=-1, keepdim=True).clamp(min=1.0)
    return alpha.detach().flatten(0, 1), zeta.detach().flatten(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("size", [0.02, 0.2, 0.5])
def test_ascent_stays_below_the_bounds(centred: bool, size: float) -> None:
    """In two and more directions at once, with gains of either sign and zero."""
    for seed in range(12):
        d = 3 + seed % 3
        u = normal(seed, 1, d) + (3.0 if centred else 0.0)
        a, b = normal(seed + 1, 1, d, 2), normal(seed + 2, 1, d, 1 + seed % 2)
        m = centre_of(u, centred)
        length = float(torch.linalg.vector_norm(m))
        shares = ((1.0, 0.05), (0.05, 1.0), (0.6, 0.6))[seed % 3]
        a, b = (
            size * length * share * x / torch.linalg.matrix_norm(x, 2)[:, None, None]
            for share, x in zip(shares, (a, b), strict=True)
        )
        gain = normal(seed + 3, d)
        gain[seed % d] = 0.0
        eps = (1e-9, 0.3, 0.9, 2.0)[seed % 4] * length**2 / d
        step, tokens = Norm("n", ("r",), gain, normal(seed, d), eps, centred), Tokens(u, a, b)
        site = NormSite(step, tokens.value)
        v = covectors(tokens, centred, 0, gain, seed)
        for rest in (False, True):
            alpha, zeta = ascend(step, site, tokens, 0, v, rest, seed)
            linear, e = alpha @ a[0].T, zeta @ b[0].T
            assert_covectors_hold(step, site, 0, linear, e, v)


def dot(x: list[arb], y: list[arb]) -> arb:
    return sum((a * b for a, b in zip(x, y, strict=True)), arb(0))


def balls(x: Tensor) -> list[arb]:
    return [arb(y) for y in x.tolist()]


def exactly(x: list[arb], gain: list[arb], eps: float, centred: bool) -> list[arb]:
    """The norm in ball arithmetic."""
    mean = sum(x, arb(0)) / len(x) if centred else arb(0)
    m = [y - mean for y in x]
    sigma = (dot(m, m) / len(x) + arb(eps)).sqrt()
    return [g * y / sigma for g, y in zip(gain, m, strict=True)]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("mean", [0.0, 1e4, 1e8, 1e12, 1e15])
def test_cancellation_is_counted(centred: bool, mean: float) -> None:
    """Real numbers against computed bounds, where m is the small difference of large coordinates, or all is large."""
    ctx.prec = 200
    for seed, size in itertools.product(range(4), (1e-9, 1e-3, 0.2)):
        d = 2 + seed
        u = mean + normal(seed, 1, d) if centred else (1.0 + mean) * normal(seed, 1, d)
        m = centre_of(u, centred)
        long = float(torch.linalg.vector_norm(m))
        a, b = (size * long * normal(seed + i, 1, d, 1) for i in (1, 2))
        a = size * m[..., None] if seed % 2 else a
        gain, eps = normal(seed + 3, d), (1e-12, 0.3)[seed // 2] * long**2 / d + 1e-12
        tokens = Tokens(u, a, b)
        step = Norm("n", ("r",), gain, None, eps, centred)
        site = NormSite(step, tokens.value)
        v = covectors(tokens, centred, 0, gain, seed)
        Q, error = site.quadratic(v, 0)
        bound, held = site.bound(v, 0).tolist(), support(site.shape[0], v).tolist()
        left = (site.rest(v, 0) + 0.5 * error * a.square().sum()).tolist()
        center, pulled = balls(step(u)[0]), site.pull(v, 0)
        for sign in (1.0, -1.0):
            linear, e = balls(a[0, :, 0]), balls(sign * b[0, :, 0])
            move = [x + y for x, y in zip(linear, e, strict=True)]
            real = exactly([x + y for x, y in zip(balls(u[0]), move, strict=True)], balls(gain), eps, centred)
            rest = [x - y for x, y in zip(real, center, strict=True)]
            straight = [dot(balls(row), move) for row in site.jacobian[0]]
            curved = [x - y for x, y in zip(rest, straight, strict=True)]
            for k in range(len(v)):
                found = dot(balls(v[k]), rest) - dot(balls(pulled[k]), move)
                second = dot(linear, [dot(balls(row), linear) for row in Q[k]]) / 2
                assert not float(found.mid()) > bound[k][0]
                assert not -float(found.mid()) > bound[k][1]
                assert not abs(float((found - second).mid())) > left[k]
                assert not abs(float(dot(balls(v[k]), curved).mid())) > held[k]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("mean", [0.0, 1e6, 1e12])
def test_second_order_knows_its_rounding(centred: bool, mean: float) -> None:
    """The computed Q against D²n[x, x] in ball arithmetic, within its error."""
    ctx.prec = 200
    for seed in range(6):
        d = 2 + seed % 4
        u, gain = mean * centred + normal(seed, 1, d), normal(seed + 3, d)
        still = torch.zeros(1, d, 1, dtype=torch.float64)
        site = NormSite(Norm("n", ("r",), gain, None, 1e-3, centred), Tokens(u, still, still).value)
        v, x = normal(seed + 1, 3, d), normal(seed + 2, d)
        Q, error = site.quadratic(v, 0)

        def middle(y: list[arb], centred: bool = centred) -> list[arb]:
            mean = sum(y, arb(0)) / len(y) if centred else arb(0)
            return [z - mean for z in y]

        m, move = middle(balls(u[0])), middle(balls(x))
        square = dot(m, m) / d + arb(1e-3)
        for k in range(len(v)):
            w = [g * y for g, y in zip(balls(gain), balls(v[k]), strict=True)]
            along, far = dot(w, m), dot(m, move)
            real = (3 * along * far**2 / (d * square) - 2 * far * dot(w, move) - along * dot(move, move)) / (
                d * square * square.sqrt()
            )
            found = dot(balls(x), [dot(balls(row), balls(x)) for row in Q[k]])
            assert abs(float((found - real).mid())) <= float(error[k] * x.square().sum())
