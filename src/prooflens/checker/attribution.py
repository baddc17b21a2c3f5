"""Direct logit attribution from weights: the direction that reads what a part adds to a difference of logits."""

from __future__ import annotations

import re

import numpy as np
from flint import arb

from prooflens.checker.network import Balls, Network


def attribution(net: Network, place: str, first: int, second: int) -> tuple[str, Balls]:
    """The hook of a part, and its direction as balls, up to the scale of the last norm, which is positive.

    LookupError where there is no such part, or parts of the network do not add up to what its head reads.

    Args:
        net: a network, whole or ended at a hook.
        place: a head `9.6`, an attention `a9` or a network `m3`.
        first: the output that counts positively.
        second: the one that counts negatively.
    """
    held = net if net.goes_on is None else net.goes_on
    if held.arch["norm_place"] not in ("pre", "none") or held.arch["pooler"]:
        raise LookupError("the network has no attributions")
    if held.arch["pool"] not in ("none", "last") or first == second:
        raise LookupError("the network has no such attribution")
    match = re.fullmatch(r"(\d+)\.(\d+)|a(\d+)|m(\d+)", place)
    if match is None:
        raise LookupError(f"there is no part {place}")
    head = held.weights.get("head.weight", held.weights.get("embed.tokens"))
    if head is None:
        raise LookupError("the network has no head")
    u = np.array([arb(a) - arb(b) for a, b in zip(head[first].tolist(), head[second].tolist(), strict=True)])
    if held.arch["norm_place"] == "pre":
        u = u * held.weights.get("final_norm.weight", np.ones(len(u)))
        u = u - sum(u, arb(0)) / len(u) if held.arch["norm_kind"] == "layer" else u
    if match[3] is not None:
        return f"blocks.{match[3]}.hook_attn_out", u
    if match[4] is not None:
        return f"blocks.{match[4]}.hook_mlp_out", u
    o, width, number = held.weights[f"blocks.{match[1]}.o.weight"], held.head_dim, int(match[2])
    v = np.array([arb(0)] * o.shape[1])
    for column in range(number * width, (number + 1) * width):
        v[column] = sum((a * b for a, b in zip(u, o[:, column].tolist(), strict=True)), arb(0))
    return f"blocks.{match[1]}.attn.hook_z", v
