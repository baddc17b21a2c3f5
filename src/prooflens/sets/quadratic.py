"""Proved bounds of p(α) = c + aᵀα + ½αᵀHα over the box α ∈ [−1,1]ᵖ, batched over leading dimensions.

Maximising an indefinite quadratic over a box is NP-hard; a local search gives *lower* bounds of the maximum. Upper
bounds come from a diagonal shift: for every d with diag(d) ⪰ H, αᵀHα ≤ Σ d_k α_k², so

    max p ≤ c + Σ_k max_{|t| ≤ 1} (a_k t + ½ d_k t²).

Row sums d_k = H_kk + Σ_{l≠k}|H_kl| give a bound never above Lemma `lem:quadratic_bound`; a scaled eigenvalue,
d = λ_max(S^{-½}HS^{-½})·s, is usually far below. The best is returned. Every number is a bound of the real optimum of
the polynomial with exactly the given float64 coefficients: sums carry γ_n terms, shifts are proved by
`prooflens.numerics.psd`, and the symmetrisation of H is accounted for. Rounding that made c, a, H is the caller's.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import SetError
from prooflens.numerics import certified_shift, gamma, gershgorin_shift, up
from prooflens.numerics.rounding import TINY
from prooflens.sets.arrays import sum_up
from prooflens.sets.interval import Interval


def scalar_maximum(a: Float[Tensor, "*shape"], d: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Bound max_{|t| ≤ 1} (a t + ½ d t²) from above, within a few ulp.

    For d < 0 and |a| < −d the maximum lies inside, at t = −a/d, and is a²/(2|d|); else at t = sign(a), |a| + ½d. It
    does not decrease in d, so an upper bound of d may stand for d.

    Args:
        a: linear coefficients, any shape.
        d: quadratic coefficients, the same shape.

    Example:
        >>> a, d = torch.tensor([1.0, 3.0]).double(), torch.tensor([-2.0, 2.0]).double()
        >>> [round(x, 9) for x in scalar_maximum(a, d).tolist()]  # 1²/(2·2) and 3 + ½·2
        [0.25, 4.0]
    """
    edge = up(a.abs() + up(0.5 * d))
    inside = (d < 0) & (a.abs() < -d)
    # (|a|/|d|)·|a| rather than a²/|d|: the quotient is below 1, so nothing overflows.
    ratio = up(a.abs() / torch.where(inside, -d, torch.ones_like(d)))
    return torch.where(inside, up(0.5 * up(ratio * a.abs())), edge)


def shift_upper(
    c: Float[Tensor, "*batch"], a: Float[Tensor, "*batch p"], d: Float[Tensor, "*batch p"]
) -> Float[Tensor, "*batch"]:
    """Return c + Σ_k max_{|t| ≤ 1}(a_k t + ½ d_k t²), rounded up: it bounds p for any d with diag(d) ⪰ H.

    Args:
        c: constants, shape [...].
        a: linear coefficients, shape [..., p].
        d: diagonal shifts, shape [..., p].
    """
    return up(c + sum_up(scalar_maximum(a, d)))


def lemma_upper(
    c: Float[Tensor, "*batch"], a: Float[Tensor, "*batch p"], H: Float[Tensor, "*batch p p"]
) -> Float[Tensor, "*batch"]:
    """Return Lemma `lem:quadratic_bound`: c + ‖a‖₁ + Σ_k max(0, ½H_kk) + Σ_{k<l} |½(H_kl + H_lk)|, rounded up.

    H need not be symmetric: the coefficient of α_kα_l is ½(H_kl + H_lk), not twice one of them (the paper's width of
    a bilinear form takes 2|M_kl|; soundness.md, row 10).

    Args:
        c: constants, shape [...].
        a: linear coefficients, shape [..., p].
        H: Hessians, shape [..., p, p].

    Example:
        >>> c, a = torch.ones(()).double(), torch.tensor([1.0, 0.0]).double()
        >>> H = torch.tensor([[2.0, 1.0], [1.0, -2.0]]).double()
        >>> round(lemma_upper(c, a, H).item(), 9)  # 1 + 1 + ½·2 + 1
        4.0
    """
    both = 0.5 * (H + H.mT)
    diagonal = both.diagonal(dim1=-2, dim2=-1)
    off = both.abs() - torch.diag_embed(diagonal.abs())
    pairs = up(0.5 * sum_up(off.flatten(-2)))
    pairs = up(pairs * (1.0 + gamma(2))) + TINY
    return up(c + up(sum_up(a.abs()) + up(sum_up(0.5 * diagonal.clamp(min=0)) + pairs)))


