"""Effects against the size of the region: between which ends an edit's effect is proved to lie, radius by radius."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prooflens.report.effects import NO_CLAIM, EffectBar, read_effect
from prooflens.report.source import RowSource
from prooflens.report.svg import Drawing, hit, number

RADIUS = re.compile(r" ?ε=[^ ,]+")
"""The radius in a region's label."""

LEFT, RIGHT, TOP, BOTTOM = 74.0, 540.0, 30.0, 246.0

FAR = 20.0
"""Thresholds further from 0 than so many times the effect on the smallest ball are not drawn."""

WIDE = 1.6
"""The axis ends at so many times the largest effect on the smallest ball, or threshold: wider bounds end there."""


class SizedEffect(NamedTuple):
    """The effect on the ball of one radius, and what it is about."""

    eps: float
    bar: EffectBar


@dataclass(frozen=True)
class EffectCurve:
    """The effect of one edit on one metric, on balls of several radii around one prompt.

    Attributes:
        metric: what is measured.
        edit: the edit, as short as it can be told.
        sized: its effect, from the smallest radius to the largest.
        marks: the thresholds of claims.
    """

    metric: str
    edit: str
    sized: tuple[SizedEffect, ...]
    marks: tuple[float, ...]

    @property
    def name(self) -> str:
        """How a list names it."""
        return f"{self.edit}, {self.metric}"


def effect_curves(sources: Sequence[RowSource]) -> tuple[EffectCurve, ...]:
    """Return a curve for every edit whose effect on a metric is known on balls of two radii or more.

    Args:
        sources: runs, or results; those that are not about effects on balls are left out.
    """
    found: dict[tuple[str, str, str], list[SizedEffect]] = {}
    marks: dict[tuple[str, str, str], list[float]] = {}
    for source in sources:
        read, eps = read_effect(source), source.eps
        if read is not None and eps:
            key = read.metric, read.bar.label, RADIUS.sub("", source.region)
            found.setdefault(key, []).append(SizedEffect(eps, read.bar))
            marks.setdefault(key, []).extend(read.marks)
    return tuple(
        EffectCurve(
            metric, edit, tuple(sorted(sized, key=lambda one: one.eps)), tuple(dict.fromkeys(marks[key]))
        )
        for key, sized in found.items()
        if len({one.eps for one in sized}) > 1
        for metric, edit, _ in [key]
    )


class _Axes(NamedTuple):
    """Where a radius and a value stand: radii on a logarithmic axis, values on a straight one."""

    radii: tuple[float, float]
    values: tuple[float, float]

    def x(self, eps: float) -> float:
        """The place of a radius."""
        least, most = map(math.log, self.radii)
        return LEFT + (math.log(eps) - least) / (most - least) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        """The place of a value; one beyond the axis stands at its end."""
        least, most = self.values
        return BOTTOM - (min(max(value, least), most) - least) / (most - least) * (BOTTOM - TOP)


def draw_effect_curve(curve: EffectCurve) -> Drawing:
    """Draw the proved ends against ε; a circle has the weakest verdict of the claims at its radius.

    Args:
        curve: the effects by radius.
    """
    drawing = Drawing(560.0, 318.0, f"Effect of {curve.edit} on {curve.metric} against ε")
    known = [(sized.eps, ends) for sized in curve.sized if (ends := _ends(sized.bar)) is not None]
    clean = [bar.middle for _, bar in curve.sized if bar.middle is not None]
    small = [abs(value) for value in (*clean, *(known[0][1] if known else ()))] or [1.0]
    near = [mark for mark in curve.marks if abs(mark) <= FAR * max(small)]
    reach = WIDE * max(small + [abs(mark) for mark in near])
    values = [max(-reach, min(reach, end)) for _, ends in known for end in ends]
    axes = _Axes((curve.sized[0].eps, curve.sized[-1].eps), _with_margin([*values, *clean, *near, 0.0]))
    drawing.add("path", None, kind="axis", d=f"M{LEFT},{TOP}V{BOTTOM}H{RIGHT}")
    for value, kind in [(0.0, "zero"), *((mark, "axis") for mark in near)]:
        drawing.line(LEFT, axes.y(value), RIGHT, axes.y(value), kind)
        drawing.text(LEFT - 8.0, axes.y(value) + 4.0, number(value), "small quiet", "end")
    sides = [_steps([(axes.x(eps), axes.y(ends[side])) for eps, ends in known]) for side in (0, 1)]
    if known:
        drawing.add("polygon", None, kind="gap", points=_points(sides[0] + sides[1][::-1]))
        for side in sides:
            drawing.add("polyline", None, kind="proved-line", points=_points(side))
    for sized in curve.sized:
        drawing.text(axes.x(sized.eps), BOTTOM + 18.0, number(sized.eps), "small quiet")
        _circles(drawing, curve, sized, axes)
    if clean:
        drawing.text(RIGHT, TOP - 10.0, f"at the prompt {number(clean[0])}", "small quiet", "end")
    drawing.text((LEFT + RIGHT) / 2, BOTTOM + 38.0, "radius ε of the ball", "small")
    drawing.line(LEFT, BOTTOM + 60.0, LEFT + 26.0, BOTTOM + 60.0, "proved-line")
    legend = "proved ends of the effect; between two radii those of the larger ball"
    drawing.text(LEFT + 32.0, BOTTOM + 64.0, legend, "small", "start")
    return drawing


def _circles(drawing: Drawing, curve: EffectCurve, sized: SizedEffect, axes: _Axes) -> None:
    """Mark the ends at one radius; where they are not known, one circle stands on the axis."""
    eps, bar = sized
    told = "".join(f"; {claim}: {verdict}" for claim, verdict, _ in bar.claims)
    ends = _ends(bar)
    nothing = "unknown" if ends is None else "holds"
    tip = f"{curve.edit} at ε = {number(eps)}: {number(bar.lower, 'unknown')} to {number(bar.upper, 'unknown')}{told}"
    for y in (BOTTOM,) if ends is None else map(axes.y, ends):
        drawing.add(
            "circle",
            None,
            kind=f"hit {nothing if bar.kind == NO_CLAIM else bar.kind}",
            cx=round(axes.x(eps), 2),
            cy=round(y, 2),
            r=4.5,
            **hit(tip, query=bar.query),
        )


def _ends(bar: EffectBar) -> tuple[float, float] | None:
    """The proved ends, where both are finite."""
    if bar.lower is None or bar.upper is None or not (math.isfinite(bar.lower) and math.isfinite(bar.upper)):
        return None
    return bar.lower, bar.upper


def _with_margin(values: Sequence[float]) -> tuple[float, float]:
    """The range of values, and a little on both sides."""
    span = (max(values) - min(values)) or 1.0
    return min(values) - 0.08 * span, max(values) + 0.08 * span


def _steps(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A line in steps: between two radii what is proved at the larger one is proved, and nothing else."""
    corners = [(left, y) for (left, _), (_, y) in itertools.pairwise(places)]
    return [*places[:1], *(point for pair in zip(corners, places[1:], strict=True) for point in pair)]


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
