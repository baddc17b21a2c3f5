"""What `way` returns: how far along the way from one prompt to another claims are proved, and where they break."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from prooflens.durations import asked_time, written_time
from prooflens.notebook import picture_of
from prooflens.queries import Claim
from prooflens.results.frame import Subject


@dataclass(frozen=True)
class Stretch:
    """A piece of the way, by its shares, and the proved bounds of the claim's margin on it.

    Attributes:
        start: where it starts, as a share of the way.
        end: where it ends.
        lower: a proved lower bound of the margin.
        upper: a proved upper bound.
    """

    start: float
    end: float
    lower: float
    upper: float


@dataclass(frozen=True, eq=False)
class Way:
    """One claim along the way.

    Attributes:
        claim: what is claimed.
        pieces: the pieces that the way was cut into, in order.
        shares: points of the way at which the model was run.
        margins: the claim's margin there.
        breaks: the smallest share at which the claim was seen to break; None if it was not.
        nearest: for every token that moves, its position and the vocabulary's nearest token to it at the break; empty
            where nothing breaks, or the model reads no text.
    """

    claim: Claim
    pieces: Sequence[Stretch]
    shares: Sequence[float]
    margins: Sequence[float]
    breaks: float | None
    nearest: tuple[tuple[int, str], ...] = ()

    @property
    def proved(self) -> float:
        """The share of the way, from its start on, on which the claim is proved."""
        found = 0.0
        for piece in self.pieces:
            if piece.lower <= 0.0:
                break
            found = piece.end
        return found

    @property
    def covered(self) -> float:
        """The share of the whole way on which it is proved, wherever that is."""
        return sum(piece.end - piece.start for piece in self.pieces if piece.lower > 0.0)

    @property
    def verdict(self) -> str:
        """`holds` on the whole way, `fails` if a point breaks it, else `unknown`."""
        if self.breaks is not None:
            return "fails"
        return "holds" if self.proved == 1.0 else "unknown"

    def to_dict(self) -> dict[str, Any]:
        """The row as plain numbers and texts."""
        return {
            "claim": str(self.claim),
            "verdict": self.verdict,
            "proved": self.proved,
            "covered": self.covered,
            "breaks": self.breaks,
            "nearest": [list(pair) for pair in self.nearest],
            "pieces": [[p.start, p.end, p.lower, p.upper] for p in self.pieces],
            "attained": [list(self.shares), list(self.margins)],
        }


@dataclass(frozen=True, eq=False)
class Ways:
    """All claims along one way.

    Attributes:
        rows: one per claim.
        subject: the model, the prompt at the start, and the segment.
        walks: how many pieces were walked.
        ended: the seconds that were allowed, if they ended before all pieces were as small as asked; else None.
    """

    rows: Sequence[Way]
    subject: Subject
    walks: int
    ended: float | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Way]:
        return iter(self.rows)

    def __getitem__(self, number: int) -> Way:
        return self.rows[number]

    @property
    def advice(self) -> str | None:
        """What was left open for want of time, and which option asks on; None if nothing was."""
        if self.ended is None:
            return None
        pieces = f"{self.walks} {'piece' if self.walks == 1 else 'pieces'}"
        more = asked_time(2.0 * self.ended)
        return (
            f"the time of {written_time(self.ended)} ended after {pieces}, the others are as open as what they are cut "
            f'from; to ask on: --time {more} (in Python time="{more}")'
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and texts."""
        return {
            "model": self.subject.model,
            "model_sha256": self.subject.model_sha256,
            "tokens": list(self.subject.tokens),
            "region": self.subject.region.label,
            "walks": self.walks,
            "advice": self.advice,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        lines = [f"{'claim':<28} {'verdict':<8} {'proved':>8} {'breaks':>8}"]
        for row in self.rows:
            breaks = "" if row.breaks is None else f"{100 * row.breaks:.2f} %"
            lines.append(f"{str(row.claim)[:28]:<28} {row.verdict:<8} {100 * row.proved:>6.1f} % {breaks:>8}")
        return "\n".join([*lines, *([] if self.advice is None else [self.advice])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The claims as text, under a picture of the first, for notebooks."""
        return f"{picture_of(self)}<pre>{escape(str(self))}</pre>"
