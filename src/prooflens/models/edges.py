"""Edges: what a part writes, as one later part reads it: the receiver's stream lacks it, or has a constant there.

| name | what |
|---|---|
| `a9.h6->a10.h2.q` | what head 9.6 writes, in the stream of which head 10.2 makes its queries (`.k`, `.v`) |
| `a9.h6->a10.h2`, `a9.h6->a10` | in all three of them; of all heads of the layer |
| `m3->m5`, `a2->logits`, `input->m0` | attentions, networks and the input send; networks and the output receive |
| `m3.n12->m5` | what neuron 12 of network 3 writes |

Only the direct edge is cut: what reaches the receiver through parts between stays. With u_s what the sender writes at
token s, the receiver reads x_s − u_s + c_s in place of the stream x_s, before its norm; several edges of a receiver add
up. All else reads the stream as it is.

A receiver's edges are rows of `blocks.L.edges.rows` [m, 6], or `final_norm.edges.rows` for the output: (0, 1, 2 for
queries, keys, values, 3 for the network, 4 for the output; the head or −1; 0 to 4 for the input, a head, an attention,
a network, a neuron; the sender's layer or −1; its head or neuron, or −1; a token, as in `models.held`). `edges.values`
[m, d] holds c.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.held import EVERY

if TYPE_CHECKING:
    from prooflens.models.architecture import Architecture

EDGE = re.compile(r"(?P<sender>[^<>]*)->(?P<receiver>[^<>@]*)(?:<(?P<channel>[qkv])>)?")
SENDER = re.compile(
    r"(?P<input>input)|a(?P<a>\d{1,6})(?:\.h(?P<h>\d{1,9}))?|m(?P<m>\d{1,6})(?:\.n(?P<n>\d{1,9}))?"
)
RECEIVER = re.compile(
    r"(?P<logits>logits)|a(?P<a>\d{1,6})(?:\.h(?P<h>\d{1,9}))?(?:\.(?P<c>[qkv]))?|m(?P<m>\d{1,6})"
)
CHANNELS = {"q": 0, "k": 1, "v": 2}
NETWORK, OUTPUT = 3, 4
INPUT, HEAD, ATTENTION, FEED, NEURON = range(5)
ROWS = ".edges.rows"
"""How the names of tables of edges end."""

FINAL = "final_norm"
"""What the names of the output's tables start with."""

Sender = tuple[int, int, int]
"""Kind, layer, and head or neuron of what is sent."""


@dataclass(frozen=True)
class Edge:
    """A sender and the readers of one later part.

    Attributes:
        sender: kind, layer, and head, neuron or −1.
        layer: the receiver's layer; the number of layers for the output.
        readers: channels and heads that read it.
    """

    sender: Sender
    layer: int
    readers: tuple[tuple[int, int], ...]

    @property
    def stem(self) -> str:
        """What the names of the receiver's tables start with."""
        return FINAL if self.readers[0][0] == OUTPUT else f"blocks.{self.layer}"


def find_edge(architecture: Architecture, name: str) -> Edge | None:
    """Return the edge that a name stands for; None if it is the name of something else.

    Args:
        architecture: what the model looks like.
        name: as in `a9.h6->a10.h2.q`, or with `<q>` as edge attribution patching writes it.

    Raises:
        ModelError: if there is no such edge.
    """
    a, match = architecture, EDGE.fullmatch(name)
    if match is None:
        return None
    sender, receiver = SENDER.fullmatch(match["sender"]), RECEIVER.fullmatch(match["receiver"])
    if sender is None or receiver is None or (match["channel"] and (receiver["a"] is None or receiver["c"])):
        raise ModelError(f"{name!r} is no edge: write one as in 'a9.h6->a10.h2.q', 'm3->m5' or 'a2->logits'")
    if a.norm_place not in ("pre", "none"):
        raise ModelError(
            f"{name!r}: parts of this model do not add up in the stream (norm_place {a.norm_place!r})"
        )
    readers: tuple[tuple[int, int], ...]
    kind, layer, head = INPUT, -1, -1
    if sender["input"] is None:
        kind = ATTENTION if sender["h"] is None else HEAD
        if sender["m"]:
            kind = FEED if sender["n"] is None else NEURON
        layer = int(sender["m"] or sender["a"])
        head = int(sender["h"] or sender["n"] or -1)
    if receiver["logits"]:
        readers, behind = ((OUTPUT, -1),), a.n_layers
    elif receiver["m"]:
        readers, behind = ((NETWORK, -1),), int(receiver["m"])
    else:
        named = receiver["c"] or match["channel"]
        channels = [CHANNELS[named]] if named else [0, 1, 2]
        heads = range(a.n_heads) if receiver["h"] is None else [int(receiver["h"])]
        readers, behind = tuple((c, h) for h in heads for c in channels), int(receiver["a"])
    found = Edge((kind, layer, head), behind, readers)
    _check_ends(a, name, found)
    return found


