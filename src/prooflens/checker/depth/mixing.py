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

from prooflens.checker.depth.origins import Origin, carried_on, kept_apart
from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.scores import Heads, ScoreSite
from prooflens.checker.depth.shapes import (
    Array,
    ball,
    frobenius,
    gamma,
    hadamard,
    image,
    largest,
    length,
    raised,
    scaled,
    spread,
    support,
    total,
    up,
)
from prooflens.checker.depth.values import ROOT, Chain, Value, factor_weights

FEW = 1500
"""Up to this many products of forms, the second order of a mixing is one Gram matrix."""
log = np.frompyfunc(lambda v: arb(v).log(), 1, 1)


def tail(beta: Array, n: int) -> Array:
    """At least R_n(β)/β^n: Σ_{k≥n} β^(k−n)/k! ≤ 1/(n!(1 − β/(n + 1))), β < n + 1; infinite beyond 0.9 of that."""
    fits = beta < 0.9 * (n + 1)
    return np.where(
        fits, up(1.0 / (math.factorial(n) * (1.0 - np.minimum(beta, 0.9 * (n + 1)) / (n + 1)))), np.inf
    )


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
        chain = self.stream.chain
        if ROOT not in chain.shapes:
            return Chain(c, N, {ROOT: own}, [Origin(own)])
        carried = carried_on(chain.origins or [Origin(chain.shapes[ROOT])], A)
        own = total([own, ball(carried.noise, c.shape[1])])
        return Chain(c, N, {ROOT: total([own, *carried.reached])}, kept_apart(carried, own))

    def _token(self, t: int) -> tuple[Array, Array, Array, Array]:
        """Centre and linear part of a token behind the mixing, what it misses from here, and its Jacobian by the root.

        What it misses is the mixing's own and what the sites of the chain left; the root's e comes by its origins.
        """
        row = Row(self, t)
        c = self.stream.c[t] + self.out @ self.z[t].ravel() + self.bias
        N = self.stream.linear[t] + row.linear
        self.noises[t] = row.noise
        self.beyond[t] = total([*row.beyond(), ball(np.asarray(row.noise), len(c))])
        return c, N, total([*row.carried(), *row.second(), self.beyond[t]]), row.by_root()

    def form(self, v: Array, t: int) -> tuple[Quadratic, float]:
        """The second order of query token t as a covector v sees it: one form of the factors, and its error.

        With ω = vW_O and c = s v·g: Σ (½c ℓ + s ω·A_v) ⊗ ℓ + scale Σ A_q ⊗ (Σ_j c A_k): far fewer products than q has.
        """
        row, scores, p = Row(self, t), self.scores, self.scores.q.A.shape[-1]
        omega = np.einsum("d,dhc->hc", v, self.O)
        c = row.s * np.einsum("d,dhj->hj", v, row.g)
        seen = np.stack([omega[h] @ self.v.A[:, g] for h, g in enumerate(self.v.groups)])
        keys = np.stack([np.tensordot(c[h], scores.k.A[:, g], 1) for h, g in enumerate(scores.k.groups)])
        L = np.concatenate((row.rows.reshape(-1, p), scores.scale * scores.q.A[t].reshape(-1, p)))
        right = 0.5 * c[..., None] * row.rows + row.s[..., None] * seen
        R = np.concatenate((right.reshape(-1, p), keys.reshape(-1, p)))
        n = gamma(2 * (self.S + len(v) + self.out.shape[1]) + 64)
        moved = float(frobenius(row.rows.reshape(-1, p)))
        values = float(frobenius(self.v.A).max()) * self.H**0.5 * self.S
        met = float(np.sqrt(np.square(self.v.c).sum((1, 2)).max())) * 2.0
        others = scores.scale * float(frobenius(scores.q.A[t].reshape(-1, p)) * frobenius(scores.k.A).max())
        size = moved * (met * moved + values) + met * others * self.H * self.S
        error = n * 8.0 * float(length(v)) * float(frobenius(self.out)) * size
        return Quadratic(np.ones((1, len(L))), L, R), float(up(np.asarray(error)))

    def pull(self, v: Array, t: int) -> dict[str, Array]:
        """A covector at the next root's token t, taken back: to the stream and q at t, to k and v at all tokens."""
        omega = np.einsum("d,dhc->hc", v, self.O)
        g = np.einsum("hc,jhc->hj", omega, self.v.c) - np.einsum("hc,hc->h", omega, self.z[t])[:, None]
        coefficients = self.scores.scale * self.s[:, t] * g
        q = np.einsum("hj,jhc->hc", coefficients, self.scores.k.c)
        k = np.einsum("hj,hc->jhc", coefficients, self.scores.q.c[t])
        values = np.einsum("hj,hc->jhc", self.s[:, t], omega)
        return {"q": q.ravel(), "k": _grouped(k, self.scores.k), "v": _grouped(values, self.v), "stream": v}


