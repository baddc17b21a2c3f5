"""Curvature of layer-0 forms: vectors D with ∇²f ⪯ diag(D) on the whole region (derived in `layer0`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.first_layer.entries import Entries, Point
from prooflens.numerics import certified_shift, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.sets.bilinear import GramBlocks, extreme_eigenvalues

SHAPE_FLOOR = 0.1
"""The smallest entry of a shape, as a share of its token's mean; any positive shape is valid."""

LEAST_SHAPE = 2.0**-900
"""The smallest mean slope that is used as a shape: the shares and inverses of smaller ones would leave float64."""

JOINT_FLOORS = (0.03, 0.1, 0.4)
"""The floors of the shapes that are tried on a Hessian that is written out."""

JOINT_SIZE = 256
"""Up to this many coordinates, the Hessian of a form is written out."""

LONGEST_CHAIN = 2.0**40
"""Beyond this many roundings, a shaped Gram matrix is not trusted and nothing is refined."""

SHAPE_ELEMENTS = 2**23
"""How many numbers a temporary of the shaped Gram matrices holds."""


def uniform_curvature(entries: Entries, point: Point) -> Float[Tensor, "F T d"]:
    """Return D ≥ 0 with ∇²f ⪯ diag(D) in x over the whole region, the same for all coordinates of a token.

    Args:
        entries: the forms.
        point: a corner for each form.
    """
    view = entries.view
    sigma, low, high = view.spectra
    own = entries.own
    cross = sigma[entries.head, entries.position, entries.key]
    weight = entries.bent
    tilt = _tilt(entries, point.slope)[entries.form]
    eigenvalue = torch.where(entries.weight > 0, high[entries.head], low[entries.head])
    at_i = weight * torch.where(own, eigenvalue, cross * tilt)
    at_j = weight * torch.where(own, 0.0, cross / tilt)
    base = up(entries.per_slot(at_i, at_j) * (1.0 + gamma(entries.longest + 16)))
    if view.norm is not None:
        n = view.n_high[entries.tokens]
        base = up((n.square() * base + _norm_curvature(entries, point)) * (1.0 + gamma(8)))
    return base[..., None].expand(point.x.shape)


def _norm_curvature(entries: Entries, point: Point) -> Float[Tensor, "F T"]:
    """Bound √2 max(1, 3εn²) n²‖Pv‖/√d over the region, per token.

    ‖Pv‖ is its value at the corner plus what the other tokens can move it by.
    """
    view = entries.view
    assert view.norm is not None
    d, n = view.center.shape[-1], view.n_high[entries.tokens]
    step_i, step_j = _wander(entries)
    wander = entries.per_slot(step_i, torch.where(entries.own, 0.0, step_j))
    length = point.read.square().sum(-1).sqrt() * (1.0 + gamma(d + 8))
    length = length + view.roundoff(entries.longest) * _read_size(entries)
    bend: Tensor = 2.0**0.5 * (3.0 * view.norm.eps * n.square()).clamp(min=1.0) * n.square() * d**-0.5
    return up(bend * (length + wander) * (1.0 + gamma(entries.longest + 64)))


def _wander(entries: Entries) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Bound how far each entry's part of v, at query and key token, can be from its value at the corner."""
    view, i, j = entries.view, entries.position, entries.key
    cross = view.spectra.cross[entries.head, i, j]
    # At i = j, v is (M + Mᵀ)y, and ‖M + Mᵀ‖ ≤ 2σ(M).
    norm = entries.weight.abs() * torch.where(entries.own, 2.0 * cross, cross)
    moved = 2.0 * view.n_high * view.reach
    return up(norm * moved[j]), up(norm * moved[i])


