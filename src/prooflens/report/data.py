"""From results, radii and run directories to what a report shows. Sections appear only where their data is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prooflens.errors import RunError
from prooflens.report.attention import AttentionHead, attention_heads
from prooflens.report.effect_curves import EffectCurve, effect_curves
from prooflens.report.effects import EffectChart, effect_charts
from prooflens.report.images import ImageAttention, image_attention
from prooflens.report.outputs import Answer, answers
from prooflens.report.readouts import Readings, readings
from prooflens.report.source import PROVED, RowSource, read_source
from prooflens.report.ways import WayPieces, way_pieces
from prooflens.results.frame import with_text
from prooflens.results.outcome import STRENGTH, Verdict

if TYPE_CHECKING:
    from prooflens.results.frame import Frame

Row = dict[str, Any]
Key = tuple[int, int, int, str]
"""Layer, head, position, query."""

MOST_ROWS = 20_000
"""How many rows are put into the file, the weakest first; a note says how many more the run has."""

MOST_CURVES = 60
MOST_MAPS = 8
"""Curves, and queries with a radius map, that are drawn."""

VERDICTS = tuple(verdict.value for verdict in Verdict)


@dataclass(frozen=True)
class RadiusCell:
    """A head's radii for one query: of its weakest row. None: nothing proved, or nothing broken."""

    layer: int
    head: int
    query: str
    certified: float | None
    attack: float | None
    rows: int


@dataclass(frozen=True)
class MarginCurve:
    """One row of attention at several radii: (ε, proved lower bound, attained by the attack)."""

    key: Key
    clean: float | None
    points: tuple[tuple[float, float | None, float | None], ...]


@dataclass(frozen=True)
class CircuitPart:
    """A part of a circuit."""

    layer: int
    head: int
    position: int
    query: str
    verdict: str
    lower: float | None
    clean: float | None


@dataclass(frozen=True)
class CircuitGraph:
    """A circuit: its query, its verdict, its parts, and which of them is the weakest link."""

    name: str
    verdict: str
    eps: float | None
    parts: tuple[CircuitPart, ...]
    weakest: int


@dataclass(frozen=True)
class TokenRadius:
    """What is proved when only one token moves, and how far the nearest other token of the vocabulary is."""

    token: str
    certified: float | None
    attack: float | None
    nearest: float | None = None
    neighbour: str | None = None


@dataclass(frozen=True)
class ReportData:
    """All that a report shows. Empty parts have no section."""

    model: str
    model_sha256: str
    text: str | None
    tokens: tuple[str, ...]
    regions: tuple[str, ...]
    engines: tuple[str, ...]
    guarantees: tuple[str, ...]
    counts: dict[str, int]
    commands: tuple[str, ...]
    verdicts: tuple[Row, ...] = ()
    radii: tuple[Row, ...] = ()
    left_out: int = 0
    radius_map: tuple[RadiusCell, ...] = ()
    attention: tuple[AttentionHead, ...] = ()
    curves: tuple[MarginCurve, ...] = ()
    circuits: tuple[CircuitGraph, ...] = ()
    strip: tuple[TokenRadius, ...] = ()
    answers: tuple[Answer, ...] = ()
    images: tuple[ImageAttention, ...] = ()
    ways: tuple[WayPieces, ...] = ()
    readings: tuple[Readings, ...] = ()
    effects: tuple[EffectChart, ...] = ()
    effect_curves: tuple[EffectCurve, ...] = ()
    notes: tuple[str, ...] = field(default=())
    eps_in_words: tuple[str, ...] = ()
    """What each radius is worth in tokens."""
    advice: tuple[str, ...] = ()
    """Why rows are open, once for each run: who was asked about them, and who was not."""
    precision: tuple[str, ...] = ()
    """How proved margins compare with what the deployed precision was measured to change."""


DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, pa.ArrowException)
"""What reading a run raises whose rows and tensors do not fit together."""


def collect(*found: Frame | Path | str) -> ReportData:
    """The data of a report about one model and prompt, from `Results`, `Radii` and run directories.

    Args:
        found: results, radii, and paths of runs.
    """
    if not found:
        raise RunError("a report needs at least one result or run directory")
    runs = [item for item in found if isinstance(item, str | Path)]
    try:
        data = _gather(found)
    except DAMAGE as error:
        if not runs:
            raise
        raise RunError(f"{runs[0]} is damaged: its rows and tensors do not fit ({error})") from error
    _check_tokens(data)
    return data


