"""The steps of edits: directions and features of a value that are held at some tokens (`models.held`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.models.held import KINDS, Held
from prooflens.models.sites import Add, Affine, Elementwise, Rotary, Shift

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
        steps.append(Affine(f"{stem}.parts", (f"{stem}.acts",), eye, None, 1, (1, k)))
    if kind != "decoded":
        _chosen(builder, f"{stem}.parts", f"{stem}.less", -chosen)
        steps.append(Shift(f"{stem}.moved", (f"{stem}.less",), values[:, None]))
        steps.append(Affine(f"{stem}.added", (f"{stem}.moved",), held.write, None, 2, (d,)))
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


def _chosen(builder: Builder, source: str, out: str, factors: Float[Tensor, "S n"]) -> None:
    """A factor for every token and coordinate."""
    builder.steps.append(Rotary(out, (source,), factors.contiguous(), torch.zeros_like(factors)))
