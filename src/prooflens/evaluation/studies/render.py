"""How a result is shown: Markdown, a picture, and the page that sums up all results."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prooflens.evaluation.studies.base import COUNT, Result, StudyError, StudyRow
from prooflens.report.svg import Drawing, number

HEAD = ("", "engine", "paper", "proved", "estimated", "attack leaves standing", "n", "s")
MEASURED = ("", "paper", "measured", "n")
"""The heading of rows that are only measured."""
ATTAINED = "attained"
"""The heading of the attack's column where rows are values: what it reaches, not what it leaves."""


def cells(row: StudyRow) -> list[str]:
    """A row as a table shows it: counts with their share and interval."""
    estimate = amount(row, row.estimated)
    if row.estimated is not None and row.false:
        estimate += f", **{row.false} false**"
    return [
        row.label,
        f"`{row.engine}`" if row.engine else "–",
        published(row),
        amount(row, row.proved),
        estimate,
        amount(row, row.attack),
        "–" if row.n is None else str(row.n),
        "–" if row.seconds is None else number(row.seconds),
    ]


def amount(row: StudyRow, value: float | None) -> str:
    """One of our figures."""
    if value is None:
        return "–"
    if row.unit != COUNT:
        return f"{number(value)} {row.unit if row.unit in ('s', 'nat') else ''}".strip()
    low, high = row.interval(value) or (0.0, 0.0)
    return f"{int(value)} = {100 * value / (row.n or 1):.1f} % [{low:.0f}, {high:.0f}]"


def published(row: StudyRow) -> str:
    """The paper's figure, and its attack's in brackets."""
    unit = " %" if row.unit == COUNT else ""
    if row.paper is None:
        return "–" if row.paper_attack is None else f"(MC {row.paper_attack:g}{unit})"
    return f"{row.paper:g}{unit}" + ("" if row.paper_attack is None else f" (MC {row.paper_attack:g})")


def markdown(result: Result, pictures: str | None = None, level: int = 2) -> str:
    """A section: title, command, table by table, notes; with the picture where a folder for pictures is named."""
    lines = [f"{'#' * level} {result.key}", "", f"{result.title}.", ""]
    lines += [f"    {result.command}", ""]
    quick = ", quick" if result.quick else ""
    lines += [f"{result.minutes:g} minutes{quick}; model: {result.model}; {result.code}.", ""]
    if pictures is not None:
        lines += [f"![{result.title}]({pictures}/{result.key}.svg)", ""]
    for group, rows in itertools.groupby(result.rows, key=lambda row: row.group):
        held = list(rows)
        plain = all(row.measured is not None for row in held)
        head = list(MEASURED if plain else HEAD)
        head[0] = group
        if not plain and all(row.unit != COUNT for row in held):
            head[5] = ATTAINED
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in held:
            shown = (
                [row.label, published(row), amount(row, row.measured), str(row.n)] if plain else cells(row)
            )
            lines.append("| " + " | ".join(shown) + " |")
        lines.append("")
        remarks = list(dict.fromkeys(f"- {row.label}: {row.note}." for row in held if row.note))
        lines += [*remarks, ""] if remarks else []
    lines += [f"- {note}" for note in (*result.notes, *broken_estimates(result), *against_paper(result))]
    return "\n".join(lines).rstrip() + "\n"


def broken_estimates(result: Result) -> list[str]:
    """How many of the claims that are estimated to hold an attack breaks."""
    broken = [
        f"{row.group}, {row.label}, `{row.engine}`: {row.false} of {row.estimated:g}"
        for row in result.rows
        if row.false
    ]
    return [f"Estimated to hold, and broken by the attack: {'; '.join(broken)}."] if broken else []


