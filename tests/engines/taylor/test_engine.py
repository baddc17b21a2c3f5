"""`taylor` against attained values, corners, attacks and other proved engines, on every family and at depth."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens import Ball, Paraphrases
from prooflens.engines import FormBounds, Forms, Guarantee, get_engine
from prooflens.engines.attack import AttackBudget, break_claims
from prooflens.engines.functionals import bound_claims
from prooflens.engines.hidden import headless
from prooflens.engines.protocol import EngineOptions
from prooflens.engines.relaxations import ellipsoids as shapes
from prooflens.engines.taylor import Taylor, drop_sign_changes, least_memory, pieces
from prooflens.engines.taylor.remainder_bounds import Supports
from prooflens.errors import EngineError
from prooflens.models import OUTPUT
from prooflens.problem import Problem
from prooflens.queries import parse_query
from prooflens.regions import Region
from prooflens.verdicts.decide import is_proved
from tests.engines.cases import MODELS, RANDOM_MODELS, input_of, margins, model_of, problem_of, tiny_model
from tests.engines.support import assert_contains, attained, random_forms, random_problem

LAYERS = (0, 1)


def bounds_of(problem: Problem, forms: Forms) -> FormBounds:
    return Taylor().bound_forms(problem, forms)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("eps", [1e-4, 5e-3, 0.05])
def test_every_family_and_layer_is_contained(name: str, layer: int, eps: float) -> None:
    problem = problem_of(name, eps)
    forms = random_forms(problem, layer, 6, seed=layer)
    found = bounds_of(problem, forms)
    assert_contains(problem, forms, found, seed=3)
    assert found.upper_corner is not None
    assert found.lower_corner is not None
    for corner in (found.upper_corner, found.lower_corner):
        values = attained(problem, forms, corner)
        assert bool((values <= found.upper).all())
        assert bool((values >= found.lower).all())


@pytest.mark.parametrize("name", MODELS)
def test_small_balls_are_tight(name: str) -> None:
    """As ε shrinks the bound approaches what the corners of the linear part attain."""
    problem = problem_of(name, 1e-6)
    forms = random_forms(problem, 1, 4, seed=0)
    found = bounds_of(problem, forms)
    assert found.upper_corner is not None
    assert found.lower_corner is not None
    best = attained(problem, forms, found.upper_corner).diagonal()
    worst = attained(problem, forms, found.lower_corner).diagonal()
    assert bool((found.upper - found.lower <= 1.02 * (best - worst) + 1e-9).all())


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    eps=st.sampled_from([1e-3, 1e-2, 0.1]),
    **RANDOM_MODELS,
)
def test_outputs_of_random_models_are_contained(
    seed: int, eps: float, activation: str, place: str, kind: str, gated: bool
) -> None:
    model = tiny_model(seed, n_heads=2, activation=activation, norm_place=place, norm_kind=kind, gated=gated)
    problem = random_problem(model, 3, eps, seed)
    logits = torch.eye(2, dtype=torch.float64)
    forms = replace(Forms.of([], 2), logits=logits)
    found = bounds_of(problem, forms)
    assert_contains(problem, forms, found, seed=seed)


@pytest.mark.parametrize("name", ["toy", "llama"])
def test_larger_balls_have_wider_bounds(name: str) -> None:
    widths = []
    for eps in (1e-3, 3e-3, 1e-2):
        problem = problem_of(name, eps)
        found = bounds_of(problem, random_forms(problem, 1, 4, seed=0))
        widths.append(found.upper - found.lower)
    assert bool((widths[0] <= widths[1]).all())
    assert bool((widths[1] <= widths[2]).all())


def test_tokens_at_rest_and_hulls_are_regions_too() -> None:
    model = model_of("bert")
    x = input_of("bert")
    one = Problem(model, Ball(0.01, tokens=[2]).around(x))
    every = Problem(model, Ball(0.01).around(x))
    hull = Problem(model, Paraphrases([x, x + 0.01, x - 0.005 * torch.sign(x)]).region())
    forms = random_forms(one, 1, 4, seed=0)
    narrow, wide = bounds_of(one, forms), bounds_of(every, forms)
    assert bool((narrow.upper - narrow.lower < wide.upper - wide.lower).all())
    for problem in (one, hull):
        assert_contains(problem, forms, bounds_of(problem, forms), seed=1)


def test_proved_claims_survive_an_attack_and_agree_with_cpz() -> None:
    model = model_of("toy")
    for eps in (0.005, 0.02):
        problem = Problem(model, Ball(eps).around(model.example(0)))
        claims = parse_query("top1").bind(problem.setting([1]))
        parts, together = bound_claims(get_engine("taylor"), problem, claims)
        assert together.guarantee is Guarantee.PROVED
        proved = [c for c, part in zip(claims, parts, strict=True) if is_proved(c, part)]
        assert proved
        budget = AttackBudget(samples=200, restarts=4, steps=30)
        assert all(w is None for w in break_claims(problem, proved, budget, seed=0))
        _, other = bound_claims(get_engine("cpz"), problem, claims)
        together.intersect(other)


def test_masses_and_entropies_come_from_the_same_forms() -> None:
    problem = problem_of("toy", 0.002)
    for query in ("mass>=0.2", "entropy"):
        claims = parse_query(query).bind(problem.setting([1]))
        parts, _ = bound_claims(get_engine("taylor"), problem, claims[:2])
        alpha = problem.region.sample(300, 0, corners=0.7)[1]
        scores, _ = problem.values(problem.region.point(alpha), [1], output=False)
        for claim, part in zip(claims[:2], parts, strict=True):
            values = claim.values({row: scores[1][:, row.head, row.position] for row in claim.rows})
            assert bool((values >= part.lower).all())
            assert bool((values <= part.upper).all())


def test_too_little_memory_is_said_before_the_start() -> None:
    problem = problem_of("toy")
    with pytest.raises(EngineError, match="GiB"):
        Taylor().bound_forms(problem, random_forms(problem, 1, 2, seed=0), EngineOptions(memory=1000))


def test_stages_are_reported() -> None:
    problem = problem_of("toy", 0.001)
    _, stages = bounds_and_stages(problem, random_forms(problem, 1, 2, seed=0))
    assert stages[0] == "layer 0"
    assert "functionals" in stages
    assert stages[-1] == "third orders"


def test_few_factors_are_asked_of_every_reading() -> None:
    """Where widths are wanted and not signs alone: forms that are decided get tighter too."""
    problem = problem_of("toy", 0.01)
    forms = random_forms(problem, 1, 12, seed=0)
    engine = Taylor()
    found = engine.bound_forms(problem, forms)
    with torch.no_grad():
        once = engine._parts(engine.walk(problem, forms), problem, forms, Supports())
    assert bool((found.upper - found.lower < 0.95 * (once.upper - once.lower)).any())
    assert bool((found.lower >= once.lower).all())
    assert bool((found.upper <= once.upper).all())


def test_a_region_without_moving_tokens_is_a_point() -> None:
    model = model_of("bert")
    x = input_of("bert")
    region = Region(x, radius=torch.zeros_like(x))
    problem = Problem(model, region)
    forms = random_forms(problem, 1, 3, seed=0)
    found = bounds_of(problem, forms)
    value = attained(problem, forms, torch.zeros(1, 0, dtype=torch.float64))[0]
    assert bool((found.lower <= value).all())
    assert bool((value <= found.upper).all())
    assert bool((found.upper - found.lower < 1e-6).all())


def test_one_token_and_huge_scores() -> None:
    """One token has one key; scores of a thousand make softmax a step. The bounds may be wide, never wrong."""
    model = model_of("gpt2")
    alone = Problem(model, Ball(0.01).around(input_of("gpt2", n_tokens=1)))
    forms = random_forms(alone, 1, 2, seed=0)
    assert_contains(alone, forms, bounds_of(alone, forms), seed=0)
    weights = {
        name: tensor * (100.0 if name.endswith(("q.weight", "k.weight")) else 1.0)
        for name, tensor in model_of("bert").weights.items()
    }
    sharp = replace(model_of("bert"), weights=weights)
    for eps in (1e-9, 1e-4, 0.05):
        problem = Problem(sharp, Ball(eps).around(input_of("bert")))
        forms = random_forms(problem, 1, 3, seed=0)
        assert_contains(problem, forms, bounds_of(problem, forms), seed=0)


def test_a_linear_part_is_the_same_forwards_and_backwards() -> None:
    """At a radius where only rounding is left the bound is the attained width, up to rounding."""
    problem = problem_of("mpnet", 1e-7)
    forms = random_forms(problem, 1, 3, seed=2)
    found = bounds_of(problem, forms)
    assert_contains(problem, forms, found, seed=2)
    assert found.upper_corner is not None
    assert found.lower_corner is not None
    best = attained(problem, forms, found.upper_corner).diagonal()
    worst = attained(problem, forms, found.lower_corner).diagonal()
    assert bool((found.upper - found.lower <= 1.01 * (best - worst) + 1e-8).all())


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("eps", [1e-4, 5e-3])
def test_the_vector_that_the_head_reads_is_enclosed(name: str, eps: float) -> None:
    """Every covector stays within A and the ellipsoid on samples and corners; the ellipsoid lies in its box."""
    problem = problem_of(name, eps)
    known = Taylor().bound_hidden(problem)
    assert known.A is not None
    assert known.shape is not None
    there = headless(problem)
    d = len(known.h0)
    w = torch.randn(40, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points, _ = problem.region.sample(400, 0, corners=0.7)
    found = there.read_output(there.model.run(points, [OUTPUT])[OUTPUT])
    reach = ((found - known.h0) @ w.T).abs().amax(0)
    assert bool((reach <= known.reach_linear(w)).all())
    assert bool((known.rest(w) <= w.abs() @ known.E * (1 + 1e-9)).all())
    best = known.A.abs().sum(-1).mean()
    assert eps > 1e-4 or float(known.E.mean()) < float(best)


def test_ellipsoids_hold_what_they_are_made_of() -> None:
    """Sums, boxes, images and Hadamard powers of ellipsoids contain random members."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for _ in range(20):
        G, F, D = normal(5, 7), normal(5, 3), normal(4, 5)
        xi, eta = (x / x.norm(dim=-1, keepdim=True) for x in (normal(200, 7), normal(200, 3)))
        w = normal(30, 5)
        both = shapes.total([shapes.gram(G), shapes.gram(F)])
        members = xi @ G.T + eta @ F.T
        assert bool(((members @ w.T).abs().amax(0) <= shapes.support(both, w)).all())
        moved = shapes.image(D, both)
        assert bool(((members @ D.T @ w[:, :4].T).abs().amax(0) <= shapes.support(moved, w[:, :4])).all())
        K = shapes.gram(G)
        for order in (2, 3, 4):
            powers = (xi @ G.T) ** order
            assert bool(((powers @ w.T).abs().amax(0) <= shapes.support(K**order, w)).all())
        X = normal(5).abs()
        corners = torch.sign(normal(200, 5)) * X
        assert bool(
            ((corners @ w.T).abs().amax(0) <= shapes.support(shapes.box(torch.eye(5).double(), X), w)).all()
        )


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_pieces_cover_a_box_of_few_factors(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    G = torch.randn(count, 3, 4, generator=generator, dtype=torch.float64)
    region = Region(x, generators=G)
    parts = list(pieces(region))
    assert len(parts) == {1: 16, 2: 16, 3: 8, 4: 16}[count]
    alpha = torch.rand(200, count, generator=generator, dtype=torch.float64) * 2 - 1
    points = region.point(torch.cat((alpha, alpha.sign())))
    covered = torch.zeros(len(points), dtype=torch.bool)
    for part, _ in parts:
        shares = torch.linalg.lstsq(part.dense_generators().flatten(1).T, (points - part.center).flatten(1).T)
        assert torch.allclose(part.point(shares.solution.T), points, rtol=0.0, atol=1e-12)
        covered |= (shares.solution.abs() <= 1.0 + 1e-12).all(0)
    assert bool(covered.all())
    for part, blur in parts:
        shares = torch.linalg.lstsq(G.flatten(1).T, (part.center - x).flatten()[:, None]).solution
        exact = x + torch.einsum("k,ksd->sd", (shares[:, 0] * 16).round() / 16, G)
        assert float(torch.linalg.vector_norm(part.center - exact, dim=-1).max()) <= blur < 1e-13


@pytest.mark.slow
def test_a_box_of_few_factors_is_asked_in_pieces() -> None:
    """Margins of wide boxes: more signs than from the whole box, all of them right."""
    decided = {"whole": 0, "pieces": 0}
    for seed in range(2):
        model = model_of("toy")
        generator = torch.Generator().manual_seed(seed)
        x = model.example(seed % 5).x
        G = 0.12 * torch.randn(1 + seed % 2, *x.shape, generator=generator, dtype=torch.float64)
        problem = Problem(model, Region(x, generators=G))
        forms = replace(margins(problem, 1), signs=True)
        found = Taylor().bound_forms(problem, forms)
        assert_contains(problem, forms, found, seed)
        with patch("prooflens.engines.taylor.engine.PIECES", ()):
            whole = Taylor().bound_forms(problem, forms)
        decided["whole"] += int(((whole.lower > 0) | (whole.upper < 0)).sum())
        decided["pieces"] += int(((found.lower > 0) | (found.upper < 0)).sum())
    assert decided["pieces"] > decided["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy", "gpt2"])
