"""Time: a budget is kept, what is proved by then is returned, and nobody is given up silently."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.durations import asked_time, parse_time, written_time
from prooflens.engines import Guarantee, get_engine, protocol
from prooflens.engines.attack import AttackBudget
from prooflens.engines.bounds import FormBounds
from prooflens.engines.costs import Cost
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineBase, EngineOptions, OutOfTimeError
from prooflens.engines.taylor import Taylor
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.errors import EngineError
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.queries import Row
from prooflens.results.asked import Asked, State, explanation, option_sets
from prooflens.verdicts import machine
from prooflens.verdicts.evidence import ATTACK, Evidence
from prooflens.verdicts.forecast import LAYER_SECONDS, deadline_of, forecast
from prooflens.verdicts.machine import Speed, speed_of
from prooflens.verdicts.portfolio import gather_evidence
from prooflens.verdicts.question import ask
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.stages import Stage


class Slow(EngineBase):
    """An engine that would take an hour and a hundred GiB, and is never to be begun."""

    name = "test-slow"
    guarantee = Guarantee.PROVED
    price = Cost(1e20, 0.0, 0.0, 0.0)

    def cost(self, problem: Problem, depth: int, size: int) -> Cost:
        return self.price

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        raise AssertionError("it was begun")


class Hungry(Slow):
    name = "test-hungry"
    price = Cost(1.0, 0.0, 0.0, 1e18)


class Late(EngineBase):
    """An engine that is late before it knows anything."""

    name = "test-late"
    guarantee = Guarantee.PROVED

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        raise OutOfTimeError("the time that was allowed ended at layer 0")


@pytest.fixture(autouse=True)
def _more_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of this file are known to its tests only."""
    for engine in (Slow, Hungry, Late):
        monkeypatch.setitem(protocol._REGISTRY, engine.name, engine)


def evidence_of(
    model: Transformer, eps: float, stages: Sequence[str], seconds: float | None = None
) -> list[Evidence]:
    question = ask(model, model.example(), pl.Ball(eps), layer=1)
    found = [Evidence.about(claim) for claim in question.claims]
    held = Settings(tuple(map(Stage, stages)), budget=AttackBudget(4, 1, 1), time=seconds)
    gather_evidence(question.problem, found, deadline_of(held, question.problem, question.claims))
    return found


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60.0), ("2m", 120.0), ("1.5h", 5400.0), (7, 7.0), ("250ms", 0.25)]
)
def test_times_are_read(text: str | float, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-3s", "0", "5 parsecs", "nan", "1e999s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="60s, 2m"):
        parse_time(text)


def test_times_are_written() -> None:
    assert asked_time(104.2) == "110s"
    assert asked_time(3.2) == "4s"
    assert written_time(float("inf")) == "very long"


def test_an_engine_that_would_take_too_long_is_not_begun_and_the_row_says_so(toy: Transformer) -> None:
    for item in evidence_of(toy, 0.06, ["interval", "test-slow"]):
        outcome = item.outcome(ask(toy, toy.example(), pl.Ball(0.06), layer=1).problem)
        slow = outcome.asked[-1]
        assert slow.engine == "test-slow"
        assert slow.state is State.NOT_ASKED
        assert slow.predicted is not None
        assert slow.predicted > LAYER_SECONDS
        assert "were left" in slow.why
        assert "interval proves at least" in outcome.reason
        assert "not asked: test-slow (about" in outcome.reason
        assert "--time " in outcome.reason
        assert 'time="' in outcome.reason


def test_an_engine_that_needs_more_memory_than_there_is_is_not_begun(toy: Transformer) -> None:
    item = evidence_of(toy, 0.06, ["interval", "test-hungry"])[0]
    assert item.asked[-1].state is State.NOT_ASKED
    assert "may be used" in item.asked[-1].why
    assert not item.asked[-1].options  # no machine has so much: nothing to recommend


def test_an_engine_that_is_late_leaves_what_others_proved(toy: Transformer) -> None:
    item = evidence_of(toy, 0.06, ["interval", "test-late"], 5.0)[0]
    assert item.asked[-1].state is State.LATE
    assert item.asked[-1].options["time"]
    assert bool(item.proved.lower.isfinite().all())


def test_a_named_engine_has_no_limit_unless_one_is_given(toy: Transformer) -> None:
    question = ask(toy, toy.example(), pl.Ball(0.06), layer=1)
    named = Settings.of(engine="crown")
    assert deadline_of(named, question.problem, question.claims).deadline is None
    timed = Settings.of(engine="crown", time="3s")
    assert 2.0 < (deadline_of(timed, question.problem, question.claims).left or 0.0) <= 3.0
    auto = deadline_of(Settings.of(), question.problem, question.claims)
    assert LAYER_SECONDS - 1 < (auto.left or 0.0) <= LAYER_SECONDS


