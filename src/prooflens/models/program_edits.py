"""The steps of edits: held directions and features (`models.held`), and streams without edges (`models.edges`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.models import edges
from prooflens.models.held import EVERY, KINDS, Held, token_of
from prooflens.models.sites import Add, Affine, Elementwise, Rotary, Shift
from prooflens.models.spread import FREE, STREAM

if TYPE_CHECKING:
    from prooflens.models.program_blocks import Builder

SET = "_set"
"""What the name of a block's stream ends with where something of it is held."""


def hold_at(builder: Builder, hook: str, source: str | None = None) -> str:
    """Append the steps that hold directions and features of a value; return the name of what comes out.

    Args:
        builder: holds the steps so far.
        hook: the value's hook. Without a source it is what the last step makes, and keeps its name.
        source: the name of the value, where that is another one: the stream in front of a block.
    """
    block, _, site = hook.rpartition(".hook_")
    every = {kind: Held.of(builder.weights, f"{block}.{site}.{kind}") for kind in KINDS}
    kept = {kind: held for kind, held in every.items() if held is not None}
    if not kept:
        return hook if source is None else source
    out = hook if source is None else f"{hook}{SET}"
    if source is None:
        source = f"{hook}_unset"
        builder.steps[-1] = replace(builder.steps[-1], out=source)
    for number, (kind, held) in enumerate(kept.items()):
        last = number == len(kept) - 1
        source = _hold(builder, kind, held, source, out if last else f"{out}_{kind}", f"{block}.{site}")
    return source


def _hold(builder: Builder, kind: str, held: Held, source: str, out: str, value: str) -> str:
    """Append the steps that hold one kind of things."""
    steps, (k, d) = builder.steps, held.read.shape
    chosen, values = held.places(builder.n_tokens, builder.n_real)
    stem = f"{value}.{kind}"
    eye = torch.eye(k, dtype=held.read.dtype, device=held.read.device)
    if kind == "directions":
        steps.append(Affine(f"{stem}.parts", (source,), held.read, held.bias, 1, (1, k)))
    else:
        steps.append(Affine(f"{stem}.pre", (source,), held.read, held.bias, 1, (k,)))
        steps.append(Elementwise(f"{stem}.acts", (f"{stem}.pre",), "relu"))
        acts = f"{stem}.acts" if held.jumps is None else _jumping(builder, held, held.jumps, source, stem)
        steps.append(Affine(f"{stem}.parts", (acts,), eye, None, 1, (1, k)))
    if kind != "decoded":
        _chosen(builder, f"{stem}.parts", f"{stem}.less", -chosen)
        steps.append(Shift(f"{stem}.moved", (f"{stem}.less",), values[:, None]))
        valued = add_values(builder, held, f"{stem}.moved")
        steps.append(Affine(f"{stem}.added", (valued,), held.write, None, 2, (d,)))
        steps.append(Add(out, (source, f"{stem}.added")))
        return out
    tokens = chosen.amax(1, keepdim=True)
    _chosen(builder, f"{stem}.parts", f"{stem}.kept", tokens - chosen)
    steps.append(Shift(f"{stem}.moved", (f"{stem}.kept",), values[:, None]))
    steps.append(Affine(f"{stem}.decoded", (f"{stem}.moved",), held.write, None, 2, (1, d)))
    offset = builder.weights[f"{stem}.offset"] * tokens
    steps.append(Shift(f"{stem}.placed", (f"{stem}.decoded",), offset[:, None]))
    same = torch.eye(d, dtype=held.read.dtype, device=held.read.device)
    steps.append(Affine(f"{stem}.new", (f"{stem}.placed",), same, None, 2, (d,)))
    steps.append(Affine(f"{stem}.value", (source,), same, None, 1, (1, d)))
    _chosen(builder, f"{stem}.value", f"{stem}.others", (1.0 - tokens).expand(-1, d))
    steps.append(Affine(f"{stem}.old", (f"{stem}.others",), same, None, 2, (d,)))
    steps.append(Add(out, (f"{stem}.old", f"{stem}.new")))
    return out


def add_values(builder: Builder, held: Held, source: str, before: int = 0) -> str:
    """Append what free coordinates add to values that are held; return the name of the sum.

    Tokens with the same generators share a map of the free coordinates, which is 0 at all others.

    Args:
        builder: holds the steps so far.
        held: the tables of what is held.
        source: the values that are held, in the middle of their sets.
        before: how many coordinates stand in front of them.
    """
    spread = held.spreads(builder.n_tokens, builder.n_real)
    if spread is None:
        return source
    several = [token for token in range(builder.n_tokens) if bool(spread[token].any())]
    number = 0
    while several:
        table = spread[several[0]]
        own = [token for token in several if torch.equal(spread[token], table)]
        several = [token for token in several if token not in own]
        out = f"{source}.values{number}"
        W = torch.cat((table.new_zeros(before, table.shape[1]), table))
        builder.steps.append(Affine(f"{out}.every", (FREE,), W, None, 1, (1, len(W))))
        factors = table.new_zeros(builder.n_tokens, len(W))
        factors[own] = 1.0
        _chosen(builder, f"{out}.every", f"{out}.own", factors)
        builder.steps.append(Add(out, (source, f"{out}.own")))
        source, number = out, number + 1
    return source


