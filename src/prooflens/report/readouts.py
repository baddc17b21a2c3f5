"""The picture of values inside the model: how far neurons, directions and features keep from their thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prooflens.report.bars import GUARANTEES, MOST_BARS, BarWords, Margin, draw_margins
from prooflens.report.source import RowSource
from prooflens.report.svg import Drawing, number

KINDS = ("neuron ", "feature ", "read(", "dla")
"""How queries about readouts begin."""


@dataclass(frozen=True)
class Readings:
    """The readouts of one run: their distances from thresholds, clean and bounded, the smallest clean one first."""

    region: str
    eps: float | None
    guarantee: str
    bars: tuple[Margin, ...]
    left_out: int

    @property
    def name(self) -> str:
        """How a list names it."""
        return self.region if self.eps is None else f"ε = {number(self.eps)}"


def readings(sources: Sequence[RowSource]) -> tuple[Readings, ...]:
    """Return the readouts of runs, one entry for each run that has some.

    Args:
        sources: the runs.
    """
    found = []
    for source in sources:
        rows: list[dict[str, Any]] = source.table.drop_columns(["tokens"]).to_pylist()
        kept = [row for row in rows if row["query"].startswith(KINDS) and row["clean"] is not None]
        kept.sort(key=lambda row: float(row["clean"]))
        if kept:
            names = ("query", "verdict", "clean", "lower", "upper")
            bars = tuple(
                Margin(row["query"], **{name: row[name] for name in names}) for row in kept[:MOST_BARS]
            )
            estimated = any(row["guarantee"] == "estimated" for row in kept)
            guarantee = "estimated" if estimated else "proved"
            left_out = len(kept) - len(bars)
            found.append(Readings(source.region, source.eps, guarantee, bars, left_out))
    return tuple(found)


def readout_bars(read: Readings) -> Drawing:
    """One bar per readout: its distance from the threshold on the whole region; left of 0 the claim is broken.

    Args:
        read: the readouts.
    """
    counts = {word: sum(bar.verdict == word for bar in read.bars) for word in ("holds", "fails", "unknown")}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    note = f"{read.left_out} more, farther from their thresholds, are in the table" if read.left_out else ""
    words = BarWords(
        "Distance of values inside the model from their thresholds",
        f"{told} on {read.name}" if told else read.name,
        "from its threshold on the clean input",
        f"distance from the threshold, positive where the claim holds ({GUARANTEES[read.guarantee]})",
        note,
    )
    return draw_margins(read.bars, words, left=260.0)
