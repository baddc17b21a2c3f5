"""`certify`: verdicts that agree with brute force, the portfolio's order, honesty about estimates, interruptions."""

import math
import random
from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.engines import Guarantee, get_engine
from prooflens.engines.attack import AttackBudget, break_claims
from prooflens.errors import EngineError, ProoflensError, RunError
from prooflens.evaluation.soundness import random_case
from prooflens.evaluation.soundness.cases import random_model
from prooflens.models import Transformer, load
from prooflens.problem import Problem
from prooflens.queries import parse_query
from prooflens.regions import Constraints, Paraphrases, Region
from prooflens.results.outcome import Verdict
from prooflens.verdicts.certify import Interrupted, decide_claims
from prooflens.verdicts.evidence import ATTACK, Evidence
from prooflens.verdicts.portfolio import gather_evidence
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.stages import PORTFOLIO, Stage, stages_of
from tests.families import gpt2

SMALL = AttackBudget(200, 4, 20)
QUERIES = ["top1", "mass>=0.2", "entropy", "entropy<=1.3"]


@pytest.fixture(scope="module")
def toy() -> Transformer:
    return pl.load("toy")


@pytest.fixture(scope="module")
def found(toy: Transformer) -> pl.Results:
    return pl.certify(toy, toy.example(0), pl.Ball(0.05), heads="0-1", queries=QUERIES, budget=SMALL)


@pytest.mark.slow
def test_one_row_per_head_position_and_query(found: pl.Results) -> None:
    assert len(found) == 2 * 2 * 4 * len(QUERIES)
    assert len(found.keys) == len(found)
    assert sum(found.counts.values()) == len(found)
    assert found.counts["holds"]
    assert found.counts["fails"]
    assert not found.counts["estimated"]


def test_verdicts_agree_with_samples(toy: Transformer, found: pl.Results) -> None:
    """No sampled point breaks what holds; every witness lies in the ball and breaks its claim in the model."""
    region = pl.Ball(0.05).around(toy.example(0))
    points, _ = region.sample(500, seed=7)
    scores = {layer: toy.scores(points, layer) for layer in (0, 1)}
    for outcome in found.outcomes:
        row = outcome.claim.rows[0]
        values = {row: scores[row.layer][:, row.head, row.position]}
        if outcome.verdict is Verdict.HOLDS and not outcome.claim.wants_range:
            assert bool(outcome.claim.holds_on(values).all())
        functionals = outcome.claim.values(values)
        assert bool((functionals >= outcome.bounds.lower - 1e-12).all())
        assert bool((functionals <= outcome.bounds.upper + 1e-12).all())
        if outcome.verdict is Verdict.FAILS:
            assert outcome.witness is not None
            assert region.contains(outcome.witness.x)
            there = toy.scores(outcome.witness.x, row.layer)[row.head, row.position]
            assert not bool(outcome.claim.holds_on({row: there}))


def test_rows_are_sandwiched(found: pl.Results) -> None:
    for row in found.rows:
        if row["attack"] is not None and row["lower"] is not None:
            assert row["lower"] <= row["attack"] <= row["clean"] + 1e-12
        if row["verdict"] == "fails":
            assert row["attack"] <= 0
        if row["verdict"] == "holds" and row["query"] == "top1":
            assert row["lower"] > 0


@pytest.mark.slow
def test_a_larger_ball_proves_no_more(toy: Transformer, found: pl.Results) -> None:
    larger = pl.certify(toy, toy.example(0), pl.Ball(0.1), heads="0-1", queries=QUERIES, budget=SMALL)
    assert found.keys == larger.keys
    held = {key(row) for row in found.rows if row["verdict"] == "holds"}
    assert {key(row) for row in larger.rows if row["verdict"] == "holds"} <= held


def key(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in ("layer", "head", "position", "query"))


def test_cheap_engines_decide_first(found: pl.Results) -> None:
    """What the first engine proves is asked of no other: a layer-0 margin that holds is layer0's."""
    held = found.sel(layer=0, query="top1", verdict="holds")
    assert {row["engine"] for row in held.rows} == {"layer0"}
    assert {row["attack"] for row in held.rows} == {None}
    deep = found.sel(layer=1, query="top1")
    assert all(row["engine"] != "layer0" for row in deep.rows)


def test_portfolio_is_data() -> None:
    names = [stage.engine for stage in PORTFOLIO]
    assert names[0] == "layer0"
    assert names.count(ATTACK) == 2
    assert names[-1] == ATTACK
    assert stages_of("cpz") == (Stage("cpz"), Stage(ATTACK))


