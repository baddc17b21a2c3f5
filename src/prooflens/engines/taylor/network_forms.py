"""What a network misses as seen by given covectors: its second order as a matrix, and one eigenvalue for all of it.

`taylor.network` has the formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.derivatives import DERIVATIVE_ERROR
from prooflens.engines.relaxations.ellipsoids import image
from prooflens.engines.relaxations.norms import frobenius, grow, length, product_error, top_eigenvalue
from prooflens.engines.taylor.gates import gated_gram, gram, summed
from prooflens.engines.taylor.squares import Squares
from prooflens.numerics import gamma

if TYPE_CHECKING:
    from prooflens.engines.taylor.network import NetworkSite


def second_order(
    site: NetworkSite,
    v: Float[Tensor, "F o"],
    t: int,
    J: Float[Tensor, "i n"],
    curve: Float[Tensor, "S n"],
) -> tuple[Float[Tensor, "F n n"], Float[Tensor, " F"]]:
    """Return Q with ½xᵀQx the second order of v·r for a move Jx of the input, and its rounding in the 2-norm.

    Args:
        site: the network.
        v: covectors at its output, shape [F, o].
        t: the token.
        J: the Jacobian of the network's input by x.
        curve: φ″ of each neuron, or what stands for it.
    """
    a = v @ site.down
    W, second = site.step.bent.weight, curve[t]
    rows = W @ J
    a_noise = gamma(len(site.down) + 16) * length(site.down.T) * length(v)[:, None]
    size, wide = a.abs() + a_noise, length(W)
    if site.step.gate is None:
        right = (a * second)[:, :, None] * rows
        most = (size * second.abs()) @ wide.square()
        slip = (a_noise * second.abs() + size * DERIVATIVE_ERROR) @ wide.square()
    else:
        up, other = site.step.up.weight, site.other[t]
        rows, others = torch.cat((rows, up @ J)), up @ J
        first, bent = site.first[t], second * other
        across = (a * first)[:, :, None]
        right = torch.cat(
            ((a * bent)[:, :, None] * rows[: len(W)] + across * others, across * rows[: len(W)]), 1
        )
        pairs = wide * length(up)
        most = (size * bent.abs()) @ wide.square() + 2.0 * (size * first.abs()) @ pairs
        slip = (a_noise * bent.abs() + size * DERIVATIVE_ERROR * other.abs()) @ wide.square()
        slip = slip + 2.0 * (a_noise * first.abs() + size * DERIVATIVE_ERROR) @ pairs
    Q = rows.T @ right
    # vW_d, WJ and the sum over neurons, of `most` at most; a gate adds two like it. 8 and 8 cover them.
    error = product_error(8 * (sum(site.down.shape) + sum(W.shape)), 8.0 * most)
    error = grow((error + slip) * frobenius(J).square())
    return 0.5 * (Q + Q.mT), error


def covector_bound(site: NetworkSite, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, "F 2"]:
    """Bound v·r and −v·r over the ellipsoid of the input, from one d × d matrix per covector and sign, with rounding.

    Args:
        site: the network.
        v: covectors at its output, shape [F, o].
        t: the token.
    """
    a = v @ site.down
    a_noise = gamma(len(site.down) + 16) * length(site.down.T) * length(v)[:, None]
    size = a.abs() + a_noise
    rows = site.rows[t]
    raise_ = size * site.spread[t] + a_noise * site.curve[t].abs() + DERIVATIVE_ERROR * size
    weights = a * site.curve[t]
    cross = None
    if site.step.gate is not None:
        weights = weights * site.other[t]
        moved = site.other[t].abs()
        raise_ = raise_ * moved + (size * (site.curve[t].abs() + site.spread[t])) * 2.0**-45
        cross = a * site.first[t]
        d_cross = size * site.d_first[t] + a_noise * site.first[t].abs() + gamma(8) * cross.abs()
    raise_ = raise_ + gamma(8) * weights.abs()
    sides = []
    for sign in (1.0, -1.0):
        raised = sign * weights + raise_
        if cross is None:
            form, error = gram(rows, site.row_sizes[t], raised)
        else:
            sizes = site.row_sizes[t], site.other_sizes[t]
            form, error = gated_gram(rows, site.other_rows[t], sizes, raised + d_cross, sign * cross, d_cross)
        sides.append(top_eigenvalue(form) + error)
    kinks = _kinks(site, size, t) + site.noise(v, t)
    return grow(0.5 * torch.stack(sides, -1) + kinks[:, None])


def squares_above(site: NetworkSite, v: Float[Tensor, "F o"], t: int) -> Squares:
    """Bound |v·r − ½uᵀQu| for the whole move u of the input, with Q of the middles of secants.

    A neuron leaves ½a(lg + qg² ± κ)g² for the move g of its pre-activation; with a gate that moves by o from o₀ it
    leaves that times o₀ + o, and ½ac̄og². Let g² be in the ellipsoid of shape M = K∘K, as g is in that of shape K:

    - what is linear in u times g² is (B u)·(g²), at most ‖M^½B u‖, where signs and neurons cancel;
    - all else is at most a constant times g², q g⁴ ≤ qb² g² among it.

    Args:
        site: the network.
        v: covectors at its output, shape [F, o].
        t: the token.
    """
    a = v @ site.down
    noise = gamma(len(site.down) + 16) * length(site.down.T) * length(v)[:, None]
    size, W = a.abs() + noise, site.step.bent.weight
    middle, lean, bend, spread = (x[t] for x in site.bent)
    b, leaning, bending = site.b[t], lean.abs(), bend.abs()
    if site.step.gate is None:
        each, fourth = size * spread + noise * leaning * b, size * bending
        B = (0.5 * a * lean)[:, :, None] * W
    else:
        other, b_other, V = site.other[t], site.b_other[t], site.step.up.weight
        whole = other.abs() + b_other
        each = size * (spread * whole + leaning * b * b_other)
        each = each + noise * (leaning * other.abs() * b + middle.abs() * b_other)
        fourth = size * bending * whole
        B = (0.5 * a * lean * other)[:, :, None] * W + (0.5 * a * middle)[:, :, None] * V
    each = grow(each + fourth * b.square())
    form, error = gram(W, length(W), each)
    rest = _kinks(site, size, t) + site.noise(v, t) + length(v) * site.blur[t]
    if not bool((leaning + bending).any()) and site.step.gate is None:
        return Squares(form, error, grow(rest))
    K = image(W, site.source.shape[t])
    M = summed([K * K])
    # B is a sum of two products of numbers; BᵀMB sums over the neurons twice.
    slip = product_error(4 * len(W) + 64, 4.0 * frobenius(B).square() * frobenius(M))
    turned = B.mT @ (M @ B)
    return Squares(form, error, grow(rest), 0.5 * (turned + turned.mT), slip)


def _kinks(site: NetworkSite, size: Float[Tensor, "F n"], t: int) -> Float[Tensor, " F"]:
    """Bound what kinks add to ±v·r, for |a| ≤ size."""
    if site.step.gate is not None:
        size = size * (site.other[t].abs() + site.b_other[t])
    return size @ site.kink[t]
