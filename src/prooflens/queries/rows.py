"""Names: rows of attention, heads `layer.head`, positions and tokens, with a suggestion for every near miss."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prooflens.errors import QueryError


@dataclass(frozen=True)
class Role:
    """A token by its part in the prompt: a slot of a template, or its place relative to the query.

    Attributes:
        name: the slot, or `self` for the query position.
        occurrence: which occurrence of the slot, from 1; None for all of them.
        part: `first` or `last` token of the filler; None for all its tokens.
        offset: how far behind the query (`self` alone): −1 is the token before it.

    Example:
        >>> str(Role("B", 2)), str(Role("A", 1, "last")), str(Role("self", offset=-1))
        ('B.2', 'A.1.last', 'self-1')
    """

    name: str
    occurrence: int | None = None
    part: str | None = None
    offset: int = 0

    def __str__(self) -> str:
        pieces = [self.name, *(str(piece) for piece in (self.occurrence, self.part) if piece is not None)]
        return ".".join(pieces) + (f"{self.offset:+d}" if self.offset else "")


Token = int | str
"""The name of a token: its index (negative counts from the end) or its text."""

Named = Token | Role
"""How a query names a token: by index, text or role."""

WORD_MARKS = " \u0120\u2581"
"""What tokenizers put before a word: a space, Ġ (byte-level BPE) and ▁ (SentencePiece)."""


@dataclass(frozen=True, order=True)
class Row:
    """One row of attention: layer, head and query position, written `1.10@3`.

    Example:
        >>> str(Row(layer=1, head=10, position=3))
        '1.10@3'
    """

    layer: int
    head: int
    position: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}@{self.position}"

    @property
    def head_name(self) -> str:
        """The head as `layer.head`."""
        return f"{self.layer}.{self.head}"


def suggestion(
    word: str, known: Iterable[str], shown: Mapping[str, str] | None = None, likeness: float = 0.5
) -> str:
    """Return `; did you mean …?` for the nearest known word, or an empty text.

    Args:
        word: what was written.
        known: what could have been meant.
        shown: how to write a known word in the message, if not as it is.
        likeness: how much alike they must be, from 0 to 1.
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f"; did you mean {(shown or {}).get(near[0], near[0])!r}?" if near else ""


def parse_heads(text: str, n_layers: int, n_heads: int) -> list[tuple[int, int]]:
    """Parse a list of heads.

    Args:
        text: a head `1.10`, a layer `2`, layers `0-2`, a comma list of these, or `all`.
        n_layers: the number of layers of the model.
        n_heads: the number of heads in each layer.

    Returns:
        Pairs (layer, head) in the order given, each once.

    Raises:
        QueryError: if the text names a head or a layer that there is not.

    Example:
        >>> parse_heads("1.0, 0", n_layers=2, n_heads=2)
        [(1, 0), (0, 0), (0, 1)]
    """
    if text.strip() == "all":
        return [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    heads: dict[tuple[int, int], None] = {}
    for part in text.split(","):
        heads.update(dict.fromkeys(_parse_heads_part(part.strip(), n_layers, n_heads)))
    return list(heads)


def _parse_heads_part(part: str, n_layers: int, n_heads: int) -> list[tuple[int, int]]:
    known = [f"{layer}.{head}" for layer in range(n_layers) for head in range(n_heads)]
    if match := re.fullmatch(r"(\d{1,9})\.(\d{1,9})", part):
        layer, head = int(match[1]), int(match[2])
        if layer >= n_layers or head >= n_heads:
            nearest = f"{min(layer, n_layers - 1)}.{min(head, n_heads - 1)}"
            raise QueryError(
                f"there is no head {part!r}: layers are 0-{n_layers - 1}, heads 0-{n_heads - 1}"
                f"; did you mean {nearest!r}?"
            )
        return [(layer, head)]
    if re.fullmatch(r"-\d{1,9}", part) and int(part) >= -n_layers:
        part = str(int(part) + n_layers)
    if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part):
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < n_layers:
            raise QueryError(f"there are no layers {part!r}: layers are 0-{n_layers - 1}")
        return [(layer, head) for layer in range(first, last + 1) for head in range(n_heads)]
    raise QueryError(
        f"{part!r} does not name a head (as in '1.10'), a layer ('2'), layers ('0-2') or 'all'"
        f"{suggestion(part, known)}"
    )


def write_tokens(tokens: Iterable[Named]) -> str:
    """Return how tokens are written in a query: indices and roles as they are, texts in double quotes.

    Args:
        tokens: indices, texts or roles.
    """
    return ",".join(json.dumps(t, ensure_ascii=False) if isinstance(t, str) else str(t) for t in tokens)


def plain(text: str) -> str:
    """Return a token's text without the word mark before it.

    Args:
        text: the token's text.
    """
    return text.lstrip(WORD_MARKS)


NUMBERS = re.compile(r"\s*-?\d+\s*([-,:]\s*-?\d+\s*)+")
"""A text that means several numbers."""


def find_token(token: Named, size: int, texts: Sequence[str] | None) -> list[int]:
    """Return the positions that a token names: one for an index, for a text all that carry it.

    Args:
        token: an index (negative counts from the end) or a text.
        size: S, the number of tokens of the prompt.
        texts: the texts of the prompt's tokens; None if there are none.

    Raises:
        QueryError: if the prompt has no such token.

    Example:
        >>> find_token("cat", 3, ["the", " cat", " sat"]), find_token(-1, 3, None)
        ([1], [2])
    """
    if isinstance(token, int):
        if not -size <= token < size:
            raise QueryError(f"there is no token {token}: the prompt has {size} tokens, 0-{size - 1}")
        return [token % size]
    if isinstance(token, Role):
        raise QueryError(f"{{{token}}} is a role, which `resolve` looks up at a member of a template")
    if not isinstance(token, str):
        raise QueryError(f"{token!r} names no token: give its number, or its text")
    if texts is None:
        raise QueryError(f"token {token!r} is named by its text, but this prompt has no texts; use an index")
    exact = [index for index, text in enumerate(texts) if text == token]
    loose = [index for index, text in enumerate(texts) if plain(text) == plain(token)]
    if found := exact or loose:
        return found
    hint = suggestion(plain(token), map(plain, texts))
    if NUMBERS.fullmatch(token):
        hint = "; several numbers are written 2,5 or 2-4 on the command line, and [2, 5] in Python"
    raise QueryError(f"no token has the text {token!r}{hint}")


def find_tokens(tokens: Iterable[Named], size: int, texts: Sequence[str] | None) -> list[int]:
    """Return the positions that several tokens name, in order, each once.

    Args:
        tokens: indices and texts.
        size: S, the number of tokens of the prompt.
        texts: the texts of the prompt's tokens; None if there are none.
    """
    return list(dict.fromkeys(index for token in tokens for index in find_token(token, size, texts)))
