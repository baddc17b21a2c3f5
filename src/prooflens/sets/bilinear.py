"""Proved bounds of many sums of products of linear forms that share factors; no p × p matrix is ever formed.

An attention score is q·k with q = c_Q + G_Q α and k = c_K + G_K α: a quadratic in α whose Hessian UᵀV + VᵀU
(U = G_Q, V = G_K, both M × p) has rank at most 2M. Scale the factors, X = U diag(r), Y = V diag(r); then
XᵀY + YᵀX ⪯ μI gives UᵀV + VᵀU ⪯ μ diag(r⁻²), the diagonal shift of `prooflens.sets.quadratic`.

**The quick certificate.** For ab ≥ 1, XᵀY + YᵀX ⪯ aXᵀX + bYᵀY, so XᵀY + YᵀX ⪯ ½(aXᵀX + bYᵀY + XᵀY + YᵀX), which is
at most ½λ_max(N) for the M × M matrix N = aXXᵀ + bYYᵀ + XYᵀ + YXᵀ. It loses a few per cent.

**The tight certificate.** Let K = [X; Y][X; Y]ᵀ be the 2M × 2M Gram matrix and J = [0 I; I 0]. For μ > 0,
XᵀY + YᵀX ⪯ μI holds iff μK⁻¹ ⪰ J (K ≻ 0), so any K̄ ⪰ K may stand for K. Take K̄ = [CCᵀ, CBᵀ; BCᵀ, W] with floats
C, B, W: by a Schur complement μK̄⁻¹ ⪰ J follows from the M × M condition

    (μI − Z)(μI − Z)ᵀ ⪰ CᵀWC,   Z = CᵀB.

C is a floating Cholesky factor of XXᵀ + θI, B ≈ YXᵀC⁻ᵀ, W = YYᵀ + ωI; θ and ω exceed the rounding of the Gram
blocks and the residuals of C and B, which are computed, so K̄ ⪰ K is proved and not assumed. With Y → −Y the same
condition bounds the smallest eigenvalue.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.errors import SetError
from prooflens.numerics import down, gamma, is_psd, lambda_max_upper, up
from prooflens.numerics.rounding import TINY
from prooflens.sets.arrays import sum_up
from prooflens.sets.interval import Interval
from prooflens.sets.quadratic import quadratic_range

_GUESS_ACCURACY = 2.0**-18
"""How far above the float32 eigenvalue the first attempt goes, relative to it."""


def inner_product_range(
    cQ: Float[Tensor, "i m"],
    GQ: Float[Tensor, "i m p"],
    cK: Float[Tensor, "j m"],
    GK: Float[Tensor, "j m p"],
    *,
    scale: Float[Tensor, " p"] | None = None,
    tight: bool = False,
) -> Interval:
    """Bound all inner products (cQ_i + GQ_i α)·(cK_j + GK_j α) over α ∈ [−1,1]ᵖ; the bounds are proved.

    The inner product is the exact bilinear one of the CPZ algebra, but its h₁h₂ generators are never formed. One
    scale serves all pairs, so their Gram blocks are shared. Covered are the rounding of the centres and linear parts
    (γ_{2M}), of the Gram blocks, and of every step after. Complexity: O(ijM²p + ijM³).

    Args:
        cQ: centres of the queries, shape [i, m].
        GQ: generators of the queries, shape [i, m, p].
        cK: centres of the keys, shape [j, m].
        GK: generators of the keys, shape [j, m, p].
        scale: a positive number per factor, shape [p]; None to take it from column norms.
        tight: use the tight certificate, at about twice the time.

    Returns:
        An interval of shape [i, j].

    Raises:
        SetError: if shapes do not fit.

    Example:
        >>> c, G = torch.zeros(1, 1).double(), torch.ones(1, 1, 1).double()
        >>> box = inner_product_range(c, G, c, G)  # α·α ≤ 1
        >>> 1.0 <= box.upper.item() < 1.0 + 1e-6
        True
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
    X, Y = GQ * r, GK * r
    YY = Y @ Y.mT
    rows = []
    # Row by row of the score matrix: the blocks of one row fit into a cache, those of all rows do not.
    for x in X:
        YX = (Y.reshape(j * M, p) @ x.mT).view(j, M, M)
        gram = GramBlocks.of((x @ x.mT)[None], YX, YY, p)
        rows.append(extreme_eigenvalues(gram) if tight else quick_eigenvalues(gram))
    minus, plus = (torch.stack(side) for side in zip(*rows, strict=True))
    return _assemble(c, a, error, minus, plus, r)


