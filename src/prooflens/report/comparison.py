"""Tightness against time: one mark per engine of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prooflens.report.svg import Drawing, number

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640.0, 400.0, 70.0, 110.0, 20.0, 50.0


def tightness_plot(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """An SVG file: seconds to the right, width over the attained width upwards, both logarithmic.

    Engines without a width or a time are left out. Proved engines are full marks, others open ones.

    Args:
        rows: what was measured of every engine.
        title: what stands above the picture.
    """
    points = [row for row in rows if row["width"] and row["ms"]]
    made = Drawing(WIDTH, HEIGHT, title)
    if not points:
        made.text(WIDTH / 2, HEIGHT / 2, "no engine bounded everything")
        return made.svg(alone=True)
    across = _Axis([row["ms"] / 1e3 for row in points], LEFT, WIDTH - RIGHT)
    along = _Axis([1.0, *(row["width"] for row in points)], HEIGHT - BOTTOM, TOP)
    for value, place in across.ticks():
        made.line(place, TOP, place, HEIGHT - BOTTOM, "axis")
        made.text(place, HEIGHT - BOTTOM + 16, number(value), "small")
    for value, place in along.ticks():
        made.line(LEFT, place, WIDTH - RIGHT, place, "axis")
        made.text(LEFT - 8, place + 4, number(value), "small", "end")
    made.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "seconds")
    made.text(LEFT, TOP - 6, "width of the bounds over the width that an attack attains", "small", "start")
    for row in points:
        x, y = across(row["ms"] / 1e3), along(row["width"])
        proved = row["guarantee"] == "proved"
        made.add(
            "circle", None, cx=round(x, 2), cy=round(y, 2), r=5, kind="holds" if proved else "mark estimated"
        )
        made.text(x + 9, y + 4, row["engine"], "small", "start")
    return made.svg(alone=True)


class _Axis:
    """A logarithmic scale."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low = math.floor(math.log10(min(values)))
        self.high = max(math.ceil(math.log10(max(values))), self.low + 1)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> Iterator[tuple[float, float]]:
        """Powers of ten, at most about eight of them."""
        every = max(1, (self.high - self.low) // 8)
        return ((10.0**k, self(10.0**k)) for k in range(self.low, self.high + 1, every))
