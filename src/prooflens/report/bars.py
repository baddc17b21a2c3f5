"""Intervals as bars on one axis, a tick for the clean value on each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prooflens.report.svg import Drawing, hit, number, visible


@dataclass(frozen=True)
class Bar:
    """One interval.

    Attributes:
        label: what stands in front of it.
        tip: what is said of it on a closer look.
        query: the rows of the table that it stands for.
        lower: its lower end; None, or infinite, if there is none.
        upper: its upper end, likewise.
        tick: the value that is marked on it; None for no mark.
        kind: the class that colours it.
        word: what stands behind its ends.
    """

    label: str
    tip: str
    query: str
    lower: float | None
    upper: float | None
    tick: float | None
    kind: str
    word: str = ""


RIGHT, TOP, STEP = 560.0, 40.0, 24.0

MOST_BARS = 40
"""Bars of one picture."""

GUARANTEES = {
    "proved": "proved",
    "witness": "proved",
    "estimated": "estimated, not proved",
    "none": "nothing is known",
}
"""What the axis says of bounds."""


def draw_bars(
    drawing_label: str,
    title: str,
    bars: Sequence[Bar],
    below: Sequence[str],
    *,
    left: float = 130.0,
    letters: int = 16,
    most: float = math.inf,
    marks: Sequence[float] = (),
) -> Drawing:
    """Draw intervals one below the other; one without ends is hatched.

    Args:
        drawing_label: what the picture is called for readers who do not see it.
        title: what stands above the bars.
        bars: the intervals.
        below: lines beneath the axis.
        left: where the axis begins; labels stand in front of it.
        letters: how many letters of a label are shown.
        most: the axis is made for ends and ticks up to this size; longer bars are cut at its ends.
        marks: values at which a dashed line goes through all bars, besides 0.
    """
    bottom = TOP + STEP * len(bars)
    drawing = Drawing(760.0, bottom + 26.0 + 18.0 * len(below), drawing_label)
    values = [v for bar in bars for v in (bar.tick, bar.lower, bar.upper) if v is not None]
    known = [v for v in (*values, *marks) if math.isfinite(v) and abs(v) <= most]
    low, high = min([0.0, *known]), max([1e-9, *known])
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return left + (min(max(value, low), high) - low) / (high - low) * (RIGHT - left)

    drawing.text(left, 18.0, title, "", "start")
    for i, bar in enumerate(bars):
        y = TOP + STEP * (i + 0.5)
        drawing.open(kind="hit", **hit(bar.tip, query=bar.query))
        drawing.rect(4.0, y - STEP / 2, 752.0, STEP, fill="transparent")
        drawing.text(left - 10.0, y + 4.0, cut(bar.label, letters), "small", "end")
        ends = [end for end in (bar.lower, bar.upper) if end is not None and math.isfinite(end)]
        if len(ends) < 2:
            drawing.rect(left, y - 5.0, RIGHT - left, 10.0, fill="url(#hatch)")
            said = "no bounds"
        else:
            start, stop = map(place, ends)
            drawing.rect(start, y - 5.0, max(2.0, stop - start), 10.0, kind=bar.kind)
            said = " … ".join(map(number, ends))
        if bar.tick is not None:
            drawing.line(place(bar.tick), y - 8.0, place(bar.tick), y + 8.0, "tick")
        shown = f"{said} · {bar.word}" if bar.word else said
        drawing.text(RIGHT + 12.0, y + 4.0, shown, "small", "start")
        drawing.close()
    for value in dict.fromkeys((0.0, *marks)):
        drawing.line(place(value), TOP, place(value), bottom, "zero")
    drawing.add("path", None, kind="axis", d=f"M{left},{bottom}H{RIGHT}")
    for share in (0.0, 0.5, 1.0):
        value = low + margin + share * (high - low - 2.0 * margin)
        drawing.text(place(value), bottom + 16.0, number(value), "small quiet")
    for i, line in enumerate(below):
        drawing.text((left + RIGHT) / 2, bottom + 36.0 + 18.0 * i, cut(line, 110), "small quiet")
    return drawing


def cut(text: str, most: int) -> str:
    """A text without marks, and no longer than so many letters.

    Args:
        text: the text.
        most: how many letters there is room for.
    """
    shown = visible(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


@dataclass(frozen=True)
class Margin:
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


def draw_margins(margins: Sequence[Margin], words: BarWords, left: float = 130.0) -> Drawing:
    """Draw one bar per number, from the smallest to the largest value that bounds allow; the tick is the clean one.

    Args:
        margins: the numbers.
        words: what stands around them.
        left: how much room their names have.
    """
    bars = []
    for margin in margins:
        tip = (
            f"“{cut(margin.text, 24)}”: {number(margin.clean)} {words.clean}, between "
            f"{number(margin.lower, 'unknown')} and {number(margin.upper, 'unknown')} on the region; {margin.verdict}"
        )
        ends = margin.lower, margin.upper
        bars.append(Bar(margin.text, tip, margin.query, *ends, margin.clean, margin.verdict))
    most = 4.0 * max((abs(margin.clean) for margin in margins), default=0.0)
    below = [words.axis, words.note]
    return draw_bars(words.label, words.title, bars, below, left=left, letters=int(left / 7.5), most=most)
