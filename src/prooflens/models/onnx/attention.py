"""Queries, keys and values as a graph cuts them out of projections: rows, turning pairs, masks and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prooflens.errors import ModelError
from prooflens.models.onnx.forms import Anchor, Floats, Form, Ints
from prooflens.models.onnx.graph import refuse
from prooflens.models.sites import alibi_bias

MASKED = -9e3
"""A score with so much taken off takes no part: e to that power is 0 in every floating-point format."""


def short(value: float) -> float:
    """The decimal that a float32 constant was written as: 1e-05, not 9.99999974e-06."""
    near = float(f"{value:.6g}")
    return near if abs(near - value) <= 1e-7 * abs(value) else value


@dataclass(frozen=True, eq=False)
class Heads:
    """How heads read a projection.

    Attributes:
        linear: the projection.
        norm: the norm of queries or keys between it and the heads, or None.
        features: [H, d_h], which features each head reads.
        scale: what they are multiplied by.
        order: the coordinates of a head in the order in which c turns with c + d_h/2; None where nothing turns.
        frequencies: angles per position of the first d_h/2 of them.
    """

    linear: Anchor
    norm: Anchor | None
    features: Ints
    scale: float
    order: Ints | None = None
    frequencies: Floats | None = None

    @property
    def groups(self) -> int:
        """How many heads the projection has itself: each may serve several."""
        heads = len(self.features)
        starts = [
            h for h in range(heads) if h == 0 or not np.array_equal(self.features[h], self.features[h - 1])
        ]
        if heads % len(starts):
            return heads
        repeated = np.repeat(self.features[starts], heads // len(starts), axis=0)
        return len(starts) if np.array_equal(repeated, self.features) else heads

    def rows(self, groups: int) -> Ints:
        """The features of so many heads, in order: [G, d_h]."""
        own = self.features[:: len(self.features) // groups]
        return own if self.order is None else own[:, self.order]


def read_heads(node: Any, form: Form) -> Heads:
    """The heads of queries, keys or values.

    Args:
        node: the product that reads them, for messages.
        form: what it reads, [H, S, d_h].
    """
    anchor = next(iter(form.anchors))
    norm = anchor if anchor.kind == "norm" else None
    linear = next(iter(anchor.inputs)) if norm is not None else anchor
    if linear.kind != "linear" or form.constant.any():
        raise refuse(node, "its heads are not of one projection")
    n, width = form.shape[1], anchor.width
    places = np.arange(n)[None, :, None]
    main = np.full((form.shape[0], form.shape[2]), -1)
    base = np.zeros(main.shape)
    for term in form.terms:
        if not ((term.index // width == places) | (term.factor == 0.0)).all():
            raise refuse(node, "its heads read other tokens than their own")
        there = term.factor[:, 0] != 0.0
        main = np.where(there, term.index[:, 0] % width, main)
        base = np.where(there, base + term.factor[:, 0], base)
    scale = float(base.flat[0])
    if scale == 0.0 or not np.allclose(base, scale, rtol=1e-6, atol=0.0) or (main < 0).any():
        raise refuse(node, "its heads are scaled coordinate by coordinate")
    if len(form.terms) == 1 and (form.terms[0].factor == form.terms[0].factor.flat[0]).all():
        return Heads(linear, norm, main, scale)
    order, frequencies = _turns(node, form, main, scale)
    return Heads(linear, norm, main, scale, order, frequencies)


def _turns(node: Any, form: Form, main: Ints, scale: float) -> tuple[Ints, Floats]:
    """Which coordinates turn with which, and how fast: x_c cos ω − x_p sin ω at position 1."""
    if form.shape[1] < 2 or form.shape[2] % 2:
        raise refuse(node, "its heads cannot be read as turning pairs")
    cosine, sine, other = np.zeros(main.shape), np.zeros(main.shape), np.full(main.shape, -1)
    for term in form.terms:
        features, factor = term.index[:, 1] % next(iter(form.anchors)).width, term.factor[:, 1] / scale
        own = features == main
        cosine += np.where(own, factor, 0.0)
        sine += np.where(own, 0.0, factor)
        other = np.where(~own & (factor != 0.0), features, other)
    first = np.flatnonzero(sine[0] < 0.0)
    second = np.array(
        [int(np.flatnonzero(main[0] == other[0, c])[0]) for c in first if other[0, c] in main[0]], dtype=int
    )
    still = np.setdiff1d(np.arange(main.shape[1]), np.concatenate((first, second)))
    half = len(still) // 2
    order = np.concatenate((first, still[:half], second, still[half:]))
    turned = len(first) == len(second) and (main[:, second] == other[:, first]).all()
    if not turned or len(still) % 2 or not np.allclose(sine, sine[:1]) or not np.allclose(cosine, cosine[:1]):
        raise refuse(node, "its heads do not turn in pairs")
    angles = np.arctan2(-sine[0, first], cosine[0, first])
    return order, np.concatenate((angles, np.zeros(half)))


def base_of(frequencies: Floats) -> float | None:
    """θ, if the frequencies are θ^(−2c/d_h)."""
    half = len(frequencies)
    if half < 2 or (frequencies <= 0.0).any():
        return None
    theta = short(float(frequencies[-1] ** (-half / (half - 1))))
    plain = theta ** (-np.arange(half) / half)
    return theta if np.allclose(frequencies, plain, rtol=1e-6, atol=0.0) else None


@dataclass(frozen=True, eq=False)
class Weights:
    """What stands between products of queries and keys and attention's weights.

    Attributes:
        scores: the products.
        scale: their factor.
        cap: c of c·tanh(a/c), or None.
        seen: [S, S], which keys each query sees.
        alibi: whether BLOOM's bias is added.
    """

    scores: Anchor
    scale: float
    cap: float | None
    seen: Ints
    alibi: bool


def read_weights(pattern: Anchor) -> Weights:
    """The scores, mask and bias of attention's weights."""
    form = pattern.sources[0]
    (term,) = form.terms
    masked = form.constant <= MASKED
    if not (masked == masked[:1]).all():
        raise refuse(pattern.node, "its heads have different masks")
    factors = term.factor[~masked]
    if not factors.size or not (factors == factors[0]).all():
        raise refuse(pattern.node, "its scores are scaled one by one")
    scale, cap, anchor = float(factors[0]), None, term.anchor
    if anchor.kind == "tanh":
        inner = anchor.sources[0].uniform()
        if inner is None:
            raise refuse(pattern.node, "the cap of its scores is not understood")
        cap, anchor, scale = short(scale), anchor.sources[0].terms[0].anchor, inner * scale
    if anchor.kind != "scores":
        raise refuse(pattern.node, "it is not of products of queries and keys")
    bias = np.where(masked, 0.0, form.constant)
    alibi = False
    if bias.any():
        heads, n = bias.shape[:2]
        given = alibi_bias(heads, n, torch.zeros(1, dtype=torch.float64)).numpy()
        apart = np.where(masked, 0.0, bias - given)
        apart = np.where(masked, 0.0, apart - apart[:, np.arange(n), np.arange(n)][..., None])
        alibi = bool(np.abs(apart).max() <= 1e-5 * np.abs(given).max())
        if not alibi:
            raise refuse(pattern.node, "a bias is added to its scores that is no mask and not ALiBi")
    return Weights(anchor, scale, cap, (~masked[0]).astype(np.int64), alibi)


