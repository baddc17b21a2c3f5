"""Softmax mixing in `taylor`, term by term: each polynomial in its own ellipsoid.

The sum of all terms hides a small one that is missing, so second, third and fourth order, products of scores, what e
adds and what is left beyond are asked one by one, in the worst direction of every point.
"""

import pytest
import torch
from torch import Tensor

from prooflens import Ball
from prooflens.engines.relaxations.ellipsoids import image, total
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.hessian import Hessian
from prooflens.engines.taylor.mixing import MixShape
from prooflens.engines.taylor.softmax_budget import Sizes, SoftmaxBudget, against_e, beyond, with_e
from prooflens.engines.taylor.values import Value
from prooflens.models.sites import Softmax, share_heads
from prooflens.problem import Problem
from prooflens.regions import Region
from tests.engines.cases import input_of, model_of
from tests.engines.support import outside, walk_of

POINTS = 100


class Terms:
    """The terms of the mixing at one query token, at factors α and as ellipsoids."""

    def __init__(self, chain: Chain, t: int, alpha: Tensor, seed: int) -> None:
        mix = chain.mix
        assert mix is not None
        names = mix.attention
        self.mix, self.t, self.alpha = mix, t, alpha
        q, k, v = (chain.values[name] for name in (names.q, names.k, names.v))
        self.values = q, k, v
        self.shapes = MixShape(mix, q, k, v, [t], Grams(mix))
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = self.shapes.seen
        self.s = mix.s[:, t, self.seen]
        self.g = torch.einsum("dhc,hjc->dhj", mix.out, mix.deviations[:, t, self.seen])
        self.c = self.g * self.s
        self.b = torch.einsum("hjp,np->nhj", mix.rows[:, t, self.seen], alpha)
        self.A_q = torch.einsum("hcp,np->nhc", mix.scores.q.A[t], alpha)
        self.A_k, self.A_v = (
            torch.einsum("jhcp,np->njhc", x.A[self.seen], alpha).repeat_interleave(x.share, 2)
            for x in (mix.scores.k, mix.v)
        )

    def members(self, value: Value, name: str, t: int) -> Tensor:
        """Random members of the boundary of one of a value's ellipsoids, with shared heads repeated."""
        M = getattr(value, name)[t]
        w = torch.randn(POINTS, len(M), generator=self.generator, dtype=torch.float64)
        x = (w @ M) / (w @ M * w).sum(-1, keepdim=True).sqrt()
        H, c = self.mix.z.shape[1:]
        repeated: Tensor = x.reshape(POINTS, -1, c).repeat_interleave(H // value.heads, 1)
        return repeated

    def second(self, b: Tensor, moved: Tensor) -> Tensor:
        """½ Σ c b² + Σ s b W_O δV."""
        values = torch.einsum("hj,nhj,dhc,njhc->nd", self.s, b, self.mix.out, moved)
        return 0.5 * torch.einsum("dhj,nhj->nd", self.c, b.square()) + values

    def third(self, b: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """⅙ Σ c (b³ − 3bV₂) and ½ Σ s (b² − V₂) W_O δV."""
        variance = (self.s * b.square()).sum(-1, keepdim=True)
        cubic = torch.einsum("dhj,nhj->nd", self.c, b**3 - 3.0 * b * variance) / 6.0
        weights = 0.5 * self.s * (b.square() - variance)
        return cubic, torch.einsum("nhj,dhc,njhc->nd", weights, self.mix.out, moved)

    def fourth(self, b: Tensor, moved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Σ c (b⁴/24 − b²m₂/4), −Σ c b m₃/6, Σ s (b³/6 − b m₂/2) W_O δV and −Σ s m₃/6 W_O δV."""
        m2, m3 = ((self.s * b**k).sum(-1, keepdim=True) for k in (2, 3))
        even, odd = (
            torch.einsum("dhj,nhj->nd", self.c, x) for x in (b**4 / 24.0 - b**2 * m2 / 4.0, -b * m3 / 6.0)
        )
        weights = self.s * (b**3 / 6.0 - b * m2 / 2.0), -self.s * m3 / 6.0
        first, second = (torch.einsum("nhj,dhc,njhc->nd", w, self.mix.out, moved) for w in weights)
        return even, odd, first, second

    def linear_in(self, b_e: Tensor) -> list[Tensor]:
        """What is linear in b_e of second and third order, and ½ Σ c b_e²."""
        b, s = self.b, self.s
        mean = (s * b * b_e).sum(-1, keepdim=True)
        variance = (s * b.square()).sum(-1, keepdim=True)
        alone = b * b_e, 0.5 * b_e.square(), 0.5 * (b.square() - variance) * b_e, b * mean
        weights = s * b_e, s * (b * b_e - mean)
        return [torch.einsum("dhj,nhj->nd", self.c, x) for x in alone] + [
            torch.einsum("nhj,dhc,njhc->nd", x, self.mix.out, self.A_v) for x in weights
        ]

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        """scale Σ c q·k."""
        return self.mix.scale * torch.einsum("dhj,nhc,njhc->nd", self.c, q, k)


def chains(name: str, spread: float) -> list[tuple[Chain, Problem]]:
    x = input_of(name)
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(5, *x.shape, generator=generator, dtype=torch.float64) * spread
    model = model_of(name)
    problems = [Problem(model, Ball(spread).around(x)), Problem(model, Region(x, generators=dense))]
    return [
        (chain, problem) for problem in problems for chain in walk_of(problem).chains if chain.mix is not None
    ]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_every_term_lies_in_its_ellipsoid(name: str) -> None:
    for number, (chain, problem) in enumerate(chains(name, 0.01)):
        half = chain.root.half_widths
        alpha = problem.region.sample(POINTS, number, corners=0.7)[1] * half
        for t in chain.goes_on[-2:]:
            at = Terms(chain, t, alpha, number)
            shapes, (q, k, _) = at.shapes, at.values
            products = shapes._products()
            second = at.second(at.b, at.A_v) + at.products(at.A_q, at.A_k)
            assert outside(shapes._second(products)[0], second) <= 1e-13
            ellipsoids = shapes._third() + shapes._fourth()
            terms = at.third(at.b, at.A_v) + at.fourth(at.b, at.A_v)
            for M, points in zip(ellipsoids, terms, strict=True):
                assert outside(M[0], points) <= 1e-13
            alone = image(shapes.columns, products)[0]
            assert outside(alone, at.products(at.A_q, at.A_k)) <= 1e-13
            e_k = torch.stack([at.members(k, "shape_e", j) for j in range(len(k.u))[at.seen]], 1)
            crossed = at.products(at.members(q, "shape", t), e_k)
            crossed = crossed + at.products(at.members(q, "shape_e", t), at.A_k)
            assert outside(shapes._cross()[0], crossed) <= 1e-13
            K_e = shapes._nonlinear(products)
            budget = SoftmaxBudget.of(at.mix, [t], at.seen, K_e)
            w = torch.randn(POINTS, K_e.shape[-1], generator=at.generator, dtype=torch.float64)
            b_e = ((w @ K_e[0]) / (w @ K_e[0] * w).sum(-1, keepdim=True).sqrt()).reshape(at.b.shape)
            b_e = b_e * (budget.E / b_e.abs()).clamp(max=1.0).amin((1, 2), keepdim=True)
            found = shapes._linear_in_e(budget, K_e)
            for M, points in zip(found, at.linear_in(b_e), strict=True):
                assert outside(M[0], points) <= 1e-13


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_second_order_is_one_gram_matrix(name: str) -> None:
    """All inner products of the quadratic forms, also between kinds: against forms written out as matrices."""
    for chain, _ in chains(name, 0.01):
        mix = chain.mix
        assert mix is not None
        for t in chain.goes_on[-2:]:
            at = Terms(chain, t, chain.root.half_widths[None], 0)
            w, d = mix.weights[t], len(at.g)
            reading = Hessian(w, d)
            reading._add_mixing(mix, t, torch.eye(d, dtype=torch.float64))
            forms = 0.5 * (reading.second.G + reading.second.G.mT)
            found = at.shapes._second(at.shapes._products())[0]
            wanted = torch.einsum("iab,jab->ij", forms, forms)
            assert torch.linalg.matrix_norm(found - wanted) <= 1e-8 * torch.linalg.matrix_norm(wanted)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("spread", [1e-3, 0.02, 0.1])
def test_scores_and_what_is_beyond_fourth_order_lie_in_their_ellipsoids(name: str, spread: float) -> None:
    """At real points, with their real scores and values."""
    for number, (chain, problem) in enumerate(chains(name, spread)):
        alpha = problem.region.sample(POINTS, number, corners=0.7)[1]
        mix = chain.mix
        assert mix is not None
        names, step = mix.attention, mix.scores.step
        found = problem.model.run(problem.region.point(alpha), [names.q, names.k, names.v])
        scores, moved = (
            step(found[names.q], found[names.k]),
            share_heads(found[names.v], len(mix.s)) - mix.v.u,
        )
        center = torch.einsum("ihc,jhc->hij", mix.scores.q.u, mix.scores.k.u) * step.scale
        center = center if step.bias is None else center + step.bias
        pattern = Softmax("pattern", ("scores",), step.mask)(scores)
        for t in chain.goes_on[-2:]:
            at = Terms(chain, t, alpha * chain.root.half_widths, number)
            read, mask = moved[:, at.seen], step.mask[t, at.seen]
            b = (scores - center)[:, :, t, at.seen] * mask
            b = (b - (at.s * b).sum(-1, keepdim=True)) * mask
            shapes = at.shapes
            K_e = shapes._nonlinear(shapes._products())
            assert outside(K_e[0], ((b - at.b) * mask).flatten(1)) <= 1e-12
            weights = pattern[:, :, t, at.seen]
            rest = torch.einsum("nhj,dhj->nd", weights - at.s - at.s * b, at.g)
            rest = rest + torch.einsum("nhj,dhc,njhc->nd", weights - at.s, mix.out, read)
            rest = rest - at.second(b, read) - sum(at.third(b, read)) - sum(at.fourth(b, read))
            budget = SoftmaxBudget.of(mix, [t], at.seen, K_e)
            M = total(shapes._sized(budget, beyond(budget), "shape"))[0]
            assert outside(M, rest) <= 1e-13


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_everything_asked_alone_is_counted(name: str) -> None:
    chain, problem = chains(name, 0.01)[0]
    t = chain.goes_on[-1]
    at = Terms(chain, t, torch.zeros(1, problem.region.n_factors, dtype=torch.float64), 0)
    shapes = at.shapes
    K_e = shapes._nonlinear(shapes._products())
    budget = SoftmaxBudget.of(at.mix, [t], at.seen, K_e)
    wanted = [*shapes._third(), *shapes._fourth(), shapes._cross(), *shapes._linear_in_e(budget, K_e)]
    wanted += shapes._sized(budget, with_e(budget).plus(beyond(budget)), "shape")
    wanted += [shapes._values_e(budget), *shapes._sized(budget, against_e(budget), "shape_e")]
    second, rest = shapes.parts()
    assert torch.equal(second, shapes._second(shapes._products()))
    # And rounding, as the last one.
    assert len(rest) == len(wanted) + 1
    assert all(torch.equal(M, N) for M, N in zip(rest, wanted, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("field", Sizes._fields)
def test_sums_of_sizes_lie_in_their_ellipsoids(name: str, field: str) -> None:
    """Each kind of size alone, for budgets t that one key or all of them spend."""
    chain, problem = chains(name, 0.01)[1]
    t = chain.goes_on[-1]
    at = Terms(chain, t, torch.zeros(1, problem.region.n_factors, dtype=torch.float64), 0)
    budget = SoftmaxBudget.of(at.mix, [t], at.seen, at.shapes._nonlinear(at.shapes._products()))
    H, S = at.s.shape
    zero = torch.zeros(1, H, S, dtype=torch.float64)
    heads = field.startswith("head")
    Z = torch.rand(1, H, 1 if heads else S, generator=at.generator, dtype=torch.float64) * at.mix.mask[t]
    Z = Z[..., :1] if heads else Z
    sizes = Sizes(zero, zero, zero[..., :1])._replace(**{field: Z})
    spent = torch.rand(POINTS, H * Z.shape[-1], generator=at.generator, dtype=torch.float64) ** 8
    spent = (spent / spent.sum(-1, keepdim=True)).reshape(POINTS, H, -1)
    x = Z * spent.sqrt() * (at.s if heads else 1.0)
    M = total(at.shapes._sized(budget, sizes, "shape_e"))[0]
    if field in ("g", "g_e"):
        points = torch.einsum("nhj,dhj->nd", x, at.g)
    else:
        value = at.values[2]
        moved = torch.stack([at.members(value, "shape_e", j) for j in range(S)], 1)
        points = torch.einsum("nhj,dhc,njhc->nd", x, at.mix.out, moved)
    size = float(torch.linalg.vector_norm(points, dim=-1).max())
    assert size > 0.0
    assert outside(M, points) <= 1e-13 * size
