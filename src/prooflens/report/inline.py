"""What a notebook shows of results: one picture, as an image that brings its own style."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from prooflens.report.attention import telling_radius
from prooflens.report.data import collect
from prooflens.report.figures import attention_map, circuit_graph, radius_map
from prooflens.report.outputs import answer_bars
from prooflens.report.svg import Drawing, escaped, number
from prooflens.report.ways import draw_pieces, way_picture
from prooflens.results import Radii, Results
from prooflens.results.families import FamilyResults
from prooflens.results.maps import Cells, cells_by_query
from prooflens.results.ways import Ways

if TYPE_CHECKING:
    from prooflens.report.data import ReportData

MOST_HEADS = 48
"""A map of verdicts has at most so many heads; the table and the report have all."""

LETTERS = {"holds": "h", "fails": "F", "unknown": "?", "estimated": "e"}
"""What cells say beside their colour, as maps in the terminal do."""


def picture(found: Any) -> str:
    """Return one picture of results as an HTML image; empty where there is nothing to draw.

    Args:
        found: what `certify`, `radius`, `output`, `circuit`, `way` or `family` returned; rows that were read from a
            run, and rows about several prompts, have no picture here (`pl.report` draws runs).
    """
    drawing = _drawing(found)
    if drawing is None:
        return ""
    data = base64.b64encode(drawing.svg(alone=True).encode()).decode()
    return (
        f'<img alt="{escaped(drawing.label)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'
    )


def _drawing(found: Any) -> Drawing | None:
    if isinstance(found, FamilyResults):
        from prooflens.report.families import FamilyPage, pictures

        return next((drawing for _, _, drawing in pictures(FamilyPage.of(found))), None)
    if isinstance(found, Ways):
        return way_picture(found[0]) if len(found) else None
    if not isinstance(found, Results | Radii) or found.subject is None or not len(found):
        return None
    return _of_rows(found, collect(found))


def _of_rows(found: Results | Radii, data: ReportData) -> Drawing | None:
    """The picture that says most of some rows."""
    if data.radius_map and isinstance(found, Radii):
        return radius_map([cell for cell in data.radius_map if cell.query == data.radius_map[0].query])
    if data.answers:
        return answer_bars(data.answers[0])
    if data.circuits:
        return circuit_graph(data.circuits[0])
    if data.ways:
        return draw_pieces(data.ways[0])
    maps = cells_by_query(found.rows) if isinstance(found, Results) else {}
    if not maps:
        return None
    query, cells = next(iter(maps.items()))
    if len({place[:2] for place in cells}) == 1 and data.attention:
        return attention_map(data.attention[0], data.tokens, telling_radius(data.attention))
    return verdict_map(query, cells, data.tokens)


def verdict_map(query: str, cells: Cells, tokens: tuple[str, ...]) -> Drawing:
    """Head × position: the colour and the letter of a cell are its verdict.

    Args:
        query: what was asked.
        cells: verdicts by layer, head and position.
        tokens: the tokens of the prompt.
    """
    heads = sorted({place[:2] for place in cells})
    drawn, positions = heads[:MOST_HEADS], sorted({place[2] for place in cells})
    side, left, top = 22.0, 62.0, 92.0
    below = top + side * len(drawn)
    label = f"Verdicts of {query} by head and position"
    drawing = Drawing(max(left + side * len(positions) + 60.0, 420.0), below + 42.0, label)
    for column, position in enumerate(positions):
        x = left + side * (column + 0.6)
        name = f"{position} {tokens[position].strip()}"
        drawing.text(x, top - 6.0, name[:12], "small", "start", transform=f"rotate(-55 {x:.1f} {top - 6.0})")
    for line, (layer, head) in enumerate(drawn):
        y = top + side * line
        drawing.text(left - 8.0, y + 15.0, f"{layer}.{head}", "small", "end")
        for column, position in enumerate(positions):
            word = cells.get((layer, head, position))
            if word is not None:
                x = left + side * column
                drawing.rect(x, y, side - 1.5, side - 1.5, kind=word)
                drawing.text(x + side / 2 - 1.0, y + 15.0, LETTERS[word], "small onnode")
    counts = {word: sum(found == word for found in cells.values()) for word in LETTERS}
    told = ", ".join(f"{LETTERS[word]} {word}: {number(float(n))}" for word, n in counts.items() if n)
    left_out = f"; {len(heads) - len(drawn)} more heads" if len(heads) > len(drawn) else ""
    drawing.text(left, below + 18.0, query, "small", "start")
    drawing.text(left, below + 34.0, f"{told}{left_out}", "small quiet", "start")
    return drawing
