"""The benchmark's check: an engine that got looser is named, one that did not is not."""

from typing import Any

import pytest

import run as bench


def row(**changes: Any) -> dict[str, Any]:
    held = {"model": "toy", "layer": 0, "eps": 0.02, "engine": "crown", "width": 2.0, "proved_over_left": 0.8}
    return held | changes


def test_looser_engines_are_named() -> None:
    assert bench.loosened([row()], [row()]) == []
    assert bench.loosened([row(width=2.19, proved_over_left=0.73)], [row()]) == []
    assert bench.loosened([row(width=1.0)], [row()]) == []
    assert len(bench.loosened([row(width=2.21)], [row()])) == 1
    assert len(bench.loosened([row(width=None)], [row()])) == 1
    assert len(bench.loosened([row(proved_over_left=0.7)], [row()])) == 1
    assert bench.loosened([row(engine="new")], [row()]) == []


def test_heavier_engines_and_dearer_ratios_are_named() -> None:
    was = [row(mb=100.0), row(engine="layer0", mb=1.0)]
    assert bench.heavier([row(mb=149.0), row(engine="layer0", mb=70.0)], was) == []
    assert len(bench.heavier([row(mb=151.0), row(engine="layer0", mb=76.0)], was)) == 2
    assert bench.heavier([row(mb=None), row(engine="new", mb=1e9)], was) == []
    share = {"ratio": "prompts", "model": "toy", "value": 0.5}
    assert bench.dearer([share | {"value": 0.62}, share | {"model": "new", "value": 9.0}], [share]) == []
    assert len(bench.dearer([share | {"value": 0.63}], [share])) == 1


@pytest.mark.slow
def test_a_small_question_is_measured() -> None:
    asked = bench.Asked("toy", 0, 0.02, ("interval", "layer0", "crown"), budget="10/1/2")
    rows = bench.measure(asked, "cpu", 1e9)
    assert [r["engine"] for r in rows] == ["interval", "layer0", "crown", "attack"]
    for one in rows[:3]:
        assert one["width"] >= 1.0 - 1e-9
        assert one["crossed"] == 0
        assert one["times_jacobian"] > 0
        assert len(one["top"]) == 3
    document = {
        "command": "python benchmarks/run.py",
        "machine": {"date": "today", "device": "cpu", "threads": 1, "torch": "2"},
        "gemm_rate": 1e9,
        "rows": rows,
    }
    assert bench.page(document).count("| toy | 0 | 0.02 |") == 4
