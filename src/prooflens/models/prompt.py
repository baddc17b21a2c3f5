"""From text to the post-embedding input: the tokens of a prompt and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import ModelError, PromptError

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer


Roles = Mapping[str, tuple[tuple[int, ...], ...]]
"""Named parts of a prompt, as the slots of a template are: the positions of every occurrence."""


class Tokenizer(Protocol):
    """Maps a text to token ids, and each id to the text that a person reads."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens the model was trained with.

        Args:
            text: the text.
        """
        ...

    def token(self, index: int) -> str:
        """Return the text of one token.

        Args:
            index: the number of the token.
        """
        ...


@dataclass(frozen=True, eq=False)
class Steering:
    """What was added to a residual stream: c·v at some tokens.

    Attributes:
        c: the strength.
        direction: v, shape [d].
        tokens: the tokens, counted from 0.
    """

    c: float
    direction: Float[Tensor, " d"]
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Origin:
    """What a residual stream inside a model was computed from.

    Attributes:
        layer: the block in front of which the stream stands.
        x: the input of the whole model, shape [S, d].
        ids: the token ids of that input; None if it was given as a tensor.
        steering: what was added to the stream; None for nothing.
    """

    layer: int
    x: Float[Tensor, "S d"] = field(repr=False)
    ids: tuple[int, ...] | None = None
    steering: Steering | None = None


@dataclass(frozen=True, eq=False)
class Prompt:
    """One input: its tokens and its post-embedding vectors.

    Attributes:
        x: the post-embedding vectors, shape [S, d].
        tokens: the texts of the tokens.
        ids: the token ids; None for an input that was not embedded from ids.
        text: the text; None for an input that was given as ids or as a tensor.
        roles: parts that queries may name, as `{A}` or `{B.2}`: the slots of the template that it is a member of.
        origin: of a residual stream that stands for an input (`models.tails`), what it was computed from.
    """

    x: Float[Tensor, "S d"] = field(repr=False)
    tokens: tuple[str, ...]
    ids: tuple[int, ...] | None = None
    text: str | None = None
    roles: Roles = field(default_factory=dict)
    origin: Origin | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class FileTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library when it is first needed."""

    path: Path

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with special tokens, without padding or truncation.

        Args:
            text: the text.
        """
        ids: list[int] = _read_tokenizer(self.path).encode(text).ids
        return ids

    def token(self, index: int) -> str:
        """Return the text of one token; pieces that are not whole characters are shown by their name.

        Args:
            index: the number of the token.
        """
        reader = _read_tokenizer(self.path)
        text: str = reader.decode([index], skip_special_tokens=False)
        return text if text and "\ufffd" not in text else str(reader.id_to_token(index))


@dataclass(frozen=True, eq=False)
class GivenTokenizer:
    """A tokenizer that the caller has: of transformers, of `tokenizers`, or a TransformerLens model's own.

    Attributes:
        given: the tokenizer.
        to_ids: how it encodes, if that is not its own `encode` (TransformerLens puts a first token before a text).
    """

    given: Any
    to_ids: Callable[[str], Any] | None = None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, as the given tokenizer makes them.

        Args:
            text: the text.
        """
        ids = (self.to_ids or self.given.encode)(text)
        return [int(i) for i in getattr(ids, "ids", ids)]

    def token(self, index: int) -> str:
        """Return the text of one token.

        Args:
            index: the number of the token.
        """
        return str(self.given.decode([index])) or f"#{index}"


_tokenizers: dict[Path, object] = {}


def _read_tokenizer(path: Path):  # type: ignore[no-untyped-def]  # tokenizers has no stubs
    if path not in _tokenizers:
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError as error:
            raise PromptError('text needs the tokenizers library: pip install "prooflens[hf]"') from error
        try:
            reader = Reader.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every broken file
            raise ModelError(f"{path} is not a readable tokenizer: {error}") from error
        reader.no_truncation()
        reader.no_padding()
        _tokenizers[path] = reader
    return _tokenizers[path]


def make_prompt(model: Transformer, text: str | Sequence[int] | Int[Tensor, " S"]) -> Prompt:
    """Tokenise and embed a text, or embed token ids.

    Args:
        model: the model that reads it.
        text: a text, or a sequence of token ids.

    Raises:
        PromptError: if the model has no tokenizer, or the text is empty or too long.
    """
    reader = model.tokenizer
    if not isinstance(text, str):
        ids = _token_ids(text)
        names = tuple(f"#{i}" if reader is None else reader.token(i) for i in ids)
        return Prompt(model.embed(torch.tensor(ids, dtype=torch.long)), names, tuple(ids))
    if reader is None:
        raise PromptError(
            f"{model.name} has no tokenizer: load it with load(…, tokenizer=…), give token ids or a tensor, or use "
            "`example()` where it has examples"
        )
    if not text.strip():
        raise PromptError("the text is empty: give at least one word")
    ids = reader.encode(text)
    x = model.embed(torch.tensor(ids, dtype=torch.long))
    return Prompt(x, tuple(reader.token(i) for i in ids), tuple(ids), text)


def _token_ids(given: Any) -> list[int]:
    """Return one sequence of token ids, from a list or a tensor [S] or [1, S]."""
    ids = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        (ids,) = ids
    if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
        raise PromptError("a prompt is a text or a sequence of token ids; an input [S, d] needs no prompt")
    return list(ids)


def example_prompt(model: Transformer, index: int) -> Prompt:
    """Return one of the example inputs that an embedded model carries.

    Args:
        model: an embedded model.
        index: which of its examples, from 0.
    """
    if model.examples is None:
        raise PromptError(f"{model.name} has no example inputs: give a text with `prompt()`")
    if not 0 <= index < len(model.examples):
        raise PromptError(f"{model.name} has examples 0 … {len(model.examples) - 1}, not {index}")
    x = model.examples[index]
    return Prompt(x, tuple(f"x{i}" for i in range(len(x))), text=None)