def quadratic_upper(
    c: Float[Tensor, "*batch"],
    a: Float[Tensor, "*batch p"],
    H: Float[Tensor, "*batch p p"],
    *,
    reweightings: int = 3,
) -> Float[Tensor, "*batch"]:
    """Bound max p over the box from above; the bound is proved.

    It is the best of row sums, λ_max·1 and `reweightings` + 1 scaled eigenvalue shifts. Each scaling costs one
    eigendecomposition and one verified factorisation; more of them never loosen the bound. Complexity: O((3 +
    reweightings) p³) per quadratic.

    Args:
        c: constants, shape [...].
        a: linear coefficients, shape [..., p].
        H: Hessians, shape [..., p, p].
        reweightings: how many extra scalings to try.

    Raises:
        SetError: if shapes do not fit, or an entry is not a finite float64.

    Example:
        >>> c, a = torch.zeros(()).double(), torch.zeros(2).double()
        >>> H = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).double()  # −½(α₁ − α₂)²
        >>> round(quadratic_upper(c, a, H).item(), 6) + 0.0
        0.0
    """
    c, a, H = _parse(c, a, H)
    S, slack = symmetric_part(H)
    best = shift_upper(c, a, gershgorin_shift(S))
    if S.shape[-1] > 0:
        best = torch.minimum(best, shift_upper(c, a, certified_shift(S)))
        scale = _positive(S.norm(dim=-1))
        for step in range(reweightings + 1):
            best = torch.minimum(best, shift_upper(c, a, certified_shift(S, scale)))
            if step < reweightings:
                scale = _reweighted(S, scale)
    return up(best + slack)


def quadratic_lower(
    c: Float[Tensor, "*batch"],
    a: Float[Tensor, "*batch p"],
    H: Float[Tensor, "*batch p p"],
    *,
    reweightings: int = 3,
) -> Float[Tensor, "*batch"]:
    """Bound min p over the box from below: minus the upper bound of −p.

    Args:
        c: constants, shape [...].
        a: linear coefficients, shape [..., p].
        H: Hessians, shape [..., p, p].
        reweightings: how many extra scalings to try.
    """
    return -quadratic_upper(-c, -a, -H, reweightings=reweightings)


def quadratic_range(
    c: Float[Tensor, "*batch"],
    a: Float[Tensor, "*batch p"],
    H: Float[Tensor, "*batch p p"],
    *,
    reweightings: int = 3,
) -> Interval:
    """Return an interval that contains p(α) for every α in the box.

    Args:
        c: constants, shape [...].
        a: linear coefficients, shape [..., p].
        H: Hessians, shape [..., p, p].
        reweightings: how many extra scalings to try.
    """
    return Interval(
        quadratic_lower(c, a, H, reweightings=reweightings),
        quadratic_upper(c, a, H, reweightings=reweightings),
    )


def symmetric_part(
    H: Float[Tensor, "*batch p p"],
) -> tuple[Float[Tensor, "*batch p p"], Float[Tensor, "*batch"]]:
    """Return S = fl(½(H + Hᵀ)) and e with |½αᵀHα − ½αᵀSα| ≤ e on the box; e = 0 if H is symmetric already."""
    S = 0.5 * H + 0.5 * H.mT
    exact = (H.mT == H).all(dim=-1).all(dim=-1)
    S = torch.where(exact[..., None, None], H, S)
    slack = up(gamma(4) * sum_up(S.abs().flatten(-2)) + TINY)
    return S, torch.where(exact, torch.zeros_like(slack), slack)


def _parse(c: Tensor, a: Tensor, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = a.shape[-1]
    if H.shape[-2:] != (p, p):
        raise SetError(f"H has shape {tuple(H.shape)}, but a has {p} factors")
    if any(x.dtype != torch.float64 for x in (c, a, H)):
        raise SetError("quadratic bounds are proved in float64; convert c, a and H first")
    if not all(bool(x.isfinite().all()) for x in (c, a, H)):
        raise SetError("a quadratic with NaN or infinite coefficients has no bound")
    batch = torch.broadcast_shapes(c.shape, a.shape[:-1], H.shape[:-2])
    return c.expand(batch), a.expand(*batch, p), H.expand(*batch, p, p)


def _positive(scale: Tensor) -> Tensor:
    """Return the scale with its smallest entries lifted: any positive scale is valid, a tiny one spoils the guess."""
    largest = scale.amax(dim=-1, keepdim=True)
    return torch.where(largest > 0, torch.maximum(scale, largest * 2.0**-10), torch.ones_like(scale))


def _reweighted(S: Tensor, scale: Tensor) -> Tensor:
    """Return a better scale; it is only a guess, and the shift made of it is proved afterwards.

    At the minimum of Σd over diag(d) ⪰ H the null vectors w of diag(d) − H satisfy Σ w_k² = const. So raise s_k where
    the (softly) leading eigenvectors are heavy and lower it elsewhere.
    """
    root = scale.rsqrt()
    values, vectors = torch.linalg.eigh(root[..., :, None] * S * root[..., None, :])
    top, spread = values[..., -1:], values[..., -1:] - values[..., :1]
    softness = torch.exp((values - top) / (0.05 * spread).clamp(min=TINY))
    density = ((root[..., None] * vectors).square() * softness[..., None, :]).sum(dim=-1)
    relative = density / density.mean(dim=-1, keepdim=True).clamp(min=TINY)
    return _positive(scale * relative.clamp(min=2.0**-6, max=2.0**6).sqrt())