def _check_tokens(data: ReportData) -> None:
    """Rows speak of tokens that the prompt has."""
    rows = [row for head in data.attention for row in head.rows]
    named = [row.position for row in rows] + [cell.key for row in rows for cell in row.cells]
    named += [row["position"] for row in (*data.verdicts, *data.radii) if row.get("position") is not None]
    if named and not (min(named) >= 0 and max(named) < len(data.tokens)):
        raise RunError(f"the run is damaged: its rows speak of token {max(named)}, it has {len(data.tokens)}")


def _gather(found: Sequence[Frame | Path | str]) -> ReportData:
    sources = [read_source(item) for item in found]
    first = sources[0]
    for other in sources[1:]:
        if (other.model_sha256, other.tokens) != (first.model_sha256, first.tokens):
            raise RunError(
                f"a report is about one model and prompt: {other.name} has others than {first.name}"
            )
    verdict_sources = [s for s in sources if s.kind == "verdicts"]
    radius_sources = [s for s in sources if s.kind == "radii"]
    verdicts = _table([s.table for s in verdict_sources], (*VERDICT_COLUMNS, "region"))
    radii = _table([s.table for s in radius_sources], RADIUS_COLUMNS)
    rows = [with_text(row, first.tokens) for row in _rows(verdicts, "lower")]
    radius_rows = _rows(radii, "certified")
    left = verdicts.num_rows + radii.num_rows - len(rows) - len(radius_rows)
    everything = [*sorted(verdict_sources, key=lambda s: s.eps or 0.0), *radius_sources]
    return ReportData(
        model=first.model,
        model_sha256=first.model_sha256,
        text=first.text,
        tokens=first.tokens,
        regions=_distinct(s.region for s in everything),
        engines=_distinct(e for s in everything for e in s.distinct("engine")),
        guarantees=_distinct(g for s in verdict_sources for g in s.distinct("guarantee")),
        counts=_counts(verdicts),
        commands=_distinct(s.command for s in everything if s.command),
        verdicts=tuple(rows),
        radii=tuple(radius_rows),
        left_out=left,
        radius_map=_radius_map(radii, verdicts),
        attention=attention_heads([s for s in verdict_sources if not s.circuit]),
        curves=_curves(verdicts),
        circuits=tuple(_circuit(s) for s in verdict_sources if s.circuit),
        strip=_strip(radii, first),
        images=image_attention(verdict_sources),
        ways=way_pieces([s for s in verdict_sources if not s.circuit]),
        readings=readings(sorted(verdict_sources, key=lambda s: s.eps or 0.0)),
        answers=answers(sorted(verdict_sources, key=lambda s: s.eps or 0.0)),
        effects=effect_charts(verdict_sources),
        effect_curves=effect_curves(verdict_sources),
        eps_in_words=_distinct(s.eps_in_words for s in everything if s.eps_in_words),
        advice=_distinct(s.advice for s in everything if s.advice),
        precision=_distinct(s.precision for s in everything if s.precision),
        notes=(f"{left:,} more rows are in the run: `prooflens query` reads them all.",) if left else (),
    )


VERDICT_COLUMNS = (
    "layer", "head", "position", "query", "top", "eps", "verdict", "checked", "guarantee", "lower", "difference",
    "attack", "clean", "engine", "unit", "reason", "circuit",
)  # fmt: skip
RADIUS_COLUMNS = (
    "layer", "head", "position", "query", "token", "certified", "of_nearest", "of_length", "attack", "clean", "engine",
    "unit", "reason",
)  # fmt: skip


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _table(tables: Sequence[pa.Table], columns: tuple[str, ...]) -> pa.Table:
    kept = [table.select([c for c in columns if c in table.column_names]) for table in tables]
    return pa.concat_tables(kept, promote_options="default") if kept else pa.table({c: [] for c in columns})


def _rows(table: pa.Table, by: str) -> list[Row]:
    """The weakest rows, as many as a page can hold."""
    if table.num_rows > MOST_ROWS:
        table = table.sort_by([(by, "ascending")]).slice(0, MOST_ROWS)
    rows: list[Row] = table.to_pylist()
    return rows


