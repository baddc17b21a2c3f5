"""Functionals of scores and outputs, and their values at a point, in Arb balls.

A functional is a dictionary {"constant", "terms", "sense"} of a run's `claim` column; a term is [weight, kind, layer,
head, position, key or keys] with kind `score`, `logsumexp` or `entropy`, [weight, "logit", index], or [weight,
"largest", outputs that are left out].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np
from flint import arb

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
