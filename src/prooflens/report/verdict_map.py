"""Many verdicts as one picture: head × position."""

from __future__ import annotations

from collections.abc import Sequence

from prooflens.report.data import Row
from prooflens.report.figures import short
from prooflens.report.svg import Drawing, hit, number
from prooflens.results.maps import Cells, cells_by_query

MOST_HEADS = 48
"""A map of verdicts has at most so many heads; the table and the report have all."""

LETTERS = {"holds": "h", "fails": "F", "unknown": "?", "estimated": "e"}
"""What cells say beside their colour, as maps in the terminal do."""


MOST_MAPS = 12
"""A report draws the maps of so many queries."""


def verdict_maps(rows: Sequence[Row], tokens: Sequence[str]) -> list[tuple[str, Drawing]]:
    """Return a map for each radius and query that was asked of several heads, by name.

    Args:
        rows: rows of verdicts.
        tokens: the tokens of the prompt.
    """
    found: list[tuple[str, Drawing]] = []
    for eps in sorted({row.get("eps") for row in rows}, key=lambda eps: (eps is None, eps)):
        here = [row for row in rows if row.get("eps") == eps]
        for query, cells in cells_by_query(here).items():
            if len({place[:2] for place in cells}) > 1:
                name = query if eps is None else f"{query}, ε = {number(eps)}"
                found.append((name, verdict_map(name, cells, tokens)))
    return found[:MOST_MAPS]


def verdict_map(query: str, cells: Cells, tokens: Sequence[str]) -> Drawing:
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
        name = short(name_of(position, tokens), 12)
        drawing.text(x, top - 6.0, name, "small", "start", transform=f"rotate(-55 {x:.1f} {top - 6.0})")
    for line, (layer, head) in enumerate(drawn):
        y = top + side * line
        drawing.text(left - 8.0, y + 15.0, f"{layer}.{head}", "small", "end")
        for column, position in enumerate(positions):
            word = cells.get((layer, head, position))
            if word is not None:
                x = left + side * column
                tip = f"head {layer}.{head} at {name_of(position, tokens)}: {word}"
                drawing.open(kind="hit", **hit(tip, layer=layer, head=head, position=position))
                drawing.rect(x, y, side - 1.5, side - 1.5, kind=word)
                drawing.text(x + side / 2 - 1.0, y + 15.0, LETTERS[word], "small onnode")
                drawing.close()
    counts = {word: sum(found == word for found in cells.values()) for word in LETTERS}
    told = ", ".join(f"{LETTERS[word]} {word}: {number(float(n))}" for word, n in counts.items() if n)
    left_out = f"; {len(heads) - len(drawn)} more heads" if len(heads) > len(drawn) else ""
    drawing.text(left, below + 18.0, query, "small", "start")
    drawing.text(left, below + 34.0, f"{told}{left_out}", "small quiet", "start")
    return drawing


def name_of(position: int, tokens: Sequence[str]) -> str:
    """Return a position by its number and the text of its token.

    Args:
        position: its number.
        tokens: the tokens of the prompt.
    """
    return f"{position} {tokens[position].strip()}"