def _counts(table: pa.Table) -> dict[str, int]:
    found = Counter(table.column("verdict").to_pylist())
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def _radius_map(radii: pa.Table, verdicts: pa.Table) -> tuple[RadiusCell, ...]:
    """Per head and query, the smallest radii of its rows; without radii, what verdicts at several ε say."""
    cells: dict[tuple[int, int, str], list[tuple[float | None, float | None]]] = defaultdict(list)
    if radii.num_rows:
        names = ("layer", "head", "query", "token", "certified", "attack")
        for layer, head, query, token, certified, attack in _columns(radii, names):
            if layer is not None and token is None:
                cells[layer, head, query].append((certified, attack))
    if not cells and verdicts.num_rows:
        tried: dict[Key, list[tuple[float, str]]] = defaultdict(list)
        names = ("layer", "head", "position", "query", "eps", "verdict")
        for layer, head, position, query, eps, verdict in _columns(verdicts, names):
            if layer is not None and eps is not None:
                tried[layer, head, position, query].append((eps, verdict))
        for (layer, head, _, query), outcomes in tried.items():
            broken = min((e for e, v in outcomes if v == "fails"), default=None)
            proved = max((e for e, v in outcomes if v == "holds"), default=0.0)
            cells[layer, head, query].append((proved, broken))
    drawn = list(dict.fromkeys(query for _, _, query in cells))[:MOST_MAPS]
    chosen = sorted((place, found) for place, found in cells.items() if place[2] in drawn)
    return tuple(RadiusCell(*place, *_weakest(found), len(found)) for place, found in chosen)


def _weakest(found: list[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    """Of several rows the smallest proved and the smallest broken radius. A certified None has no end (by the mask)."""
    certified = [c for c, _ in found if c is not None]
    attacks = [a for _, a in found if a is not None]
    proved = min(certified, default=math.inf)
    return (proved if proved > 0.0 else None), min(attacks, default=None)


def _columns(table: pa.Table, names: Sequence[str]) -> Iterable[tuple[Any, ...]]:
    return zip(*(table.column(name).to_pylist() for name in names), strict=True)


def _curves(verdicts: pa.Table) -> tuple[MarginCurve, ...]:
    """Rows that were asked on balls of several radii, moving the same tokens.

    The balls are nested: what is proved on one holds on every smaller one, what one attains every larger one does.
    """
    points: dict[tuple[Key, str], dict[float, tuple[float | None, float | None]]] = defaultdict(dict)
    clean: dict[Key, float | None] = {}
    names = ("layer", "head", "position", "query", "eps", "lower", "attack", "clean", "guarantee", "region")
    for layer, head, position, query, eps, lower, attack, value, guarantee, region in _columns(
        verdicts, names
    ):
        if layer is not None and eps is not None:
            key, tokens = (layer, head, position, query), str(region).partition(" on ")[2]
            points[key, tokens][eps] = (lower if guarantee in PROVED else None, attack)
            clean[key] = value
    curves = []
    for (key, _), found in points.items():
        if len(found) > 1:
            radii = sorted(found)
            proved = list(accumulate((found[e][0] for e in reversed(radii)), _largest))[::-1]
            reached = accumulate((found[e][1] for e in radii), _smallest)
            curves.append(MarginCurve(key, clean[key], tuple(zip(radii, proved, reached, strict=True))))

    def interest(curve: MarginCurve) -> tuple[bool, float]:
        """Those whose proof ends within the radii first, then by clean margin."""
        bounds = [low for _, low, _ in curve.points if low is not None]
        crosses = bool(bounds) and min(bounds) <= 0.0 < max(bounds)
        return not crosses, -abs(curve.clean or 0.0)

    return tuple(sorted(curves, key=interest)[:MOST_CURVES])


def _largest(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)


def _smallest(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)


def _circuit(source: RowSource) -> CircuitGraph:
    names = [c for c in VERDICT_COLUMNS if c in source.table.column_names]
    rows = source.table.select(names).to_pylist()
    whole = next(row for row in rows if row["circuit"] is not None)
    parts = [row for row in rows if row["circuit"] is None and row["layer"] is not None]

    def strength(i: int) -> tuple[int, float]:
        lower = parts[i]["lower"]
        return STRENGTH.index(parts[i]["verdict"]), -math.inf if lower is None else lower

    weakest = min(range(len(parts)), key=strength, default=-1)
    kept = ("layer", "head", "position", "query", "verdict", "lower", "clean")
    made = tuple(CircuitPart(**{name: row[name] for name in kept}) for row in parts)
    return CircuitGraph(whole["circuit"], whole["verdict"], whole["eps"], made, weakest)


def _strip(radii: pa.Table, source: RowSource) -> tuple[TokenRadius, ...]:
    """Per token, the smallest radii over all rows that were asked while it moved alone."""
    found: dict[int, list[tuple[float | None, float | None]]] = defaultdict(list)
    if radii.num_rows and "token" in radii.column_names:
        for token, certified, attack in _columns(radii, ("token", "certified", "attack")):
            if token is not None:
                found[token].append((certified, attack))
    if not found:
        return ()
    nearest = source.nearest_tokens()
    return tuple(
        TokenRadius(text, *_weakest(found.get(i, [(0.0, None)])), *(nearest[i] if nearest else (None, None)))
        for i, text in enumerate(source.tokens)
    )
