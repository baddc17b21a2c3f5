"""Attention: scores, softmax and mixing, with tokens that move and tokens that do not.

Keys are those of the tokens in front that do not move (`Prefix`: values and radii), then those that are walked. With
ε_j the errors of a row's scores, η_j those of values, p = softmax(P_s) and g_j = p_j(v_j − z),

    z(x) − Σ_j P_p P_v = Σ_j p_j(x)η_j + Σ_j ḡ_j ε_j + Σ_j δ_j P_v,      ε_j = k_j·e_q + q·e_k + …,

where ḡ_j is a mean of g_j over the scores between P_s and P_s + ε, and δ is the defect of softmax. At the centre of the
piece that is linear in the errors of the query's own token, which moves atoms, and in those of the other tokens, whose
ellipsoids are summed. What is left, because p, v, q and k move on the piece, has known directions v_j − z but for a ball.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.chebyshev.analytic import second
from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.chebyshev.values import Atom, Factor, Piece, Value, dense, stacked
from prooflens.engines.relaxations.activations import LIBM
from prooflens.engines.relaxations.derivatives import SECOND
from prooflens.engines.relaxations.ellipsoids import box, raised, total, trace, weights_of_sum
from prooflens.engines.relaxations.norms import UNDERFLOW, frobenius, grow, length, product_error
from prooflens.models.sites import Scores, Softcap, share_heads
from prooflens.numerics import gamma

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
    return tensor.unflatten(-1, (value.heads, -1))


def _quadratic(M: Float[Tensor, "b s h c d"], w: Float[Tensor, "b m t h c"]) -> Float[Tensor, "b m h s t"]:
    """√(wᵀMw) for every matrix of a head with every vector of it."""
    square = torch.einsum("bshcd,bmthc,bmthd->bmhst", M, w, w).clamp(min=0.0)
    size = torch.einsum("bsh,bmth->bmhst", frobenius(M), w.square().sum(-1))
    return grow((square + product_error(4 * w.shape[-1], 2.0 * size) + UNDERFLOW).sqrt())


def scores(step: Scores, q: Value, k: Value, tokens: slice, prefix: Prefix | None) -> ScoreValue:
    """a = scale · q·k + bias, for the queries that are walked and all keys."""
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
    along_q = _quadratic(Mq, k_coefficients).movedim(2, 2)
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
    mask = step.mask[tokens]
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
        runs: softmax of the scores at the points of the grid.
        center: p at the centre, 0 where masked.
        most: sup p(x).
        change: sup |p(x) − p₀|.
        defect: how far the interpolant is from the softmax of the interpolated scores.
    """

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
    raise_ = 1.0 + LIBM * (2.0 + coefficients[:, 0].abs().amax(-1, keepdim=True))
    lift = raise_.square()
    R = grid.moves(coefficients, off)
    r = grow(R + given.error).masked_fill(~mask, 0.0)
    big, small = torch.exp(r) * (1.0 + LIBM), torch.exp(-r) * (1.0 - LIBM)
    most = grow(p0 * big / (p0 * small).sum(-1, keepdim=True)).clamp(max=1.0) * lift
    least = p0 * small / (p0 * big).sum(-1, keepdim=True) / lift * (1.0 - 2.0**-32)
    change = grow(torch.maximum(most - p0, p0 - least)) + gamma(8) * p0
    fine = grid.finer
    places, loose = fine.at(shifted)
    apart = fine.apart(runs, torch.softmax(places.masked_fill(~mask, -torch.inf), -1)).masked_fill(~mask, 0.0)
    apart = apart + fine.grid.lebesgue * 2.0 * loose.amax(-1, keepdim=True) * most
    far = fine.grid.on_ellipses(fine.padded(coefficients).abs(), off).masked_fill(~mask, 0.0)
    sure = far.clamp(max=300.0)
    small = torch.exp(-sure) * torch.cos(sure.clamp(max=TURN)) * (1.0 - LIBM)
    bottom = (p0 * torch.where(sure <= TURN, small, -torch.exp(sure) * (1.0 + LIBM))).sum(-1, keepdim=True)
    top = grow(p0 * torch.exp(sure) * (1.0 + LIBM) / bottom.clamp(min=2.0**-100) * lift)
    bound = torch.where((bottom > 2.0**-40) & (far < 300.0), _second_order(top, sure), torch.inf)
    real = _second_order(most, R.masked_fill(~mask, 0.0))
    defect = fine.grid.defect(bound, real) + apart
    size = 1.0 + plain.abs().amax(1).amax(-1, keepdim=True)
    defect = grow(defect + grid.lebesgue * gamma(K + 128) * size * runs.amax(1)).masked_fill(~mask, 0.0)
    return Weights(runs, p0, most.masked_fill(~mask, 0.0), change.masked_fill(~mask, 0.0), defect)