def reach(node: Any, seen: Ints, causal: bool) -> int | None:
    """How many tokens away a layer looks, or None for all, from the keys that are seen."""
    n = len(seen)
    apart = np.abs(np.arange(n)[:, None] - np.arange(n)[None, :])
    allowed = np.tril(np.ones((n, n), dtype=np.int64)) if causal else np.ones((n, n), dtype=np.int64)
    if np.array_equal(seen, allowed):
        return None
    window = int(apart[seen == 1].max())
    if not np.array_equal(seen, allowed * (apart <= window)):
        raise refuse(node, "its mask is neither causal, nor full, nor a window")
    return window


def scale_fields(scales: list[float], d_head: int) -> dict[str, Any] | None:
    """The fields of the architecture that say how scores are scaled; None where layers differ.

    Args:
        scales: the factor of q·k, layer by layer.
        d_head: the width of a head.
    """
    by_layer = [scale * (layer + 1) for layer, scale in enumerate(scales)]
    for found, extra in ((scales, {}), (by_layer, {"scale_by_layer": True})):
        if np.allclose(found, found[0], rtol=1e-6, atol=0.0):
            usual = abs(found[0] * d_head**0.5 - 1.0) < 1e-6
            return extra | ({} if usual else {"attention_scale": short(found[0])})
    return None


def turning_fields(turns: list[Floats | None], local: set[int]) -> tuple[dict[str, Any], dict[str, Floats]]:
    """The fields and weights of rotary positions: a base, or frequencies, perhaps others in layers with a window.

    Args:
        turns: the frequencies of every layer; None where nothing turns.
        local: the layers with a window.
    """
    if all(turn is None for turn in turns):
        return {}, {}
    kinds: list[tuple[Floats, set[int]]] = []
    for layer, turn in enumerate(turns):
        if turn is None:
            raise ModelError("some layers of the graph turn their heads and others do not")
        known = next(
            (layers for found, layers in kinds if np.allclose(found, turn, rtol=1e-6, atol=0.0)), None
        )
        if known is None:
            kinds.append((turn, {layer}))
        else:
            known.add(layer)
    if len(kinds) == 1:
        theta = base_of(kinds[0][0])
        if theta is not None:
            return {"rope_theta": theta}, {}
    held = {
        "rope.local_frequencies" if layers == local and len(kinds) > 1 else "rope.frequencies": found
        for found, layers in kinds
    }
    if len(held) != len(kinds) or len(kinds) > 2:
        raise ModelError("layers of the graph turn their heads at speeds that do not follow their windows")
    return {"rope_given": True, "rope_local": len(kinds) == 2}, held
