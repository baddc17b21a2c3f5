"""Effects of edits: proved bounds enclose what points attain, and verdicts are what they say."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.engines.chebyshev.engine import Chebyshev
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineOptions, OutOfTimeError
from prooflens.errors import EngineError, ModelError, ProoflensError, QueryError, RegionError
from prooflens.models.edits import mean_of
from prooflens.problem import Problem
from prooflens.queries import Row
from prooflens.results import Verdict

REGIONS = [pl.Ball(0.01), "segment"]


def place(toy: pl.Transformer, region: object) -> pl.Ball | pl.Segment:
    if isinstance(region, pl.Ball):
        return region
    a, b = toy.example(0).x, toy.example(1).x
    return pl.Segment(a, a + 0.2 * (b - a))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("edits", ["a1.h0", ["m0", "a0.h1"], "m1.n3"])
def test_bounds_enclose_the_effect_at_every_point(toy: pl.Transformer, region: object, edits: object) -> None:
    where = place(toy, region)
    found = pl.effect(toy, edits, toy.example(), where, "logit0-logit1")  # type: ignore[arg-type]
    held = where.around(toy.example()) if isinstance(where, pl.Ball) else where.region()
    x, _ = held.sample(500, seed=3)
    other = pl.edit(toy, edits)  # type: ignore[arg-type]
    effects = ((toy(x) - other(x)) @ torch.tensor([1.0, -1.0]).double()).tolist()
    assert found.lower <= min(effects)
    assert max(effects) <= found.upper
    assert found.lower <= found.least.effect <= min(effects) + 1e-12
    assert max(effects) - 1e-12 <= found.most.effect <= found.upper
    clean = (toy(toy.example()) - other(toy.example())) @ torch.tensor([1.0, -1.0]).double()
    assert abs(found.clean[0] - found.clean[1] - float(clean)) < 1e-12
    assert found.edited == other.name
    assert found.edited_sha256 == other.sha256


def test_claims_hold_fail_and_stay_open_by_their_thresholds(toy: pl.Transformer) -> None:
    x, ball = toy.example(), pl.Ball(0.02)
    first = pl.effect(toy, "m1", x, ball, "logit0-logit1", budget="50/1/5")

    def word(**asked: float) -> Verdict:
        (claim,) = pl.effect(toy, "m1", x, ball, "logit0-logit1", budget="50/1/5", **asked).claims  # type: ignore[arg-type]
        assert (claim.witness is not None) == (claim.verdict is Verdict.FAILS)
        return claim.verdict

    assert word(necessary=first.lower) is Verdict.HOLDS
    assert word(necessary=first.least.effect + 1e-6) is Verdict.FAILS
    assert word(necessary=0.5 * (first.lower + first.least.effect)) is Verdict.UNKNOWN
    size = max(abs(first.lower), abs(first.upper))
    seen = max(abs(first.least.effect), abs(first.most.effect))
    assert word(faithful=size) is Verdict.HOLDS
    assert word(faithful=seen - 1e-6) is Verdict.FAILS
    assert word(faithful=0.5 * (size + seen)) is Verdict.UNKNOWN


def test_a_witness_is_a_point_of_the_region_run_through_both(toy: pl.Transformer) -> None:
    found = pl.effect(toy, "m1", toy.example(), pl.Ball(0.02), "logit0-logit1", faithful=0.0)
    (claim,) = found.claims
    assert claim.verdict is Verdict.FAILS
    assert claim.witness is not None
    x = claim.witness.x
    assert float((x - toy.example().x).abs().max()) <= 0.02
    margins = [model(x) @ torch.tensor([1.0, -1.0]).double() for model in (toy, pl.edit(toy, "m1"))]
    effect = float(margins[0] - margins[1])
    expected = torch.tensor([effect, -effect], dtype=torch.float64)
    assert torch.allclose(claim.witness.values, expected, atol=1e-12)


def test_the_same_answer_is_proved_or_broken(toy: pl.Transformer) -> None:
    words = {}
    for name in ("a1.h1", "m0", "a1"):
        for index in range(2):
            x = toy.example(index)
            found = pl.effect(toy, name, x, pl.Ball(0.001), "logit0-logit1", sufficient=True)
            other = pl.edit(toy, name)
            verdict = words[name, index] = found.claims[0].verdict
            same = int(toy(x).argmax()) == int(other(x).argmax())
            assert verdict is Verdict.UNKNOWN or (verdict is Verdict.HOLDS) == same
    assert Verdict.HOLDS in words.values()


def test_a_readout_is_a_metric(toy: pl.Transformer) -> None:
    v = torch.randn(toy.architecture.d_model, generator=torch.Generator().manual_seed(0)).double()
    hook = "blocks.1.hook_normalized_resid_post"
    found = pl.effect(toy, "a0.h1", toy.example(), pl.Ball(0.01), f"read({hook}@-1,v)", vectors={"v": v})
    values = [model.run_with_cache(toy.example())[1][hook][-1] @ v for model in (toy, pl.edit(toy, "a0.h1"))]
    assert abs(found.clean[0] - float(values[0])) < 1e-12
    assert found.lower <= float(values[0] - values[1]) <= found.upper
    neuron = pl.effect(toy, "a0.h1", toy.example(), pl.Ball(0.01), "neuron 1.3@2", engine="crown")
    assert neuron.engine == "crown"
    assert neuron.lower <= neuron.least.effect <= neuron.upper


def test_an_edited_model_is_taken_as_it_is(toy: pl.Transformer) -> None:
    held = mean_of(toy, "a1.h0", [toy.example(i) for i in range(4)])
    edited = pl.edit(toy, held)
    found = pl.effect(toy, edited, toy.example(), pl.Ball(0.001), "logit1")
    again = pl.effect(toy, held, toy.example(), pl.Ball(0.001), "logit1")
    assert (found.lower, found.upper) == (again.lower, again.upper)
    assert "at its mean over 4 prompts" in str(found)
    assert found.to_dict()["edited_sha256"] == edited.sha256


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"metric": "top1"}, QueryError, "measures nothing"),
        ({"metric": "logit0>logit1"}, QueryError, "measures nothing"),
        ({"metric": "logit0-logit9"}, QueryError, "no output 9"),
        ({"edited": "a9.h0"}, ModelError, "layers are"),
        ({"necessary": float("nan")}, QueryError, "finite"),
        ({"faithful": -1.0}, QueryError, "at least 0"),
        ({"engine": "attack"}, EngineError, "no engine bounds"),
        ({"edited": pl.load("toy-4layer")}, ModelError, "is no edit of"),
    ],
)
def test_what_cannot_be_asked_says_why(
    toy: pl.Transformer, asked: dict[str, object], error: type[ProoflensError], says: str
) -> None:
    given = {"edited": "a0.h0", "metric": "logit0-logit1"} | asked
    with pytest.raises(error, match=says):
        pl.effect(toy, prompt=toy.example(), region=pl.Ball(0.01), **given)  # type: ignore[arg-type]


def test_logits_behind_a_cap_are_not_measured(toy: pl.Transformer) -> None:
    capped = replace(toy, architecture=replace(toy.architecture, logit_cap=0.5))
    for metric in ("logit0-logit1", "logit0"):
        with pytest.raises(QueryError, match="cap"):
            pl.effect(capped, "a0.h0", toy.example(), pl.Ball(0.01), metric)
    found = pl.effect(capped, "a0.h0", toy.example(), pl.Ball(0.01), "neuron 1.3@2", sufficient=True)
    assert found.lower <= found.least.effect
    same = [int(model(toy.example()).argmax()) for model in (capped, pl.edit(capped, "a0.h0"))]
    assert (found.claims[0].verdict is Verdict.HOLDS) <= (same[0] == same[1])


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("metric", ["prob(0)", "prob(1|0,1)", "kl(0,1)"])
def test_bounds_enclose_effects_on_distributions(toy: pl.Transformer, region: object, metric: str) -> None:
    where = place(toy, region)
    found = pl.effect(toy, ["m0", "a0.h1"], toy.example(), where, metric, faithful=1.0, necessary=0.9)
    held = where.around(toy.example()) if isinstance(where, pl.Ball) else where.region()
    x, _ = held.sample(300, seed=3)
    p, q = (model(x).softmax(-1) for model in (toy, pl.edit(toy, ["m0", "a0.h1"])))
    effects = p[:, 0] - q[:, 0]
    if metric == "prob(1|0,1)":
        effects = p[:, 1] - q[:, 1]
    elif metric == "kl(0,1)":
        effects = (p * (p / q).log()).sum(-1)
    assert found.lower <= float(effects.min()) + 1e-13
    assert float(effects.max()) <= found.upper + 1e-13
    assert abs(found.clean[0] - found.clean[1] - found.outcomes[0].claim.clean.item()) < 1e-15
    assert [claim.verdict for claim in found.claims][1] is Verdict.HOLDS
    assert found.metric == metric


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("prob(7)", "no output 7"),
        ("prob(0|1,0,1)", "twice"),
        ("prob(0|1)", "at least two"),
        ("prob(0|1,2)", "must be one of"),
        ("kl(0)", "at least two"),
        ("kl(0,x)", "names no output"),
        ("prob()", "names no output"),
        ("kl()", "names no output"),
    ],
)
def test_distributions_that_say_nothing_are_refused(toy: pl.Transformer, metric: str, said: str) -> None:
    with pytest.raises(QueryError, match=said):
        pl.effect(toy, "m0", toy.example(), pl.Ball(0.01), metric)


def test_rounding_of_a_softmax_breaks_no_claim(toy: pl.Transformer) -> None:
    """A neuron of next to no weight: float64 may compute a divergence below 0, and a claim of at least 0 holds."""
    silent = pl.edit(toy, pl.Edit("m1.n3", torch.tensor([1e-13]).double()))
    x, ball = toy.example(), pl.Ball(1e-3)
    found = pl.effect(silent, "m1.n3", x, ball, "kl(0,1)", necessary=0.0, faithful=1e-12)
    assert found.verdicts == [Verdict.HOLDS, Verdict.HOLDS]
    gone = pl.effect(toy, "a1.h0", x, ball, "prob(0)", necessary=1e-8, faithful=1e-6)
    assert gone.verdicts == [Verdict.HOLDS, Verdict.HOLDS]


@pytest.mark.parametrize("region", [pl.Ball(0.01), pl.Ball(0.005, tokens=[-1])])
def test_several_edits_have_the_effects_of_each(toy: pl.Transformer, region: pl.Ball) -> None:
    x, edits, told = toy.example(), ["a1.h1", "m0", ["a0.h0", "a1.h0"]], []
    found = pl.effects(
        toy, edits, x, region, "logit0-logit1", faithful=0.5, found=lambda number, one: told.append(number)
    )
    assert sorted(told) == [0, 1, 2]
    assert told[-1] == 0  # the earliest edits come first: their walks serve the others
    for one, edit in zip(found, edits, strict=True):
        alone = pl.effect(toy, edit, x, region, "logit0-logit1", faithful=0.5)
        assert one.ends == pytest.approx(alone.ends, rel=1e-9)
        assert one.to_dict()["edited_sha256"] == alone.to_dict()["edited_sha256"]
        assert [claim.verdict for claim in one.claims] == [claim.verdict for claim in alone.claims]


def test_effects_keep_to_a_time(toy: pl.Transformer) -> None:
    """Where no engine has the time, what stands is what the quickest has, and the reason names the others."""
    found = pl.effect(toy, "a1.h0", toy.example(), pl.Ball(0.01), "logit0-logit1", faithful=0.2, time=1e-9)
    assert found.lower <= found.least.effect <= found.most.effect <= found.upper
    assert found.engine != "taylor"
    (claim,) = found.claims
    assert claim.verdict is Verdict.HOLDS
    assert "taylor: the time that was allowed ended" in claim.reason


def test_several_edits_keep_to_their_own_sets_of_values(toy: pl.Transformer) -> None:
    """Parts that move at the same tokens by other distances: no edit is asked about on another one's region."""
    x, ball, metric = toy.example(), pl.Ball(0.001), "logit0-logit1"
    edits: list[Any] = [pl.Edit("a1.h0@-1", spread=0.01), pl.Edit("a1.h1@-1", spread=4.0)]
    edits += [pl.Edit("a1.h0@-1@-2", spread=size) for size in (0.01, 1.0)]
    every = pl.effects(toy, edits, x, ball, metric, budget="20/1/2")
    for one, own in zip(edits, every, strict=True):
        alone = pl.effect(toy, one, x, ball, metric, budget="20/1/2")
        assert own.ends == pytest.approx(alone.ends, rel=1e-9)
        assert own.lower <= alone.least.effect <= alone.most.effect <= own.upper