def product_range(
    c: Float[Tensor, "*batch"],
    a: Float[Tensor, "*batch p"],
    U: Float[Tensor, "*batch m p"],
    V: Float[Tensor, "*batch m p"],
    *,
    scale: Float[Tensor, "*batch p"] | None = None,
    tight: bool = True,
) -> Interval:
    """Bound c + aᵀα + Σ_m (u_m·α)(v_m·α) over the box, batched; c, a, U and V are taken as exact.

    If 2M ≥ p the dense form is the smaller one, and `quadratic_range` answers.

    Args:
        c: constants, shape [...].
        a: linear coefficients, shape [..., p].
        U: left factors, shape [..., m, p].
        V: right factors, shape [..., m, p].
        scale: a positive number per factor, shape [..., p]; None to take it from column norms.
        tight: use the tight certificate.
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
    minus, plus = extreme_eigenvalues(gram) if tight else quick_eigenvalues(gram)
    return _assemble(c, a, torch.zeros_like(c), minus, plus, r)


def column_scale(
    U: Float[Tensor, "*batch i m p"], V: Float[Tensor, "*batch j m p"]
) -> Float[Tensor, "*batch p"]:
    """Return s_k = ‖U_·k‖‖V‖ + ‖V_·k‖‖U‖, averaged over the leading index: about the size of row k of UᵀV + VᵀU.

    For one square, U = V = uᵀ, it is proportional to |u_k|, and the shift bound is the exact maximum ‖u‖₁².
    """
    u, v = U.square().mean(-3).sum(-2), V.square().mean(-3).sum(-2)
    size = u.sqrt() * v.sum(-1, keepdim=True).sqrt() + v.sqrt() * u.sum(-1, keepdim=True).sqrt()
    mean = size.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, torch.maximum(size, mean * 2.0**-6), torch.ones_like(size))


@dataclass(frozen=True, eq=False)
class GramBlocks:
    """The blocks XXᵀ/4ⁱ, YXᵀ/2ⁱ⁺ʲ and YYᵀ/4ʲ of a Gram matrix, both traces near 1.

    XᵀY is unchanged when X and Y are scaled by inverse factors, so normalising each by itself loses nothing. If a
    trace is `negligible` (a token without perturbation, say) the blocks are zero.

    Attributes:
        XX: XXᵀ/4ⁱ.
        YX: YXᵀ/2ⁱ⁺ʲ.
        YY: YYᵀ/4ʲ.
        mass: an upper bound of ‖X‖_F² + ‖Y‖_F² after scaling.
        rounding: an upper bound of the blocks' rounding in the 2-norm.
        exponent: i + j.
        negligible: where a trace is too small to be scaled.
    """

    XX: Float[Tensor, "*batch m m"]
    YX: Float[Tensor, "*batch m m"]
    YY: Float[Tensor, "*batch m m"]
    mass: Float[Tensor, "*batch"]
    rounding: Float[Tensor, "*batch"]
    exponent: Float[Tensor, "*batch"]
    negligible: Bool[Tensor, "*batch"]

    @classmethod
    def of(cls, XX: Tensor, YX: Tensor, YY: Tensor, p: int) -> "GramBlocks":
        """Normalise by powers of two, so that nothing below overflows or underflows.

        The computed blocks differ from the real Gram matrix of U diag(r), V diag(r) by at most γ_{p+3}|X||X|ᵀ entry
        by entry (scaling errs by u in each factor), whose 2-norm is at most γ_{p+3}‖X‖_F², γ_{p+3} times the trace.
        Traces of at least 2⁻⁹⁰⁰ leave underflow, p·2⁻¹⁰⁷⁴ in an entry, far below that.

        Args:
            XX: the computed XXᵀ.
            YX: the computed YXᵀ.
            YY: the computed YYᵀ.
            p: the inner length of these products.

        Raises:
            SetError: if a trace is not finite.
        """
        M = XX.shape[-1]
        traces = _trace(XX), _trace(YY)
        if not all(bool(trace.isfinite().all()) for trace in traces):
            raise SetError("the generators of a product must be finite, and their squares too")
        negligible = (traces[0] < 2.0**-900) | (traces[1] < 2.0**-900)
        i, j = (
            # frexp's exponents are integers: their quotient would be float32, which ends at 2^±127.
            torch.where(trace < 2.0**-900, 0.0, torch.ceil(torch.frexp(trace).exponent.to(trace) / 2.0))
            for trace in traces
        )
        kept = (~negligible).to(XX.dtype)
        shrinkX, shrinkY, shrink = (kept * torch.exp2(-power) for power in (2.0 * i, 2.0 * j, i + j))
        mass = up((traces[0] * shrinkX + traces[1] * shrinkY) * (1.0 + gamma(2 * p + 2 * M + 16)))
        return cls(
            XX * shrinkX[..., None, None],
            YX * shrink[..., None, None],
            YY * shrinkY[..., None, None],
            mass,
            up(gamma(p + 8) * mass + TINY),
            i + j,
            negligible,
        )

    def restored(self, mu: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Turn a bound for the normalised form into one for the real form.

        Where ‖X‖² < 2⁻⁸⁹⁹, say, and ‖Y‖ ≤ 1 after its scaling, 2‖X‖‖Y‖ < 2⁻⁴⁴⁰.
        """
        return torch.where(self.negligible, 2.0**-440, mu) * torch.exp2(self.exponent)


