"""Progress where nobody watches a bar: a line now and then, on stderr, with the time left."""

from __future__ import annotations

import time

import pytest

import prooflens as pl
from prooflens.progress import Lines, shown, silent, time_left


def test_lines_come_now_and_then_even_if_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines(every=0.05).at_work() as tell:
        tell("taylor layer 0", 0.5)
        time.sleep(0.3)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert len(lines) >= 2
    assert all(line.startswith("taylor layer 0: 50 % after ") for line in lines)
    assert all(line.endswith(" left") for line in lines)


def test_short_work_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(True) as tell:
        tell("interval", 0.5)
    assert capsys.readouterr().err == ""
    with shown(False) as tell:
        assert tell is silent


def test_the_time_left_is_told_once_something_is_done() -> None:
    assert time_left(60.0, 0.0) == ""
    assert time_left(30.0, 0.5) == "about 30 s left"
    assert time_left(30.0, 1.0) == "about 0 s left"


def test_shares_grow_and_engines_are_named() -> None:
    told: list[tuple[str, float]] = []
    toy = pl.load("toy")
    pl.certify(
        toy,
        toy.example(),
        pl.Ball(0.06),
        budget="8/1/1",
        progress=lambda stage, share: told.append((stage, share)),
    )
    shares = [share for _, share in told]
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in shares)
    assert shares == sorted(shares)
    assert {stage.split()[0] for stage, _ in told if stage} >= {"layer0", "interval", "taylor", "attack"}


def test_radii_are_told_as_they_come() -> None:
    told: list[str] = []
    toy = pl.load("toy")
    pl.radius(toy, toy.example(), "0.1:top1@-1", progress=lambda stage, _: told.append(stage))
    assert any(stage.startswith("1 of 1 proved (ε ") for stage in told)
    assert any("broken (from " in stage for stage in told)
