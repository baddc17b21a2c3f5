"""A network's own third and fourth order for given covectors, by eigenvalues (`taylor.third_order`).

For a = W_dᵀv and pre-activations u in an ellipsoid of shape K, Σ a_n c_n u_n³ is bilinear in x = u and y = u², which
lies in the ellipsoid of shape K∘K: with K∘K ⪯ LLᵀ

    |Σ a c u³| ≤ ‖K^½ diag(ac) L‖₂,        |Σ a c u⁴| = |yᵀ diag(ac) y| ≤ ‖Lᵀ diag(ac) L‖₂.

The ellipsoids of `taylor.network` have Frobenius norms of these matrices. With a gate y holds g² and gu, x holds g and
u, and Σ a(c g³ + c′ g²u) is written as ⅔ of g²u against gu and ⅓ against g².
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import image, raised, trace
from prooflens.engines.relaxations.norms import (
    cholesky_factor,
    frobenius,
    grow,
    largest,
    length,
    product_error,
    spectral,
)
from prooflens.engines.taylor.gates import quarters, summed
from prooflens.numerics import gamma

if TYPE_CHECKING:
    from prooflens.engines.taylor.network import NetworkSite

WIDEST_ON_CPU = 2048
"""On a CPU, matrices with more rows take longer than what they gain is worth."""


def own_orders(site: NetworkSite, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, " F"] | None:
    """Bound |v·r − ½uᵀQu| for the whole move u of a network's input; None where that takes too long.

    Args:
        site: the network.
        v: covectors at its output, shape [F, o].
        t: the token.
    """
    step, source = site.step, site.source
    n = site.h.shape[1]
    if not v.is_cuda and n * (1 if step.gate is None else 2) > WIDEST_ON_CPU:
        return None
    cubic, quartic, third, fourth, rest = (
        x if x is None else x[0] for x in site.orders(torch.tensor([t], device=v.device))
    )
    assert cubic is not None
    assert quartic is not None
    assert rest is not None
    a = v @ site.down
    noise = gamma(len(site.down) + 16) * length(site.down.T) * length(v)[:, None]
    b, W = site.b[t], step.bent.weight
    sizes = cubic.abs() * b**3 + quartic.abs() * b**4 + rest
    if third is None or fourth is None:
        X = image(W, source.shape[t])
        Y = summed([X * X])
        by_cubes, by_squares = a * cubic, a * quartic
        left = torch.diag_embed(by_cubes)
        middle = torch.diag_embed(by_squares)
    else:
        X, Y = _gated(W, step.up.weight, source.shape[t])
        sizes = sizes + (third.abs() * b.square() + fourth.abs() * b**3) * site.b_other[t]
        left = _blocks(a * cubic, a * third / 3.0, a * third * (2.0 / 3.0))
        middle = _blocks(a * quartic, 0.5 * a * fourth, 0.5 * a * fourth)
    L = cholesky_factor(Y)
    Z = left @ L
    size = frobenius(L)
    slip = product_error(4 * len(L), 4.0 * (frobenius(left) * size).square() * frobenius(X))
    turned = Z.mT @ X @ Z
    cubes = (largest(0.5 * (turned + turned.mT)) + slip).sqrt()
    turned = L.T @ middle @ L
    slip = product_error(4 * len(L), 4.0 * size.square() * frobenius(middle))
    quartics = spectral(0.5 * (turned + turned.mT)) + slip
    box = (a.abs() + noise) @ rest + noise @ sizes + gamma(16) * (a.abs() @ sizes)
    return grow(cubes + quartics + box + length(v) * site.blur[t])


def _gated(
    W: Float[Tensor, "n d"], V: Float[Tensor, "n d"], M: Float[Tensor, "d d"]
) -> tuple[Float[Tensor, "m m"], Float[Tensor, "m m"]]:
    """Return the shapes of (g, u) and of (g², gu) for g = Wx, u = Vx and x in E(M).

    With κ² and μ² the diagonals of K and U, the terms of an entry are at most z_nz_m with Σ z² ≤ Σ κ⁴ + κ²μ² ≤ 2 tr Y:
    γ_64 of four traces of Y covers the rounding of all entries.
    """
    X = image(torch.cat((W, V)), M)
    K, U, mixed = quarters(W, V, M)
    across = K * mixed
    below = 0.5 * (K * U + mixed * mixed.mT)
    Y = torch.cat((torch.cat((K * K, across), 1), torch.cat((across.mT, below), 1)))
    return X, raised(Y, gamma(64) * 4.0 * trace(Y))


def _blocks(
    squares: Float[Tensor, "F n"], crossed: Float[Tensor, "F n"], products: Float[Tensor, "F n"]
) -> Float[Tensor, "F m m"]:
    """Return what pairs (g, u) with (g², gu): g·g², u·g² and g·gu."""
    n = squares.shape[1]
    made = squares.new_zeros(len(squares), 2 * n, 2 * n)
    place = torch.arange(n, device=squares.device)
    made[:, place, place] = squares
    made[:, n + place, place] = crossed
    made[:, place, n + place] = products
    return made
