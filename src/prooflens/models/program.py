"""Build the program of steps that every engine walks, from an architecture and its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.sites import (
    Add,
    Affine,
    AnyStep,
    Elementwise,
    Mix,
    Norm,
    Pool,
    Product,
    Rotary,
    Scores,
    Softmax,
    relative_bias,
    rotary_tables,
)

OUTPUT = "output"
"""The name of a model's last value: class logits, next-token logits, or the pooled representation."""

INPUT = "blocks.0.hook_resid_pre"
"""The name of the post-embedding input."""


@dataclass(frozen=True, eq=False)
class Program:
    """A straight line of steps from `INPUT` to the values that were asked for.

    Example:
        >>> import prooflens as pl
        >>> print(pl.load("toy").program(4, "blocks.0.attn.hook_q"))
        blocks.0.attn.hook_q = Affine(blocks.0.hook_resid_pre)
    """

    steps: tuple[AnyStep, ...]
    n_tokens: int
    mask: Bool[Tensor, "S S"]

    def slice(self, wanted: Sequence[str]) -> Program:
        """Return only the steps that the wanted values depend on, in order.

        Args:
            wanted: names of values.

        Raises:
            ModelError: if the model has no value of that name.
        """
        known = {INPUT} | {step.out for step in self.steps}
        if missing := [name for name in wanted if name not in known]:
            raise ModelError(f"the model has no value named {missing[0]!r}; `run_with_cache` lists them all")
        needed = set(wanted)
        kept: list[AnyStep] = []
        for step in reversed(self.steps):
            if step.out in needed:
                kept.append(step)
                needed.update(step.inputs)
        return Program(tuple(reversed(kept)), self.n_tokens, self.mask)

    def run(self, x: Tensor, keep: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Evaluate every step at x.

        Args:
            x: the post-embedding input, shape [..., S, d].
            keep: names of values to keep; the others are dropped after their last use. None keeps all.

        Returns:
            The values by name.
        """
        last_use = {name: i for i, step in enumerate(self.steps) for name in step.inputs}
        kept = None if keep is None else set(keep)
        values = {INPUT: x}
        for i, step in enumerate(self.steps):
            values[step.out] = step(*(values[name] for name in step.inputs))
            if kept is not None:
                for name in step.inputs:
                    if last_use[name] == i and name not in kept:
                        values.pop(name, None)
        return values

    def __str__(self) -> str:
        return "\n".join(
            f"{step.out} = {type(step).__name__}({', '.join(step.inputs)})" for step in self.steps
        )


def build_program(
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    n_tokens: int,
    padding: Bool[Tensor, " S"] | None = None,
) -> Program:
    """Return all the steps of a model, from the post-embedding input to the output.

    Args:
        architecture: what the model looks like.
        weights: its tensors by canonical name.
        n_tokens: S.
        padding: True at real tokens; None if all are real.
    """
    like = weights["blocks.0.q.weight"]
    mask = attention_mask(architecture, n_tokens, padding, like.device)
    steps: list[AnyStep] = []
    stream = INPUT
    for layer in range(architecture.n_layers):
        stream = _block(steps, architecture, weights, layer, stream, mask)
    if architecture.norm_place == "pre":
        stream = _norm(steps, architecture, weights, "final_norm", stream, "ln_final.hook_normalized")
    _readout(steps, architecture, weights, stream, n_tokens, padding)
    return Program(tuple(steps), n_tokens, mask)


def _block(
    steps: list[AnyStep],
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    layer: int,
    stream: str,
    mask: Tensor,
) -> str:
    """Append one block; return the name of the residual stream after it."""
    block = f"blocks.{layer}"
    ln1, ln2 = f"{block}.ln1.hook_normalized", f"{block}.ln2.hook_normalized"
    if architecture.norm_place == "pre":
        inner = _norm(steps, architecture, weights, f"{block}.norm1", stream, ln1)
        attended = _attention(steps, architecture, weights, block, inner, mask)
        steps.append(Add(f"{block}.hook_resid_mid", (stream, attended)))
        inner = _norm(steps, architecture, weights, f"{block}.norm2", f"{block}.hook_resid_mid", ln2)
        fed = _feed_forward(steps, architecture, weights, block, inner)
        steps.append(Add(f"{block}.hook_resid_post", (f"{block}.hook_resid_mid", fed)))
        return f"{block}.hook_resid_post"
    attended = _attention(steps, architecture, weights, block, stream, mask)
    steps.append(Add(f"{block}.hook_resid_mid", (stream, attended)))
    middle = _norm(steps, architecture, weights, f"{block}.norm1", f"{block}.hook_resid_mid", ln1)
    fed = _feed_forward(steps, architecture, weights, block, middle)
    steps.append(Add(f"{block}.hook_resid_post", (middle, fed)))
    return _norm(
        steps,
        architecture,
        weights,
        f"{block}.norm2",
        f"{block}.hook_resid_post",
        f"{block}.hook_normalized_resid_post",
    )


def _attention(
    steps: list[AnyStep],
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    block: str,
    source: str,
    mask: Tensor,
) -> str:
    attn, d_head = f"{block}.attn", architecture.head_dim
    n_tokens = mask.shape[0]
    for name, heads in (
        ("q", architecture.n_heads),
        ("k", architecture.kv_heads),
        ("v", architecture.kv_heads),
    ):
        weight, bias = weights[f"{block}.{name}.weight"], weights.get(f"{block}.{name}.bias")
        steps.append(Affine(f"{attn}.hook_{name}", (source,), weight, bias, 1, (heads, d_head)))
    q, k = f"{attn}.hook_q", f"{attn}.hook_k"
    if architecture.rope_theta is not None:
        cos, sin = rotary_tables(n_tokens, d_head, architecture.rope_theta, weights[f"{block}.q.weight"])
        steps.append(Rotary(f"{attn}.hook_rot_q", (q,), cos, sin))
        steps.append(Rotary(f"{attn}.hook_rot_k", (k,), cos, sin))
        q, k = f"{attn}.hook_rot_q", f"{attn}.hook_rot_k"
    bias = None
    if architecture.relative_buckets is not None:
        bias = relative_bias(weights["relative_bias"], n_tokens, architecture.relative_max_distance)
    steps.append(Scores(f"{attn}.hook_attn_scores", (q, k), d_head**-0.5, bias, mask))
    steps.append(Softmax(f"{attn}.hook_pattern", (f"{attn}.hook_attn_scores",), mask))
    steps.append(Mix(f"{attn}.hook_z", (f"{attn}.hook_pattern", f"{attn}.hook_v")))
    weight, bias = weights[f"{block}.o.weight"], weights.get(f"{block}.o.bias")
    steps.append(
        Affine(f"{block}.hook_attn_out", (f"{attn}.hook_z",), weight, bias, 2, (architecture.d_model,))
    )
    return f"{block}.hook_attn_out"


def _feed_forward(
    steps: list[AnyStep], architecture: Architecture, weights: Mapping[str, Tensor], block: str, source: str
) -> str:
    mlp = f"{block}.mlp"

    def affine(name: str, src: str, out: str) -> str:
        weight, bias = weights[f"{block}.{name}.weight"], weights.get(f"{block}.{name}.bias")
        steps.append(Affine(out, (src,), weight, bias, 1, (weight.shape[0],)))
        return out

    if architecture.gated:
        pre = affine("gate", source, f"{mlp}.hook_pre")
        linear = affine("up", source, f"{mlp}.hook_pre_linear")
        steps.append(Elementwise(f"{mlp}.hook_gate", (pre,), architecture.activation))
        steps.append(Product(f"{mlp}.hook_post", (f"{mlp}.hook_gate", linear)))
    else:
        pre = affine("up", source, f"{mlp}.hook_pre")
        steps.append(Elementwise(f"{mlp}.hook_post", (pre,), architecture.activation))
    return affine("down", f"{mlp}.hook_post", f"{block}.hook_mlp_out")


def _norm(
    steps: list[AnyStep],
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    name: str,
    source: str,
    out: str,
) -> str:
    weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
    steps.append(Norm(out, (source,), weight, bias, architecture.norm_eps, architecture.norm_kind == "layer"))
    return out


def _readout(
    steps: list[AnyStep],
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    stream: str,
    n_tokens: int,
    padding: Tensor | None,
) -> None:
    if architecture.pool != "none":
        real = torch.ones(n_tokens, dtype=torch.float64) if padding is None else padding.cpu().double()
        chosen = torch.zeros(n_tokens, dtype=torch.float64)
        if architecture.pool == "mean":
            chosen = real / real.sum()
        else:
            chosen[0 if architecture.pool == "first" else int(real.nonzero().max())] = 1.0
        steps.append(Pool("hook_pooled", (stream,), chosen.to(weights["blocks.0.q.weight"])))
        stream = "hook_pooled"
    if architecture.pooler:
        weight, bias = weights["pooler.weight"], weights.get("pooler.bias")
        steps.append(Affine("pooler.hook_pre", (stream,), weight, bias, 1, (weight.shape[0],)))
        steps.append(Elementwise("pooler.hook_post", ("pooler.hook_pre",), "tanh"))
        stream = "pooler.hook_post"
    if architecture.d_out is not None:
        tied = "head.weight" not in weights
        weight = weights["embed.tokens" if tied else "head.weight"]
        steps.append(Affine("logits", (stream,), weight, weights.get("head.bias"), 1, (architecture.d_out,)))
    steps[-1] = replace(steps[-1], out=OUTPUT)


def attention_mask(
    architecture: Architecture,
    n_tokens: int,
    padding: Bool[Tensor, " S"] | None,
    device: torch.device | str = "cpu",
) -> Bool[Tensor, "S S"]:
    """Combine causal and padding masks: [i, j] is True if query i may attend to key j.

    Args:
        architecture: says whether the model is causal.
        n_tokens: S.
        padding: True at real tokens; None if all are real.
        device: where to make the mask.

    Raises:
        ModelError: if the padding has another length, or some token can attend to no key.
    """
    mask = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=device)
    if architecture.causal:
        mask = mask.tril()
    if padding is not None:
        if padding.shape != (n_tokens,):
            raise ModelError(f"the padding mask must have shape [{n_tokens}], got {list(padding.shape)}")
        mask = mask & padding.to(device)[None, :]
        if not bool(mask.any(-1).all()):
            raise ModelError("some tokens can attend to no key: a causal model must be padded on the right")
    return mask


def scores_name(layer: int) -> str:
    """Return TransformerLens' name of a layer's attention scores."""
    return f"blocks.{layer}.attn.hook_attn_scores"


def pattern_name(layer: int) -> str:
    """Return TransformerLens' name of a layer's attention weights."""
    return f"blocks.{layer}.attn.hook_pattern"
