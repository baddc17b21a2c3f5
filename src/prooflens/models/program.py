"""Build the program of steps that every engine walks, from an architecture and its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.edges import FINAL, readers_of
from prooflens.models.edges import OUTPUT as OUT
from prooflens.models.knockouts import knockouts_of, mask_by_head
from prooflens.models.program_blocks import Builder
from prooflens.models.program_edits import without_edges
from prooflens.models.reads import append_read
from prooflens.models.sites import Affine, AnyStep, Elementwise, Pool, Softcap

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
    blocks: int | None = None,
) -> Program:
    """All the steps of a model on `n_tokens` tokens, from the post-embedding input to the output.

    Args:
        architecture: what the model looks like.
        weights: its canonical weights.
        n_tokens: how many tokens.
        padding: True at real tokens; None if all are.
        blocks: stop behind so many blocks, without an output; None for the whole model.
    """
    like = some_weight(weights)
    layers = range(architecture.n_layers if blocks is None else blocks)
    masks = [attention_mask(architecture, n_tokens, padding, like.device, layer) for layer in layers]
    masks = [
        mask_by_head(mask, knockouts_of(weights, layer), architecture.n_heads)
        for layer, mask in enumerate(masks)
    ]
    n_real = n_tokens if padding is None else int(padding.nonzero().max()) + 1
    builder = Builder(architecture, weights, n_tokens, masks, n_real)
    streams = [builder.start(INPUT)]
    for layer in layers:
        streams.append(builder.block(layer, streams[-1]))
    if blocks is None:
        _finish(builder, streams[-1], padding)
    return Program(
        tuple(builder.steps), n_tokens, attention_mask(architecture, n_tokens, padding, like.device)
    )


def blocks_to(wanted: Iterable[str], n_layers: int) -> int | None:
    """Return how many blocks make all wanted values; None where the last block, or what is behind it, is needed.

    Args:
        wanted: names of values.
        n_layers: how many blocks the model has.
    """
    deepest = 0
    for name in wanted:
        block, _, rest = name.removeprefix("blocks.").partition(".")
        if not (rest and name.startswith("blocks.") and block.isdecimal()):
            return None
        deepest = max(deepest, int(block))
    return deepest + 1 if deepest + 1 < n_layers else None


def _finish(builder: Builder, stream: str, padding: Tensor | None) -> None:
    """What comes behind the blocks; the last step makes the output."""
    architecture = builder.architecture
    if architecture.read_hook is not None:
        append_read(builder, builder.n_tokens)
    else:
        if (OUT, -1) in (cut := readers_of(builder.weights, FINAL)):
            stream = without_edges(builder, cut[OUT, -1], stream, "final_norm.edges")
        if architecture.has_final_norm:
            stream = builder.norm("final_norm", stream, "ln_final.hook_normalized")
        _readout(builder, stream, builder.n_tokens, padding)
    builder.steps[-1] = replace(builder.steps[-1], out=OUTPUT)


def some_weight(weights: Mapping[str, Tensor]) -> Tensor:
    """Return a matrix of the first block: its precision and device are the model's."""
    return weights["blocks.0.q.weight" if "blocks.0.q.weight" in weights else "blocks.0.up.weight"]


def _readout(builder: Builder, stream: str, n_tokens: int, padding: Tensor | None) -> None:
    """Pooling, pooler and head."""
    architecture, weights, steps = builder.architecture, builder.weights, builder.steps
    if architecture.pool != "none":
        real = torch.ones(n_tokens, dtype=torch.float64) if padding is None else padding.cpu().double()
        chosen = torch.zeros(n_tokens, dtype=torch.float64)
        if architecture.pool == "mean":
            chosen = real / real.sum()
        else:
            chosen[0 if architecture.pool == "first" else int(real.nonzero().max())] = 1.0
        steps.append(Pool("hook_pooled", (stream,), chosen.to(some_weight(weights))))
        stream = "hook_pooled"
    if architecture.pooler:
        stream = builder.affine("pooler", stream, "pooler.hook_pre")
        steps.append(Elementwise("pooler.hook_post", (stream,), architecture.pooler_activation))
        stream = "pooler.hook_post"
    if architecture.d_out is not None:
        tied = "head.weight" not in weights
        weight = weights["embed.tokens" if tied else "head.weight"]
        steps.append(Affine("logits", (stream,), weight, weights.get("head.bias"), 1, (architecture.d_out,)))
        if architecture.logit_cap is not None:
            steps.append(Softcap("capped", ("logits",), architecture.logit_cap))


def attention_mask(
    architecture: Architecture,
    n_tokens: int,
    padding: Bool[Tensor, " S"] | None,
    device: torch.device | str = "cpu",
    layer: int | None = None,
) -> Bool[Tensor, "S S"]:
    """Causal, local and padding masks as one: [i, j] is True where query i may attend to key j.

    Args:
        architecture: what the model looks like.
        n_tokens: how many tokens.
        padding: True at real tokens; None if all are.
        device: where the mask goes.
        layer: the layer whose window counts; None for the mask of a layer without one.
    """
    mask = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=device)
    if architecture.causal:
        mask = mask.tril()
    if layer is not None and architecture.is_local(layer):
        assert architecture.window is not None
        mask = mask.triu(-architecture.window).tril(architecture.window)
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
