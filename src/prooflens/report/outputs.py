"""The sixth picture: what the model says, and how far every candidate is proved to stay behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prooflens.report.bars import GUARANTEES, MOST_BARS, BarWords, Margin, cut, draw_margins
from prooflens.report.source import RowSource
from prooflens.report.svg import Drawing, number, visible


@dataclass(frozen=True)
class Answer:
    """What the model says on one ball, its verdict over all outputs, and its nearest candidates."""

    text: str
    verdict: str
    guarantee: str
    eps: float | None
    reason: str
    candidates: tuple[Margin, ...]

    @property
    def name(self) -> str:
        """How a list names it."""
        return f"{visible(self.text)}, ε = {number(self.eps, 'another region')}"


def answers(sources: Sequence[RowSource]) -> tuple[Answer, ...]:
    """The answers of runs that `prooflens output` made: a row of `argmax`, followed by those of its candidates.

    Args:
        sources: the rows of runs and results.
    """
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
        tuple(Margin(**{name: row[name] for name in kept}) for row in rows),
    )


def answer_bars(answer: Answer) -> Drawing:
    """One bar per candidate, from the smallest to the largest distance that bounds allow; the tick is the clean one.

    Args:
        answer: the answer and its candidates.
    """
    known = GUARANTEES.get(answer.guarantee, answer.guarantee)
    words = BarWords(
        f"Distance of the candidates from {visible(answer.text)}",
        f"“{cut(answer.text, 24)}” {answer.verdict}, ε = {number(answer.eps, 'another region')}",
        "behind on the clean input",
        f"logit of the answer − logit of the candidate ({known})",
        answer.reason,
    )
    return draw_margins(answer.candidates, words)
