"""A family of prompts as one page: shares by pairs of slots, margins, failures by their texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prooflens.certificate.store import read_run
from prooflens.errors import RunError
from prooflens.report.data import Row
from prooflens.report.page import document, footer, header, panels, table
from prooflens.report.svg import SCALE, Drawing, escaped, hit, ink_on, number, visible
from prooflens.report.written import slug, write_drawings, write_page
from prooflens.results.families import FamilyResults

MOST_CELLS = 40
"""Fillers of a side of a matrix: of longer lists those with the smallest shares."""

MOST_TEXT = 14
"""Letters of a filler beside a matrix."""

CAPTIONS = {
    "matrix": "Rows and columns are fillers of two slots, the smallest shares first; the colour and the number are the "
    "share of members with both that satisfy the claim, in percent. Of long lists the fillers with the smallest "
    "shares are drawn. An empty cell has no member.",
    "margins": "How many members have which margin. Left of 0 the claim fails, right of it it holds; a margin is the "
    "smallest of the claim's functionals, in float64.",
    "claims": "<b>enumerated</b>: every member was run in float64. <b>proved</b>: every member was also confirmed over "
    "the reals, in ball arithmetic. <b>estimated</b>: a sample was run; lower and upper are its 95 % "
    "Clopper–Pearson interval.",
    "failures": "Members that do not satisfy a claim, by their texts; the claim's row says how many there are in all.",
    "fillers": "For every filler of every slot, how many of its members satisfy the claim.",
}


@dataclass(frozen=True, eq=False)
class FamilyPage:
    """What the page of a family is made of.

    Attributes:
        name: the family.
        model: the model's name.
        sha256: the fingerprint of its weights.
        command: how to make it again; None if it is not known.
        members: how many there are.
        fillers: the texts of every slot's fillers.
        claims: one row per claim.
        rows: all rows of the run.
        tables: by claim and slots, satisfied and run members.
        histograms: by claim, width and counts.
    """

    name: str
    model: str
    sha256: str
    command: str | None
    members: int
    fillers: Mapping[str, Sequence[str]]
    claims: Sequence[Row]
    rows: Sequence[Row]
    tables: Mapping[tuple[str, ...], NDArray[np.int64]]
    histograms: Mapping[str, tuple[float, NDArray[np.int64]]]

    @classmethod
    def of(cls, found: FamilyResults | Path | str) -> FamilyPage:
        """Read results in memory, or a run directory.

        Args:
            found: what `pl.family` returned, or the path of its run.

        Raises:
            RunError: if the run is not about a family.
        """
        return cls._of_results(found) if isinstance(found, FamilyResults) else cls._of_run(Path(found))

    @classmethod
    def _of_results(cls, found: FamilyResults) -> FamilyPage:
        family, rows = found.family, found.table.to_pylist()
        tables: dict[tuple[str, ...], NDArray[np.int64]] = {}
        for row in found.rows:
            tables |= {(row.query, slot): counts for slot, counts in row.by_slot.items()}
            tables |= {(row.query, *pair): counts for pair, counts in row.by_pair.items()}
        return cls(
            family.label,
            family.model.name,
            family.model.sha256,
            None,
            family.size,
            {
                slot: [family.filler(slot, i) for i in range(len(words))]
                for slot, words in family.words.items()
            },
            [row for row in rows if row["what"] == "claim"],
            rows,
            tables,
            {row.query: row.histogram for row in found.rows},
        )

    @classmethod
    def _of_run(cls, path: Path) -> FamilyPage:
        run = read_run(path)
        if run.info["kind"] != "family":
            raise RunError(f"{path} is not about a family of prompts: give runs of one kind to a report")
        rows = run.rows.to_pylist()
        claims = [row for row in rows if row["what"] == "claim"]
        slots = run.info["family"]["slots"]
        tables: dict[tuple[str, ...], NDArray[np.int64]] = {}
        for i, claim in enumerate(claims):
            names = [(slot,) for slot in slots] + list(itertools.combinations(slots, 2))
            for pair in names:
                key = f"claim/{i}/{'slot' if len(pair) == 1 else 'pair'}/{'/'.join(pair)}"
                if key in run.tensors:
                    tables[claim["query"], *pair] = run.tensors[key]
        return cls(
            run.info["family"]["label"],
            run.info["model"]["name"],
            run.info["model"]["sha256"],
            run.info["configuration"].get("command"),
            run.info["family"]["members"],
            {slot: [w if isinstance(w, str) else f"#{w}" for w in words] for slot, words in slots.items()},
            claims,
            rows,
            tables,
            {
                claim["query"]: (run.tensors[f"claim/{i}/width"].item(), run.tensors[f"claim/{i}/histogram"])
                for i, claim in enumerate(claims)
            },
        )


def report_family(
    found: FamilyResults | Path | str, out: Path | str, figures: Path | str | None = None
) -> list[Path]:
    """Write the page of a family.

    Args:
        found: what `pl.family` returned, or the path of its run.
        out: the HTML file.
        figures: a folder that also gets the pictures as files; None for none.

    Returns:
        The paths of the pictures.
    """
    page = FamilyPage.of(found)
    write_page(Path(out), render_family(page))
    if figures is None:
        return []
    named = ((f"{kind}-{slug(name)}", drawing) for kind, name, drawing in pictures(page))
    return write_drawings(named, Path(figures))


def pictures(page: FamilyPage) -> Iterator[tuple[str, str, Drawing]]:
    """Every picture with its kind and name.

    Args:
        page: what is known of the family.
    """
    for claim in page.claims:
        query = claim["query"]
        for key, counts in page.tables.items():
            if key[0] == query and len(key) == 3:
                yield "matrix", f"{query}, {key[1]} × {key[2]}", draw_matrix(page, key, counts)
    for query, (width, counts) in page.histograms.items():
        if counts.sum():
            yield "margins", query, draw_margins(query, width, counts)


def render_family(page: FamilyPage) -> str:
    """The HTML text.

    Args:
        page: what is known of the family.
    """
    facts = {
        "model": escaped(page.model),
        "sha256 of its weights": f"<code>{escaped(page.sha256)}</code>",
        "members": f"{page.members:,}",
        "slots": escaped(", ".join(f"{slot}: {len(words):,}" for slot, words in page.fillers.items())),
    }
    more = "" if page.command is None else f'<pre class="command">{escaped(page.command)}</pre>'
    counts: dict[str, int] = {}
    for claim in page.claims:
        counts[claim["word"]] = counts.get(claim["word"], 0) + 1
    title = f"What {page.model} does on {page.members:,} prompts"
    body = table("claims", "Claims", ("query", "word", "held", "asked", "members", "share", "lower", "upper", "margin",
                 "unit", "note"), page.claims, CAPTIONS["claims"])  # fmt: skip
    drawn = list(pictures(page))
    for kind, label in (("matrix", "Shares by two slots"), ("margins", "Margins")):
        here = [(name, drawing) for other, name, drawing in drawn if other == kind]
        if here:
            names, made = zip(*here, strict=True)
            inner = panels("claim", kind, names, made)
            body += f'<section id="{kind}"><h2>{label}</h2><p class="caption">{CAPTIONS[kind]}</p>{inner}</section>'
    failures = [row for row in page.rows if row["what"] == "failure"]
    if failures:
        body += table("failures", "Failures", ("query", "text", "margin"), failures, CAPTIONS["failures"])
    fillers = [row for row in page.rows if row["what"] == "filler"]
    fillers.sort(key=lambda row: row["share"])
    columns = ("query", "slot", "filler", "held", "asked", "share")
    body += table("fillers", "Shares by filler", columns, fillers, CAPTIONS["fillers"])
    top = header(title, page.name, counts, facts, more)
    return document(page.model, f"{top}<main>{body}</main>{footer([])}")


def draw_matrix(page: FamilyPage, key: tuple[str, ...], counts: NDArray[np.int64]) -> Drawing:
    """The share of members with two fillers that satisfy a claim.

    Args:
        page: the page, for the names of fillers.
        key: the claim and both slots.
        counts: satisfied and run members, shape [2, fillers, fillers].
    """
    query, a, b = key
    sides = [_smallest(counts.sum(2)), _smallest(counts.sum(1))]
    side, left, top = 26.0, 120.0, 120.0
    width, height = left + side * len(sides[1]) + 20.0, top + side * len(sides[0]) + 20.0
    drawing = Drawing(max(width, 360.0), height, f"Share of {query} by {a} and {b}")
    drawing.text(left - 10.0, top - 10.0, f"{a} ↓  {b} →", "small quiet", "end")
    for column, j in enumerate(sides[1]):
        x = left + side * (column + 0.6)
        name = _short(page.fillers[b][j])
        drawing.text(x, top - 8.0, name, "small", "start", transform=f"rotate(-60 {x:.1f} {top - 8.0})")
    for line, i in enumerate(sides[0]):
        y = top + side * line
        drawing.text(left - 8.0, y + 17.0, _short(page.fillers[a][i]), "small", "end")
        for column, j in enumerate(sides[1]):
            held, asked = counts[:, i, j].tolist()
            if not asked:
                continue
            share, x = held / asked, left + side * column
            colour = SCALE[round((1.0 - share) * (len(SCALE) - 1))]
            tip = f"{a}={page.fillers[a][i]!r}, {b}={page.fillers[b][j]!r}: {held:,} of {asked:,} hold"
            drawing.open(kind="hit", **hit(tip))
            drawing.rect(x, y, side - 1.0, side - 1.0, style=f"fill:{colour}")
            text = "●" if held == asked else f"{100.0 * share:.0f}"
            drawing.text(x + side / 2, y + 17.0, text, "small", style=f"fill:{ink_on(colour)}")
            drawing.close()
    return drawing


def draw_margins(query: str, width: float, counts: NDArray[np.int64]) -> Drawing:
    """How many members have which margin.

    Args:
        query: the claim.
        width: of a bin.
        counts: of the bins, half of them below 0.
    """
    half = len(counts) // 2
    used = np.flatnonzero(counts)
    first, last = min(int(used[0]), half), max(int(used[-1]) + 1, half)
    left, right, top, bottom = 70.0, 640.0, 24.0, 230.0
    drawing = Drawing(680.0, 290.0, f"Margins of {query}")
    step, most = (right - left) / (last - first), int(counts.max())
    for place in range(first, last):
        count = int(counts[place])
        if not count:
            continue
        low = (place - half) * width
        tall = max(1.5, (bottom - top) * count / most)
        tip = f"margin {number(low)} to {number(low + width)}: {count:,} members"
        drawing.open(kind="hit", **hit(tip))
        kind = "fails" if place < half else "holds"
        drawing.rect(left + step * (place - first), bottom - tall, max(1.0, step - 1.0), tall, kind=kind)
        drawing.close()
    zero = left + step * (half - first)
    drawing.add("path", None, kind="axis", d=f"M{left},{bottom}H{right}")
    drawing.line(zero, top, zero, bottom, "zero")
    for place in sorted({first, half, last}):
        drawing.text(
            left + step * (place - first), bottom + 18.0, number((place - half) * width), "small quiet"
        )
    drawing.text(left - 8.0, top + 8.0, f"{most:,}", "small quiet", "end")
    drawing.text((left + right) / 2, bottom + 42.0, "margin", "small")
    return drawing


def _smallest(counts: NDArray[np.int64]) -> list[int]:
    """The fillers of a side that have members, the smallest shares first, so many as are drawn."""
    there = np.flatnonzero(counts[1])
    shares = counts[0][there] / counts[1][there]
    found: list[int] = there[np.argsort(shares, kind="stable")][:MOST_CELLS].tolist()
    return found


def _short(text: str) -> str:
    shown = visible(text.strip())
    return shown if len(shown) <= MOST_TEXT else f"{shown[: MOST_TEXT - 1]}…"