def _check_ends(a: Architecture, name: str, edge: Edge) -> None:
    """Raise a `ModelError` unless both ends are there, the sender comes first, and the receiver can be split."""
    kind, layer, head = edge.sender
    channel, reader = edge.readers[-1]
    attends, feeds = kind in (HEAD, ATTENTION) or channel < NETWORK, kind >= FEED or channel == NETWORK
    there = (a.has_attention or not attends) and (a.has_network or not feeds)
    last = a.n_layers if channel == OUTPUT else a.n_layers - 1
    own = a.d_ff if kind == NEURON else a.n_heads
    if not there or head >= own or reader >= a.n_heads or layer >= a.n_layers or edge.layer > last:
        neurons = f", neurons 0 … {a.d_ff - 1}" if kind == NEURON else ""
        raise ModelError(
            f"there is no {name!r}: layers are 0 … {a.n_layers - 1}, heads 0 … {a.n_heads - 1}{neurons}"
        )
    inside = kind in (HEAD, ATTENTION) and channel == NETWORK and not a.parallel
    if not (layer < edge.layer or (layer == edge.layer and inside)):
        raise ModelError(f"there is no {name!r}: the sender comes behind the receiver")
    if channel < 2 and (a.qk_norm == "whole" or a.head_positions):
        raise ModelError(f"{name!r}: queries and keys of this model are not made head by head")
    if channel == OUTPUT and a.read_hook is not None:
        raise ModelError(f"{name!r}: the model ends at a hook, in front of the output")


def edges_of(architecture: Architecture) -> list[str]:
    """Return the names of all edges of a model: from the input, heads and networks, to what each reader reads.

    Args:
        architecture: what the model looks like.
    """
    a, found = architecture, []
    heads = range(a.n_heads if a.has_attention else 0)
    senders = ["input"]
    for layer in range(a.n_layers):
        readers = [f"a{layer}.h{head}.{channel}" for head in heads for channel in CHANNELS]
        found += [f"{sender}->{reader}" for sender in senders for reader in readers]
        own = [f"a{layer}.h{head}" for head in heads]
        before = senders if a.parallel else [*senders, *own]
        if a.has_network:
            found += [f"{sender}->m{layer}" for sender in before]
        senders += [*own, *([f"m{layer}"] if a.has_network else [])]
    return [*found, *(f"{sender}->logits" for sender in senders)]


def put_edge(
    weights: dict[str, Tensor], edge: Edge, tokens: tuple[int, ...], values: Float[Tensor, "n d"] | None
) -> None:
    """Keep an edge among weights.

    Args:
        weights: they get it.
        edge: the edge.
        tokens: the receiver's tokens; none for all.
        values: what takes the sender's place, one row for each token or one for all; None for nothing.

    Raises:
        ModelError: if the edge is there already.
    """
    like = weights["blocks.0.q.weight" if "blocks.0.q.weight" in weights else "blocks.0.up.weight"]
    rows = [[*reader, *edge.sender, token] for reader in edge.readers for token in tokens or (EVERY,)]
    put = like.new_zeros(len(tokens) or 1, like.shape[1]) if values is None else values.to(like)
    put = put.expand(len(tokens) or 1, -1).repeat(len(edge.readers), 1)
    table = torch.tensor(rows, dtype=torch.float64, device=like.device)
    names = f"{edge.stem}{ROWS}", f"{edge.stem}.edges.values"
    if names[0] in weights:
        before = {tuple(row) for row in weights[names[0]][:, :5].tolist()}
        if before & {tuple(map(float, row[:5])) for row in rows}:
            raise ModelError(
                "an edge is edited twice: give it once, with all its tokens, as in 'a9.h6->m10@3@-1'"
            )
        table, put = torch.cat((weights[names[0]], table)), torch.cat((weights[names[1]], put))
    order = sorted(range(len(table)), key=table.tolist().__getitem__)
    weights[names[0]], weights[names[1]] = table[order].contiguous(), put[order].contiguous()