def quick_eigenvalues(gram: GramBlocks) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Return (μ₋, μ₊), both ≥ 0, with −μ₋I ⪯ XᵀY + YᵀX ⪯ μ₊I proved by the quick certificate.

    a and b balance the traces; b = 1/a is rounded up so that ab ≥ 1. The Gram blocks' rounding enters N at most (a +
    b + 2) times, and adding up N costs γ_8 of sizes that are at most (a + b + 1)·mass in the Frobenius norm.
    """
    a = torch.where(gram.negligible, 1.0, (_trace(gram.YY) / _trace(gram.XX)).sqrt())
    b = up(1.0 / a)
    balanced = a[..., None, None] * gram.XX + b[..., None, None] * gram.YY
    cross = gram.YX + gram.YX.mT
    error = up(up(a + b + 2.0) * up(gram.rounding + gamma(16) * gram.mass))
    both = lambda_max_upper(_symmetrised(torch.stack([balanced - cross, balanced + cross])))
    minus, plus = up(0.5 * up(both.clamp(min=0.0) + error))
    return gram.restored(minus), gram.restored(plus)


def extreme_eigenvalues(
    gram: GramBlocks, *, attempts: int = 4
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Return (μ₋, μ₊), both ≥ 0, with −μ₋I ⪯ XᵀY + YᵀX ⪯ μ₊I proved by the tight certificate.

    If it fails the answer is ‖X‖_F² + ‖Y‖_F² ≥ 2‖X‖‖Y‖.

    Args:
        gram: the Gram blocks of X and Y.
        attempts: how many values of μ to try, each step eight times the one before.
    """
    M = gram.YX.shape[-1]
    batch = gram.YX.shape[:-2]
    eye = torch.eye(M, dtype=gram.YX.dtype, device=gram.YX.device)
    C, B, omega, sound = _factor(gram, eye)
    W = _plus_diagonal(gram.YY.expand(gram.YX.shape), omega)
    Z = C.mT @ B
    CWC = C.mT @ W @ C
    S, rest = Z + Z.mT, _symmetrised(CWC - Z @ Z.mT)
    # Frobenius sizes of everything that enters the certificate, for its a-priori error.
    sizeC, sizeB, sizeW = _frobenius(C), _frobenius(B), _frobenius(W)
    q, load = up(sizeC * sizeB), up(up(sizeC * sizeC) * sizeW)

    def error(mu: Tensor) -> Tensor:
        """Every product in the certificate has length M and at most three factors: γ_{8M+64} of the sizes."""
        return up(gamma(8 * M + 64) * up(up(up(mu + q) ** 2) + load))

    results = []
    for sign, guess in zip((-1.0, 1.0), _eigenvalue_guess(S, rest, eye), strict=True):
        best, open_ = gram.mass.expand(batch).clone(), (sound & ~gram.negligible).expand(batch)
        base = guess.clamp(min=0.0)
        step = torch.maximum(
            4.0 * error(base) / torch.maximum(base, 0.01 * gram.mass), _GUESS_ACCURACY * base
        )
        for attempt in range(attempts):
            mu = base + 8.0**attempt * step
            condition = torch.addcmul(rest, S, (sign * mu)[..., None, None]).neg_()
            condition.diagonal(dim1=-2, dim2=-1).add_((mu * mu - error(mu))[..., None])
            proved = open_ & is_psd(condition)
            best = torch.where(proved, torch.minimum(best, mu), best)
            open_ = open_ & ~proved
            if not bool(open_.any()):
                break
        results.append(gram.restored(best))
    return results[0], results[1]


