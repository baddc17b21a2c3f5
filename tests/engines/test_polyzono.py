"""`pz`, `cpz` and the sets they propagate: containment at every stage, rounding, monotonicity, both constraints."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prooflens
from prooflens.engines import forms_of, get_engine
from prooflens.engines.polyzono import VARIANTS, PolyZono
from prooflens.engines.relaxations.activations import CURVATURE
from prooflens.engines.tensor_sets.products import bilinear, square
from prooflens.engines.tensor_sets.relax import activation, inverse_root
from prooflens.engines.tensor_sets.steps import SetOptions
from prooflens.engines.tensor_sets.tensor_set import FactorIds, TensorSet
from prooflens.engines.tensor_sets.walk import propagate, region_set
from prooflens.models import Transformer
from prooflens.models.architecture import Activation
from prooflens.models.sites import ACTIVATIONS
from prooflens.problem import Problem
from prooflens.queries import Functional
from prooflens.queries.attention import TopK
from prooflens.queries.simplex import Box
from prooflens.regions import Ball
from tests.families import FAMILIES

flint = pytest.importorskip("flint", reason="python-flint (extra 'exact') checks the curvature bounds")

TOLERANCE = 1e-9
"""Sampled points are computed in floats themselves."""


@cache
def model(name: str) -> Transformer:
    return prooflens.load(FAMILIES[name]() if name in FAMILIES else name)


def problem(name: str, eps: float, n_tokens: int = 4, index: int = 0) -> Problem:
    net = model(name)
    if name in FAMILIES:
        ids = torch.arange(n_tokens) * 7 + 3 + index
        return Problem(net, Ball(eps).around(net.embed(ids)))
    return Problem(net, Ball(eps).around(net.example(index)))


def margins(asked: Problem, layer: int) -> list[Functional]:
    return [f for claim in TopK(k=1).bind(asked.setting([layer])) for f in claim.functionals]


ALL, SOME = (*FAMILIES, "toy", "toy-4layer"), ("gpt2", "mpnet", "toy-4layer")
EVERY_STAGE = [
    *((name, eps, variant) for name in ALL for eps, variant in ((0.003, "cpz"), (0.03, "pz"), (0.2, "cpz"))),
    *((name, 0.2, variant) for name in SOME for variant in VARIANTS if variant != "cpz"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "eps", "variant"), EVERY_STAGE)
def test_every_stage_contains_sampled_points(name: str, eps: float, variant: str) -> None:
    """Not only hulls: what the region's factors determine is subtracted, the rest must cover the difference."""
    asked = problem(name, eps)
    program = asked.model.program(asked.n_tokens)
    names = [step.out for step in program.steps]
    options = (
        VARIANTS[variant] if eps < 0.1 else SetOptions(**{**vars(VARIANTS[variant]), "k": 6, "order": 4})
    )
    walk = propagate(program, asked.region, options, names)
    x, alpha = asked.region.sample(400, seed=1)
    values = program.run(x)
    assert len(walk.stages) == len(names) + 1 or not walk.bounded
    for label, z in walk.sets.items():
        low, high = z.hull()
        found = values[label]
        slack = TOLERANCE * (1.0 + found.abs())
        if label.endswith("attn_scores"):
            found = found.masked_fill(~asked.mask, 0.0)
            low, high = low.masked_fill(~asked.mask, -1.0), high.masked_fill(~asked.mask, 1.0)
        assert bool(((found >= low - slack) & (found <= high + slack)).all()), label
        determined, room = z.evaluate(alpha)
        gap = ((values[label] - determined).abs() - room - slack).amax()
        assert float(gap) <= 0, (label, float(gap))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "layer"), [("toy", 1), ("toy-4layer", 3), ("gpt2", 1), ("llama", 1)])
def test_bounds_hold_under_attack(name: str, layer: int, variant: str) -> None:
    asked = problem(name, 0.01)
    forms = forms_of(margins(asked, layer))
    bounds = get_engine(variant).bound_forms(asked, forms)
    x, _ = asked.region.sample(2000, seed=2)
    assert bounds.upper_corner is not None
    assert bounds.lower_corner is not None
    corners = asked.region.point(torch.cat((bounds.upper_corner, bounds.lower_corner)))
    scores, _ = asked.values(torch.cat((x, corners)), [layer], False)
    values = forms.evaluate(scores, None)
    assert bool((values >= bounds.lower - TOLERANCE).all())
    assert bool((values <= bounds.upper + TOLERANCE).all())


