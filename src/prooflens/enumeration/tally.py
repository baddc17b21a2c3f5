"""Counts of a claim over members as they come: what memory it takes does not grow with the family."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_PAIRS = 2**22
"""Cells of the table of two slots; larger tables are not kept."""

BINS = 64
"""Bins of the histogram on each side of 0."""

Counts = NDArray[np.int64]
Margins = NDArray[np.float64]


@dataclass(eq=False)
class Listed:
    """Members that are remembered.

    Attributes:
        margins: one per member.
        held: whether it satisfies the claim.
        members: its shape and fillers, by number, shape [n, 1 + slots].
    """

    margins: Margins
    held: NDArray[np.bool_]
    members: Counts

    @classmethod
    def empty(cls, slots: int) -> Listed:
        """Nobody yet.

        Args:
            slots: how many slots the family has.
        """
        return cls(np.empty(0), np.empty(0, bool), np.empty((0, 1 + slots), np.int64))

    def with_more(self, other: Listed) -> Listed:
        """These and some more.

        Args:
            other: members that are added behind these.
        """
        return Listed(*(np.concatenate((getattr(self, name), getattr(other, name))) for name in vars(self)))

    def take(self, places: Any) -> Listed:
        """Some of these.

        Args:
            places: which of them, as an index of numpy.
        """
        return Listed(self.margins[places], self.held[places], self.members[places])

    def first(self, count: int, order: Margins) -> Listed:
        """The first so many by an order.

        Args:
            count: how many.
            order: a number for each; the smallest come first.
        """
        return self.take(np.argsort(order, kind="stable")[:count])


@dataclass(eq=False)
class Histogram:
    """How many margins lie in each bin [k·width, (k+1)·width); bins double when a margin lies outside.

    Attributes:
        exponent: log2 of the width.
        counts: of bins −64 … 63.
    """

    exponent: int = -40
    counts: Counts = field(default_factory=lambda: np.zeros(2 * BINS, np.int64))

    def add(self, margins: Margins) -> None:
        """Count margins; infinite ones, which the mask decides, are left out.

        Args:
            margins: the margins of some members.
        """
        margins = margins[np.isfinite(margins)]
        if not len(margins):
            return
        while np.abs(margins).max() >= BINS * 2.0**self.exponent:
            self._double()
        bins = np.floor(np.ldexp(margins, -self.exponent)).astype(np.int64) + BINS
        self.counts += np.bincount(bins.clip(0, 2 * BINS - 1), minlength=2 * BINS)

    def merge(self, other: Histogram) -> None:
        """Add another's counts.

        Args:
            other: the histogram of other members.
        """
        copy = Histogram(other.exponent, other.counts.copy())
        while self.exponent < copy.exponent:
            self._double()
        while copy.exponent < self.exponent:
            copy._double()
        self.counts += copy.counts

    def _double(self) -> None:
        joined = self.counts.reshape(-1, 2).sum(1)
        self.counts = np.concatenate((np.zeros(BINS // 2, np.int64), joined, np.zeros(BINS // 2, np.int64)))
        self.exponent += 1


@dataclass(eq=False)
class Tally:
    """One claim over the members that were run so far.

    Attributes:
        sizes: how many fillers every slot has.
        keep: how many failures are remembered; all are counted.
        close: how many of the members nearest to zero, and of the worst, are remembered.
        asked: how many members were run.
        held: how many satisfy the claim.
        failures: those that do not, the first `keep` of them.
        worst: the members with the smallest margins.
        nearest: the members whose margins are nearest to zero.
        by_slot: for every slot, members that satisfy the claim and members that were run, by filler.
        by_pair: the same for every pair of slots, where the table is not too large.
        histogram: of the margins.
    """

    sizes: Mapping[str, int]
    keep: int
    close: int
    asked: int = 0
    held: int = 0
    failures: Listed = field(init=False)
    worst: Listed = field(init=False)
    nearest: Listed = field(init=False)
    by_slot: dict[str, Counts] = field(init=False)
    by_pair: dict[tuple[str, str], Counts] = field(init=False)
    histogram: Histogram = field(default_factory=Histogram)

    def __post_init__(self) -> None:
        self.failures, self.worst, self.nearest = (Listed.empty(len(self.sizes)) for _ in range(3))
        self.by_slot = {slot: np.zeros((2, size), np.int64) for slot, size in self.sizes.items()}
        pairs = itertools.combinations(self.sizes, 2)
        self.by_pair = {
            (a, b): np.zeros((2, self.sizes[a], self.sizes[b]), np.int64)
            for a, b in pairs
            if self.sizes[a] * self.sizes[b] <= MOST_PAIRS
        }

    def add(self, margins: Margins, held: NDArray[np.bool_], members: Counts) -> None:
        """Count some members.

        Args:
            margins: of every member.
            held: whether it satisfies the claim.
            members: its shape and its fillers by number, shape [n, 1 + slots].
        """
        self.asked += len(margins)
        self.held += int(held.sum())
        self.histogram.add(margins)
        slots = list(self.sizes)
        fillers = dict(zip(slots, members[:, 1:].T, strict=True))
        for slot, table in self.by_slot.items():
            _count(table, fillers[slot], held)
        for (a, b), table in self.by_pair.items():
            _count(table.reshape(2, -1), fillers[a] * self.sizes[b] + fillers[b], held)
        self._remember(Listed(margins, held, members))

    def _remember(self, seen: Listed) -> None:
        """Keep failures, the worst and the nearest to zero among members that were counted."""
        room = max(0, self.keep - len(self.failures.margins))
        self.failures = self.failures.with_more(seen.take(np.flatnonzero(~seen.held)[:room]))
        worst = self.worst.with_more(seen.first(self.close, seen.margins))
        self.worst = worst.first(self.close, worst.margins)
        near = self.nearest.with_more(seen.first(self.close, np.abs(seen.margins)))
        self.nearest = near.first(self.close, np.abs(near.margins))

    def merge(self, other: Tally) -> None:
        """Add the counts of another part of the family.

        Args:
            other: the counts of that part.
        """
        self.asked += other.asked
        self.held += other.held
        self.histogram.merge(other.histogram)
        for slot, table in other.by_slot.items():
            self.by_slot[slot] += table
        for pair, table in other.by_pair.items():
            self.by_pair[pair] += table
        room = max(0, self.keep - len(self.failures.margins))
        self.failures = self.failures.with_more(other.failures.take(slice(0, room)))
        worst, near = self.worst.with_more(other.worst), self.nearest.with_more(other.nearest)
        self.worst = worst.first(self.close, worst.margins)
        self.nearest = near.first(self.close, np.abs(near.margins))

    def to_arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file.

        Args:
            name: what the names of the arrays begin with.
        """
        found: dict[str, NDArray[Any]] = {
            f"{name}/counts": np.array([self.asked, self.held, self.histogram.exponent]),
            f"{name}/histogram": self.histogram.counts,
        }
        for kind in ("failures", "worst", "nearest"):
            listed: Listed = getattr(self, kind)
            found |= {f"{name}/{kind}/{part}": held for part, held in vars(listed).items()}
        for slot, table in self.by_slot.items():
            found[f"{name}/slot/{slot}"] = table
        for (a, b), table in self.by_pair.items():
            found[f"{name}/pair/{a}/{b}"] = table
        return found

    def read_arrays(self, name: str, held: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `to_arrays` wrote.

        Args:
            name: the name that it was written under.
            held: the arrays by name.
        """
        self.asked, self.held, exponent = map(int, held[f"{name}/counts"])
        self.histogram = Histogram(exponent, held[f"{name}/histogram"])
        for kind in ("failures", "worst", "nearest"):
            parts = (held[f"{name}/{kind}/{part}"] for part in ("margins", "held", "members"))
            setattr(self, kind, Listed(*parts))
        self.by_slot = {slot: held[f"{name}/slot/{slot}"] for slot in self.by_slot}
        self.by_pair = {(a, b): held[f"{name}/pair/{a}/{b}"] for a, b in self.by_pair}


def _count(table: Counts, places: Counts, held: NDArray[np.bool_]) -> None:
    size = table.shape[1]
    table[0] += np.bincount(places[held], minlength=size)
    table[1] += np.bincount(places, minlength=size)
