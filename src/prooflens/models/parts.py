"""What is edited: parts of a model by their names, and edits as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError

if TYPE_CHECKING:
    from prooflens.models.dictionaries import Dictionary

TOKENS = re.compile(r"(?P<part>[^@]*)(?P<tokens>(?:@-?\d{1,7})*)")
"""A part, and the tokens at which it is held: `a9.h6@3@-1`."""


ANY = "any value"
"""How the source of an edit begins that says of itself which values a part may have."""


@dataclass(frozen=True)
class Place:
    """A part of a model that can be edited.

    Attributes:
        name: as circuit tools write it: `a9.h6`, `a9`, `m3`, `m3.n12`.
        layer: its block.
        hook: TransformerLens' name of its value.
        reader: the linear map that reads it, or writes it where it is a whole block's output; None for a value of which
            a direction is held.
        columns: the map's columns that read it; None for a whole block's output.
        written: whether it is what a head writes into the stream, W_O z, and not z.
    """

    name: str
    layer: int
    hook: str
    reader: str | None
    columns: range | None = None
    written: bool = False

    @property
    def block(self) -> str:
        """The whole block's output that it is a part of."""
        return self.name.split(".")[0]

    def read(self, value: Float[Tensor, "... n"]) -> Float[Tensor, "... w"]:
        """Return its own coordinates of the hook's value, heads side by side.

        Args:
            value: the hook's value, shape [..., n].
        """
        return value if self.columns is None else value[..., self.columns.start : self.columns.stop]


def split_tokens(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a part and the tokens at which it is held; none where it is held at all of them.

    Args:
        name: as in `a9.h6@3@-1`.

    Example:
        >>> split_tokens("a9.h6@3@-1")
        ('a9.h6', (3, -1))
    """
    match = TOKENS.fullmatch(name)
    if match is None:
        raise ModelError(f"{name!r} names no tokens: write them as in 'a9.h6@3' or 'a9.h6@3@-1'")
    tokens = tuple(int(token) for token in match["tokens"].split("@")[1:])
    if len(set(tokens)) < len(tokens):
        raise ModelError(f"{name!r} names a token twice")
    return match["part"], tokens


@dataclass(frozen=True, eq=False)
class Feature:
    """A feature of a dictionary.

    Attributes:
        dictionary: its encoder and decoder.
        index: the number of the feature.
        error: whether what the dictionary does not explain of the value stays in it.
    """

    dictionary: Dictionary
    index: int
    error: bool = True


@dataclass(frozen=True, eq=False)
class Edit:
    """One part, held at zero, at a constant, or at any value of a set.

    Attributes:
        place: `a9.h6`, `a9.h6.result`, `a9`, `m3` or `m3.n12`, perhaps at some tokens, `a9.h6@3@-1`; an edge,
            `a9.h6->a10.h2.q`; a key that is knocked out, `a9.h6.k3` or `a9.h6.q5.k3`; or a hook of the stream,
            `blocks.5.hook_resid_pre`, with a direction.
        value: the constant, as many numbers as the part has; None for zero. At tokens, one row for each is possible,
            shape [tokens, n]; rows without tokens are those of tokens 0, 1, …. Of an edit along a direction: one
            number, the part's coordinate along it.
        source: where the value comes from, for the model's name.
        direction: hold only the part's coordinate along this vector of the stream, shape [d]; None for all of it. For
            `a9` and `m3`, which write into the stream, and for hooks.
        feature: hold a feature of a dictionary at the hook that it reads (`models.held_edits.feature`); None for none.
        spread: hold the part at *any* value c + Σ_k β_k g_k with |β_k| ≤ 1, c the value (`models.spread`): the
            generators g, shape [k, n], or [k, tokens, n] where the value has a row for each token; or one number, by
            which each number of the value may differ. None for the value alone.

    Example:
        >>> str(Edit("a9.h6")), str(Edit("m3", torch.ones(4), "the mean of 2 prompts"))
        ('without a9.h6', 'with m3 at the mean of 2 prompts')
        >>> str(Edit("a9.h6@-1", spread=0.1))
        'with a9.h6@-1 at any value within 0.1 of 0'
    """

    place: str
    value: Float[Tensor, " n"] | Float[Tensor, "tokens n"] | None = None
    source: str = "a constant"
    direction: Float[Tensor, " d"] | None = None
    feature: Feature | None = None
    spread: float | Float[Tensor, "k n"] | Float[Tensor, "k tokens n"] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens at which the part is held; none where it is held at all of them."""
        named = split_tokens(self.place)[1]
        rows = isinstance(self.value, Tensor) and self.value.ndim == 2
        return tuple(range(len(self.value))) if rows and not named and self.value is not None else named

    def __str__(self) -> str:
        part = self.place if self.direction is None else f"a direction of {self.place}"
        if self.feature is not None:
            kind = "feature" if self.feature.error else "decoded feature"
            part = f"{kind} {self.feature.index} of {self.place}"
        if self.spread is None:
            return f"without {part}" if self.value is None else f"with {part} at {self.source}"
        if self.source.startswith(ANY):
            return f"with {part} at {self.source}"
        near = f"within {float(self.spread)!r} of" if isinstance(self.spread, int | float) else "around"
        return f"with {part} at {ANY} {near} {'0' if self.value is None else self.source}"


def unit(direction: Tensor, size: int, like: Tensor, place: Place) -> Tensor:
    """Return a direction with the length 1.

    Args:
        direction: the direction.
        size: how many coordinates it must have.
        like: a tensor of the model.
        place: what it is a direction of.
    """
    v = fitting(direction, size, like, place)
    if not bool((length := v.norm()) > 0.0):
        raise ModelError("a direction is not zero")
    scaled: Tensor = v / length
    return scaled


def fitting(value: Tensor, size: int, like: Tensor, place: Place) -> Tensor:
    """Return the numbers of an edit in the model's precision.

    Args:
        value: the numbers.
        size: how many there must be.
        like: a tensor of the model.
        place: what they are for.

    Raises:
        ModelError: if they do not fit, or are not finite.
    """
    given = torch.as_tensor(value).to(like)
    if tuple(given.shape) != (size,) or not bool(given.isfinite().all()):
        raise ModelError(
            f"an edit of {place.name} needs {size} finite numbers, got shape {list(given.shape)}"
        )
    return given
