"""Exact bounds equal enumeration and fine grids; certified ≤ exact ≤ attack on every tiny case."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens import Paraphrases, Region
from prooflens.engines import Forms, get_engine
from prooflens.engines.attack import Attack, AttackBudget
from prooflens.engines.exact import Exact, enumerable
from prooflens.errors import EngineError
from prooflens.problem import Problem
from prooflens.queries import Row
from prooflens.regions import Constraints
from tests.engines.cases import at, margins, problem_of, tiny_problem

WEAK = AttackBudget(100, 3, 10)


def values(problem: Problem, forms: Forms, x: Tensor) -> Tensor:
    with torch.no_grad():
        return forms.evaluate(*problem.values(x, forms.layers, forms.logits is not None))


def only(problem: Problem, factors: list[tuple[int, int]], eps: float) -> Problem:
    """The same input with only some coordinates (token, dimension) moving."""
    radius = torch.zeros_like(problem.region.center)
    for token, k in factors:
        radius[token, k] = eps
    return Problem(problem.model, Region(problem.region.center, radius=radius), problem.padding)


def grid(problem: Problem, n: int) -> Tensor:
    steps = torch.linspace(-1.0, 1.0, n, dtype=torch.float64)
    return problem.region.point(torch.cartesian_prod(*[steps] * problem.region.n_factors))


@pytest.mark.parametrize("seed", range(6))
def test_vertex_enumeration_equals_all_corners(seed: int) -> None:
    """A margin without its own query token is affine in each token: its extremes are at corners of the whole ball."""
    problem = tiny_problem(seed, 3, 0.3, n_heads=2)
    forms = Forms.of([(0, Row(0, seed % 2, 0), 1, 1.0), (0, Row(0, seed % 2, 0), 2, -1.0)], 1)
    assert bool(enumerable(problem, forms).all())
    everywhere = values(problem, forms, problem.region.corners())[:, 0]
    found = Exact().solve(problem, forms)
    assert float(found.upper[0]) == pytest.approx(float(everywhere.max()), rel=1e-11)
    assert float(found.lower[0]) == pytest.approx(float(everywhere.min()), rel=1e-11)
    assert float(found.lower[0]) <= float(everywhere.min())
    assert float(everywhere.max()) <= float(found.upper[0])


def test_vertex_enumeration_across_heads_and_with_relative_bias() -> None:
    for problem, heads in ((tiny_problem(3, 3, 0.1, n_heads=2), 2), (problem_of("mpnet", 0.05), 4)):
        entries = [(0, Row(0, h, 2), j, float(h - j) + 0.5) for h in range(heads) for j in (0, 1)]
        forms = Forms.of(entries, 1)
        assert bool(enumerable(problem, forms).all())
        found = Exact().solve(problem, forms)
        attack = Attack(budget=AttackBudget(500, 10, 40)).bound_forms(problem, forms)
        assert torch.allclose(found.upper, attack.upper, rtol=1e-9)
        assert torch.allclose(found.lower, attack.lower, rtol=1e-9)
        assert torch.allclose(found.upper, found.attained_upper, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("quadratic", {}),
        ("layer norm", {"norm_place": "pre"}),
        (
            "rms norm, rope, causal",
            {"norm_place": "pre", "norm_kind": "rms", "rope_theta": 10.0, "causal": True},
        ),
        ("rope", {"rope_theta": 10.0, "n_heads": 2}),
    ],
)
def test_branch_and_bound_equals_a_fine_grid(name: str, kind: dict[str, object]) -> None:
    for seed in range(1 if "norm_place" in kind else 4):
        problem = only(tiny_problem(seed, 2, 0.5, **kind), [(1, 0), (1, 2), (0, 1)], 0.2)
        forms = margins(problem)
        assert not bool(enumerable(problem, forms).any())
        found = Exact(tolerance=5e-3, max_cells=500, max_slow_cells=500).solve(problem, forms)
        table = values(problem, forms, grid(problem, 31))
        assert bool((found.upper >= table.amax(0)).all() & (found.lower <= table.amin(0)).all()), name
        assert bool((found.upper <= table.amax(0) + 0.01).all() & (found.lower >= table.amin(0) - 0.01).all())
        assert bool((found.upper - found.attained_upper <= 6e-3).all())
        assert bool((found.attained_lower - found.lower <= 6e-3).all())
        assert torch.allclose(found.attained_upper, at(problem, forms, found.upper_alpha), rtol=1e-12)
        assert all(problem.region.contains(x) for x in problem.region.point(found.lower_alpha))


def test_outputs_and_deeper_layers_close_in() -> None:
    problem = only(problem_of("toy"), [(0, 1), (2, 3)], 0.003)
    forms = dataclasses.replace(
        margins(problem, 1).select(torch.tensor([0, 5])), logits=torch.eye(2).double()
    )
    root = get_engine("interval").bound_forms(problem, forms)
    found = Exact(tolerance=1e-3, max_cells=300).solve(problem, forms)
    table = values(problem, forms, grid(problem, 101))
    assert bool((found.upper >= table.amax(0)).all() & (found.lower <= table.amin(0)).all())
    assert bool(((found.upper - found.lower) < 0.5 * (root.upper - root.lower)).all())


def test_paraphrases_are_branched_on_too() -> None:
    problem = problem_of("toy")
    x = problem.region.center
    texts = [
        x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(s)).double() for s in range(3)
    ]
    hull = Problem(problem.model, Paraphrases(texts).region())
    for layer, tolerance in ((0, 1e-6), (1, 5.0)):
        forms = margins(hull, layer).select(torch.tensor([1, 13]))
        found = Exact(tolerance=tolerance, max_cells=200).solve(hull, forms)
        table = values(hull, forms, grid(hull, 21))
        assert bool((found.upper >= table.amax(0)).all() & (found.lower <= table.amin(0)).all())
        if layer == 0:
            assert bool((found.upper <= table.amax(0) + 0.02).all())


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 3), st.floats(-3.0, 0.0), st.booleans())
def test_certified_exact_attack_in_this_order(
    seed: int, n_tokens: int, power: float, two_heads: bool
) -> None:
    problem = tiny_problem(seed, n_tokens, 10.0**power, n_heads=2 if two_heads else 1)
    forms = margins(problem)
    exact = Exact(max_cells=600).solve(problem, forms)
    attack = Attack(budget=WEAK, seed=seed).bound_forms(problem, forms)
    for engine in ("interval", "layer0"):
        proved = get_engine(engine).bound_forms(problem, forms)
        assert bool(
            (proved.upper >= exact.attained_upper).all() & (proved.lower <= exact.attained_lower).all()
        )
        assert bool((proved.upper >= attack.upper).all() & (proved.lower <= attack.lower).all())
    assert bool((exact.upper >= attack.upper).all() & (exact.lower <= attack.lower).all())
    assert bool((exact.upper >= exact.attained_upper).all() & (exact.lower <= exact.attained_lower).all())
    closed = exact.visited < 600
    assert (
        bool((exact.upper - exact.attained_upper)[closed].abs().max() <= 2e-6) if bool(closed.any()) else True
    )


def test_the_tiny_triangulation() -> None:
    """S = 2, d = 4, 8 samples at 3 radii: the sign test of `layer0` gives the verdict of the truth in all 24 cases."""
    verdicts = []
    for sample in range(8):
        for eps in (0.02, 0.05, 0.1):
            problem = tiny_problem(sample, 2, eps)
            clean = values(problem, margins(problem), problem.region.center[None])[0]
            forms = margins(problem)
            forms = dataclasses.replace(forms, weight=forms.weight * clean.sign()[forms.index])
            exact = Exact(tolerance=1e-9).solve(problem, forms)
            corners = values(problem, forms, problem.region.corners())
            assert bool((exact.attained_lower <= corners.amin(0) + 1e-9).all())
            certified = get_engine("layer0").bound_forms(problem, forms).lower > 0
            truth = exact.lower > 0
            assert bool((truth | (exact.attained_lower <= 0)).all())
            verdicts.append((bool(truth.all()), bool(certified.all())))
    assert len(verdicts) == 24
    assert all(truth == certified for truth, certified in verdicts)
    assert 0 < sum(truth for truth, _ in verdicts) < 24


@pytest.mark.slow
def test_any_time_is_a_good_time() -> None:
    problem = tiny_problem(5, 3, 1.0, norm_place="pre")
    forms = margins(problem).select(torch.tensor([0, 3]))
    before = None
    for cells in (1, 10, 30):
        found = Exact(tolerance=0.0, max_cells=cells).solve(problem, forms)
        assert bool((found.upper >= found.attained_upper).all())
        assert bool((found.visited <= 2 * cells + 2).all())
        if before is not None:
            assert bool((found.upper <= before.upper).all() & (found.lower >= before.lower).all())
        before = found


def test_larger_balls_have_larger_ranges() -> None:
    before = None
    for eps in (0.01, 0.1, 0.5):
        problem = tiny_problem(11, 3, eps)
        found = Exact(max_cells=1000).solve(problem, margins(problem))
        if before is not None:
            assert bool(
                (found.upper >= before.attained_upper).all() & (found.lower <= before.attained_lower).all()
            )
        before = found


def test_what_is_refused() -> None:
    problem = problem_of("gpt2", seed=2)
    wide = Problem(
        problem.model,
        Region(problem.model.embed(torch.arange(4, 9)), radius=torch.full((5, 16), 0.1).double()),
    )
    assert "64 factors, the region has 80" in str(Exact().refuses(wide, margins(wide)))
    with pytest.raises(EngineError, match="64 factors"):
        get_engine("exact").bound_forms(wide, margins(wide))
    p = problem.region.n_factors
    tied = Region(
        problem.region.center,
        problem.region.radius,
        constraints=Constraints.of(p, torch.ones(1, p), torch.zeros(1)),
    )
    assert "constraints" in str(Exact().refuses(Problem(problem.model, tied), margins(problem)))
    # Enumeration needs few factors in the query token only.
    many = problem_of("mpnet")
    more = Problem(
        many.model, Region(many.model.embed(torch.arange(4, 12)), radius=torch.full((8, 16), 0.01).double())
    )
    forms = Forms.of([(0, Row(0, 1, 0), 1, 1.0), (0, Row(0, 1, 0), 7, -1.0)], 1)
    assert Exact().refuses(more, forms) is None
    found = Exact().solve(more, forms)
    assert float(found.upper[0] - found.attained_upper[0]) < 1e-9
