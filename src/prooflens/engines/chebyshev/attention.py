"""Scores and softmax, with tokens that move and tokens that do not.

Keys are those of the tokens in front that do not move (`Prefix`: values and radii), then those that are walked. A
score q·k is a product of two polynomials, and (P_q + e_q)·(P_k + e_k) − P_q·P_k = k·e_q + q·e_k + e_q·e_k. Softmax is
analytic while the exponentials of a row do not cancel; along scores that move by w its second derivative is
p_j((w_j − w̄)² − var w).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.chebyshev.analytic import second
from prooflens.engines.chebyshev.values import Piece, Value
from prooflens.engines.relaxations.activations import LIBM
from prooflens.engines.relaxations.derivatives import SECOND
from prooflens.engines.relaxations.ellipsoids import trace
from prooflens.engines.relaxations.norms import GROWTH, UNDERFLOW, frobenius, grow, length, product_error
from prooflens.models.sites import Scores, Softcap, share_heads
from prooflens.numerics import gamma

LEAST = 2.0**-1021
"""What a weight may be that is computed as 0, or with fewer digits than others have."""

FAR = 300.0
"""Scores that move further are not given to exponentials."""

TURN = 1.57
"""Below π/2: an exponential has a positive real part while its score turns no further than this."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of one layer of tokens that do not move, with radii of their errors.

    Attributes:
        k: keys, shape [P, G, c].
        v: values, shape [P, G, c].
        k_error: a bound of ‖e_k‖₂, shape [P, G].
        v_error: a bound of ‖e_v‖₂, shape [P, G].
    """

    k: Float[Tensor, "P G c"]
    v: Float[Tensor, "P G c"]
    k_error: Float[Tensor, "P G"]
    v_error: Float[Tensor, "P G"]

    @classmethod
    def of(cls, k: Value, v: Value) -> Prefix:
        """Keep keys and values of a walk without factors."""
        kept = []
        for value in (k, v):
            runs = value.runs[0, 0].unflatten(-1, (value.heads, -1))
            kept.append((runs, grow(trace(value.blocks()[0]).sqrt())))
        return cls(kept[0][0], kept[1][0], kept[0][1], kept[1][1])


@dataclass(eq=False)
class ScoreValue:
    """Scores of all heads on a piece: P_s and bounds of their errors.

    Attributes:
        piece: the grid and the atoms.
        runs: scores at the points of the grid, shape [b, N, H, T, K].
        error: sup |ε|, shape [b, H, T, K].
        beyond: how much of ε is not its linear part at the centre.
        slope: dε/d(q·k) at the centre: the scale, times the cap's slope if there is one.
        q: queries.
        k: keys of the tokens that are walked.
        mask: which keys take part, shape [T, K].
    """

    piece: Piece
    runs: Float[Tensor, "b N H T K"]
    error: Float[Tensor, "b H T K"]
    beyond: Float[Tensor, "b H T K"]
    slope: Float[Tensor, "b H T K"]
    q: Value
    k: Value
    mask: Bool[Tensor, "T K"]
    prefix: Prefix | None


def heads_of(value: Value, tensor: Tensor) -> Tensor:
    """Split the last dimension into heads."""
    found: Tensor = tensor.unflatten(-1, (value.heads, -1))
    return found


def _quadratic(M: Float[Tensor, "b s h c d"], w: Float[Tensor, "b m t h c"]) -> Float[Tensor, "b m h s t"]:
    """√(wᵀMw) for every matrix of a head with every vector of it."""
    square = torch.einsum("bshcd,bmthc,bmthd->bmhst", M, w, w).clamp(min=0.0)
    size = torch.einsum("bsh,bmth->bmhst", frobenius(M), w.square().sum(-1))
    return (square + product_error(4 * w.shape[-1], 2.0 * size) + UNDERFLOW).sqrt().mul_(GROWTH)


def scores(step: Scores, q: Value, k: Value, tokens: slice, prefix: Prefix | None) -> ScoreValue:
    """a = scale · q·k + bias, for the queries that are walked and all keys.

    Args:
        step: scale, bias and mask.
        q: queries of the tokens that are walked.
        k: their keys.
        tokens: which tokens these are.
        prefix: keys of the tokens in front, which do not move; None for none.
    """
    grid = q.piece.grid
    H = q.heads
    rows = heads_of(q, q.runs)
    keys = share_heads(heads_of(k, k.runs), H)
    q_coefficients, q_off = (heads_of(q, part) for part in q.coefficients)
    k_coefficients, k_off = (share_heads(heads_of(k, part), H) for part in k.coefficients)
    Mq, Mk = q.blocks(), share_heads(k.blocks().flatten(-2), H).unflatten(-1, (rows.shape[-1], -1))
    eq, ek = grow(trace(Mq).sqrt()), grow(trace(Mk).sqrt())
    # own errors of q and k are in the ellipsoids, but move no atom: they count as beyond the linear part
    q_own, k_own = heads_of(q, q.box), share_heads(heads_of(k, k.box), H)
    scale = abs(step.scale)
    along_q = _quadratic(Mq, k_coefficients)
    along_k = _quadratic(Mk, q_coefficients).mT
    both = torch.einsum("bih,bjh->bhij", eq, ek)
    slack = torch.einsum("bih,bjh->bhij", eq, length(k_off)) + torch.einsum(
        "bih,bjh->bhij", length(q_off), ek
    )
    beyond = along_q[:, 1:].sum(1) + along_k[:, 1:].sum(1) + both + grid.size * slack
    own = torch.einsum("bihc,bjhc->bhij", q_own, k_coefficients[:, 0].abs())
    own = own + torch.einsum("bihc,bjhc->bhij", q_coefficients[:, 0].abs(), k_own)
    error = along_q[:, 0] + along_k[:, 0] + beyond
    beyond = beyond + own
    far_q = grid.on_ellipses(q_coefficients.abs(), q_off)
    far_k = grid.on_ellipses(k_coefficients.abs(), k_off)
    defect = grid.defect(
        torch.einsum("xrbihc,xrbjhc->xrbhij", far_q, far_k),
        torch.einsum("bihc,bjhc->bhij", heads_of(q, q.moves), share_heads(heads_of(k, k.moves), H)),
    )
    runs = torch.einsum("bnihc,bnjhc->bnhij", rows, keys)
    sizes = torch.einsum("bih,bjh->bhij", length(rows).amax(1), length(keys).amax(1))
    if prefix is not None:
        fixed = share_heads(prefix.k, H)
        runs = torch.cat((torch.einsum("bnihc,jhc->bnhij", rows, fixed), runs), -1)
        most = length(grow(heads_of(q, q.most))) + eq
        around = torch.einsum("bih,jh->bhij", most, share_heads(prefix.k_error[..., None], H)[..., 0])
        linear = _quadratic(Mq, fixed[None, None].expand(len(Mq), -1, -1, -1, -1))[:, 0]
        fixed_own = torch.einsum("bihc,jhc->bhij", q_own, fixed.abs())
        error = torch.cat((linear + around, error), -1)
        beyond = torch.cat((around + fixed_own, beyond), -1)
        defect = torch.cat((torch.zeros_like(around), defect), -1)
        sizes = torch.cat((torch.einsum("bih,jh->bhij", length(rows).amax(1), length(fixed)), sizes), -1)
    runs = runs * step.scale
    rounding = sizes * scale
    if step.bias is not None:
        bias = step.bias[:, tokens]
        runs = runs + bias
        rounding = rounding + bias.abs()
    rounding = grid.lebesgue * gamma(rows.shape[-1] + 16) * rounding + scale * defect
    slope = torch.full_like(error, step.scale)
    mask = step.mask[..., tokens, :]
    return ScoreValue(
        q.piece,
        runs,
        grow(scale * error + rounding),
        grow(scale * beyond + rounding),
        slope,
        q,
        k,
        mask,
        prefix,
    )


def capped(step: Softcap, given: ScoreValue) -> ScoreValue:
    """c·tanh(a/c)."""
    grid, cap = given.piece.grid, step.cap
    coefficients, off = grid.coefficients(given.runs)
    c0, R = coefficients[:, 0], grid.moves(coefficients, off)
    runs = step(given.runs)
    fine = grid.finer
    places, loose = fine.at(given.runs)
    far = fine.grid.on_ellipses(fine.padded(coefficients).abs(), off) / cap
    plain = 0.5 * SECOND["tanh"] * (R / cap).square()
    defect = cap * fine.grid.defect(0.5 * far.square() * second("tanh", c0 / cap, far), plain)
    defect = defect + fine.apart(runs, step(places)) + fine.grid.lebesgue * (loose + LIBM * cap)
    flat = 1.0 - torch.tanh(c0 / cap).square()
    change = grow(SECOND["tanh"] / cap * (R + given.error)) + LIBM
    rounding = grid.lebesgue * LIBM * (given.runs.abs() + runs.abs()).amax(1) + defect
    error = grow(given.error + rounding)
    beyond = grow(flat * given.beyond + change * given.error + rounding)
    return ScoreValue(
        given.piece, runs, error, beyond, given.slope * flat, given.q, given.k, given.mask, given.prefix
    )


@dataclass(eq=False)
class Weights:
    """Attention weights on a piece.

    Attributes:
        scores: the scores that they are made of.
        runs: softmax of the scores at the points of the grid.
        center: p at the centre, 0 where masked.
        most: sup p(x).
        change: sup |p(x) − p₀|.
        defect: how far the interpolant is from the softmax of the interpolated scores.
    """

    scores: ScoreValue
    runs: Float[Tensor, "b N H T K"]
    center: Float[Tensor, "b H T K"]
    most: Float[Tensor, "b H T K"]
    change: Float[Tensor, "b H T K"]
    defect: Float[Tensor, "b H T K"]


def softmax(given: ScoreValue) -> Weights:
    """Softmax of every row; only differences of scores count, so each row is taken relative to its mean."""
    grid, mask = given.piece.grid, given.mask
    runs = torch.softmax(given.runs.masked_fill(~mask, -torch.inf), -1)
    base = grid.coefficients(given.runs)[0][:, 0].masked_fill(~mask, -torch.inf)
    middle = torch.softmax(base, -1)
    plain = given.runs.masked_fill(~mask, 0.0)
    shifted = plain - (middle[:, None] * plain).sum(-1, keepdim=True)
    coefficients, off = grid.coefficients(shifted.masked_fill(~mask, 0.0))
    K = mask.shape[-1]
    # differences of scores round by a few units of the largest score
    off = off + gamma(K + 8) * plain.abs().amax(1).amax(-1, keepdim=True)
    p0 = torch.softmax(coefficients[:, 0].masked_fill(~mask, -torch.inf), -1)
    lift = weight_lift(coefficients[:, 0])
    R = grid.moves(coefficients, off)
    most, change = weight_range(p0, grow(R + given.error).masked_fill(~mask, 0.0), lift)
    fine = grid.finer
    places, loose = fine.at(shifted)
    apart = fine.apart(runs, torch.softmax(places.masked_fill(~mask, -torch.inf), -1)).masked_fill(~mask, 0.0)
    apart = apart + fine.grid.lebesgue * 2.0 * loose.amax(-1, keepdim=True) * most
    far = fine.grid.on_ellipses(fine.padded(coefficients).abs(), off).masked_fill(~mask, 0.0)
    top, known = weights_on_discs(p0, far, lift)
    bound = torch.where(known, second_order(top, far.clamp(max=FAR)), torch.inf)
    real = second_order(most, R.masked_fill(~mask, 0.0))
    defect = fine.grid.defect(bound, real) + apart
    size = 1.0 + plain.abs().amax(1).amax(-1, keepdim=True)
    rounding = grid.lebesgue * (gamma(K + 128) * size * runs.amax(1) + LEAST)
    defect = grow(defect + rounding).masked_fill(~mask, 0.0)
    return Weights(given, runs, p0, most.masked_fill(~mask, 0.0), change.masked_fill(~mask, 0.0), defect)


def weight_lift(scores: Float[Tensor, "*b K"]) -> Float[Tensor, "*b 1"]:
    """Return by which factor a computed weight may be off, more than twice over.

    Args:
        scores: what the softmax was taken of.
    """
    return (1.0 + LIBM * (2.0 + scores.abs().amax(-1, keepdim=True))) ** 2


def weight_range(
    p0: Float[Tensor, "*b K"], r: Float[Tensor, "*b K"], lift: Float[Tensor, "*b 1"]
) -> tuple[Float[Tensor, "*b K"], Float[Tensor, "*b K"]]:
    """Bound weights, and how far they may be from p₀, where scores move by at most r.

    A weight that underflows is none of its own, and e^r brings it back.

    Args:
        p0: weights at the centre, as computed.
        r: how far each score may move.
        lift: by which factor p₀ may be off.
    """
    big, small = torch.exp(r) * (1.0 + LIBM), torch.exp(-r) * (1.0 - LIBM)
    most = grow((p0 + LEAST) * big / (p0 * small).sum(-1, keepdim=True)).clamp(max=1.0) * lift
    least = p0 * small / (p0 * big).sum(-1, keepdim=True) / lift * (1.0 - 2.0**-32)
    return most, grow(torch.maximum(most - p0, p0 - least)) + gamma(8) * p0


def weights_on_discs(
    p0: Float[Tensor, "*b K"], far: Float[Tensor, "k r *b K"], lift: Float[Tensor, "*b 1"]
) -> tuple[Float[Tensor, "k r *b K"], Bool[Tensor, "k r *b K"]]:
    """Bound |p| where scores move in complex discs, and say where that is known: the sum of exponentials is not 0.

    Args:
        p0: weights at the centre, as computed.
        far: the radii of the discs.
        lift: by which factor p₀ may be off.
    """
    sure = far.clamp(max=FAR)
    small = torch.exp(-sure) * torch.cos(sure.clamp(max=TURN)) * (1.0 - LIBM)
    bottom = (p0 * torch.where(sure <= TURN, small, -torch.exp(sure) * (1.0 + LIBM))).sum(-1, keepdim=True)
    top = grow((p0 + LEAST) * torch.exp(sure) * (1.0 + LIBM) / bottom.clamp(min=2.0**-100) * lift)
    return top, (bottom > 2.0**-40) & (far < FAR)


def second_order(p: Tensor, R: Tensor) -> Tensor:
    """½ sup |d²p_j/dt²| along scores that move by at most R: p_j((w_j − w̄)² − var w), each part bounded."""
    mean = (p * R).sum(-1, keepdim=True)
    return grow(0.5 * p * ((R + mean).square() + (p * R.square()).sum(-1, keepdim=True) + mean.square()))
