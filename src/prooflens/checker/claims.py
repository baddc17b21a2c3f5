"""Functionals of scores and outputs, and their values at a point, in Arb balls.

A functional is a dictionary {"constant", "terms", "sense"} of a run's `claim` column; a term is [weight, kind, layer,
head, position, key or keys] with kind `score`, `logsumexp` or `entropy`, [weight, "logit", index], [weight, "largest",
outputs that are left out], or [weight, "standing", index, k, rivals]: the smaller of the output and of the k-th
smallest of its differences to its rivals; probabilities and divergences are in `distributions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np
from flint import arb

from prooflens.checker.distributions import KINDS as DISTRIBUTIONS
from prooflens.checker.distributions import ball_value

Functional = Mapping[str, Any]
OUTPUTS = ("logit", "largest", "standing", *DISTRIBUTIONS)


def keys_of(term: list[Any]) -> list[int]:
    """The keys that an attention term reads."""
    return [term[5]] if term[1] == "score" else list(term[5])


def value(functional: Functional, found: Mapping[int | str, Any]) -> arb:
    """Its value where the scores of the layers, and the logits, are `found`."""
    total = arb(functional["constant"])
    for term in functional["terms"]:
        weight, kind = term[:2]
        if kind == "standing":
            y = found["logits"]
            total += arb(weight) * standing(y[term[2]], [y[j] for j in term[4]], term[3])
            continue
        if kind in DISTRIBUTIONS:
            total += arb(weight) * ball_value(term, found["logits"])
            continue
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


def standing(own: arb, rivals: list[arb], k: int) -> arb:
    """min(y, k-th smallest of y − y_j): between the k-th smallest of the lower ends and that of the upper ends."""
    if k > len(rivals):
        return own
    gaps = [own - rival for rival in rivals]
    low, high = (
        sorted(ends, key=float)[k - 1] for ends in zip(*((g.lower(), g.upper()) for g in gaps), strict=True)
    )
    return own.min(low.union(high))
