"""How long an ε is, measured by tokens: how far the nearest other token is, and how long a token is.

Radii are ℓ∞ distances after embedding, and so are the distances here. A token's embedding depends on the token and its
position alone, so one pass over the vocabulary serves every position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.models.prompt import Prompt
from prooflens.models.transformer import Transformer

CHUNK = 2**22
"""How many numbers of embedded tokens are held at a time."""

MOST_NUMBERS = 5e8
"""Up to this many differences (vocabulary × positions × width) are computed unasked: a second or two."""


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
    return nearest_tokens(model, ids, [position], x[None], other)[0]


def nearest_tokens(
    model: Transformer,
    ids: tuple[int, ...],
    positions: Sequence[int],
    x: Float[Tensor, "P d"],
    other: bool = False,
) -> list[NearToken]:
    """Return the token that is nearest to each of several points, at several positions of a text.

    Args:
        model: a model with a vocabulary and a tokenizer.
        ids: the text's tokens.
        positions: where the tokens are embedded.
        x: a point for each position.
        other: look for other tokens than the text's own.
    """
    assert model.tokenizer is not None
    places = torch.tensor(positions, device=x.device)
    own = torch.tensor([ids[p] for p in positions], device=x.device)
    best = torch.full((len(positions),), torch.inf, dtype=x.dtype, device=x.device)
    which = torch.full_like(own, -1)
    everywhere = "embed.positions" not in model.weights  # a token's embedding is the same at all positions
    columns = 1 if everywhere else max(positions) + 1
    size = max(1, CHUNK // (max(columns, len(positions)) * x.shape[-1]))
    for chunk in torch.arange(model.weights["embed.tokens"].shape[0], device=x.device).split(size):
        embedded = model.embed(chunk[:, None].expand(-1, columns))
        gap = ((embedded if everywhere else embedded[:, places]) - x).abs().amax(-1)
        if other:
            gap[chunk[:, None] == own] = torch.inf
        least, row = gap.min(0)
        nearer = least < best
        best, which = torch.where(nearer, least, best), torch.where(nearer, chunk[row], which)
    return [
        NearToken(distance, model.tokenizer.token(token))
        for distance, token in zip(best.tolist(), which.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Yardstick:
    """Lengths by which an ε is measured, at every position of a prompt.

    Attributes:
        tokens: the texts of the prompt's tokens.
        lengths: of each token, the ε at which a move by ε in every coordinate is as long (ℓ2) as the token itself.
        nearest: of each token, the nearest other token of the vocabulary; None where that was not looked for.
    """

    tokens: tuple[str, ...]
    lengths: tuple[float, ...]
    nearest: tuple[NearToken, ...] | None = None

    def shares(self, eps: float, moving: Sequence[int] | None = None) -> tuple[float | None, float | None]:
        """Return ε as a share of the distance to the nearest other token, and of a token's length.

        Both are of the moving token where the share is the largest. None where it is not known, or a token is 0.

        Args:
            eps: the radius.
            moving: the tokens that move; None for all.
        """
        places = range(len(self.tokens)) if moving is None else moving
        length = min((self.lengths[t] for t in places), default=0.0)
        near = None if self.nearest is None else min((self.nearest[t].distance for t in places), default=0.0)
        return (eps / near if near else None), (eps / length if length else None)

    def words(self, eps: float, moving: Sequence[int] | None = None) -> str:
        """Say what an ε is worth, in one line.

        Args:
            eps: the radius.
            moving: the tokens that move; None for all.
        """
        near, length = self.shares(eps, moving)
        parts = []
        if near is not None and self.nearest is not None:
            places = range(len(self.tokens)) if moving is None else moving
            t = min(places, key=lambda t: self.nearest[t].distance)  # type: ignore[index]  # it is not None here
            parts.append(
                f"{percent(near)} of the distance to the nearest other token "
                f"(from “{self.tokens[t]}” to “{self.nearest[t].token}”)"
            )
        if length is not None:
            parts.append(f"{percent(length)} of the length of the shortest token that moves")
        return f"ε = {eps:.3g} is {' and '.join(parts)}" if parts else ""


def percent(share: float) -> str:
    """Return a share in percent with three digits, as in `0.0123 %`.

    Args:
        share: 1 for all.
    """
    return f"{100.0 * share:.3g} %"


def yardstick(model: Transformer, prompt: Prompt, nearest: bool | None = None) -> Yardstick:
    """Measure the tokens of a prompt, so that radii can be told in words.

    Args:
        model: the model.
        prompt: the prompt.
        nearest: whether to look for the nearest other tokens, a pass over the vocabulary; None for where it takes a
            second or two. Models without text have none.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> yardstick(model, model.example()).words(0.01)
        'ε = 0.01 is 1.12 % of the length of the shortest token that moves'
    """
    width = prompt.x.shape[-1]
    lengths = tuple((prompt.x.double().norm(dim=-1) / math.sqrt(width)).tolist())
    found = None
    if model.tokenizer is not None and prompt.ids is not None and nearest is not False:
        numbers = model.weights["embed.tokens"].shape[0] * len(prompt) * width
        if nearest or numbers <= MOST_NUMBERS:
            places = range(len(prompt))
            found = tuple(nearest_tokens(model, prompt.ids, places, prompt.x.to(model.device), other=True))
    return Yardstick(prompt.tokens, lengths, found)
