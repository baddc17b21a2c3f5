r"""SoLU, y_k = x_k s_k with s = softmax(x) over a token's neurons: its first order around a point, and what is beyond.

Around c with |x − c| ≤ r, write b = x − c, s⁰ = softmax(c), b̃ = b − Σ s⁰b. As in `tensor_sets.steps`,

    s_k = s⁰_k (1 + b̃_k + ρ_k),    ρ_k = (e^{b̃_k} − 1 − b̃_k)/Z − (1 + b̃_k)(Z − 1)/Z,    Z = Σ s⁰e^{b̃} ≥ 1,

and therefore, with no more than the product written out,

    y_k = s⁰_k (c_k + b_k + c_k b̃_k)  +  s⁰_k (b_k b̃_k + x_k ρ_k).

The first part is affine: s⁰_k c_k + (slope_k b_k − pull_k Σ s⁰b) with slope = s⁰(1 + c), pull = s⁰c. For the second,
|b̃_k| ≤ w_k = (1 − s⁰_k) r_k + Σ_{l≠k} s⁰_l r_l, e^x − 1 − x ≤ E_k = w²/2 + e^w w³/6 for |x| ≤ w, and Z − 1 ≤ ζ = Σ s⁰E
because Σ s⁰b̃ = 0. So with ω = ζ/(1 + ζ)

    |ρ_k| ≤ max(E_k + max(0, w_k − 1) ω, (1 + w_k) ω),      |rest_k| ≤ s⁰_k (r_k w_k + (|c_k| + r_k) |ρ_k|).

**Rounding.** Computed weights differ from s⁰ by a share η ≤ (2t + 4n + 64)u and `LIBM_ROUNDINGS`, t the largest
distance of a neuron below the largest one (the exponent's own rounding), or by less than 2⁻⁹⁰⁰ where they vanish.
Slope, pull and value are used as computed; η times the sizes of all terms that they stand for is added to the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.numerics.rounding import TINY, UNIT_ROUNDOFF, down, gamma, up
from prooflens.queries import Box, weight_box
from prooflens.queries.outward import LIBM_ROUNDINGS

WIDEST = 300.0
"""Moves of a neuron beyond this are not given to exponentials: nothing is said of what is beyond first order there."""

LARGEST = 2.0**300
"""Neurons beyond this are not expanded: products of three of their size stay finite below."""

VANISHED = 2.0**-900
"""More than what a weight can lose to underflow."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """y_k ∈ value_k + slope_k b_k − pull_k Σ_l weight_l b_l ± rest_k for all x = center + b with |b| ≤ r.

    Attributes:
        center: c.
        radius: r.
        weight: the weights at the centre, as computed.
        value: y at the centre, as computed.
        slope: the factor of a neuron's own move.
        pull: the factor of the mean move.
        rest: what is beyond first order, rounding of the affine part's coefficients included; ∞ where nothing is known.
        size: the absolute-value chain of the affine part, for rounding when it is evaluated.
    """

    center: Float[Tensor, "... n"]
    radius: Float[Tensor, "... n"]
    weight: Float[Tensor, "... n"]
    value: Float[Tensor, "... n"]
    slope: Float[Tensor, "... n"]
    pull: Float[Tensor, "... n"]
    rest: Float[Tensor, "... n"]
    size: Float[Tensor, "... n"]

    def linear(self, b: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        """Return the linear part at a move.

        Args:
            b: x − c, any leading dimensions.
        """
        return self.slope * b - self.pull * (self.weight * b).sum(-1, keepdim=True)

    def linear_size(self, b: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        """Return the linear part with absolute values.

        Args:
            b: sizes of moves, not negative.
        """
        return self.slope.abs() * b + self.pull.abs() * (self.weight * b).sum(-1, keepdim=True)

    def back(self, A: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        """Return the transposed linear part of covectors.

        Args:
            A: covectors of y.
        """
        return self.slope * A - self.weight * (self.pull * A).sum(-1, keepdim=True)


def expansion(box: Box) -> Expansion:
    """Expand SoLU around the middle of a box.

    Args:
        box: a box of the neurons, shape [..., n].

    Example:
        >>> x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
        >>> made = expansion(Box(x - 0.01, x + 0.01))
        >>> bool((made.rest < 1e-3).all())
        True
    """
    known = (box.lower.isfinite() & box.upper.isfinite()).all(-1, keepdim=True)
    low, high = (torch.where(known, end, 0.0) for end in box)
    c = 0.5 * low + 0.5 * high
    r = torch.maximum(up(high - c), up(c - low))
    n = c.shape[-1]
    most = c.amax(-1, keepdim=True)
    s = torch.softmax(c, -1)
    far = (most - c).amax(-1, keepdim=True)
    eta = (2.0 * far + 4.0 * n + 64.0 + 4.0 * LIBM_ROUNDINGS) * UNIT_ROUNDOFF
    mean = (s * r).sum(-1, keepdim=True)
    # (1 − s)r + Σ_{l≠k} s r: what the subtractions cancel rounds by γ of r and of the mean.
    w = (1.0 - s).clamp(min=0.0) * r + (mean - s * r).clamp(min=0.0)
    w = w + (gamma(2 * n + 16) + 4.0 * eta) * (r + mean) + TINY
    usable = (w <= WIDEST) & (c.abs() <= LARGEST) & known & (far <= LARGEST)
    usable = usable.all(-1, keepdim=True)
    w = torch.where(usable, w, 0.0)
    E = 0.5 * w.square() + w.exp() * w**3 / 6.0
    zeta = (s * E).sum(-1, keepdim=True) * (1.0 + gamma(2 * n + 64) + 4.0 * eta)
    omega = zeta / (1.0 + zeta)
    rho = torch.maximum(E + (w - 1.0).clamp(min=0.0) * omega, (1.0 + w) * omega)
    x = c.abs() + r
    rest = s * (r * w + x * rho)
    size = s * (c.abs() + (1.0 + c.abs()) * (r + mean))
    # `rest` has fewer than 2n + 64 roundings and those of its weights; `size` counts the coefficients' errors.
    grown = (rest + size * 4.0 * (eta + gamma(16))) * (1.0 + gamma(2 * n + 128) + 8.0 * eta)
    lost = VANISHED * (1.0 + x + r) * (1.0 + rho + w)
    rest = torch.where(usable, up(grown + lost) + TINY, torch.inf)
    return Expansion(c, r, s, c * s, s * (1.0 + c), s * c, rest, size)


def solu_box(box: Box) -> Box:
    """Bound SoLU over a box: the product of neurons and weights, cut by the expansion's range.

    Args:
        box: a box of the neurons, shape [..., n].
    """
    known = (box.lower.isfinite() & box.upper.isfinite()).all(-1, keepdim=True)
    inner = Box(*(torch.where(known, end, 0.0) for end in box))
    weights = weight_box(*inner)
    s = Box(torch.where(known, weights.lower, 0.0), torch.where(known, weights.upper, 1.0))
    corners = torch.stack([a * b for a in box for b in s])
    # 0·∞: a weight that vanishes times a neuron without a bound; the other corner says that nothing is known.
    low, high = (
        down(corners.nan_to_num(0.0, torch.inf, -torch.inf).amin(0)),
        up(corners.nan_to_num(0.0, torch.inf, -torch.inf).amax(0)),
    )
    e = expansion(box)
    own = (e.slope - e.pull * e.weight).abs() * e.radius
    others = ((e.weight * e.radius).sum(-1, keepdim=True) - e.weight * e.radius).clamp(min=0.0)
    n = e.center.shape[-1]
    spread = own + e.pull.abs() * others + gamma(4 * n + 64) * (e.size + e.value.abs())
    reach = up(up(spread) * (1.0 + gamma(16)) + e.rest)
    return Box(torch.maximum(low, down(e.value - reach)), torch.minimum(high, up(e.value + reach)))
