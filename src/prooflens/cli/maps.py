"""Many verdicts in a terminal: a line per head, a letter per position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prooflens.results.maps import Cells

LETTERS = {"fails": "F", "unknown": "?", "estimated": "e", "holds": "h"}
"""A letter for each verdict, the weakest first: where several rows share a cell, it shows the weakest."""

MOST_LINES = 64
"""Up to this many heads have a line of positions; of more, every layer has a line of heads."""


def verdict_maps(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Draw rows of attention as maps of letters, one map for each query.

    Args:
        rows: rows with layer, head, position, query and verdict; those without a layer are left out.

    Returns:
        The lines of all maps, with a legend; empty where no row is about attention.
    """
    from prooflens.results.maps import cells_by_query

    placed = [row for row in rows if row["layer"] is not None]
    lines: list[str] = []
    for query, cells in cells_by_query(placed).items():
        counts = Counter(cells.values())
        told = ", ".join(f"{counts[word]} {word}" for word in reversed(LETTERS) if counts[word])
        many = len({place[:2] for place in cells}) > MOST_LINES
        lines += [f"{query}: {told}", *(_layers(cells) if many else _heads(cells)), ""]
    if not placed:
        return []
    found = {row["verdict"] for row in placed}
    legend = ", ".join(f"{letter} {word}" for word, letter in LETTERS.items() if word in found)
    return [*lines, f"{legend}, · not asked; several rows in one cell: the weakest"]


def _heads(cells: Cells) -> list[str]:
    """A line for each head, a column for each position that was asked."""
    heads = sorted({place[:2] for place in cells})
    positions = sorted({place[2] for place in cells})
    lines = [[LETTERS.get(cells.get((*head, p), ""), "·") for p in positions] for head in heads]
    return _grid("position", [f"{layer}.{head}" for layer, head in heads], positions, lines)


def _layers(cells: Cells) -> list[str]:
    """A line for each layer, a column for each head: its weakest verdict at any position."""
    from prooflens.results.maps import weaker

    weakest: dict[tuple[int, int], str] = {}
    for (layer, head, _), word in cells.items():
        weakest[layer, head] = weaker(weakest.get((layer, head), "holds"), word)
    layers, heads = (sorted({place[i] for place in weakest}) for i in (0, 1))
    lines = [[LETTERS.get(weakest.get((layer, head), ""), "·") for head in heads] for layer in layers]
    return _grid("head", [f"layer {layer}" for layer in layers], heads, lines)


def _grid(
    across: str, names: Sequence[str], numbers: Sequence[int], lines: Sequence[Sequence[str]]
) -> list[str]:
    """Names at the left, the digits of the columns' numbers above each other, and letters."""
    digits = len(str(max(numbers)))
    wide = max(len(across), *map(len, names))
    head = [
        "  "
        + (across if row == digits - 1 else "").ljust(wide)
        + "  "
        + "".join(f"{n:>{digits}}"[row] for n in numbers)
        for row in range(digits)
    ]
    return [*head, *(f"  {name:<{wide}}  {''.join(line)}" for name, line in zip(names, lines, strict=True))]