@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("size", [0.0, 1e-320, 0.05, 5.0])
def test_edges_of_boxes_of_one_factor(name: str, n_tokens: int, size: float) -> None:
    """A point, a denormal width, one token, a masked one, scores of thousands: contained, and never NaN."""
    model = model_of(name)
    generator = torch.Generator().manual_seed(n_tokens)
    shape = (n_tokens, model.architecture.d_model)
    x, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    padding = torch.arange(n_tokens) < max(1, n_tokens - 1) if name == "toy" else None
    for scale in (1.0, 50.0) if n_tokens > 1 else (50.0,):
        problem = Problem(model, Region(scale * x, generators=size * g[None]), padding)
        forms = random_forms(problem, model.architecture.n_layers - 1, 4, seed=1)
        for signs in (True, False):
            found = Taylor().bound_forms(problem, replace(forms, signs=signs))
            assert not bool(torch.stack((found.lower, found.upper)).isnan().any())
            assert_contains(problem, forms, found, seed=1, points=60)


def bounds_and_stages(problem: Problem, forms: Forms) -> tuple[FormBounds, list[str]]:
    stages: list[str] = []
    options = EngineOptions(progress=lambda stage, share: stages.append(stage))
    found = Taylor().bound_forms(problem, forms, options)
    return found, stages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy", "gpt2", "llama"])
