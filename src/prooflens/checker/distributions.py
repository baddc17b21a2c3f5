"""Distributions over outputs: their values in balls and in float64, and proved ranges of effects on them.

A term is [weight, "probability", i, outputs], e^{y_i} / Σ e^{y_j} over the outputs j, or [weight, "divergence",
outputs, others], Σ p log(p/q) with p over the first and q over the others. Ranges come from those of differences of
outputs to one of them, of both networks (g, h) and of g − h (d), and from one form of both networks: the tangent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from flint import arb

KINDS = ("probability", "divergence")
Ends = tuple[arb, arb]
_METRIC = re.compile(r"prob\((\{[^{}]*\}|\d+)(?:\|(.*))?\)|kl\((.*)\)")


class Metric(NamedTuple):
    """A metric of a distribution: the output of a probability (None: a divergence), the outputs (None: all)."""

    output: str | None
    among: list[str] | None

    def atoms(self, size: int, named: Callable[[str], int] = int) -> list[tuple[int, tuple[Any, ...]]]:
        """Weights and atoms of the effect on two networks with so many outputs each, side by side."""
        among = range(size) if self.among is None else [named(name) for name in self.among]
        if not all(0 <= i < size for i in among) or len(set(among)) != len(among):
            raise LookupError("the metric reads an output that there is not, or one twice")
        first, second = tuple(among), tuple(i + size for i in among)
        if self.output is None:
            return [(1, ("divergence", first, second))]
        index = named(self.output)
        if index not in first:
            raise LookupError("the metric's output is none of those that share the probability")
        return [(1, ("probability", index, first)), (-1, ("probability", index + size, second))]


def read_metric(text: str) -> Metric | None:
    """A metric as it is written, `prob(3|3,5)` or `kl(3,5)`; None for every other."""
    match = _METRIC.fullmatch(text)
    if match is None:
        return None
    listed = match[3] if match[1] is None else match[2]
    return Metric(match[1], None if listed is None else listed.split(","))


def ball_value(term: Sequence[Any], logits: Any) -> arb:
    """A probability or a divergence, as a ball."""
    kind, one, other = term[1:4]
    if kind == "probability":
        return 1 / sum(((logits[j] - logits[one]).exp() for j in other), arb(0))
    p, q = (_softmax([logits[j] for j in side]) for side in (one, other))
    return sum((a * (a / b).log() for a, b in zip(p, q, strict=True)), arb(0))


def plain_value(atom: Sequence[Any], logits: Any) -> float:
    """The same of an atom (kind, …) in float64."""
    kind, one, other = atom

    def logs(side: Sequence[int]) -> Any:
        y = logits[list(side)]
        return y - y.max() - np.log(np.exp(y - y.max()).sum())

    if kind == "probability":
        return float(np.exp(logs(other))[list(other).index(one)])
    p, q = logs(one), logs(other)
    return float((np.exp(p) * (p - q)).sum())


def _softmax(y: list[arb]) -> list[arb]:
    return [1 / sum(((other - own).exp() for other in y), arb(0)) for own in y]


def effect_range(
    terms: Sequence[Sequence[Any]], linear: Callable[[list[list[Any]]], tuple[float, float]]
) -> tuple[arb, arb] | None:
    """A proved range of p − p′ or of KL(p ‖ p′); None where nothing is known.

    Args:
        terms: one divergence, or two probabilities with weights 1 and −1.
        linear: a proved range of a weighted sum of outputs, given as terms.
    """
    if terms[0][1] == "divergence":
        first, second, r = list(terms[0][2]), list(terms[0][3]), 0
    else:
        first, second = list(terms[0][3]), list(terms[1][3])
        r = first.index(terms[0][2])
    if len(first) != len(second) or any(i == j for i, j in zip(first, second, strict=True)):
        return None

    def gap(side: list[int], j: int, weight: float = 1.0) -> list[list[Any]]:
        return [[weight, "logit", side[j]], [-weight, "logit", side[r]]]

    others = [j for j in range(len(first)) if j != r]
    zero = (0.0, 0.0)
    g, h, d = ([zero] * len(first) for _ in range(3))
    for j in others:
        g[j], h[j] = linear(gap(first, j)), linear(gap(second, j))
        d[j] = linear(gap(first, j) + gap(second, j, -1.0))
    if not np.isfinite([*g, *h]).all():
        return None
    apart = [(_low(arb(a[0]) - b[1]), _high(arb(a[1]) - b[0])) for a, b in zip(g, h, strict=True)]
    d = [
        zero if j == r else (max(d[j][0], apart[j][0]), min(d[j][1], apart[j][1])) for j in range(len(first))
    ]
    known = _Known(r, g, h, d)
    tangent = _Tangent(known, terms[0][1] == "divergence")
    weighed = [[w, "logit", i] for i, w in zip(first, tangent.row(tangent.a), strict=True) if w]
    weighed += [[-w, "logit", i] for i, w in zip(second, tangent.row(tangent.b), strict=True) if w]
    ends = [*(known.divergence() if terms[0][1] == "divergence" else known.probability())]
    ends.append(tangent.ends(linear(weighed) if weighed else zero))
    return max((low for low, _ in ends), key=float), min((high for _, high in ends), key=float)


class _Known:
    """Ranges of g, h and d = g − h, the one at `r` 0, and what they say of an effect."""

    def __init__(self, r: int, g: list[Any], h: list[Any], d: list[Any]) -> None:
        self.r, self.g, self.h, self.d = r, g, h, d
        self.s, self.t = shares(g), shares(h)
        low = _program([(-arb(high)).exp() for _, high in d], self.s, -1)
        self.ratio = low, _program([(-arb(low)).exp() for low, _ in d], self.s, 1)

    def probability(self) -> list[Ends]:
        """p − p′ alone, as p(1 − 1/R) and as p′(R − 1)."""
        p, q, (low, high) = self.s[self.r], self.t[self.r], self.ratio
        found = [((p[0] - q[1]).lower(), (p[1] - q[0]).upper()), (arb(-1), arb(1))]
        found.append(_times(q, ((low - 1).lower(), (high - 1).upper())))
        if low > 0:
            found.append(_times(p, ((1 - 1 / low).lower(), (1 - 1 / high).upper())))
        return found

    def divergence(self) -> list[Ends]:
        """log R + Σ s d; at least 0, and at most (max d − min d)²/8 (Hoeffding's lemma)."""
        width = arb(max(high for _, high in self.d)) - min(low for low, _ in self.d)
        low, high = self.ratio
        least = _program([arb(x) for x, _ in self.d], self.s, -1)
        most = _program([arb(x) for _, x in self.d], self.s, 1)
        below = (low.log() + least).lower() if low > 0 else arb(0)
        return [(below, (high.log() + most).upper()), (arb(0), (width * width / 8).upper())]


class _Tangent:
    """The linear part of the effect at the middle of the ranges, and its second order beyond."""

    def __init__(self, known: _Known, divergence: bool) -> None:
        self.known, self.divergence, r = known, divergence, known.r
        self.g0, self.h0 = (
            [arb(0.5 * low + 0.5 * high).mid() for low, high in x] for x in (known.g, known.h)
        )
        s, t = _softmax(self.g0), _softmax(self.h0)
        if divergence:
            q = [(x / y).log() for x, y in zip(s, t, strict=True)]
            self.value = sum((x * y for x, y in zip(s, q, strict=True)), arb(0))
            slopes = [x * (y - self.value) for x, y in zip(s, q, strict=True)]
            others = [x - y for x, y in zip(s, t, strict=True)]
        else:
            self.value = s[r] - t[r]
            slopes, others = [-s[r] * x for x in s], [-t[r] * x for x in t]
        self.slopes = slopes, others
        self.a, self.b = ([_grain(x) if j != r else 0.0 for j, x in enumerate(side)] for side in self.slopes)

    def row(self, weights: list[float]) -> list[float]:
        """Weights of all outputs, which sum to 0: they are multiples of 2⁻⁴⁰, so the sum is exact."""
        total = sum(weights)
        return [-total if j == self.known.r else w for j, w in enumerate(weights)]

    def ends(self, linear: tuple[float, float]) -> Ends:
        """The range of the effect, from that of a·y − b·z."""
        known, off, constant = self.known, arb(0), self.value
        U, V = (
            [max(abs(arb(x) - at).upper() for x in ends) for ends, at in zip(box, point, strict=True)]
            for box, point in ((known.g, self.g0), (known.h, self.h0))
        )
        for weights, slopes, far, at, sign in (
            (self.a, self.slopes[0], U, self.g0, -1),
            (self.b, self.slopes[1], V, self.h0, 1),
        ):
            for j, w in enumerate(weights):
                if j != known.r:
                    off += abs(slopes[j] - w) * far[j]
                    constant += sign * w * at[j]
        Eu, Ev = (_program([x * x for x in far], box, 1) for far, box in ((U, known.s), (V, known.t)))
        if self.divergence:
            Q = arb(max(high for _, high in known.d)) - min(low for low, _ in known.d)
            W = [max(abs(arb(x) - a + b).upper() for x in ends)
                 for ends, a, b in zip(known.d, self.g0, self.h0, strict=True)]  # fmt: skip
            Q = Q.max(2 * max(W, key=float) + Q)  # of all points between, the middle included
            below = Q * Eu + _program([x * x for x in V], known.s, 1)
            above = Q * Eu + _program([x * x for x in W], known.s, 1) + Ev
        else:
            below = above = known.s[known.r][1] * Eu + known.t[known.r][1] * Ev
        low, high = arb(linear[0]) + constant - below / 2 - off, arb(linear[1]) + constant + above / 2 + off
        return low.lower(), high.upper()


def _grain(x: arb) -> float:
    return round(float(x.mid()) * 2.0**40) / 2.0**40


def shares(gaps: Sequence[tuple[float, float]]) -> list[Ends]:
    """A box of softmax(g) for g in a box: s_j is least where its own g is least and all others are largest."""
    found = []
    for j, (low, high) in enumerate(gaps):
        rest = [ends for k, ends in enumerate(gaps) if k != j]
        most = sum(((arb(b) - low).exp() for _, b in rest), arb(1))
        least = sum(((arb(a) - high).exp() for a, _ in rest), arb(1))
        found.append(((1 / most).lower(), (1 / least).upper()))
    return found


def _program(costs: list[arb], box: list[Ends], side: int) -> arb:
    """A bound of Σ c s over the box and the simplex, from above (side 1) or below (−1): the best of all multipliers."""
    signed = [side * c for c in costs]
    best = None
    for nu in {float(c.mid()) for c in signed}:
        total = arb(nu)
        for c, (low, high) in zip(signed, box, strict=True):
            total += ((c - nu) * low).max((c - nu) * high)
        if best is None or float(total.upper()) < float(best):
            best = total.upper()
    assert best is not None
    return side * best


def _times(x: Ends, y: Ends) -> Ends:
    ends = [a * b for a in x for b in y]
    return min((e.lower() for e in ends), key=float), max((e.upper() for e in ends), key=float)


def _low(x: arb) -> float:
    return float(np.nextafter(float(x.lower()), -np.inf))


def _high(x: arb) -> float:
    return float(np.nextafter(float(x.upper()), np.inf))
