"""Mixing: what attention makes of values, and of the errors of queries, keys and values.

With ε_j the errors of a row's scores, η_j those of values, p = softmax(P_s) and g_j = p_j(v_j − z),

    z(x) − Σ_j P_p P_v = Σ_j p_j(x)η_j + Σ_j ḡ_j ε_j + Σ_j δ_j P_v,      ε_j = k_j·e_q + q·e_k + …,

where ḡ_j is a mean of g_j over the scores between P_s and P_s + ε, and δ is the defect of softmax. At the centre of
the piece that is linear in the errors of the query's own token, which moves atoms, and in those of the other tokens,
whose ellipsoids are summed. What is left, because g, q and k move on the piece, lies along the coefficients of g, which
are known vectors, but for a ball that is second order in the errors.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.chebyshev.attention import Prefix, Weights, heads_of
from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.chebyshev.values import Atom, Factor, Piece, Value, dense, stacked
from prooflens.engines.relaxations.activations import LIBM
from prooflens.engines.relaxations.ellipsoids import box, raised, total, trace, weights_of_sum
from prooflens.engines.relaxations.norms import UNDERFLOW, frobenius, grow, length, product_error
from prooflens.models.sites import share_heads
from prooflens.numerics import gamma


def mix(out: str, p: Weights, v: Value) -> Value:
    """z = Σ_j p_j v_j."""
    given = p.scores
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
    masked = ~given.mask.expand(H, -1, -1).movedim(0, -1)[None]
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
    c, n_k = q0.shape[-1], k.box.shape[-1]
    pair = Value("", piece, torch.cat((k.runs, v.runs), -1), {}, torch.cat((k.box, v.box), -1) * 0.0, 1)
    for name in k.terms | v.terms:
        maps = [_dense(value, name) for value in (k, v)]
        S = max(part.shape[1] for part in maps)
        lead = max(part.shape[0] for part in maps)
        pair.terms[name] = torch.cat([part.expand(lead, S, *part.shape[2:]) for part in maps], 2)
    M = pair.shape
    # An edge that is cut at one head's values gives every head values of its own; keys are still shared.
    sides = {"k": (slice(n_k), k.heads), "v": (slice(n_k, None), v.heads)}
    group = {name: torch.arange(H, device=M.device) * heads // H for name, (_, heads) in sides.items()}

    def block(x: str, y: str) -> Tensor:
        (rows, a), (columns, e) = sides[x], sides[y]
        split = M[:, :, rows, columns].reshape(b, T, a, c, e, c)
        return split[:, :, group[x]][:, :, :, :, group[y]]

    Mkk, Mkv, Mvv = block("k", "k"), block("k", "v"), block("v", "v")
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
    size = (w * size.square() * (H / min(k.heads, v.heads)) * frobenius(pair.shape)[:, None]).sum(-1)
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
