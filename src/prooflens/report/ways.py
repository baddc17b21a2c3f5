"""The way between prompts, and the map of a hull of three: what is proved on every piece."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prooflens.report.source import RowSource
from prooflens.report.svg import Drawing, hit, number
from prooflens.results.ways import Way

MOST_WAYS = 48
"""How many rows are drawn."""

WORDS = {"holds": "proved", "fails": "broken somewhere", "unknown": "open"}


@dataclass(frozen=True)
class WayPieces:
    """The pieces of a region of one or two factors, and the proved bounds of a claim's margin on each.

    Attributes:
        name: head, query and region, as a title.
        low: lower ends of the pieces, coordinates in [−1, 1].
        high: upper ends.
        lower: proved lower bounds of the weakest functional.
        upper: proved upper bounds.
        hull: whether the coordinates are those of a hull.
        attained: shares of the way and margins that the model has there, if they are known.
        breaks: the share of the way at which the claim breaks first, if it does.
    """

    name: str
    low: Sequence[tuple[float, ...]]
    high: Sequence[tuple[float, ...]]
    lower: Sequence[float]
    upper: Sequence[float]
    hull: bool = False
    attained: Sequence[tuple[float, float]] = ()
    breaks: float | None = None

    def word(self, piece: int) -> str:
        """The verdict on one piece: nothing, if it is below 0 somewhere for sure, is a part of `fails`.

        Args:
            piece: the number of the piece.
        """
        if self.lower[piece] > 0.0:
            return "holds"
        return "fails" if self.upper[piece] <= 0.0 else "unknown"


def way_pieces(sources: Sequence[RowSource]) -> tuple[WayPieces, ...]:
    """The rows of runs whose region was cut, with one factor or two.

    Args:
        sources: the rows of runs and results.
    """
    found: list[WayPieces] = []
    for source in sources:
        for place, row in enumerate(source.table.to_pylist()):
            cover = _cover(source, place, row)
            if cover is None or not len(cover["low"]) or cover["low"].shape[1] not in (1, 2):
                continue
            low, high = (np.asarray(cover[side], dtype=float) for side in ("low", "high"))
            lower, upper = (np.asarray(cover[side], dtype=float).min(-1) for side in ("lower", "upper"))
            order = np.lexsort(low.T[::-1])
            at = "" if row.get("layer") is None else f"{row['layer']}.{row['head']}@{row['position']} "
            found.append(
                WayPieces(
                    f"{at}{row['query']} on the {source.region}",
                    [tuple(x) for x in low[order].tolist()],
                    [tuple(x) for x in high[order].tolist()],
                    lower[order].tolist(),
                    upper[order].tolist(),
                    source.region.startswith("hull"),
                )
            )
    return tuple(found[:MOST_WAYS])


def _cover(source: RowSource, place: int, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if isinstance(source.held, list):
        held = source.held[place].bounds.cover
        return None if held is None else {name: value.cpu().numpy() for name, value in vars(held).items()}
    if not isinstance(source.held, Mapping):
        return None
    names = {side: f"row/{row['row']}/cover/{side}" for side in ("low", "high", "lower", "upper")}
    if any(name not in source.held for name in names.values()):
        return None
    return {side: source.held[name] for side, name in names.items()}


def way_picture(way: Way) -> Drawing:
    """One claim of `way`: the proved band, the margin that the model has, and where it breaks first.

    Args:
        way: a row of what `pl.way` returns.
    """
    return draw_way(
        WayPieces(
            str(way.claim),
            [(2.0 * piece.start - 1.0,) for piece in way.pieces],
            [(2.0 * piece.end - 1.0,) for piece in way.pieces],
            [piece.lower for piece in way.pieces],
            [piece.upper for piece in way.pieces],
            attained=list(zip(way.shares, way.margins, strict=True)),
            breaks=way.breaks,
        )
    )


def draw_pieces(pieces: WayPieces) -> Drawing:
    """A way as a band over its length, a hull of three as a triangle.

    Args:
        pieces: the pieces of a region, and what is proved on each.
    """
    return draw_way(pieces) if len(pieces.low[0]) == 1 else draw_plane(pieces)


def draw_way(way: WayPieces) -> Drawing:
    """The margin along the way: the band that is proved, and the curve that the model has, where it is known.

    Args:
        way: the pieces of a way.
    """
    drawing = Drawing(640.0, 318.0, f"Margin of {way.name}")
    left, right, top, bottom = 66.0, 620.0, 26.0, 246.0
    shown = [value for value in (*way.lower, *way.upper) if math.isfinite(value)]
    values = [value for _, value in way.attained] or shown or [0.0]
    least, most = min(*values, 0.0), max(*values, 0.0)
    span = (most - least) or 1.0
    least, most = least - 0.15 * span, most + 0.15 * span

    def place(share: float, value: float) -> tuple[float, float]:
        inside = min(max(value, least), most)
        return left + share * (right - left), bottom - (inside - least) / (most - least) * (bottom - top)

    for i, (low, high) in enumerate(zip(way.low, way.high, strict=True)):
        start, end = 0.5 * (low[0] + 1.0), 0.5 * (high[0] + 1.0)
        word = way.word(i)
        (x, y), (right_x, base) = place(start, way.upper[i]), place(end, way.lower[i])
        tip = (
            f"{100 * start:.4g} to {100 * end:.4g} % of the way, {WORDS[word]}: margin between "
            f"{number(way.lower[i])} and {number(way.upper[i])}"
        )
        drawing.open(kind="hit", **hit(tip))
        drawing.rect(x, y, right_x - x, max(1.5, base - y), kind=word, style="opacity:.32")
        drawing.close()
    drawing.add("path", None, kind="axis", d=f"M{left},{top}V{bottom}H{right}")
    zero = place(0.0, 0.0)[1]
    drawing.line(left, zero, right, zero, "zero")
    drawing.text(left - 8.0, zero + 4.0, "0", "small quiet", "end")
    for value in (least + 0.15 * span, most - 0.15 * span):
        y = place(0.0, value)[1]
        if abs(y - zero) > 14.0:
            drawing.text(left - 8.0, y + 4.0, number(value), "small quiet", "end")
    for percent in (0, 25, 50, 75, 100):
        drawing.text(place(percent / 100, 0.0)[0], bottom + 18.0, f"{percent} %", "small quiet")
    drawing.text((left + right) / 2, bottom + 38.0, "share of the way to the other prompt", "small")
    if way.attained:
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in (place(*point) for point in way.attained))
        drawing.add("polyline", None, kind="attack-line", points=points)
    if way.breaks is not None:
        x = place(way.breaks, 0.0)[0]
        drawing.line(x, top, x, bottom, "zero")
        drawing.text(x, top - 8.0, f"breaks at {100 * way.breaks:.3g} %", "small")
    _legend(drawing, left, bottom + 62.0, bool(way.attained))
    return drawing


def draw_plane(plane: WayPieces) -> Drawing:
    """Two factors: the triangle of a hull of three prompts, or the square of a span.

    Args:
        plane: the pieces of a region of two factors.
    """
    drawing = Drawing(480.0, 420.0, f"Map of {plane.name}")
    corners = ((240.0, 40.0), (40.0, 340.0), (440.0, 340.0))

    def place(a: float, b: float) -> tuple[float, float]:
        if not plane.hull:
            return 40.0 + 200.0 * (a + 1.0), 340.0 - 150.0 * (b + 1.0)
        u, v = 0.5 * (a + 1.0), 0.5 * (b + 1.0)
        shares = (1.0 - u, u * (1.0 - v), u * v)
        return sum(s * c[0] for s, c in zip(shares, corners, strict=True)), sum(
            s * c[1] for s, c in zip(shares, corners, strict=True)
        )

    for i, (low, high) in enumerate(zip(plane.low, plane.high, strict=True)):
        word = plane.word(i)
        around = [(low[0], low[1]), (high[0], low[1]), (high[0], high[1]), (low[0], high[1])]
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in (place(*corner) for corner in around))
        tip = f"{WORDS[word]}: margin between {number(plane.lower[i])} and {number(plane.upper[i])}"
        drawing.add(
            "polygon", None, kind=f"hit {word}", points=points, style="opacity:.55;stroke:#fff", **hit(tip)
        )
    if plane.hull:
        for name, (x, y) in zip(("first prompt", "second", "third"), corners, strict=True):
            drawing.text(x, y - 10.0 if y < 100.0 else y + 18.0, name, "small")
    _legend(drawing, 40.0, 392.0, False)
    return drawing


def _legend(drawing: Drawing, x: float, y: float, curve: bool) -> None:
    for word, text in WORDS.items():
        drawing.rect(x, y - 9.0, 22.0, 12.0, kind=word, style="opacity:.45")
        drawing.text(x + 28.0, y + 1.0, text, "small", "start")
        x += 60.0 + 7.0 * len(text)
    if curve:
        drawing.line(x, y - 3.0, x + 26.0, y - 3.0, "attack-line")
        drawing.text(x + 32.0, y + 1.0, "what the model does", "small", "start")
