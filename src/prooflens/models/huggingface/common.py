"""What the adapters share: names of activations, renaming of tensors, heads that predict tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Activation, Architecture

Config = Mapping[str, Any]
State = Mapping[str, Tensor]
Converted = tuple[Architecture, dict[str, Tensor]]
"""An architecture and its canonical weights."""

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def activation_of(name: object) -> Activation:
    """Return our name of an activation, or say which ones there are."""
    if str(name) not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported (supported: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[str(name)]


def refuse(config: Config, **fields: object) -> None:
    """Refuse a configuration by naming the field that is not supported.

    Args:
        config: the configuration.
        fields: names of fields, each with the value that is supported.
    """
    for name, allowed in fields.items():
        value = config.get(name, allowed)
        if value != allowed and not (value is None and not allowed):
            raise ModelError(f"{name} = {value!r} is not supported (supported: {allowed!r})")


def strip(state: State, prefix: str) -> dict[str, Tensor]:
    """The state without the prefix that a model with a head puts before its trunk."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def rename(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Pick `source.{weight,bias}` pairs under canonical names; a missing weight is an error, a bias may lack."""
    weights: dict[str, Tensor] = {}
    for canonical, source in names.items():
        weights[f"{canonical}.weight"] = state[f"{source}.weight"]
        if f"{source}.bias" in state:
            weights[f"{canonical}.bias"] = state[f"{source}.bias"]
    return weights


def rename_blocks(state: State, layers: int, source: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The parts of every block under canonical names.

    Args:
        state: the state.
        layers: how many blocks there are.
        source: where blocks are in the state, as in `"h.{}"`.
        names: our name of each part, and theirs.
    """
    every = {
        f"blocks.{layer}.{ours}": f"{source.format(layer)}.{theirs}"
        for layer in range(layers)
        for ours, theirs in names.items()
    }
    return rename(state, every)


def split_rows(weights: dict[str, Tensor], joint: str, parts: Mapping[str, Tensor | slice]) -> None:
    """Cut a joint projection into parts, each given by its rows; the joint one is removed.

    Args:
        weights: canonical weights, changed in place.
        joint: the name of the joint projection.
        parts: the name of each part, and its rows.
    """
    for kind in ("weight", "bias"):
        whole = weights.pop(f"{joint}.{kind}", None)
        if whole is not None:
            for name, rows in parts.items():
                weights[f"{name}.{kind}"] = whole[rows]


def per_head_rows(heads: int, d_head: int) -> dict[str, Tensor]:
    """Rows of queries, keys and values in a joint projection that has them head by head (GPT-NeoX, BLOOM)."""
    rows = torch.arange(3 * heads * d_head).reshape(heads, 3, d_head)
    return {name: rows[:, i].flatten() for i, name in enumerate("qkv")}


def predicts_tokens(state: State, trunk: str) -> bool:
    """Whether a decoder's output is over the vocabulary; a trunk alone has no prefix, and other heads are refused."""
    for name in state:
        if name.startswith(("score.", "classifier.", "qa_outputs.")):
            raise ModelError(
                f"the head {name!r} of a decoder is not supported: load the language model, or its trunk alone"
            )
    return "lm_head.weight" in state or any(name.startswith(trunk) for name in state)


def add_token_head(weights: dict[str, Tensor], state: State, tied: bool) -> int:
    """Add the unembedding where it is not the embedding; a module may have been given another after it was tied.

    Args:
        weights: canonical weights with `embed.tokens`, changed in place.
        state: the state, with `lm_head`.
        tied: whether the configuration says that both are one.

    Returns:
        The size of the vocabulary.
    """
    embedding, own = weights["embed.tokens"], state.get("lm_head.weight")
    if not tied or (own is not None and not torch.equal(own, embedding)):
        weights["head.weight"] = state["lm_head.weight"]
    bias = state.get("lm_head.bias")
    if bias is not None and bool((bias != 0).any()):  # TransformerLens' bridge adds one of zeros
        weights["head.bias"] = bias
    return len(embedding)
