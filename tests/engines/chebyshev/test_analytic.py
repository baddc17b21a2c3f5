"""Second derivatives on complex discs: no point of a disc has a larger one."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prooflens.engines.chebyshev.analytic import second
from prooflens.models.architecture import Activation


def sigmoid(z: complex) -> complex:
    return 1.0 / (1.0 + cmath.exp(-z)) if z.real > 0 else cmath.exp(z) / (1.0 + cmath.exp(z))


def silu(z: complex) -> complex:
    s = sigmoid(z)
    first = s * (1.0 - s)
    return 2.0 * first + z * first * (1.0 - 2.0 * s)


def tanh(z: complex) -> complex:
    t = cmath.tanh(z)
    return -2.0 * t * (1.0 - t * t)


def gelu(z: complex) -> complex:
    return (2.0 - z * z) * cmath.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)


def gelu_tanh(z: complex) -> complex:
    a, b = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
    g, first, twice = a * (z + b * z**3), a * (1.0 + 3.0 * b * z * z), 6.0 * a * b * z
    s = sigmoid(g)
    slope = s * (1.0 - s)
    return 2.0 * slope * first + z * (slope * (1.0 - 2.0 * s) * first**2 + slope * twice)


CASES: dict[Activation, Callable[[complex], complex]] = {
    "silu": silu,
    "tanh": tanh,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
}


@pytest.mark.parametrize("name", sorted(CASES))
@given(st.floats(-6.0, 6.0), st.floats(0.0, 2.5), st.floats(0.0, 1.0), st.floats(0.0, 2.0 * math.pi))
def test_no_point_of_a_disc_has_a_larger_second_derivative(
    name: Activation, c: float, R: float, share: float, angle: float
) -> None:
    bound = second(name, torch.tensor(c, dtype=torch.float64), torch.tensor(R, dtype=torch.float64)).item()
    z = c + R * share * cmath.exp(1j * angle)
    if math.isfinite(bound):
        assert abs(CASES[name](z)) <= bound * (1.0 + 1e-9) + 1e-12


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_bound_is_the_value_on_a_point_and_no_more_than_a_few_times_it_nearby(name: Activation) -> None:
    for c in (0.0, 0.5, 1.5):
        at = abs(CASES[name](complex(c)))
        bound = second(
            name, torch.tensor(c, dtype=torch.float64), torch.tensor(0.01, dtype=torch.float64)
        ).item()
        assert at <= bound <= 4.0 * at + 2.5


def test_a_pole_in_reach_has_no_bound() -> None:
    zero, far = torch.tensor(0.0, dtype=torch.float64), torch.tensor(3.2, dtype=torch.float64)
    assert math.isinf(second("silu", zero, far).item())
    assert math.isinf(second("tanh", zero, 0.5 * far).item())