def _jumping(builder: Builder, held: Held, jumps: Float[Tensor, " k"], source: str, stem: str) -> str:
    """Append what the features of a value jump by; return the name of the features.

    Two networks side by side read the value, max(0, y) and θ·jump(y): each is an affine map, a function and another
    map, as engines know networks.
    """
    steps, k = builder.steps, len(jumps)
    eye = torch.eye(k, dtype=jumps.dtype, device=jumps.device)
    steps.append(Affine(f"{stem}.ramps", (f"{stem}.acts",), eye, None, 1, (k,)))
    steps.append(Affine(f"{stem}.above", (source,), held.read, held.bias, 1, (k,)))
    steps.append(Elementwise(f"{stem}.active", (f"{stem}.above",), "jump"))
    steps.append(Affine(f"{stem}.jumps", (f"{stem}.active",), torch.diag(jumps), None, 1, (k,)))
    steps.append(Add(f"{stem}.both", (f"{stem}.ramps", f"{stem}.jumps")))
    return f"{stem}.both"


def _chosen(builder: Builder, source: str, out: str, factors: Float[Tensor, "S n"]) -> None:
    """A factor for every token and coordinate."""
    builder.steps.append(Rotary(out, (source,), factors.contiguous(), torch.zeros_like(factors)))


Rows = list[tuple[edges.Sender, int, Tensor]]
"""Senders, tokens and what takes their place."""


def without_edges(builder: Builder, rows: Rows, stream: str, out: str) -> str:
    """Append the steps of the stream that a receiver reads; return its name.

    Args:
        builder: holds the steps so far.
        rows: the receiver's edges.
        stream: the stream that all others read.
        out: the name of what the receiver reads.
    """
    for number, sender in enumerate(dict.fromkeys(sender for sender, *_ in rows)):
        own = [(token, value) for other, token, value in rows if other == sender]
        sent = _sent(builder, sender, f"{out}.{number}")
        last = f"{out}.{number}.stream"
        builder.steps.append(Add(last, (stream, _replaced(builder, sent, own, f"{out}.{number}"))))
        stream = last
    return stream


def _sent(builder: Builder, sender: edges.Sender, out: str) -> tuple[str, Tensor]:
    """A value and the map by which the sender writes it into the stream."""
    (kind, layer, head), a = sender, builder.architecture
    like = builder.weights["blocks.0.q.weight" if a.has_attention else "blocks.0.up.weight"]
    same = torch.eye(a.d_model, dtype=like.dtype, device=like.device)
    if kind == edges.INPUT:
        return STREAM if a.free else "blocks.0.hook_resid_pre", same
    if kind in (edges.ATTENTION, edges.FEED):
        return f"blocks.{layer}.hook_{'attn' if kind == edges.ATTENTION else 'mlp'}_out", same
    if kind == edges.NEURON:
        name = f"blocks.{layer}.mlp.sent_{head}"
        return name, builder.weights[f"blocks.{layer}.down.weight"][:, head : head + 1]
    weight, c = builder.weights[f"blocks.{layer}.o.weight"], a.head_dim
    some, name = slice(head * c, (head + 1) * c), f"blocks.{layer}.attn.sent_{head}"
    if all(step.out != name for step in builder.steps):
        chosen = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)[some]
        builder.steps.append(Affine(name, (f"blocks.{layer}.attn.hook_z",), chosen, None, 2, (c,)))
    return name, weight[:, some]


def send_neurons(builder: Builder, name: str, source: str, out: str) -> None:
    """Append what a network writes, where neurons of it send over edges: one map makes both, and is then split.

    Args:
        builder: holds the steps so far.
        name: the map that writes, as in `blocks.3.down`.
        source: the neurons' values.
        out: the name of what is written.
    """
    weight, bias = builder.weights[f"{name}.weight"], builder.weights.get(f"{name}.bias")
    neurons, d = edges.sending_neurons(builder.weights, int(name.split(".")[1])), len(weight)
    eye = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)[neurons]
    split = torch.eye(d + len(neurons), dtype=weight.dtype, device=weight.device)
    rest = None if bias is None else torch.cat((bias, bias.new_zeros(len(neurons))))
    both = f"{out}_and_sent"
    builder.steps.append(Affine(both, (source,), torch.cat((weight, eye)), rest, 1, (len(split),)))
    for place, neuron in enumerate(neurons, d):
        sent = source.replace("hook_post", f"sent_{neuron}")
        builder.steps.append(Affine(sent, (both,), split[place : place + 1], None, 1, (1,)))
    builder.steps.append(Affine(out, (both,), split[:d], None, 1, (d,)))


def _replaced(builder: Builder, sent: tuple[str, Tensor], own: list[tuple[int, Tensor]], out: str) -> str:
    """What is added to the stream: minus what is sent, plus what takes its place."""
    (source, weight), d = sent, len(sent[1])
    if own[0][0] == EVERY:
        builder.steps.append(Affine(f"{out}.less", (source,), -weight, own[0][1], 1, (d,)))
        return f"{out}.less"
    chosen = weight.new_zeros(builder.n_tokens, d)
    values = torch.zeros_like(chosen)
    for token, value in own:
        place = token_of(token, builder.n_real)
        if place is not None:
            chosen[place], values[place] = -1.0, value
    builder.steps.append(Affine(f"{out}.sent", (source,), weight, None, 1, (1, d)))
    _chosen(builder, f"{out}.sent", f"{out}.chosen", chosen)
    builder.steps.append(Shift(f"{out}.moved", (f"{out}.chosen",), values[:, None]))
    same = torch.eye(d, dtype=weight.dtype, device=weight.device)
    builder.steps.append(Affine(f"{out}.less", (f"{out}.moved",), same, None, 2, (d,)))
    return f"{out}.less"