def _factor(gram: GramBlocks, eye: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return C, B, ω and where [CCᵀ, CBᵀ; BCᵀ, YYᵀ + ωI] ⪰ K is proved.

    The difference is [CCᵀ − XXᵀ, −Eᵀ; −E, ωI] with E = YXᵀ − BCᵀ, plus the rounding of the blocks. It is positive
    semidefinite if CCᵀ − XXᵀ ⪰ (rounding + ‖E‖)I and ω ≥ rounding + ‖E‖.
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
    excess = up(_frobenius(residual) + up(size + gamma(4) * (gram.mass + theta)))
    E = gram.YX - B @ C.mT
    spill = up(_frobenius(E) * (1.0 + gamma(4)))
    spill = up(spill + up(gamma(M + 4) * up(_frobenius(B) * _frobenius(C)) + gamma(4) * _frobenius(gram.YX)))
    omega = up(up(gram.rounding + spill) * (1.0 + gamma(4)))
    sound = (info == 0) & (theta >= up(excess + omega))
    return C, B, up(omega + gamma(4) * (gram.mass + omega)), sound


def _eigenvalue_guess(S: Tensor, rest: Tensor, eye: Tensor) -> tuple[Tensor, Tensor]:
    """Approximate −λ_min and λ_max of [S, L; Lᵀ, 0] with LLᵀ = rest: the roots of μ²I = μS + rest.

    It runs in float32, which is a third faster: the certificate decides, and `_GUESS_ACCURACY` of slack costs
    nothing.
    """
    M = eye.shape[-1]
    L, info = torch.linalg.cholesky_ex(_plus_diagonal(rest, torch.full_like(S[..., 0, 0], gamma(64 * M))))
    if bool((info != 0).any()):
        L = torch.where((info == 0)[..., None, None], L, torch.zeros_like(L))
    whole = torch.zeros((*S.shape[:-2], 2 * M, 2 * M), dtype=torch.float32, device=S.device)
    whole[..., :M, :M] = S
    # eigvalsh reads the lower triangle only.
    whole[..., M:, :M] = L.mT
    # Where the certificate's matrices have left the numbers it proves nothing, whatever the guess.
    whole.nan_to_num_(0.0, 0.0, 0.0)
    values = torch.linalg.eigvalsh(whole).to(S.dtype)
    return -values[..., 0], values[..., -1]


def _assemble(c: Tensor, a: Tensor, error: Tensor, minus: Tensor, plus: Tensor, r: Tensor) -> Interval:
    """Return c ± (‖a‖₁ + error) and the two shifts ½μ Σ_k r_k⁻²; μ ≥ 0, so each scalar maximum lies at |t| = 1."""
    inverse = up(1.0 / r)
    weight = up(0.5 * sum_up(up(inverse * inverse)))
    linear = up(sum_up(a.abs()) + error)
    return Interval(
        down(c - up(linear + up(minus * weight))),
        up(c + up(linear + up(plus * weight))),
    )


def _root_scale(scale: Tensor) -> Tensor:
    """Return r = s^{-½}; only r enters the proof, so its rounding does not matter."""
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise SetError("a scale must be positive and finite")
    return scale.rsqrt()


def _symmetrised(A: Tensor) -> Tensor:
    return (A + A.mT).mul_(0.5)


def _trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


def _plus_diagonal(A: Tensor, shift: Tensor) -> Tensor:
    """Return A + shift·I in a fresh tensor."""
    moved = A.clone()
    moved.diagonal(dim1=-2, dim2=-1).add_(shift[..., None])
    return moved


def _frobenius(A: Tensor) -> Tensor:
    """Return ‖A‖_F rounded up; entries are near 1 or smaller here, so squares that underflow add less than 2⁻⁵⁰⁰."""
    entries = A.shape[-1] * A.shape[-2]
    norm: Tensor = torch.linalg.matrix_norm(A)
    return up(norm * (1.0 + gamma(2 * entries + 16)) + 2.0**-500)
