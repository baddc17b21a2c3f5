"""What a notebook shows of results: one picture, as an image that brings its own style."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from prooflens.report.attention import telling_radius
from prooflens.report.data import collect
from prooflens.report.figures import attention_map, circuit_graph, radius_map
from prooflens.report.outputs import answer_bars
from prooflens.report.readouts import readout_bars
from prooflens.report.svg import Drawing, escaped
from prooflens.report.verdict_map import verdict_map
from prooflens.report.ways import draw_pieces, way_picture
from prooflens.results import Radii, Results
from prooflens.results.families import FamilyResults
from prooflens.results.maps import cells_by_query
from prooflens.results.ways import Ways

if TYPE_CHECKING:
    from prooflens.report.data import ReportData


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
    if data.readings and not data.circuits:
        return readout_bars(data.readings[0])
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
