"""What mixings leave of a covector once moving covectors hold third order: the majorant by squares, and its bounds.

The expression is computed exactly, weights less what is held of them, at random points and at real ones; each number of
the majorant is needed.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.mixing_rest import KeySizes, Majorant, MixingMajorants, majorant
from prooflens.engines.taylor.moved_mixing import moved_shapes
from prooflens.models.sites import share_heads
from prooflens.problem import Problem
from tests.engines.taylor.test_mixing import POINTS, Terms, chains


class Moves(NamedTuple):
    """What one covector meets at one head, at points [n, K]; s and y are those of the centre, [K].

    Attributes:
        s: the weights at the centre.
        y: ω·(V − z).
        linear: ℓ.
        held: the part of x that moving covectors hold wherever it stands.
        cross: e_q·e_k, held nowhere, and what is held in Σ c x alone.
        alone: e_q·e_k.
        p: p_A.
        p_e: p_e.
    """

    s: Tensor
    y: Tensor
    linear: Tensor
    held: Tensor
    cross: Tensor
    alone: Tensor
    p: Tensor
    p_e: Tensor

    def left(self) -> Tensor:
        """The row's output less what second order and moving covectors hold, per point."""
        s, y, linear, held, cross, alone, p, p_e = self
        c, b, values = s * y, linear + held + cross, p + p_e
        q = (s * (torch.expm1(b) - b)).sum(-1)
        whole = ((c * torch.expm1(b)).sum(-1) + (s * (torch.expm1(b) - q[:, None]) * values).sum(-1)) / (
            1.0 + q
        )
        mean = (s * linear.square()).sum(-1, keepdim=True)
        first = (c * (b - alone)).sum(-1)
        second = (0.5 * c * linear.square() + c * linear * held).sum(-1) + (
            s * linear * values + s * held * p
        ).sum(-1)
        third = (c * (linear**3 / 6.0 - 0.5 * mean * linear)).sum(-1) + (
            0.5 * s * (linear.square() - mean) * p
        ).sum(-1)
        return whole - first - second - third

    def sizes(self) -> KeySizes:
        """The largest values over the points, as numbers of one form at one head."""
        s, y, linear, held, cross, _, p, p_e = self
        moves = (linear, held + cross, cross, linear + held + cross)
        rho, E, far, beta = (x.abs().amax(0)[None] for x in moves)
        size = y.abs()[None, None]
        p_most, p_e_most = (x.abs().amax(0)[None, None] for x in (p, p_e))
        return KeySizes(s[None], rho, E, far, beta, size, s * size, p_most, p_e_most)

    def budgets(self) -> tuple[Tensor, Tensor, Tensor]:
        """The largest Σ s b² and Σ s x², and the sizes of e_q·e_k."""
        s, _, linear, held, cross, alone, _, _ = self
        b, x = linear + held + cross, held + cross
        W, W_e = ((s * z.square()).sum(-1).amax()[None, None] for z in (b, x))
        return W, W_e, alone.abs().amax(0)[None]

    def above(self, found: Majorant) -> Tensor:
        """What a majorant comes to at the points."""
        b = self.linear + self.held + self.cross
        squares = found.w[0, 0] * b.square() + found.w_l[0, 0] * self.linear.square()
        return (squares + found.v[0, 0] * self.p.square()).sum(-1) + found.rest


def drawn(seed: int, sizes: dict[str, float], n: int = 400, keys: int = 4) -> Moves:
    """Random moves of these sizes; scores are centred, and so is y."""
    generator = torch.Generator().manual_seed(seed)

    def some(name: str) -> Tensor:
        corners = torch.randn(n, keys, generator=generator, dtype=torch.float64)
        return sizes.get(name, 0.0) * (corners.sign() if seed % 2 else corners.clamp(-1.5, 1.5))

    s = torch.softmax(torch.randn(keys, generator=generator, dtype=torch.float64), -1)
    y = torch.randn(keys, generator=generator, dtype=torch.float64) * sizes.get("y", 0.0)
    parts = [some(name) for name in ("linear", "held", "cross", "alone")]
    linear, held, cross, alone = (x - (s * x).sum(-1, keepdim=True) for x in parts)
    return Moves(s, y - (s * y).sum(), linear, held, cross + alone, alone, some("p"), some("p_e"))


SIZES: list[dict[str, float]] = [
    {"y": 1.0, "linear": 1.0},
    {"linear": 1.0, "p": 1.0},
    {"y": 1.0, "linear": 0.3, "held": 0.1, "p": 0.3},
    {"y": 1.0, "linear": 0.3, "cross": 0.1, "alone": 0.05, "p": 0.3, "p_e": 0.1},
    {"linear": 0.1, "held": 1.0, "p": 1.0},
    {"y": 1.0, "held": 0.5},
    {"linear": 0.5, "p_e": 1.0},
    {"y": 1.0, "alone": 0.1},
    {"y": 1e-3, "linear": 2.0, "held": 1.0, "cross": 1.0, "p": 2.0, "p_e": 1.0},
]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_majorant_is_above_what_is_left(sizes: dict[str, float]) -> None:
    for seed in range(60):
        moves = drawn(seed, sizes)
        found = majorant(moves.sizes(), *moves.budgets())
        assert bool((moves.left().abs() <= moves.above(found) + 1e-13).all())