def _grouped(x: Array, heads: Heads) -> Array:
    """Covectors of query heads [S, H, c], added up by the group that they read [S, G·c]."""
    S, H, c = x.shape
    return np.asarray(x.reshape(S, heads.count, H // heads.count, c).sum(2).reshape(S, -1))


class Row:
    """The mixing at one query token."""

    def __init__(self, mix: MixSite, t: int) -> None:
        self.mix, self.t, self.s = mix, t, mix.s[:, t]
        scores, v = mix.scores, mix.v
        self.mask = scores.mask[:, t]
        self.keys = np.flatnonzero(self.mask.any(0))
        self.met = np.union1d(self.keys, [t])
        """Whose values come here: the keys, and the token itself, which the stream brings even if no head reads it."""
        deviations = v.c.swapaxes(0, 1) - mix.z[t][:, None]
        self.g = np.einsum("dhc,hjc->dhj", mix.O, deviations * self.mask[..., None])
        rows = scores.rows(t)
        self.rows = (rows - np.einsum("hj,hjp->hp", self.s, rows)[:, None]) * self.mask[..., None]
        self.columns = (self.g * self.s).reshape(len(self.g), -1)

    @cached_property
    def linear(self) -> Array:
        """The linear part of W_O Σ σ V [d, p]."""
        mix = self.mix
        p = self.rows.shape[-1]
        means = [
            np.tensordot(self.s[h, self.keys], mix.v.A[self.keys, g], 1) for h, g in enumerate(mix.v.groups)
        ]
        return np.asarray(self.columns @ self.rows.reshape(-1, p) + mix.out @ np.concatenate(means))

    @cached_property
    def jacobians(self) -> tuple[Array, Array, Array]:
        """The Jacobians by q at t [d, H·c], and by k and v at all tokens [S, d, G·c]."""
        mix, scores = self.mix, self.mix.scores
        by_score = scores.scale * self.g * self.s
        q = np.einsum("dhj,jhc->dhc", by_score, scores.k.c).reshape(len(self.g), -1)
        k = np.einsum("dhj,hc->jdhc", by_score, scores.q.c[self.t])
        v = np.einsum("hj,dhc->jdhc", self.s, mix.O)
        found = []
        for x, heads in ((k, scores.k), (v, mix.v)):
            S, d, H, c = x.shape
            found.append(x.reshape(S, d, heads.count, H // heads.count, c).sum(3).reshape(S, d, -1))
        return q, found[0], found[1]

    def carried(self) -> list[Array]:
        """The shapes of what the chain's sites left, as they come here, source by source and token by token."""
        found = []
        for name, shapes in self.mix.stream.chain.shapes.items():
            for r in self.met if name != ROOT else ():
                if (J := self._by(name, r)) is not None:
                    found.append(image(J, shapes[r]))
        return found

    def by_root(self) -> Array:
        """The Jacobian by the root's tokens [d, S, n]."""
        S, n = self.mix.stream.chain.c.shape
        found = np.zeros((len(self.g), S, n))
        for r in self.met:
            if (J := self._by(ROOT, r)) is not None:
                found[:, r] = J
        return found

    def _by(self, name: str, r: int) -> Array | None:
        """The Jacobian by what a source is at token r; None if nothing that meets here comes from it."""
        mix, (by_q, by_k, by_v) = self.mix, self.jacobians
        held = [(by_k[r], mix.scores.k.value), (by_v[r], mix.v.value)]
        if r == self.t:
            held += [(by_q, mix.scores.q.value), (np.eye(len(by_q)), mix.stream)]
        parts = [T @ x.jacobians[name][r] for T, x in held if name in x.jacobians]
        return sum(parts[1:], parts[0]) if parts else None

    @cached_property
    def noise(self) -> float:
        """Rounding here, of the values that meet, and of weights that do not quite sum to 1.

        Every number of the new centre, linear part and Jacobians is a sum of at most n products of floats, of sizes
        that the product below bounds: W_O, values, and scores with their slopes. 16 is for what counts several times.
        """
        mix, t, scores = self.mix, self.t, self.mix.scores
        q, k, v, stream = scores.q.value, scores.k.value, mix.v.value, mix.stream
        by_q, by_k, by_v = self.jacobians
        found = (
            stream.slip[t]
            + frobenius(by_q) * q.slip[t]
            + (length(self.g.transpose(1, 2, 0)) * self.s * self.blur).sum()
        )
        found = found + (frobenius(by_k) * k.slip + frobenius(by_v) * v.slip).sum()
        n = gamma(8 * (mix.S + len(mix.out) + mix.out.shape[1]) + 256) + 8.0 * mix.weight_errors[1]
        slopes = 1.0 + 4.0 * scores.scale * q.size[t] * k.size.max() + np.abs(scores.bias[:, t]).max()
        sizes = frobenius(mix.out) * v.size.max() * mix.H**0.5 * slopes * mix.S
        return float(up(np.asarray(found + 16.0 * n * (sizes + stream.size[t] + length(mix.bias)))))

    @cached_property
    def weights(self) -> Array:
        """Weights of the factors for what this token's scores read [p]."""
        rows = np.sqrt(self.s)[..., None] * self.rows
        return factor_weights(rows.reshape(-1, rows.shape[-1]))

    @cached_property
    def K(self) -> Array:  # noqa: N802
        """Inner products of the scores' linear parts [HS, HS]."""
        X = self.rows.reshape(-1, self.rows.shape[-1]) * self.weights
        return raised(X @ X.T, gamma(X.shape[-1] + 8) * frobenius(X) ** 2)

    @cached_property
    def blur(self) -> Array:
        """Rounding of centred scores and of their linear parts, and what scores are beyond log s [H, S]."""
        mix, t, scores = self.mix, self.t, self.mix.scores
        noise = scores.noise[:, t]
        sizes = scores.scale * scores.q.value.size[t] * scores.k.value.size.max()
        rounding = gamma(2 * mix.S + 2 * scores.q.width + 32) * 8.0 * sizes
        return up(noise + (self.s * noise).sum(-1, keepdims=True) + rounding + mix.weight_errors[0][:, t])

    @cached_property
    def ranges(self) -> tuple[Array, Array]:
        """E and β [H, S]: sup |b_e|, and sup |ℓ| + E."""
        t, scores = self.t, self.mix.scores
        s, mask = self.s, self.mask
        first, cross = (x[:, t] for x in scores.products)
        keys = scores.k.c.swapaxes(0, 1)
        centred = (keys - np.einsum("hj,hjc->hc", s, keys)[:, None]) * mask[..., None]
        near = support(scores.q.blocks("E")[t][:, None], centred)
        far = support(scores.k.blocks("E").swapaxes(0, 1), scores.q.c[t][:, None])
        other = first + cross + scores.scale * far
        E = up((other + (s * other).sum(-1, keepdims=True) + scores.scale * near + self.blur) * mask)
        rho = np.abs(self.rows).sum(-1) * (1.0 + gamma(self.rows.shape[-1] + 8))
        return E, up((rho + E) * mask)

    @cached_property
    def budget(self) -> tuple[float, float, Array]:
        """λ with Σ s ℓ² ≤ λ; W with Σ s b̄² ≤ W over all heads; W_h likewise, in each head [H, 1]."""
        root = np.sqrt(self.s).ravel()
        even = raised(root[:, None] * self.K * root, gamma(8) * frobenius(self.K))
        E = self.ranges[0]
        each = (self.s * E**2).sum(-1)
        blocks = even.reshape(self.mix.H, self.mix.S, self.mix.H, self.mix.S)
        own = largest(np.stack([blocks[h, :, h] for h in range(self.mix.H)]))
        linear = float(largest(even))
        W = float(up(np.asarray((np.sqrt(linear) + np.sqrt(each.sum())) ** 2)))
        return linear, W, up((np.sqrt(own) + np.sqrt(each)) ** 2)[:, None]

    def _values(self, squares: Array, name: str) -> Array:
        """Σ_hj squares_hj W_O Δ_hj W_Oᵀ, Δ the shapes `P` or `E` of values."""
        mix = self.mix
        blocks = np.einsum("hj,jhce->hce", squares, mix.v.blocks(name))
        size = np.einsum("hj,jh->h", squares, frobenius(mix.v.blocks(name)))
        blocks = raised(blocks, gamma(mix.S + 8) * size)
        found = np.einsum("dhc,hce->dhe", mix.O, blocks).reshape(len(mix.out), -1) @ mix.out.T
        error = (
            gamma(2 * sum(mix.out.shape))
            * 2.0
            * frobenius(mix.out) ** 2
            * np.sqrt((frobenius(blocks) ** 2).sum())
        )
        return raised(found, error)

    @property
    def quadratic(self) -> Quadratic:
        """½Σ s g ℓ² + Σ s ℓ W_O A_vα + scale Σ s g (A_qα·A_kα), as a map of the factors."""
        mix, scores, t, p = self.mix, self.mix.scores, self.t, self.rows.shape[-1]
        width = mix.v.width
        C, L, R = [0.5 * self.columns], [self.rows.reshape(-1, p)], [self.rows.reshape(-1, p)]
        for h in range(mix.H):
            for j in self.keys:
                C.append(self.s[h, j] * mix.O[:, h])
                L.append(np.broadcast_to(self.rows[h, j], (width, p)))
                R.append(mix.v.A[j, mix.v.groups[h]])
        # Σ_j s_j g_j (A_q·A_kj) = Σ_c A_qc ⊗ (…): one right form per key and coordinate.
        for h in range(mix.H):
            for j in self.keys:
                C.append(np.tile((scores.scale * self.s[h, j] * self.g[:, h, j])[:, None], scores.q.width))
                L.append(scores.q.A[t, h])
                R.append(scores.k.A[j, scores.k.groups[h]])
        return Quadratic(np.concatenate(C, 1), np.concatenate(L), np.concatenate(R))

    def second(self) -> list[Array]:
        """The shapes of the second order at Aα: one Gram matrix, or for wide models its three parts."""
        mix, scores = self.mix, self.mix.scores
        if mix.H * len(self.keys) * (1 + mix.v.width + scores.q.width) <= FEW:
            form = self.quadratic
            X = np.concatenate((form.L, form.R))
            w = factor_weights(X * np.sqrt(np.square(form.C).sum(0))[np.arange(len(X)) % len(form.L), None])
            flat = Quadratic(form.C, form.L * w, form.R * w)
            error = gamma(16) * float(frobenius(form.C) * frobenius(flat.L) * frobenius(flat.R))
            return [total([flat.shape(np.eye(len(w))), ball(np.asarray(error), len(form.C))])]
        squares = image(0.5 * self.columns, hadamard(self.K, self.K))
        linear = self.budget[0]
        return [squares, self._values(up(self.s * linear), "P"), *self._products("P", "P")]

    def _products(self, near: str, far: str) -> list[Array]:
        """The shapes of scale Σ_h s g (x_q·x_k), key by key: x_q and x_k in the shapes `near` of q and `far` of k."""
        scores, n, H = self.mix.scores, self.mix.scores.q.width, self.mix.H
        M, found = getattr(scores.q.value, near)[self.t], []
        chosen = (scores.k.groups[:, None] * n + np.arange(n)).ravel()
        for j in self.keys:
            N = getattr(scores.k.value, far)[j]
            N = N if len(N) == len(M) else N[np.ix_(chosen, chosen)]
            form = (M * N).reshape(H, n, H, n).sum((1, 3))
            error = gamma(n * n + 8) * frobenius(M) * frobenius(N)
            found.append(scaled(image(self.g[:, :, j] * self.s[:, j], raised(form, error)), scores.scale**2))
        return [total(found)]

    def beyond(self) -> list[Array]:
        """The shapes of everything beyond second order at Aα, but for rounding."""
        s, (E, beta), (_, W, own) = self.s, self.ranges, self.budget
        r1, r2, r3 = tail(beta, 1), tail(beta, 2), tail(beta, 3) * beta
        Q = up((s * beta**2 * r2).sum(-1, keepdims=True))
        straight = np.sqrt(s * W)
        curved = np.sqrt(W * np.minimum(W, s * beta**2))
        alone = E * straight + r3 * curved + r1 * straight * np.minimum(Q, 1.0)
        most, peak = r2.max(-1, keepdims=True), (1.0 + beta * r1).max(-1, keepdims=True)
        common = most**2 * own * W * s
        found = [spread(self.g.reshape(len(self.g), -1), up(alone**2).ravel())]
        each = (s * E**2).sum()
        found += [self._values(up(x), "P") for x in (s * each, (r2 * curved) ** 2, common * peak)]
        found += [self._values(up(x), "E") for x in (s * W * r1**2, common)]
        return found + self._products("whole", "E") + self._products("E", "P")
