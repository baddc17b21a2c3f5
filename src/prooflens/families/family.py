"""A family of prompts in a model: its members as tokens, listed, counted and drawn by chance; nothing is run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prooflens.errors import PromptError
from prooflens.families.shapes import Numbers, Shape
from prooflens.models import Prompt, Roles, Transformer


@dataclass(frozen=True)
class Member:
    """One prompt of a family.

    Attributes:
        text: the prompt as a text.
        ids: its tokens.
        fillers: what stands in every slot.
        roles: the positions of every slot, occurrence by occurrence.
    """

    text: str
    ids: tuple[int, ...]
    fillers: Mapping[str, str]
    roles: Roles


@dataclass(frozen=True, eq=False)
class Family:
    """Every prompt of a template, of swaps or of a list, as tokens of one model.

    Attributes:
        model: the model.
        label: the family in one line.
        words: the fillers of every slot: texts, or tokens where the slot takes the whole vocabulary.
        differ: pairs of slots whose fillers must not be the same.
        shapes: the members by their token lengths.
        spell: the text of a member from its fillers, by slot.

    Example:
        >>> import prooflens as pl
        >>> family = pl.Prompts([[0, 1, 2], [2, 1, 0], [3, 3]]).of(tiny())  # doctest: +SKIP
        >>> len(family), [shape.n_tokens for shape in family.shapes]  # doctest: +SKIP
        (3, [2, 3])
    """

    model: Transformer
    label: str
    words: Mapping[str, Sequence[str | int]]
    differ: tuple[tuple[str, str], ...]
    shapes: tuple[Shape, ...]
    spell: Callable[[Mapping[str, str], Sequence[int]], str]

    def __post_init__(self) -> None:
        if not self.size:
            raise PromptError(f"the family {self.label} has no member: slots that differ need other fillers")

    @cached_property
    def size(self) -> int:
        """How many members there are, exactly; `len` says the same, up to the largest that Python allows there."""
        return sum(shape.members for shape in self.shapes)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Member]:
        for shape in self.shapes:
            for _, digits in shape.blocks(0, 1024):
                yield from self.members(shape, digits)

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the slots."""
        return tuple(self.words)

    @property
    def lengths(self) -> dict[int, int]:
        """How many members have each number of tokens."""
        found: dict[int, int] = {}
        for shape in self.shapes:
            found[shape.n_tokens] = found.get(shape.n_tokens, 0) + shape.members
        return dict(sorted(found.items()))

    def filler(self, slot: str, number: int) -> str:
        """The text of a slot's filler.

        Args:
            slot: the slot.
            number: which of its fillers, from 0.
        """
        word = self.words[slot][number]
        return word if isinstance(word, str) else self.token(word)

    def token(self, index: int) -> str:
        """The text of a token, or its number where the model has no tokenizer.

        Args:
            index: the number of the token.
        """
        return f"#{index}" if self.model.tokenizer is None else self.model.tokenizer.token(index)

    def members(self, shape: Shape, digits: Numbers) -> Iterator[Member]:
        """The prompts of some combinations of a shape's fillers.

        Args:
            shape: the shape.
            digits: which filler every slot has, one row for each member.
        """
        for row, ids in zip(digits.tolist(), shape.ids_of(digits).tolist(), strict=True):
            chosen = zip(shape.slots, row, strict=True)
            fillers = {slot: self.filler(slot, int(shape.fillers[slot][digit])) for slot, digit in chosen}
            yield Member(self.spell(fillers, ids), tuple(ids), fillers, shape.roles)

    def draw(self, n: int, seed: int = 0) -> list[tuple[Shape, Numbers]]:
        """So many members by chance, each as likely as any other and drawn anew: combinations by shape.

        Args:
            n: how many.
            seed: of the random numbers.
        """
        if n < 1:
            raise PromptError(f"a sample needs at least one member, got {n}")
        chance = np.random.default_rng(seed)
        shares = np.array([shape.members / self.size for shape in self.shapes])
        counts = chance.multinomial(n, shares / shares.sum())
        found = []
        for shape, wanted in zip(self.shapes, counts.tolist(), strict=True):
            parts: list[Numbers] = []
            while (missing := wanted - sum(map(len, parts))) > 0:
                digits = np.stack(
                    [chance.integers(0, size, 2 * missing + 16) for size in shape.sizes], axis=1
                )
                parts.append(digits[shape.keep(digits)][:missing])
            if wanted:
                digits = np.concatenate(parts)
                found.append((shape, digits[np.lexsort(digits.T[::-1])]))
        return found

    def sample(self, n: int, seed: int = 0) -> list[Member]:
        """So many members by chance.

        Args:
            n: how many; one member may be drawn twice.
            seed: of the random numbers.
        """
        return [member for shape, digits in self.draw(n, seed) for member in self.members(shape, digits)]

    def prompt(self, member: Member) -> Prompt:
        """A member as a prompt of the model, with roles: `certify` and the others read queries like `top1={A}` there.

        Args:
            member: one of this family's.
        """
        x = self.model.embed(torch.tensor(member.ids))
        return Prompt(x, tuple(self.token(i) for i in member.ids), member.ids, member.text, member.roles)

    def to_dict(self) -> dict[str, Any]:
        """What a run keeps of it: a reader can list the members without a tokenizer."""
        return {
            "label": self.label,
            "members": self.size,
            "slots": {slot: list(words) for slot, words in self.words.items()},
            "differ": [list(pair) for pair in self.differ],
            "shapes": [
                {
                    "ids": shape.ids.tolist(),
                    "places": {slot: [list(span) for span in spans] for slot, spans in shape.places.items()},
                    "members": shape.members,
                }
                for shape in self.shapes
            ],
        }