def shaped_curvature(entries: Entries, point: Point) -> Float[Tensor, "F T d"]:
    """Return D ≥ 0 with ∇²f ⪯ diag(D), its main term shaped like the slope at the corner (regions given by radii).

    Args:
        entries: the forms.
        point: a corner for each form.
    """
    view = entries.view
    steep = point.slope.abs()
    mean = steep.mean(-1, keepdim=True)
    usable = (mean > LEAST_SHAPE) & mean.isfinite()
    X = torch.where(usable, torch.maximum(steep, SHAPE_FLOOR * mean), torch.ones_like(steep))
    n, own = view.n_high, entries.own
    main = entries.bent * _shaped_spectra(entries, X) * n[entries.position] * n[entries.key]
    tilt = _tilt(entries, point.slope)[entries.form]
    coefficient = entries.per_slot(torch.where(own, main, main * tilt), torch.where(own, 0.0, main / tilt))
    D = up(up(coefficient * (1.0 + gamma(entries.longest + 32)))[..., None] * X)
    if view.norm is not None:
        flat = up(_norm_curvature(entries, point) + _rank_one_curvature(entries, point))
        D = up(D + flat[..., None])
    return D


def joint_curvatures(entries: Entries, point: Point) -> Iterator[Float[Tensor, "F T d"]]:
    """Yield several D with ∇²f ⪯ diag(D), from the whole Hessian of each form; for small models without a norm.

    Writing H out over the slots of a form keeps what its entries share; D = λX with λ verified, for a few shapes X.
    Rounding of H is covered by the row sums of its absolute-value chain.

    Args:
        entries: the forms.
        point: a corner for each form.
    """
    F, T, d = point.x.shape
    H = point.x.new_zeros(F, T, T, d, d)
    size = torch.zeros_like(H)
    view = entries.view
    slot_i, slot_j = entries.at_i % T, entries.at_j % T
    for head, chosen in entries.by_head:
        Q, K = view.head_weight(view.q, head), view.head_weight(view.k, head)
        weight = (entries.weight[chosen] * view.scores.scale)[:, None, None]
        form, i, j = entries.form[chosen], slot_i[chosen], slot_j[chosen]
        for target, product in ((H, Q.T @ K * weight), (size, Q.abs().T @ K.abs() * weight.abs())):
            target.index_put_((form, i, j), product, accumulate=True)
            target.index_put_((form, j, i), product.mT, accumulate=True)
    H, size = (t.transpose(2, 3).reshape(F, T * d, T * d) for t in (H, size))
    H = 0.5 * (H + H.mT)
    lost = up(
        gamma(view.q.out_shape[1] + entries.longest + 16) * size.sum(-1) * (1.0 + gamma(T * d + 8)) + TINY
    )
    steep = point.slope.abs().flatten(1)
    rows = H.norm(dim=-1)
    for shape in (
        *(torch.maximum(steep, floor * steep.mean(-1, keepdim=True)) for floor in JOINT_FLOORS),
        rows,
        steep + rows,
    ):
        largest = shape.amax(-1, keepdim=True)
        floored = torch.maximum(shape, largest * 2.0**-12)
        positive = torch.where((largest > LEAST_SHAPE) & largest.isfinite(), floored, torch.ones_like(shape))
        yield up(certified_shift(H, positive).clamp(min=0.0) + lost).view(point.x.shape)


