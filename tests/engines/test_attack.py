"""What the attack reports is attained, inside the region and reproducible; what it breaks is broken."""

import pytest
import torch

from prooflens import Ball, Paraphrases, Region
from prooflens.engines import FormBounds, Forms, get_engine
from prooflens.engines.attack import BUDGETS, Attack, AttackBudget, Witness, break_claims
from prooflens.engines.attack.landscape import Landscape
from prooflens.engines.attack.search import inside
from prooflens.engines.attack.targets import Targets
from prooflens.errors import EngineError, RegionError
from prooflens.problem import Problem
from prooflens.queries import Claim, Condition, Row, Sense, Setting, TopK, parse_query
from prooflens.queries.base import make_claim
from prooflens.queries.functionals import Functional, Score, margin
from prooflens.regions import Constraints
from tests.engines.cases import MODELS, at, margins, problem_of

SMALL = AttackBudget(300, 6, 20)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_values_are_attained_inside_the_region(name: str, fast: bool) -> None:
    problem = problem_of(name)
    forms = margins(problem)
    found = Attack(budget=SMALL, fast=fast).bound_forms(problem, forms)
    for values, corners in ((found.lower, found.lower_corner), (found.upper, found.upper_corner)):
        assert corners is not None
        assert bool((corners.abs() <= 1).all())
        assert all(problem.region.contains(x) for x in problem.region.point(corners))
        assert torch.allclose(values, at(problem, forms, corners), rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_attained_values_lie_within_proved_bounds(name: str, layer: int) -> None:
    for eps in (1e-3, 0.05):
        problem = problem_of(name, eps)
        forms = margins(problem, layer)
        attained = Attack(budget=SMALL).bound_forms(problem, forms)
        for engine in ("interval", "layer0") if layer == 0 else ("interval",):
            proved = get_engine(engine).bound_forms(problem, forms)
            assert bool((proved.lower <= attained.lower).all() & (attained.upper <= proved.upper).all())


def test_small_regions_are_searched_to_the_end() -> None:
    """On a small ball layer-0 bounds are nearly exact, so the attack must come as close."""
    for name in MODELS:
        problem = problem_of(name, 1e-4)
        forms = margins(problem)
        proved = get_engine("layer0").bound_forms(problem, forms)
        attained = Attack(budget=SMALL).bound_forms(problem, forms)
        width = proved.upper - proved.lower
        assert bool(((attained.lower - proved.lower) <= 0.02 * width).all())
        assert bool(((proved.upper - attained.upper) <= 0.02 * width).all())


def test_the_same_seed_gives_the_same_answer() -> None:
    problem = problem_of("gpt2")
    forms = margins(problem, 1)
    first, again, other = (Attack(budget=SMALL, seed=s).bound_forms(problem, forms) for s in (3, 3, 4))
    assert torch.equal(first.lower, again.lower)
    assert torch.equal(first.upper, again.upper)
    assert first.lower_corner is not None
    assert again.lower_corner is not None
    assert torch.equal(first.lower_corner, again.lower_corner)
    assert not torch.equal(first.lower, other.lower)


def test_more_budget_never_hurts_and_the_best_corner_given_is_kept() -> None:
    problem = problem_of("toy", 0.3)
    forms = margins(problem, 1)
    weak = Attack(budget=AttackBudget(50, 2, 3)).bound_forms(problem, forms)
    strong = Attack(budget=AttackBudget(2000, 10, 40)).bound_forms(problem, forms)
    assert float((strong.upper - weak.upper).mean()) > 0
    kept = Attack(budget=AttackBudget(0, 0, 0), starts=strong).bound_forms(problem, forms)
    assert torch.allclose(kept.upper, strong.upper, rtol=1e-12)
    assert torch.allclose(kept.lower, strong.lower, rtol=1e-12)


def test_forms_of_the_output() -> None:
    for name in MODELS:
        problem = problem_of(name)
        n_outputs = problem.setting((), output=True).logits.shape[-1]  # type: ignore[union-attr]
        none = torch.zeros(0, dtype=torch.long)
        forms = Forms(3, none, none, none, none, none, none.double(), torch.randn(3, n_outputs).double())
        proved = get_engine("interval").bound_forms(problem, forms)
        attained = Attack(budget=SMALL).bound_forms(problem, forms)
        assert attained.lower_corner is not None
        assert torch.allclose(
            attained.lower, at(problem, forms, attained.lower_corner), rtol=1e-10, atol=1e-12
        )
        assert bool((proved.lower <= attained.lower).all() & (attained.upper <= proved.upper).all())
        assert bool((attained.lower < attained.upper).all())


def test_points_that_rounding_puts_outside_are_pulled_in() -> None:
    generator = torch.Generator().manual_seed(0)
    center = 100.0 * torch.randn(6, 8, generator=generator, dtype=torch.float64)
    region = Region(center, radius=10.0 ** (-12.0 * torch.rand(6, 8, generator=generator).double()))
    alpha = torch.randint(0, 2, (50, 48), generator=generator).double() * 2 - 1
    assert not all(region.contains(x) for x in region.point(alpha))
    pulled, x = inside(region, alpha)
    assert all(region.contains(point) for point in x)
    assert torch.equal(region.point(pulled), x)


def test_constraints_are_respected() -> None:
    problem = problem_of("toy")
    x = problem.region.center
    texts = [
        x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(s)).double() for s in range(4)
    ]
    hull = Problem(problem.model, Paraphrases(texts, convex=True).region())
    forms = margins(hull)
    found = Attack(budget=AttackBudget(50, 8, 15), fast=True).bound_forms(hull, forms)
    for corners in (found.lower_corner, found.upper_corner):
        assert corners is not None
        assert hull.region.constraints is not None
        assert bool(hull.region.constraints.satisfied(corners, 1e-9).all())
        assert all(hull.region.contains(point) for point in hull.region.point(corners)[:5])
    # The texts are points of their hull: even a few steps must come near the best of them.
    with torch.no_grad():
        values = forms.evaluate(*hull.values(torch.stack(texts), [0], False))
    best, worst = values.amin(0), values.amax(0)
    assert bool((found.lower <= best + 0.05 * (worst - best)).all())