def test_an_estimate_is_never_a_proof(toy: Transformer) -> None:
    res = pl.certify(toy, toy.example(0), pl.Ball(0.05), layer=1, engine="jacobian", budget=SMALL)
    assert res.counts["holds"] == 0
    assert res.counts["estimated"] > 0
    assert {row["guarantee"] for row in res.rows} == {"estimated"}


def test_the_attack_alone_proves_nothing(toy: Transformer) -> None:
    res = pl.certify(toy, toy.example(0), pl.Ball(0.05), layer=1, engine="attack", budget=SMALL)
    assert res.counts["holds"] == res.counts["estimated"] == 0
    assert res.counts["fails"] > 0
    assert all(row["lower"] is None and row["attack"] is not None for row in res.rows)
    assert all(row["guarantee"] == ("witness" if row["verdict"] == "fails" else "none") for row in res.rows)


def test_an_engine_that_cannot_answer_says_so(toy: Transformer) -> None:
    with pytest.raises(EngineError, match="layer 0 only"):
        pl.certify(toy, toy.example(0), pl.Ball(0.05), layer=1, engine="layer0")


def test_clean_failures_and_ties(toy: Transformer) -> None:
    prompt = toy.example(0)
    res = pl.certify(toy, prompt, pl.Ball(1e-3), layer=0, queries="mass>=0.99")
    assert res.verdict is Verdict.FAILS
    assert {row["engine"] for row in res.rows} == {"clean"}
    assert res.witness is not None
    assert torch.equal(res.witness.x, prompt.x)
    tied = pl.certify(toy, torch.zeros_like(prompt.x), pl.Ball(1e-3), layer=0, budget=SMALL)
    assert tied.counts["unknown"] == len(tied)
    assert "tie" in tied.rows[0]["reason"]


def test_a_centre_outside_of_the_region_breaks_nothing(toy: Transformer) -> None:
    """The only point is the second example; what the first one breaks says nothing about it."""
    here, there = toy.example(0).x, toy.example(1).x
    only = Constraints.of(1, torch.ones(1, 1), torch.ones(1))
    region = Region(here, generators=(there - here)[None], constraints=only)
    queries = ["mass>=0.3@{0}", "spec{0}>{1}"]
    found = pl.certify(toy, toy.example(0), region, "0", queries=queries, budget="50/2/10")
    truth = pl.certify(toy, toy.example(1), pl.Ball(1e-9), "0", queries=queries, budget="50/2/10")
    assert "clean" not in {row["engine"] for row in found.rows}
    for row, true in zip(found.rows, truth.rows, strict=True):
        assert {row["verdict"], true["verdict"]} != {"holds", "fails"}
    broken = [outcome.witness for outcome in found.outcomes if outcome.witness is not None]
    assert broken
    assert all(region.contains(witness.x, 1e-6) for witness in broken)


def test_convex_hulls_are_broken_at_their_centre(toy: Transformer) -> None:
    hull = Paraphrases([toy.example(i).x for i in range(3)], convex=True)
    found = pl.certify(toy, toy.example(0), hull, "0", queries="mass>=0.9@{0}", budget="50/2/10")
    assert found.counts["fails"] == len(found) > 0


def test_tokens_heads_and_paraphrases_by_other_names(toy: Transformer) -> None:
    prompt = toy.example(0)
    named = pl.certify(toy, prompt, pl.Ball(0.01, tokens="x1"), (0, 1))
    indexed = pl.certify(toy, prompt, pl.Ball(0.01, tokens=[1]), "0.1")
    mapped = pl.certify(toy, prompt, pl.Ball({"x1": 0.01}), "0.1")
    assert [row["lower"] for row in named.rows] == [row["lower"] for row in indexed.rows]
    assert [row["lower"] for row in mapped.rows] == [row["lower"] for row in indexed.rows]
    radii = [pl.radius(toy, prompt, "0.1:top1@0", tokens=t, budget="8/1/4").rows for t in (["x1"], [1])]
    assert radii[0][0]["certified"] == radii[1][0]["certified"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "'1' for a whole layer"),
        ({"heads": [0, 1]}, "does not name a head"),
        ({"heads": 1.5}, "does not name a head"),
        ({"queries": None}, "no query"),
        ({"queries": 3}, "no query"),
        ({"prompt": [[1.0]]}, "is no prompt"),
        ({"engine": None}, "there is no engine"),
        ({"memory": "much"}, "no amount of memory"),
        ({"memory": -1}, "no amount of memory"),
        ({"budget": (1, 2)}, "there is no budget '1/2'"),
        ({"positions": "x9"}, "no token has the text 'x9'"),
        ({"region": pl.Ball(0.1, tokens=["y"])}, "no token has the text 'y'"),
    ],
)
def test_arguments_of_another_kind(toy: Transformer, options: dict[str, object], message: str) -> None:
    given = {"prompt": toy.example(0), "region": pl.Ball(0.01)} | options
    with pytest.raises(ProoflensError, match=message):
        pl.certify(toy, **given)  # type: ignore[arg-type]


