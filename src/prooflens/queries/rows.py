"""Names: rows of attention, heads `layer.head`, positions and tokens, with a suggestion for every near miss."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prooflens.errors import QueryError

Token = int | str
"""A token is named by its index (negative counts from the end) or by its text."""

WORD_MARKS = " \u0120\u2581"
"""What tokenizers put before a word: a space, Ġ (byte-level BPE) and ▁ (SentencePiece)."""


@dataclass(frozen=True, order=True)
class Row:
    """One row of attention: layer, head and query position; written `1.10@3`."""

    layer: int
    head: int
    position: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}@{self.position}"

    @property
    def head_name(self) -> str:
        """`layer.head`."""
        return f"{self.layer}.{self.head}"


def suggestion(word: str, known: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """`; did you mean …?` for the nearest known word (as `shown` writes it), or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {(shown or {}).get(near[0], near[0])!r}?" if near else ""


def parse_heads(text: str, n_layers: int, n_heads: int) -> list[tuple[int, int]]:
    """Heads as (layer, head): `1.10`, a layer `2`, layers `0-2`, a comma list of these, or `all`; in order, once."""
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
    if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part):
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < n_layers:
            raise QueryError(f"there are no layers {part!r}: layers are 0-{n_layers - 1}")
        return [(layer, head) for layer in range(first, last + 1) for head in range(n_heads)]
    raise QueryError(
        f"{part!r} does not name a head (as in '1.10'), a layer ('2'), layers ('0-2') or 'all'"
        f"{suggestion(part, known)}"
    )


def plain(text: str) -> str:
    """A token's text without the word mark before it."""
    return text.lstrip(WORD_MARKS)


def find_token(token: Token, size: int, texts: Sequence[str] | None) -> list[int]:
    """The positions a token names: one for an index, all that carry the text for a text."""
    if isinstance(token, int):
        if not -size <= token < size:
            raise QueryError(f"there is no token {token}: the prompt has {size} tokens, 0-{size - 1}")
        return [token % size]
    if texts is None:
        raise QueryError(f"token {token!r} is named by its text, but this prompt has no texts; use an index")
    exact = [index for index, text in enumerate(texts) if text == token]
    loose = [index for index, text in enumerate(texts) if plain(text) == plain(token)]
    if found := exact or loose:
        return found
    raise QueryError(f"no token has the text {token!r}{suggestion(plain(token), map(plain, texts))}")


def find_tokens(tokens: Iterable[Token], size: int, texts: Sequence[str] | None) -> list[int]:
    """The positions that several tokens name, in order, once each."""
    return list(dict.fromkeys(index for token in tokens for index in find_token(token, size, texts)))