def test_contradictory_constraints_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("toy")
    p = problem.region.n_factors
    none = Constraints.of(p, torch.ones(1, p), torch.tensor([p + 1.0]))
    empty = Region(problem.region.center, problem.region.radius, constraints=none)
    with pytest.raises(RegionError, match="no point satisfies"):
        Problem(problem.model, empty)
    monkeypatch.setattr(Region, "check", lambda region: None)
    unseen = Problem(problem.model, empty)
    with pytest.raises(EngineError, match="no point of the region"):
        Attack(budget=SMALL).bound_forms(unseen, margins(unseen))


QUERIES = [
    "top1",
    "rank2",
    "mass>=0.5@{1,2}",
    "spec{0}>{1}",
    "entropy<=1.2",
    "entropy>=0.5",
    "0.3<=entropy<=1.35",
]


def bound_claims(problem: Problem, queries: list[str]) -> list[Claim]:
    setting = problem.setting([0, 1], output=True)
    return [claim for query in queries for claim in parse_query(query).bind(setting)]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ["toy", "llama"])
def test_broken_claims_really_fail(name: str, fast: bool) -> None:
    problem = problem_of(name, 0.1)
    claims = bound_claims(problem, [*QUERIES, "argmax"] if name == "toy" else QUERIES[:1])
    found = break_claims(problem, claims, SMALL, fast=fast)
    broken = [(c, w) for c, w in zip(claims, found, strict=True) if w is not None]
    assert 0 < len(broken) < len(claims)
    for claim, witness in broken:
        assert problem.region.contains(witness.x)
        scores, logits = problem.values(witness.x, [0, 1], True)
        rows = {row: scores[row.layer][row.head, row.position] for row in claim.rows}
        assert not bool(claim.holds_on(rows, logits))
        assert torch.allclose(claim.values(rows, logits), witness.values, rtol=1e-9, atol=1e-12)


def test_claims_that_the_clean_input_breaks_need_no_search() -> None:
    problem = problem_of("toy")
    claims = [claim for claim in bound_claims(problem, ["entropy<=0.01"]) if not claim.clean_holds]
    found = break_claims(problem, claims, AttackBudget(0, 0, 0))
    assert claims
    for witness in found:
        assert isinstance(witness, Witness)
        assert torch.equal(witness.x, problem.region.center)


def test_ranges_are_never_broken() -> None:
    problem = problem_of("toy", 1.0)
    assert break_claims(problem, bound_claims(problem, ["entropy"]), SMALL) == [None] * 16
    assert break_claims(problem, [], SMALL) == []


def shifted(problem: Problem, setting: Setting, functional: Functional, by: float, sense: Sense) -> Claim:
    moved = Functional(functional.terms, functional.constant + by, functional.name)
    return make_claim(TopK(1), setting, functional.rows, [Condition(moved, sense)])