def _second_order(p: Tensor, R: Tensor) -> Tensor:
    """½ sup |d²p_j/dt²| along scores that move by at most R: p_j((w_j − w̄)² − var w), each part bounded."""
    mean = (p * R).sum(-1, keepdim=True)
    return grow(0.5 * p * ((R + mean).square() + (p * R.square()).sum(-1, keepdim=True) + mean.square()))


def mix(out: str, given: ScoreValue, p: Weights, v: Value) -> Value:
    """z = Σ_j p_j v_j."""
    piece, grid, q, k = given.piece, given.piece.grid, given.q, given.k
    H, prefix = q.heads, given.prefix
    b, _, T, _ = v.runs.shape
    values = share_heads(heads_of(v, v.runs), H)
    v_coefficients, v_off = (share_heads(heads_of(v, part), H) for part in v.coefficients)
    v_moves = share_heads(heads_of(v, v.moves), H)
    c = values.shape[-1]
    P = 0 if prefix is None else len(prefix.k)
    moving = slice(P, None)
    runs = torch.einsum("bnhij,bnjhc->bnihc", p.runs[..., moving], values)
    centers = v_coefficients[:, 0]
    if prefix is not None:
        fixed = share_heads(prefix.v, H)
        runs = runs + torch.einsum("bnhij,jhc->bnihc", p.runs[..., :P], fixed)
        centers = torch.cat((fixed[None].expand(b, -1, -1, -1), centers), 1)
    z0 = torch.einsum("bhij,bjhc->bihc", p.center, centers)
    away = centers[:, None] - z0[:, :, None]  # [b, i, j, h, c]
    weight = p.center.movedim(1, -1)  # [b, i, j, h]
    # what the interpolants of p and v miss of their product
    p_coefficients, p_off = grid.coefficients(p.runs[..., moving])
    far_p, far_v = (
        grid.on_ellipses(p_coefficients.abs(), p_off),
        grid.on_ellipses(v_coefficients.abs(), v_off),
    )
    defect = grid.defect(
        torch.einsum("xrbhij,xrbjhc->xrbihc", far_p, far_v),
        torch.einsum("bhij,bjhc->bihc", grid.moves(p_coefficients, p_off), v_moves),
    )
    largest = torch.cat((centers[:, :P].abs(), centers[:, P:].abs() + v_moves), 1)
    sums = torch.einsum("bhij,bjhc->bihc", p.most, largest)
    K = p.center.shape[-1]
    rounding = grid.lebesgue * gamma(K + 16) * sums + grid.lebesgue * gamma(4 * K + 256) * z0.abs()
    # how strongly each score pulls, as a polynomial: g_j = p_j(v_j − z)
    everything = values
    if prefix is not None:
        everything = torch.cat((fixed[None, None].expand(b, grid.size, -1, -1, -1), values), 2)
    pulls = p.runs.movedim(2, -1)[..., None] * (
        everything[:, :, None] - runs[:, :, :, None]
    )  # [b, n, i, j, h, c]
    pulls, pulls_off = grid.coefficients(pulls)
    # the part of every head in known directions, and a ball
    dv = length(v_moves)
    dv_all = torch.cat((dv.new_zeros(b, P, H), dv), 1)  # [b, j, h]
    apart = length(away)
    dz = torch.einsum("bhij,bijh->bih", p.change, apart) + torch.einsum("bhij,bjh->bih", p.most, dv_all)
    wide = grow(apart + dv_all[:, None] + dz[:, :, None])  # sup ‖v_j − z‖
    error, beyond = (part.movedim(1, -1) for part in (given.error, given.beyond))  # [b, i, j, h]
    masked = ~given.mask[None, :, :, None]
    error, beyond = error.masked_fill(masked, 0.0), beyond.masked_fill(masked, 0.0)
    most, change, off = (part.movedim(1, -1) for part in (p.most, p.change, p.defect))
    # g_j is not quite that polynomial: its own defect, and scores that are off by ε turn it
    turn = torch.expm1(2.0 * error.amax(2, keepdim=True).clamp(max=300.0)) * (1.0 + LIBM)
    mean = (most * wide).sum(2, keepdim=True)
    missed = off * wide + most * ((off * wide).sum(2, keepdim=True) + length(defect + rounding)[:, :, None])
    missed = missed + _product_defect(grid, p.runs, everything, runs)
    ball_radius = (error * (missed + most * turn * (wide + mean) + grid.size * length(pulls_off))).sum(2)
    ball_radius = ball_radius + (off * dv_all[:, None]).sum(2)
    if prefix is not None:
        fixed_error = share_heads(prefix.v_error[..., None], H)[..., 0]
        ball_radius = ball_radius + torch.einsum("bijh,jh->bih", most[:, :, :P], fixed_error)
    Mv = v.blocks()
    Mv = share_heads(Mv.flatten(-2), H).unflatten(-1, (c, c))  # [b, j, h, c, c]
    own = heads_of(v, v.box)
    ball_radius = ball_radius + torch.einsum(
        "bijh,bjh->bih", most[:, :, P:], share_heads(length(own)[..., None], H)[..., 0]
    )
    columns = torch.cat((away[:, None], pulls), 1)  # [b, 1 + N, i, j, h, c]
    lengths = torch.cat(
        (off[:, None], beyond[:, None], error[:, None].expand(-1, grid.size - 1, -1, -1, -1)), 1
    )
    flat = columns.permute(0, 2, 4, 5, 1, 3).flatten(-2)
    parts = [box(flat, lengths.permute(0, 2, 4, 1, 3).flatten(-2))]
    moved = change[:, :, P:].movedim(2, -1)  # [b, i, h, j]
    sizes = moved * trace(Mv).sqrt().movedim(1, -1)[:, None]
    squares = moved.square() * weights_of_sum(sizes)
    changed = torch.einsum("bihj,bjhcd->bihcd", squares, Mv)
    size = torch.einsum("bihj,bjh->bih", squares, frobenius(Mv))
    parts.append(raised(changed, gamma(4 * T + 16) * size))
    around = grow(ball_radius.square())[..., None].expand(b, T, H, c) + UNDERFLOW
    parts.append(torch.diag_embed(around))
    blocks = stacked(total(parts))
    steep = given.slope.movedim(1, -1)
    pull = pulls[:, 0] * steep[..., None]  # [b, i, j, h, c]
    crossed = _crossed(piece, k, v, heads_of(q, q.center), pull[:, :, P:], weight[:, :, P:], H)
    piece.atoms[f"{out}.rest"] = Atom(total([blocks, crossed]))
    terms: dict[str, Factor] = {f"{out}.rest": None}
    own_terms, own_noise = _own(q, k, v, pull, weight, P, prefix)
    terms |= own_terms
    around = grow(defect + rounding + own_noise[..., None, None])
    return Value(out, piece, runs.flatten(-2), terms, around.flatten(-2), H)