def against_paper(result: Result) -> list[str]:
    """Where the paper's figures are not ours, in words: its rates to our intervals, its values to ours."""
    rates = [(row, place) for row in result.rows if (place := row.against_paper) is not None]
    values = [
        (
            row,
            "half as large or less"
            if ours >= 2 * paper
            else "twice as large or more"
            if ours <= paper / 2
            else "",
        )
        for row in result.rows
        if row.unit != COUNT and (paper := row.paper) and (ours := row.figure or row.attack or row.measured)
    ]
    found = []
    if rates:
        parts = [f"{sum(place == 'inside' for _, place in rates)} inside them"]
        parts += [_named(rates, place, f"{place} them") for place in ("above", "below")]
        found.append(f"The paper's {len(rates)} rates to our intervals: {', '.join(filter(None, parts))}.")
    if values:
        parts = [f"{sum(not place for _, place in values)} within a factor of two"]
        parts += [
            _named(values, place, place) for place in ("twice as large or more", "half as large or less")
        ]
        found.append(f"The paper's {len(values)} values to ours: {', '.join(filter(None, parts))}.")
    beyond = [f"{label}: {paper:g} and {mc:g}" for label, paper, mc in dict.fromkeys(_beyond_attack(result))]
    if beyond:
        found.append(
            f"The paper's own figure is beyond its own MC+PGD, where no proof can be: {'; '.join(beyond)}."
        )
    return found


def _beyond_attack(result: Result) -> Iterator[tuple[str, float, float]]:
    """Where the paper has a higher rate than its attack leaves, or a narrower range than its attack attains."""
    for row in result.rows:
        if row.paper is None or row.paper_attack is None:
            continue
        higher = row.paper > row.paper_attack
        if higher if row.unit == COUNT else row.paper < row.paper_attack:
            yield row.label, row.paper, row.paper_attack


def _named(rows: Sequence[tuple[StudyRow, str]], place: str, text: str) -> str:
    """How many rows lie there, and one of them."""
    held = [row for row, where in rows if where == place]
    if not held:
        return ""
    row = held[0]
    value = next((v for v in (row.figure, row.attack, row.measured) if v is not None), None)
    unit = " %" if row.unit == COUNT else ""
    name = ", ".join(filter(None, (row.group, row.label, row.engine and f"`{row.engine}`")))
    return f"{len(held)} {text} (such as {name}: {row.paper:g}{unit}, ours {amount(row, value).partition(' [')[0]})"


def agreement(result: Result) -> str:
    """How the paper's rates lie to ours, in words."""
    found = Counter(place for row in result.rows if (place := row.against_paper) is not None)
    parts = [f"{found[place]} {place}" for place in ("inside", "above", "below") if found[place]]
    return ", ".join(parts) or "–"


def headline(result: Result) -> StudyRow | None:
    """The row that stands for a result: the first that the paper has a figure for, else the first."""
    known = [row for row in result.rows if row.paper is not None or row.paper_attack is not None]
    return next(iter(known or result.rows), None)


