"""From text to the post-embedding input: the tokens of a prompt and where they come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError, PromptError

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer


class Tokenizer(Protocol):
    """Text to token ids, and each id to the text that a person reads."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens the model was trained with."""
        ...

    def token(self, index: int) -> str:
        """The text of one token."""
        ...


@dataclass(frozen=True, eq=False)
class Prompt:
    """One input: its tokens and its post-embedding vectors x."""

    x: Float[Tensor, "S d"] = field(repr=False)
    tokens: tuple[str, ...]
    ids: tuple[int, ...] | None = None
    text: str | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class FileTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library when it is first needed."""

    path: Path

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with special tokens, without padding or truncation."""
        ids: list[int] = _read_tokenizer(self.path).encode(text).ids
        return ids

    def token(self, index: int) -> str:
        """The text of one token; pieces that are not whole characters are shown by their name."""
        reader = _read_tokenizer(self.path)
        text: str = reader.decode([index], skip_special_tokens=False)
        return text if text and "\ufffd" not in text else str(reader.id_to_token(index))


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


def make_prompt(model: Transformer, text: str) -> Prompt:
    """Tokenise and embed a text; an empty or too long one is an error."""
    if model.tokenizer is None:
        raise PromptError(
            f"{model.name} has no tokenizer: give its input as a tensor, or use `example()` where it has examples"
        )
    if not text.strip():
        raise PromptError("the text is empty: give at least one word")
    ids = model.tokenizer.encode(text)
    x = model.embed(torch.tensor(ids, dtype=torch.long))
    return Prompt(x, tuple(model.tokenizer.token(i) for i in ids), tuple(ids), text)


def example_prompt(model: Transformer, index: int) -> Prompt:
    """One of the example inputs that an embedded model carries."""
    if model.examples is None:
        raise PromptError(f"{model.name} has no example inputs: give a text with `prompt()`")
    if not 0 <= index < len(model.examples):
        raise PromptError(f"{model.name} has examples 0 … {len(model.examples) - 1}, not {index}")
    x = model.examples[index]
    return Prompt(x, tuple(f"x{i}" for i in range(len(x))), text=None)