def test_other_spellings_of_options(toy: Transformer) -> None:
    prompt, ball = toy.example(0), pl.Ball(0.01)
    plain = pl.certify(toy, prompt, ball, "0", positions=[1], budget="50/2/10", memory=1e9)  # type: ignore[arg-type]
    other = pl.certify(toy, prompt, ball, "0", positions="x1", budget=(50, 2, 10), memory="1GB")  # type: ignore[arg-type]
    assert [row["lower"] for row in plain.rows] == [row["lower"] for row in other.rows]
    assert other[(0, 1)].rows == other["0.1"].rows == other[1:].rows


def test_proofs_need_float64(toy: Transformer) -> None:
    low = toy.to(dtype=torch.float32)
    with pytest.raises(EngineError, match="float64 model"):
        pl.certify(low, low.example(0), pl.Ball(0.01))


def test_modules_are_loaded_on_the_way() -> None:
    module = gpt2()
    ids = torch.tensor([3, 1, 4])
    found = pl.certify(module, load(module).embed(ids), pl.Ball(1e-4), "0", budget="8/1/2")
    assert len(found) == 12


def test_true_by_the_mask_alone() -> None:
    model = pl.load("toy-induction")
    res = pl.certify(model, model.example(0).x[:1], pl.Ball(0.1), layer=0, budget=SMALL)
    assert res.verdict is Verdict.HOLDS
    assert {row["engine"] for row in res.rows} == {"mask"}
    assert res.rows[0]["lower"] is None


def test_ways_to_say_the_same(toy: Transformer) -> None:
    prompt = toy.example(0)
    ball = pl.Ball(0.02)
    one = pl.certify("toy", prompt, ball, heads="1.0", positions=[-1], budget=SMALL)
    two = pl.certify(toy, prompt.x, ball.around(prompt), queries=["1.0:top1@-1"], budget=SMALL)
    three = pl.certify(toy, prompt, ball, heads=["1.0"], queries=[parse_query("top1@3")], budget=SMALL)
    for other in (two, three):
        assert [key(row) for row in one.rows] == [key(row) for row in other.rows]
        assert one.bound == other.bound


def test_outputs_and_paraphrases(toy: Transformer) -> None:
    prompt = toy.example(0)
    res = pl.certify(toy, prompt, pl.Ball(1e-3), queries="argmax", budget=SMALL)
    assert len(res) == 1
    assert res.rows[0]["layer"] is None
    near = prompt.x + 1e-3 * torch.randn(prompt.x.shape, generator=torch.Generator().manual_seed(0)).double()
    hull = Paraphrases([prompt.x, near], convex=True)
    res = pl.certify(toy, prompt, hull, layer=0, budget=SMALL)
    assert res.rows[0]["eps"] is None
    assert res.verdict is Verdict.HOLDS


def test_the_seed_decides(toy: Transformer) -> None:
    runs = [
        pl.certify(toy, toy.example(0), pl.Ball(0.05), layer=1, engine="attack", seed=s, budget=SMALL)
        for s in (1, 1)
    ]
    assert [row["attack"] for row in runs[0].rows] == [row["attack"] for row in runs[1].rows]


def test_interruption_keeps_what_is_done(toy: Transformer) -> None:
    def impatient(stage: str, share: float) -> None:
        if share >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stop:
        pl.certify(toy, toy.example(0), pl.Ball(0.05), heads="0-1", budget=SMALL, progress=impatient)
    kept = stop.value.results
    assert {row["layer"] for row in kept.rows} == {0}
    assert len(kept) == 8
    rest = pl.certify(
        toy, toy.example(0), pl.Ball(0.05), heads="0-1", budget=SMALL, skip=kept.keys, engine="interval"
    )
    assert {row["layer"] for row in rest.rows} == {1}


def test_runs_are_resumed_from_python(toy: Transformer, tmp_path: Path) -> None:
    run, ball = tmp_path / "run", pl.Ball(0.05)

    def impatient(stage: str, share: float) -> None:
        if share >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        pl.certify(toy, toy.example(0), ball, heads="0-1", budget=SMALL, out=run, progress=impatient)
    assert pl.Results.load(run).counts["holds"] > 0
    assert len(pl.Results.load(run)) == 8
    with pytest.raises(RunError, match="resume=True"):
        pl.certify(toy, toy.example(0), ball, heads="0-1", budget=SMALL, out=run)
    whole = pl.certify(toy, toy.example(0), ball, heads="0-1", budget=SMALL, out=run, resume=True)
    once = pl.certify(toy, toy.example(0), ball, heads="0-1", budget=SMALL)
    for name in ("layer", "head", "position", "verdict", "lower"):
        assert [row[name] for row in whole.rows] == [row[name] for row in once.rows]
    assert check(run, Path(pl.models.__file__).parent / "embedded" / "toy").ok
    with pytest.raises(RunError, match="another region"):
        pl.certify(toy, toy.example(0), pl.Ball(0.04), budget=SMALL, out=run, resume=True)
    with pytest.raises(RunError, match="no run to resume"):
        pl.certify(toy, toy.example(0), ball, resume=True)


