"""The mixing at one query token: its tangent, and ellipsoids of what that misses (`mixing` has the mathematics)."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.shapes import (
    Array,
    ball,
    box,
    frobenius,
    gamma,
    hadamard,
    image,
    largest,
    length,
    raised,
    spread,
    support,
    total,
    up,
)
from prooflens.checker.depth.values import ROOT, factor_weights

if TYPE_CHECKING:
    from prooflens.checker.depth.mixing import MixSite

FEW = 1500
"""Up to this many products of forms, the second order of a mixing is one Gram matrix."""


def tail(beta: Array, n: int) -> Array:
    """At least R_n(β)/β^n: Σ_{k≥n} β^(k−n)/k! ≤ 1/(n!(1 − β/(n + 1))), β < n + 1; infinite beyond 0.9 of that."""
    fits = beta < 0.9 * (n + 1)
    return np.where(
        fits, up(1.0 / (math.factorial(n) * (1.0 - np.minimum(beta, 0.9 * (n + 1)) / (n + 1)))), np.inf
    )


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
        by_score = self.g * self.s * scores.factors[:, self.t]
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

        What values and scores are known to comes through the Jacobians and, of scores, as Σ s‖g‖·blur. The rest are
        sums of at most n products of floats, and γ_n times what is summed, in 2-norms: the centre Σ s W_O V,
        coefficients s g w with |w| ≤ e^β in all orders, coefficients of values, and Jacobians times what meets them.
        ‖g_j‖ and what its own sum cancels are at most G_j = ‖W_O‖(‖V_j‖ + ‖z‖), head by head. 8 is for what counts
        several times; so taking covectors back through here is covered too.
        """
        mix, t, scores = self.mix, self.t, self.mix.scores
        q, k, v, stream = scores.q.value, scores.k.value, mix.v.value, mix.stream
        by_q, by_k, by_v = self.jacobians
        found = stream.slip[t] + frobenius(by_q) * q.slip[t]
        found = found + (frobenius(by_k) * k.slip + frobenius(by_v) * v.slip).sum()
        found = found + (length(self.g.transpose(1, 2, 0)) * self.s * self.blur).sum()
        n = gamma(8 * (mix.S + len(mix.out) + mix.out.shape[1]) + 256) + 8.0 * mix.weight_errors[1]
        out = frobenius(mix.O.swapaxes(0, 1))[:, None]
        values = length(mix.v.c).T
        G = out * (values + length(mix.z[t])[:, None])
        met = self.s * G * scores.factors[:, t]
        peak = np.where(self.mask, 1.0 + self.ranges[1] * tail(self.ranges[1], 1), 0.0)
        sums = (out * self.s * values).sum() + length(mix.bias) + stream.size[t] + stream.missed[t]
        sums = sums + (self.s * peak * (G + out * (mix.v.A_size.T + v.missed))).sum()
        sums = sums + (met * length(scores.k.c).T).sum() * q.missed[t]
        sums = sums + ((met * length(scores.q.c[t])[:, None]) * k.missed + out * self.s * v.missed).sum()
        return float(up(np.asarray(found + 8.0 * n * sums)))

    @cached_property
    def weights(self) -> Array:
        """Weights of the factors for what this token's scores read [p]."""
        rows = np.sqrt(self.s)[..., None] * self.rows
        return factor_weights(rows.reshape(-1, rows.shape[-1]))

    @cached_property
    def uncapped(self) -> Array:
        """The linear parts of capped scores in front of the cap [HS, p]."""
        raw = self.mix.scores.raw_rows(self.t)
        return raw.reshape(-1, raw.shape[-1])

    def _gram(self, rows: Array) -> Array:
        """Inner products of rows [n, p], as the weights of the factors make them."""
        X = rows * self.weights
        return raised(X @ X.T, gamma(X.shape[-1] + 8) * frobenius(X) ** 2)

    @cached_property
    def K(self) -> Array:  # noqa: N802
        """Inner products of the scores' linear parts [HS, HS]."""
        return self._gram(self.rows.reshape(-1, self.rows.shape[-1]))

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
        factors = scores.factors[:, t]
        keys = factors[..., None] * scores.k.c.swapaxes(0, 1)
        centred = (keys - np.einsum("hj,hjc->hc", s, keys)[:, None]) * mask[..., None]
        near = support(scores.q.blocks("E")[t][:, None], centred)
        far = support(scores.k.blocks("E").swapaxes(0, 1), scores.q.c[t][:, None])
        other = first + cross + factors * far
        other = other if scores.caps is None else other + scores.caps.most[:, t]
        E = up((other + (s * other).sum(-1, keepdims=True) + near + self.blur) * mask)
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
        """½Σ s g ℓ² + Σ s ℓ W_O A_vα + scale Σ s g λ(A_qα·A_kα) + Σ s g κℓ̂², as a map of the factors."""
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
                met = scores.factors[h, t, j] * self.s[h, j] * self.g[:, h, j]
                C.append(np.tile(met[:, None], scores.q.width))
                L.append(scores.q.A[t, h])
                R.append(scores.k.A[j, scores.k.groups[h]])
        if scores.caps is not None:
            C.append(self._bent(scores.caps.bend))
            L.append(self.uncapped)
            R.append(self.uncapped)
        return Quadratic(np.concatenate(C, 1), np.concatenate(L), np.concatenate(R))

    def _bent(self, bend: Array) -> Array:
        """The columns s g κ [d, HS]."""
        return np.asarray(self.columns * bend[:, self.t].ravel())

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
        found = [squares, self._values(up(self.s * linear), "P"), *self._products("P", "P")]
        if scores.caps is not None:
            K = self._gram(self.uncapped)
            found.append(image(self._bent(scores.caps.bend), hadamard(K, K)))
        return found

    def _products(self, near: str, far: str) -> list[Array]:
        """The shapes of scale Σ_h s g λ(x_q·x_k), key by key: x_q and x_k in the shapes `near` of q and `far` of k."""
        scores, n, H = self.mix.scores, self.mix.scores.q.width, self.mix.H
        M, found = getattr(scores.q.value, near)[self.t], []
        chosen = (scores.k.groups[:, None] * n + np.arange(n)).ravel()
        for j in self.keys:
            N = getattr(scores.k.value, far)[j]
            N = N if len(N) == len(M) else N[np.ix_(chosen, chosen)]
            form = (M * N).reshape(H, n, H, n).sum((1, 3))
            error = gamma(n * n + 8) * frobenius(M) * frobenius(N)
            columns = self.g[:, :, j] * self.s[:, j] * scores.factors[:, self.t, j]
            found.append(image(columns, raised(form, error)))
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
        if (caps := self.mix.scores.caps) is not None:
            found.append(box(self.columns, (caps.rest[:, self.t] * self.mask).ravel()))
        return found + self._products("whole", "E") + self._products("E", "P")
