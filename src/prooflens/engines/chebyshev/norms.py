"""Norms: w ⊙ x r + β with r = (mean x² + ε)^{−½}. One scalar per token, or per head, bends them.

With q = mean P² + ε and r(q) = q^{−½},

    r(x)x − P_r P = r(x)e + P (r'(ξ)((2P + e)·e/d + δ_q) + δ_r),

of which r₀e + c₀ r'₀ 2c₀·e/d moves the atoms: a diagonal map less one of rank one. The rest lies along e, along c₀ and
along the other coefficients of P, all known vectors.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.chebyshev.values import (
    Atom,
    Factor,
    RankOne,
    Value,
    box_diagonal,
    dense,
    factor_size,
    stacked,
)
from prooflens.engines.relaxations.activations import LIBM
from prooflens.engines.relaxations.ellipsoids import box, raised, total, trace
from prooflens.engines.relaxations.norms import UNDERFLOW, frobenius, grow, length, product_error
from prooflens.models.sites import Norm
from prooflens.numerics import gamma


def centred(value: Value) -> Value:
    """x − mean(x), of every token or of every head."""
    terms: dict[str, Factor] = {}
    n, heads = value.box.shape[-1], value.heads
    d = n // heads
    same = torch.eye(n, dtype=value.box.dtype, device=value.box.device)[None, None]
    for name, factor in value.terms.items():
        split = (same if factor is None else dense(factor)).unflatten(2, (heads, d))
        terms[name] = (split - split.mean(3, keepdim=True)).flatten(2, 3)
    x, box_ = value.runs.unflatten(-1, (heads, d)), value.box.unflatten(-1, (heads, d))
    runs = (x - x.mean(-1, keepdim=True)).flatten(-2)
    noise = gamma(d + 8) * 4.0 * value.piece.grid.lebesgue * value.runs.abs().amax(-1).amax(1)
    for name, factor in value.terms.items():
        most = factor_size(factor, n)
        noise = noise + product_error(d, 4.0 * most * value.piece.atoms[name].size)
    around = grow((box_ + box_.mean(-1, keepdim=True)).flatten(-2) + noise[..., None])
    return Value(f"{value.name}.centred", value.piece, runs, terms, around, value.heads)


def norm(step: Norm, value: Value) -> Value:
    """The norm of every token, or of every head."""
    if step.centred:
        value = centred(value)
    grid, heads = value.piece.grid, value.heads
    b, S, flat = value.box.shape
    d = flat // heads
    x = value.runs.unflatten(-1, (heads, d))
    coefficients, off = (part.unflatten(-1, (heads, d)) for part in value.coefficients)
    c0 = coefficients[:, 0]
    M = value.shape[:, :, None] if heads == 1 else value.blocks()
    e = grow(trace(M).sqrt())
    # q, its interpolant and what that misses
    q = x.square().mean(-1) + step.eps
    sizes, room = length(coefficients), length(off)
    far = grid.on_ellipses(sizes, room)
    moves = grow(sizes[:, 1:].sum(1) + grid.size * room)
    delta_q = grid.defect(far.square() / d, moves.square() / d)
    delta_q = grow(delta_q + grid.lebesgue * gamma(d + 8) * (q.amax(1) + step.eps))
    # r
    q_coefficients, q_off = grid.coefficients(q)
    q0, q_moves = q_coefficients[:, 0], grid.moves(q_coefficients, q_off)
    # sup |(2P + e)·e|/d: the centre's part, and what moves
    t0 = 2.0 * _support(M, c0) / d
    t1 = (2.0 * _supports_along(M, coefficients) + e.square() + 2.0 * grid.size * room * e) / d
    e_q = grow(t0 + t1 + delta_q)
    least = q0 - q_moves - e_q
    safe = least.clamp(min=2.0**-300)
    r = q.rsqrt()
    bend = 0.75 * safe**-2.5
    delta_r = _root_defect(grid, r, q, safe)
    r0 = q0.rsqrt()
    steep0, steepest = 0.5 * r0 / q0, 0.5 * safe**-1.5
    change = grow(bend * (q_moves + e_q)) + LIBM * steep0
    r_coefficients, r_off = grid.coefficients(r)
    r_change = grow(grid.moves(r_coefficients, r_off) + (r_coefficients[:, 0] - r0).abs())
    r_change = grow(r_change + steepest * e_q + delta_r + LIBM * r0)
    # y
    weight = torch.ones(d, dtype=x.dtype, device=x.device) if step.weight is None else step.weight
    runs = x * r[..., None] * weight
    runs = runs if step.bias is None else runs + step.bias
    r_far = grid.on_ellipses(r_coefficients.abs(), r_off)
    x_far = grid.on_ellipses(coefficients.abs(), off)
    x_moves = grid.moves(coefficients, off)
    r_moves = grid.moves(r_coefficients, r_off)
    delta_y = grid.defect(x_far * r_far[..., None], x_moves * r_moves[..., None]) * weight.abs()
    delta_y = delta_y + grid.lebesgue * gamma(8) * runs.abs().amax(1) * 2.0
    if step.bias is not None:
        delta_y = delta_y + grid.lebesgue * gamma(8) * step.bias.abs()
    # what the rest of the errors is
    along0 = grow(steepest * (t1 + delta_q) + change * t0 + delta_r)
    along = grow(steepest * e_q + delta_r)
    columns = (coefficients * weight).movedim(1, -1)
    lengths = torch.cat((along0[..., None], along[..., None].expand(*along.shape, grid.size - 1)), -1)
    rest = [box(columns, lengths)]
    scaled = r_change[..., None] * weight
    rest.append(
        raised(scaled[..., :, None] * M * scaled[..., None, :], 8.0 * gamma(8) * _weighted_size(scaled, M))
    )
    slack = grow(along * grid.size * room * weight.abs().amax())
    rest.append(torch.diag_embed(box_diagonal(grow(delta_y + slack[..., None]))))
    source = stacked(total(rest))
    bad = ~((least > 0.0) & e_q.isfinite())
    source = torch.where(bad.any(-1)[..., None, None], torch.inf, source)
    # the linear part
    pull = (2.0 / d) * steep0[..., None] * c0
    parts: dict[str, Factor] = {}
    noise = value.writing_noise()[..., None] * (r0 + length(pull) * length(c0)) * weight.abs().amax()
    for name, factor in _with_own(value).items():
        size = factor_size(factor, flat)
        if factor is None and heads == 1:
            parts[name] = RankOne(r0 * weight, (weight * c0)[:, :, 0], pull[:, :, 0])
        else:
            given = (
                torch.eye(flat, dtype=x.dtype, device=x.device)[None, None]
                if factor is None
                else dense(factor)
            )
            split = given.unflatten(2, (heads, d)).expand(b, S, heads, d, given.shape[-1])
            moved = r0[..., None, None] * split
            moved = moved - c0[..., None] * torch.einsum("bshc,bshcm->bshm", pull, split)[..., None, :]
            parts[name] = (weight[:, None] * moved).flatten(2, 3)
        most = (r0 + length(pull) * length(c0)) * weight.abs().amax()
        noise = noise + product_error(d, 4.0 * most * (size * value.piece.atoms[name].size)[..., None])
    source = total([source, torch.diag_embed(box_diagonal(noise.repeat_interleave(d, -1)))])
    atoms = value.piece.atoms
    atoms[f"{step.out}.rest"] = Atom(source)
    parts[f"{step.out}.rest"] = None
    whole = total([atoms[name].image(factor) for name, factor in parts.items()])
    atoms[step.out] = Atom(whole, parts)
    zero = torch.zeros_like(value.box)
    return Value(step.out, value.piece, runs.flatten(-2), {step.out: None}, zero, heads)


def _root_defect(grid: Grid, r: Tensor, q: Tensor, least: Tensor) -> Tensor:
    """Bound |P_r − P_q^{−½}|: P_r² P_q = 1 ± η makes the two equal up to a factor within 1 ± η, if P_q > 0 and η < 1.

    The product has three times the degree at most, so it is known by its values on a grid of that degree.
    """
    if not grid.degrees:
        return LIBM * r.amax(1)
    fine = grid.threefold
    (r_fine, r_off), (q_fine, q_off) = fine.at(r), fine.at(q)
    residual, rounding = fine.grid.coefficients(r_fine.square() * q_fine - 1.0)
    r_most, q_most = r_fine.abs().amax(1), q_fine.abs().amax(1)
    slack = 4.0 * (r_most * r_off * q_most + r_most.square() * q_off) + gamma(8) * (
        r_most.square() * q_most + 1.0
    )
    eta = grow(residual.abs().sum(1) + fine.grid.size * rounding + fine.grid.lebesgue * slack)
    return torch.where(eta < 1.0, grow(eta * least**-0.5), torch.inf)


def _weighted_size(scaled: Tensor, M: Tensor) -> Tensor:
    return scaled.abs().amax(-1).square() * frobenius(M)


def _with_own(value: Value) -> dict[str, Factor]:
    """The maps of all primitive atoms, with the value's own errors as one."""
    found = value.written_out()
    if value.has_own:
        value.piece.atoms[f"{value.name}.own"] = Atom(value.own)
        found[f"{value.name}.own"] = None
    return found


def _support(M: Float[Tensor, "*b n n"], w: Float[Tensor, "*b n"]) -> Tensor:
    square = ((M @ w[..., None])[..., 0] * w).sum(-1).clamp(min=0.0)
    error = product_error(2 * w.shape[-1], w.square().sum(-1) * frobenius(M))
    return grow((square + 2.0 * error + UNDERFLOW).sqrt())


def _supports_along(
    M: Float[Tensor, "b S h n n"], coefficients: Float[Tensor, "b N S h n"]
) -> Float[Tensor, "b S h"]:
    """Σ_{m≠0} √(c_mᵀMc_m)."""
    c = coefficients[:, 1:].movedim(1, -2)
    square = ((c @ M) * c).sum(-1).clamp(min=0.0)
    error = product_error(2 * c.shape[-1], c.square().sum(-1) * frobenius(M)[..., None])
    return grow((square + 2.0 * error + UNDERFLOW).sqrt().sum(-1))
