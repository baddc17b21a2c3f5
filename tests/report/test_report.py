"""What a report is made of, without a browser."""

import dataclasses
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import prooflens as pl
from prooflens.errors import RunError
from prooflens.report import ReportData, collect, render, report, write_figures
from prooflens.report.attention import weight_ranges
from prooflens.report.data import MOST_ROWS
from prooflens.report.figures import radius_map
from prooflens.report.page import drawings
from prooflens.report.svg import as_json, number, visible
from tests.report.conftest import HOSTILE

SECTIONS = ("radius", "attention", "curve", "circuit", "strip", "verdicts", "radii")


class Reader(HTMLParser):
    """Collects what a browser would run, load or show."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_all_sections_are_there_and_only_with_their_data(data: ReportData) -> None:
    page = render(data)
    assert all(f'<section id="{name}"' in page for name in SECTIONS)
    bare = render(dataclasses.replace(data, circuits=(), strip=(), radii=(), radius_map=(), curves=()))
    present = [name for name in SECTIONS if f'<section id="{name}"' in bare]
    assert present == ["attention", "verdicts"]


def test_the_header_says_what_was_asked_and_found(data: ReportData) -> None:
    page = render(data)
    assert data.model_sha256 in page
    assert sum(data.counts.values()) == len(data.verdicts)
    for verdict, count in data.counts.items():
        assert f"<b>{count}</b>{verdict}" in page
    assert "ball ε=0.02" in page
    assert "proved" in page


def test_hostile_tokens_stay_text(hostile: ReportData) -> None:
    page = render(hostile)
    reader = read(page)
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("script") == 1 + len(("attention-data", "verdicts-data", "radii-data"))
    assert "i" not in tags
    assert "\u202e" not in page
    assert "\u2028" not in page
    assert "alert(1)</script>" not in page
    for _, drawing in drawings(hostile):
        ElementTree.fromstring(drawing.svg(alone=True))


def test_nothing_is_loaded_from_outside(data: ReportData) -> None:
    page = render(data)
    for tag, attributes in read(page).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert not {"src", "srcset", "action"} & set(attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#"), (tag, attributes)  # places in this very page
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\((?!#)", page)


def test_the_radius_map_is_of_the_weakest_row(data: ReportData) -> None:
    for cell in data.radius_map:
        rows = [
            r for r in data.radii if (r["layer"], r["head"]) == (cell.layer, cell.head) and r["token"] is None
        ]
        assert cell.rows == len(rows)
        assert cell.certified == min(r["certified"] for r in rows)
        assert cell.attack is None or cell.certified is None or cell.certified < cell.attack


def test_without_radii_the_map_reads_verdicts(toy: pl.Transformer) -> None:
    found = [pl.certify(toy, toy.example(1), pl.Ball(eps), layer=0) for eps in (0.02, 0.1)]
    cells = collect(*found).radius_map
    for cell in cells:
        here = [(row["eps"], row["verdict"]) for f in found for row in f.rows if row["head"] == cell.head]
        failing = [eps for eps, verdict in here if verdict == "fails"]
        assert cell.attack == min(failing, default=None)
        if cell.certified is not None:
            assert {verdict for eps, verdict in here if eps <= cell.certified} == {"holds"}


def test_curves_are_sandwiches(data: ReportData) -> None:
    assert data.curves
    for curve in data.curves:
        for _, proved, attained in curve.points:
            if proved is not None and attained is not None:
                assert proved <= attained + 1e-12


def test_proved_weight_ranges_contain_the_weights_of_points(toy: pl.Transformer) -> None:
    prompt = toy.example(1)
    region = pl.Ball(0.05).around(prompt)
    (head, *_) = collect(pl.certify(toy, prompt, region, layer=0)).attention
    points, _ = region.sample(200, seed=3)
    for x in (prompt.x, *points):
        pattern = toy.pattern(x, 0)[head.head]
        for row in head.rows:
            for cell in row.cells:
                assert cell.low is not None
                assert cell.high is not None
                assert cell.low <= float(pattern[row.position, cell.key]) <= cell.high


@given(
    st.lists(st.tuples(st.floats(-30, 30), st.floats(0, 5)), min_size=1, max_size=6), st.integers(0, 2**20)
)
def test_weight_ranges_contain_every_point_of_the_margin_box(
    box: list[tuple[float, float]], seed: int
) -> None:
    low, high = [a for a, _ in box], [a + w for a, w in box]
    share = torch.rand(len(box), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    margins = [a + t * w for (a, w), t in zip(box, share, strict=True)]
    weights = torch.softmax(torch.tensor([0.0, *(-d for d in margins)], dtype=torch.float64), 0)
    for s, (least, most) in zip(weights.tolist(), weight_ranges(low, high), strict=True):
        assert least <= s <= most


def test_the_weakest_link_is_outlined(data: ReportData) -> None:
    (graph,) = data.circuits
    weakest = graph.parts[graph.weakest]
    assert all((weakest.lower or -math.inf) <= (part.lower or -math.inf) for part in graph.parts)
    svg = next(drawing for name, drawing in drawings(data) if name.startswith("circuit")).svg()
    assert svg.count('class="weakest"') == 1


def test_runs_on_disk_and_results_in_memory_give_the_same_pictures(
    toy: pl.Transformer, tmp_path: Path
) -> None:
    found = pl.certify(toy, toy.example(0), pl.Ball(0.05), layer=0)
    found.save(tmp_path / "run", command="prooflens certify toy")
    kept, direct = collect(tmp_path / "run"), collect(found)
    assert kept.attention == direct.attention
    assert kept.commands == ("prooflens certify toy",)
    assert report(tmp_path / "run", path=tmp_path / "x" / "r.html").is_file()


def test_figures_are_files(data: ReportData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    written = write_figures(data, tmp_path)
    assert {path.suffix for path in written} == {".svg"}
    assert {path.stem.split("-")[0] for path in written} == {
        "radius",
        "attention",
        "margin",
        "circuit",
        "tokens",
    }


def test_one_report_is_about_one_prompt(toy: pl.Transformer) -> None:
    other = pl.load("toy-4layer")
    found = [pl.certify(m, m.example(0), pl.Ball(0.01), layer=0) for m in (toy, other)]
    with pytest.raises(RunError, match="one model"):
        collect(*found)


def test_many_rows_are_cut_and_said(data: ReportData) -> None:
    page = render(dataclasses.replace(data, notes=("80,000 more rows",)))
    assert "80,000 more rows" in page
    assert MOST_ROWS < 100_000


def test_distances_to_the_vocabulary_are_the_nearest(minilm: pl.Transformer) -> None:
    from prooflens.models.nearest import nearest_token

    prompt = minilm.prompt("good")
    assert prompt.ids is not None
    distance, name = nearest_token(minilm, prompt.ids, 1, prompt.x[1], other=True)
    ids = torch.tensor(prompt.ids).repeat(3, 1)
    ids[:, 1] = torch.tensor([2307, 2204, 3376])
    others = (minilm.embed(ids)[:, 1] - prompt.x[1]).abs().amax(-1)
    assert 0.0 < distance <= min(float(v) for v in others if v > 0)
    assert name


@pytest.mark.parametrize("text", HOSTILE)
def test_visible_text_has_no_marks(text: str) -> None:
    assert not {"\u202e", "\u2028"} & set(visible(text))
    assert "<" not in as_json([text])


def test_numbers_are_short() -> None:
    assert [number(v) for v in (None, 0.0, 0.05394, 1.5e-4, 123.4, math.inf)] == [
        "–",
        "0",
        "0.0539",
        "1.5e-4",
        "123",
        "∞",
    ]


def test_a_head_that_the_mask_decides_has_no_end(data: ReportData) -> None:
    cell = dataclasses.replace(data.radius_map[0], certified=math.inf, attack=None)
    svg = radius_map([cell, *data.radius_map[1:]]).svg()
    assert "∞" in svg
    assert svg.count('fill="url(#hatch)"') == 2  # the half that nothing breaks, and the legend


def test_what_cannot_be_read_or_written_is_one_error(toy: pl.Transformer, tmp_path: Path) -> None:
    found = pl.certify(toy, toy.example(0), pl.Ball(0.02), "0.0", engine="interval")
    other = pl.certify(toy, toy.example(1).x[:3], pl.Ball(0.02), "0.0", engine="interval")
    with pytest.raises(RunError, match="cannot write"):
        pl.report(found, path=tmp_path)
    with pytest.raises(RunError, match="not from a int"):
        pl.report(3, path=tmp_path / "x.html")  # type: ignore[arg-type]
    with pytest.raises(RunError, match="Results about toy"):
        pl.report(found, other, path=tmp_path / "x.html")
