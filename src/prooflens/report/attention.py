"""Certified intervals of attention weights, read off the proved margins of top-1 rows.

With d_k = a_top − a_k ∈ [low_k, high_k] for every other key, s_top = 1/(1 + Σ e^{−d}) and s_k = e^{−d_k}·s_top. Both
are monotone in every d, so their ranges over the box of margins are at its corners. The margins are proved for the
whole region, rounding included; the exponentials here are of display precision, and the drawn ends are widened by 10⁻⁹.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from prooflens.report.source import PROVED, RowSource

MOST_HEADS = 24
"""How many heads get a heat map."""

WIDER = 1e-9


@dataclass(frozen=True)
class Cell:
    """One attention weight: clean, and proved range on the region (None where nothing is known)."""

    key: int
    clean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class AttentionRow:
    """A query position at one radius: its verdict and its weights."""

    position: int
    eps: float
    verdict: str
    top: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class AttentionHead:
    """All rows of a head, at all radii that were computed."""

    layer: int
    head: int
    rows: tuple[AttentionRow, ...]

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii, smallest first."""
        return tuple(sorted({row.eps for row in self.rows}))


def telling_radius(heads: Sequence[AttentionHead]) -> float:
    """The largest radius at which most rows hold: where the proved ranges are widest and still say something.

    Args:
        heads: the heads, with their rows at all radii.
    """
    radii = sorted({row.eps for head in heads for row in head.rows})
    for eps in reversed(radii):
        verdicts = [row.verdict for head in heads for row in head.rows if row.eps == eps]
        if 2 * verdicts.count("holds") > len(verdicts):
            return eps
    return radii[0]


def weight_ranges(low: Sequence[float], high: Sequence[float]) -> list[tuple[float, float]]:
    """Ranges of the weights of the top key and then of the others, from ranges of its margins over them.

    Args:
        low: proved lower ends of the margins.
        high: proved upper ends.
    """

    def share(own: float, others: Sequence[float]) -> float:
        """1/(1 + e^own + Σ e^{own − other}): a weight whose margin below the top is `own`."""
        try:
            return 1.0 / (1.0 + math.exp(own) + sum(math.exp(own - other) for other in others))
        except OverflowError:
            return 0.0

    top = tuple(1.0 / (1.0 + sum(_exp(-d) for d in side)) for side in (low, high))
    found = [(top[0] - WIDER, top[1] + WIDER)]
    for k in range(len(low)):
        rest_low, rest_high = [*low[:k], *low[k + 1 :]], [*high[:k], *high[k + 1 :]]
        found.append((share(high[k], rest_low) - WIDER, share(low[k], rest_high) + WIDER))
    return [(max(0.0, a), min(1.0, b)) for a, b in found]


def _exp(x: float) -> float:
    return math.exp(x) if x < 700.0 else math.inf


def attention_heads(sources: Sequence[RowSource], balls: bool = True) -> tuple[AttentionHead, ...]:
    """Heat maps of the heads whose rows were asked for their most attended key (`top1`).

    Args:
        sources: the rows.
        balls: only rows about balls; without it rows about any region, which have the radius 0 where they have none.
    """
    wanted: dict[tuple[int, int], None] = {}
    chosen: list[tuple[RowSource, list[int]]] = []
    for source in sources:
        names = ("layer", "head", "query", "eps", "verdict", "guarantee")
        columns = [source.table.column(name).to_pylist() for name in names]
        rows = []
        for i, (layer, head, query, eps, _, guarantee) in enumerate(zip(*columns, strict=True)):
            there = query == "top1" and layer is not None and (eps is not None or not balls)
            if there and guarantee in (*PROVED, "none"):
                if (layer, head) not in wanted and len(wanted) == MOST_HEADS:
                    continue
                wanted[layer, head] = None
                rows.append(i)
        chosen.append((source, rows))
    found: dict[tuple[int, int], list[AttentionRow]] = defaultdict(list)
    for source, rows in chosen:
        columns = [
            source.table.column(n).to_pylist() for n in ("layer", "head", "position", "eps", "verdict")
        ]
        for i, (claim, low, high) in zip(rows, source.bounds(rows), strict=True):
            layer, head, position, eps, verdict = (column[i] for column in columns)
            if row := _row(claim, low, high, position, eps or 0.0, verdict):
                found[layer, head].append(row)
    return tuple(
        AttentionHead(*place, tuple(sorted(rows, key=lambda row: (row.eps, row.position))))
        for place, rows in sorted(found.items())
    )


def _row(
    claim: dict[str, list[dict[str, list[list[float]]]]],
    low: list[float],
    high: list[float],
    position: int,
    eps: float,
    verdict: str,
) -> AttentionRow | None:
    """The weights of one row; a row that reads one key only attends to it with weight 1."""
    functionals, clean = claim["functionals"], claim["clean"]
    if not functionals:
        return AttentionRow(position, eps, verdict, position, (Cell(position, 1.0, 1.0, 1.0),))
    top = int(functionals[0]["terms"][0][5])
    keys = [top, *(int(f["terms"][1][5]) for f in functionals)]
    margins: list[float] = clean  # type: ignore[assignment]
    exact = weight_ranges(margins, margins)
    if all(math.isfinite(v) for v in (*low, *high)):
        ranges: list[tuple[float, float] | None] = list(weight_ranges(low, high))
    else:
        ranges = [None] * len(keys)
    cells = [
        Cell(key, 0.5 * (a + b), *(given or (None, None)))
        for key, (a, b), given in zip(keys, exact, ranges, strict=True)
    ]
    return AttentionRow(position, eps, verdict, top, tuple(sorted(cells, key=lambda cell: cell.key)))
