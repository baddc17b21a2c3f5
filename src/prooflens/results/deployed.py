"""What is measured beside a proof: how far a margin moves when the model runs in the precision it is deployed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

DEPLOYED = pa.schema(
    [
        ("deployed", pa.string()),
        ("difference", pa.float64()),
        ("difference_centre", pa.float64()),
        ("difference_worst", pa.float64()),
        ("difference_samples", pa.float64()),
    ]
)
"""Columns that verdicts have where `deployed` was asked for; they are measured, not proved."""


@dataclass(frozen=True)
class Difference:
    """|margin in float64 − margin in another precision|, measured at points of the region; it bounds nothing.

    Attributes:
        deployed: the precision, and who ran the model in it.
        centre: at the clean input; None for a claim that the mask alone decides, which has no margin.
        worst: at the point that breaks the claim, else at the corner where its weakest bound is nearly attained; None
            if neither is known.
        samples: the largest at points drawn from the region; None if none could be drawn.
    """

    deployed: str
    centre: float | None
    worst: float | None
    samples: float | None

    @property
    def largest(self) -> float | None:
        """The largest of all that were measured; None if none was."""
        found = [value for value in (self.centre, self.samples, self.worst) if value is not None]
        return max(found, default=None)

    def row(self) -> dict[str, object]:
        """Return the columns of `DEPLOYED`."""
        values = (self.deployed, self.largest, self.centre, self.worst, self.samples)
        return dict(zip(DEPLOYED.names, values, strict=True))


@dataclass(frozen=True)
class FamilyDifference:
    """|margin in float64 − margin in another precision| at members of a family; it bounds nothing.

    Attributes:
        deployed: the precision, and who ran the model in it.
        nearest: how many of the members nearest to zero were run.
        at_nearest: the largest difference there; None if no margin is a number.
        drawn: how many members were drawn by chance.
        at_drawn: the largest difference there, likewise.
        turned: at how many of all these the margin has another sign.
    """

    deployed: str
    nearest: int
    at_nearest: float | None
    drawn: int
    at_drawn: float | None
    turned: int

    def __str__(self) -> str:
        near, far = (
            "by nothing" if value is None else f"by at most {value:.3g}"
            for value in (self.at_nearest, self.at_drawn)
        )
        return (
            f"measured, not proved, in {self.deployed}: margins of the {self.nearest} members nearest to zero differ "
            f"{near} from those in float64, of {self.drawn} drawn by chance {far}; {self.turned} of them change sign"
        )


def largest_of(parts: Sequence[Difference]) -> Difference | None:
    """Return the largest differences of the parts of a conjunction: the smallest of several margins moves no further.

    Args:
        parts: the difference of each part; empty where none was measured.
    """
    if not parts:
        return None
    who = ", ".join(dict.fromkeys(part.deployed for part in parts))
    columns = zip(*((part.centre, part.worst, part.samples) for part in parts), strict=True)
    return Difference(who, *(max((v for v in column if v is not None), default=None) for column in columns))


def with_differences(table: pa.Table, found: Sequence[Difference | None]) -> pa.Table:
    """Return verdicts with the columns of `DEPLOYED`, if any difference was measured; else as they are.

    Args:
        table: the rows.
        found: the difference of each row.
    """
    if all(one is None for one in found):
        return table
    rows = [{} if one is None else one.row() for one in found]
    for field in DEPLOYED:
        table = table.append_column(field, pa.array([row.get(field.name) for row in rows], field.type))
    return table


def said_of_precision(table: pa.Table) -> str | None:
    """Say in a sentence how the proved margins compare with the measured differences; None if none were measured.

    Args:
        table: verdicts with the columns of `DEPLOYED`, or without them.
    """
    if "difference" not in table.column_names:
        return None
    names = ("deployed", "difference", "verdict", "lower", "guarantee")
    rows = [row for row in table.select(list(names)).to_pylist() if row["difference"] is not None]
    if not rows:
        return None
    proved = [row for row in rows if row["guarantee"] == "proved" and row["verdict"] == "holds"]
    ratios = [
        row["lower"] / row["difference"] if row["difference"] > 0.0 else float("inf")
        for row in proved
        if row["lower"] is not None
    ]
    largest = max(row["difference"] for row in rows)
    start = f"measured, not proved, in {rows[0]['deployed']}: margins differ by at most {largest:.3g}"
    return f"{start} from those in float64{_compared(ratios)}"


def said_of_radii(table: pa.Table) -> str | None:
    """Say in a sentence how far margins were measured to move on the balls of certified radii; None if not measured.

    Args:
        table: radii with the columns of `DEPLOYED`, or without them.
    """
    if "difference" not in table.column_names:
        return None
    names = ("deployed", "difference", "clean")
    rows = [row for row in table.select(list(names)).to_pylist() if row["difference"] is not None]
    if not rows:
        return None
    largest = max(row["difference"] for row in rows)
    small = sum(row["clean"] is not None and row["clean"] <= row["difference"] for row in rows)
    which = f"{small} of {len(rows)} clean margins are no larger" if small else "every clean margin is larger"
    return (
        f"measured, not proved, in {rows[0]['deployed']}: margins differ by at most {largest:.3g} from those in "
        f"float64 on the balls of certified radii; {which} than the difference of its row; at the end "
        "of a radius the proved margin is near 0: certify a smaller ε to compare it"
    )


def _compared(ratios: Sequence[float]) -> str:
    """How many times the difference proved margins are."""
    if not ratios:
        return ""
    least = min(ratios)
    if least == float("inf"):
        return "; no difference was seen where a margin is proved"
    if least >= 1.0:
        which = "the proved margin is" if len(ratios) == 1 else "every proved margin is at least"
        return f"; {which} {math.floor(least):,} times the difference of its row"
    small = sum(ratio < 1.0 for ratio in ratios)
    return f"; {small} of {len(ratios)} proved margins are smaller than the difference of their row"
