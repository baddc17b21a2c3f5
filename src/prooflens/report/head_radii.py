"""The picture of a sweep: the radii of each head over prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prooflens.report.svg import Drawing, hit, number

LEFT, WIDTH, LINE = 64.0, 760.0, 20.0
EDGE = 34.0
"""Room at both ends of the axis, for radii that are 0 and radii without an end."""

MOST = 120
"""How many heads are drawn, the least proved ones; the tables have all."""


@dataclass(frozen=True)
class HeadRadii:
    """The radii of a head over prompts: the smallest, the quartiles and the largest that are proved, and the median
    of those that are broken. Of a value inside the model layer and head are None.
    """

    model: str
    query: str
    layer: int | None
    head: int | None
    prompts: int
    proved: Sequence[float]
    broken: float

    @property
    def name(self) -> str:
        """The head, or `inside`."""
        return "inside" if self.layer is None else f"{self.layer}.{self.head}"


def draw_radii(heads: Sequence[HeadRadii]) -> Drawing:
    """A line per head on a logarithmic axis of radii.

    Args:
        heads: the radii of the heads.
    """
    chosen = sorted(heads, key=lambda head: head.proved[2])[:MOST]
    chosen.sort(key=lambda head: (head.layer or 0, head.head or 0))
    known = [r for s in chosen for r in (*s.proved, s.broken) if 0.0 < r < math.inf]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    drawing = Drawing(LEFT + WIDTH + 20.0, 30.0 + LINE * len(chosen) + 40.0, "Radii per head over prompts")

    def place(radius: float) -> float:
        if radius <= 0.0:
            return LEFT
        if radius == math.inf:
            return LEFT + WIDTH
        share = 0.5 if high <= low else math.log(radius / low) / math.log(high / low)
        return LEFT + EDGE + share * (WIDTH - 2 * EDGE)

    bottom = 24.0 + LINE * len(chosen)
    _axis(drawing, place, low, high, bottom)
    for i, head in enumerate(chosen):
        middle = 24.0 + LINE * (i + 0.5)
        least, first, median, third, most = map(place, head.proved)
        tip = (
            f"{'' if head.layer is None else 'head '}{head.name}, {head.prompts} prompts: proved radius "
            f"{number(head.proved[0])} … {number(head.proved[4])}, median {number(head.proved[2])}; "
            f"broken at {number(head.broken)} in the median"
        )
        drawing.open(kind="hit", **hit(tip, layer=head.layer, head=head.head, query=head.query))
        drawing.rect(LEFT, middle - LINE / 2, WIDTH, LINE, fill="transparent")
        drawing.text(LEFT - 10.0, middle + 4.0, head.name, "small quiet", "end")
        drawing.line(least, middle, most, middle, "axis")
        drawing.rect(first, middle - 5.0, max(2.0, third - first), 10.0, kind="holds", opacity=0.45)
        drawing.line(median, middle - 7.0, median, middle + 7.0, "proved-line")
        drawing.add("circle", None, cx=round(place(head.broken), 2), cy=middle, r=3.5, kind="fails")
        drawing.close()
    return drawing


def _axis(drawing: Drawing, place: Callable[[float], float], low: float, high: float, bottom: float) -> None:
    marks = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    for radius in marks if len(marks) > 1 else [low, high] if high > low else [low]:
        x = place(radius)
        drawing.line(x, 20.0, x, bottom, "axis", stroke_dasharray="2 4")
        drawing.text(x, bottom + 16.0, number(radius), "small quiet")
    for x, name in ((place(0.0), "0"), (place(math.inf), "∞")):
        drawing.line(x, 20.0, x, bottom, "axis")
        drawing.text(x, bottom + 16.0, name, "small quiet")
    drawing.text(LEFT + WIDTH / 2, bottom + 34.0, "ε", "small quiet")
    drawing.text(LEFT - 10.0, 14.0, "head", "small quiet", "end")
