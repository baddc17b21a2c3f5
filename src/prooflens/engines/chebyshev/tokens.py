"""Steps of one token at a time: affine maps, rotations, norms, activations, gates.

Each step gives its value at the points of the grid, what the polynomial through these misses of the step on the
polynomial before (its *defect*), and what the step makes of the errors before it:

    f(P + e) − P' = f'(c₀)e + (f'(ξ) − f'(c₀))e + (f(P) − P').

The first part moves atoms. The second is small because a piece is short: with |P − c₀| ≤ R, f' changes by at most
sup|f″|(R + |e|). The third is the defect, with rounding.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.chebyshev.analytic import second
from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.chebyshev.values import (
    Atom,
    Factor,
    Gate,
    RankOne,
    Value,
    box_diagonal,
    compose,
    dense,
    factor_size,
    join,
    slip,
    stacked,
)
from prooflens.engines.relaxations.activations import LIBM
from prooflens.engines.relaxations.derivatives import DERIVATIVE_ERROR, SECOND, THIRD, derivatives
from prooflens.engines.relaxations.ellipsoids import box, raised, total, trace
from prooflens.engines.relaxations.norms import UNDERFLOW, frobenius, grow, length, product_error
from prooflens.models.architecture import Activation
from prooflens.models.sites import ACTIVATIONS, Affine, Norm, Rotary
from prooflens.numerics import gamma


def affine(step: Affine, value: Value) -> Value:
    """y = Wx + b: P and all atoms are mapped; what the value had as errors of its own becomes an atom."""
    W, piece = step.weight, value.piece
    runs = torch.nn.functional.linear(value.runs, W, step.bias)
    rows = torch.linalg.vector_norm(W, dim=-1)
    largest = length(value.runs).amax(1)
    rounding = gamma(W.shape[1] + 8) * (rows * largest[..., None])
    if step.bias is not None:
        rounding = rounding + gamma(W.shape[1] + 8) * step.bias.abs()
    off = piece.grid.lebesgue * rounding + slip(value, W, W.shape[1])[..., None]
    terms: dict[str, Factor] = {name: compose(W[None, None], factor) for name, factor in value.terms.items()}
    name = f"{value.name}.own"
    if value.has_own:
        if name not in piece.atoms:
            piece.atoms[name] = Atom(value.own)
        terms[name] = W[None, None]
    if value.gates:
        off = off + _open_gates(step, value, terms)[..., None]
    heads = step.out_shape[0] if len(step.out_shape) > 1 else 1
    return Value(step.out, piece, runs, terms, grow(off), heads)


def opened(value: Value) -> Value:
    """The same value with errors that came through activations as atoms: for readers that are no affine maps."""
    if not value.gates:
        return value
    n = value.box.shape[-1]
    same = torch.eye(n, dtype=value.box.dtype, device=value.box.device)
    return affine(Affine(f"{value.name}.opened", (value.name,), same, None, 1, (n,)), value)


def _open_gates(step: Affine, value: Value, terms: dict[str, Factor]) -> Float[Tensor, "b S"]:
    """Map the errors that came through activations: at the centre they move atoms, and what changes is an atom.

    Returns:
        The rounding of the maps, in the 2-norm.
    """
    W, piece = step.weight, value.piece
    noise = torch.zeros_like(value.box[..., 0])
    for name in {name for gate in value.gates for name in gate.base.terms}:
        bases = [(gate, gate.base.terms[name]) for gate in value.gates if name in gate.base.terms]
        size = torch.zeros_like(noise)

        def through(scales: list[Tensor]) -> Tensor:
            inner = sum(
                by[..., None] * dense(factor)
                for by, (_, factor) in zip(scales, bases, strict=True)
                if factor is not None
            )
            assert isinstance(inner, Tensor)
            return W @ inner

        terms[name] = through([gate.scale for gate, _ in bases])
        for gate, factor in bases:
            size = size + (gate.scale.abs().amax(-1) + gate.slopes.abs().amax(-1).sum(0)) * factor_size(
                factor, W.shape[1]
            )
        noise = noise + product_error(W.shape[1], frobenius(W) * size) * piece.atoms[name].size
        for i in range(len(piece.grid.degrees)):
            slope = f"{step.out}.slope{i}.{name}"
            piece.atoms[slope] = Atom(piece.atoms[name].image(through([gate.slopes[i] for gate, _ in bases])))
            terms[slope] = None
    return grow(noise)


def rotary(step: Rotary, value: Value, tokens: slice) -> Value:
    """RoPE: a fixed linear map of each token."""
    b, S, n = value.box.shape
    c = n // value.heads
    cos, sin = step.cos[tokens, None], step.sin[tokens, None]

    def turned(x: Tensor) -> Tensor:
        rotated = torch.cat((-x[..., c // 2 :], x[..., : c // 2]), -1)
        return x * cos + rotated * sin

    runs = turned(value.runs.unflatten(-1, (value.heads, c))).flatten(-2)
    terms: dict[str, Factor] = {}
    for name, factor in value.terms.items():
        given = (
            torch.eye(n, dtype=runs.dtype, device=runs.device)[None, None]
            if factor is None
            else dense(factor)
        )
        split = given.expand(given.shape[0], S, *given.shape[2:]).unflatten(2, (value.heads, c))
        terms[name] = turned(split.movedim(-1, 1)).movedim(1, -1).flatten(2, 3)
    split = value.box.unflatten(-1, (value.heads, c))
    around = (
        split * cos.abs() + torch.cat((split[..., c // 2 :], split[..., : c // 2]), -1) * sin.abs()
    ).flatten(-2)
    size = torch.maximum(cos.abs().amax(), sin.abs().amax()) * 2.0
    noise = product_error(8, size * length(value.runs).amax(1)) * value.piece.grid.lebesgue
    for name, factor in value.terms.items():
        most = factor_size(factor, n)
        noise = noise + product_error(8, size * most * value.piece.atoms[name].size)
    return Value(step.out, value.piece, runs, terms, grow(around + noise[..., None]), value.heads)


def added(out: str, first: Value, other: Value) -> Value:
    """A residual sum: composite atoms are written out, so that errors of one origin meet."""
    n = first.box.shape[-1]
    terms = first.written_out()
    for name, factor in other.written_out().items():
        join(terms, name, factor, n)
    runs = first.runs + other.runs
    noise = gamma(4) * first.piece.grid.lebesgue * (first.runs.abs() + other.runs.abs()).amax(1)
    for part in (first, other):
        for name, factor in part.terms.items():
            most = factor_size(factor, n)
            noise = noise + (product_error(4 * n, 4.0 * most * first.piece.atoms[name].size))[..., None]
    around = grow(first.box + other.box + noise)
    return Value(out, first.piece, runs, terms, around, first.heads)


def centred(value: Value) -> Value:
    """x − mean(x)."""
    terms: dict[str, Factor] = {}
    n = value.box.shape[-1]
    for name, factor in value.terms.items():
        given = (
            torch.eye(n, dtype=value.box.dtype, device=value.box.device)[None, None]
            if factor is None
            else dense(factor)
        )
        terms[name] = given - given.mean(-2, keepdim=True)
    runs = value.runs - value.runs.mean(-1, keepdim=True)
    noise = gamma(n + 8) * 4.0 * value.piece.grid.lebesgue * value.runs.abs().amax(-1).amax(1)
    for name, factor in value.terms.items():
        most = factor_size(factor, n)
        noise = noise + product_error(n, 4.0 * most * value.piece.atoms[name].size)
    around = grow(value.box + value.box.mean(-1, keepdim=True) + noise[..., None])
    return Value(f"{value.name}.centred", value.piece, runs, terms, around, value.heads)


def norm(step: Norm, value: Value) -> Value:
    """w ⊙ x r + β with r = (mean x² + ε)^{−½}: one scalar per token (or head) bends it.

    With q = mean P² + ε and r(q) = q^{−½},

        r(x)x − P_r P = r(x)e + P (r'(ξ)((2P + e)·e/d + δ_q) + δ_r),

    of which r₀e + c₀ r'₀ 2c₀·e/d moves the atoms. The rest lies along e, along c₀ and along the other coefficients of P.
    """
    if step.centred:
        value = _centred_heads(value)
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
    noise = torch.zeros_like(e)
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


def _centred_heads(value: Value) -> Value:
    if value.heads == 1:
        return centred(value)
    raise AssertionError("norms of heads are not centred")


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


def elementwise(out: str, function: Activation, value: Value) -> Value:
    """y = φ(x), coordinate by coordinate; φ' is a line in the factors, up to what φ‴ and P's own bends make."""
    grid = value.piece.grid
    c0, R, reach = value.center, value.moves, value.reach
    runs = ACTIVATIONS[function](value.runs)
    known = derivatives(function, c0)
    if function == "relu":
        wide = grow(R + reach)
        share = (c0 / wide.clamp(min=2.0**-500)).clamp(-1.0, 1.0)
        kink = c0.abs() < wide
        plain = torch.where(kink, 0.25 * (R - c0.square() / R.clamp(min=2.0**-500)).clamp(min=0.0), 0.0)
        defect = grow((1.0 + grid.lebesgue) * plain) if grid.degrees else torch.zeros_like(plain)
        slope = torch.where(kink, 0.5 * (share + 1.0), known.first)
        change = torch.where(kink, torch.maximum(slope, 1.0 - slope), 0.0)
        slopes = torch.zeros_like(value.linear)
    else:
        defect = _activation_defect(grid, function, value, runs)
        slope, slopes = known.first, known.second * value.linear
        bend = second(function, c0, grow(R + reach)).clamp(max=SECOND[function])
        change = 0.5 * THIRD[function] * R.square() + known.second.abs() * value.bends + bend * reach
        change = grow(change) + 2.0 * DERIVATIVE_ERROR * (1.0 + R)
    rounding = grid.lebesgue * LIBM * (value.runs.abs() + runs.abs()).amax(1)
    gate = Gate(value, slope, slopes)
    around = grow((slope.abs() + slopes.abs().sum(0)) * value.box + change * reach + defect + rounding)
    return Value(out, value.piece, runs, {}, around, value.heads, (gate,))


def _activation_defect(grid: Grid, function: Activation, value: Value, runs: Tensor) -> Tensor:
    """Bound |φ(P) − P'| on the box: how far interpolants of two degrees are apart, and what the finer one misses."""
    c0, R = value.center, value.moves
    plain = 0.5 * SECOND[function] * R.square()
    if not grid.degrees:
        return torch.zeros_like(plain)
    fine = grid.finer
    places, off = fine.at(value.runs)
    apart = fine.apart(runs, ACTIVATIONS[function](places))
    steepest = 1.2  # no activation is steeper
    slack = fine.grid.lebesgue * (steepest * off + LIBM * (places.abs().amax(1) + 1.0))
    coefficients, loose = value.coefficients
    far = fine.grid.on_ellipses(fine.padded(coefficients).abs(), loose)
    missed = fine.grid.defect(0.5 * far.square() * second(function, c0, far), plain)
    return grow(apart + slack + missed)


def product(out: str, gate: Value, up: Value) -> Value:
    """y = g ⊙ u: (P_g + e_g)(P_u + e_u) − P_gP_u = (P_u + e_u)e_g + P_g e_u."""
    grid = gate.piece.grid
    runs = gate.runs * up.runs
    far = grid.on_ellipses(gate.coefficients[0].abs(), gate.coefficients[1])
    far = far * grid.on_ellipses(up.coefficients[0].abs(), up.coefficients[1])
    defect = grid.defect(far, grow(gate.moves * up.moves))
    rounding = grid.lebesgue * gamma(4) * runs.abs().amax(1)
    around = defect + rounding + (up.bends + up.reach) * gate.reach + gate.bends * up.reach
    around = around + up.most * gate.box + gate.most * up.box
    gates = [Gate(up, gate.center, gate.linear)]
    for inner in gate.gates:
        slopes = up.center * inner.slopes + up.linear * inner.scale
        # two slopes together bend
        around = around + up.linear.abs().sum(0) * inner.slopes.abs().sum(0) * inner.base.reach
        gates.append(Gate(inner.base, up.center * inner.scale, slopes))
    noise = gamma(16) * (up.most * gate.reach + gate.most * up.reach)
    return Value(out, gate.piece, runs, {}, grow(around + noise), gate.heads, tuple(gates))
