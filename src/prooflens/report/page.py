"""One HTML file: header, pictures, tables. Nothing is fetched, nothing is sent; a content policy forbids both."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prooflens.errors import RunError
from prooflens.report.attention import telling_radius
from prooflens.report.data import RADIUS_COLUMNS, VERDICT_COLUMNS, ReportData, Row, collect
from prooflens.report.effect_curves import draw_effect_curve
from prooflens.report.effects import draw_effects
from prooflens.report.figures import attention_map, circuit_graph, radius_map, sandwich, token_strip
from prooflens.report.folders import FAMILY, FAMILY_EFFECTS, VOCABULARY, kind_of, unfolded
from prooflens.report.images import image_map
from prooflens.report.outputs import answer_bars
from prooflens.report.readouts import readout_bars
from prooflens.report.svg import STYLE, Drawing, as_json, escaped, number, visible
from prooflens.report.verdict_map import verdict_maps
from prooflens.report.ways import draw_pieces
from prooflens.report.words import CAPTIONS, positions_asked, said_first
from prooflens.report.written import slug, write_drawings, write_page
from prooflens.version import __version__

if TYPE_CHECKING:
    from prooflens.results.effects import Effect
    from prooflens.results.families import FamilyResults
    from prooflens.results.frame import Frame

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
SHOWN_FIRST = 40
"""Rows that stand in the file as HTML, for readers without scripts; scripts draw the others."""


def report(
    *found: Frame | Effect | FamilyResults | Path | str,
    path: Path | str,
    figures: Path | str | None = None,
) -> Path:
    """Write one self-contained HTML report about results, radii and run directories.

    Args:
        found: what `certify`, `radius`, `output`, `circuit` or `effect` returned, run directories, or folders of
            `discover`; all about one model and prompt. Or, alone, what `family` returned, or its run directory; or
            runs of effects over one family.
        path: the HTML file to write.
        figures: a folder that also gets every picture as SVG and, if a browser is found to draw it, as PNG.

    Returns:
        The path of the HTML file.

    Raises:
        RunError: if the results are about different models or prompts, or a file cannot be read or written.

    Example:
        >>> import prooflens as pl, tempfile
        >>> model = pl.load("toy")
        >>> res = pl.certify(model, model.example(), pl.Ball(0.02), "0.1", positions=[-1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pl.report(res, path=f"{folder}/report.html").name
        'report.html'
    """
    from prooflens.report.families import report_family
    from prooflens.report.family_effects import report_family_effects
    from prooflens.report.vocabulary import report_vocabulary
    from prooflens.results.effects import Effect
    from prooflens.results.families import FamilyResults

    whole = [item.results if isinstance(item, Effect) else item for item in found]
    runs = unfolded([Path(item) for item in whole if isinstance(item, str | Path)])
    held = [item for item in whole if not isinstance(item, str | Path)]
    alone: list[FamilyResults | Path] = [item for item in held if isinstance(item, FamilyResults)]
    alone += [run for run in runs if kind_of(run) == FAMILY]
    if alone and len(runs) + len(held) > 1:
        raise RunError("a family of prompts has a report of its own: give it alone")
    pictures = None if figures is None else Path(figures)
    if alone:
        report_family(alone[0], path, pictures)
        return Path(path)
    if not held and len(runs) == 1 and kind_of(runs[0]) == VOCABULARY:
        report_vocabulary(runs[0], path, pictures)
        return Path(path)
    if not held and any(kind_of(run) == FAMILY_EFFECTS for run in runs):
        report_family_effects(runs, path, pictures)
        return Path(path)
    data = collect(*(item for item in held if not isinstance(item, FamilyResults)), *runs)
    write_page(Path(path), render(data))
    if figures is not None:
        write_figures(data, Path(figures))
    return Path(path)


def drawings(data: ReportData) -> Iterator[tuple[str, Drawing]]:
    """Every picture with its name.

    Args:
        data: what the report shows.
    """
    for query in dict.fromkeys(cell.query for cell in data.radius_map):
        cells = [cell for cell in data.radius_map if cell.query == query]
        yield f"radius-{slug(query)}", radius_map(cells)
    for head in data.attention:
        yield (
            f"attention-{head.layer}.{head.head}",
            attention_map(head, data.tokens, telling_radius(data.attention)),
        )
    for shown in data.images:
        yield f"image-{slug(shown.name)}", image_map(shown)
    for way in data.ways:
        yield f"way-{slug(way.name)}", draw_pieces(way)
    for curve in data.curves:
        layer, at, position, query = curve.key
        yield f"margin-{layer}.{at}@{position}-{slug(query)}", sandwich(curve)
    for i, graph in enumerate(data.circuits):
        yield f"circuit-{i}", circuit_graph(graph)
    if data.strip:
        yield "tokens", token_strip(data.strip)
    for chart in data.effects:
        yield f"effects-{slug(chart.name)}", draw_effects(chart)
    for sized in data.effect_curves:
        yield f"effect-by-radius-{slug(sized.name)}", draw_effect_curve(sized)
    for i, answer in enumerate(data.answers):
        yield f"output-{i}", answer_bars(answer)
    for i, read in enumerate(data.readings):
        yield f"inside-{i}", readout_bars(read)


def write_figures(data: ReportData, folder: Path) -> list[Path]:
    """The pictures of a report as files.

    Args:
        data: what the report shows.
        folder: where the files go.
    """
    return write_drawings(drawings(data), folder)


def render(data: ReportData) -> str:
    """The HTML text.

    Args:
        data: what the report shows.
    """
    sections = list(_sections(data))
    body = f"{_header(data)}{_jumps(sections)}<main>{''.join(sections)}</main>{footer(data.notes)}"
    return document(data.model, body)


def _jumps(sections: Sequence[str]) -> str:
    """Links to the sections, the table of verdicts first: on a phone it stands first, too."""
    heads = [found for text in sections if (found := re.match(r'<section id="(\w+)".*?<h2>(.*?)</h2>', text))]
    heads.sort(key=lambda found: found[1] != "verdicts")
    links = "".join(f'<a href="#{found[1]}">{found[2]}</a>' for found in heads)
    return f'<nav class="jump" aria-label="sections">{links}</nav>' if len(heads) > 1 else ""


def document(name: str, body: str) -> str:
    """A page with a body, its style and its script.

    Args:
        name: the title of the page.
        body: its HTML.
    """
    assets = resources.files("prooflens.report") / "assets"
    style = (assets / "report.css").read_text(encoding="utf-8") + STYLE
    script = (assets / "report.js").read_text(encoding="utf-8")
    title = f"{visible(name)}: prooflens report"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{style}</style></head><body>'
        f"{body}"
        f'<div id="tip" role="tooltip" hidden></div><div id="said" class="status" aria-live="polite" hidden></div>'
        f"<script>{script}</script></body></html>\n"
    )


def _header(data: ReportData) -> str:
    facts = {
        "model": f"{escaped(data.model)}",
        "sha256 of its weights": f"<code>{escaped(data.model_sha256)}</code>",
        "region": "<br>".join(map(escaped, data.regions)),
        "ε in words": "<br>".join(map(escaped, data.eps_in_words)),
        "deployed precision": "<br>".join(map(escaped, data.precision)),
        "engines": escaped(", ".join(data.engines)),
        "what is open": "<br>".join(map(escaped, data.advice)),
        "guarantee of the bounds": escaped(", ".join(data.guarantees) or "radii: certified ≤ true ≤ attack"),
    }
    text = data.text if data.text is not None else " ".join(data.tokens)
    commands = "".join(f'<pre class="command">{escaped(line)}</pre>' for line in data.commands)
    reproduce = f'<p class="eyebrow">reproduce with</p>{commands}' if commands else ""
    said = said_first(data.counts, data.regions, data.radii)
    title = f"What is proved about {'values inside' if data.readings else 'the attention of'} {data.model}"
    return header(title, text, data.counts, facts, reproduce, said)


def header(
    title: str, text: str, counts: Mapping[str, int], facts: Mapping[str, str], more: str = "", said: str = ""
) -> str:
    """The top of a page.

    Args:
        title: what the page is about.
        text: the prompt, or what stands for it.
        counts: how many rows end with each verdict.
        facts: names and what is said of each, as HTML; empty ones are left out.
        more: HTML that follows the facts.
        said: what was found, in a sentence.
    """
    counted = "".join(f'<li class="{slug(v)}"><b>{n:,}</b>{v}</li>' for v, n in counts.items())
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items() if value)
    sentence = f"<p>{escaped(said)}</p>" if said else ""
    return (
        '<header><div class="topline"><div><p class="eyebrow">prooflens report</p>'
        f"<h1>{escaped(title)}</h1></div>"
        '<button id="theme" type="button" aria-label="switch between light and dark">light / dark</button></div>'
        f'<p class="prompt"><bdi>{escaped(text)}</bdi></p>{sentence}<ul class="counts">{counted}</ul>'
        f'<dl class="facts">{rows}</dl>{more}</header>'
    )


def footer(said: Sequence[str]) -> str:
    """Notes, and what the words for verdicts mean.

    Args:
        said: notes.
    """
    notes = "".join(f"<p>{escaped(note)}</p>" for note in said)
    return (
        "<footer>"
        + notes
        + "<p><b>holds</b> is a proof about real numbers for every point of the region, rounding "
        "included. <b>fails</b> comes with a point of the region that was run through the model. <b>unknown</b> is "
        "neither. <b>estimated</b> is not a proof. Check a run without trusting this program's engines: "
        "<code>prooflens check RUN</code>; where that was done, the column <b>checked</b> has its word for each row. "
        f"Made by prooflens {escaped(__version__)}.</p></footer>"
    )


def _sections(data: ReportData) -> Iterator[str]:
    if data.answers:
        body = panels(
            "answer", "output", [a.name for a in data.answers], [answer_bars(a) for a in data.answers]
        )
        yield section("output", "What the model says", body)
    if data.readings:
        body = panels(
            "region", "inside", [r.name for r in data.readings], [readout_bars(r) for r in data.readings]
        )
        yield section("inside", "Values inside the model", body)
    if data.effects:
        names, drawn = [c.name for c in data.effects], [draw_effects(c) for c in data.effects]
        yield section("effects", "What each edit changes", panels("metric", "effects", names, drawn))
    if data.effect_curves:
        names = [c.name for c in data.effect_curves]
        drawn = [draw_effect_curve(c) for c in data.effect_curves]
        yield section("sizes", "Effects by the size of the ball", panels("edit", "sizes", names, drawn))
    if data.radius_map:
        yield section("radius", "How far each head is proved", _radius_body(data))
    if maps := verdict_maps(data.verdicts, data.tokens):
        body = panels("query", "map", [name for name, _ in maps], [drawing for _, drawing in maps])
        yield section("map", "Verdicts by head and position", body)
    if data.attention:
        yield section("attention", "Attention with proved ranges", _attention_body(data))
    if data.images:
        body = panels("row", "image", [i.name for i in data.images], [image_map(i) for i in data.images])
        yield section("image", "Attention over the image", body)
    if data.ways:
        body = panels("row", "way", [w.name for w in data.ways], [draw_pieces(w) for w in data.ways])
        yield section("way", "Between the prompts, piece by piece", body)
    if data.curves:
        names = ["{}.{}@{} {}".format(*curve.key) for curve in data.curves]
        body = panels("row", "curve", names, [sandwich(curve) for curve in data.curves])
        yield section("curve", "Margin against radius", body)
    if data.circuits:
        body = panels(
            "circuit", "circuit", [g.name for g in data.circuits], [circuit_graph(g) for g in data.circuits]
        )
        yield section("circuit", "Circuit", body)
    if data.strip:
        yield section(
            "strip", "One token at a time", f'<div class="scroll">{token_strip(data.strip).svg()}</div>'
        )
    if data.verdicts:
        yield table("verdicts", "Verdicts", VERDICT_COLUMNS, data.verdicts)
    if data.radii:
        yield table("radii", "Radii", RADIUS_COLUMNS, data.radii)


def section(name: str, title: str, body: str) -> str:
    """A part of a page under a heading, with its caption of `CAPTIONS`.

    Args:
        name: the name of the section, by which its caption is found.
        title: its heading.
        body: its HTML.
    """
    return f'<section id="{name}"><h2>{title}</h2><p class="caption">{CAPTIONS[name]}</p>{body}</section>'


def panels(label: str, group: str, names: Sequence[str], pictures: Sequence[Drawing], more: str = "") -> str:
    """Several pictures of one kind, of which a list chooses one.

    Args:
        label: what the list is called.
        group: a name for the list and its pictures, once a page.
        names: the entries of the list.
        pictures: one for each entry.
        more: HTML beside the list.
    """
    options = "".join(f'<option value="{i}">{escaped(name)}</option>' for i, name in enumerate(names))
    choice = f'<label>{label} <select data-panels="{group}" id="choose-{group}">{options}</select></label>'
    shown = "".join(
        f'<div class="scroll" data-panel="{group}:{i}"{" hidden" if i else ""}>{picture.svg()}</div>'
        for i, picture in enumerate(pictures)
    )
    return f'<div class="controls">{choice}{more}</div>{shown}'


def _radius_body(data: ReportData) -> str:
    queries = list(dict.fromkeys(cell.query for cell in data.radius_map))
    pictures = [radius_map([cell for cell in data.radius_map if cell.query == query]) for query in queries]
    asked = positions_asked((*data.radii, *data.verdicts), data.tokens)
    return f'<p class="caption">{escaped(asked)}</p>{panels("query", "radius", queries, pictures)}'


def _attention_body(data: ReportData) -> str:
    radii = sorted({eps for head in data.attention for eps in head.radii})
    frames = []
    for head in data.attention:
        per_eps = []
        for eps in radii:
            rows = [row for row in head.rows if row.eps == eps]
            cells = [
                [row.position, cell.key, _digits(cell.low), _digits(cell.high)]
                for row in rows
                for cell in row.cells
            ]
            per_eps.append({"cells": cells, "rows": [[row.position, row.verdict] for row in rows]})
        frames.append({"frames": per_eps})
    start = radii.index(telling_radius(data.attention))
    slider = (
        f'<label>radius <input id="eps" type="range" min="0" max="{len(radii) - 1}" value="{start}" step="1">'
        f' <output id="eps-label">ε = {number(radii[start])}</output></label>'
    )
    if len(radii) == 1:
        slider = f'<span class="status">ε = {number(radii[0])}</span>'
    names = [f"{head.layer}.{head.head}" for head in data.attention]
    body = panels(
        "head",
        "head",
        names,
        [attention_map(head, data.tokens, radii[start]) for head in data.attention],
        slider,
    )
    packed = as_json({"radii": radii, "heads": frames})
    return f'{body}<script type="application/json" id="attention-data">{packed}</script>'


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def table(name: str, title: str, columns: Sequence[str], rows: Sequence[Row], caption: str = "") -> str:
    """A table that scripts fill; the first rows are there without them. Texts are written once and numbered.

    Args:
        name: its id, once a page.
        title: its heading.
        columns: the columns in their order; those that no row fills are left out.
        rows: all rows.
        caption: what is said above it.
    """
    shown = [column for column in columns if any(row.get(column) is not None for row in rows)]
    texts: dict[str, list[Any]] = {}
    for column in shown:
        values = [row.get(column) for row in rows]
        if any(isinstance(value, str) for value in values):
            texts[column] = list(dict.fromkeys(value for value in values if value is not None))
    places = {column: {value: i for i, value in enumerate(found)} for column, found in texts.items()}

    def packed(row: Row, column: str) -> object:
        value = row.get(column)
        if column in places:
            return -1 if value is None else places[column][value]
        return _digits(value) if isinstance(value, float) and math.isfinite(value) else _plain(value)

    spelled = {column: [visible(value) for value in found] for column, found in texts.items()}
    held = {
        "columns": shown,
        "texts": spelled,
        "rows": [[packed(row, column) for column in shown] for row in rows],
    }
    if "circuit" not in shown:
        held["columns"], held["texts"] = [*shown, "circuit"], spelled | {"circuit": []}
    head = "".join(
        f'<th scope="col" class="{slug(column)}"><button type="button">{escaped(column)}</button></th>'
        for column in shown
    )
    few = "".join(
        f"<tr>{''.join(f'<td>{escaped(_cell(row.get(column)))}</td>' for column in shown)}</tr>"
        for row in rows[:SHOWN_FIRST]
    )
    said = f'<p class="caption">{caption}</p>' if caption else ""
    described = escaped(json.dumps([{"name": column} for column in shown]))
    return (
        f'<section id="{name}" data-rows="{name}-data" data-columns="{described}"><h2>{title}</h2>{said}'
        f'<div class="controls"><label>search <input type="search"></label>'
        f'<button type="button" class="clear">show all</button><span class="status" aria-live="polite"></span></div>'
        f'<div class="grid" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{few}</tbody></table></div>'
        f'<script type="application/json" id="{name}-data">{as_json(held)}</script></section>'
    )


def _plain(value: object) -> object:
    return None if isinstance(value, float) else value


def _cell(value: object) -> str:
    return number(value) if isinstance(value, float) else "–" if value is None else str(value)