def test_deciding_by_one_engine_wants_a_proof(toy: Transformer) -> None:
    problem = Problem(toy, pl.Ball(0.02).around(toy.example(0)))
    claims = parse_query("top1").bind(problem.setting([0]))
    with pytest.raises(EngineError, match="only estimates"):
        decide_claims(problem, claims, get_engine("jacobian"))
    assert all(
        o.bounds.guarantee is Guarantee.PROVED for o in decide_claims(problem, claims, get_engine("layer0"))
    )


def test_contradicting_bounds_are_an_error(toy: Transformer) -> None:
    problem = Problem(toy, pl.Ball(0.02).around(toy.example(0)))
    (claim, *_) = parse_query("top1").bind(problem.setting([0]))
    evidence = Evidence.about(claim)
    bounds = decide_claims(problem, [claim], get_engine("layer0"))[0].bounds
    chosen = list(range(len(claim.functionals)))
    evidence.learn(chosen, bounds, 0)
    with pytest.raises(EngineError, match="contradict"):
        evidence.learn(
            chosen, type(bounds)(bounds.upper + 1, bounds.upper + 2, bounds.guarantee, "x", 0.0), 0
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": "0.9"}, "did you mean '0.1'"),
        ({"heads": "0.1", "layer": 0}, "not both"),
        ({"queries": []}, "no query"),
        ({"queries": "tpo1"}, "did you mean 'top1'"),
        ({"engine": "layr0"}, "did you mean 'layer0'"),
        ({"budget": "larger0"}, "did you mean 'layer0'"),
        ({"budget": "1/2"}, "samples/restarts/steps"),
        ({"device": "quantum"}, "cannot be used"),
        ({"positions": ["x9"]}, "did you mean"),
        ({"positions": [9]}, "there is no token 9"),
    ],
)
def test_mistakes_get_a_suggestion(toy: Transformer, options: dict[str, object], message: str) -> None:
    with pytest.raises(ProoflensError, match=message):
        pl.certify(toy, toy.example(0), pl.Ball(0.1), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan, math.inf])
def test_bad_radii(toy: Transformer, eps: float) -> None:
    with pytest.raises(ProoflensError, match="positive finite"):
        pl.certify(toy, toy.example(0), pl.Ball(eps))


def test_regions_that_do_not_fit(toy: Transformer) -> None:
    prompt = toy.example(0)
    with pytest.raises(ProoflensError, match="no region"):
        pl.certify(toy, prompt, 0.01)  # type: ignore[arg-type]
    with pytest.raises(ProoflensError, match="the region has 3 tokens, the prompt 4"):
        pl.certify(toy, prompt, pl.Ball(0.01).around(prompt.x[:3]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_attack_breaks_what_the_portfolio_proves(seed: int) -> None:
    """Random models of all families, regions with and without constraints, queries of all kinds."""
    case = random_case(seed)
    evidence = [Evidence.about(claim) for claim in case.claims]
    gather_evidence(case.problem, evidence, Settings(budget=AttackBudget(50, 2, 10)))
    outcomes = [item.outcome(case.problem) for item in evidence]
    held = [o.claim for o in outcomes if o.verdict is Verdict.HOLDS and not o.claim.wants_range]
    assert break_claims(case.problem, held, AttackBudget(300, 6, 30), seed=seed + 1) == [None] * len(held)
    for outcome in outcomes:
        if outcome.attack is not None:
            assert outcome.lower <= outcome.attack


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_auto_proves_layer_0_where_queries_and_keys_are_normed(family: str) -> None:
    """`layer0` has a rule for RMS norms of queries and keys; `taylor` is asked about what it leaves open."""
    model = random_model(family, random.Random(1), 2)
    x = torch.randn(4, model.architecture.d_model, generator=torch.Generator().manual_seed(1)).double()
    found = pl.certify(model, x, pl.Ball(0.05), layer=0)
    engines = {engine for row in found.table.column("engine").to_pylist() for engine in row.split("+")}
    assert engines & {"layer0", "taylor"}
    assert any(row["verdict"] == "holds" and row["engine"] != "mask" for row in found.rows)