def _product_defect(grid: Grid, p: Tensor, v: Tensor, z: Tensor) -> Float[Tensor, "b T K H"]:
    """Bound how far P_p(P_v − P_z) is from its interpolant, in the 2-norm, for every query, key and head."""

    def far(runs: Tensor, vectors: bool) -> tuple[Tensor, Tensor]:
        coefficients, off = grid.coefficients(runs)
        sizes, room = (length(coefficients), length(off)) if vectors else (coefficients.abs(), off)
        return grid.on_ellipses(sizes, room), grow(sizes[:, 1:].sum(1) + grid.size * room)

    (p_far, p_moves), (v_far, v_moves), (z_far, z_moves) = far(p, False), far(v, True), far(z, True)
    most = p_far.movedim(3, -1) * (v_far[:, :, :, None] + z_far[:, :, :, :, None])
    plain = p_moves.movedim(1, -1) * (v_moves[:, None] + z_moves[:, :, None])
    return grid.defect(most, plain)


def _crossed(
    piece: Piece, k: Value, v: Value, q0: Tensor, pull: Tensor, weight: Tensor, H: int
) -> Float[Tensor, "b T n n"]:
    """The shape of what the errors of other tokens' keys and values become: Σ_{j≠i} (g_j q·e_k + p_j e_v)."""
    b, T = pull.shape[:2]
    c, G = q0.shape[-1], k.heads
    pair = Value("", piece, torch.cat((k.runs, v.runs), -1), {}, torch.cat((k.box, v.box), -1) * 0.0, 1)
    for name in k.terms | v.terms:
        sides = [_dense(value, name) for value in (k, v)]
        S = max(side.shape[1] for side in sides)
        lead = max(side.shape[0] for side in sides)
        pair.terms[name] = torch.cat([side.expand(lead, S, *side.shape[2:]) for side in sides], 2)
    M = pair.shape.reshape(b, T, 2, G, c, 2, G, c)
    group = torch.arange(H, device=M.device) * G // H
    Mkk, Mkv, Mvv = (M[:, :, x, :, :, y][:, :, group][:, :, :, :, group] for x, y in ((0, 0), (0, 1), (1, 1)))
    others = 1.0 - torch.eye(T, dtype=M.dtype, device=M.device)
    pull, weight = pull * others[None, :, :, None, None], weight * others[None, :, :, None]
    read = torch.einsum("bihc,bjhcgd->bijhgd", q0, Mkv)
    twice = torch.einsum("bihc,bjhcgd,bigd->bijhg", q0, Mkk, q0)
    square = (pull.square().sum(-1) * torch.diagonal(twice, dim1=-2, dim2=-1)).sum(-1)
    square = square + 2.0 * torch.einsum("bijhc,bijh,bijhhc->bij", pull, weight, read)
    square = square + torch.einsum("bijh,bjhchc->bij", weight.square(), Mvv)
    w = weights_of_sum(square.clamp(min=0.0).sqrt()) * others
    left = w[..., None, None] * pull
    found = torch.einsum("bijhc,bijhg,bijgd->bihcgd", left, twice, pull)
    one = torch.einsum("bijhc,bijg,bijhgd->bihcgd", left, weight, read)
    found = found + one + one.permute(0, 1, 4, 5, 2, 3)
    found = found + torch.einsum("bij,bijh,bijg,bjhcgd->bihcgd", w, weight, weight, Mvv)
    n = H * c
    size = (
        length(pull.flatten(-2)) * length(q0.flatten(-2))[:, :, None]
        + weight.square().sum(-1).sqrt() * c**0.5
    )
    size = (w * size.square() * (H / G) * frobenius(pair.shape)[:, None]).sum(-1)
    shape = raised(found.reshape(b, T, n, n), product_error(8 * n + T, 16.0 * size))
    return shape


