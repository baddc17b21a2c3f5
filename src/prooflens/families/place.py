"""Where fillers stand: the tokens of a template's pieces, and of every filler in every place of its slot."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prooflens.errors import ModelError, PromptError
from prooflens.families.family import Family
from prooflens.families.shapes import Numbers, Shape
from prooflens.models import Transformer

CHECKED = 2048
"""Members whose text is tokenised as a whole and compared with its pieces; smaller families are compared whole."""


class TextReader:
    """A model's tokenizer, with the special tokens that it puts around a text told apart."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        if model.architecture.d_vocab is None:
            raise ModelError(
                f"{model.name} has no vocabulary: families of prompts are about models that read tokens"
            )
        self.vocabulary = model.architecture.d_vocab
        self.before: list[int] = []
        self.behind: list[int] = []
        if model.tokenizer is not None:
            bare, some = model.tokenizer.encode(""), model.tokenizer.encode("a")
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(bare, some, strict=False))
            self.before = bare[: len(list(same))]
            self.behind = bare[len(self.before) :]

    def whole(self, text: str) -> list[int]:
        """The tokens of a whole prompt, special ones included.

        Args:
            text: the prompt.
        """
        if self.model.tokenizer is None:
            raise PromptError(
                f"{self.model.name} has no tokenizer: give token ids, or load it with load(…, tokenizer=…)"
            )
        if not text.strip():
            raise PromptError("a prompt of the family is empty: give at least one word")
        return self.model.tokenizer.encode(text)

    def encode(self, text: str) -> list[int]:
        """The tokens of a piece of text, without special ones.

        Args:
            text: the piece.
        """
        if not text:
            return []
        found = self.whole(text) if text.strip() else self.model.tokenizer.encode(text)  # type: ignore[union-attr]
        return found[len(self.before) : len(found) - len(self.behind)]

    def single(self, word: str | int) -> int:
        """The one token of a filler of swaps.

        Args:
            word: the filler, as a text or as the number of its token.
        """
        if isinstance(word, int):
            if not 0 <= word < self.vocabulary:
                raise PromptError(f"there is no token {word}: tokens are 0 … {self.vocabulary - 1}")
            return word
        found = self.encode(word)
        if len(found) != 1:
            raise PromptError(
                f"{word!r} is {len(found)} tokens of {self.model.name}: swaps take single tokens, a Template takes any"
            )
        return found[0]

    def joined(self, ids: Sequence[int]) -> str:
        """Tokens as a text for people.

        Args:
            ids: the tokens.
        """
        reader = self.model.tokenizer
        texts = [f"#{i}" if reader is None else reader.token(i) for i in ids]
        return "".join(texts) if any(text.startswith(" ") for text in texts) else " ".join(texts)

    def check_length(self, length: int) -> None:
        """An error if the model reads no text of so many tokens.

        Args:
            length: how many tokens there are.
        """
        most = self.model.architecture.context
        if most is not None and length > most:
            raise PromptError(
                f"a member has {length} tokens, {self.model.name} reads at most {most}: shorten it"
            )

    def place(self, pieces: Sequence[tuple[str, str | None]], first: Mapping[str, str]) -> Placed:
        """The tokens of the literals, and what stands before every slot, with the first filler of each slot.

        Args:
            pieces: literals of a template, each with the slot behind it (None behind the last).
            first: the first filler of every slot.

        Raises:
            PromptError: if a token reaches over the border of a slot.
        """
        text, ids = "", list[int]()
        parts: list[list[int] | Occurrence] = []
        for literal, slot in pieces:
            spaced = slot is not None and literal.endswith(" ")
            literal = literal[:-1] if spaced else literal
            parts.append(self._next(text, ids, literal, "the text"))
            text, ids = text + literal, ids + parts[-1]  # type: ignore[operator]
            if slot is None:
                continue
            occurrence = Occurrence(slot, spaced, text, tuple(ids))
            parts.append(occurrence)
            filler = occurrence.spelled(first[slot])
            ids = ids + self._next(text, ids, filler, f"slot {slot}")
            text += filler
        return Placed(self, parts)

    def _next(self, text: str, ids: list[int], more: str, what: str) -> list[int]:
        found = self.encode(text + more)
        if found[: len(ids)] != ids:
            raise PromptError(
                f"{more!r} of {what} is tokenised together with {text[-12:]!r} before it: put a space or punctuation "
                "between them"
            )
        return found[len(ids) :]


@dataclass(frozen=True)
class Occurrence:
    """A slot at one place of a template.

    Attributes:
        slot: its name.
        spaced: whether a space stands before it.
        text: the text before it, with the first filler of each slot.
        ids: the tokens of that text.
    """

    slot: str
    spaced: bool
    text: str
    ids: tuple[int, ...]

    def spelled(self, filler: str) -> str:
        """The filler as it stands here.

        Args:
            filler: the filler as the list has it.
        """
        return f" {filler.removeprefix(' ')}" if self.spaced else filler


