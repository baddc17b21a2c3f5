"""Progress where nobody watches a bar: a line now and then, on stderr, with the time left."""

from __future__ import annotations

import itertools
import time

import pytest

import prooflens as pl
from prooflens.engines import get_engine
from prooflens.engines.functionals import bound_functionals
from prooflens.engines.protocol import EngineOptions
from prooflens.progress import Lines, shown, silent, time_left
from prooflens.verdicts.question import ask


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


def test_a_radius_tells_its_engines_and_the_share_of_its_time() -> None:
    told: list[tuple[str, float]] = []
    toy = pl.load("toy")
    pl.radius(
        toy,
        toy.example(),
        "1.0:top1@-1",
        time="20s",
        progress=lambda stage, share: told.append((stage, share)),
    )
    shares = [share for _, share in told]
    assert any("; now ε=" in stage and ", taylor layer 0" in stage for stage, _ in told)
    assert all(0.0 <= share <= 1.0 for share in shares)


def test_two_walks_of_one_call_are_two_parts_of_it() -> None:
    """A share that starts again would stand still where the largest is kept: the thorough walk goes on behind."""
    told: list[float] = []
    toy = pl.load("toy")
    question = ask(toy, toy.example(), pl.Ball(0.06), layer=1)
    functionals = [f for claim in question.claims for f in claim.functionals]
    options = EngineOptions(progress=lambda stage, share: told.append(share))
    bound_functionals(get_engine("taylor"), question.problem, functionals, options=options)
    assert all(0.0 <= share <= 1.0 for share in told)
    assert min(share for share in told if share > 0.0) < 0.2 < max(told)
    assert not any(later < earlier - 0.5 for earlier, later in itertools.pairwise(told))


def test_a_part_of_the_work_tells_a_share_of_the_whole() -> None:
    told: list[tuple[str, float]] = []
    options = EngineOptions(progress=lambda stage, share: told.append((stage, share)))
    options.part(0.2, 0.6).part(0.5, 1.0).in_time("walk", 0.5)
    ((stage, share),) = told
    assert stage == "walk"
    assert share == pytest.approx(0.5)
