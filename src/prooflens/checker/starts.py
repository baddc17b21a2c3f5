"""Runs about regions inside a network: its tail from a block on, and the streams that the region is made of.

A run about a tail states the block and, for points of the region, what the stream there was computed from: token ids or
an input, and perhaps a steering vector. The tail is made from the weights, and its fingerprint must be the stated one.
Every stated point is compared with the stream that the whole network computes, in balls.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from flint import arb, ctx

from prooflens.checker.findings import need
from prooflens.checker.network import Array, Balls, Network
from prooflens.checker.region import Region, balls

NEAR = 1e-9
"""How far a stored stream may be from the network's, as a share of the token's largest number."""

FORGOTTEN = ("embed_scale", "d_embed", "patch")
"""Fields of an architecture that a tail does not have, and that are left out where they have their defaults."""


def tail_of(net: Network, layer: int) -> Network:
    """The network from a block on, as one that reads streams.

    Args:
        net: a whole network.
        layer: the first block that is kept.
    """
    arch, last = dict(net.arch), int(net.arch["n_layers"])
    need(0 <= layer < last, "the run starts at a block that there is not")
    unknown = [name for name in ("scale_by_layer", "head_positions") if arch.get(name)]
    need(not unknown, "a network whose blocks depend on where they stand has no tail")
    weights = {}
    for name, tensor in net.weights.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.*)", name)
        if match is None and not name.startswith("embed."):
            weights[name] = tensor
        elif match is not None and int(match[1]) >= layer:
            weights[f"blocks.{int(match[1]) - layer}.{match[2]}"] = tensor
    if arch["d_out"] is not None and "head.weight" not in weights:
        weights["head.weight"] = net.weights["embed.tokens"]
    local = [int(i) - layer for i in arch.pop("window_layers", []) if int(i) >= layer]
    arch |= {"n_layers": last - layer, "d_vocab": None, "context": None, "position_offset": 0}
    arch |= {"window_layers": local} if local else {}
    if layer:
        arch.pop("first_norm", None)  # its default is that there is one
    return Network({name: v for name, v in arch.items() if name not in FORGOTTEN}, weights, net.tables)


def stream_of(net: Network, x: Balls, layer: int) -> Balls:
    """The residual stream in front of a block, from an input [S, d].

    Args:
        net: the whole network.
        x: the input.
        layer: the block.
    """
    with ctx.workprec(128 + 40 * layer):
        return net.before(x, layer)


def confirm(net: Network, start: dict[str, Any], tensors: dict[str, Any], region: Region) -> str:
    """Compare all stated points of a region with the streams of the network.

    Args:
        net: the whole network.
        start: what `run.json` says of the start.
        tensors: the tensors of the run.
        region: the stored region.

    Returns:
        What was confirmed, in words.

    Raises:
        WrongError: if a stored point is not the network's stream.
    """
    layer, known, held = int(start["layer"]), True, dict[str, Balls]()
    if not start["points"]:
        return f"the region starts at layer {layer}: what its stream comes from is not stated"
    for number, point in enumerate(start["points"]):
        ids = point["ids"]
        given = None if ids is not None else tensors[f"start/{number}/input"]
        key = str(ids) if given is None else given.tobytes().hex()
        if key not in held:
            x = net.embed(_tokens(net, ids)) if given is None else np.asarray(balls(given))
            held[key] = stream_of(net, x, layer)
        wanted = _steered(held[key], point["steering"], tensors.get(f"start/{number}/direction"))
        alpha = point["factors"]
        alpha = alpha if alpha is None else np.array(alpha, dtype=np.float64)
        fits = alpha is None or (alpha.shape == (region.n_factors,) and bool(np.all(np.abs(alpha) <= 1.0)))
        need(fits and region.center.shape == wanted.shape, "a stated point is none of the region")
        stored = np.asarray(balls(region.center)) if alpha is None else region.point(alpha)
        known &= _agree(stored, wanted)
    what = f"the region starts at layer {layer}"
    if not known:
        return f"{what}: the network's stream there is not known well enough to compare"
    whole = _corners(region) <= {_text(point["factors"]) for point in start["points"]}
    missing = "" if whole else "; where its other corners come from is not stated"
    steered = sorted({float(p["steering"]["c"]) for p in start["points"] if p["steering"] is not None})
    by = f", steered by the stored vector times {steered[0]:g} to {steered[-1]:g}" if steered else ""
    return f"{what}, and the stored streams are the network's{by}{missing}"


def _tokens(net: Network, ids: list[int]) -> list[int]:
    need(net.arch["d_vocab"] is not None, "token ids are stated of a network that reads none")
    sound = all(type(i) is int and 0 <= i < int(net.arch["d_vocab"]) for i in ids)
    need(sound and ids, "a stated token is none of the vocabulary")
    return ids


def _steered(stream: Balls, by: dict[str, Any] | None, direction: Array | None) -> Balls:
    """A stream with c·v added at some tokens."""
    need((by is None) == (direction is None), "a steering vector and its strength are not both stored")
    if by is None or direction is None:
        return stream
    sound = all(type(t) is int and 0 <= t < len(stream) for t in by["tokens"]) and np.isfinite(by["c"])
    need(sound and direction.shape == stream.shape[1:], "a steered token or strength is none")
    moved = stream.copy()
    for t in set(by["tokens"]):
        moved[t] = moved[t] + np.asarray(balls(direction)) * arb(float(by["c"]))
    return moved


def _agree(stored: Balls, wanted: Balls) -> bool:
    """Whether two streams are near each other for certain; WrongError where they are certainly not."""
    known = True
    for one, other in zip(stored, wanted, strict=True):
        room = NEAR * max(abs(float(value.mid())) for value in one)
        for a, b in zip(one, other, strict=True):
            gap = abs(a - b)
            need(not gap > room, "the stored stream is not what the network computes there")
            known &= bool(gap <= room)
    return known


def _text(factors: list[float] | None) -> str:
    return str(None if factors is None else [float(a) for a in factors])


def _corners(region: Region) -> set[str]:
    """The factors of the points that make up a region: its centre, or the corners of a hull."""
    p = region.n_factors
    if region.anchor is not None and np.array_equal(region.anchor, -np.ones(p)):
        corners = [-np.ones(p), *(2.0 * one - np.ones(p) for one in np.eye(p))]
        return {_text(corner.tolist()) for corner in corners}
    generated = region.generators is not None and p > 1 and np.allclose(region.generators.sum(0), 0.0)
    return {_text(one.tolist()) for one in np.eye(p)} if generated else {_text(None)}
