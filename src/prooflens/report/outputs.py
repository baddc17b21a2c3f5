"""The sixth picture: what the model says, and how far every candidate is proved to stay behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prooflens.report.source import RowSource
from prooflens.report.svg import Drawing, hit, number, visible

MOST_BARS = 40
"""Candidates of one picture."""


@dataclass(frozen=True)
class Candidate:
    """An output beside the answer: Logit(answer) − Logit(candidate), clean and bounded; None: no bound."""

    text: str
    query: str
    verdict: str
    clean: float
    lower: float | None
    upper: float | None


@dataclass(frozen=True)
class Answer:
    """What the model says on one ball, its verdict over all outputs, and its nearest candidates."""

    text: str
    verdict: str
    guarantee: str
    eps: float | None
    reason: str
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        """How a list names it."""
        return f"{visible(self.text)}, ε = {number(self.eps, 'another region')}"


def answers(sources: Sequence[RowSource]) -> tuple[Answer, ...]:
    """The answers of runs that `prooflens output` made: a row of `argmax`, followed by those of its candidates."""
    found = []
    for source in sources:
        if "candidate" not in source.table.column_names:
            continue
        rows: list[dict[str, Any]] = source.table.drop_columns(["tokens"]).to_pylist()
        starts = [i for i, row in enumerate(rows) if row["query"] == "argmax"]
        for start, stop in pairwise([*starts, len(rows)]):
            found.append(_answer(rows[start], rows[start + 1 : stop][:MOST_BARS]))
    return tuple(found)


def _answer(whole: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Answer:
    kept = ("text", "query", "verdict", "clean", "lower", "upper")
    return Answer(
        whole["text"],
        whole["verdict"],
        whole["guarantee"],
        whole["eps"],
        whole["reason"],
        tuple(Candidate(**{name: row[name] for name in kept}) for row in rows),
    )


def answer_bars(answer: Answer) -> Drawing:
    """One bar per candidate, from the smallest to the largest distance that bounds allow; the tick is the clean one."""
    left, right, top, step = 130.0, 560.0, 40.0, 24.0
    bottom = top + step * len(answer.candidates)
    drawing = Drawing(760.0, bottom + 62.0, f"Distance of the candidates from {visible(answer.text)}")
    known = [
        v
        for c in answer.candidates
        for v in (c.clean, c.lower, c.upper)
        if v is not None and math.isfinite(v) and abs(v) <= 4.0 * max(abs(x.clean) for x in answer.candidates)
    ]
    low, high = min([0.0, *known]), max([1e-9, *known])
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return left + (min(max(value, low), high) - low) / (high - low) * (right - left)

    title = f"“{_cut(answer.text, 24)}” {answer.verdict}, ε = {number(answer.eps, 'another region')}"
    drawing.text(left, 18.0, title, "", "start")
    for i, candidate in enumerate(answer.candidates):
        y = top + step * (i + 0.5)
        tip = (
            f"“{_cut(candidate.text, 24)}”: {number(candidate.clean)} behind on the clean input, between "
            f"{number(candidate.lower, 'unknown')} and {number(candidate.upper, 'unknown')} on the region; "
            f"{candidate.verdict}"
        )
        drawing.open(kind="hit", **hit(tip, query=candidate.query))
        drawing.rect(4.0, y - step / 2, 752.0, step, fill="transparent")
        drawing.text(left - 10.0, y + 4.0, _cut(candidate.text, 16), "small", "end")
        if candidate.lower is None or candidate.upper is None:
            drawing.rect(left, y - 5.0, right - left, 10.0, fill="url(#hatch)")
            label = "no bounds"
        else:
            start, stop = place(candidate.lower), place(candidate.upper)
            drawing.rect(start, y - 5.0, max(2.0, stop - start), 10.0, kind=candidate.verdict)
            label = f"{number(candidate.lower)} … {number(candidate.upper)}"
        drawing.line(place(candidate.clean), y - 8.0, place(candidate.clean), y + 8.0, "tick")
        drawing.text(right + 12.0, y + 4.0, label, "small", "start")
        drawing.close()
    drawing.line(place(0.0), top, place(0.0), bottom, "zero")
    drawing.add("path", None, kind="axis", d=f"M{left},{bottom}H{right}")
    for share in (0.0, 0.5, 1.0):
        value = low + margin + share * (high - low - 2.0 * margin)
        drawing.text(place(value), bottom + 16.0, number(value), "small quiet")
    words = {
        "proved": "proved",
        "witness": "proved",
        "estimated": "estimated, not proved",
        "none": "nothing is known",
    }
    label = f"logit of the answer − logit of the candidate ({words.get(answer.guarantee, answer.guarantee)})"
    drawing.text((left + right) / 2, bottom + 36.0, label, "small quiet")
    drawing.text((left + right) / 2, bottom + 54.0, _cut(answer.reason, 110), "small quiet")
    return drawing


def _cut(text: str, most: int) -> str:
    shown = visible(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
