r"""Interval arithmetic of every step of a program, rounded outward; any leading dimensions.

**Affine.** With c near the middle of the box and |x − c| ≤ r:  Wx + b ∈ Wc + b ± |W|r. Two products; the rounding of
the first, γ_n(|W||c| + |b|), rides along in the second.

**Norm.** y_k = m_k (m_k²/d + ρ_k/d + ε)^{-½} with m = Px and ρ_k = Σ_{j≠k} m_j². It grows with m_k; with ρ_k it
shrinks where m_k ≥ 0 and grows where m_k ≤ 0. So its range over m_k ∈ [m̲, m̄], ρ_k ∈ [ρ̲, ρ̄] is reached at two
corners. It is intersected with |y_k| ≤ √(d−1) (`thm:ln`), for RMSNorm √d, which hold whatever the input. Where ε = 0
and the token may be constant the norm is not defined and nothing is said.

**Scores.** Each product q_c k_c has its extremes at the corners of its rectangle. **Softmax.** `queries.weight_box`:
the vertex optimum, tightened by the simplex. **Mixing.** Exact over Δ_S ∩ [s̲, s̄] (`prop:lp_simplex`), inside
`thm:convex`.

**Activations.** ReLU, tanh and the jump of features are monotone. GELU (erf and tanh forms) and SiLU are x·Φ with Φ a
distribution function: φ' = Φ(1 + xΦ'/Φ) changes sign once, at x* < 0, because |x|Φ'/Φ grows with |x| for x < 0. So the
largest value is at an end of the interval, the smallest at an end or, if x* is inside, the global minimum.

What cannot be bounded is ±∞; NaN (∞ − ∞, 0·∞) becomes ±∞ after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.relaxations.solu import solu_box
from prooflens.models.sites import (
    Add,
    Affine,
    AnyStep,
    Elementwise,
    Function,
    Mix,
    Norm,
    Pool,
    Product,
    Rotary,
    Scores,
    Shift,
    Softcap,
    Softmax,
    Solu,
    share_heads,
)
from prooflens.numerics.rounding import TINY, UNIT_ROUNDOFF, down, gamma, up
from prooflens.queries import Box, weight_box
from prooflens.queries.outward import LIBM_ROUNDINGS, exclusive_sum, scaled_down, scaled_up, sum_down, sum_up
from prooflens.queries.simplex import output_hull

LARGEST_SQUARED = 2.0**500
"""The largest input of a norm that is squared; beyond it only the dimension bound is given."""

LEAST_VARIANCE = 2.0**-900
"""A variance plus ε below this may be 0, or lost to underflow: the norm is then treated as undefined."""

CHUNK_ELEMENTS = 2**24
"""How many products of scores are formed at a time (128 MiB per temporary)."""


def apply_step(step: AnyStep, *boxes: Box) -> Box:
    """Return a box around the step's values for all inputs in the given boxes, however they depend on each other.

    Args:
        step: the step.
        boxes: a box for each of its inputs.

    Example:
        >>> relu = Elementwise("out", ("in",), "relu")
        >>> apply_step(relu, Box(torch.tensor([-1.0]), torch.tensor([2.0]))).upper.item()
        2.0
    """
    return _finished(_apply(step, *boxes))


def _apply(step: AnyStep, *boxes: Box) -> Box:
    match step:
        case Affine():
            flat = Box(*(end.flatten(-step.in_dims) for end in boxes[0]))
            image = linear_box(flat, step.weight, step.bias)
            return Box(*(end.reshape(*end.shape[:-1], *step.out_shape) for end in image))
        case Rotary():
            return _rotary(step, boxes[0])
        case Shift():
            return _shift(boxes[0], step.offset)
        case Add():
            return _add(*boxes)
        case Norm():
            return _norm(step, boxes[0])
        case Scores():
            return _scores(step, *boxes)
        case Softmax():
            return _softmax(step.mask, boxes[0])
        case Mix():
            return _mix(*boxes)
        case Elementwise():
            return _activation(step.function, boxes[0])
        case Solu():
            return solu_box(boxes[0])
        case Softcap():
            return _softcap(step, boxes[0])
        case Product():
            return multiply(*boxes)
        case Pool():
            return _pool(step, boxes[0])


def _softcap(step: Softcap, x: Box) -> Box:
    """Bound c·tanh(x/c), which grows with x and stays between −c and c."""
    inner = Box(down(x.lower / step.cap), up(x.upper / step.cap))
    ends = _times(_activation("tanh", inner), step.cap)
    return Box(ends.lower.clamp(min=-step.cap), ends.upper.clamp(max=step.cap))


def _finished(box: Box) -> Box:
    """Remove NaN, and bounds that an overflow has put on the wrong side."""
    lower = torch.where(box.lower < torch.inf, box.lower, -torch.inf)
    upper = torch.where(box.upper > -torch.inf, box.upper, torch.inf)
    return Box(lower, upper)


def linear_box(box: Box, weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None = None) -> Box:
    """Bound Wx + b over a box of x (last dimension).

    Args:
        box: the box of x.
        weight: W, shape [o, i].
        bias: b, shape [o]; None for 0.
    """
    n = weight.shape[-1]
    c = 0.5 * box.lower + 0.5 * box.upper
    r = torch.maximum(up(box.upper - c), up(c - box.lower))
    middle = torch.nn.functional.linear(c, weight, bias)
    carried = up(r + gamma(n + 4) * c.abs())
    radius = torch.nn.functional.linear(carried, weight.abs()) * (1.0 + gamma(2 * n + 8)) + TINY
    if bias is not None:
        radius = up(radius + gamma(n + 4) * bias.abs())
    return _finished(Box(down(middle - up(radius)), up(middle + up(radius))))


def multiply(x: Box, y: Box) -> Box:
    """Return {ab | a ∈ x, b ∈ y}, element by element: the extremes lie at corners."""
    corners = torch.stack(torch.broadcast_tensors(*(a * b for a in x for b in y)))
    return Box(down(corners.amin(0)), up(corners.amax(0)))


def _times(box: Box, factor: Tensor | float) -> Box:
    ends = box.lower * factor, box.upper * factor
    return Box(down(torch.minimum(*ends)), up(torch.maximum(*ends)))


def _add(x: Box, y: Box) -> Box:
    return Box(down(x.lower + y.lower), up(x.upper + y.upper))


def _shift(box: Box, by: Tensor) -> Box:
    return Box(down(box.lower + by), up(box.upper + by))


def _rotary(step: Rotary, x: Box) -> Box:
    half = x.lower.shape[-1] // 2
    turned = Box(
        torch.cat((-x.upper[..., half:], x.lower[..., :half]), -1),
        torch.cat((-x.lower[..., half:], x.upper[..., :half]), -1),
    )
    return _add(_times(x, step.cos[:, None, :]), _times(turned, step.sin[:, None, :]))


def _centred(x: Box) -> Box:
    """Bound x_k − mean(x) = x_k − (x_k + Σ_{j≠k} x_j)/d, which grows with x_k and falls with every other."""
    d = x.lower.shape[-1]
    size = torch.maximum(x.lower.abs(), x.upper.abs())
    slack = up((size + size.sum(-1, keepdim=True) / d) * gamma(4 * d + 32)) + TINY
    total_low, total_high = x.lower.sum(-1, keepdim=True), x.upper.sum(-1, keepdim=True)
    low = x.lower - (total_high - x.upper + x.lower) / d
    high = x.upper - (total_low - x.lower + x.upper) / d
    return Box(down(low - slack), up(high + slack))


def _norm(step: Norm, x: Box) -> Box:
    m = _finished(_centred(x)) if step.centred else x
    d = x.lower.shape[-1]
    most = torch.maximum(m.lower.abs(), m.upper.abs())
    least = torch.where((m.lower <= 0) & (m.upper >= 0), 0.0, torch.minimum(m.lower.abs(), m.upper.abs()))
    least_square, most_square = scaled_down(least.square(), 1), scaled_up(most.square(), 1)
    rest_low = scaled_down(exclusive_sum(least_square), d)
    rest_high = scaled_up(exclusive_sum(most_square), d)
    limit = up(math.sqrt(d - 1 if step.centred else d))
    high = _normalised(m.upper, torch.where(m.upper >= 0, rest_low, rest_high), step.eps)
    low = _normalised(m.lower, torch.where(m.lower >= 0, rest_high, rest_low), step.eps)
    in_range = (most <= LARGEST_SQUARED).all(-1, keepdim=True)
    upper = torch.where(in_range, up(high + _NORM_ERROR * high.abs()), limit).clamp(-limit, limit)
    lower = torch.where(in_range, down(low - _NORM_ERROR * low.abs()), -limit).clamp(-limit, limit)
    variance = scaled_down(least_square.sum(-1, keepdim=True), 2 * d) / d
    defined = variance + step.eps > LEAST_VARIANCE
    y = Box(torch.where(defined, lower, -torch.inf), torch.where(defined, upper, torch.inf))
    y = y if step.weight is None else _finished(_times(y, step.weight))
    return y if step.bias is None else _shift(y, step.bias)


_NORM_ERROR = gamma(12)
"""The relative error of m(m²/d + ρ/d + ε)^{-½} from nonnegative terms: eight roundings, and those of this
correction."""


def _normalised(m: Tensor, rest: Tensor, eps: float) -> Tensor:
    return m / ((m.square() + rest) / m.shape[-1] + eps).sqrt()


def _scores(step: Scores, q: Box, k: Box) -> Box:
    n_heads = q.lower.shape[-2]
    keys = Box(*(share_heads(end, n_heads).transpose(-3, -2).unsqueeze(-3) for end in k))
    queries = Box(*(end.transpose(-3, -2).unsqueeze(-2) for end in q))
    per_row = keys.lower.numel()
    chunk = max(1, CHUNK_ELEMENTS // per_row)
    rows = []
    for start in range(0, queries.lower.shape[-3], chunk):
        some = Box(*(end[..., start : start + chunk, :, :] for end in queries))
        terms = multiply(some, keys)
        rows.append(Box(sum_down(terms.lower), sum_up(terms.upper)))
    products = Box(torch.cat([row.lower for row in rows], -2), torch.cat([row.upper for row in rows], -2))
    scores = _times(_finished(products), step.scale)
    return scores if step.bias is None else _shift(scores, step.bias)


def _softmax(mask: Bool[Tensor, "S S"] | Bool[Tensor, "H S S"], scores: Box) -> Box:
    """Bound softmax weights; rows with an infinite bound say nothing but 0 ≤ s ≤ 1."""
    present = mask.expand(scores.lower.shape)
    known = ((scores.lower.isfinite() & scores.upper.isfinite()) | ~present).all(-1, keepdim=True)
    usable = known & present
    zero = torch.zeros_like(scores.lower)
    box = weight_box(
        torch.where(usable, scores.lower, zero), torch.where(usable, scores.upper, zero), mask=present
    )
    return Box(torch.where(known, box.lower, zero), torch.where(known, box.upper, present.to(zero)))


def _mix(pattern: Box, v: Box) -> Box:
    n_heads = pattern.lower.shape[-3]
    values = Box(*(share_heads(end, n_heads).transpose(-3, -2) for end in v))
    rows = []
    for i in range(pattern.lower.shape[-2]):
        weights = Box(*(end[..., i, :] for end in pattern))
        read = (weights.upper > 0)[..., None]
        # A value that gets no weight for certain takes no part, even if nothing is known of it.
        some = Box(*(torch.where(read, end, 0.0) for end in values))
        rows.append(Box(*output_hull(*weights, *some)))
    return Box(torch.stack([row.lower for row in rows], -3), torch.stack([row.upper for row in rows], -3))


def _pool(step: Pool, x: Box) -> Box:
    read = step.weights.nonzero()[:, 0]
    chosen = Box(*(end[..., read, :].mT for end in x))
    return Box(*(end[..., 0] for end in linear_box(chosen, step.weights[read][None, :])))


class _Dip(NamedTuple):
    """A φ of the form x·Φ(x): where it turns, how low it gets, and left of which x only φ(x) ≤ φ ≤ 0 is used."""

    left: float
    right: float
    least: float
    floor: float
    value: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Return φ(x) for x ≥ floor, and a bound of its relative error."""


