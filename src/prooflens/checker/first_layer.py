"""Score differences at layer 0, proved on the whole region: f(x) = a_ij − a_ik of one head.

Let x = c + ρ⊙α, α ∈ [−1, 1]ᵖ, and ∇²f ⪯ diag(D) in α. For any corner s, with G = s⊙∂f/∂α(s) and β = 1 − sα ∈ [0, 2],

    f ≤ f(s) − Σ Gβ + ½ Σ Dβ² ≤ f(s) + Σ max(0, 2(D − G)).

**D.** In the tokens y that the head reads, f = scale·(Qy_i + b)·(K_j y_j − K_k y_k + b'). Its Hessian has the blocks
Qᵀ[K_j, −K_k], and for all positive diagonal X and τ,  2uᵀNw ≤ σ(X_i^{-½}NX^{-½})·(τ uᵀX_iu + wᵀXw/τ), where
σ² = ρ(AB), A = QX_i⁻¹Qᵀ, B = ΣKX⁻¹Kᵀ are d_h × d_h. If the norm stands before the attention, y = Px·n(x) with
‖∂y/∂x‖ ≤ n, and the second derivative of v·y is at most √2·max(1, 3εn²)·n²‖v‖/√d: with u = ae + b along and across
Px, e = Px/‖Px‖, it is (n³‖Px‖/d)·(−v∥(3εn²a² + b²) − 2a v⊥·b), and n‖Px‖ ≤ √d. Here v = ∂f/∂y is bounded by its
value at the corner plus σ times how far the other tokens move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flint import arb

from prooflens.checker.balls import Array, Ball, norm, spectral_radius
from prooflens.checker.edited import before_scores
from prooflens.checker.network import Network

Affine = tuple[Ball, Ball]
SAFE = 1.0 + 1e-12
"""Covers the few roundings of a product of positive floats many times over."""


@dataclass(frozen=True)
class Difference:
    """a_ij − a_ik of a head: q = Q y_i + b, and likewise the two keys."""

    i: int
    j: int
    k: int
    Q: Affine
    keys: dict[int, Affine]
    shift: Ball


class FirstLayer:
    """Layer 0 of a network on the box c ± ρ."""

    def __init__(self, net: Network, center: Array, radius: Array) -> None:
        self.net, self.center, self.radius = net, center, radius
        self.pre, self.scale = net.arch["norm_place"] in ("pre", "sandwich"), net.scale(0)
        self.pre = self.pre and net.arch.get("first_norm", True)
        self.tables, self.bias = net.rotary(len(center)), net.score_bias(len(center))
        self.centred = net.arch["norm_kind"] == "layer"
        self.tokens = [self._token(t) for t in range(len(center))]
        self._found: dict[tuple[int, ...], tuple[float, float]] = {}
        self._sigmas: dict[tuple[int, ...], float] = {}

    @property
    def knows(self) -> bool:
        """Whether scores are what is assumed here: products of affine queries and keys, no cap, norm or position."""
        arch = self.net.arch
        plain = arch.get("qk_norm", "none") == "none" and not arch.get("head_positions")
        return plain and arch.get("score_cap") is None and not before_scores(self.net.weights)

    def upper(self, head: int, i: int, j: int, k: int) -> tuple[float, float]:
        """A proved upper bound of a_ij − a_ik on the box, and a value that a point of the box reaches."""
        if (head, i, j, k) not in self._found:
            keys = {t: self._map("k", head, t) for t in (j, k)}
            shift = Ball(self.bias[head, i, j]) - self.bias[head, i, k]
            form = Difference(i, j, k, self._map("q", head, i), keys, shift)
            self._found[head, i, j, k] = self._maximise(head, form)
        return self._found[head, i, j, k]

    def _normalise(self, x: Ball) -> tuple[Ball, Ball]:
        """y = Px·n and n = (‖Px‖²/d + ε)^(−½), P the centring map of LayerNorm or the identity of RMSNorm."""
        m = x - x.mean() if self.centred else x
        n = ((m * m).mean() + self.net.arch["norm_eps"]).each(arb.rsqrt)
        return m * n, n

    def _rotate(self, x: Ball, position: int) -> Ball:
        """RoPE: x ⊙ cos + rotate_half(x) ⊙ sin over the last axis."""
        if self.tables is None:
            return x
        cos, sin, rad = self.tables
        cos, sin = cos[position], sin[position]
        half = x.mid.shape[-1] // 2
        signs = ((-1, x.mid), (1, x.rad))
        turned = Ball(*(np.concatenate((a * v[..., half:], v[..., :half]), -1) for a, v in signs))
        return x * Ball(cos, rad) + turned * Ball(sin, rad)

    def _token(self, t: int) -> tuple[float, float]:
        """‖ρ_t‖ and the largest n on the box: ‖Px‖ ≥ ‖Pc‖ − ‖ρ‖ (1 where no norm stands before the attention)."""
        far = norm(Ball(self.radius[t]))
        if not self.pre:
            return far, 1.0
        d, eps = self.center.shape[-1], self.net.arch["norm_eps"]
        n = float(self._normalise(Ball(self.center[t]))[1].high[0])
        least = max(0.0, np.sqrt(max(0.0, (1.0 / n**2 / SAFE - eps) * d)) / SAFE - far)
        return far, float(SAFE / np.sqrt(least**2 / d + eps))

    def _map(self, name: str, head: int, position: int) -> Affine:
        """(M, b) with q or k = My + b at a position: the norm's scale and shift and RoPE folded in."""
        arch, w, width = self.net.arch, self.net.weights, self.net.head_dim
        row = head if name == "q" else head // (arch["n_heads"] // (arch["n_kv_heads"] or arch["n_heads"]))
        rows = slice(row * width, (row + 1) * width)
        M = Ball(w[f"blocks.0.{name}.weight"][rows])
        b = Ball(w[f"blocks.0.{name}.bias"][rows] if f"blocks.0.{name}.bias" in w else np.zeros(width))
        if self.pre:
            if "blocks.0.norm1.bias" in w:
                b = b + (M @ w["blocks.0.norm1.bias"][:, None]).reshape(-1)
            M = M * w.get("blocks.0.norm1.weight", 1.0)
            M = M - M.mean() if self.centred else M
        return self._rotate(M.T, position).T, self._rotate(b, position)[:, None]

    def _maximise(self, head: int, form: Difference) -> tuple[float, float]:
        tokens, best, reached = list(dict.fromkeys((form.i, form.j, form.k))), np.inf, -np.inf
        signs = {t: np.zeros(self.center.shape[-1]) for t in tokens}
        for step in range(3):
            x = {t: Ball(self.center[t]) + Ball(self.radius[t]) * signs[t] for t in tokens}
            value, slope, v = self._evaluate(x, form)
            reached = max(reached, float(value.low))
            for shaped in () if step == 0 else (False,) if self.pre else (False, True):
                D, total = self._curvature(head, form, slope, v, shaped), value
                for t in tokens:
                    rho = self.radius[t]
                    excess = Ball(D[t]) * rho * rho - slope[t] * rho * signs[t]
                    total = total + Ball(2.0 * np.maximum(excess.high, 0.0)).sum()[0]
                best = min(best, float(total.high) if np.isfinite(total.high) else np.inf)
            signs = {t: np.where(slope[t].mid >= 0.0, 1.0, -1.0) for t in tokens}
        return best, reached

    def _evaluate(
        self, x: dict[int, Ball], form: Difference
    ) -> tuple[Ball, dict[int, Ball], dict[int, Ball]]:
        """f, ∂f/∂x and ∂f/∂y of each token."""
        read = {t: self._normalise(x[t]) if self.pre else (x[t], Ball([1.0])) for t in x}
        q, kj, kk = (M @ read[t][0][:, None] + b for t, (M, b) in (
            (form.i, form.Q), (form.j, form.keys[form.j]), (form.k, form.keys[form.k])))  # fmt: skip
        value = (q.T @ (kj - kk) * self.scale)[0, 0] + form.shift
        v = {t: Ball(np.zeros(self.center.shape[-1])) for t in x}
        sides = (form.i, form.Q, kj - kk), (form.j, form.keys[form.j], q), (form.k, form.keys[form.k], -q)
        for t, (M, _), other in sides:
            v[t] = v[t] + (M.T @ other * self.scale)[:, 0]
        if not self.pre:
            return value, v, v
        # Jᵀv = n(v − y(y·v)/d); where P is not the identity, v is centred already
        slope = {t: (v[t] - y * (y * v[t]).mean()) * n for t, (y, n) in read.items()}
        return value, slope, v

    def _curvature(
        self, head: int, form: Difference, slope: dict[int, Ball], v: dict[int, Ball], shaped: bool
    ) -> dict[int, Array]:
        """diag(D) ⪰ ∇²f on the whole box, in the units of x."""
        i, d = form.i, self.center.shape[-1]
        shape = {t: np.ones(d) for t in slope}
        if shaped:
            shape = {t: np.abs(s.mid) + 1e-3 * np.abs(s.mid).mean() + 1e-30 for t, s in slope.items()}
        n = {t: self.tokens[t][1] for t in slope}
        reach = {t: 2.0 * self.tokens[t][0] * n[t] for t in slope}
        D, growth = {t: np.zeros(d) for t in slope}, dict.fromkeys(slope, 0.0)
        for group in ([form.j, form.k],) if i not in (form.j, form.k) else ([form.j], [form.k]):
            sigma = self._sigma(head, form, group, shape, shaped)
            growth[i] += sigma * float(np.sqrt(sum(reach[t] ** 2 for t in group)))
            for t in group:
                growth[t] += sigma * reach[i]
            if group == [i]:
                D[i] = D[i] + 2.0 * sigma * n[i] ** 2 * shape[i]
            elif self.radius[i].any() and self.radius[group].any():
                costs = [float((shape[t] * n[t] ** 2 * self.radius[t] ** 2).sum()) for t in (i, *group)]
                tau = float(np.sqrt(max(sum(costs[1:]), 1e-300) / max(costs[0], 1e-300)))
                D[i] = D[i] + sigma * tau * n[i] ** 2 * shape[i]
                for t in group:
                    D[t] = D[t] + sigma / tau * n[t] ** 2 * shape[t]
        for t in slope if self.pre else ():
            bend = np.sqrt(2.0 / d) * max(1.0, 3.0 * self.net.arch["norm_eps"] * n[t] ** 2) * n[t] ** 2
            D[t] = D[t] + bend * (norm(v[t]) + growth[t])
        return {t: D[t] * SAFE for t in D}

    def _sigma(
        self, head: int, form: Difference, group: list[int], shape: dict[int, Array], shaped: bool
    ) -> float:
        """At least σ(X_i^{-½} Qᵀ[K_t] X^{-½})·scale."""
        place = (head, form.i, *group) if self.tables is not None else (head, len(group))
        if shaped or place not in self._sigmas:
            A = form.Q[0] * Ball(shape[form.i]).each(lambda x: 1 / x) @ form.Q[0].T
            B = Ball(np.zeros((1, 1)))
            for t in group:
                B = B + form.keys[t][0] * Ball(shape[t]).each(lambda x: 1 / x) @ form.keys[t][0].T
            sigma = float(np.sqrt(spectral_radius(A @ B)) * self.scale * SAFE)
            if shaped:
                return sigma
            self._sigmas[place] = sigma
        return self._sigmas[place]