def test_output_forms_are_bounded() -> None:
    asked = problem("toy", 0.01)
    x, _ = asked.region.sample(2000)
    values = asked.model(x)
    walk = PolyZono().walk(asked, ["output"])
    low, high = walk.sets["output"].hull()
    assert bool(((values >= low) & (values <= high)).all())
    assert float((high - low).mean()) < 4.0 * float((values.amax(0) - values.amin(0)).mean())


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=5)
@given(index=st.integers(0, 9), small=st.floats(0.001, 0.05), factor=st.floats(1.05, 3.0))
def test_monotone_in_the_radius(index: int, small: float, factor: float) -> None:
    """A larger ball never gives a tighter bound than a smaller one by more than rounding."""
    widths = []
    for eps in (small, small * factor):
        asked = problem("toy", eps, index=index)
        bounds = get_engine("cpz").bound_forms(asked, forms_of(margins(asked, 1)))
        widths.append(bounds.upper - bounds.lower)
    assert bool((widths[1] >= widths[0] * (1.0 - TOLERANCE)).all())


@pytest.mark.slow
@pytest.mark.parametrize("index", range(2))
def test_fewer_kept_generators_are_never_tighter(index: int) -> None:
    asked = problem("toy", 0.02, index=index)
    forms = forms_of(margins(asked, 1))
    widths = []
    for k in (0, 8, 16, 32, 64):
        bounds = PolyZono("cpz", SetOptions(k=k)).bound_forms(asked, forms)
        widths.append(float((bounds.upper - bounds.lower).mean()))
    assert widths == sorted(widths, reverse=True)


@pytest.mark.slow
def test_the_norm_constraint_keeps_widths_bounded_where_pz_explodes() -> None:
    """`thm:width_stability`: at a norm's output the width is at most 2|γ|√(d − 1), whatever ε and depth."""
    asked = problem("toy-4layer", 0.2)
    out = "blocks.3.hook_normalized_resid_post"
    weight = asked.model.weights["blocks.3.norm2.weight"]
    stages = {name: PolyZono(name, VARIANTS[name]).walk(asked, [out]) for name in ("pz", "cpz")}
    limit = 2.0 * float(weight.abs().mean()) * math.sqrt(7.0)
    assert stages["cpz"].stages[-1].width <= limit * (1.0 + TOLERANCE)
    assert stages["pz"].stages[-1].width > 100.0 * limit


def test_cutting_by_a_box_keeps_shared_factors_sound() -> None:
    """Row 11 of soundness.md: dep(α) = α, r = 2, box [−1, 1]. The paper's formula would leave r = 0."""
    ids = torch.tensor([0])
    one = torch.ones(1, dtype=torch.float64)
    z = TensorSet(0 * one, one[None], ids, one[None][:0], ids.reshape(1, 1)[:0].expand(0, 2), 2 * one)
    cut = z.within(Box(-1.5 * one, 1.5 * one))
    determined, room = cut.evaluate(torch.tensor([[-1.0]], dtype=torch.float64))
    assert float(determined + room) >= 1.0


def random_set(seed: int, shape: tuple[int, ...], p: int = 5, m: int = 4) -> TensorSet:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    ids = torch.randperm(8, generator=generator)[:p].sort().values
    pairs = torch.stack(torch.triu_indices(8, 8).unbind(0), -1)
    pairs = pairs[torch.randperm(len(pairs), generator=generator)[:m]]
    return TensorSet(
        draw(*shape), 0.3 * draw(p, *shape), ids, 0.1 * draw(m, *shape), pairs, 0.05 * draw(*shape).abs()
    )


def draw_point(z: TensorSet, alpha: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    value, room = z.evaluate(alpha)
    return value + room * (torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), k=st.sampled_from([0, 2, 8]), dense=st.booleans())
