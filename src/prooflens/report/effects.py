"""The effects of edits as bars: what taking a part out changes, proved on a region or counted over a family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prooflens.report.bars import Bar, draw_bars
from prooflens.report.folders import label_of
from prooflens.report.source import RowSource
from prooflens.report.svg import Drawing, number
from prooflens.results.outcome import STRENGTH

QUERY = re.compile(
    r"(?:(?P<range>effect\((?P<metric>.+)\))|effect\(.+\)>=(?P<least>\S+)|\|effect\(.+\)\|<=(?P<most>\S+)"
    r"|same answer|patched\(.+\)[<>]0) (?P<edit>(?:without|with) .+|edited)",
    re.DOTALL,
)
"""A row of a run about effects (`docs/interventions.md`)."""

NO_CLAIM = "gap"
"""The class of a bar about which nothing is claimed."""


@dataclass(frozen=True)
class EffectBar:
    """The effect of one edit: its ends, and how claims about it ended.

    Attributes:
        label: the edit, as short as it can be told.
        edit: the edit, in full.
        lower: no effect is smaller; None if that is not known.
        upper: no effect is larger, likewise.
        middle: the effect at the prompt, or the mean over a family.
        claims: every claim as (words, verdict, reason).
        query: the row of the table that it stands for.
    """

    label: str
    edit: str
    lower: float | None
    upper: float | None
    middle: float | None
    claims: tuple[tuple[str, str, str], ...]
    query: str = ""

    @property
    def kind(self) -> str:
        """The weakest verdict of its claims; a class of its own where nothing is claimed."""
        order = [verdict.value for verdict in STRENGTH]
        return min((verdict for _, verdict, _ in self.claims), key=order.index, default=NO_CLAIM)

    @property
    def word(self) -> str:
        """The weakest verdict; '' where nothing is claimed."""
        return "" if self.kind == NO_CLAIM else self.kind


@dataclass(frozen=True)
class EffectChart:
    """The effects of some edits on one metric, on one region or over one family.

    Attributes:
        metric: what is measured.
        where: the region, or the family.
        bars: one per edit.
        marks: the thresholds of claims.
        worth: what the ends of the bars are: `proved`, `enumerated` or `estimated`.
    """

    metric: str
    where: str
    bars: tuple[EffectBar, ...]
    marks: tuple[float, ...]
    worth: str

    @property
    def name(self) -> str:
        """How a list names it."""
        return f"{self.metric}, {self.where}"


class ReadEffect(NamedTuple):
    """The effect that a run is about: what is measured, its bar, and the thresholds of its claims."""

    metric: str
    bar: EffectBar
    marks: tuple[float, ...]


def read_effect(source: RowSource) -> ReadEffect | None:
    """Return the effect that a run is about; None if it is about none.

    Args:
        source: a run, or results.
    """
    names = ("query", "verdict", "lower", "upper", "clean", "reason", "layer")
    if not source.table.num_rows or not set(names) <= set(source.table.column_names):
        return None
    rows = source.table.select(list(names)).to_pylist()
    read = [(row, QUERY.fullmatch(row["query"])) for row in rows if row["layer"] is None]
    found = [(row, match) for row, match in read if match is not None]
    first = next(((row, match) for row, match in found if match["range"]), None)
    if first is None:
        return None
    return ReadEffect(first[1]["metric"], _bar(source, *first, found), tuple(_thresholds(found)))


def effect_charts(sources: Sequence[RowSource]) -> tuple[EffectChart, ...]:
    """Return the charts of runs about effects, one for each metric and region.

    Args:
        sources: runs, or results; those that are not about effects are left out.
    """
    charts: dict[tuple[str, str], list[EffectBar]] = {}
    marks: dict[tuple[str, str], list[float]] = {}
    for source in sources:
        if (read := read_effect(source)) is not None:
            key = read.metric, source.region
            charts.setdefault(key, []).append(read.bar)
            marks.setdefault(key, []).extend(read.marks)
    return tuple(
        EffectChart(*key, tuple(bars), tuple(dict.fromkeys(marks[key])), "proved")
        for key, bars in charts.items()
    )


def _bar(
    source: RowSource, row: dict[str, Any], match: re.Match[str], found: Iterable[tuple[Any, re.Match[str]]]
) -> EffectBar:
    """The effect of one run."""
    claims = [
        (one["query"].removesuffix(f" {match['edit']}"), one["verdict"], one["reason"])
        for one, other in found
        if not other["range"]
    ]
    ends = row["lower"], row["upper"], row["clean"]
    return EffectBar(label_of(source.name, match["edit"]), match["edit"], *ends, tuple(claims), row["query"])


def _thresholds(found: Iterable[tuple[Any, re.Match[str]]]) -> Iterable[float]:
    for _, match in found:
        if match["least"]:
            yield float(match["least"])
        if match["most"]:
            yield from (-float(match["most"]), float(match["most"]))


def draw_effects(chart: EffectChart) -> Drawing:
    """Draw a bar for every edit, from the least to the largest effect; its colour is the weakest verdict.

    Args:
        chart: the effects.
    """
    what = "proved for every point" if chart.worth == "proved" else f"{chart.worth}, in float64"
    return draw_bars(
        f"Effects on {chart.name}",
        f"effect on {chart.metric}",
        [
            Bar(bar.label, _tip(bar), bar.query, bar.lower, bar.upper, bar.middle, bar.kind, bar.word)
            for bar in chart.bars
        ],
        [f"metric of the model − metric of the edited model ({what})", chart.where],
        left=210.0,
        letters=30,
        marks=chart.marks,
    )


def _tip(bar: EffectBar) -> str:
    told = "".join(f"; {claim}: {verdict} ({reason})" for claim, verdict, reason in bar.claims)
    return f"{bar.edit}: {number(bar.lower, 'unknown')} to {number(bar.upper, 'unknown')}{told}"
