"""What a user writes: a template with slots, swaps at positions of a prompt, a list of prompts."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from prooflens.errors import PromptError
from prooflens.families.family import Family
from prooflens.families.place import Placed, TextReader, check_texts, shapes_of
from prooflens.families.shapes import Shape
from prooflens.families.words import WordList
from prooflens.models import Prompt, Transformer


class _Vocabulary(Enum):
    """The one value of `ALL`."""

    ALL = "ALL"

    def __repr__(self) -> str:
        return "ALL"


ALL = _Vocabulary.ALL
"""Every token of the model's vocabulary, as fillers of a slot."""

Fillers: TypeAlias = WordList | Sequence[str] | _Vocabulary
"""What a slot takes: a built-in list, words, or `ALL`."""

Swapped: TypeAlias = Fillers | Sequence[int]
"""What a position of a prompt takes: the same, or tokens by number."""

RESERVED = ("self", "first", "last", "all", "differ")
"""Words that queries and `Template` use themselves."""


class Template:
    """A text with slots; its members are the text with every combination of fillers.

    A slot may stand at several places, and then has the same filler at each. A space before a slot and the space at
    a filler's start are one space: `"When {A}"` and `"When{A}"` mean the same with `" Mary"`.

    Args:
        text: the text, slots in braces; braces themselves are doubled.
        differ: pairs (or larger groups) of slots whose fillers must not be the same.
        slots: the fillers of every slot: words, a built-in list such as `NAMES`, or `ALL`.

    Raises:
        PromptError: where text and slots do not fit; the message says what to do.

    Example:
        >>> template = Template("When{A} and{B} met,{B} spoke", A=[" Mary", " Kate"], B=[" Tom", " Mary"],
        ...     differ=[("A", "B")])
        >>> len(template), template.text_of({"A": " Kate", "B": " Tom"})
        (3, 'When Kate and Tom met, Tom spoke')
    """

    def __init__(self, text: str, /, differ: Iterable[Sequence[str]] = (), **slots: Fillers) -> None:
        self.text = text
        self.pieces = _pieces(text)
        self.slots = {slot: slots[slot] for slot in _checked_names(self.pieces, slots)}
        self.differ = _pairs(differ, self.slots)
        for slot, fillers in self.slots.items():
            _check_fillers(slot, fillers)

    def __len__(self) -> int:
        """How many members there are by their texts; a model may keep fewer words of a built-in list."""
        if any(fillers is ALL for fillers in self.slots.values()):
            raise PromptError(
                "a slot with ALL has as many fillers as a model has tokens: ask len(template.of(model))"
            )
        words = {slot: _words(fillers) for slot, fillers in self.slots.items()}
        empty = np.empty((0, 1), np.int64)
        shape = Shape(
            np.empty(0, np.int64),
            dict.fromkeys(words, ()),
            {slot: np.arange(len(held)) for slot, held in words.items()},
            dict.fromkeys(words, (empty,)),
            self.differ,
            words,
        )
        return shape.members

    def __repr__(self) -> str:
        return f"Template({self.text!r}, {', '.join(self.slots)})"

    def text_of(self, fillers: Mapping[str, str]) -> str:
        """The text with these fillers.

        Args:
            fillers: one text for every slot.
        """
        return "".join(_piece_texts(self.pieces, fillers))

    def of(self, model: Transformer) -> Family:
        """The family of the template's members in a model.

        Args:
            model: the model that reads them.

        Raises:
            PromptError: if a filler is tokenised differently in its place than beside it, or too few words are left.
        """
        reader = TextReader(model)
        first = {
            slot: _words(fillers)[0] if fillers is not ALL else " the" for slot, fillers in self.slots.items()
        }
        placed = reader.place(self.pieces, first)
        words = {
            slot: tuple(range(reader.vocabulary)) if fillers is ALL else _kept(slot, fillers, placed)
            for slot, fillers in self.slots.items()
        }
        shapes = shapes_of(placed, words, self.differ)
        family = Family(
            model, repr(self.text), words, self.differ, shapes, lambda fillers, ids: self.text_of(fillers)
        )
        if ALL not in self.slots.values():
            check_texts(family, reader)
        return family


def filled(model: Transformer, text: str, fillers: Mapping[str, str]) -> Prompt:
    """Return a template with one filler in every slot as a prompt; queries about it may name its slots as roles.

    Args:
        model: the model that reads it.
        text: the text, slots in braces.
        fillers: one text for every slot.

    Raises:
        PromptError: where text and fillers do not fit, or a filler is tokenised differently in its place.
    """
    pieces = _pieces(text)
    held = {slot: fillers[slot] for slot in _checked_names(pieces, fillers)}
    if empty := [slot for slot, word in held.items() if not word.strip()]:
        raise PromptError(f"slot {empty[0]} has no filler: give one, as in ' Mary'")
    reader = TextReader(model)
    shapes = shapes_of(reader.place(pieces, held), {slot: (word,) for slot, word in held.items()}, ())
    words: dict[str, Sequence[str | int]] = {slot: (word,) for slot, word in held.items()}
    family = Family(
        model, repr(text), words, (), shapes, lambda found, ids: "".join(_piece_texts(pieces, found))
    )
    check_texts(family, reader)
    return family.prompt(next(iter(family)))


