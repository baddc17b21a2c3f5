"""Pages about effects: a bar for every edit, with the ends that are kept, verdicts, and prompts at both ends."""

from __future__ import annotations

from pathlib import Path

import pytest

import prooflens as pl
from prooflens.errors import RunError
from prooflens.report import collect
from prooflens.report.effect_curves import draw_effect_curve
from prooflens.report.effects import EffectChart, draw_effects
from prooflens.results.effects import Effect
from tests.conftest import Call
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader


@pytest.fixture(scope="module")
def effects() -> list[Effect]:
    toy = pl.load("toy")
    asked: list[tuple[str, float | None, float | None]] = [
        ("a1.h0", None, 1.0),
        ("a0.h1", 1e9, None),
        ("m0", None, None),
    ]
    return [
        pl.effect(
            toy,
            part,
            toy.example(),
            pl.Ball(0.01),
            "logit0-logit1",
            necessary=necessary,
            faithful=faithful,
            budget="20/1/2",
        )
        for part, necessary, faithful in asked
    ]


def test_bars_are_the_proved_ends_and_the_weakest_verdict(effects: list[Effect], tmp_path: Path) -> None:
    for i, found in enumerate(effects):
        found.save(tmp_path / str(i))
    kept = collect(*(tmp_path / str(i) for i in range(3)))
    assert kept.effects == collect(*(found.results for found in effects)).effects
    (chart,) = kept.effects
    assert [(bar.lower, bar.upper) for bar in chart.bars] == [found.ends for found in effects]
    assert [bar.kind for bar in chart.bars] == ["holds", "fails", "gap"]
    assert [bar.label for bar in chart.bars] == ["a1.h0", "a0.h1", "m0"]
    assert chart.marks == (-1.0, 1.0, 1e9)
    assert "a point has" in draw_effects(chart).svg()


def test_effects_on_several_balls_are_a_curve(page: Path, tmp_path: Path) -> None:
    """Wider balls have wider ranges; a claim that breaks is drawn as broken; what is unknown stands on the axis."""
    toy, runs = pl.load("toy"), []
    for number, eps in enumerate((0.02, 0.005, 3.0)):
        found = pl.effect(
            toy, "a1.h0", toy.example(), pl.Ball(eps), "logit0-logit1", faithful=0.05, budget="20/1/2"
        )
        runs.append(tmp_path / f"run {number}")
        found.save(runs[-1])
    other = pl.effect(toy, "m0", toy.example(), pl.Ball(0.02), "logit0-logit1", budget="20/1/2")
    other.save(tmp_path / "other")
    (curve,) = collect(*runs, tmp_path / "other").effect_curves
    assert [eps for eps, _ in curve.sized] == [0.005, 0.02, 3.0]
    (_, small), (_, middle), _ = curve.sized
    assert None not in (small.lower, small.upper, middle.lower, middle.upper)
    assert (middle.lower or 0.0) < (small.lower or 0.0) < (small.upper or 0.0) < (middle.upper or 0.0)
    assert curve.marks == (-0.05, 0.05)
    drawn = draw_effect_curve(curve).svg()
    assert drawn.count("<circle") >= 5
    assert drawn.count("proved-line") == 3
    pl.report(*runs, path=page, figures=tmp_path / "figures")
    assert 'id="sizes"' in page.read_text()
    assert list((tmp_path / "figures").glob("effect-by-radius-*.svg"))


def test_effects_in_memory_have_a_page(effects: list[Effect], page: Path, tmp_path: Path) -> None:
    pl.report(*effects, path=page, figures=tmp_path / "figures")
    text = page.read_text()
    assert text.count('id="effects"') == 1
    assert all(f"without {part}" in text for part in ("a1.h0", "a0.h1", "m0"))
    assert list((tmp_path / "figures").glob("effects-*.svg"))


def test_an_effect_without_bounds_is_hatched(effects: list[Effect]) -> None:
    (chart,) = collect(effects[0].results).effects
    bar = chart.bars[0]
    open_end = EffectChart(
        chart.metric, chart.where, (type(bar)("x", "x", None, None, 0.5, ()),), (), "proved"
    )
    assert "no bounds" in draw_effects(open_end).svg()
    assert "no bounds" not in draw_effects(chart).svg()


def test_a_discovered_circuit_has_a_page(call: Call, tmp_path: Path, page: Path) -> None:
    toy = pl.load("toy")
    found = pl.discover(toy, toy.example(), pl.Ball(0.001), "logit0-logit1", 0.2, budget="20/1/2")
    found.save(tmp_path / "found")
    assert call("report", str(tmp_path / "found"), "-o", str(page))[0] == 0
    text = page.read_text()
    assert "all outside the circuit" in text
    assert all(f"{part}, and all outside" in text for part in found.circuit)


def test_effects_over_a_family_have_a_page(call: Call, tmp_path: Path, page: Path) -> None:
    model = reader("gpt2")
    found = pl.family_effects(
        model, ["a0.h1", "m1"], TEMPLATE, "logit{A}-logit{B}", faithful=1e9, necessary=1e9
    )
    found.save(tmp_path / "run")
    assert (
        call("report", str(tmp_path / "run"), "-o", str(page), "--figures", str(tmp_path / "figures"))[0] == 0
    )
    text = page.read_text()
    assert "What each edit changes" in text
    assert text.count("enumerated") > 1
    assert all(row.least[1] in text and row.most[1] in text for row in found.rows)
    assert list((tmp_path / "figures").glob("effects-*.svg"))
    pl.report(tmp_path / "run", path=page)
    assert page.read_text() == text


def test_runs_of_other_kinds_and_models_are_refused(
    effects: list[Effect], tmp_path: Path, page: Path
) -> None:
    effects[0].save(tmp_path / "region")
    for name, kind in (("one", "gpt2"), ("other", "llama")):
        pl.family_effects(reader(kind), ["m1"], TEMPLATE, "logit{A}-logit{B}").save(tmp_path / name)
    with pytest.raises(RunError, match="runs of one kind"):
        pl.report(tmp_path / "one", tmp_path / "region", path=page)
    with pytest.raises(RunError, match="one model and family"):
        pl.report(tmp_path / "one", tmp_path / "other", path=page)
    with pytest.raises(RunError, match="effects over a family"):
        pl.report(effects[0], tmp_path / "one", path=page)
