"""Covectors that move: what second order at Aα + e adds to that at Aα, taken to the sources that e is made of.

The second order of a site, as a covector v sees it, is ½uᵀHu with u = Aα + e. So it is ½(Aα)ᵀH(Aα), which goes into
the one matrix of all factors, plus (HAα)·e + ½eᵀHe. There, e = Σ_s J_s r_s is a sum over *earlier* sources of the
chain, and the middle part is Σ_s (W_sα)·r_s with W_s = AᵀHJ_s: all later sites of a token add up in W_s before a bound
is taken, which is the largest x·y over x ∈ {W_sᵀα} and r_s in its ellipsoid. Products of queries and keys are such a
second order as well, of two values: (A_qα)·e_k + (A_kα)·e_q + e_q·e_k.

**Through mixings.** The root's own e at token t is what its mixing misses, r_t, and a linear map of what the values in
front of it are beyond their linear parts: (W_tα)·e_t = (W_tα)·r_t + Σ (W_tα)·B_x e_x over queries, keys, values and
stream. So W_t is taken on, as any covector is, to chains further in front (`onward`), where it joins what their own
sites bring; only (W_tα)·r_t is bounded behind them.

Sources are not at their worst at once: with r_s ∈ E(M_s) and Σ 1/c_s ≤ 1 the sum over all of them is at most
Σ √(αᵀW_sM_sW_sᵀα) ≤ √(αᵀKα) with K = Σ c_s W_sM_sW_sᵀ, one form of the factors on their box. It joins the form's own
second order before a bound is taken (`Left.joined`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from prooflens.checker.depth.boxes import Quadric, largest_on_box
from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.pooling import PoolSite
from prooflens.checker.depth.scores import ScoreSite
from prooflens.checker.depth.shapes import (
    Array,
    frobenius,
    gamma,
    gram,
    image,
    meeting,
    scaled,
    shares,
    total,
    trace,
    up,
)
from prooflens.checker.depth.values import ROOT, Chain, Value, factor_weights

Term = tuple[float, int, int, int]
"""A weight, and the head, query and key of a score."""
MOST_FACTORS = 1024
"""Regions of more factors are bounded without this: it costs as much as all the rest of a form."""


class Left(NamedTuple):
    """What is left of second order: at most √(αᵀKα) + rest at the factors α, and at most `most` at all of them.

    Attributes:
        K: a positive semidefinite form.
        rest: what does not depend on α.
        most: for all α.
    """

    K: Quadric
    rest: float
    most: float

    @classmethod
    def fixed(cls, rest: float, p: int) -> Left:
        """What is the same for all factors.

        Args:
            rest: how much that is.
            p: how many factors there are.
        """
        return cls(Quadric(np.zeros((p, p)), 0.0), rest, rest)

    def at(self, corner: Array) -> float:
        """About √(αᵀKα) + rest at a corner; nothing rests on it.

        Args:
            corner: the corner.
        """
        return float(max(float(corner @ self.K.H @ corner), 0.0) ** 0.5 + self.rest)

    def joined(self, form: Quadric, corner: Array) -> tuple[Quadric, float]:
        """A form that holds ½τK too, and what is left besides: √x ≤ ½(τx + 1/τ) for every τ > 0.

        Where the form's slope decides, its largest value is that at a corner, and so is that of what moves.

        Args:
            form: a form ½αᵀHα.
            corner: where τ is best.
        """
        tau = 1.0 / max(self.at(corner) - self.rest, 1e-3 * (self.most - self.rest), 2.0**-200)
        H = form.H + tau * self.K.H
        error = form.error + tau * self.K.error + gamma(8) * float(frobenius(H) + tau * frobenius(self.K.H))
        return Quadric(H, float(up(np.asarray(error)))), float(up(np.asarray(self.rest + 0.5 / tau)))


class Moving:
    """Σ_s (W_sα)·r_s on one chain, and what else second order leaves.

    Args:
        chain: the chain.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain, self.rest = chain, 0.0
        self._pairs: list[tuple[Array, Array, float]] = []
        """Shapes whose members meet, with a factor each."""
        self._W: dict[tuple[str, int], Array] = {}
        self._sizes: dict[tuple[str, int], tuple[float, int]] = {}

    def meet(self, value: Value, t: int, K: Array, error: float, some: slice = slice(None)) -> None:
        """Add (Kα)·e, e what coordinates of a value are beyond their linear part.

        Args:
            value: the value.
            t: its token.
            K: the covectors [n, p], as they are computed.
            error: at least the Frobenius norm of what K is off by.
            some: which coordinates.
        """
        far = (float(frobenius(K)) + error) * K.shape[1] ** 0.5
        for s, J in value.jacobians.items():
            if s in self.chain.shapes:
                own = J[t][some]
                size = far * float(frobenius(own))
                before, count = self._sizes.get((s, t), (0.0, 0))
                self._sizes[s, t] = before + size, count + 1
                made = K.T @ own
                self._W[s, t] = self._W[s, t] + made if count else made
                reach = float(np.sqrt(trace(self.chain.shapes[s][t])))
                slip = error * K.shape[1] ** 0.5 * float(frobenius(own)) + gamma(len(K) + 8) * size
                self.rest += slip * reach
        self.rest += far * float(value.slip[t])

    def site(self, value: Value, t: int, H: Array, error: float) -> None:
        """Add (HAα)·e + ½eᵀHe of a site.

        The form has ½(JNα)ᵀH(JNα), so A = JN stands here with what its floats are off by, `slip` for all factors.

        Args:
            value: what the site reads.
            t: the token.
            H: the second order as a covector sees it [n, n], as it is computed.
            error: at least the 2-norm of what H is off by.
        """
        A, E = value.linear[t], value.E[t]
        size = float(frobenius(H))
        off = (error + gamma(len(H) + 8) * size) * float(frobenius(A))
        self.meet(value, t, H @ A, off + (size + error) * float(value.slip[t]) / A.shape[1] ** 0.5)
        self._pairs.append((image(H, E), E, 0.5))
        self.rest += 0.5 * error * float(value.epsilon[t]) ** 2

    def products(self, scores: ScoreSite, terms: list[Term]) -> None:
        """Add what e brings to products of queries and keys.

        Args:
            scores: the scores.
            terms: weights of some of them.
        """
        n, q, k = scores.q.width, scores.q, scores.k
        E_q, E_k = q.blocks("E"), k.blocks("E")
        for h, i in dict.fromkeys((h, i) for _, h, i, _ in terms):
            g, held = (
                int(k.groups[h]),
                [(w * float(scores.factors[h, i, j]), j) for w, head, at, j in terms if (head, at) == (h, i)],
            )
            near, far = slice(h * n, (h + 1) * n), slice(g * n, (g + 1) * n)
            A = np.asarray(sum(w * k.A[j, g] for w, j in held))
            size = sum(abs(w) * float(frobenius(k.A[j, g])) for w, j in held)
            self.meet(q.value, i, A, gamma(len(held) + 8) * size, near)
            for w, j in held:
                K = w * q.A[i, h]
                self.meet(k.value, j, K, gamma(8) * float(frobenius(K)), far)
            E = total([scaled(E_k[j, h], w * w) for w, j in held])
            self._pairs.append((E_q[i, h], E, 1.0))

    def onward(self, mix: MixSite | PoolSite, read: Mapping[str, Value], earlier: Moving) -> None:
        """Take what meets the root's e on to the chain in front; `left` then wants what the mixing misses.

        W as it is computed is exact from here on: what it is off by met the root's whole e. Taking it back rounds by no
        more than the mixing's own noise, for ‖Wᵀα‖ ≤ ‖W‖√p.

        Args:
            mix: what made the root.
            read: the values that it reads.
            earlier: what moves on their chain.
        """
        for place, t in enumerate(mix.tokens):
            if (W := self._W.get((ROOT, place))) is None:
                continue
            earlier.rest += float(frobenius(W)) * len(W) ** 0.5 * 2.0 * mix.noises[t]
            for name, back in mix.pull(W, t).items():
                for j, K in back.items():
                    earlier.meet(read[name], j, K.T, 0.0)

    def left(self, corner: Array, missed: Sequence[Array] | None = None) -> Left:
        """What all that was added comes to.

        Args:
            corner: factors at which it should be small, ±1 each; any are valid.
            missed: what the root's tokens miss besides what goes `onward`; None if nothing does.
        """
        slips, p = sum(_meetings(self._pairs)), self.chain.N.shape[-1]
        moved, made = list[tuple[Array, Array, float]](), list[Array]()
        for (s, t), W in self._W.items():
            (size, count), shape = self._sizes[s, t], self.chain.shapes[s][t]
            slips += gamma(count + 8) * size * float(np.sqrt(trace(shape)))
            shape = missed[t] if s == ROOT and missed is not None else shape
            moved.append((gram(W.T * factor_weights(W.T)), shape, 1.0))
            made.append(image(W, shape))
        each, rest = _meetings(moved), float(up(np.asarray(slips + self.rest)))
        if not np.isfinite([*each, rest]).all():
            return Left.fixed(np.inf, p)
        if not made:
            return Left.fixed(rest, p)
        together = _added(made, np.array(each))
        box = largest_on_box(np.zeros(p), Quadric(2.0 * together.H, 2.0 * together.error)) ** 0.5
        most = float(up(np.asarray(min(sum(each), box) + rest)))
        at = np.array([max(float(corner @ M @ corner), 0.0) ** 0.5 for M in made])
        return Left(_added(made, at), rest, most)


def _added(made: Sequence[Array], sizes: Array) -> Quadric:
    """K with Σ √(αᵀM_sα) ≤ √(αᵀKα), weighed by sizes ≥ 0."""
    K, error = np.zeros_like(made[0]), 0.0
    for c, M in zip(shares(sizes).tolist(), made, strict=True):
        K = K + c * M
        error += gamma(len(made) + 16) * c * float(frobenius(M))
    return Quadric(K, float(up(np.asarray(error))))


def _meetings(pairs: list[tuple[Array, Array, float]]) -> list[float]:
    """factor · sup x·y over the members of two shapes, pair by pair; those of one size at once."""
    found = [0.0] * len(pairs)
    for n in {len(X) for X, _, _ in pairs}:
        here = [i for i, (X, _, _) in enumerate(pairs) if len(X) == n]
        X, Y = (np.stack([pairs[i][side] for i in here]) for side in (0, 1))
        for i, most in zip(here, meeting(X, Y).tolist(), strict=True):
            found[i] = pairs[i][2] * most
    return found