def test_sets_of_values_are_asked_about_by_effects_of_the_model_itself(toy: pl.Transformer) -> None:
    x, ball, metric = toy.example(), pl.Ball(0.001), "logit0-logit1"
    wide = pl.Edit("a1.h0@-1", spread=0.02)
    edits: Any = [wide, "a1.h1", pl.Edit("m1@-1", spread=0.02), pl.Edit("a0.h1@-1", spread=0.03)]
    every = pl.effects(toy, edits, x, ball, metric, budget="20/1/2")
    for one, own in zip(edits, every, strict=True):
        alone = pl.effect(toy, one, x, ball, metric, budget="20/1/2")
        assert own.ends == pytest.approx(alone.ends, rel=1e-9)
        assert own.subject.model_sha256 == toy.sha256
        assert own.subject.eps == 0.001
    with pytest.raises(ModelError, match="at once"):
        pl.effect(pl.edit(toy, wide), "a1.h1", x, ball, metric)
    with pytest.raises(ModelError, match="one value each"):
        pl.discover(toy, x, ball, metric, 0.2, edits={"a1.h0": wide})
    for other in ("prob(0|0,1)", "kl(0,1)", "neuron 1.3@-1"):
        found = pl.effect(toy, wide, x, ball, other, budget="20/1/2")
        assert found.lower <= found.least.effect <= found.most.effect <= found.upper
    tail, stream = pl.start_at(toy, 1, toy.example())
    assert stream is not None
    with pytest.raises(RegionError, match="starts later"):
        pl.effect(tail, pl.Edit("a0.h0@-1", spread=0.02), stream, ball, metric)