def _dense(value: Value, name: str) -> Tensor:
    n = value.box.shape[-1]
    if name not in value.terms:
        m = value.piece.atoms[name].shape.shape[-1]
        return value.box.new_zeros(1, 1, n, m)
    factor = value.terms[name]
    return (
        torch.eye(n, dtype=value.box.dtype, device=value.box.device)[None, None]
        if factor is None
        else dense(factor)
    )


def _own(
    q: Value, k: Value, v: Value, pull: Tensor, weight: Tensor, P: int, prefix: Prefix | None
) -> tuple[dict[str, Factor], Float[Tensor, "b T"]]:
    """How z moves with the errors of the query's own token: as query, key and value."""
    b, T = pull.shape[:2]
    H = q.heads
    q0, k0 = heads_of(q, q.center), share_heads(heads_of(k, k.center), H)
    if prefix is not None:
        k0 = torch.cat((share_heads(prefix.k, H)[None].expand(b, -1, -1, -1), k0), 1)
    turn = torch.einsum("bijhc,bjhd->bihcd", pull, k0)
    here = torch.arange(T, device=pull.device)
    self_pull, self_weight = pull[:, here, here + P], weight[:, here, here + P]  # [b, i, h, c], [b, i, h]
    found: dict[str, Factor] = {}
    noise = torch.zeros(b, T, dtype=pull.dtype, device=pull.device)
    for name in q.terms | k.terms | v.terms:
        part = _dense(q, name).unflatten(2, (H, -1))
        J = torch.einsum("bihcd,bihdm->bihcm", turn, part.expand(b, T, *part.shape[2:]))
        keys, values = (
            share_heads(_dense(x, name).unflatten(2, (x.heads, -1)).movedim(-1, 2), H).movedim(2, -1)
            for x in (k, v)
        )
        read = torch.einsum("bihc,bihcm->bihm", q0, keys.expand(b, T, *keys.shape[2:]))
        J = J + self_pull[..., None] * read[..., None, :] + self_weight[..., None, None] * values
        found[name] = J.flatten(2, 3)
        size = frobenius(turn.flatten(2, 3)) * frobenius(part.flatten(2, 3))
        size = size + length(self_pull.flatten(-2)) * length(q0.flatten(-2)) * frobenius(keys.flatten(2, 3))
        size = size + length(self_weight) * frobenius(values.flatten(2, 3))
        noise = noise + product_error(4 * q0.shape[-1], 2.0 * size) * q.piece.atoms[name].size
    return found, grow(noise)
