"""Verdicts by head and position: what maps of many rows show, in a terminal and in pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from prooflens.results.outcome import STRENGTH

Cells = dict[tuple[int, int, int], str]
"""Verdicts by layer, head and position."""

WEAKEST_FIRST = tuple(verdict.value for verdict in STRENGTH)
"""Where several rows share a cell, it shows the weakest."""


def cells_by_query(rows: Iterable[Mapping[str, Any]]) -> dict[str, Cells]:
    """Return the cells of every query. Queries that name another token at each position (a role) share a map.

    Args:
        rows: rows with layer, head, position, query and verdict; those without a layer are left out.
    """
    exact: dict[str, Cells] = {}
    for row in rows:
        if row["layer"] is not None:
            cells = exact.setdefault(row["query"], {})
            place = row["layer"], row["head"], row["position"]
            cells[place] = weaker(cells.get(place, "holds"), row["verdict"])
    shapes: dict[str, list[str]] = {}
    for query in exact:
        shapes.setdefault(re.sub(r"\{[^}]*\}", "{…}", query), []).append(query)
    found: dict[str, Cells] = {}
    for shape, queries in shapes.items():
        places = [place for query in queries for place in exact[query]]
        if len(queries) > 1 and len(set(places)) == len(places):
            found[shape] = {place: word for query in queries for place, word in exact[query].items()}
        else:
            found |= {query: exact[query] for query in queries}
    return found


def weaker(one: str, other: str) -> str:
    """Return the weaker of two verdicts.

    Args:
        one: a verdict.
        other: another one.
    """
    return min(one, other, key=WEAKEST_FIRST.index)
