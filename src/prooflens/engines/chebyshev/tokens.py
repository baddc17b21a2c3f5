"""Steps of one token at a time: affine maps, rotations, activations, gates; `norms` has the norms.

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
    Value,
    compose,
    dense,
    factor_size,
    join,
    slip,
)
from prooflens.engines.relaxations.activations import LIBM
from prooflens.engines.relaxations.derivatives import DERIVATIVE_ERROR, SECOND, THIRD, derivatives
from prooflens.engines.relaxations.norms import frobenius, grow, length, product_error
from prooflens.models.architecture import Activation
from prooflens.models.sites import ACTIVATIONS, Affine, Function, Rotary, Shift
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
        terms[name] = W @ _scaled_sum([(gate.scale, factor) for gate, factor in bases])
        size = torch.zeros_like(noise)
        for gate, factor in bases:
            largest = gate.scale.abs().amax(-1) + gate.slopes.abs().amax(-1).sum(0)
            size = size + largest * factor_size(factor, W.shape[1])
        noise = noise + product_error(W.shape[1], frobenius(W) * size) * piece.atoms[name].size
        for i in range(len(piece.grid.degrees)):
            changing = W @ _scaled_sum([(gate.slopes[i], factor) for gate, factor in bases])
            slope = f"{step.out}.slope{i}.{name}"
            piece.atoms[slope] = Atom(piece.atoms[name].image(changing))
            terms[slope] = None
    return grow(noise)


def _scaled_sum(parts: list[tuple[Tensor, Factor]]) -> Tensor:
    """Σ diag(scale) F."""
    found: Tensor | None = None
    for by, factor in parts:
        more = torch.diag_embed(by) if factor is None else by[..., None] * dense(factor)
        found = more if found is None else found + more
    assert found is not None
    return found


def rotary(step: Rotary, value: Value, tokens: slice) -> Value:
    """RoPE: a fixed linear map of each token."""
    _, S, n = value.box.shape
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


def shifted(step: Shift, value: Value, tokens: slice) -> Value:
    """A vector of its own for every position and head: errors stay as they are."""
    offset = step.offset[tokens].flatten(-2)
    runs = value.runs + offset
    rounding = value.piece.grid.lebesgue * gamma(4) * (value.runs.abs().amax(1) + offset.abs())
    return Value(step.out, value.piece, runs, value.terms, grow(value.box + rounding), value.heads)


def added(out: str, first: Value, other: Value) -> Value:
    """A residual sum: composite atoms are written out, so that errors of one origin meet."""
    n = first.box.shape[-1]
    terms = first.written_out()
    for name, factor in other.written_out().items():
        join(terms, name, factor, first.box)
    runs = first.runs + other.runs
    noise = gamma(4) * first.piece.grid.lebesgue * (first.runs.abs() + other.runs.abs()).amax(1)
    for part in (first, other):
        noise = noise + part.writing_noise()[..., None]
        for name, factor in part.terms.items():
            size = factor_size(factor, n) * first.piece.atoms[name].size
            noise = noise + product_error(4, 4.0 * size)[..., None]
    around = grow(first.box + other.box + noise)
    return Value(out, first.piece, runs, terms, around, first.heads)


def elementwise(out: str, function: Function, value: Value) -> Value:
    """y = φ(x), coordinate by coordinate; φ' is a line in the factors, up to what φ‴ and P's own bends make."""
    if function == "jump":
        return _jumped(out, value)
    grid = value.piece.grid
    c0, R, reach = value.center, value.moves, value.reach
    runs = ACTIVATIONS[function](value.runs)
    known = derivatives(function, c0)
    if function in ("relu", "relu2"):
        slope, slopes, change, defect = _kinked(function, value)
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


def _jumped(out: str, value: Value) -> Value:
    """Features' jump, 1 above 0 and 0 elsewhere: exactly 0 or 1 where no value reaches 0, and ½ ± ½ where one may."""
    c0 = value.center
    still = c0.abs() > grow(value.moves + value.reach)  # NaN is not still
    constant = torch.where(still, (c0 > 0.0).to(c0), 0.5)
    box = torch.where(still, 0.0, torch.full_like(c0, 0.5))
    return Value(out, value.piece, constant[:, None].expand_as(value.runs), {}, box, value.heads)


def _kinked(function: Activation, value: Value) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ReLU and ReLU²: slope, its change along the factors, how much it may change beyond that, and the defect.

    Away from the kink they are x and x², or 0. With the kink in reach, what is not linear is at most R²/4R of ReLU, at
    most R² of ReLU², and has no line in the factors.
    """
    grid = value.piece.grid
    c0, R, reach = value.center, value.moves, value.reach
    wide = grow(R + reach)
    kink, on = c0.abs() < wide, (c0 > 0.0).to(c0)
    zero = torch.zeros_like(c0)
    bent = grow((1.0 + grid.lebesgue) * (1.0 if grid.degrees else 0.0) * torch.ones_like(c0))
    if function == "relu":
        share = (c0 / wide.clamp(min=2.0**-500)).clamp(-1.0, 1.0)
        plain = 0.25 * (R - c0.square() / R.clamp(min=2.0**-500)).clamp(min=0.0) + gamma(8) * R
        slope = torch.where(kink, 0.5 * (share + 1.0), on)
        change = torch.where(kink, torch.maximum(slope, 1.0 - slope), zero)
        return slope, torch.zeros_like(value.linear), change, torch.where(kink, bent * plain, zero)
    coefficients, off = value.coefficients
    smooth = on * grid.defect(grid.on_ellipses(coefficients.abs(), off).square(), R.square())
    slopes = torch.where(kink, 0.0, 2.0 * on * value.linear)
    change = grow(2.0 * torch.where(kink, wide, on * (value.bends + reach)))
    return 2.0 * torch.relu(c0), slopes, change, torch.where(kink, bent * grow(R.square()), smooth)


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
    assert not gate.terms, "what a gate multiplies is an activation"
    gates = [Gate(up, gate.center, gate.linear)]
    for inner in gate.gates:
        slopes = up.center * inner.slopes + up.linear * inner.scale
        # two slopes together bend
        around = around + up.linear.abs().sum(0) * inner.slopes.abs().sum(0) * inner.base.reach
        gates.append(Gate(inner.base, up.center * inner.scale, slopes))
    noise = gamma(16) * (up.most * gate.reach + gate.most * up.reach)
    return Value(out, gate.piece, runs, {}, grow(around + noise), gate.heads, tuple(gates))
