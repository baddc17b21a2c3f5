r"""An interval for the Jacobian over a whole region: forward-mode differentiation of the program, mid ± rad.

    ∂x/∂α(α) ∈ mid ± rad   for every α ∈ [−1,1]^p,

step by step, with the ranges of scores, weights, values and variances that `cpz` proves over the same region: the
local derivative bounds that soundness.md (row 3) asks for, as attention has no global Lipschitz constant.

- scores:   d(q·k) = dq·k + q·dk;
- softmax:  ds_j = s_j (da_j − Σ_k s_k da_k), and Σ_k s_k da_k = c + Σ_k s_k (da_k − c) for any c, as Σ s = 1;
- mixing:   dz = Σ_j ds_j (v_j − v̄) + Σ_j s_j dv_j for any v̄, as Σ ds = 0;
- norm:     dy = γ n (dm − ŷ (ŷ·dm)/d), m = Px, n = (‖m‖²/d + ε)^{-½}, ŷ = m n, n bounded by the variance's range;
- φ(x):     φ'(x) dx, φ' on a grid of step h errs by at most ½h sup|φ''| between its points.

Every rad carries γ_n times the absolute-value chain of its mid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.activations import CELLS, CURVATURE, LIBM
from prooflens.engines.relaxations.affine import through_affine, through_rotary
from prooflens.engines.tensor_sets.products import bilinear
from prooflens.engines.tensor_sets.tensor_set import TensorSet
from prooflens.models import sites
from prooflens.models.program import INPUT, Program
from prooflens.models.sites import (
    ACTIVATIONS,
    Affine,
    AnyStep,
    Function,
    Mix,
    Norm,
    Rotary,
    Scores,
    Softmax,
    share_heads,
)
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.queries.simplex import Box
from prooflens.queries.weights import weight_box


@dataclass(frozen=True, eq=False)
class Slope:
    """Derivatives by all factors as mid ± rad, the factors first."""

    mid: Float[Tensor, " p *shape"]
    rad: Float[Tensor, " p *shape"]

    @property
    def size(self) -> Float[Tensor, " p *shape"]:
        """|mid| + rad."""
        return (self.mid.abs() + self.rad) * (1.0 + gamma(4))

    def linear(self, f: Callable[[Tensor], Tensor], size: Callable[[Tensor], Tensor], n: int) -> Slope:
        """Return the image under a linear map.

        Args:
            f: the map.
            size: the map with absolute values.
            n: the length of its longest sum.
        """
        rad = (size(self.rad) + gamma(n + 8) * size(self.size)) * (1.0 + gamma(n + 8)) + TINY
        return Slope(f(self.mid), rad)

    def times(self, x: Box, f: Callable[[Tensor, Tensor], Tensor], n: int) -> Slope:
        """Return a bilinear f(slope, x) for an x that lies in a box.

        Args:
            x: the box.
            f: the bilinear map.
            n: the length of its longest sum.
        """
        middle, radius = _mid_rad(x)
        far = middle.abs() + radius
        rad = f(self.mid.abs(), radius) + f(self.rad, far) + gamma(n + 8) * f(self.size, far)
        return Slope(f(self.mid, middle), rad * (1.0 + gamma(n + 16)) + TINY)

    def __add__(self, other: Slope) -> Slope:
        rad = self.rad + other.rad + gamma(2) * (self.size + other.size)
        return Slope(self.mid + other.mid, rad * (1.0 + gamma(4)))


def _mid_rad(x: Box) -> tuple[Tensor, Tensor]:
    middle = 0.5 * x.lower + 0.5 * x.upper
    return middle, up(torch.maximum(x.upper - middle, middle - x.lower)) + TINY


def interval_jacobian(
    program: Program, sets: dict[str, TensorSet], generators: Float[Tensor, "p S d"], name: str
) -> Slope:
    """Enclose the Jacobian of a value by the factors over a whole region.

    Args:
        program: the steps of the model.
        sets: sets of all values over the region.
        generators: the region's generators, shape [p, S, d].
        name: the value to differentiate.
    """
    live = {INPUT: Slope(generators, torch.zeros_like(generators))}
    for step in program.steps:
        live[step.out] = _apply(step, sets, *(live[source] for source in step.inputs))
    return live[name]


def _apply(step: AnyStep, sets: dict[str, TensorSet], *slopes: Slope) -> Slope:
    x = slopes[0]
    ranges = [sets[source].hull() for source in step.inputs]
    match step:
        case Affine():
            return x.linear(
                through_affine(step, step.weight),
                through_affine(step, step.weight.abs()),
                step.weight.shape[1],
            )
        case Rotary():
            return x.linear(step, through_rotary(step), 3)
        case sites.Shift():
            return x
        case sites.Add():
            return slopes[0] + slopes[1]
        case Scores():
            return _scores(step, slopes, ranges)
        case Softmax():
            return _weights_slope(step.mask, x, sets[step.out].hull())
        case Mix():
            return _mix(slopes, ranges)
        case Norm():
            return _norm(step, x, sets[step.inputs[0]], sets[step.out].hull())
        case sites.Elementwise():
            return x.times(_derivative(step.function, ranges[0]), torch.mul, 1)
        case sites.Solu():
            return _solu(x, ranges[0])
        case sites.Softcap():
            inner = Box(down(ranges[0].lower / step.cap), up(ranges[0].upper / step.cap))
            return x.times(_derivative("tanh", inner), torch.mul, 1)
        case sites.Product():
            return slopes[0].times(ranges[1], torch.mul, 1) + slopes[1].times(ranges[0], torch.mul, 1)
        case sites.Pool():
            weights = step.weights
            return x.linear(step, lambda t: torch.einsum("s,...sd->...d", weights.abs(), t), len(weights))


def _scores(step: Scores, slopes: tuple[Slope, ...], ranges: list[Box]) -> Slope:
    (dq, dk), (q, k) = slopes, ranges
    n_heads, d_head = q.lower.shape[-2:]
    dk = Slope(share_heads(dk.mid, n_heads), share_heads(dk.rad, n_heads))
    k = Box(*(share_heads(end, n_heads) for end in k))
    by_q = dq.times(k, lambda a, b: torch.einsum("pihc,jhc->phij", a, b), d_head)
    by_k = dk.times(q, lambda a, b: torch.einsum("pjhc,ihc->phij", a, b), d_head)
    return (by_q + by_k).linear(lambda t: t * step.scale, lambda t: t * step.scale, 1)


def _weights_slope(mask: Tensor, da: Slope, s: Box) -> Slope:
    present = mask.to(da.mid)
    da = da.linear(lambda t: t * present, lambda t: t * present, 1)
    middle, radius = _mid_rad(s)
    S = middle.shape[-1]
    c = (middle * da.mid).sum(-1, keepdim=True) / middle.sum(-1, keepdim=True)
    off = (da.mid - c) * present
    pull = c + (middle * off).sum(-1, keepdim=True)
    spread = (radius * off.abs() + (middle + radius) * da.rad).sum(-1, keepdim=True)
    size = ((middle + radius) * (da.size + c.abs())).sum(-1, keepdim=True) + c.abs()
    rad = da.rad + (spread + gamma(4 * S + 32) * (size + da.size)) * (1.0 + gamma(4 * S + 32))
    return Slope(da.mid - pull, rad).times(s, torch.mul, 1)


def _solu(dx: Slope, x: Box) -> Slope:
    """dy = s dx + x ds with s = softmax(x): the rules of a product and of a softmax without a mask."""
    weights = weight_box(*x)
    everyone = torch.ones(x.lower.shape[-1], dtype=torch.bool, device=x.lower.device)
    ds = _weights_slope(everyone, dx, weights)
    return dx.times(weights, torch.mul, 1) + ds.times(x, torch.mul, 1)


def _mix(slopes: tuple[Slope, ...], ranges: list[Box]) -> Slope:
    (ds, dv), (s, v) = slopes, ranges
    n_heads = s.lower.shape[0]
    dv = Slope(share_heads(dv.mid, n_heads), share_heads(dv.rad, n_heads))
    values = Box(*(share_heads(end, n_heads).transpose(-3, -2) for end in v))
    s_mid, _ = _mid_rad(s)
    v_mid, _ = _mid_rad(values)
    around = torch.einsum("hij,hjc->hic", s_mid, v_mid)[:, :, None]
    apart = Box(down(values.lower[:, None] - around), up(values.upper[:, None] - around))
    n = s_mid.shape[-1]
    by_weight = ds.times(apart, lambda a, b: torch.einsum("phij,hijc->pihc", a, b), n)
    by_value = dv.times(s, lambda a, b: torch.einsum("pjhc,hij->pihc", a, b), n)
    return by_weight + by_value


def _norm(step: Norm, dx: Slope, x: TensorSet, y: Box) -> Slope:
    if x.c.ndim == 3:  # head by head: every head of a token is a token of its own
        heads = x.c.shape[-2]

        def flat(t: Tensor) -> Tensor:
            return t.flatten(-3, -2)

        made = _norm(step, dx.linear(flat, flat, 0), x.linear(flat, flat, 0), Box(*map(flat, y)))
        return made.linear(lambda t: t.unflatten(-2, (-1, heads)), lambda t: t.unflatten(-2, (-1, heads)), 0)
    d = x.c.shape[-1]
    dm, m = dx, x
    if step.centred:
        centre, size = (lambda t: t - t.mean(-1, keepdim=True)), (lambda t: t + t.mean(-1, keepdim=True))
        dm, m = dx.linear(centre, size, d + 4), x.linear(centre, size, d + 4)
    v = bilinear(m, m, "sc,sc->s", len(m.L), d).scaled(1.0 / d).hull()
    low = down(v.lower.clamp(min=0.0) + step.eps * (1.0 - gamma(4)))
    high = up(v.upper.clamp(min=0.0) + step.eps * (1.0 + gamma(4)))
    n = Box(down(high.rsqrt() * (1.0 - LIBM)), up(low.rsqrt() * (1.0 + LIBM)))
    unit = _unit_range(step, m.hull(), n, y, d)
    along = dm.times(unit, lambda a, b: (a * b).sum(-1), d).linear(lambda t: t / d, lambda t: t / d, 1)
    radial = along.times(unit, lambda a, b: a[..., None] * b, 1)
    across = dm + radial.linear(lambda t: -t, lambda t: t, 0)
    made = across.times(n, lambda a, b: a * b[:, None], 1)
    if step.weight is None:
        return made
    weight = step.weight
    return made.linear(lambda t: t * weight, lambda t: t * weight.abs(), 1)


def _unit_range(step: Norm, m: Box, n: Box, y: Box, d: int) -> Box:
    """Bound ŷ = m n by the two ranges, by the range of the norm's output where γ ≠ 0, and by |ŷ| ≤ √d."""
    corners = torch.stack([a * b[:, None] for a in m for b in n])
    limit = up(math.sqrt(d))
    low, high = down(corners.amin(0)).clamp(min=-limit), up(corners.amax(0)).clamp(max=limit)
    weight = torch.ones_like(low) if step.weight is None else step.weight.expand(low.shape)
    bias = torch.zeros_like(low) if step.bias is None else step.bias.expand(low.shape)
    usable = weight != 0
    divisor = torch.where(usable, weight, torch.ones_like(weight))
    ends = torch.stack((down(y.lower - bias) / divisor, up(y.upper - bias) / divisor))
    low = torch.where(usable, torch.maximum(low, down(ends.amin(0))), low)
    return Box(low, torch.where(usable, torch.minimum(high, up(ends.amax(0))), high))


def _derivative(function: Function, x: Box) -> Box:
    """Bound φ' over intervals."""
    if function == "jump":
        # With the jump in reach no slope is a bound: NaN goes on to every value that reads it, and is no bound there.
        still = (x.lower > 0) | (x.upper <= 0)
        none = torch.where(still, 0.0, torch.full_like(x.lower, torch.nan))
        return Box(none, none)
    if function == "relu":
        return Box((x.lower > 0).to(x.lower), (x.upper >= 0).to(x.lower))
    share = torch.linspace(0.0, 1.0, CELLS + 1, dtype=x.lower.dtype, device=x.lower.device)
    points = x.lower + (x.upper - x.lower) * share.reshape(-1, *(1 for _ in x.lower.shape))
    with torch.enable_grad():
        leaf = points.detach().requires_grad_()
        (slope,) = torch.autograd.grad(ACTIVATIONS[function](leaf).sum(), leaf)
    cell = (x.upper - x.lower) / CELLS + gamma(16) * (x.lower.abs() + x.upper.abs())
    between = 0.5 * CURVATURE[function] * cell * (1.0 + gamma(8)) + LIBM * (1.0 + points.abs().amax(0))
    return Box(down(slope.amin(0) - between), up(slope.amax(0) + between))