@pytest.mark.parametrize("output", [False, True])
def test_forms_that_change_sign_are_given_up(name: str, output: bool) -> None:
    """They do have both signs, and none that another form has is lost."""
    given_up = 0
    for eps in (0.02, 0.5):
        problem = problem_of(name, eps)
        forms = replace(margins(problem, 1), signs=True)
        if output:
            width = problem.model.architecture.d_out or problem.model.architecture.d_model
            generator = torch.Generator().manual_seed(0)
            weights = torch.randn(forms.size, width, generator=generator, dtype=torch.float64)
            forms = replace(forms, logits=weights)
        engine = Taylor()
        with torch.no_grad():
            part = engine._parts(engine.walk(problem, forms), problem, forms, Supports())
            nothing = torch.full_like(part.lower, torch.inf)
            part = part._replace(lower=-nothing, upper=nothing, provable=nothing > 0.0)
            drop_sign_changes(problem, forms, part)
        gone = (~part.provable).nonzero()[:, 0]
        given_up += len(gone)
        ends = [attained(problem, forms, sign * part.corner).diagonal()[gone] for sign in (1.0, -1.0)]
        assert bool((ends[0] * ends[1] <= 0.0).all())
        found = engine.bound_forms(problem, forms)
        with patch("prooflens.engines.taylor.engine.drop_sign_changes"):
            whole = engine.bound_forms(problem, forms)
        decided, without = ((x.lower > 0) | (x.upper < 0) for x in (found, whole))
        assert torch.equal(decided, without)
    assert given_up


def test_a_point_has_no_corners_to_give_up_at() -> None:
    x = input_of("bert")
    problem = Problem(model_of("bert"), Region(x, radius=torch.zeros_like(x)))
    forms = replace(random_forms(problem, 1, 5, seed=0), signs=True)
    found = bounds_of(problem, forms)
    assert bool(((found.lower > 0) | (found.upper < 0)).all())


def test_with_less_memory_bounds_are_coarser_before_they_are_refused() -> None:
    problem = problem_of("llama", 0.005)
    forms = random_forms(problem, 1, 4, seed=0)
    least, enough = least_memory(problem, forms, quick=True), least_memory(problem, forms)
    assert least < enough
    tight = bounds_of(problem, forms)
    coarse = Taylor().bound_forms(problem, forms, EngineOptions(memory=enough - 1))
    assert_contains(problem, forms, coarse, seed=1)
    assert bool((coarse.upper - coarse.lower >= tight.upper - tight.lower).all())
    with pytest.raises(EngineError, match="GiB"):
        Taylor().bound_forms(problem, forms, EngineOptions(memory=least - 1))
