"""Which tokens stand where: the prompts that are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from prooflens.errors import QueryError


@dataclass(frozen=True)
class Slot:
    """Positions that hold one and the same token.

    Attributes:
        positions: where the token stands, in order.
        tokens: the tokens that it may be; None for the whole vocabulary.
    """

    positions: tuple[int, ...]
    tokens: tuple[int, ...] | None = None

    def size(self, vocabulary: int) -> int:
        """Return how many tokens the slot may hold."""
        return vocabulary if self.tokens is None else len(self.tokens)


@dataclass(frozen=True)
class Slots:
    """All prompts of a length: each slot holds any of its tokens, whatever the others hold.

    Attributes:
        length: n, the number of tokens of a prompt.
        vocabulary: V, the number of tokens.
        slots: every position stands in exactly one of them.

    Example:
        >>> Slots.of(3, vocabulary=10, same=[(0, 2)]).prompts
        100
    """

    length: int
    vocabulary: int
    slots: tuple[Slot, ...]

    @classmethod
    def of(
        cls,
        length: int,
        vocabulary: int,
        same: Sequence[Sequence[int]] = (),
        choices: Mapping[int, Sequence[int]] | None = None,
    ) -> Slots:
        """Make the slots of all prompts of a length, under conditions.

        Args:
            length: n, the number of tokens.
            vocabulary: V, the number of tokens that there are.
            same: groups of positions that hold one token, as in [(0, 5)]; negative positions count from the end.
            choices: the tokens that a position may hold, by position; others hold any token. A list holds for every
                position of its slot.

        Raises:
            QueryError: if a position does not exist, stands in two groups, or a list is empty or holds no token ids.
        """
        if length < 1:
            raise QueryError(f"prompts have at least 1 token, not {length}")
        groups: list[tuple[int, ...]] = []
        taken: set[int] = set()
        for group in same:
            places = tuple(sorted({place(position, length) for position in group}))
            if len(places) < 2:
                raise QueryError(f"same={list(group)}: name at least two different positions")
            if taken & set(places):
                raise QueryError(
                    f"position {min(taken & set(places))} stands in two groups of `same`: join them"
                )
            taken |= set(places)
            groups.append(places)
        groups += [(position,) for position in range(length) if position not in taken]
        lists: dict[tuple[int, ...], tuple[int, ...]] = {}
        for position, tokens in (choices or {}).items():
            where = place(position, length)
            owner = next(places for places in groups if where in places)
            if owner in lists:
                raise QueryError(f"position {where} has two lists of tokens: give one")
            lists[owner] = _checked(tokens, where, vocabulary)
        return cls(length, vocabulary, tuple(Slot(places, lists.get(places)) for places in sorted(groups)))

    @property
    def prompts(self) -> int:
        """How many prompts there are."""
        return prod(slot.size(self.vocabulary) for slot in self.slots)

    def slot_of(self, position: int) -> Slot:
        """Return the slot that a position stands in."""
        return next(slot for slot in self.slots if position in slot.positions)


def place(position: int, length: int) -> int:
    """Return a position counted from 0, or raise an error that names the positions there are."""
    if not -length <= position < length:
        raise QueryError(f"prompts of {length} tokens have positions 0 … {length - 1}, not {position}")
    return position % length


def _checked(tokens: Sequence[int], position: int, vocabulary: int) -> tuple[int, ...]:
    if not tokens:
        raise QueryError(f"the list of tokens at position {position} is empty: give at least one token id")
    if len(set(tokens)) < len(tokens):
        raise QueryError(f"the list of tokens at position {position} names a token twice")
    if wrong := [t for t in tokens if not 0 <= t < vocabulary]:
        raise QueryError(f"{wrong[0]} is no token id: they lie in 0 … {vocabulary - 1}")
    return tuple(tokens)
