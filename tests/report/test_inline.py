"""What a notebook shows of results, and the report that opens itself."""

from __future__ import annotations

import base64
import re
import webbrowser
from pathlib import Path
from typing import Any

import pytest

import prooflens as pl
from prooflens.report.data import collect
from prooflens.report.page import render
from prooflens.report.verdict_map import MOST_HEADS, verdict_map, verdict_maps
from tests.conftest import Call
from tests.enumeration.words import reader

NONE = "0/0/0"


def svg_of(html: str) -> str:
    (data,) = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", html)
    return base64.b64decode(data).decode()


def shown(found: Any) -> str:
    return svg_of(found._repr_html_())


def test_many_heads_are_a_map_of_verdicts(toy: pl.Transformer) -> None:
    res = pl.certify(toy, toy.example(), pl.Ball(0.03), engine="interval", budget=NONE)
    drawn = shown(res)
    assert "Verdicts of top1 by head and position" in drawn
    for word, count in res.counts.items():
        assert drawn.count(f'class="{word}"') == count
    assert "<table>" in res._repr_html_()


def test_the_report_has_a_map_for_each_radius_and_query(toy: pl.Transformer) -> None:
    queries = ["top1", "mass>=0.3"]
    found = [
        pl.certify(toy, toy.example(), pl.Ball(eps), "0", queries=queries, engine="interval", budget=NONE)
        for eps in (0.01, 0.03)
    ]
    rows = [row for res in found for row in res.rows]
    named = verdict_maps(rows, found[0].rows[0]["tokens"])
    assert [name for name, _ in named] == [f"{q}, ε = {e}" for e in ("0.01", "0.03") for q in queries]
    for (_, drawing), count in zip(
        named, (res.sel(query=q).counts for res in found for q in queries), strict=True
    ):
        assert drawing.svg().count('class="holds"') == count["holds"]
    assert 'id="map"' in render(collect(*found))
    assert 'id="map"' not in render(collect(found[0]["0.1"]))


def test_one_head_is_its_attention_with_proved_ranges(toy: pl.Transformer) -> None:
    res = pl.certify(toy, toy.example(), pl.Ball(0.03), "0.1", budget=NONE)
    assert "Attention of head 0.1 with proved ranges" in shown(res)
    assert "Attention of head 0.1" in shown(res["0.1@-1"])


def test_other_results_have_pictures_of_their_own(toy: pl.Transformer) -> None:
    first, second = toy.example(0), toy.example(1)
    radii = pl.radius(toy, first, "0.1:top1@-1", tolerance=1.0, budget=NONE)
    assert "Radius map" in shown(radii)
    assert "Distance of the candidates" in shown(pl.output(toy, first, pl.Ball(0.001), budget=NONE))
    ways = pl.way(toy, first, second, "0.1:top1@-1")
    assert "Margin of 0.1:top1@-1" in shown(ways)
    assert "<pre>" in ways._repr_html_()
    segment = pl.Segment(first, second)
    assert "Margin of" in shown(pl.certify(toy, first, segment, "0.1", positions=[-1], budget=NONE))


def test_families_show_the_shares_of_two_slots() -> None:
    names = {"A": [" Mary", " Kate"], "B": [" John", " Tom"]}
    found = pl.family(reader(), pl.Template("When{A} and{B} met", **names), "0.0:top1={A}@-1")
    assert "Share of 0.0:top1={A}@-1 by A and B" in shown(found)


def test_what_cannot_be_drawn_is_a_table(toy: pl.Transformer, tmp_path: Path) -> None:
    res = pl.certify(toy, [toy.example(0), toy.example(1)], pl.Ball(0.01), "0.1", budget=NONE)
    assert "<img" not in res._repr_html_()
    assert "<table>" in res._repr_html_()
    res.by_subject[0].save(tmp_path / "run")
    assert "<table>" in pl.Results.load(tmp_path / "run")._repr_html_()
    assert "<img" not in res.by_subject[0][:0]._repr_html_()


def test_hostile_tokens_stay_text() -> None:
    drawn = verdict_map("top1", {(0, 0, 0): "holds"}, ('<img src=x onerror="1">',)).svg(alone=True)
    assert "<img" not in drawn
    many = {(layer, head, 0): "unknown" for layer in range(10) for head in range(10)}
    assert f"{100 - MOST_HEADS} more heads" in verdict_map("top1", many, ("x",)).svg()


@pytest.mark.parametrize("browser", [True, False])
def test_a_report_opens_itself(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: bool
) -> None:
    opened: list[str] = []

    def look(url: str) -> bool:
        opened.append(url)
        return browser

    monkeypatch.setattr(webbrowser, "open", look)
    run, page = tmp_path / "run", tmp_path / "report.html"
    call("certify", "toy", "--eps", "0.01", "--heads", "0.1", "--budget", NONE, "-o", str(run))
    code, out, err = call("report", str(run), "-o", str(page), "--open")
    assert (code, opened) == (0, [page.as_uri()])
    assert page.is_file()
    assert str(page) in out
    assert ("no browser was found here" in err) == (not browser)
