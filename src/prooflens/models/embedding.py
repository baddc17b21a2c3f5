"""From token ids to the post-embedding input: tokens, positions, types, a norm, a projection, as a model has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import ModelError, PromptError
from prooflens.models.architecture import Architecture


def checked_ids(name: str, architecture: Architecture, ids: Tensor) -> Int[Tensor, "... S"]:
    """Return token ids as whole numbers, if the model can embed them.

    Args:
        name: what messages call the model.
        architecture: its vocabulary and the length that it reads.
        ids: token ids, shape [..., S].

    Raises:
        ModelError: if the model has no vocabulary.
        PromptError: if there are no ids, too many, or ids that the vocabulary does not have.
    """
    if ids.is_floating_point() and ids.numel():
        raise PromptError("token ids are whole numbers; an input [S, d] is embedded already")
    ids = ids.long()
    n_tokens, context = ids.shape[-1], architecture.context
    if architecture.d_vocab is None:
        raise ModelError(f"{name} has no vocabulary: give an input of shape [S, {architecture.d_model}]")
    if n_tokens == 0:
        raise PromptError("the text has no tokens: give at least one")
    if context is not None and n_tokens > context:
        raise PromptError(f"the text has {n_tokens} tokens, {name} reads at most {context}: shorten it")
    if int(ids.min()) < 0 or int(ids.max()) >= architecture.d_vocab:
        raise PromptError(f"token ids must lie in 0 … {architecture.d_vocab - 1}")
    return ids


def embedded(
    architecture: Architecture, weights: Mapping[str, Tensor], ids: Int[Tensor, "... S"]
) -> Float[Tensor, "... S d"]:
    """Return the post-embedding input of token ids.

    Args:
        architecture: the scale of embeddings, where positions start, and the ε of the norm.
        weights: by canonical name.
        ids: token ids that `checked_ids` returned, on the device of the weights.
    """
    x = weights["embed.tokens"][ids]
    if architecture.embed_scale is not None:
        x = x * architecture.embed_scale
    if "embed.positions" in weights:
        x = x + weights["embed.positions"][torch.arange(ids.shape[-1]) + architecture.position_offset]
    if "embed.types" in weights:
        x = x + weights["embed.types"][0]
    if "embed.norm.weight" in weights:
        x = torch.nn.functional.layer_norm(
            x,
            x.shape[-1:],
            weights["embed.norm.weight"],
            weights.get("embed.norm.bias"),
            architecture.norm_eps,
        )
    if "embed.project.weight" in weights:
        x = torch.nn.functional.linear(x, weights["embed.project.weight"], weights.get("embed.project.bias"))
    return x
