"""Proved bounds of many sums of products of linear forms that share factors; no p × p matrix is ever formed.

An attention score is q·k with q = c_Q + G_Q α and k = c_K + G_K α: a quadratic in α whose Hessian UᵀV + VᵀU
(U = G_Q, V = G_K, both M × p) has rank at most 2M. Scale the factors, X = U diag(r), Y = V diag(r); then
XᵀY + YᵀX ⪯ μI gives UᵀV + VᵀU ⪯ μ diag(r⁻²), the diagonal shift of `prooflens.sets.quadratic`.

**The small certificate.** Let K = [X; Y][X; Y]ᵀ be the 2M × 2M Gram matrix and J = [0 I; I 0]. For μ > 0,
XᵀY + YᵀX ⪯ μI holds iff μK⁻¹ ⪰ J (K ≻ 0), so any K̄ ⪰ K may stand for K. Take K̄ = [CCᵀ, CBᵀ; BCᵀ, W] with floats
C, B, W: by a Schur complement μK̄⁻¹ ⪰ J follows from the M × M condition

    (μI − Z)(μI − Z)ᵀ ⪰ CᵀWC,   Z = CᵀB.

C is a floating Cholesky factor of XXᵀ + θI, B ≈ YXᵀC⁻ᵀ, W = YYᵀ + ωI; θ and ω exceed the rounding of the Gram
blocks and the residuals of C and B, which are computed, so K̄ ⪰ K is proved and not assumed. With Y → −Y the same
condition bounds the smallest eigenvalue.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import SetError
from prooflens.numerics import down, gamma, is_psd, up
from prooflens.numerics.rounding import TINY
from prooflens.sets.arrays import sum_up
from prooflens.sets.interval import Interval
from prooflens.sets.quadratic import quadratic_range


def inner_product_range(
    cQ: Float[Tensor, "i m"],
    GQ: Float[Tensor, "i m p"],
    cK: Float[Tensor, "j m"],
    GK: Float[Tensor, "j m p"],
    *,
    scale: Float[Tensor, " p"] | None = None,
) -> Interval:
    """Bounds of all inner products (cQ_i + GQ_i α)·(cK_j + GK_j α) over α ∈ [−1,1]ᵖ, an interval of shape i × j.

    The inner product is the exact bilinear one of the CPZ algebra, never its h₁h₂ generators. One scale (positive,
    by default from column norms) serves all pairs, so their Gram blocks come from three matrix products. Covered:
    the rounding of the centres and linear parts (γ_{2M}), of the Gram blocks, and of every step after.

    Complexity: O(ijM²p + ijM³).
    """
    (i, M, p), j = GQ.shape, GK.shape[0]
    if GK.shape[1:] != (M, p) or cQ.shape != (i, M) or cK.shape != (j, M):
        raise SetError(
            f"shapes do not fit: cQ {tuple(cQ.shape)}, GQ {tuple(GQ.shape)}, "
            f"cK {tuple(cK.shape)}, GK {tuple(GK.shape)}"
        )
    c = cQ @ cK.mT
    fromQ = torch.einsum("imp,jm->ijp", GQ, cK)
    a = fromQ + torch.einsum("jmp,im->ijp", GK, cQ)
    size = cQ.abs() @ cK.abs().mT + GQ.abs().sum(-1) @ cK.abs().mT + cQ.abs() @ GK.abs().sum(-1).mT
    error = up(gamma(2 * M + 2 * p + 16) * size + TINY)
    r = _root_scale(column_scale(GQ, GK) if scale is None else scale)
    X, Y = (GQ * r).reshape(i * M, p), (GK * r).reshape(j * M, p)
    XX = torch.stack([x @ x.mT for x in X.view(i, M, p)])
    YY = torch.stack([y @ y.mT for y in Y.view(j, M, p)])
    YX = (Y @ X.mT).view(j, M, i, M).permute(2, 0, 1, 3)
    gram = GramBlocks.of(XX[:, None], YX, YY[None, :], p)
    return _assemble(c, a, error, gram, r)


def product_range(
    c: Float[Tensor, "*batch"],
    a: Float[Tensor, "*batch p"],
    U: Float[Tensor, "*batch m p"],
    V: Float[Tensor, "*batch m p"],
    *,
    scale: Float[Tensor, "*batch p"] | None = None,
) -> Interval:
    """Bounds of c + aᵀα + Σ_m (u_m·α)(v_m·α) over the box, batched; c, a, U, V are taken as exact.

    Where 2M ≥ p the dense form is the smaller one and `quadratic_range` answers.
    """
    M, p = U.shape[-2:]
    if V.shape[-2:] != (M, p) or a.shape[-1] != p:
        raise SetError(f"shapes do not fit: a {tuple(a.shape)}, U {tuple(U.shape)}, V {tuple(V.shape)}")
    if p <= 2 * M:
        product = U.mT @ V
        size = up(
            gamma(M) * (U.abs().sum(-1) * V.abs().sum(-1)).sum(-1) * (1.0 + gamma(2 * p + M + 8)) + TINY
        )
        dense = quadratic_range(c, a, product + product.mT)
        # Forming the sum errs by at most u|sum|, and |sum| ≤ 2|U|ᵀ|V|: one more γ.
        extra = up(size * 2.0 + TINY)
        return Interval(down(dense.lower - extra), up(dense.upper + extra))
    r = _root_scale(column_scale(U[..., None, :, :], V[..., None, :, :]) if scale is None else scale)
    X, Y = U * r[..., None, :], V * r[..., None, :]
    gram = GramBlocks.of(X @ X.mT, Y @ X.mT, Y @ Y.mT, p)
    return _assemble(c, a, torch.zeros_like(c), gram, r)


def column_scale(
    U: Float[Tensor, "*batch i m p"], V: Float[Tensor, "*batch j m p"]
) -> Float[Tensor, "*batch p"]:
    """s_k = ‖U_·k‖‖V_·k‖, about the size of row k of UᵀV + VᵀU: a good scale when nothing better is known."""
    size = (U.square().mean(-3).sum(-2) * V.square().mean(-3).sum(-2)).sqrt()
    mean = size.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, torch.maximum(size, mean * 2.0**-6), torch.ones_like(size))


@dataclass(frozen=True, eq=False)
class GramBlocks:
    """XXᵀ, YXᵀ, YYᵀ divided by 4^exponent, and a bound of what rounding may have cost them in the 2-norm."""

    XX: Float[Tensor, "*batch m m"]
    YX: Float[Tensor, "*batch m m"]
    YY: Float[Tensor, "*batch m m"]
    mass: Float[Tensor, "*batch"]
    rounding: Float[Tensor, "*batch"]
    exponent: Float[Tensor, "*batch"]

    @classmethod
    def of(cls, XX: Tensor, YX: Tensor, YY: Tensor, p: int) -> "GramBlocks":
        """Normalise to a trace near 1, so that nothing below over- or underflows.

        The computed blocks differ from the real Gram matrix of U diag(r), V diag(r) by at most γ_{p+3}|X||X|ᵀ entry by
        entry (scaling errs by u in each factor), whose 2-norm is at most γ_{p+3}‖X‖_F², γ_{p+3} times the trace.
        """
        M = XX.shape[-1]
        trace = _trace(XX) + _trace(YY)
        if not bool(trace.isfinite().all()):
            raise SetError("the generators of a product must be finite, and their squares too")
        exponent = torch.ceil(torch.frexp(trace).exponent.to(trace.dtype) / 2.0)
        shrink = torch.exp2(-2.0 * exponent)
        mass = up(trace * shrink * (1.0 + gamma(2 * p + 2 * M + 16)))
        grid = shrink[..., None, None]
        return cls(XX * grid, YX * grid, YY * grid, mass, up(gamma(p + 8) * mass + TINY), exponent)


def extreme_eigenvalues(
    gram: GramBlocks, *, attempts: int = 4
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """(μ₋, μ₊), both ≥ 0, with −μ₋I ⪯ XᵀY + YᵀX ⪯ μ₊I proved.

    Where the certificate fails the answer is ‖X‖_F² + ‖Y‖_F² ≥ 2‖X‖‖Y‖.
    """
    M = gram.YX.shape[-1]
    batch = gram.YX.shape[:-2]
    eye = torch.eye(M, dtype=gram.YX.dtype, device=gram.YX.device)
    C, B, omega, sound = _factor(gram, eye)
    W = gram.YY + omega[..., None, None] * eye
    Z = C.mT @ B
    CWC = C.mT @ W @ C
    S, rest = Z + Z.mT, 0.5 * (CWC + CWC.mT) - _symmetrised(Z @ Z.mT)
    # Frobenius sizes of everything that enters the certificate, for its a-priori error.
    sizeC, sizeB, sizeW = _frobenius(C), _frobenius(B), _frobenius(W)
    q = up(sizeC * sizeB)
    load = up(up(sizeC * sizeC) * sizeW)
    results = []
    guesses = _eigenvalue_guess(S, rest, eye)
    for sign, guess in zip((-1.0, 1.0), guesses, strict=True):
        best, open_ = gram.mass.expand(batch).clone(), sound.expand(batch)
        for attempt in range(attempts):
            base = guess.clamp(min=0.0)
            error = gamma(8 * M + 64) * up(up((base + q) * (base + q)) + load)
            mu = base + 4.0 * 16.0**attempt * error / torch.maximum(base, 0.01 * gram.mass)
            # Every product below has length M and at most three factors, so γ_{8M+64} of the sizes covers it all.
            error = up(gamma(8 * M + 64) * up(up(up((mu + q) * (mu + q))) + load))
            condition = (mu * mu - error)[..., None, None] * eye - sign * mu[..., None, None] * S - rest
            proved = open_ & is_psd(condition)
            best = torch.where(proved, torch.minimum(best, mu), best)
            open_ = open_ & ~proved
            if not bool(open_.any()):
                break
        results.append(best * torch.exp2(2.0 * gram.exponent))
    return results[0], results[1]


def _factor(gram: GramBlocks, eye: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """C, B, ω and where [CCᵀ, CBᵀ; BCᵀ, YYᵀ + ωI] ⪰ K is proved.

    The difference is [CCᵀ − XXᵀ, −Eᵀ; −E, ωI] with E = YXᵀ − BCᵀ, plus the rounding of the blocks: positive
    semidefinite when CCᵀ − XXᵀ ⪰ (rounding + ‖E‖)I and ω ≥ rounding + ‖E‖.
    """
    M = eye.shape[-1]
    p_term = (
        gram.rounding.amax() / gram.mass.clamp(min=0.25).amin() if gram.mass.numel() else gram.rounding.sum()
    )
    # θ is taken per X alone (its factor is shared by every Y), large enough for all of them.
    theta = (8.0 + 2.0 * M**0.5) * (4.0 * float(p_term) + gamma(8 * M + 64))
    C, info = torch.linalg.cholesky_ex(gram.XX + theta * eye)
    C = torch.where((info == 0)[..., None, None], C, eye)
    B = torch.linalg.solve_triangular(C, gram.YX.mT, upper=False).mT
    residual = gram.XX + theta * eye - C @ C.mT
    size = up(gamma(M + 4) * up(_frobenius(C) * _frobenius(C)))
    excess = up(_row_sums(residual) + up(size + gamma(4) * (gram.mass + theta)))
    E = gram.YX - B @ C.mT
    spill = up(torch.maximum(_row_sums(E), _row_sums(E.mT)) * (1.0 + gamma(4)))
    spill = up(spill + up(gamma(M + 4) * up(_frobenius(B) * _frobenius(C)) + gamma(4) * _frobenius(gram.YX)))
    omega = up(up(gram.rounding + spill) * (1.0 + gamma(4)))
    sound = (info == 0) & (theta >= up(excess + omega))
    return C, B, up(omega + gamma(4) * (gram.mass + omega)), sound


def _eigenvalue_guess(S: Tensor, rest: Tensor, eye: Tensor) -> tuple[Tensor, Tensor]:
    """Floating −λ_min and λ_max of [S, L; Lᵀ, 0] with LLᵀ = rest: the roots of μ²I = μS + rest."""
    L, info = torch.linalg.cholesky_ex(rest + gamma(64 * eye.shape[-1]) * eye)
    L = torch.where((info == 0)[..., None, None], L, torch.zeros_like(L))
    top = torch.cat([S, L], dim=-1)
    bottom = torch.cat([L.mT, torch.zeros_like(S)], dim=-1)
    values = torch.linalg.eigvalsh(torch.cat([top, bottom], dim=-2))
    return -values[..., 0], values[..., -1]


def _assemble(c: Tensor, a: Tensor, error: Tensor, gram: GramBlocks, r: Tensor) -> Interval:
    """c ± (‖a‖₁ + error) and the two shifts ½μ Σ_k r_k⁻²; μ ≥ 0, so each scalar maximum lies at |t| = 1."""
    minus, plus = extreme_eigenvalues(gram)
    inverse = up(1.0 / r)
    weight = up(0.5 * sum_up(up(inverse * inverse)))
    linear = up(sum_up(a.abs()) + error)
    return Interval(
        down(c - up(linear + up(minus * weight))),
        up(c + up(linear + up(plus * weight))),
    )


def _root_scale(scale: Tensor) -> Tensor:
    """r = s^{-½}; only r enters the proof, so its rounding does not matter."""
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise SetError("a scale must be positive and finite")
    return scale.rsqrt()


def _symmetrised(A: Tensor) -> Tensor:
    return 0.5 * (A + A.mT)


def _trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


def _row_sums(A: Tensor) -> Tensor:
    """The largest absolute row sum, rounded up: a bound of the 2-norm of a symmetric matrix."""
    return up(A.abs().sum(dim=-1).amax(dim=-1) * (1.0 + gamma(A.shape[-1] + 2)))


def _frobenius(A: Tensor) -> Tensor:
    """‖A‖_F, rounded up; entries are near 1 or smaller here, so squares that underflow add less than 2⁻⁵⁰⁰."""
    entries = A.shape[-1] * A.shape[-2]
    norm: Tensor = torch.linalg.matrix_norm(A)
    return up(norm * (1.0 + gamma(2 * entries + 16)) + 2.0**-500)
