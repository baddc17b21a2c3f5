"""The algebra of forms: what is done to a form is what is done to the values that it stands for."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens.models.onnx.attention import MASKED, base_of, reach, read_heads, short
from prooflens.models.onnx.forms import Anchor, Floats, Form, by_feature, constant, joined, rows, same, whole
from prooflens.models.onnx.graph import NodeError


class Node:
    """A node of no graph, for messages."""

    name, op_type, output = "node", "MatMul", ("y",)


def value(form: Form, held: dict[Anchor, Floats]) -> Floats:
    """What a form stands for."""
    total = form.constant.copy()
    for term in form.terms:
        total = total + term.factor * held[term.anchor][term.index]
    return total


Op = tuple[str, Callable[[Form, Floats], tuple[Form, Floats]]]


def steps(seed: int) -> list[Op]:
    """A few operations on a form [3, 4] and on its values alike; they keep the shape up to a transpose."""
    rng = np.random.default_rng(seed)

    def moved(move: Callable[[Floats], Floats]) -> Callable[[Form, Floats], tuple[Form, Floats]]:
        return lambda form, x: (form.laid_out(move), move(x))  # type: ignore[arg-type]

    def scaled(form: Form, x: Floats) -> tuple[Form, Floats]:
        by = rng.normal(size=(1, x.shape[-1]))
        return form.times(by), x * by

    def shifted(form: Form, x: Floats) -> tuple[Form, Floats]:
        by = rng.normal(size=x.shape)
        return form.plus(constant(by)), x + by

    def twice(form: Form, x: Floats) -> tuple[Form, Floats]:
        turned = form.laid_out(lambda v: v[:, ::-1])
        return form.plus(turned), x + x[:, ::-1]

    def cut(form: Form, x: Floats) -> tuple[Form, Floats]:
        parts = [form.laid_out(lambda v: v[:1]), form.times(np.array(-2.0)).laid_out(lambda v: v[1:])]
        return joined(parts, np.concatenate), np.concatenate((x[:1], -2.0 * x[1:]))

    def masked(form: Form, x: Floats) -> tuple[Form, Floats]:
        keep = rng.random(x.shape) < 0.7
        chosen = joined([form, constant(np.full(x.shape, 3.0))], lambda p: np.where(keep, p[0], p[1]))
        return chosen, np.where(keep, x, 3.0)

    every: list[Op] = [
        ("transpose", moved(np.transpose)),
        ("reverse", moved(lambda v: v[::-1])),
        ("scaled", scaled),
        ("shifted", shifted),
        ("twice", twice),
        ("cut", cut),
        ("masked", masked),
    ]
    return [every[i] for i in rng.integers(0, len(every), size=6)]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_forms_follow_their_values(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = Anchor("linear", None, 4), Anchor("linear", None, 4)
    held = {a: rng.normal(size=12), b: rng.normal(size=12)}
    index = np.arange(12).reshape(3, 4)
    form = whole(a, index).plus(whole(b, index))
    x = held[a].reshape(3, 4) + held[b].reshape(3, 4)
    for name, step in steps(seed):
        form, x = step(form, x)
        assert form.shape == x.shape, name
        assert np.allclose(value(form, held), x, rtol=1e-12, atol=1e-12), name
    assert same(form, form.laid_out(np.copy))
    assert not same(form, form.plus(constant(np.ones(form.shape))))


def test_rows_are_one_token_each() -> None:
    anchor, index = Anchor("linear", None, 4), np.arange(12).reshape(3, 4)
    read = rows(whole(anchor, index[:, ::-1]).times(np.array([1.0, 2.0, 3.0, 4.0])))
    assert read is not None
    assert (read.tokens.tolist(), read.features.tolist()) == ([0, 1, 2], [3, 2, 1, 0])
    assert rows(whole(anchor, index.T)) is None
    assert rows(whole(anchor, index).times(np.array([[1.0], [2.0], [3.0]]))) is None


def test_values_by_feature() -> None:
    term = whole(Anchor("linear", None, 4), np.arange(12).reshape(3, 4)).terms[0]
    found = by_feature(term, np.array([5.0, 6.0, 7.0, 8.0]))
    assert found is not None
    assert found.tolist() == [5.0, 6.0, 7.0, 8.0]
    assert by_feature(term, np.arange(12.0).reshape(3, 4)) is None


@settings(max_examples=40, deadline=None)
@given(
    half=st.integers(1, 4),
    heads=st.integers(1, 3),
    neighbours=st.booleans(),
    still=st.integers(0, 2),
    theta=st.sampled_from([100.0, 10000.0, 500000.0]),
)
def test_turning_pairs_are_found(half: int, heads: int, neighbours: bool, still: int, theta: float) -> None:
    """x cos + turned(x) sin, in both orders of pairs, with coordinates that do not turn behind them."""
    width, n = 2 * half + 2 * still, 4
    anchor = Anchor("linear", None, heads * width, weight=np.eye(heads * width))
    index = np.arange(n * heads * width).reshape(n, heads, width).swapaxes(0, 1)
    first = np.arange(0, 2 * half, 2) if neighbours else np.arange(half)
    second = first + (1 if neighbours else half)
    turns = theta ** (-np.arange(half) / half)
    angles = np.zeros((n, width))
    angles[:, first] = angles[:, second] = np.arange(n)[:, None] * turns
    partner, sign = np.arange(width), np.zeros(width)
    partner[first], partner[second], sign[first], sign[second] = second, first, -1.0, 1.0
    plain = whole(anchor, index)
    turned = plain.laid_out(lambda v: v[..., partner]).times(np.sin(angles) * sign)
    found = read_heads(Node(), plain.times(np.cos(angles)).plus(turned))
    assert found.order is not None
    assert found.frequencies is not None
    assert np.allclose(found.frequencies, np.concatenate((turns, np.zeros(still))))
    assert found.order[:half].tolist() == first.tolist()
    assert found.order[half + still : 2 * half + still].tolist() == second.tolist()
    if half > 1:
        base = base_of(found.frequencies[:half])
        assert base == pytest.approx(theta, rel=1e-6)


def test_masks() -> None:
    n = 5
    causal, near = (
        np.tril(np.ones((n, n), dtype=np.int64)),
        np.abs(np.subtract.outer(range(n), range(n))) <= 2,
    )
    assert reach(Node(), causal, True) is None
    assert reach(Node(), causal * near, True) == 2
    assert reach(Node(), near.astype(np.int64), False) == 2
    holed = causal.copy()
    holed[4, 2] = 0
    with pytest.raises(NodeError, match="mask"):
        reach(Node(), holed, True)
    assert MASKED < -1e3


def test_constants_are_read_as_they_were_written() -> None:
    assert short(float(np.float32(1e-5))) == 1e-5
    assert short(1.2345678) == 1.2345678