def summary(results: Sequence[Result], page_of: dict[str, str] | None = None) -> str:
    """The page that sums up: one line per study."""
    head = [
        "study",
        "row",
        "paper",
        "proved",
        "estimated",
        "attack",
        "n",
        "paper's rates to our intervals",
        "command",
        "min",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        row = headline(result)
        if row is None:
            continue
        link = f"[{result.key}]({page_of[result.key]})" if page_of and result.key in page_of else result.key
        shown = cells(row)
        lines.append(
            "| "
            + " | ".join(
                [
                    link,
                    f"{row.group}: {row.label}, {row.engine}".rstrip(", "),
                    *shown[2:6],
                    shown[6],
                    agreement(result),
                    f"`{result.command}`",
                    f"{result.minutes:g}",
                ]
            )
            + " |"
        )
    lines += ["", f"{sum(result.minutes for result in results):.1f} minutes in all."]
    return "\n".join(lines) + "\n"


LEFT, RIGHT, LINE, TOP = 330.0, 40.0, 17.0, 46.0
WIDTH = 820.0
MOST_ROWS = 60


def picture(result: Result) -> str:
    """An SVG: per row a bar for what is proved (or estimated), a stroke for the attack, a diamond for the paper.

    Where there are rates, only they are drawn: values have other units.
    """
    known = [row for row in result.rows if (row.figure, row.attack, row.measured) != (None, None, None)]
    counts = any(row.unit == COUNT for row in known)
    rows = [row for row in known if (row.unit == COUNT) is counts][:MOST_ROWS]
    made = Drawing(WIDTH, TOP + LINE * (len(rows) + 1) + 30, result.title)
    made.text(10, 18, f"{result.key}: {result.title}", anchor="start")
    _legend(made)
    scale = _Scale(rows, counts)
    bottom = TOP + LINE * len(rows)
    for value, place in scale.ticks():
        made.line(place, TOP - 4, place, bottom + 4, "axis")
        made.text(place, bottom + 18, f"{number(value)}{' %' if counts else ''}", "small")
    for i, row in enumerate(rows):
        _draw(made, row, TOP + LINE * (i + 0.5), scale)
    return made.svg(alone=True)


def _legend(made: Drawing) -> None:
    x, y = 12.0, 36.0
    for kind, text in (("holds", "proved"), ("estimated", "estimated (no proof)"), ("unknown", "measured")):
        made.rect(x, y - 8, 14, 8, kind=kind)
        made.text(x + 19, y, text, "small", "start")
        x += 70.0 + 6.0 * len(text)
    made.line(x, y - 10, x, y + 2, "attack-line")
    made.text(x + 8, y, "attack", "small", "start")
    made.add("path", None, d=_diamond(x + 75, y - 4), fill="#fff", stroke="#1b1f24")
    made.text(x + 85, y, "paper", "small", "start")


def _diamond(x: float, y: float) -> str:
    return f"M{x - 5:g} {y:g}L{x:g} {y - 5:g}L{x + 5:g} {y:g}L{x:g} {y + 5:g}Z"


def _draw(made: Drawing, row: StudyRow, y: float, scale: _Scale) -> None:
    label = " · ".join(part for part in (row.group, row.label, row.engine) if part)
    made.text(LEFT - 8, y + 4, label if len(label) < 56 else label[:54] + "…", "small", "end")
    figure = scale.share(row, row.figure)
    if figure is not None:
        kind = "holds" if row.proved is not None else "estimated"
        made.rect(LEFT, y - 5, max(1.0, scale(figure) - LEFT), 10, kind=kind)
    if row.measured is not None:
        made.rect(
            LEFT, y - 5, max(1.0, scale(scale.share(row, row.measured) or 0.0) - LEFT), 10, kind="unknown"
        )
    attack = scale.share(row, row.attack)
    if attack is not None:
        made.line(scale(attack), y - 7, scale(attack), y + 7, "attack-line")
    if row.paper is not None and scale.fits(row.paper):
        made.add("path", None, d=_diamond(scale(row.paper), y), fill="#fff", stroke="#1b1f24")


class _Scale:
    """Per cent from 0 to 100, or a logarithmic scale of the values there are."""

    def __init__(self, rows: Iterable[StudyRow], counts: bool) -> None:
        self.counts = counts
        values = [
            v
            for row in rows
            for v in (row.figure, row.attack, row.measured, row.paper)
            if v is not None and v > 0
        ]
        self.low = math.floor(math.log10(min(values))) if values and not counts else 0
        self.high = max(self.low + 1, math.ceil(math.log10(max(values)))) if values and not counts else 1

    def share(self, row: StudyRow, value: float | None) -> float | None:
        """The value to draw: a count as a percentage."""
        if value is None:
            return None
        return 100.0 * value / (row.n or 1) if self.counts else value

    def fits(self, value: float) -> bool:
        """Whether it can be drawn."""
        return self.counts or value > 0

    def __call__(self, value: float) -> float:
        if self.counts:
            share = value / 100.0
        else:
            share = (math.log10(max(value, 10.0**self.low)) - self.low) / (self.high - self.low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[tuple[float, float]]:
        """Where lines are drawn."""
        if self.counts:
            return [(v, self(v)) for v in (0.0, 25.0, 50.0, 75.0, 100.0)]
        every = max(1, (self.high - self.low) // 6)
        return [(10.0**k, self(10.0**k)) for k in range(self.low, self.high + 1, every)]


def save(result: Result, folder: Path) -> Path:
    """Write `folder`/data/NAME.json, or NAME-layer2.json."""
    path = folder / "data" / f"{result.key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read(folder: Path) -> list[Result]:
    """The results in a folder, in the order of the studies."""
    from prooflens.evaluation.studies.base import study_names

    found = [read_one(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise StudyError(
            f"{folder} holds no results: make some with `prooflens reproduce NAME -o {folder.parent}`"
        )
    order = {name: place for place, name in enumerate(study_names())}
    return sorted(found, key=lambda one: (order.get(one.name, len(order)), len(one.variant), one.variant))


def read_one(path: Path) -> Result:
    """One kept result."""
    try:
        return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise StudyError(f"{path} is not the result of a study: {error}") from error