def test_a_call_ends_in_time_and_every_open_row_says_why(toy: Transformer) -> None:
    start = time.monotonic()
    found = pl.certify(toy, toy.example(), pl.Ball(0.06), budget="100000/50/50", time=1.5)
    assert time.monotonic() - start < 4.0
    assert len(found) == 16
    for row in found.sel(verdict="unknown").rows:
        assert row["reason"].startswith("neither proved nor broken: ")


def margins(row: Row) -> Forms:
    return Forms.of([(0, row, 2, 1.0), (0, row, 0, -1.0)], size=1)


@pytest.mark.parametrize(
    ("name", "seconds"), [("chebyshev", 0.0), ("chebyshev", 0.1), ("exact", 0.0), ("taylor", 0.0)]
)
def test_engines_that_stop_early_are_sound(toy: Transformer, name: str, seconds: float) -> None:
    """A deadline that has passed gives wider bounds or none, never tighter ones than the whole search's."""
    x = toy.example().x
    region = pl.Segment(x, x.flip(0)).region() if name == "chebyshev" else pl.Ball(0.3).around(x)
    problem = Problem(toy, region)
    forms = replace(margins(Row(1, 0, 3)), signs=True)
    engine = get_engine(name)
    whole = engine.bound_forms(problem, forms)
    try:
        early = engine.bound_forms(problem, forms, EngineOptions(deadline=time.monotonic() + seconds))
    except OutOfTimeError:
        assert name in ("chebyshev", "taylor")  # not even one walk came to its end
        return
    points, _ = region.sample(256, seed=0)
    scores, _ = problem.values(points, [1], False)
    values = scores[1][:, 0, 3, 2] - scores[1][:, 0, 3, 0]
    assert float(early.lower) <= float(values.min())
    assert float(early.upper) >= float(values.max())
    assert float(early.lower) <= float(whole.lower) + 1e-9 or name == "exact"


