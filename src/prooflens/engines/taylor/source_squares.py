"""How long a remainder is in a given form, majorised by a square of what made it (`taylor.fourth_order`).

A remainder r of second order is a quadratic map of its site's move u = Lξ, ‖ξ‖ ≤ 1. For X = Σ_i x_ix_iᵀ ⪰ 0 and
x_i·r = uᵀC_iu, Cauchy and Schwarz take one of the two factors away,

    rᵀXr  =  Σ_i (uᵀC_iu)²  =  Σ_i (ξ·LᵀC_iu)²  ≤  Σ_i ‖LᵀC_iu‖²  =  uᵀ(Σ_i C_iMC_i)u,       M = LLᵀ,

and what is left is a square of u. Its largest value is about that of r's ellipsoid; but a form that is steep asks for
its value at one corner, and there it is hundreds of times smaller, since u is hardly ever long in the directions in
which the C_i are large. For r = W_d q, q_n = (w_n·u)(a_nw_n·u), the sum is **one Hadamard product**,

    Σ_i C_iMC_i = W_uᵀ diag(a) [(W_dᵀXW_d) ∘ (W_uMW_uᵀ)] diag(a) W_u,

in the neurons' own Gram matrix, with which `taylor.network` makes its ellipsoids. A gate has q_n = u·p_n(u) with p_n(u)
= a_n g_nw_n + ½c_n(g_nv_n + o_nw_n). Of third and fourth order two and three factors are taken away, and K counts two
and three times. A norm is u⊥ times a number and m times another, and of either product one factor is taken at its
largest. `taylor.mixing_squares` does the same for a mixing. What no polynomial holds stays a constant, by an ellipsoid.

All shapes are raised over their rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import (
    hadamard,
    image,
    raised,
    total,
    weights_of_sum,
    without,
)
from prooflens.engines.relaxations.norms import CHUNK, frobenius, grow, length, product_error
from prooflens.engines.taylor.gates import Quarters, quarters
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.network import NetworkSite
from prooflens.engines.taylor.squares import half_form, remainder_form
from prooflens.numerics import gamma

SPARE = 0.5
"""What a constant is taken to come to once it is walked back, as a share of itself: it decides weights."""
UNEVEN = 2.0**10
"""How unequal the two shares of a sum may be; any positive weights are valid."""


class SourceSquare(NamedTuple):
    """½uᵀRu + rest is at least ½rᵀXr, for several X.

    Attributes:
        R: shapes, [F, n, n].
        rest: constants, [F].
    """

    R: Float[Tensor, "F n n"]
    rest: Float[Tensor, " F"]


def price(
    R: Float[Tensor, "F n n"], corner: Float[Tensor, "F n"], M: Float[Tensor, "n n"]
) -> Float[Tensor, " F"]:
    """Guess what a square ½uᵀRu costs a form: what it is at its corner, and a share of the most that it may be.

    Args:
        R: shapes, [F, n, n].
        corner: u at the corners.
        M: the shape of u.
    """
    return half_form(R, corner) + SPARE * remainder_form(M, R, torch.zeros_like(R[:, 0, 0]))


def shares(one: Float[Tensor, " F"], other: Float[Tensor, " F"]) -> tuple[Tensor, Tensor]:
    """Return weights c with |x + y|² ≤ c₁|x|² + c₂|y|², for about the least sum if the squares have these sizes.

    Args:
        one: the size of |x|².
        other: the size of |y|².
    """
    ratio = ((other + 2.0**-300) / (one + 2.0**-300)).sqrt().clamp(1.0 / UNEVEN, UNEVEN)
    return grow(1.0 + ratio), grow(1.0 + 1.0 / ratio)


def scaled(c: Float[Tensor, " F"], M: Float[Tensor, "F n n"]) -> Float[Tensor, "F n n"]:
    """Return c M, raised.

    Args:
        c: positive numbers.
        M: shapes.
    """
    return raised(c[:, None, None] * M, gamma(8) * c * frobenius(M))


def network_square(
    site: NetworkSite, X: Float[Tensor, "F o o"], t: int, corner: Float[Tensor, "F d"]
) -> SourceSquare:
    """Majorise ½rᵀXr for the remainder r of a network; u is the whole move of its input.

    Args:
        site: the network.
        X: shapes at its output.
        t: the token.
        corner: where R should be small.
    """
    step, source = site.step, site.source
    few = max(1, CHUNK // max(1, 6 * site.h.shape[1] ** 2))
    W, U = step.bent.weight, source.shape[t]
    at = Quarters(K := image(W, U), K, K) if step.gate is None else quarters(W, step.up.weight, U)
    rest = remainder_form(site.box_shape(t), X, torch.zeros_like(X[:, 0, 0]))
    parts = [_neurons(site, some, t, at) for some in X.split(few)]
    found = [torch.cat(order) for order in zip(*parts, strict=True)]
    sizes = torch.stack([*(price(R, corner, U) for R in found), rest], -1).sqrt()
    c = weights_of_sum(sizes)
    return SourceSquare(total(found, c[:, :-1]), grow(c[:, -1] * rest))


def _neurons(
    site: NetworkSite, X: Float[Tensor, "F o o"], t: int, at: Quarters
) -> list[Float[Tensor, "F d d"]]:
    """Return the matrices of what second, third and fourth order make of X, by neurons."""
    step = site.step
    W, a, K = step.bent.weight, 0.5 * site.second[t], at.g
    orders = site.orders(torch.tensor([t]))
    cubic, quartic = orders.cubic[0], orders.quartic[0]
    Z = X if step.down is None else image(site.down.T, X)
    if orders.third is None or orders.fourth is None:
        found: list[Tensor] = []
        rows = [a[:, None] * W, cubic[:, None] * W, quartic[:, None] * W]
    else:
        V, third, fourth = step.up.weight, orders.third[0], orders.fourth[0]
        found = [_gated(Z, at, site.second[t] * site.other[t], site.first[t], W, V)]
        rows = [cubic[:, None] * W + third[:, None] * V, quartic[:, None] * W + fourth[:, None] * V]
        Z = hadamard(Z, K)
    for T in rows:
        Z = hadamard(Z, K)
        # T rounds by a few units, as a map in `image` may.
        found.append(image(T.T, Z))
    return found


def _gated(
    Z: Float[Tensor, "F n n"], at: Quarters, second: Tensor, first: Tensor, W: Tensor, V: Tensor
) -> Float[Tensor, "F d d"]:
    """Return the matrix of the second order of a gate, whose forms are split evenly between both factors."""
    # p_n = w_n (T₁u)_n + v_n (T₂u)_n, so that R = Σ TᵀZT with the four blocks of W_uMW_uᵀ.
    T1, T2 = 0.5 * (second[:, None] * W + first[:, None] * V), 0.5 * first[:, None] * W
    blocks = Z * at.g, Z * at.both, Z * at.u
    middle = T1.T @ blocks[1] @ T2
    made = T1.T @ blocks[0] @ T1 + middle + middle.mT + T2.T @ blocks[2] @ T2
    x, y = frobenius(T1), frobenius(T2)
    size = x * x * frobenius(blocks[0]) + 2.0 * x * y * frobenius(blocks[1]) + y * y * frobenius(blocks[2])
    # Entries of Z and T round by a few units; lengths n and d, four summands. Both factors are to spare.
    return raised(made, product_error(4 * sum(W.shape) + 256, 4.0 * size))


def norm_square(
    site: NormSite, X: Float[Tensor, "F d d"], t: int, corner: Float[Tensor, "F d"]
) -> SourceSquare:
    """Majorise ½rᵀXr for the remainder r = γ ⊙ [Πu s + m G]/σ of a norm: either |s| or |Πu| is a number, and one G.

    Args:
        site: the norm.
        X: shapes at its output.
        t: the token.
        corner: where R should be small.
    """
    d, m = site.d, site.gain * site.m[t]
    inner = site.gain[:, None] * X * site.gain
    inner = raised(inner, gamma(16) * site.gain.abs().amax() ** 2 * frobenius(X))
    if site.step.centred:
        inner = without(inner, torch.full_like(site.m[t], d**-0.5).expand(len(X), -1))
    inner = without(inner, site.unit[t].expand(len(X), -1))
    # Π errs by units and by what m errs by, as in `reaches`.
    inner = raised(inner, gamma(8 * d + 128) * 8.0 * site.stretch[t] * frobenius(inner))
    least, source = site.sigma[t] * (1.0 - 2.0**-40), site.source
    by_turn = inner * grow((site.slope[t] / least).square())
    # Or u⊥ at its longest, and s by its square: s = −(1 − η)y + s′, y = m·u/‖m‖².
    nothing = torch.zeros_like(X[:, 0, 0])
    far = 2.0 * remainder_form(source.shape[t], inner, nothing) / least.square()
    # Not by `length`, which is raised by far more than units: it divides here, and `blur` counts units.
    size = site.m[t].square().sum()
    y = half_form(far[:, None, None] * (site.m[t][:, None] * site.m[t] / size.square()), corner)
    one, other = shares(y, 0.5 * far * site.bend[t].square())
    by_length = (far * one)[:, None, None] * (site.m[t][:, None] * site.m[t]) / size.square()
    blur = gamma(8 * d + 128) * 8.0 * site.stretch[t] * far * one / size
    by_length = raised(by_length, blur)
    bent = grow(0.5 * other * far * site.bend[t].square())
    prices = [price(M, corner, source.shape[t]) for M in (by_length, by_turn)]
    better = site.split[t] & (prices[0] + bent < prices[1])
    across = torch.where(better[:, None, None], by_length, by_turn)
    bent = torch.where(better, bent, 0.0)
    # G is at most g₁κ + g₀ and at most its largest value.
    along = ((m @ X) @ m).clamp(min=0.0) + product_error(4 * d, 2.0 * length(m).square() * frobenius(X))
    g1, g0 = site.turning(t)
    most = grow(along * site.twist[0][t] / least.square())
    turned = scaled(grow(most * g1 / site.q[t]), site.projection(t).expand(len(X), -1, -1))
    fixed, noise = grow(0.5 * most * g0), grow(0.5 * frobenius(X) * site.blur[t].square())
    one, other = (price(M, corner, source.shape[t]) for M in (across, turned))
    sizes = torch.stack([one + bent, other + fixed, noise], -1)
    c = weights_of_sum(sizes.sqrt())
    rest = c[:, 0] * bent + c[:, 1] * fixed + c[:, 2] * noise
    return SourceSquare(total([across, turned], c[:, :2]), grow(rest))
