"""What a mixing leaves of given covectors once moving covectors hold its third order, key by key.

`taylor.moved_mixing` has ellipsoids of it, which serve every covector. For one covector u, with ω = u W_O at a head,
y = ω·(V − z), c = s y (Σ c = 0) and p = ω·δV, softmax makes of the centred scores b, with Σ s b = 0, exactly

    (1/(1 + q)) Σ s e^b (y + p)  =  Σ c b + Σ s p  +  ½ Σ c b² + Σ s b p  +  ⅙ Σ c b³ − ½ m₂ Σ c b + ½ Σ s (b² − m₂) p
        + Σ c R₄(b) − (Σ c b)(q − ½m₂) − q Σ c R₂(b) + N q²/(1 + q)
        + Σ s [R₃(b) − (q − ½m₂) − q (e^b − 1 − q)/(1 + q)] p,

m_k = Σ s b^k, q = Σ s R₂(b) ≥ 0, N = Σ c (e^b − 1) and R_n(b) = e^b − Σ_{k<n} b^k/k!. Write b = ℓ + x with ℓ linear in
the factors, and p = p_A + p_e likewise. Of x, what is linear in e and the products π of linear parts are held up to
third order, so that x_× remains, the products that involve e. Not held are therefore, besides the last two lines,

    scale Σ c e_q·e_k  +  Σ c ℓ x_× + ½ Σ c x²  +  Σ s x_× p_A + Σ s x p_e
    + ⅙ Σ c (b³ − ℓ³) − ½ (m₂ Σ c b − m₂(ℓ) Σ c ℓ) + ½ Σ s (b² − m₂) p − ½ Σ s (ℓ² − m₂(ℓ)) p_A.

Each is a sum of a few numbers, one for every head and key, whose sizes are known: |ℓ| ≤ ρ, |x| ≤ E, |b| ≤ β,
|p_A| ≤ P. Where each summand is bounded by its size, all keys of all tokens peak at once. So the summands are
majorised by squares, Σ w b² + Σ w_ℓ ℓ² + Σ v p_A² + rest, with weights of these sizes: a fourth power of b is at most
β² times its square. The squares of all tokens and mixings are one quadratic form of the factors, and one eigenvalue
bounds it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.derivatives import exp_tail
from prooflens.engines.relaxations.ellipsoids import support, supports
from prooflens.engines.relaxations.norms import frobenius, grow, length, product_error
from prooflens.engines.taylor.attention import MixSite, seen_keys
from prooflens.engines.taylor.chain import Chain
from prooflens.numerics import gamma


class KeySizes(NamedTuple):
    """Sizes by head and key of one query token; those of covectors have a dimension of forms in front.

    Attributes:
        s: the weights at the centre.
        rho: at least |ℓ|.
        E: at least |x|.
        cross: at least |x_×|.
        beta: at least |b|.
        y: at least |ω·(V − z)|.
        c: at least |c|.
        p: at least |p_A|.
        p_e: at least |p_e|.
    """

    s: Float[Tensor, "H K"]
    rho: Float[Tensor, "H K"]
    E: Float[Tensor, "H K"]
    cross: Float[Tensor, "H K"]
    beta: Float[Tensor, "H K"]
    y: Float[Tensor, "F H K"]
    c: Float[Tensor, "F H K"]
    p: Float[Tensor, "F H K"]
    p_e: Float[Tensor, "F H K"]


class Majorant(NamedTuple):
    """Numbers with which Σ w b² + Σ w_l ℓ² + Σ v p_A² + rest is above what is bounded, at one query token.

    Attributes:
        w: the weights of b², by head and key, shape [F, H, K].
        w_l: the weights of ℓ², likewise.
        v: the weights of p_A², likewise.
        rest: what no square holds, shape [F].
    """

    w: Float[Tensor, "F H K"]
    w_l: Float[Tensor, "F H K"]
    v: Float[Tensor, "F H K"]
    rest: Float[Tensor, " F"]


def majorant(
    at: KeySizes,
    W: Float[Tensor, "H 1"],
    W_e: Float[Tensor, "H 1"],
    products: Float[Tensor, "H K"],
) -> Majorant:
    """Majorise what neither second order nor moving covectors hold, but for rounding.

    Args:
        at: the sizes of everything by head and key.
        W: bounds of Σ s b², head by head.
        W_e: bounds of Σ s x², head by head.
        products: bounds of scale |e_q·e_k|.
    """
    beside, beyond = _beside_third(at, W_e), _beyond_third(at, W)
    rest = (at.c * products).sum((-2, -1)) + beside.rest + beyond.rest
    return Majorant(beside.w + beyond.w, beside.w_l + beyond.w_l, beside.v + beyond.v, rest)


def _beside_third(at: KeySizes, W_e: Float[Tensor, "H 1"]) -> Majorant:
    """Majorise what x and p_e change in second and third order beyond what is held.

    |b³ − ℓ³| ≤ (3/2) E (b² + ℓ²) and |b² − ℓ²| ≤ E (|b| + |ℓ|); |b||p| ≤ ½ (g b² + p²/g) for any g > 0; sums over keys
    of products are separated by Cauchy and Schwarz, with Σ s = 1.
    """
    s, rho, E, cross, beta, y, c, p, p_e = at
    squares = torch.minimum((c * E.square()).sum(-1), y.amax(-1) * W_e[:, 0])
    rest = (c * rho * cross).sum(-1) + 0.5 * squares + (s * (cross * p + E * p_e)).sum(-1)
    mean_e = _sum(s * E.square())
    # ½ |m₂ − m₂(ℓ)| |Σ c ℓ|, and the same against Σ s p.
    apart = 0.36 * (mean_e * _sum(c * y)).sqrt()
    h = _ratio(_sum(s * p.square()).sqrt(), (mean_e * _sum(s * beta.square())).sqrt())
    both = 0.25 * (c * E + s * E * _ratio(p, beta)) + 0.25 * s * h * mean_e
    w = both + s * (0.5 * _sum(c * E) + apart) + 0.5 * s * (p_e + _sum(s * p_e))
    v = 0.5 * s * E * _ratio(beta, p) + 0.5 * s / h
    return Majorant(w, both + 2.0 * s * apart, v, rest.sum(-1))


def _beyond_third(at: KeySizes, W: Float[Tensor, "H 1"]) -> Majorant:
    """Majorise fourth order and beyond, of weights against y and of weights against p."""
    s, _, _, _, beta, y, c, p, p_e = at
    r1 = exp_tail(beta, 1, 1)
    r2, r3, r4 = (exp_tail(beta, n, 2) for n in (2, 3, 4))
    q = torch.minimum(_sum(s * beta.square() * r2), r2.amax(-1, keepdim=True) * W)
    first = torch.minimum(_sum(c * beta), (_sum(c * y) * W).sqrt())
    whole, values = _sum(c * beta * r1), s * (p + p_e)
    alone = c * (r4 + r2 * q) + s * (first * r3 + whole * q.clamp(max=1.0) * r2)
    shared = s * r3 * (_sum(values) + p_e) + s * r2 * _sum(values * (beta * r1 + q))
    pair = 0.5 * s * beta * r3
    w = alone + shared + pair * _ratio(p, beta)
    return Majorant(w, torch.zeros_like(w), pair * _ratio(beta, p), torch.zeros_like(w[:, 0, 0]))


def _sum(x: Float[Tensor, "*b K"]) -> Float[Tensor, "*b 1"]:
    """Add up over the keys."""
    return x.sum(-1, keepdim=True)


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """Return x/y, kept between 2⁻¹⁰⁰ and 2¹⁰⁰: any positive number is valid where it is used."""
    return (x / y.clamp(min=2.0**-400)).clamp(2.0**-100, 2.0**100)


class MixingMajorants:
    """The majorants of all tokens of all mixings that some forms' covectors pass: a sum of squares, |Zα|² + rest.

    A token of which its ellipsoid (`taylor.moved_mixing`) says less is a constant in `rest`.

    Args:
        half_widths: half-widths of the factors, shape [p].
    """

    def __init__(self, half_widths: Float[Tensor, " p"]) -> None:
        self.half_widths = half_widths
        self.rows: list[Float[Tensor, "F n p"]] = []
        """Z, part by part."""
        self.rest: Tensor | float = 0.0

    def add(self, chain: Chain, place: int, u: Float[Tensor, "F d"]) -> None:
        """Add what covectors leave at one token of the next root.

        Args:
            chain: a chain whose mixing has its shapes for moving covectors.
            place: the place of the token among those of the next root.
            u: covectors there, shape [F, d].
        """
        mix, t, moved = chain.mix, chain.goes_on[place], chain.moved
        assert mix is not None
        assert moved is not None
        keys = seen_keys(mix.mask[..., t, :])
        at, seen = _sizes(mix, t, keys, u)
        W, W_e = (x[place][:, None] for x in (moved.budget, moved.budget_e))
        found = majorant(at, W, W_e, mix.scores.products_e[:, t, keys])
        noise = length(u) * (mix.noise[t] * torch.exp(2.0 * at.beta.amax()))
        # b² ≤ (1 + E/ρ) ℓ² + E (E + ρ), and p_A² ≤ (1 + 2⁻²⁰) of the computed row's plus 2²¹ times its error's.
        rest = noise + grow(found.rest + (found.w * at.E * (at.E + at.rho)).sum((-2, -1)))
        rest = rest + 2.0**21 * (found.v * (at.p - seen.reach).square()).sum((-2, -1))
        by_scores = found.w * (1.0 + _ratio(at.E, at.rho)) + found.w_l
        widths = self.half_widths
        scores = by_scores.sqrt()[..., None] * (mix.rows[:, t, keys] * widths)
        values = (found.v * (1.0 + 2.0**-20)).sqrt()[..., None] * (seen.rows * widths)
        # What squares come to at random corners; where an ellipsoid says less, or nothing is known of them, it stands.
        alone = support(moved.rest[place], u)
        chosen = (
            rest + frobenius(scores.flatten(1, 2)).square() + frobenius(values.flatten(1, 2)).square()
            <= alone
        )
        scores, values = (torch.where(chosen[:, None, None, None], x, 0.0) for x in (scores, values))
        self.rest = self.rest + torch.where(chosen, rest, alone.nan_to_num(nan=torch.inf))
        self.rows += [scores.flatten(1, 2), values.flatten(1, 2)]

    def squares(self, some: slice) -> tuple[Float[Tensor, "f p p"], Float[Tensor, " f"]]:
        """Return 2ZᵀZ of some forms, and its rounding in the 2-norm.

        The rows' own products and roots round by a few units each; sums run over the rows.

        Args:
            some: which forms.
        """
        Z = torch.cat([part[some] for part in self.rows], 1)
        return 2.0 * Z.mT @ Z, product_error(2 * Z.shape[1] + 64, 4.0 * frobenius(Z).square())


class SeenValues(NamedTuple):
    """The linear parts p_A as they are computed, shape [F, H, K, p], and their largest values over the box."""

    rows: Float[Tensor, "F H K p"]
    reach: Float[Tensor, "F H K"]


def _sizes(mix: MixSite, t: int, keys: slice, u: Float[Tensor, "F d"]) -> tuple[KeySizes, SeenValues]:
    """Bound what the forms read of every head and key.

    ω is a sum over the stream, y and p are sums over a head's coordinates, and p is added up over the factors.
    """
    s, rho, E, cross, beta = (x[:, t, keys] for x in (mix.s, mix.rho, mix.E, mix.E_cross, mix.beta))
    H, c = mix.z.shape[1:]
    omega = torch.einsum("fd,dhc->fhc", u, mix.out)
    size = length(u)[:, None] * mix.out_size
    rounding = gamma(len(mix.out) + 2 * c + 32) * 4.0 * size[..., None]
    deviations = mix.deviations[:, t, keys]
    y = torch.einsum("fhc,hjc->fhj", omega, deviations).abs()
    y = grow(y + rounding * (length(deviations) + 2.0 * mix.v.n.amax(0)[:, None]))
    widths, groups = mix.factors.half_widths, mix.v.source.heads
    A = mix.v.A[keys]
    rows = torch.einsum("fgrc,jgcp->fgrjp", omega.unflatten(1, (groups, -1)), A).flatten(1, 2)
    reach = rows.abs() @ widths
    moves = frobenius(A).T.repeat_interleave(H // groups, 0) * length(widths)
    p = grow(reach + (rounding + gamma(A.shape[-1] + 32) * 4.0 * size[..., None]) * moves)
    shapes = mix.v.B[keys].movedim(1, 0)
    p_e = supports(shapes.expand(len(u), -1, -1, -1, -1), omega[:, :, None].expand(-1, -1, A.shape[0], -1))
    p_e = grow(p_e + rounding * mix.v.e[keys].T)
    return KeySizes(s, rho, E, cross, beta, y, grow(s * y), p, p_e), SeenValues(rows, reach)
