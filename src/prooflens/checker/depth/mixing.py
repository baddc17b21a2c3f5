"""Softmax mixing as a site: the next stream x_t = stream_t + W_O Σ_j σ_j V_j + b_O of a query token t, over heads h
and keys j.

Let s be the weights at the centre (floats, made to sum to 1), z = Σ s V, g_j = W_O(V_j − z), and b_j how far score j
moves beyond the mean Σ s b, which softmax does not see. The weights are s e^b/(1 + Q) with Q = Σ s(e^b − 1) ≥ 0
(Jensen). Write b = ℓ + b_e, ℓ linear in the factors, b_e = what e adds to that and the products of moves p. With
R_n(b) = e^b − Σ_{k<n} b^k/k! and Σ s g = 0, exactly,

    x_t = (linear in α and in e)
        + Σ s g p + ½Σ s g ℓ² + Σ s ℓ W_O A_vα                                       second order, at Aα
        + Σ s g (p − p_AA) + Σ s g [½b_e(b + ℓ) + R₃(b) − (e^b − 1)Q/(1 + Q)]         beyond
        + Σ s [b_e + R₂(b) − e^b Q/(1 + Q)] W_O A_vα + Σ s [e^b/(1 + Q) − 1] W_O e_V.

Where scores are capped (`caps`), p and what e adds are times λ, and b_e holds κℓ̂² + x too, ℓ̂ the linear part in front
of the cap: Σ s g κℓ̂² is of second order, and Σ s g x is a box.

**Budgets.** Let b̄ = |ℓ| + E ≥ |b|, |b_e| ≤ E, b̄ ≤ β, and Σ s b̄² ≤ W over all heads and keys (one eigenvalue for ℓ;
(√λ + √(Σ sE²))²). With t_j = s b̄²/W, Σ t ≤ 1, every coefficient above is at most Z_j√t_j, so the sums lie in E(Σ
Z_j² g_jg_jᵀ) and the like:

    s E b̄ ≤ E√(sW)√t,   s|R_n(b)| ≤ r_n√(W min(W, sβ²))√t,  r_n = R_n(β)/β²,   s|e^b − 1| ≤ r₁√(sW)√t,  r₁ = R₁(β)/β.

Q is at most Q̄_h = Σ_j s R₂(β) in head h. In Σ_j s e^b/(1 + Q) W_O δ_j the weights sum to 1 and are at most s e^β, so
it lies in E(e^β Σ_j s W_OΔ_jW_Oᵀ), and Q ≤ r₂m_h with m_h = Σ_j s b̄² ≤ √(W_hW)√(t_h), Σ t_h ≤ 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from flint import arb

from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.row import Row
from prooflens.checker.depth.scores import Heads, ScoreSite
from prooflens.checker.depth.shapes import Array, ball, frobenius, gamma, length, total, up
from prooflens.checker.depth.values import Chain, Value

log = np.frompyfunc(lambda v: arb(v).log(), 1, 1)


@dataclass(eq=False)
class MixSite:
    """The mixing of a layer, for all query tokens.

    Attributes:
        scores: the scores.
        v: values.
        stream: what the mixing is added to.
        out: W_O [d, H·c].
        bias: b_O [d].
    """

    scores: ScoreSite
    v: Heads
    stream: Value
    out: Array
    bias: Array

    def __post_init__(self) -> None:
        mask = self.scores.mask
        a = np.where(mask, self.scores.center, -np.inf)
        e = np.exp(a - a.max(-1, keepdims=True))
        self.s = e / e.sum(-1, keepdims=True)
        self.H, self.S, _ = self.s.shape
        self.O = self.out.reshape(len(self.out), self.H, -1)
        self.z = np.einsum("hij,jhc->ihc", self.s, self.v.c)
        self.beyond: dict[int, Array] = {}
        self.missed: dict[int, Array] = {}
        self.noises: dict[int, float] = {}
        self.tokens: list[int] = []

    @cached_property
    def weight_errors(self) -> tuple[Array, float]:
        """How far the scores are from log s, up to a shift per row [H, S, 1], and how far rows of s are from sum 1.

        So no exponential is trusted: s is taken as it is, and what the scores are beyond log s counts as a move of b.
        """
        off, short = np.zeros((self.H, self.S, 1)), 0.0
        for h in range(self.H):
            for i in range(self.S):
                keys = self.scores.mask[h, i]
                s = self.s[h, i, keys]
                if not (s > 0.0).all():
                    return np.full_like(off, np.inf), np.inf
                gaps = [
                    arb(x) - y for x, y in zip(self.scores.center[h, i, keys].tolist(), log(s), strict=True)
                ]
                off[h, i] = 2.0 * max(float(abs(gap - gaps[0].mid()).upper()) for gap in gaps)
                short = max(short, abs(math.fsum([*s.tolist(), -1.0])) + 2.0**-53)
        return up(off), short

    def next(self, tokens: list[int]) -> Chain:
        """The root behind the mixing: for some tokens, in that order; the others are left out."""
        self.tokens = tokens
        found = [self._token(t) for t in tokens]
        c, N, own, A = (np.stack(part) for part in zip(*found, strict=True))
        return self.stream.chain.followed_by(c, N, own, A)

    def _token(self, t: int) -> tuple[Array, Array, Array, Array]:
        """Centre and linear part of a token behind the mixing, what it misses from here, and its Jacobian by the root.

        What it misses is the mixing's own and what the sites of the chain left; the root's e comes by its origins.
        """
        row = Row(self, t)
        c = self.stream.c[t] + self.out @ self.z[t].ravel() + self.bias
        N = self.stream.linear[t] + row.linear
        self.noises[t] = row.noise
        self.beyond[t] = total([*row.beyond(), ball(np.asarray(row.noise), len(c))])
        second = row.second()
        self.missed[t] = total([*second, self.beyond[t]])
        return c, N, total([*row.carried(), *second, self.beyond[t]]), row.by_root()

    def form(self, v: Array, t: int) -> tuple[Quadratic, float]:
        """The second order of query token t as a covector v sees it: one form of the factors, and its error.

        With ω = vW_O and c = s v·g: Σ (½c ℓ + s ω·A_v) ⊗ ℓ + Σ A_q ⊗ (Σ_j c·scale·λ A_k), far fewer products than q
        has, and Σ cκ ℓ̂ ⊗ ℓ̂ where scores are capped.
        """
        row, scores, p = Row(self, t), self.scores, self.scores.q.A.shape[-1]
        omega = np.einsum("d,dhc->hc", v, self.O)
        c = row.s * np.einsum("d,dhj->hj", v, row.g)
        seen = np.stack([omega[h] @ self.v.A[:, g] for h, g in enumerate(self.v.groups)])
        met_by = c * scores.factors[:, t]
        keys = np.stack([np.tensordot(met_by[h], scores.k.A[:, g], 1) for h, g in enumerate(scores.k.groups)])
        L = np.concatenate((row.rows.reshape(-1, p), scores.q.A[t].reshape(-1, p)))
        right = 0.5 * c[..., None] * row.rows + row.s[..., None] * seen
        R = np.concatenate((right.reshape(-1, p), keys.reshape(-1, p)))
        n = gamma(2 * (self.S + len(v) + self.out.shape[1]) + 64)
        moved = float(frobenius(row.rows.reshape(-1, p)))
        values = float(frobenius(self.v.A).max()) * self.H**0.5 * self.S
        met = float(np.sqrt(np.square(self.v.c).sum((1, 2)).max())) * 2.0
        others = scores.scale * float(frobenius(scores.q.A[t].reshape(-1, p)) * frobenius(scores.k.A).max())
        size = moved * (met * moved + values) + met * others * self.H * self.S
        if scores.caps is not None:
            bend = c * scores.caps.bend[:, t]
            L = np.concatenate((L, row.uncapped))
            R = np.concatenate((R, bend.reshape(-1, 1) * row.uncapped))
            size += met * float(np.abs(scores.caps.bend[:, t]).max()) * float(frobenius(row.uncapped)) ** 2
        error = n * 8.0 * float(length(v)) * float(frobenius(self.out)) * size
        return Quadratic(np.ones((1, len(L))), L, R), float(up(np.asarray(error)))

    def pull(self, v: Array, t: int) -> dict[str, dict[int, Array]]:
        """Covectors at the next root's token t [..., d], taken back: to the stream and q at t, to all keys and values.

        Args:
            v: the covectors.
            t: the token.
        """
        omega = np.einsum("...d,dhc->...hc", v, self.O)
        g = np.einsum("...hc,jhc->...hj", omega, self.v.c)
        g = g - np.einsum("...hc,hc->...h", omega, self.z[t])[..., None]
        coefficients = self.scores.factors[:, t] * self.s[:, t] * g
        q = np.einsum("...hj,jhc->...hc", coefficients, self.scores.k.c)
        k = np.einsum("...hj,hc->j...hc", coefficients, self.scores.q.c[t])
        values = np.einsum("hj,...hc->j...hc", self.s[:, t], omega)
        keys, held = (dict(enumerate(_grouped(x, y))) for x, y in ((k, self.scores.k), (values, self.v)))
        return {"q": {t: q.reshape(*v.shape[:-1], -1)}, "k": keys, "v": held, "stream": {t: v}}


def _grouped(x: Array, heads: Heads) -> Array:
    """Covectors of query heads [..., H, c], added up by the group that they read [..., G·c]."""
    *rest, H, c = x.shape
    return np.asarray(x.reshape(*rest, heads.count, H // heads.count, c).sum(-2).reshape(*rest, -1))