def test_taylor_keeps_the_parts_that_were_bounded_in_time(
    toy: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forms in several parts, and a deadline after the first of them: the others have no bounds, and none is wrong."""
    problem = Problem(toy, pl.Ball(0.02).around(toy.example()))
    rows = [Row(1, head, position) for head in range(2) for position in range(4)]
    forms = Forms.of(
        [entry for i, row in enumerate(rows) for entry in ((i, row, 2, 1.0), (i, row, 0, -1.0))], size=8
    )
    monkeypatch.setattr(TaylorWalk, "wide_batch", lambda walk: 3)
    monkeypatch.setattr("prooflens.engines.taylor.engine.FEW", 0)
    whole = get_engine("taylor").bound_forms(problem, forms)
    stages: list[str] = []

    def late(options: EngineOptions, stage: str, share: float) -> None:
        stages.append(stage)
        if stage == "functionals":
            raise OutOfTimeError(stage)

    monkeypatch.setattr(EngineOptions, "in_time", late)
    part = get_engine("taylor").bound_forms(problem, forms)
    assert "functionals" in stages
    assert bool(part.lower[:3].isfinite().all())
    assert not bool(part.lower[3:].isfinite().any())
    assert bool((part.lower <= whole.lower + 1e-12).all())
    assert bool((part.upper >= whole.upper - 1e-12).all())


def test_a_walk_of_taylor_looks_at_the_clock_at_every_step_and_token(toy: Transformer) -> None:
    problem = Problem(toy, pl.Ball(0.02).around(toy.example()))
    forms = Forms.of([(0, Row(1, 0, 3), 2, 1.0), (0, Row(1, 0, 3), 0, -1.0)], size=1)
    shares: list[float] = []
    options = EngineOptions(
        progress=lambda stage, share: shares.append(share) if stage == "layer 0" else None
    )
    get_engine("taylor").bound_forms(problem, forms, options)
    steps = len(toy.program(4, "blocks.0.attn.hook_attn_scores").steps)
    assert shares.count(0.0) >= steps
    assert max(shares) <= 0.5


def test_the_attack_keeps_what_it_found_before_the_deadline(toy: Transformer) -> None:
    late = pl.certify(toy, toy.example(), pl.Ball(0.5), "0.1", engine="attack", budget="64/2/8", time="1ms")
    for outcome in late.outcomes:
        if outcome.witness is not None:
            assert outcome.claim.broken_by(outcome.witness.values)


def test_speeds_are_measured_once_and_kept(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def fake(device: torch.device) -> Speed:
        calls.append(device)
        return Speed(1e9, 2e9, 3e6)

    monkeypatch.setattr(machine, "measure", fake)
    monkeypatch.setattr(machine, "_KNOWN", {})
    cpu = torch.device("cpu")
    assert speed_of(cpu) == speed_of(cpu) == Speed(1e9, 2e9, 3e6)
    monkeypatch.setattr(machine, "_KNOWN", {})
    assert speed_of(cpu) == Speed(1e9, 2e9, 3e6)
    assert len(calls) == 1
    held = json.loads((empty_home / "speed.json").read_text())
    assert list(held) == [machine.device_name(cpu)]
    for damaged in ("{", "[]", '{"a": {"b": 1}}', '{"a": {"multiplications": 0, "traffic": 1, "steps": 1}}'):
        (empty_home / "speed.json").write_text(damaged)
        monkeypatch.setattr(machine, "_KNOWN", {})
        assert speed_of(cpu) == Speed(1e9, 2e9, 3e6)


def test_a_speed_is_measured() -> None:
    found = machine.measure(torch.device("cpu"))
    assert found.multiplications > 1e7
    assert found.traffic > 1e7
    assert found.steps > 1e3


def test_options_are_joined() -> None:
    def skipped(name: str, **options: str) -> Asked:
        return Asked(name, State.NOT_ASKED, predicted=1.0, memory=2**30, why="x", options=options)

    asked = [
        skipped("a", time="400s", memory="17GB"),
        skipped("a", time="90s"),
        skipped("b", time="3000s"),
        skipped("c", engine="c"),
        skipped("c", engine="c"),
        Asked("d", State.ASKED, reached=-1.0, options={"time": "1000s"}),
    ]
    assert option_sets(asked) == [{"time": "400s", "memory": "17GB"}, {"engine": "c"}]
    said = explanation(asked)
    assert "d proves at least -1" in said
    assert "a (about 1 s and 1.0 GiB; x)" in said
    assert said.endswith('(in Python time="400s", memory="17GB" or engine="c")')


def test_a_plan_names_every_stage_and_what_it_takes(toy: Transformer) -> None:
    found = pl.plan(toy, toy.example(), pl.Ball(0.02))
    assert [(s.layer, s.engine) for s in found.stages][:2] == [(0, "layer0"), (0, "interval")]
    assert {s.engine for s in found.stages if s.fits} == {
        "layer0", "interval", "taylor", "crown", "cpz", ATTACK,
    }  # fmt: skip
    assert found.allotted == 2 * LAYER_SECONDS
    assert found.to_dict()["stages"][0]["claims"] == 8
    short = pl.plan(toy, toy.example(), pl.Ball(0.02), time="1ms")
    assert not any(s.fits for s in short.stages if s.engine == "taylor")
    assert all(s.why for s in short.stages if not s.fits)


def test_a_plan_counts_a_walk_that_goes_on_from_layer_to_layer() -> None:
    """Of all layers in one call, `taylor` walks each once; what a workspace holds is seen, for its own problem only."""
    model = pl.load("toy-4layer")
    x, ball = model.example(), pl.Ball(0.01)
    together = {s.layer: s.seconds or 0.0 for s in pl.plan(model, x, ball).stages if s.engine == "taylor"}
    apart = {
        layer: s.seconds or 0.0
        for layer in range(1, 4)
        for s in pl.plan(model, x, ball, layer=layer).stages
        if s.engine == "taylor"
    }
    assert together[1] == apart[1]
    assert together[2] < apart[2] < apart[3]
    assert together[3] < 0.8 * apart[3]
    # What is planned is what happens: a call about layer 2 leaves its walk, and the next one is predicted to go on.
    question, settings = ask(model, x, ball, layer=2), Settings()
    problem, taylor = question.problem, Taylor()
    assert taylor.held_layer(problem, settings.workspace) == 0
    assert taylor.would_hold(problem, 2, settings.options)
    gather_evidence(
        problem,
        [Evidence.about(claim) for claim in question.claims],
        replace(settings, stages=(Stage("taylor"),)),
    )
    assert taylor.held_layer(problem, settings.workspace) == 2
    assert taylor.held_layer(replace(problem, region=ball.around(x.x)), settings.workspace) == 0
    deeper = ask(model, x, ball, layer=3).claims
    fresh, on = (
        forecast(Stage("taylor"), problem, deeper, settings, passed).seconds or 0.0 for passed in (0, None)
    )
    assert on < 0.8 * fresh


def test_what_was_asked_is_kept_in_the_run(toy: Transformer, tmp_path: Path) -> None:
    found = pl.certify(toy, toy.example(), pl.Ball(0.06), layer=1, budget="8/1/1", out=tmp_path / "RUN")
    effort = json.loads((tmp_path / "RUN" / "run.json").read_text())["effort"]
    assert effort == json.loads(json.dumps(found.effort))
    by_name = {entry["engine"]: entry for entry in effort["engines"]}
    assert by_name["taylor"]["seconds"] > 0
    assert by_name["taylor"]["predicted_seconds"] > 0
    assert "rows are open" in effort["advice"] or "row is open" in effort["advice"]


def test_a_radius_search_ends_in_time_and_stays_sound(toy: Transformer) -> None:
    start = time.monotonic()
    short = pl.radius(toy, toy.example(), "1.0:top1@-1", tolerance=0.01, time="1s")
    assert time.monotonic() - start < 4.0
    whole = pl.radius(toy, toy.example(), "1.0:top1@-1", tolerance=0.5, engine="crown")
    for less, more in zip(short.rows, whole.rows, strict=True):
        assert less["certified"] <= more["attack"]
        assert "the time ended" in less["reason"]
