"""What the model says: verdicts about answers, the tail of a vocabulary against brute force, cut models."""

import math
from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.engines import get_engine
from prooflens.engines.attack import AttackBudget, attack_claims
from prooflens.engines.functionals import bound_functionals
from prooflens.engines.hidden import HiddenBounds, hidden_bounds, output_forms
from prooflens.engines.rivals import is_tail
from prooflens.engines.vocabulary import bound_margins, bound_tail
from prooflens.errors import ModelError, QueryError
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.queries import Argmax, Beats, Claim, parse_query
from prooflens.queries.functionals import logit_margin, tail_margin
from prooflens.results.outcome import Verdict
from tests.engines.cases import input_of, model_of, problem_of

SMALL = AttackBudget(50, 2, 15)
DECODERS = ("gpt2", "llama")
PROVERS = ("interval", "cpz", "crown")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the tests have 60 tokens: three of them are named, the others are a tail."""
    monkeypatch.setattr("prooflens.queries.circuit.MOST_DIRECT", 8)
    monkeypatch.setattr("prooflens.queries.circuit.CANDIDATES", 3)


def argmax_of(problem: Problem) -> Claim:
    (claim,) = Argmax().bind(problem.setting((), output=True))
    return claim


def logits_at(problem: Problem, n: int = 400) -> torch.Tensor:
    """Logits at samples and corners of the region."""
    points, _ = problem.region.sample(n, seed=3)
    found = problem.values(points, (), output=True)[1]
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", PROVERS)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("eps", [1e-4, 1e-2])
def test_the_tail_holds_for_every_token(name: str, engine: str, eps: float, few: None) -> None:
    problem = problem_of(name, eps)
    claim = argmax_of(problem)
    tail = claim.functionals[-1]
    assert is_tail(tail)
    assert len(claim.functionals) == 4
    low, high, counts = bound_tail(get_engine(engine), problem, tail)
    values = tail.value({}, logits_at(problem))
    assert low <= float(values.min())
    assert float(values.min()) <= high or math.isinf(high)
    assert counts.total == problem.model.architecture.d_out - 4  # type: ignore[operator]
    assert (counts.open == 0) == (low > 0)


@pytest.mark.parametrize("engine", ["interval", "crown"])
@pytest.mark.parametrize("name", DECODERS)
def test_margins_of_single_tokens(name: str, engine: str) -> None:
    """One output per functional is the same number as the model's own logits, and no worse than bounding those."""
    problem = problem_of(name, 1e-3)
    functionals = [logit_margin(a, b) for a, b in ((3, 5), (5, 3), (0, 59), (17, 2))]
    found = bound_margins(get_engine(engine), problem, functionals)
    values = torch.stack([f.value({}, logits_at(problem)) for f in functionals], -1)
    assert bool((found.lower <= values.amin(0)).all())
    assert bool((values.amax(0) <= found.upper).all())
    both = bound_functionals(get_engine(engine), problem, [*functionals, tail_margin(3, (5,))])
    assert torch.allclose(both.lower[:4], found.lower)
    assert both.tail is not None
    assert both.tail.total == 58