def test_at_small_moves_it_is_of_the_order_of_what_is_left() -> None:
    """A fourth power of the scores: halving them divides the bound by sixteen."""
    peaks = []
    for size in (0.02, 0.01):
        moves = drawn(0, {"y": 1.0, "linear": size})
        peaks.append(float(moves.above(majorant(moves.sizes(), *moves.budgets())).amax()))
    assert 14.0 <= peaks[0] / peaks[1] <= 18.0


@pytest.mark.parametrize("field", Majorant._fields)
def test_every_number_is_needed(field: str) -> None:
    """At single points, where every size is attained, a majorant without it is below what is left."""
    worst = 0.0
    for sizes in [*SIZES, {"linear": 6e-4, "held": 8e-4, "p": 6e-3}]:
        for seed in range(200):
            moves = drawn(seed, sizes, n=1, keys=2)
            if seed % 3 == 0:
                moves = moves._replace(held=-moves.linear)
            found = majorant(moves.sizes(), *moves.budgets())
            less = found._replace(**{field: 0.0 * getattr(found, field)})
            worst = max(worst, float((moves.left().abs() / (moves.above(less) + 1e-16)).amax()))
    assert worst > 1.2


def at_points(chain: Chain, problem: Problem, t: int, number: int) -> tuple[Terms, Tensor]:
    """What the row of a token leaves at points, as every coordinate of the output sees it, [n, d]."""
    alpha = problem.region.sample(POINTS, number, corners=0.7)[1]
    mix = chain.mix
    assert mix is not None
    names, step = mix.attention, mix.scores.step
    found = problem.model.run(problem.region.point(alpha), [names.q, names.k, names.v])
    at = Terms(chain, t, alpha * chain.root.half_widths, number)
    H, seen, mask = len(mix.s), at.seen, step.mask[t, at.seen]
    q, k = (share_heads(found[name], H) for name in (names.q, names.k))
    scores, values = step(found[names.q], found[names.k]), share_heads(found[names.v], H) - mix.v.u
    center = torch.einsum("ihc,jhc->hij", mix.scores.q.u, mix.scores.k.u) * step.scale
    center = center if step.bias is None else center + step.bias
    e_q = q[:, t] - mix.scores.q.u[t] - at.A_q
    e_k = (k - mix.scores.k.u)[:, seen] - at.A_k
    p, p_e = at.A_v, values[:, seen] - at.A_v

    def centred(x: Tensor) -> Tensor:
        return (x - (at.s * x).sum(-1, keepdim=True)) * mask

    alone = centred(mix.scale * torch.einsum("nhc,njhc->nhj", e_q, e_k))
    held = torch.einsum("hc,njhc->nhj", mix.scores.q.u[t], e_k) + torch.einsum(
        "nhc,jhc->nhj", e_q, mix.scores.k.u[seen]
    )
    held = centred(mix.scale * (held + torch.einsum("nhc,njhc->nhj", at.A_q, at.A_k)))
    b = centred((scores - center)[:, :, t, seen])
    out = torch.zeros(POINTS, len(mix.out), dtype=torch.float64)
    for h in range(H):
        for i in range(len(mix.out)):
            by = mix.out[i, h]
            cross = b[:, h] - at.b[:, h] - held[:, h]
            reads = (
                at.g[i, h],
                at.b[:, h],
                held[:, h],
                cross,
                alone[:, h],
                p[:, :, h] @ by,
                p_e[:, :, h] @ by,
            )
            out[:, i] += Moves(at.s[h], *reads).left()
    return at, out


def square_at(made: MixingMajorants, alpha: Tensor) -> Tensor:
    """½ αᵀJα + rest at points, [n, F]."""
    J, error = made.squares(slice(None))
    found = 0.5 * torch.einsum("np,fpq,nq->nf", alpha, J, alpha)
    return found + 0.5 * error * alpha.square().sum(-1, keepdim=True) + torch.as_tensor(made.rest)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("spread", [1e-3, 0.02, 0.1])
def test_the_square_is_above_what_is_left_at_every_point(name: str, spread: float) -> None:
    """At each point by itself, and not only at the largest."""
    for number, (chain, problem) in enumerate(chains(name, spread)):
        if chain.moved is None:
            chain.moved = moved_shapes(chain)
        alpha = problem.region.sample(POINTS, number, corners=0.7)[1]
        for place in (0, len(chain.goes_on) - 1):
            at, left = at_points(chain, problem, chain.goes_on[place], number)
            u = torch.randn(20, left.shape[1], generator=at.generator, dtype=torch.float64)
            made = MixingMajorants(chain.root.half_widths)
            made.add(chain, place, u)
            assert bool(((left @ u.T).abs() <= square_at(made, alpha) + 1e-14).all())
            if spread < 0.01:
                assert bool(made.squares(slice(None))[0].isfinite().all())


def test_squares_of_tokens_add_up() -> None:
    """The square of all tokens is above their sum at every point."""
    for number, (chain, problem) in enumerate(chains("llama", 0.02)):
        chain.moved = chain.moved or moved_shapes(chain)
        made, left = MixingMajorants(chain.root.half_widths), torch.zeros(POINTS, 5).double()
        for place, t in enumerate(chain.goes_on):
            u = torch.randn(5, chain.root.u.shape[1], dtype=torch.float64)
            made.add(chain, place, u)
            left = left + at_points(chain, problem, t, number)[1] @ u.T
        alpha = problem.region.sample(POINTS, number, corners=0.7)[1]
        assert bool((left.abs() <= square_at(made, alpha)).all())


def test_without_mixings_nothing_is_left() -> None:
    made = MixingMajorants(torch.ones(3))
    assert made.rows == []
    assert made.rest == 0.0