def _shaped_spectra(entries: Entries, X: Float[Tensor, "F T d"]) -> Float[Tensor, " N"]:
    """Return σ(X_i^{-½}MX_j^{-½}) per entry, and λ± of the same at i = j: verified, with scale, γ and centring."""
    view = entries.view
    out = torch.empty_like(entries.weight)
    d = X.shape[-1]
    inverse = 1.0 / X.flatten(0, 1)
    step = max(1, SHAPE_ELEMENTS // (d * view.q.out_shape[1]))
    for head, chosen in entries.by_head:
        Q, K, spread = view.turned_weights(head)
        for part in torch.split(chosen, step):
            q, k = Q[entries.position[part]], K[entries.key[part]]
            inverse_i, inverse_j = inverse[entries.at_i[part], None], inverse[entries.at_j[part], None]
            QQ, KK = (q * inverse_i) @ q.mT, (k * inverse_j) @ k.mT
            # Turning and scaling err column by column. Centring errs by the same amount in every column, which X^{-½}
            # weighs differently: relative to the result at most `spread` times the root of X's own range.
            uneven = max(float((inv.amax(-1) / inv.amin(-1)).max()) for inv in (inverse_i, inverse_j)) ** 0.5
            length = 8.0 * (d + 64) * spread * uneven
            if not (length < LONGEST_CHAIN and bool((QQ.isfinite() & KK.isfinite()).all())):
                out[part] = torch.inf
                continue
            own = entries.own[part]
            KQ = torch.where(own[:, None, None], (k * inverse_i) @ q.mT, 0.0)
            minus, plus = extreme_eigenvalues(GramBlocks.of(QQ, KQ, KK, int(length) + 1))
            out[part] = torch.where(entries.weight[part] > 0, plus, torch.where(own, minus, plus))
    return up(out * (view.scores.scale * (1.0 + gamma(8))))


def _rank_one_curvature(entries: Entries, point: Point) -> Float[Tensor, "F T"]:
    """Bound what the rank-one part of J = n(P − κeeᵀ) adds to the main term.

    (Jδ_i)ᵀM(Jδ_j) = n_in_j[δ_iᵀM̂δ_j − κ a_i e_iᵀM̂δ_j − κ a_j δ_iᵀM̂e_j + κκ a_ia_j e_iᵀM̂e_j], M̂ = PMP, and
    κ‖M̂ᵀe‖ ≤ ‖M̂ᵀy‖/√d: the last three have 2-norms of at most n_in_j/√d times V_j, V_i and min(V_i, V_j), V_j =
    ‖wM̂ᵀy_i‖, V_i = ‖wM̂y_j‖. At i = j each side counts once more.
    """
    view = entries.view
    at_i, at_j = entries.pulls(point.x)
    step_i, step_j = _wander(entries)
    slack = view.roundoff(entries.longest) * _entry_sizes(entries)
    V_i, V_j = at_i + step_i + slack[0], at_j + step_j + slack[1]
    n = view.n_high
    factor = n[entries.position] * n[entries.key] * view.center.shape[-1] ** -0.5 * (entries.bent > 0)
    size = up(factor * (V_i + V_j + torch.minimum(V_i, V_j)) * (1.0 + gamma(64)))
    return up(entries.per_slot(size, size) * (1.0 + gamma(entries.longest + 8)))


def _read_size(entries: Entries) -> Float[Tensor, "F T"]:
    """Bound the length of v's absolute-value chain, for the rounding of ‖Pv‖."""
    to_i, to_j = _entry_sizes(entries)
    return entries.per_slot(to_i, to_j)


def _entry_sizes(entries: Entries) -> Float[Tensor, "2 N"]:
    """Bound the lengths of each entry's absolute-value chains at its query and its key token."""
    view = entries.view
    gain = 1.0 if view.norm is None or view.norm.weight is None else float(view.norm.weight.abs().max())
    weight = entries.weight.abs() * view.scores.scale * gain * 4.0
    q = view.q_size[entries.position, entries.head].norm(dim=-1)
    k = view.k_size[entries.key, entries.head].norm(dim=-1)
    Q, K = view.head_weights(view.q), view.head_weights(view.k)
    to_i = weight * k * Q.flatten(1).norm(dim=-1)[entries.head]
    to_j = weight * q * K.flatten(1).norm(dim=-1)[entries.head]
    return torch.stack([to_i, to_j])


def _tilt(entries: Entries, slope: Float[Tensor, "F T d"]) -> Float[Tensor, " F"]:
    """Return τ per form.

    A coordinate's share of the slack grows like D²/slope, so curvature goes where slopes are steep.
    """
    steep = (slope.abs() * entries.view.problem.region.half_widths()[entries.tokens]).mean(-1).flatten()
    of_query = steep.new_zeros(entries.size).index_add(0, entries.form, steep[entries.at_i])
    of_key = steep.new_zeros(entries.size).index_add(0, entries.form, steep[entries.at_j])
    ratio = (of_query / of_key.clamp(min=TINY) / 2.0).clamp(min=2.0**-8, max=2.0**8)
    return ratio.pow(0.25)