def test_products_and_sums_contain_what_they_should(seed: int, k: int, dense: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.rand(200, 8, generator=generator, dtype=torch.float64) * 2 - 1
    alpha[::2] = alpha[::2].sign()
    x, y = random_set(seed, (3, 2, 4)), random_set(seed + 1, (5, 2, 4))
    a, b = draw_point(x, alpha, generator), draw_point(y, alpha, generator)
    with pytest.MonkeyPatch.context() as patch:
        if not dense:
            patch.setattr("prooflens.engines.tensor_sets.products.DENSE_ELEMENTS", 0)
        product, squared = bilinear(x, y, "ihc,jhc->hij", k, 4), square(x, k)
        lengths = bilinear(x, x, "ihc,ihc->i", k, 8)
    for z, value in (
        (product, torch.einsum("nihc,njhc->nhij", a, b)),
        (squared, (a - x.c).square()),
        (lengths, a.square().sum((-1, -2))),
        (
            x + random_set(seed + 2, (3, 2, 4)),
            a + draw_point(random_set(seed + 2, (3, 2, 4)), alpha, generator),
        ),
        (x.reduced(2, 1), a),
        (x.absorbed(FactorIds(8)), a),
    ):
        determined, room = z.evaluate(alpha)
        assert bool(((value - determined).abs() <= room + TOLERANCE).all())
        low, high = z.hull()
        assert bool(((value >= low - TOLERANCE) & (value <= high + TOLERANCE)).all())


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), spread=st.floats(1e-6, 30.0), name=st.sampled_from([*ACTIVATIONS]))
def test_activations_contain_their_values(seed: int, spread: float, name: Activation) -> None:
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.rand(500, 8, generator=generator, dtype=torch.float64) * 2 - 1
    x = random_set(seed, (6,)).scaled(spread)
    value = draw_point(x, alpha, generator)
    determined, room = activation(name, x, 4).evaluate(alpha)
    found = ACTIVATIONS[name](value)
    assert bool(((found - determined).abs() <= room + TOLERANCE * (1.0 + found.abs())).all())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), spread=st.floats(1e-6, 1.0))
def test_inverse_roots_contain_their_values(seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.rand(500, 8, generator=generator, dtype=torch.float64) * 2 - 1
    x = random_set(seed, (6,)).scaled(spread)
    x = x.plus(torch.full_like(x.c, 1e-5) - x.hull().lower)
    value = draw_point(x, alpha, generator)
    determined, room = inverse_root(x, 4, 1e-5 * (1 - 1e-9)).evaluate(alpha)
    assert bool(((value.rsqrt() - determined).abs() <= room * (1.0 + TOLERANCE)).all())


def _series(name: Activation, x: Any) -> Any:
    arb = flint.arb
    if name == "tanh":
        return 1 - 2 / (1 + (2 * x).exp())
    if name == "silu":
        return x / (1 + (-x).exp())
    if name == "gelu":
        return x * (1 + (x * arb(0.5).sqrt()).erf()) / 2
    return x / (1 + (-2 * (x + arb(0.044715) * x * x * x) * (2 / arb.pi()).sqrt()).exp())


def _bounded(name: Activation, numerator: int, denominator: int) -> bool:
    """|φ''| < M₂ on [n − 1, n + 1]/denominator, by bisection."""
    ball = flint.arb(numerator, 1) / denominator
    second = _series(name, flint.arb_series([ball, 1], prec=3))[2] * 2
    if abs(second) < CURVATURE[name]:
        return True
    halves = (2 * numerator - 1, 2 * numerator + 1)
    return denominator < 2**20 and all(_bounded(name, half, 2 * denominator) for half in halves)


@pytest.mark.parametrize("name", [name for name in CURVATURE if name != "relu2"])
def test_second_derivatives_stay_below_their_bound(name: Activation) -> None:
    """Ball arithmetic on [−12, 12]; outside, all four are linear up to e⁻¹⁰."""
    assert all(_bounded(name, numerator, 8) for numerator in range(-95, 96, 2))


def test_the_input_set_is_the_region() -> None:
    asked = problem("toy", 0.1)
    z = region_set(asked.region)
    assert z.dependent == asked.region.n_factors
    assert z.independent == 0
