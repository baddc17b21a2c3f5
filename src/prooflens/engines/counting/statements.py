"""What the weights of layer 0 alone say about every token: preferred duplicates, and tokens that heads copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from prooflens.engines.counting.enclosures import Enclosure, enclose, norm_upper
from prooflens.engines.counting.scores import FirstScores, Vectors, product_errors
from prooflens.errors import ModelError, QueryError
from prooflens.models.sites import Affine
from prooflens.numerics import down, up

TILE_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}
"""How many scores or logits are held at once."""


@dataclass(frozen=True)
class TokenStatement:
    """One statement about every token of a list, with the margin by which it holds.

    Attributes:
        tokens: the tokens.
        lower: proved: the margin is at least this, per token; positive where the statement is proved.
        upper: proved: the margin is at most this; not positive where it is refuted.
        rivals: the token that comes nearest, or wins.
    """

    tokens: tuple[int, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    rivals: tuple[int, ...]

    @property
    def holds(self) -> tuple[int, ...]:
        """The tokens for which it is proved."""
        return tuple(token for token, low in zip(self.tokens, self.lower, strict=True) if low > 0.0)

    @property
    def fails(self) -> tuple[int, ...]:
        """The tokens for which it is refuted."""
        return tuple(token for token, high in zip(self.tokens, self.upper, strict=True) if high <= 0.0)

    @property
    def unknown(self) -> int:
        """How many tokens rounding leaves open."""
        return len(self.tokens) - len(self.holds) - len(self.fails)


Tile = Callable[[Int[Tensor, " B"]], tuple[Tensor, Tensor, Tensor]]
"""From tokens to margins, their error and the nearest rivals."""


def prefers_duplicates(
    scores: FirstScores, head: int, tokens: Int[Tensor, " N"] | None = None
) -> TokenStatement:
    """Say for which tokens a head scores an earlier copy above every other token, wherever the two stand.

    The query is the last of n tokens. The margin of a token t is

        min over keys j < n − 1 of a_{n−1,j}(t, t)  −  max over keys j < n − 1 and tokens t' ≠ t of a_{n−1,j}(t, t').

    Args:
        scores: the first scores for prompts of n tokens, n ≥ 2; the distances are 1 … n − 1.
        head: the number of the head.
        tokens: the tokens t; None for the whole vocabulary. Rivals t' are always the whole vocabulary.
    """
    last = scores.length - 1
    keys = [key for key in scores.visible(last) if key < last]
    if not keys:
        raise QueryError("a duplicate needs a key before the last token: give a length of at least 2")
    queries = scores.queries(head, last)
    read = [scores.keys(head, key) for key in keys]
    added = [scores.bias(head, last, key) for key in keys]

    def margins(some: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        asked = queries.of(some)
        scaled = asked.middle * scores.step.scale
        least = scaled.new_full((len(some),), torch.inf)
        most = scaled.new_full((len(some),), -torch.inf)
        rival = torch.zeros_like(some)
        for key, number in zip(read, added, strict=True):
            own, other, who = _own_and_best(scaled @ key.middle.T + number, some)
            least = torch.minimum(least, own)
            most, rival = torch.maximum(most, other), torch.where(other > most, who, rival)
        return least - most, 2.0 * scores.errors(asked, read, [abs(number) for number in added]), rival

    return _each(scores, tokens, margins)


def copies(
    scores: FirstScores, head: int, position: int = 0, tokens: Int[Tensor, " N"] | None = None
) -> TokenStatement:
    """Say which tokens the OV circuit of a head copies: the largest entry of W_U W_O W_V z(t) is t's own.

    z(t) is what the first attention reads: the embedding of t at a position behind the model's first norm. Values have
    their bias; the biases of output and head, and the final norm, belong to no single head and are left out.

    Args:
        scores: the first scores for prompts longer than the position.
        head: the number of the head.
        position: where the token stands; without learned positions it makes no difference.
        tokens: the tokens t; None for the whole vocabulary. Rivals are always the whole vocabulary.
    """
    model = scores.model
    if model.architecture.d_out != scores.vocabulary:
        raise ModelError(f"{model.name} does not predict tokens: no token can be copied to its output")
    unembedding, _ = model.head
    width = model.architecture.head_dim
    out = model.weights["blocks.0.o.weight"][:, head * width : (head + 1) * width]
    step = Affine("ov", ("unembedding",), out.T.contiguous(), None, 1, (width,))
    with torch.no_grad():
        middle, radius = enclose(step, Enclosure(unembedding, torch.zeros_like(unembedding)))
        written = Vectors(middle, norm_upper(middle), norm_upper(radius))
    values = scores.values(head, position)

    def margins(some: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = values.of(some)
        own, other, who = _own_and_best(read.middle @ written.middle.T, some)
        return own - other, 2.0 * product_errors(read, [written], 1.0, 0.0), who

    return _each(scores, tokens, margins)


def _own_and_best(found: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entry of each row's own token, the largest of the others, and which that is."""
    own = found.gather(-1, tokens[:, None])[:, 0]
    best = found.scatter_(-1, tokens[:, None], -torch.inf).max(-1)
    return own, best.values, best.indices


def _each(scores: FirstScores, tokens: Tensor | None, margins: Tile) -> TokenStatement:
    """Walk the tokens in tiles."""
    device = scores.model.device
    asked = torch.arange(scores.vocabulary) if tokens is None else torch.as_tensor(tokens)
    size = max(1, TILE_ELEMENTS.get(device.type, 2**22) // scores.vocabulary)
    lower, upper, rivals = [], [], []
    with torch.no_grad():
        for some in asked.to(device).split(size):
            margin, error, rival = margins(some)
            lower += down(margin - error, 2).tolist()
            upper += up(margin + error, 2).tolist()
            rivals += rival.tolist()
    return TokenStatement(tuple(asked.tolist()), tuple(lower), tuple(upper), tuple(rivals))