class Swaps:
    """One prompt with other tokens at some positions; all members have its length.

    Args:
        prompt: a text, or token ids.
        at: for a position (or a tuple of positions that change together) its fillers: words that are one token of
            the model, tokens by number, or `ALL`. The slot's name is `at` and the first position, as in `at7`.
        differ: pairs of slots whose fillers must not be the same, by name.

    Example:
        >>> Swaps("the cat sat", {1: [" dog", " cow"]}).slots
        {'at1': [' dog', ' cow']}
    """

    def __init__(
        self,
        prompt: str | Sequence[int],
        at: Mapping[Any, Swapped],
        differ: Iterable[Sequence[str]] = (),
    ) -> None:
        self.prompt = prompt
        groups = [(key if isinstance(key, tuple) else (key,), fillers) for key, fillers in at.items()]
        if not groups:
            raise PromptError("swaps need at least one position with fillers, as in {1: [' Mary', ' John']}")
        flat = [position for positions, _ in groups for position in positions]
        if any(type(position) is not int or position < 0 for position in flat):
            raise PromptError("positions of swaps are numbers of tokens, from 0")
        if len(set(flat)) < len(flat):
            raise PromptError("a position of swaps is given twice: give it once")
        groups.sort(key=lambda group: min(group[0]))
        self.positions = {f"at{min(positions)}": tuple(sorted(positions)) for positions, _ in groups}
        self.slots = {f"at{min(positions)}": fillers for positions, fillers in groups}
        self.differ = _pairs(differ, self.slots)
        for slot, fillers in self.slots.items():
            _check_fillers(slot, fillers)

    def __repr__(self) -> str:
        return f"Swaps({self.prompt!r}, {', '.join(self.slots)})"

    def of(self, model: Transformer) -> Family:
        """The family of the prompt's swaps in a model.

        Args:
            model: the model that reads them.

        Raises:
            PromptError: if there is no such position, or a filler is not one token of the model.
        """
        reader = TextReader(model)
        ids = list(model.prompt(self.prompt).ids or ())
        if outside := [p for spans in self.positions.values() for p in spans if p >= len(ids)]:
            raise PromptError(
                f"there is no token {outside[0]}: the prompt has {len(ids)} tokens, 0-{len(ids) - 1}"
            )
        words: dict[str, Sequence[str | int]] = {}
        tokens: dict[str, tuple[np.ndarray, ...]] = {}
        for slot, fillers in self.slots.items():
            if fillers is ALL:
                words[slot] = range(reader.vocabulary)
            elif isinstance(fillers, WordList):
                words[slot] = [word for word in fillers.words if len(reader.encode(word)) == 1]
                _check_left(slot, fillers, words[slot])
            else:
                words[slot] = list(fillers)
            column = np.array([[reader.single(word)] for word in words[slot]], dtype=np.int64)
            tokens[slot] = (column,) * len(self.positions[slot])
        held = np.array(ids, dtype=np.int64)
        held[[p for spans in self.positions.values() for p in spans]] = -1
        shape = Shape(
            held,
            {slot: tuple((p, p + 1) for p in spans) for slot, spans in self.positions.items()},
            {slot: np.arange(len(words[slot])) for slot in self.slots},
            tokens,
            self.differ,
            words,
        )
        return Family(model, repr(self), words, self.differ, (shape,), lambda _, ids: reader.joined(ids))


class Prompts:
    """A list of prompts; the one slot, `prompt`, is the whole of each.

    Args:
        prompts: texts, or sequences of token ids.

    Example:
        >>> len(Prompts(["the cat", "the dog"]))
        2
    """

    def __init__(self, prompts: Iterable[str | Sequence[int]]) -> None:
        self.prompts = [item if isinstance(item, str) else tuple(item) for item in prompts]
        if not self.prompts:
            raise PromptError("a family of prompts needs at least one prompt")
        if len(set(self.prompts)) < len(self.prompts):
            raise PromptError("a prompt is listed twice: list it once, or its share counts twice")

    def __len__(self) -> int:
        return len(self.prompts)

    def __repr__(self) -> str:
        return f"Prompts({len(self)})"

    def of(self, model: Transformer) -> Family:
        """The prompts as a family in a model.

        Args:
            model: the model that reads them.
        """
        reader = TextReader(model)
        every = [reader.whole(item) if isinstance(item, str) else list(item) for item in self.prompts]
        words = {"prompt": [item if isinstance(item, str) else reader.joined(item) for item in self.prompts]}
        shapes = []
        for length in sorted({len(ids) for ids in every}):
            numbers = [i for i, ids in enumerate(every) if len(ids) == length]
            reader.check_length(length)
            tokens = np.array([every[i] for i in numbers], dtype=np.int64)
            order = np.lexsort(tokens.T[::-1])  # members that share a beginning stand side by side
            shapes.append(
                Shape(
                    np.full(length, -1, np.int64),
                    {"prompt": ((0, length),)},
                    {"prompt": np.array(numbers, dtype=np.int64)[order]},
                    {"prompt": (tokens[order],)},
                    (),
                    words,
                )
            )
        return Family(
            model, f"{len(self)} prompts", words, (), tuple(shapes), lambda fillers, _: fillers["prompt"]
        )