def readers_of(
    weights: Mapping[str, Tensor], stem: str
) -> dict[tuple[int, int], list[tuple[Sender, int, Tensor]]]:
    """Return the edges of a receiver by channel and head: senders, tokens and what takes their place.

    Args:
        weights: a model's weights.
        stem: what the names of the receiver's tables start with.
    """
    found: dict[tuple[int, int], list[tuple[Sender, int, Tensor]]] = {}
    rows = weights.get(f"{stem}{ROWS}")
    if rows is not None:
        for (channel, head, *sender, token), value in zip(
            rows.long().tolist(), weights[f"{stem}.edges.values"], strict=True
        ):
            found.setdefault((channel, head), []).append(((sender[0], sender[1], sender[2]), token, value))
    return found


def sending_neurons(weights: Mapping[str, Tensor], layer: int) -> list[int]:
    """Return the neurons of a network that send over edges, in order.

    Args:
        weights: a model's weights.
        layer: the network's layer.
    """
    tables = [table.tolist() for name, table in weights.items() if name.endswith(ROWS)]
    return sorted({int(row[4]) for rows in tables for row in rows if row[2] == NEURON and row[3] == layer})


def check_edges(architecture: Architecture, weights: Mapping[str, Tensor], stem: str) -> None:
    """Raise a `ModelError` unless a receiver's tables name edges that there are.

    Args:
        architecture: what the model looks like.
        weights: a model's weights.
        stem: what the names of the receiver's tables start with.
    """
    names = f"{stem}{ROWS}", f"{stem}.edges.values"
    if missing := [name for name in names if name not in weights]:
        raise ModelError(f"the weights lack {missing[0]!r}")
    rows, a = weights[names[0]], architecture
    whole = bool((rows == rows.round()).all()) and bool((rows.abs() <= EVERY).all())
    if not whole or not len(rows) or len(rows) != len(weights[names[1]]):
        raise ModelError(f"{names[0]} holds rows (channel, head, sender, layer, head, token): these are none")
    for channel, head, kind, layer, other, _ in rows.long().tolist():
        right = 0 <= kind <= NEURON and (channel == OUTPUT) == (stem == FINAL) and 0 <= channel <= OUTPUT
        heads = (head >= 0) == (channel < NETWORK) and (other >= 0) == (kind in (HEAD, NEURON))
        if not right or not heads or (layer >= 0) == (kind == INPUT):
            raise ModelError(f"{names[0]} names an edge that there is not")
        behind = a.n_layers if stem == FINAL else int(stem.split(".")[1])
        _check_ends(a, names[0], Edge((kind, layer, other), behind, ((channel, head),)))


def check_senders(weights: Mapping[str, Tensor]) -> None:
    """Raise a `ModelError` if a head or a neuron sends over an edge and is held at tokens, too: it is not apart then.

    Args:
        weights: a model's weights.
    """
    for name in [name for name in weights if name.endswith(ROWS)]:
        senders = {(int(row[2]), int(row[3])) for row in weights[name].tolist() if row[2] in (HEAD, NEURON)}
        for kind, layer in senders:
            block, (map_, site) = f"blocks.{layer}", ("o", "attn") if kind == HEAD else ("down", "mlp")
            if any(other.startswith((f"{block}.{map_}.held.", f"{block}.{site}_out.")) for other in weights):
                sent = "heads" if kind == HEAD else "neurons"
                raise ModelError(
                    f"edges from {sent} of layer {layer} and parts held there: give one of these"
                )
