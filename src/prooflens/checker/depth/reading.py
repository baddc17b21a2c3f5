"""Linear forms of a layer's scores, bounded on the whole region.

A form f = Σ w·a_hij + constant is, exactly, f(0) + a·α + Σ_s v_s·r_s + products of moves, v_s its covector at the output of site s. Two
readings, the second only where the first leaves a sign open:

1. v_s·r_s by the ellipsoids of the last chain, root included.
2. Covectors are walked back to the input. The second orders of all sites on the way add up to one quadratic form of the factors,
   ½αᵀHα, in which tokens, heads and sites cancel; what sites leave beyond it is bounded one by one. With a diagonal D ⪰ H, D ≥ 0,

       a·α + ½αᵀHα ≤ ‖a‖₁ + ½ΣD,   and   ≤ m(s) + Σ max(0, 2(D − G))   at the corner s = sign a, G = s ⊙ (a + Hs),

   m(s) the left-hand side there: for α = s − s ⊙ β, β ∈ [0, 2]ᵖ, it is at most m(s) + Σ(−G_kβ_k + ½D_kβ_k²), convex in each β_k.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.shapes import (
    Array,
    frobenius,
    gamma,
    gram,
    length,
    meeting,
    scaled,
    support,
    top_eigenvalue,
    total,
    trace,
    up,
)
from prooflens.checker.depth.values import ROOT, Value, factor_weights
from prooflens.checker.depth.walk import Layer, Walk

Term = tuple[float, int, int, int]
"""A weight, and the head, query and key of a score."""
Covectors = dict[int, Array]
"""By token."""
EVEN = 0.05
"""Rows of H shorter than this share of the mean are weighed as if they were not."""


@dataclass(frozen=True, eq=False)
class Quadric:
    """H, symmetric, as it is computed, and a bound of its error in the 2-norm."""

    H: Array
    error: float

    def plus(self, form: Quadratic, v: Array, A: Array | None = None) -> Quadric:
        """With v·q(Aα) added; A is the identity where the map is one of the factors."""
        half, error = form.hessian(v)
        if A is not None:
            size = float(frobenius(A)) ** 2
            error = error * size + gamma(2 * len(A) + 16) * 2.0 * float(frobenius(half)) * size
            half = A.T @ half @ A
        H = self.H + 0.5 * (half + half.T)
        return Quadric(H, float(up(np.asarray(self.error + error + gamma(8) * (frobenius(half) + frobenius(H))))))


def largest_on_box(a: Array, form: Quadric) -> float:
    """At least a·α + ½αᵀHα for |α_k| ≤ 1."""
    H, p = form.H, len(a)
    lengths = np.sqrt(np.square(H).sum(-1))
    x = lengths + EVEN * lengths.mean() + 2.0**-300
    root = np.sqrt(x)
    even = H / root[:, None] / root
    # The quotients round, and so does x against root²: γ_16 of each entry.
    D = (top_eigenvalue(0.5 * (even + even.T)) + gamma(16) * float(frobenius(even))) * x
    steep, s = np.abs(a).sum(), np.where(a >= 0.0, 1.0, -1.0)
    y = s * (H @ s)
    blur = gamma(p + 8) * np.abs(H).sum(-1)
    G = np.abs(a) + y - blur
    flat = steep + 0.5 * D.sum()
    corner = steep + 0.5 * (y + blur).sum() + 2.0 * np.maximum(D - G, 0.0).sum()
    rounding = gamma(4 * p + 64) * (steep + np.abs(y).sum() + D.sum() + np.abs(G).sum())
    # ½αᵀΔα ≤ ½p‖Δ‖ for an error Δ of H.
    return float(up(np.asarray(min(flat, corner) + rounding + 0.5 * p * form.error)))


class Form:
    """f = Σ w·a_hij of one layer of a walk."""

    def __init__(self, walk: Walk, layer: int, terms: list[Term]) -> None:
        self.walk, self.number, self.terms = walk, layer, terms
        self.layer: Layer = walk.layer(layer)
        scores = self.scores = self.layer.scores
        self.slope = sum((w * scores.row(h, i, j) for w, h, i, j in terms), np.zeros(scores.q.A.shape[-1]))
        values = [w * scores.center[h, i, j] for w, h, i, j in terms]
        self.center = float(sum(values))
        sizes = sum(abs(w) * float(scores.noise[h, i, j]) for w, h, i, j in terms)
        # Products with w and their sum round by γ of themselves, at the centre and in the slope.
        moves = [abs(w) * float(np.abs(scores.row(h, i, j)).sum()) for w, h, i, j in terms]
        self.noise = sizes + gamma(len(terms) + 8) * (sum(map(abs, values)) + sum(moves))
        self._cross()

    def _cross(self) -> None:
        """What products of moves add: at Aα, and through e. Terms of one head and query are taken together."""
        scores, groups = self.scores, defaultdict[tuple[int, int], list[tuple[float, int]]](list)
        for w, h, i, j in self.terms:
            groups[h, i].append((w, j))
        self.second = self.beyond = 0.0
        E_q, E_k, P_q = scores.q.blocks("E"), scores.k.blocks("E"), scores.q.blocks("P")
        for (h, i), held in groups.items():
            A = sum(w * scores.k.A[j, scores.k.groups[h]] for w, j in held)
            error = gamma(len(held) + 4) * sum(abs(w) * float(scores.k.A_size[j, h]) for w, j in held)
            P = total([gram(A * factor_weights(A)), np.eye(len(A)) * up(np.asarray(error**2))])
            E = total([scaled(E_k[j, h], w * w) for w, j in held])
            whole = total([P_q[i, h], E_q[i, h]])
            self.second += float(meeting(P_q[i, h], P)) * scores.scale
            self.beyond += float(meeting(whole, E) + meeting(E_q[i, h], P)) * scores.scale

    def _seeds(self) -> dict[str, Covectors]:
        """Covectors at queries and keys."""
        scores = self.scores
        q, k = defaultdict[int, Array](lambda: np.zeros(scores.q.value.c.shape[1])), defaultdict[int, Array](lambda: np.zeros(scores.k.value.c.shape[1]))
        n = scores.q.width
        for w, h, i, j in self.terms:
            g = int(scores.k.groups[h])
            q[i][h * n : (h + 1) * n] += w * scores.scale * scores.k.c[j, h]
            k[j][g * n : (g + 1) * n] += w * scores.scale * scores.q.c[i, h]
        return {"q": dict(q), "k": dict(k)}

    def bounds(self) -> tuple[float, float]:
        """The first reading: f from below and from above."""
        found, lost = self._at_sources(self.layer, self._values(self.layer), self._seeds())
        shapes = self.layer.chain.shapes
        missed = sum(float(support(shapes[s][t], v)) for (s, t), v in found.items() if s in shapes)
        far = float(up(np.asarray(np.abs(self.slope).sum() * (1.0 + gamma(len(self.slope) + 8)) + missed + lost)))
        far = float(up(np.asarray(far + self.second + self.beyond + self.noise)))
        return float(np.nextafter(self.center - far, -np.inf)), float(np.nextafter(self.center + far, np.inf))

    def tight_bounds(self) -> tuple[float, float]:
        """The second reading: f from below and from above."""
        p = len(self.slope)
        form, rest = Quadric(np.zeros((p, p)), 0.0), self.beyond + self.noise
        for w, h, i, j in self.terms:
            A_q, A_k = self.scores.q.A[i, h], self.scores.k.A[j, self.scores.k.groups[h]]
            form = form.plus(Quadratic(np.full((1, len(A_q)), self.scores.scale), A_q, A_k), np.array([w]))
        seeds, number = self._seeds(), self.number
        while True:
            layer = self.walk.layers[number]
            found, lost = self._at_sources(layer, self._values(layer), seeds)
            rest += lost
            for (s, t), v in found.items():
                if s != ROOT:
                    site = layer.sites[s]
                    form = form.plus(site.quadratic(t), v, site.source.linear[t])
                    rest += site.rest(v, t)
            roots = {t: v for (s, t), v in found.items() if s == ROOT}
            if number == 0:
                break
            number -= 1
            mix = self.walk.layers[number].mix
            assert mix is not None
            for t, v in roots.items():
                form = form.plus(mix.quadratic(t), v)
                rest += float(support(mix.beyond[t], v)) + float(length(v)) * mix.noises[t]
            seeds = _pulled(mix, roots)
        ends = [largest_on_box(sign * self.slope, Quadric(sign * form.H, form.error)) for sign in (-1.0, 1.0)]
        low, high = (float(up(np.asarray(end + rest))) for end in ends)
        return float(np.nextafter(self.center - low, -np.inf)), float(np.nextafter(self.center + high, np.inf))

    @staticmethod
    def _values(layer: Layer) -> dict[str, Value]:
        held = {"q": layer.scores.q.value, "k": layer.scores.k.value}
        if layer.mix is not None:
            held |= {"v": layer.mix.v.value, "stream": layer.mix.stream}
        return held

    @staticmethod
    def _at_sources(
        layer: Layer, values: dict[str, Value], seeds: dict[str, Covectors]
    ) -> tuple[dict[tuple[str, int], Array], float]:
        """Covectors at the sources of a chain by name and token, and what rounding loses on the way."""
        found: dict[tuple[str, int], Array] = {}
        lost, shapes = 0.0, layer.chain.shapes
        for name, held in seeds.items():
            value = values[name]
            for t, w in held.items():
                size = float(length(w))
                lost += size * float(value.slip[t])
                for s, J in value.jacobians.items():
                    v = w @ J[t]
                    found[s, t] = found[s, t] + v if (s, t) in found else v
                    if s in shapes:
                        lost += gamma(len(w) + 16) * size * float(frobenius(J[t]) * np.sqrt(trace(shapes[s][t])))
        return found, float(up(np.asarray(lost)))


def _pulled(mix: MixSite, roots: Covectors) -> dict[str, Covectors]:
    """Covectors behind a mixing, taken to what it reads."""
    found: dict[str, Covectors] = {"q": {}, "k": {}, "v": {}, "stream": {}}
    for t, v in roots.items():
        back = mix.pull(v, t)
        found["q"][t], found["stream"][t] = back["q"], back["stream"]
        for name in ("k", "v"):
            for j, w in enumerate(back[name]):
                found[name][j] = found[name][j] + w if j in found[name] else w
    return found