def _logistic(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return x/(1 + e^{−y}) and its error, for a y known to 8 roundings.

    e^{−y} errs by 8|y|u and its own, which matters for y < 0 only.
    """
    error = (2.0 * LIBM_ROUNDINGS + 16.0 + 16.0 * (-y).clamp(min=0.0)) * UNIT_ROUNDOFF
    return x / (1.0 + (-y).exp()), error


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    return _logistic(x, x)


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ½x(1 + tanh g) = x/(1 + e^{−2g}), g = √(2/π)(x + 0.044715x³), and its error."""
    return _logistic(x, 2.0 * math.sqrt(2.0 / math.pi) * x * (1.0 + 0.044715 * x.square()))


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ½x erfc(t) and its error, t = −x/√2 to 3 roundings.

    |d log erfc/d log t| ≤ 2t² + 1 for t > 0 and ≤ 1 for t < 0; the first because erfc t ≥ 2e^{−t²}/(√π(t + √(t²+2))).
    erfc is trusted to 8 ulp (CUDA documents 5).
    """
    t = -x * math.sqrt(0.5)
    error = (4.0 * LIBM_ROUNDINGS + 16.0 + 8.0 * t.clamp(min=0.0).square()) * UNIT_ROUNDOFF
    return 0.5 * x * torch.erfc(t), error


DIPS: dict[Function, _Dip] = {
    "gelu": _Dip(-0.7517915247, -0.7517915246, -0.1699712074799037, -36.0, _gelu),
    "gelu_tanh": _Dip(-0.7524614221, -0.7524614220, -0.1700407505712541, -20.0, _gelu_tanh),
    "silu": _Dip(-1.2784645428, -1.2784645427, -0.27846454276107385, -600.0, _silu),
}
"""left < x* < right and least ≤ φ(x*); the tests check them with ball arithmetic."""


def _activation(function: Function, x: Box) -> Box:
    if function == "relu":
        return Box(x.lower.clamp(min=0.0), x.upper.clamp(min=0.0))
    if function == "jump":
        return Box((x.lower > 0.0).to(x.lower), (~(x.upper <= 0.0)).to(x.upper))
    if function == "relu2":
        low, high = (end.clamp(min=0.0).square() for end in x)
        return Box(down(low).clamp(min=0.0), torch.where(x.upper > 0.0, up(high), 0.0))
    if function == "tanh":
        low, high = x.lower.tanh(), x.upper.tanh()
        error = (LIBM_ROUNDINGS + 2) * UNIT_ROUNDOFF
        lower, upper = down(low - error * low.abs()), up(high + error * high.abs())
        return Box(lower.clamp(min=-1.0), upper.clamp(max=1.0))
    dip = DIPS[function]
    at_lower, at_upper = _at(dip, x.lower), _at(dip, x.upper)
    falling, rising = x.upper < dip.left, x.lower > dip.right
    least = torch.where(falling, at_upper.lower, torch.where(rising, at_lower.lower, dip.least))
    return Box(least.clamp(min=dip.least), torch.maximum(at_lower.upper, at_upper.upper))


def _at(dip: _Dip, x: Tensor) -> Box:
    """Enclose φ at the ends of intervals; left of the floor φ falls, so it lies between φ(floor) and 0."""
    value, error = dip.value(x.clamp(min=dip.floor))
    error = error * value.abs()
    return Box(down(value - error), torch.where(x < dip.floor, 0.0, up(value + error)))