@pytest.mark.slow
@pytest.mark.parametrize("engine", PROVERS)
@pytest.mark.parametrize("name", [*DECODERS, "bert", "toy"])
def test_the_vector_before_the_head_is_enclosed(name: str, engine: str) -> None:
    problem = problem_of(name, 5e-3)
    known = hidden_bounds(get_engine(engine), problem)
    bare = problem.model.headless
    points, _ = problem.region.sample(300, seed=1)
    h = bare(points)
    weight, bias = problem.model.head
    logits = problem.read_output(problem.model(points))
    assert torch.allclose(h @ weight.T + bias, logits, rtol=1e-12, atol=1e-12)
    assert bool(((h - known.h0).abs() <= known.box).all())
    w = torch.randn(40, h.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = ((h - known.h0) @ w.T).abs().amax(0)
    assert bool((moved <= known.reach_linear(w)).all())
    assert bool((known.reach_linear(w) <= known.reach_box(w) * (1 + 1e-12) + 1e-12).all())


@pytest.mark.slow
@pytest.mark.parametrize("engine", [*PROVERS, "jacobian-proved"])
def test_outputs_per_token_are_read_at_the_last_one(engine: str) -> None:
    """Forms of a model with one output per token speak of the last token's."""
    problem = Problem(model_of("gpt2"), pl.Ball(1e-3).around(input_of("gpt2", n_tokens=2)))
    found = get_engine(engine).bound_forms(problem, output_forms(torch.eye(60, dtype=torch.float64)[::5]))
    values = logits_at(problem)[:, ::5]
    assert found.lower.shape == (12,)
    assert bool((found.lower <= values.amin(0)).all())
    assert bool((values.amax(0) <= found.upper).all())


def test_norm_bound_and_reach() -> None:
    """Engines may give ‖wA‖₁ as a function and a bound of the 2-norm; both bound what the matrix gives."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    E, h0 = torch.full((6,), 0.1, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    w = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    held = HiddenBounds(h0, E, A)
    lazy = HiddenBounds(h0, E, reach=lambda v: (v @ A).abs().sum(-1))
    assert torch.allclose(held.reach_linear(w), lazy.reach_linear(w))
    assert torch.allclose(held.reach_box(w), lazy.reach_box(w))
    norm = HiddenBounds(h0, E, A, radius=0.5)
    assert bool((norm.reach_box(w) <= 0.5 * w.norm(dim=-1) * (1 + 1e-12)).all())


@pytest.mark.parametrize("name", DECODERS)
def test_next_token_over_the_vocabulary(name: str, few: None) -> None:
    model, x = model_of(name), problem_of(name).region.center
    verdicts = []
    for eps in (1e-5, 1e-3, 0.3):
        res = pl.output(model, x, pl.Ball(eps), budget=SMALL)
        verdicts.append(res.whole.verdict)
        answer = int(res.whole.candidate)
        assert [row["candidate"] for row in res.rows] == [answer, *(loser for _, loser in _pairs(res))]
        problem = Problem(model, pl.Ball(eps).around(x))
        if res.whole.verdict is Verdict.HOLDS:
            assert bool((logits_at(problem).argmax(-1) == answer).all())
            assert res.tail is not None
            assert res.tail.open == 0
            assert str(res.tail) in res.whole.reason
        if res.whole.verdict is Verdict.FAILS:
            assert res.witness is not None
            broken = problem.values(res.witness.x, (), output=True)[1]
            assert broken is not None
            assert int(broken.argmax()) != answer
    assert verdicts[0] is Verdict.HOLDS
    assert verdicts[-1] is Verdict.FAILS
    order = [(Verdict.HOLDS, Verdict.UNKNOWN, Verdict.FAILS).index(v) for v in verdicts]
    assert order == sorted(order)


def _pairs(res: pl.OutputResults) -> list[tuple[int, int]]:
    return [tuple(map(int, row["query"].replace("logit", "").split(">"))) for row in res.rows[1:]]  # type: ignore[misc]


def test_an_attack_on_the_tail_counts_on_the_whole_model(few: None) -> None:
    """The search runs on a model with few outputs; what it finds breaks the real one."""
    problem = problem_of("gpt2", 0.5)
    claim = argmax_of(problem)
    siege = attack_claims(problem, [claim], SMALL)
    assert siege.witnesses[0] is not None
    assert float(siege.witnesses[0].values.min()) <= 0
    assert float(siege.values[0]) <= 0
    circuit = parse_query("0.0:top1@-1 & argmax")
    (mixed,) = circuit.bind(problem.setting([0], output=True))
    both = attack_claims(problem, [mixed, claim], SMALL)
    assert both.witnesses[1] is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "toy"])
def test_classifiers(name: str) -> None:
    problem = problem_of(name)
    lowers = []
    for eps in (1e-4, 1e-3, 1e-2):
        res = pl.output(problem.model, problem.region.center, pl.Ball(eps), engine="cpz", budget=SMALL)
        assert len(res) == (problem.model.architecture.d_out or 0)
        assert res.tail is None
        row = res.rows[1]
        assert row["layer"] is None
        assert row["head"] is None
        if row["lower"] is not None:
            assert row["lower"] <= row["clean"] <= row["upper"]
        lowers.append(-math.inf if row["lower"] is None else row["lower"])
    assert lowers == sorted(lowers, reverse=True)
    assert res.whole.query == "argmax"
    assert res.summary["output"] == res.whole.verdict.value


def test_estimates_are_called_estimates(toy: Transformer) -> None:
    res = pl.output(toy, toy.example(0), pl.Ball(0.01), engine="jacobian", budget=SMALL)
    assert {row["verdict"] for row in res.rows} == {"estimated"}
    assert {row["guarantee"] for row in res.rows} == {"estimated"}


@pytest.mark.parametrize("name", [*DECODERS, "bert", "toy"])
def test_cut_models(name: str) -> None:
    """Final norm, pooling and head after the first block; weights, name and fingerprint say so."""
    model, x = model_of(name), problem_of(name).region.center
    cut = model.cut(1)
    assert cut.architecture.n_layers == 1
    assert "first 1" in cut.name
    assert cut.sha256 != model.sha256
    assert not any(key.startswith("blocks.1.") for key in cut.weights)
    assert model.cut(model.architecture.n_layers) is model
    stream = "resid_post" if model.architecture.norm_place == "pre" else "normalized_resid_post"
    _, cache = model.run_with_cache(x)
    assert torch.allclose(
        cut.run_with_cache(x)[1][f"blocks.0.hook_{stream}"], cache[f"blocks.0.hook_{stream}"]
    )
    for layers in (0, -1, 9):
        with pytest.raises(ModelError, match="can be cut after 1"):
            model.cut(layers)
    res = pl.output(model, x, pl.Ball(1e-5), layers=1, budget=SMALL)
    assert res.whole.model == cut.name
    assert res.whole.model_sha256 == cut.sha256


@pytest.mark.slow
def test_radius_of_an_answer(toy: Transformer) -> None:
    (row,) = pl.output_radius(toy, toy.example(0), budget=SMALL, tolerance=0.5).rows
    assert 0 < row["certified"] < (row["attack"] or math.inf)
    res = pl.output(toy, toy.example(0), pl.Ball(row["certified"]), budget=SMALL)
    assert res.verdict is Verdict.HOLDS


def test_runs_are_kept_and_checked(toy: Transformer, tmp_path: Path) -> None:
    folder = Path(pl.__file__).parent / "models" / "embedded" / "toy"
    for eps, layers in ((0.01, None), (0.6, None), (0.01, 1)):
        res = pl.output(toy, toy.example(0), pl.Ball(eps), budget=SMALL, layers=layers)
        run = tmp_path / f"{eps}-{layers}"
        res.save(run)
        found = check(run, folder)
        assert found.ok, found
        assert found.counts["witness confirmed"] == res.counts["fails"]
    assert res.counts["fails"] == 0


def test_bad_input(toy: Transformer) -> None:
    with pytest.raises(ModelError, match="has no head"):
        pl.output(model_of("mpnet"), problem_of("mpnet").region.center, pl.Ball(0.1))
    with pytest.raises(QueryError, match="at least one candidate"):
        pl.output(toy, toy.example(0), pl.Ball(0.1), top=0)
    with pytest.raises(QueryError, match="no output 7"):
        pl.certify(toy, toy.example(0), pl.Ball(0.1), queries="logit0>logit7")
    assert parse_query("logit3 > logit5") == Beats(3, 5)
    assert parse_query(str(Beats(3, 5))) == Beats(3, 5)