def test_planted_breaks_are_found_and_near_misses_are_not() -> None:
    """Layer 0 of a model without norm, one token moves: the least margin is linear, hence known in closed form."""
    problem = problem_of("toy")
    x = problem.region.center
    one = Problem(problem.model, Ball(0.5, tokens=[2]).around(x))
    setting = one.setting([0])
    row = Row(0, 1, 2)
    for winner, loser in ((0, 1), (1, 3), (3, 0)):
        functional = margin(row, winner, loser)
        forms = Forms.of([(0, row, winner, 1.0), (0, row, loser, -1.0)], 1)
        alpha = torch.zeros(one.region.n_factors, dtype=torch.float64, requires_grad=True)
        value = forms.evaluate(*one.values(one.region.point(alpha)[None], [0], False))[0, 0]
        (slope,) = torch.autograd.grad(value, alpha)
        least = float(value.detach() - slope.abs().sum())
        claims = [
            shifted(one, setting, functional, -least - 1e-9, Sense.POSITIVE),
            shifted(one, setting, functional, -least + 1e-9, Sense.POSITIVE),
            shifted(one, setting, functional, -least + 1e-9, Sense.NONNEGATIVE),
        ]
        found = break_claims(one, claims, AttackBudget(0, 2, 10))
        assert [witness is not None for witness in found] == [True, False, False]
        assert all(witness is None for witness in break_claims(one, claims, AttackBudget(20, 0, 0)))


def test_senses_at_zero() -> None:
    """A functional that is 0 everywhere breaks `> 0` and does not break `>= 0`."""
    problem = problem_of("toy")
    row = Row(0, 0, 0)
    zero = Functional(((1.0, Score(row, 0)), (-1.0, Score(row, 0))))
    setting = problem.setting([0])
    claims = [shifted(problem, setting, zero, 0.0, sense) for sense in (Sense.POSITIVE, Sense.NONNEGATIVE)]
    found = break_claims(problem, claims, SMALL)
    assert found[0] is not None
    assert found[1] is None


def test_given_starts_are_used() -> None:
    problem = problem_of("toy", 0.2)
    claims = bound_claims(problem, ["top1"])
    strong = break_claims(problem, claims, AttackBudget(500, 10, 40))
    starts = [None if witness is None else witness.alpha[None] for witness in strong]
    again = break_claims(problem, claims, AttackBudget(0, 0, 0), starts=starts)
    assert [w is None for w in again] == [w is None for w in strong]
    assert any(w is not None for w in strong)


def test_vectorised_targets_equal_the_functionals_themselves() -> None:
    problem = problem_of("toy", 0.3)
    claims = bound_claims(problem, [*QUERIES, "argmax"])
    points, _ = problem.region.sample(40)
    scores, output = problem.values(points, [0, 1], True)
    assert output is not None
    targets = Targets.of_claims(claims, problem.n_tokens, output.shape[-1])
    shared = targets.values({layer: value[None] for layer, value in scores.items()}, output[None])
    rows = {row: scores[row.layer][:, row.head, row.position] for claim in claims for row in claim.rows}
    for index, claim in enumerate(claims):
        wanted = [c.sense is not Sense.RANGE for c in claim.conditions]
        assert all(wanted)
        assert torch.allclose(shared[index], claim.values(rows, output).amin(-1), rtol=1e-9, atol=1e-12)
    chosen = torch.tensor([2, 5, 40])
    part = targets.select(chosen).values(
        {layer: value[None] for layer, value in scores.items()}, output[None]
    )
    assert torch.allclose(part, shared[chosen])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_one_head_alone_has_the_same_scores(name: str, layer: int) -> None:
    problem = problem_of(name)
    landscape = Landscape.of(problem, (layer,), False, problem.model)
    points, _ = problem.region.sample(5)
    scores, _ = landscape.observe(points)
    for head in range(problem.model.architecture.n_heads):
        alone, _ = landscape.of_one_head(head).observe(points)
        assert torch.allclose(alone[layer][:, 0], scores[layer][:, head], rtol=1e-12, atol=1e-14)


def test_budgets_are_the_papers() -> None:
    assert BUDGETS["synthetic"] == AttackBudget(500_000, 20, 50)
    assert BUDGETS["bert-output"] == AttackBudget(2_000, 5, 30)
    with pytest.raises(EngineError, match="negative"):
        AttackBudget(-1, 1, 1)


def test_no_forms_give_no_bounds() -> None:
    problem = problem_of("toy")
    found = Attack(budget=SMALL).bound_forms(problem, Forms.of([], 0))
    assert isinstance(found, FormBounds)
    assert found.lower.shape == (0,)
