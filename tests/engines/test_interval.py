"""Interval boxes contain every value of every family at thousands of points, corners first."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens import Ball, Paraphrases, Region, Transformer
from prooflens.engines import Forms, get_engine
from prooflens.engines.relaxations.interval_steps import DIPS, apply_step
from prooflens.engines.relaxations.interval_walk import region_box, score_boxes, value_boxes
from prooflens.models.sites import ACTIVATIONS, Elementwise, Norm, Product
from prooflens.problem import Problem
from prooflens.queries import Box, Row
from tests.engines.cases import MODELS, input_of, model_of
from tests.families import FAMILIES


def assert_contains(problem: Problem, samples: int = 2000, seed: int = 0) -> None:
    """Every named value of the program, at sampled points, half of them corners."""
    boxes = value_boxes(problem)
    x, _ = problem.region.sample(samples, seed=seed)
    with torch.no_grad():
        values = problem.model.program(problem.n_tokens, padding=problem.padding).run(x)
    assert boxes.keys() == values.keys()
    for name, value in values.items():
        box = boxes[name]
        assert not bool(box.lower.isnan().any() | box.upper.isnan().any()), name
        # The sampled values are themselves rounded: what float64 may lose on the way is allowed for.
        loss = 1e-12 * (1.0 + value.abs())
        assert bool((value >= box.lower - loss).all()), name
        assert bool((value <= box.upper + loss).all()), name


@pytest.mark.parametrize("eps", [1e-9, 1e-3, 0.05, 1.0, 1e6])
@pytest.mark.parametrize("name", MODELS)
def test_every_value_lies_in_its_box(name: str, eps: float) -> None:
    assert_contains(Problem(model_of(name), Ball(eps).around(input_of(name))), 1500)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_one_token(name: str) -> None:
    assert_contains(Problem(model_of(name), Ball(0.02).around(input_of(name, 1))), 500)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_padding(name: str) -> None:
    padding = torch.tensor([True, True, True, False])
    assert_contains(Problem(model_of(name), Ball(0.02).around(input_of(name)), padding), 500)


@pytest.mark.parametrize("name", MODELS)
def test_some_tokens_and_paraphrases(name: str) -> None:
    x = input_of(name)
    assert_contains(Problem(model_of(name), Ball(0.1, tokens=[1]).around(x)), 500)
    others = [
        x + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(s)).to(x) for s in range(3)
    ]
    assert_contains(Problem(model_of(name), Paraphrases(others).region()), 500)
    assert_contains(Problem(model_of(name), Paraphrases(others, convex=True).region()), 200)


@pytest.mark.parametrize("name", MODELS)
def test_a_point_is_nearly_a_point(name: str) -> None:
    x = input_of(name)
    boxes = value_boxes(Problem(model_of(name), Region(x, radius=torch.zeros_like(x))))
    with torch.no_grad():
        values = model_of(name).program(len(x)).run(x)
    for value, box in zip(values.values(), boxes.values(), strict=True):
        assert bool(((box.upper - box.lower) <= 1e-6 * (1.0 + value.abs())).all())
        assert bool((box.lower <= value + 1e-13).all() & (box.upper >= value - 1e-13).all())


@pytest.mark.parametrize("name", MODELS)
def test_larger_balls_have_larger_boxes(name: str) -> None:
    x, before = input_of(name), None
    for eps in (1e-6, 1e-4, 1e-2, 0.1, 3.0, 1e4):
        boxes = value_boxes(Problem(model_of(name), Ball(eps).around(x)))
        if before is not None:
            for value, box in boxes.items():
                assert bool((box.lower <= before[value].lower + 1e-12).all()), value
                assert bool((box.upper >= before[value].upper - 1e-12).all()), value
        before = boxes


@pytest.mark.parametrize("name", MODELS)
def test_norms_stay_within_the_dimension_bound(name: str) -> None:
    model = model_of(name)
    problem = Problem(model, Ball(1e8).around(input_of(name)))
    boxes = value_boxes(problem)
    for step in model.program(problem.n_tokens).steps:
        if isinstance(step, Norm):
            d = model.architecture.d_model
            limit = math.sqrt(d - 1 if step.centred else d) * (1 + 1e-12)
            gain = 1.0 if step.weight is None else step.weight.abs()
            shift = 0.0 if step.bias is None else step.bias
            assert bool(((boxes[step.out].upper - shift) <= limit * gain + 1e-12).all())
    for box in boxes.values():
        assert bool(box.lower.isfinite().all() & box.upper.isfinite().all())


def test_astronomic_balls_are_finite_or_infinite_but_never_nan() -> None:
    for name in MODELS:
        boxes = value_boxes(Problem(model_of(name), Ball(1e200).around(input_of(name))))
        for box in boxes.values():
            assert not bool(box.lower.isnan().any() | box.upper.isnan().any())
            assert bool((box.lower <= box.upper).all())


@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-12])
@pytest.mark.parametrize("centred", [True, False])
def test_norms_with_almost_no_epsilon(eps: float, centred: bool) -> None:
    norm = Norm("y", ("x",), None, None, eps, centred)
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    box = apply_step(norm, Box(x - 0.01, x + 0.01))
    points = x + 0.02 * torch.rand(2000, 3, 6, dtype=torch.float64) - 0.01
    assert bool((norm(points) >= box.lower).all() & (norm(points) <= box.upper).all())
    # A token that may be constant: without an epsilon its norm is not defined, and nothing is said.
    wide = apply_step(norm, Box(x - 10.0, x + 10.0))
    assert bool(wide.upper.isfinite().all()) == (eps == 1e-12)


def test_the_norm_bound_is_tight() -> None:
    """Two coordinates without centring: y₁ = m₁/√((m₁² + m₂²)/2) is largest at m₁ = 2, m₂ = 1."""
    norm = Norm("y", ("x",), None, None, 0.0, False)
    low, high = torch.tensor([[1.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
    box = apply_step(norm, Box(low, high))
    assert float(box.upper[0]) == pytest.approx(2 / math.sqrt(5 / 2), rel=1e-14)
    assert float(box.lower[0]) == pytest.approx(1 / math.sqrt(10 / 2), rel=1e-14)


@pytest.mark.parametrize("function", list(ACTIVATIONS))
@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.floats(-50, 50), st.floats(0, 20))
def test_activations_contain_a_dense_grid(function: str, low: float, width: float) -> None:
    step = Elementwise("y", ("x",), function)  # type: ignore[arg-type]
    ends = torch.tensor([low, low + width], dtype=torch.float64)
    box = apply_step(step, Box(ends[:1], ends[1:]))
    grid = step(torch.linspace(float(ends[0]), float(ends[1]), 4001, dtype=torch.float64))
    loss = 1e-14 * (1.0 + grid.abs())
    assert bool((grid >= box.lower - loss).all() & (grid <= box.upper + loss).all())
    slope = 1.2  # |φ'| of all of them is below this: the grid comes this near to the true range
    gap = slope * width / 4000 + 1e-13 * (1.0 + float(grid.abs().max()))
    assert float(box.lower) >= float(grid.min()) - gap
    assert float(box.upper) <= float(grid.max()) + gap


def test_turning_points_and_values_by_ball_arithmetic() -> None:
    flint = pytest.importorskip("flint")
    arb = flint.arb
    flint.ctx.prec = 200
    pi = arb.pi()

    def gelu(x: Any) -> Any:
        return x * (-x / arb(2).sqrt()).erfc() / 2

    def gelu_slope(x: Any) -> Any:
        return (-x / arb(2).sqrt()).erfc() / 2 + x * (-x * x / 2).exp() / (2 * pi).sqrt()

    def logistic(y: Callable[[Any], Any], slope: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], ...]:
        def value(x: Any) -> Any:
            return x / (1 + (-y(x)).exp())

        def derivative(x: Any) -> Any:
            s = 1 / (1 + (-y(x)).exp())
            return s * (1 + x * (1 - s) * slope(x))

        return value, derivative

    k, c = 2 * (2 / pi).sqrt(), arb("0.044715")
    exact = {
        "gelu": (gelu, gelu_slope),
        "silu": logistic(lambda x: x, lambda x: arb(1)),
        "gelu_tanh": logistic(lambda x: k * (x + c * x**3), lambda x: k * (1 + 3 * c * x * x)),
    }
    generator = torch.Generator().manual_seed(0)
    for name, dip in DIPS.items():
        value, slope = exact[name]
        assert slope(arb(dip.left)) < 0 < slope(arb(dip.right))
        bracket = arb((dip.left + dip.right) / 2, (dip.right - dip.left))
        # On the bracket φ ≥ φ(middle) − sup|φ'|·width; the stored minimum must lie below, and by little.
        middle = value(arb((dip.left + dip.right) / 2))
        assert arb(dip.least) < middle - abs(slope(bracket)) * (dip.right - dip.left)
        assert arb(dip.least) > middle - arb(2) ** -52
        points = torch.cat(
            (
                -(10.0 ** (4 * torch.rand(400, generator=generator).double() - 2)),
                10.0 ** (4 * torch.rand(100, generator=generator).double() - 2),
            )
        )
        box = apply_step(Elementwise("y", ("x",), name), Box(points, points))
        for x, low, high in zip(points.tolist(), box.lower.tolist(), box.upper.tolist(), strict=True):
            assert arb(low) <= value(arb(x)) <= arb(high), (name, x)


def test_unknown_inputs_stay_unknown_where_they_matter() -> None:
    inf = torch.full((2,), math.inf, dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    product = apply_step(Product("y", ("a", "b")), Box(-inf, inf), Box(0 * one, one))
    assert bool((product.lower == -math.inf).all() & (product.upper == math.inf).all())
    gelu = apply_step(Elementwise("y", ("x",), "gelu"), Box(-inf, inf))
    assert bool((gelu.lower == DIPS["gelu"].least).all() & (gelu.upper == math.inf).all())


def some_forms(model: Transformer, n_tokens: int, output: bool) -> Forms:
    entries = []
    layers, heads = model.architecture.n_layers, model.architecture.n_heads
    generator = torch.Generator().manual_seed(5)
    for form in range(30):
        for _ in range(3):
            layer, head, key = (
                int(torch.randint(0, n, (1,), generator=generator)) for n in (layers, heads, n_tokens)
            )
            position = int(torch.randint(key, n_tokens, (1,), generator=generator))
            weight = float(torch.randn(1, generator=generator))
            entries.append((form, Row(layer, head, position), key, weight))
    forms = Forms.of(entries, 30)
    if not output:
        return forms
    n_outputs = model(torch.randn(n_tokens, model.architecture.d_model).double()).shape[-1]
    return dataclasses.replace(forms, logits=torch.randn(30, n_outputs, generator=generator).double())


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_forms_of_all_layers_and_the_output(name: str, output: bool) -> None:
    model = model_of(name)
    x = input_of(name)
    problem = Problem(model, Ball(0.01).around(x))
    forms = some_forms(model, len(x), output)
    found = get_engine("interval").bound_forms(problem, forms)
    points, _ = problem.region.sample(1000)
    with torch.no_grad():
        values = forms.evaluate(*problem.values(points, forms.layers, output))
    assert bool((values >= found.lower).all() & (values <= found.upper).all())
    assert bool(found.lower.isfinite().all() & found.upper.isfinite().all())


def test_a_single_score_is_its_box() -> None:
    problem = Problem(model_of("toy"), Ball(0.01).around(input_of("toy")))
    box = score_boxes(problem, [0, 1])[1]
    forms = Forms.of([(0, Row(1, 1, 2), 3, -2.0)], 1)
    found = get_engine("interval").bound_forms(problem, forms)
    assert float(found.lower[0]) == pytest.approx(-2.0 * float(box.upper[1, 2, 3]), rel=1e-14)
    assert float(found.upper[0]) == pytest.approx(-2.0 * float(box.lower[1, 2, 3]), rel=1e-14)


def test_many_boxes_at_once_equal_one_at_a_time() -> None:
    from prooflens.engines.relaxations.interval_walk import propagate

    for name in MODELS:
        model, x = model_of(name), input_of(name)
        one, other = region_box(Ball(0.01).around(x)), region_box(Ball(0.2).around(x))
        program = model.program(len(x))
        both = propagate(program, Box(*(torch.stack(ends) for ends in zip(one, other, strict=True))))
        for index, box in enumerate((one, other)):
            for value, single in propagate(program, box).items():
                for ours, theirs in zip(both[value], single, strict=True):
                    assert torch.allclose(ours[index], theirs, rtol=1e-9, atol=1e-12), value


def test_float32_models_are_refused() -> None:
    model = model_of("toy").to(dtype=torch.float32)
    problem = Problem(model, Ball(0.1).around(input_of("toy").float()))
    forms = Forms.of([(0, Row(0, 0, 0), 1, 1.0)], 1)
    assert "float64" in str(get_engine("interval").refuses(problem, forms))