@dataclass(eq=False)
class Placed:
    """A template's literals as tokens, and its slots where they stand."""

    reader: TextReader
    parts: list[list[int] | Occurrence]
    _known: dict[tuple[int, str], list[int]] = field(default_factory=dict)

    @property
    def occurrences(self) -> list[Occurrence]:
        """The slots in the order of the text."""
        return [part for part in self.parts if isinstance(part, Occurrence)]

    def tokens(self, occurrence: Occurrence, filler: str | int) -> list[int]:
        """The tokens of a filler at a place.

        Args:
            occurrence: the place.
            filler: the filler, as a text or as the number of its token.

        Raises:
            PromptError: if it is tokenised together with what stands before it.
        """
        if isinstance(filler, int):
            return [filler]
        key = id(occurrence), filler
        if key not in self._known:
            word = occurrence.spelled(filler)
            self._known[key] = self.reader._next(
                occurrence.text, list(occurrence.ids), word, f"slot {occurrence.slot}"
            )
        return self._known[key]

    def single(self, slot: str, filler: str) -> bool:
        """Whether a filler is one token at every place of its slot.

        Args:
            slot: the slot.
            filler: the filler.
        """
        return all(len(self.tokens(place, filler)) == 1 for place in self.occurrences if place.slot == slot)


def shapes_of(
    placed: Placed, words: Mapping[str, Sequence[str | int]], differ: tuple[tuple[str, str], ...]
) -> tuple[Shape, ...]:
    """The shapes of a template: every choice of token lengths of its slots.

    Args:
        placed: the template's tokens.
        words: the fillers of every slot.
        differ: slots whose fillers must not be the same.
    """
    tokens = {
        slot: [
            [placed.tokens(place, word) for place in placed.occurrences if place.slot == slot]
            for word in held
        ]
        for slot, held in words.items()
    }
    lengths = {slot: sorted({tuple(map(len, each)) for each in found}) for slot, found in tokens.items()}
    shapes = []
    for chosen in itertools.product(*lengths.values()):
        fitting = dict(zip(words, chosen, strict=True))
        numbers = {
            slot: np.array(
                [i for i, each in enumerate(tokens[slot]) if tuple(map(len, each)) == fitting[slot]]
            )
            for slot in words
        }
        shape = _shape(placed, words, differ, fitting, numbers, tokens)
        placed.reader.check_length(shape.n_tokens)
        if shape.members:
            shapes.append(shape)
    return tuple(sorted(shapes, key=lambda shape: shape.n_tokens))


def _shape(
    placed: Placed,
    words: Mapping[str, Sequence[str | int]],
    differ: tuple[tuple[str, str], ...],
    lengths: Mapping[str, tuple[int, ...]],
    numbers: Mapping[str, Numbers],
    tokens: Mapping[str, Sequence[Sequence[list[int]]]],
) -> Shape:
    reader = placed.reader
    ids, places = list(reader.before), {slot: list[tuple[int, int]]() for slot in words}
    for part in placed.parts:
        if isinstance(part, Occurrence):
            length = lengths[part.slot][len(places[part.slot])]
            places[part.slot].append((len(ids), len(ids) + length))
            ids += [-1] * length
        else:
            ids += part
    held = {
        slot: tuple(
            np.array([tokens[slot][i][k] for i in numbers[slot].tolist()], dtype=np.int64)
            for k in range(len(places[slot]))
        )
        for slot in words
    }
    order = {slot: tuple(places[slot]) for slot in words}
    return Shape(np.array(ids + reader.behind, dtype=np.int64), order, numbers, held, differ, words)


def check_texts(family: Family, reader: TextReader) -> None:
    """Compare members with the tokens of their texts: every filler beside the first ones, and many more by chance.

    Args:
        family: the family.
        reader: reads texts as the model does.

    Raises:
        PromptError: if a text has other tokens than its pieces.
    """
    members = list(family) if family.size <= CHECKED else family.sample(CHECKED, seed=0)
    for shape in family.shapes if family.size > CHECKED else ():
        digits = np.arange(max(shape.sizes))[:, None] % np.array(shape.sizes)[None]
        members += family.members(shape, digits[shape.keep(digits)])
    for member in members:
        if reader.whole(member.text) != list(member.ids):
            words = ", ".join(f"{slot}={word!r}" for slot, word in member.fillers.items())
            raise PromptError(
                f"{member.text!r} is tokenised differently than its pieces ({words}): put a space or punctuation "
                "around slots, or leave the filler out"
            )
