"""The token of the vocabulary that lies nearest to a point, where radii are measured: after embedding, in ℓ∞."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.models.transformer import Transformer

CHUNK = 2048
"""How many tokens of the vocabulary are embedded at a time."""


class NearToken(NamedTuple):
    """A token of the vocabulary, and how far it is."""

    distance: float
    token: str


def nearest_token(
    model: Transformer, ids: tuple[int, ...], position: int, x: Float[Tensor, " d"], other: bool = False
) -> NearToken:
    """Return the token that is nearest to a point when it is embedded at a position of a text.

    Args:
        model: a model with a vocabulary and a tokenizer.
        ids: the text's tokens.
        position: where the token is embedded.
        x: the point, shape [d].
        other: look for another token than the text's own.
    """
    assert model.tokenizer is not None
    own = torch.tensor(ids[: position + 1], device=x.device)
    best, which = torch.inf, -1
    for chunk in torch.arange(model.weights["embed.tokens"].shape[0], device=x.device).split(CHUNK):
        around = own.repeat(len(chunk), 1)
        around[:, position] = chunk
        gap = (model.embed(around)[:, position] - x).abs().amax(-1)
        if other:
            gap[chunk == own[position]] = torch.inf
        least, place = gap.min(0)
        if float(least) < best:
            best, which = float(least), int(chunk[place])
    return NearToken(best, model.tokenizer.token(which))
