"""Bars: what bounds allow of several numbers on a region, each beside its clean value and 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prooflens.report.svg import Drawing, hit, number, visible

MOST_BARS = 40
"""Bars of one picture."""

GUARANTEES = {
    "proved": "proved",
    "witness": "proved",
    "estimated": "estimated, not proved",
    "none": "nothing is known",
}
"""What the axis says of bounds."""


@dataclass(frozen=True)
class Bar:
    """A number on a region: its name, its clean value and its bounds; None: no bound.

    Attributes:
        text: what it is called.
        query: the query that it is about.
        verdict: how that ended.
        clean: its value on the clean input.
        lower: its lower bound.
        upper: its upper bound.
    """

    text: str
    query: str
    verdict: str
    clean: float
    lower: float | None
    upper: float | None


@dataclass(frozen=True)
class BarWords:
    """What stands around bars.

    Attributes:
        label: what the picture shows, for those who do not see it.
        title: above the bars.
        clean: what a tip says of the clean value, as in `behind on the clean input`.
        axis: beneath them.
        note: beneath that.
    """

    label: str
    title: str
    clean: str
    axis: str
    note: str = ""


def draw_bars(bars: Sequence[Bar], words: BarWords, left: float = 130.0) -> Drawing:
    """One bar per number, from the smallest to the largest value that bounds allow; the tick is the clean one.

    Args:
        bars: the numbers.
        words: what stands around them.
        left: how much room their names have.
    """
    right, top, step = left + 430.0, 40.0, 24.0
    bottom = top + step * len(bars)
    drawing = Drawing(right + 200.0, bottom + 62.0, words.label)
    most = 4.0 * max((abs(bar.clean) for bar in bars), default=0.0)
    ends = [value for bar in bars for value in (bar.clean, bar.lower, bar.upper) if value is not None]
    known = [value for value in ends if math.isfinite(value) and abs(value) <= most]
    low, high = min([0.0, *known]), max([1e-9, *known])
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return left + (min(max(value, low), high) - low) / (high - low) * (right - left)

    drawing.text(left, 18.0, words.title, "", "start")
    for i, bar in enumerate(bars):
        y = top + step * (i + 0.5)
        tip = (
            f"“{cut(bar.text, 24)}”: {number(bar.clean)} {words.clean}, between {number(bar.lower, 'unknown')} and "
            f"{number(bar.upper, 'unknown')} on the region; {bar.verdict}"
        )
        drawing.open(kind="hit", **hit(tip, query=bar.query))
        drawing.rect(4.0, y - step / 2, drawing.width - 8.0, step, fill="transparent")
        drawing.text(left - 10.0, y + 4.0, cut(bar.text, int(left / 7.5)), "small", "end")
        if bar.lower is None or bar.upper is None:
            drawing.rect(left, y - 5.0, right - left, 10.0, fill="url(#hatch)")
            label = "no bounds"
        else:
            start, stop = place(bar.lower), place(bar.upper)
            drawing.rect(start, y - 5.0, max(2.0, stop - start), 10.0, kind=bar.verdict)
            label = f"{number(bar.lower)} … {number(bar.upper)}"
        drawing.line(place(bar.clean), y - 8.0, place(bar.clean), y + 8.0, "tick")
        drawing.text(right + 12.0, y + 4.0, label, "small", "start")
        drawing.close()
    drawing.line(place(0.0), top, place(0.0), bottom, "zero")
    drawing.add("path", None, kind="axis", d=f"M{left},{bottom}H{right}")
    for share in (0.0, 0.5, 1.0):
        value = low + margin + share * (high - low - 2.0 * margin)
        drawing.text(place(value), bottom + 16.0, number(value), "small quiet")
    drawing.text((left + right) / 2, bottom + 36.0, words.axis, "small quiet")
    drawing.text((left + right) / 2, bottom + 54.0, cut(words.note, 110), "small quiet")
    return drawing


def cut(text: str, most: int) -> str:
    """Return a text of at most so many characters, marks written out.

    Args:
        text: what is said.
        most: how many characters there is room for.
    """
    shown = visible(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