def test_the_time_ends_a_walk_and_what_is_not_bounded_says_so(
    toy: pl.Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prooflens.verdicts.effect.is_small", lambda problem: False)  # as on a large model
    x = toy.example()
    where = place(toy, "segment")
    begun = time.monotonic()
    found = pl.effect(toy, "m1", x, where, "logit0-logit1", necessary=-1e9, time=1e-6)
    assert time.monotonic() - begun < 10.0
    assert found.engine == "interval"
    assert found.claims[0].verdict is Verdict.HOLDS
    assert "chebyshev: the time that was allowed ended at piece 1, layer 0" in found.claims[0].reason
    assert "crown was not asked: the time had ended" in found.claims[0].reason
    with pytest.raises(EngineError, match="the time that was allowed ended"):
        pl.effect(toy, "m1", x, where, "logit0-logit1", time=1e-6, engine="chebyshev")


def test_walks_of_pieces_tell_their_layers(toy: pl.Transformer) -> None:
    told: list[tuple[str, float]] = []
    pl.effect(
        toy,
        "m1",
        toy.example(),
        place(toy, "segment"),
        "logit0-logit1",
        progress=lambda stage, share: told.append((stage, share)),
    )
    assert {"piece 1, layer 0", "piece 1, layer 1 of the other model", "attack"} <= {
        stage for stage, _ in told
    }
    assert all(0.0 <= share <= 1.0 for _, share in told)


def test_pieces_that_the_time_cut_off_keep_what_was_known(toy: pl.Transformer) -> None:
    """The deadline passes while the second batch is walked: the bounds of the first one's halves stand."""
    x = toy.example().x
    problem = Problem(toy, pl.Segment(x, toy.example(1).x).region())
    forms = Forms.of([(0, Row(1, 0, 3), 2, 1.0), (0, Row(1, 0, 3), 0, -1.0)], size=1)
    whole = Chebyshev().bound_forms(problem, forms)
    calls = itertools.count()

    def late(stage: str, share: float) -> None:
        if "layer 1" in stage and not stage.startswith("piece 1,") and next(calls) > 3:
            raise OutOfTimeError("the time that was allowed ended")

    found = Chebyshev().bound_forms(problem, forms, EngineOptions(progress=late))
    assert bool((found.lower <= whole.lower).all() & (found.upper >= whole.upper).all())
    assert next(calls) > 3  # the time did end in between
    assert found.cover is not None
    assert float((found.cover.high - found.cover.low).sum()) == pytest.approx(2.0)
