"""Functionals of attention scores: their values at a point, and their ranges on a region, in Arb balls.

A functional is a dictionary {"constant", "terms", "sense"} of a run's `claim` column; a term is [weight, kind, layer,
head, position, key or keys] with kind `score`, `logsumexp` or `entropy`, [weight, "logit", index], or [weight,
"largest", outputs that are left out].
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
from flint import arb

from prooflens.checker.first_layer import FirstLayer

Functional = Mapping[str, Any]
OUTPUTS = ("logit", "largest")


def keys_of(term: list[Any]) -> list[int]:
    """The keys that an attention term reads."""
    return [term[5]] if term[1] == "score" else list(term[5])


def value(functional: Functional, found: Mapping[int | str, Any]) -> arb:
    """Its value where the scores of the layers, and the logits, are `found`."""
    total = arb(functional["constant"])
    for term in functional["terms"]:
        weight, kind = term[:2]
        if kind in OUTPUTS:
            read = found["logits"][[term[2]]] if kind == "logit" else np.delete(found["logits"], term[2])
            total += arb(weight) * reduce(arb.max, read)
            continue
        a = [found[term[2]][term[3], term[4], key] for key in keys_of(term)]
        e = [(x - a[0].mid()).exp() for x in a]
        Z = sum(e, arb(0))
        lse = Z.log() + a[0].mid()
        entropy = lse - sum((x * y for x, y in zip(e, a, strict=True)), arb(0)) / Z
        total += arb(weight) * {"score": a[0], "logsumexp": lse, "entropy": entropy}[kind]
    return total


def bounds(functional: Functional, first: FirstLayer) -> tuple[float, float, float]:
    """Proved bounds on the whole region, and a value that a point of it stays below or reaches (NaN: none known).

    Only layer 0, and only functionals that a common shift of a row's scores leaves unchanged: then they are functions
    of the attention weights, and s_j = 1/(1 + Σ e^{a_k − a_j}) with proved differences gives a box for those.
    """
    terms, nothing = functional["terms"], (-np.inf, np.inf, np.nan)
    if any(term[1] in OUTPUTS or term[2] != 0 for term in terms):
        return nothing
    rows = {(term[3], term[4]) for term in terms}
    for row in rows:
        if sum(Fraction(t[0]) for t in terms if tuple(t[3:5]) == row and t[1] != "entropy") != 0:
            return nothing
    if len(terms) == 2 and terms[0][1] == terms[1][1] == "score" and len(rows) == 1:
        (weight, _, _, head, i, j), k, c = terms[0], terms[1][5], functional["constant"]
        j, k = (j, k) if weight > 0 else (k, j)
        high, low = first.upper(head, i, j, k)[0], first.upper(head, i, k, j)
        ends = [_outward(abs(weight) * arb(v) + c) for v in (-low[0], high, -low[1])]
        return ends[0][0], ends[1][1], ends[2][1]
    total = arb(functional["constant"])
    boxes = {row: _weights(first, *row) for row in rows}
    for term in terms:
        box = boxes[term[3], term[4]]
        if term[1] == "entropy":
            least, most = _entropy(list(box.values()))
        else:
            inside = [box[key] for key in keys_of(term)]
            rest = [box[key] for key in set(box) - set(keys_of(term))]
            without = [1 - sum((s[side] for s in rest), arb(0)) for side in (1, 0)]
            low = max(sum(s[0] for s in inside), without[0].lower(), key=float)
            high = min(sum(s[1] for s in inside), without[1].upper(), key=float)
            if not low > 0:
                return nothing
            least, most = arb(low).log(), arb(high).log()
        total += term[0] * least.union(most)
    return _outward(total)[0], _outward(total)[1], np.nan


def _outward(x: arb) -> tuple[float, float]:
    """Floats below and above a ball."""
    low, high = float(x.lower()), float(x.upper())
    return (np.nextafter(low, -np.inf), np.nextafter(high, np.inf)) if x.is_finite() else (-np.inf, np.inf)


def _weights(first: FirstLayer, head: int, i: int) -> dict[int, tuple[arb, arb]]:
    """Lower and upper bounds of the attention weights of a row."""
    keys = [int(j) for j in np.flatnonzero(first.net.mask(len(first.center), 0)[i])]
    box = {}
    for j in keys:
        others = [k for k in keys if k != j]
        most = sum((arb(first.upper(head, i, k, j)[0]).exp() for k in others), arb(1))
        least = sum((arb(-first.upper(head, i, j, k)[0]).exp() for k in others), arb(1))
        box[j] = ((1 / most).lower(), (1 / least).upper())
    return box


def _entropy(box: list[tuple[arb, arb]]) -> tuple[arb, arb]:
    """Bounds of the entropy of all s in the box with Σs = 1.

    Below: no k weights sum to more than M_k = min(k largest upper, 1 − (S−k) smallest lower bounds), so s is majorised
    by the increments of M. Above, for every level θ: Σ h(x) + ν(1 − Σx), x = clip(θ), ν = −1 − log θ (weak duality).
    """
    lows = sorted(float(s[0]) for s in box)
    highs = sorted((float(s[1].max(arb(0))) for s in box), reverse=True)
    S, M = len(box), [0.0]
    for k in range(1, S):
        sums = sum(map(arb, highs[:k]), arb(0)), 1 - sum(map(arb, lows[: S - k]), arb(0))
        M.append(min(1.0, max(M[-1], min(_outward(most)[1] for most in sums))))
    steps = [arb(b) - arb(a) for a, b in itertools.pairwise([*M, 1.0])]
    least = sum((_plogp(step) for step in steps if step.upper() > 0), arb(0)).lower().max(arb(0))
    left, right = 0.0, 1.0
    for _ in range(60):
        theta = 0.5 * (left + right)
        total = sum(min(float(s[1]), max(float(s[0]), theta)) for s in box)
        left, right = (theta, right) if total < 1.0 else (left, theta)
    x = [s[1].min(s[0].max(arb(right))) for s in box]
    most = sum(map(_plogp, x), arb(0)) + (-1 - arb(right).log()) * (1 - sum(x, arb(0)))
    return least, most.upper()


def _plogp(x: arb) -> arb:
    return -x * x.log()
