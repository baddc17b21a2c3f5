"""Cut edges: what a sender wrote is carried beside the stream to whoever reads the stream without it.

A receiver reads x − u + c in place of the stream x, u what the sender wrote. Of a head its z is carried, of a neuron
its value, of all others what they write: u is a linear map of that, so x − u is a value of the same chain, and what
both hold cancels. Two networks side by side carry what either needs, so that their chains are the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prooflens.checker.depth.shapes import Array
from prooflens.checker.depth.values import Value
from prooflens.checker.edited import Edge, Sender, edges_of

INPUT, HEAD, ATTENTION, FEED, NEURON = range(5)
NETWORK, OUTPUT = 3, 4
"""Channels of receivers behind a mixing."""
FINAL = "final_norm"


def needed(every: Sequence[Mapping[str, Array]], n_layers: int) -> dict[Sender, int]:
    """The senders of all cut edges of some networks, and the last block that reads each; n_layers for the output.

    Args:
        every: the weights of each network.
        n_layers: how many blocks there are.
    """
    found = dict[Sender, int]()
    for weights in every:
        for layer in range(n_layers + 1):
            for edge in edges_of(weights, FINAL if layer == n_layers else f"blocks.{layer}"):
                found[edge.sender] = max(found.get(edge.sender, 0), layer)
    return found


def columns_of(senders: Mapping[Sender, int], kind: int, layer: int, width: int) -> dict[Sender, list[int]]:
    """The coordinates of z, or of the neurons, that senders of one layer are.

    Args:
        senders: all senders.
        kind: heads or neurons.
        layer: the layer.
        width: the width of a head; 1 for neurons.
    """
    own = sorted(sender for sender in senders if sender[:2] == (kind, layer))
    return {sender: list(range(sender[2] * width, (sender[2] + 1) * width)) for sender in own}


def groups(edges: Sequence[Edge]) -> dict[tuple[int, ...], list[Edge]]:
    """Edges of one channel by the heads that lack the same ones.

    Args:
        edges: the edges.
    """
    by_head = dict[int, list[Edge]]()
    for edge in edges:
        by_head.setdefault(edge.head, []).append(edge)
    found = dict[tuple[int, ...], list[Edge]]()
    for head, own in by_head.items():
        alike = next((heads for heads, held in found.items() if _same(held, own)), None)
        if alike is None:
            found[head,] = own
        else:
            found[*alike, head] = found.pop(alike)
    return found


def _same(first: list[Edge], second: list[Edge]) -> bool:
    """Whether edges lack the same things."""
    pairs = list(zip(first, second, strict=False))
    return len(first) == len(second) and all(
        (a.sender, a.token) == (b.sender, b.token) and np.array_equal(a.value, b.value) for a, b in pairs
    )


def without(
    x: Value,
    edges: Sequence[Edge],
    carried: Mapping[Sender | str, Value],
    weights: Mapping[str, Array],
    places: tuple[int, Sequence[int]],
) -> Value:
    """The stream without what some edges bring.

    Args:
        x: the stream.
        edges: the edges of one reader.
        carried: what senders wrote.
        weights: all weights of the network.
        places: how many tokens there are, and which of them x holds.
    """
    n, tokens = places
    for sender in dict.fromkeys(edge.sender for edge in edges):
        own = [edge for edge in edges if edge.sender == sender]
        kind, layer, index = sender
        if sender not in carried:
            raise ValueError("an edge starts at a part that there is not")
        value, d = carried[sender], x.c.shape[1]
        W = np.eye(d)
        if kind in (HEAD, NEURON):
            c = value.c.shape[1]
            name = f"blocks.{layer}.{'o' if kind == HEAD else 'down'}.weight"
            W = weights[name][:, index * c : (index + 1) * c]
        chosen = np.stack([edge.places(n)[list(tokens)] for edge in own])
        put = chosen.T @ np.stack([edge.value for edge in own])
        share = chosen.sum(0)
        if share.max() > 1.0:
            raise ValueError("an edge is cut twice at a token")
        F = -W if np.all(share == 1.0) else -share[:, None, None] * W
        x = x.plus(value.mapped(F, put))
    return x