Given: TypeAlias = Template | Swaps | Prompts | Family
"""What `pl.family` takes."""


def _pieces(text: str) -> tuple[tuple[str, str | None], ...]:
    """The text as pairs of a literal and the slot that follows it; None at the end."""
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise PromptError(
            f"the template {text!r} is not well formed: {error}; double braces that are no slot"
        ) from error
    for _, name, form, conversion in parsed:
        if name is None:
            continue
        if not name.isidentifier() or form or conversion or name in RESERVED:
            raise PromptError(
                f"{{{name}}} is no slot: name it by one word, as in {{A}}, not one of {', '.join(RESERVED)}"
            )
    return tuple((literal, name) for literal, name, _, _ in parsed)


def _piece_texts(pieces: Sequence[tuple[str, str | None]], fillers: Mapping[str, str]) -> list[str]:
    """Literals and fillers in turn; a space before a slot belongs to its filler."""
    found = []
    for literal, slot in pieces:
        if slot is None:
            found.append(literal)
            continue
        spaced = literal.endswith(" ")
        found.append(literal[:-1] if spaced else literal)
        filler = fillers[slot]
        found.append(f" {filler.removeprefix(' ')}" if spaced else filler)
    return found


def _checked_names(pieces: Sequence[tuple[str, str | None]], slots: Mapping[str, Fillers]) -> list[str]:
    names = list(dict.fromkeys(slot for _, slot in pieces if slot is not None))
    if not names:
        raise PromptError("the template has no slot: write one in braces, as in 'When{A} and{B} met'")
    if missing := [name for name in names if name not in slots]:
        raise PromptError(f"slot {{{missing[0]}}} has no fillers: give {missing[0]}=[…]")
    if extra := [name for name in slots if name not in names]:
        raise PromptError(f"the template has no slot {{{extra[0]}}}: it has {', '.join(names)}")
    return names


def _pairs(differ: Iterable[Sequence[str]], slots: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for group in differ:
        named = [group] if isinstance(group, str) else list(group)
        if wrong := [name for name in named if name not in slots]:
            raise PromptError(f"differ names {wrong[0]!r}, which is no slot: slots are {', '.join(slots)}")
        if len(set(named)) < max(2, len(named)):
            raise PromptError(
                f"differ needs two or more different slots, as in ('A', 'B'), got {tuple(named)}"
            )
        found += [(a, b) for a, b in itertools.combinations(named, 2)]
    return tuple(dict.fromkeys(found))


def _words(fillers: Swapped) -> tuple[str, ...]:
    return tuple(fillers.words if isinstance(fillers, WordList) else fillers)  # type: ignore[arg-type]


def _check_fillers(slot: str, fillers: Swapped) -> None:
    """One line about a list that cannot be used."""
    if fillers is ALL or isinstance(fillers, WordList):
        return
    if isinstance(fillers, str) or not isinstance(fillers, Sequence):
        raise PromptError(f"the fillers of slot {slot} must be a list of words, a built-in list or ALL")
    if not fillers:
        raise PromptError(f"slot {slot} has an empty list: give at least two fillers")
    if wrong := [
        word for word in fillers if not (isinstance(word, str) and word.strip()) and type(word) is not int
    ]:
        raise PromptError(f"{wrong[0]!r} is no filler of slot {slot}: give words, as in ' Mary'")
    seen = set[object]()
    for word in fillers:
        key = word.strip() if isinstance(word, str) else word
        if key in seen:
            raise PromptError(f"{word!r} is twice in the list of slot {slot}: list it once")
        seen.add(key)
    if len(fillers) == 1:
        raise PromptError(f"slot {slot} never varies: write {fillers[0]!r} into the text in its place")


def _kept(slot: str, fillers: Fillers, placed: Placed) -> tuple[str, ...]:
    """The fillers of a slot: those that were given, or the words of a built-in list that are single tokens."""
    words = _words(fillers)
    if not isinstance(fillers, WordList):
        return words
    left = tuple(word for word in words if placed.single(slot, word))
    _check_left(slot, fillers, left)
    return left


def _check_left(slot: str, fillers: WordList, left: Sequence[object]) -> None:
    if len(left) < 2:
        raise PromptError(
            f"{len(left)} of the {len(fillers.words)} {fillers.name} are single tokens in the place of slot {slot}: "
            "give a list of words of your own"
        )
