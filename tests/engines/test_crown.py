"""`crown`: every line is on its side, every bound holds on every family, and widths are those of a good CROWN."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer_models import PEERS, peer_model
from prooflens import Ball, Region, load
from prooflens.engines import forms_of, get_engine
from prooflens.engines.crown import Crown, crown_work
from prooflens.engines.crown.alpha import AlphaCrown
from prooflens.engines.crown.lines import LineRelaxation, activation, convex
from prooflens.engines.crown.norm import square_lines
from prooflens.engines.crown.softmax import Weights, weighted_median
from prooflens.engines.crown.steps import Bilinear
from prooflens.engines.crown.walk import LineWalk, plain
from prooflens.engines.exact import Exact
from prooflens.engines.hidden import output_forms
from prooflens.models.architecture import Activation
from prooflens.models.sites import ACTIVATIONS, Product
from prooflens.problem import Problem
from prooflens.queries import Box
from prooflens.queries.attention import TopK
from prooflens.queries.weights import differences_from_scores
from prooflens.verdicts.certify import decide_question
from prooflens.verdicts.forecast import Forecast, deadline_of, obstacle
from prooflens.verdicts.machine import speed_of
from prooflens.verdicts.question import ask
from prooflens.verdicts.settings import Settings, parse_budget
from prooflens.verdicts.stages import PORTFOLIO
from tests.engines.cases import MODELS, margins, model_of, problem_of, tiny_problem
from tests.engines.support import assert_contains, random_forms, random_problem
from tests.families import FAMILIES

POINTS = 257
"""Points of an interval at which lines are compared with their function."""

ends = st.tuples(st.floats(-30.0, 30.0), st.floats(0.0, 1.0), st.sampled_from([1e-12, 1e-6, 1e-2, 1.0, 40.0]))
tilts = st.floats(-1.0, 1.0)


def interval(start: float, share: float, scale: float) -> Box:
    low = torch.tensor([start], dtype=torch.float64)
    return Box(low, low + share * scale)


def inside(box: Box) -> Tensor:
    share = torch.linspace(0.0, 1.0, POINTS, dtype=torch.float64)[:, None]
    return (box.lower + (box.upper - box.lower) * share).clamp(box.lower, box.upper)


def assert_between(lines: LineRelaxation, x: Tensor, y: Tensor, tau: float) -> None:
    """Both sides at one τ; the reference values are themselves rounded."""
    for side, sign in ((lines.lower, -1.0), (lines.upper, 1.0)):
        slope, offset = side.at(torch.full((1, 1), tau, dtype=torch.float64))
        line = slope * x + offset
        loss = 2.0**-50 * (y.abs() + (slope * x).abs() + offset.abs())
        assert bool((sign * (line - y) >= -loss).all())


@settings(derandomize=True, deadline=None, max_examples=150)
@given(name=st.sampled_from([*ACTIVATIONS]), where=ends, tau=tilts)
@example(name="gelu", where=(-0.8, 1.0, 1e-12), tau=0.0)
@example(name="relu", where=(0.0, 1.0, 1.0), tau=1.0)
@example(name="relu", where=(-1.0, 1.0, 1.0), tau=-1.0)
def test_lines_of_activations(name: Activation, where: tuple[float, float, float], tau: float) -> None:
    box = interval(*where)
    x = inside(box)
    assert_between(activation(name, box), x, ACTIVATIONS[name](x), tau)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(where=ends, tau=tilts)
def test_lines_of_convex_functions(where: tuple[float, float, float], tau: float) -> None:
    box = interval(*where)
    x = inside(box)
    assert_between(convex(torch.exp, torch.exp, box), x, x.exp(), tau)
    assert_between(square_lines(box), x, x.square(), tau)
    positive = Box(*(end.exp() for end in box))
    z = inside(positive)
    root = convex(torch.rsqrt, lambda t: -0.5 * t.rsqrt() / t, positive)
    assert_between(root, z, z.rsqrt(), tau)
    assert_between(convex(torch.reciprocal, lambda t: -t.reciprocal().square(), positive), z, 1 / z, tau)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(x=ends, y=ends, low=tilts, high=tilts, sign=st.sampled_from([-1.0, 1.0]))
def test_planes_of_products(
    x: tuple[float, float, float], y: tuple[float, float, float], low: float, high: float, sign: float
) -> None:
    """McCormick for every τ: the plane is above ±xy on the whole rectangle."""
    boxes = [Box(*(end[None] for end in interval(*where))) for where in (x, y)]
    rule = Bilinear.of(Product("z", ("x", "y")), *boxes)
    tau = {
        name: torch.full((1, 1, 1), t, dtype=torch.float64) for name, t in (("lower", low), ("upper", high))
    }
    passed = rule.back(torch.full((1, 1, 1), sign, dtype=torch.float64), tau)
    a, b = (inside(interval(*where)) for where in (x, y))
    plane = passed.inputs[0].flatten() * a + passed.inputs[1].flatten() * b.T + passed.constant
    assert bool((plane - sign * a * b.T >= -(2.0**-48) * passed.size).all())


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([1e-9, 1e-3, 0.1, 1.0, 10.0, 400.0]), tau=tilts)
def test_lines_of_weights(seed: int, spread: float, tau: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    S = 4
    mask = torch.ones(S, S, dtype=torch.bool).tril() if seed % 2 else torch.ones(S, S, dtype=torch.bool)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    low = 6.0 * draw(2, S, S) - 3.0
    box = Box(low, low + spread * draw(2, S, S))
    rule = Weights.of(mask, box, differences_from_scores(*box))
    a = box.lower + (box.upper - box.lower) * draw(500, 2, S, S).round(decimals=1)
    s = torch.softmax(a.masked_fill(~mask, -torch.inf), -1)
    share = torch.full((1, 2, S, S), tau, dtype=torch.float64)
    for _ in range(5):
        A = draw(1, 2, S, S) * 2.0 - 1.0
        passed = rule.back(A, {"lower": share, "upper": share})
        line = (passed.inputs[0] * a).sum((-1, -2, -3)) + passed.constant
        assert bool((line - (A * s).sum((-1, -2, -3)) >= -(2.0**-45) * passed.size).all())


def test_the_shared_part_of_weights_costs_nothing() -> None:
    """Σ_j s_j = 1: with equal coefficients the bound is the coefficient, whatever the scores do."""
    box = Box(torch.zeros(1, 3, 3, dtype=torch.float64), torch.ones(1, 3, 3, dtype=torch.float64))
    rule = Weights.of(torch.ones(3, 3, dtype=torch.bool), box, differences_from_scores(*box))
    A = torch.full((1, 1, 3, 3), 0.7, dtype=torch.float64)
    passed = rule.back(A, {})
    assert float(passed.inputs[0].abs().max()) == 0.0
    assert float(passed.constant) == pytest.approx(3 * 0.7, abs=1e-14)


def test_the_weighted_median_by_hand() -> None:
    A = torch.tensor([[[[1.0, 5.0, 2.0]]]])
    assert float(weighted_median(A, torch.tensor([[[1.0, 1.0, 1.0]]]))) == 2.0
    assert float(weighted_median(A, torch.tensor([[[1.0, 5.0, 1.0]]]))) == 5.0


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_bounds_hold_on_every_family(name: str, layer: int) -> None:
    for seed, eps in ((0, 1e-3), (1, 0.03), (2, 0.01), (3, 0.3)):
        problem = random_problem(model_of(name), 4, eps, seed)
        forms = random_forms(problem, layer, 8, seed)
        assert_contains(problem, forms, get_engine("crown").bound_forms(problem, forms), seed)


@pytest.mark.parametrize("name", [*FAMILIES, "toy"])
def test_every_box_contains_its_values(name: str) -> None:
    problem = problem_of(name, 0.03)
    program = problem.model.program(problem.n_tokens)
    with torch.no_grad():
        walk = LineWalk.through(problem, program, plain)
        values = program.run(problem.region.sample(1000)[0])
    assert walk.boxes.keys() == values.keys()
    for label, (low, high) in walk.boxes.items():
        loss = 1e-12 * (1.0 + values[label].abs())
        assert bool(((values[label] >= low - loss) & (values[label] <= high + loss)).all()), label


@pytest.mark.parametrize("name", [*FAMILIES, "toy"])
def test_outputs_padding_and_one_token(name: str) -> None:
    model = model_of(name)
    outputs = model.architecture.d_out
    for n_tokens, padding in ((1, None), (4, torch.tensor([True, True, True, False]))):
        region = random_problem(model, n_tokens, 0.01, 0).region
        problem = Problem(model, region, padding)
        if outputs is not None and model.architecture.pool != "none":
            forms = output_forms(torch.eye(outputs, dtype=torch.float64))
            assert_contains(problem, forms, get_engine("crown").bound_forms(problem, forms))
        scores = random_forms(problem, 1, 6, 5)
        assert_contains(problem, scores, get_engine("crown").bound_forms(problem, scores))


@pytest.mark.parametrize("seed", range(3))
def test_never_tighter_than_exact(seed: int) -> None:
    problem = tiny_problem(seed, 2, 0.2, d_model=2)
    forms = margins(problem)
    truth = Exact(tolerance=1e-3).bound_forms(problem, forms)
    found = get_engine("crown").bound_forms(problem, forms)
    assert truth.lower_corner is not None
    assert bool((found.lower <= truth.upper).all() & (found.upper >= truth.lower).all())
    assert_contains(problem, forms, found)


@pytest.mark.parametrize("name", [*FAMILIES, "toy"])
def test_never_looser_than_interval(name: str) -> None:
    problem = problem_of(name, 0.05)
    forms = margins(problem, 1)
    crown, interval_ = (get_engine(engine).bound_forms(problem, forms) for engine in ("crown", "interval"))
    assert bool((crown.lower >= interval_.lower).all() & (crown.upper <= interval_.upper).all())


@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 50), small=st.floats(1e-4, 0.03), factor=st.floats(1.2, 4.0))
def test_monotone_in_the_radius(seed: int, small: float, factor: float) -> None:
    name = MODELS[seed % len(MODELS)]
    widths = []
    for eps in (small, small * factor):
        problem = problem_of(name, eps, seed % 5)
        found = get_engine("crown").bound_forms(problem, margins(problem, 1))
        widths.append(found.upper - found.lower)
    assert bool((widths[1] >= widths[0] * (1.0 - 1e-9)).all())


def test_a_point_is_nearly_a_point() -> None:
    for name in MODELS:
        problem = problem_of(name)
        still = Problem(
            problem.model, Region(problem.region.center, radius=torch.zeros_like(problem.region.center))
        )
        found = get_engine("crown").bound_forms(still, margins(still, 1))
        assert float((found.upper - found.lower).max()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "toy"])
def test_alpha_is_never_looser_and_holds(name: str) -> None:
    """At every number of steps, on both sides; what it found is attacked like any other bound."""
    problem = problem_of(name, 0.02)
    forms = margins(problem, 1)
    crown = get_engine("crown").bound_forms(problem, forms)
    for steps, inner in ((0, 0), (3, 0), (6, 2)):
        found = AlphaCrown(steps=steps, inner_steps=inner).bound_forms(problem, forms)
        assert bool((found.lower >= crown.lower).all() & (found.upper <= crown.upper).all())
        assert_contains(problem, forms, found)
    assert float((found.upper - found.lower).mean()) < float((crown.upper - crown.lower).mean())


def test_alpha_shares_its_parameters_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prooflens.engines.crown.alpha.PARAMETERS", 0)
    problem = problem_of("llama", 0.01)
    forms = margins(problem, 1)
    found = AlphaCrown(steps=4, inner_steps=0).bound_forms(problem, forms)
    crown = get_engine("crown").bound_forms(problem, forms)
    assert_contains(problem, forms, found)
    assert bool((found.lower >= crown.lower).all() & (found.upper <= crown.upper).all())


def test_forms_in_small_batches_give_the_same_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a line chosen the other way where two are equally good: rounding decides that."""
    problem = problem_of("bert", 0.01)
    forms = margins(problem, 1)
    whole = get_engine("crown").bound_forms(problem, forms)
    monkeypatch.setattr("prooflens.engines.crown.walk.BUDGET_ELEMENTS", 1500)
    parts = get_engine("crown").bound_forms(problem, forms)
    torch.testing.assert_close(parts.lower, whole.lower, rtol=5e-3, atol=1e-4)
    torch.testing.assert_close(parts.upper, whole.upper, rtol=5e-3, atol=1e-4)


def test_the_portfolio_asks_crown_where_it_can_be_paid() -> None:
    """What `crown` proves on a small model is not asked of `cpz`; a deep pretrained model is not asked of `crown`."""
    model = load("toy")
    question = ask(model, model.example(0), Ball(0.02), layer=1)
    stages = tuple(stage for stage in PORTFOLIO if stage.engine != "taylor")
    results = decide_question(question, Settings(stages, parse_budget("50/1/5")))
    assert "crown" in {row["engine"] for row in results.rows}
    stage = next(stage for stage in PORTFOLIO if stage.engine == "crown")
    small = problem_of("toy")
    assert stage.applies(small, 1)
    assert not stage.applies(small, 0)
    assert stage.applies(problem_of("llama"), 0)
    assert crown_work(small, 2) > 3 * crown_work(small, 1)
    deep = Crown().cost(small, 10**5, 1)
    dear = Forecast(speed_of(small.model.device).seconds(deep), deep.memory)
    timed = deadline_of(Settings(), small, question.claims)
    assert obstacle(stage, small, dear, timed) is not None
    assert obstacle(stage, small, Forecast(1.0, 2.0**20), timed) is None


def test_a_float32_model_is_refused() -> None:
    problem = problem_of("toy")
    model = problem.model.to(dtype=torch.float32)
    single = Problem(model, problem.region.to(dtype=torch.float32))
    assert "float64" in str(get_engine("crown").refuses(single, margins(single)))


LIRPA = {
    (0, 0.01): 0.0228,
    (0, 0.02): 0.0475,
    (0, 0.05): 0.134,
    (1, 0.01): 0.0529,
    (1, 0.02): 0.143,
    (1, 0.05): 1.13,
}
"""auto_LiRPA 0.7.1, CROWN, on peer-tiny: mean width of all margins by (layer, ε)."""


@pytest.mark.skipif(not PEERS.exists(), reason="the peer models are not beside this checkout")
@pytest.mark.parametrize(("layer", "eps"), LIRPA)
def test_widths_beside_auto_lirpa(layer: int, eps: float) -> None:
    model, x = peer_model(PEERS / "peer-tiny")
    problem = Problem(model, Ball(eps).around(x))
    forms = forms_of([f for claim in TopK(k=1).bind(problem.setting([layer])) for f in claim.functionals])
    found = get_engine("crown").bound_forms(problem, forms)
    assert float((found.upper - found.lower).mean()) <= 1.01 * LIRPA[layer, eps]
