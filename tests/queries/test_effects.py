"""Claims about effects as functionals of two models side by side."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prooflens.errors import QueryError
from prooflens.queries import Functional, Logit, Sense
from prooflens.queries.effects import EffectQuery

METRIC = Functional(((1.0, Logit(0)), (-1.0, Logit(2))), name="metric")
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False) | st.sampled_from([0.0, -0.0, 0.1, -0.1, 1e-300, -1e-300])


@given(st.sampled_from(["range", "necessary", "faithful"]), NUMBERS, NUMBERS, NUMBERS)
def test_bounds_are_outward_and_meet_exactly_what_the_ends_meet(
    kind: str, a: float, b: float, delta: float
) -> None:
    lower, upper = min(a, b), max(a, b)
    delta = abs(delta) if kind == "faithful" else delta
    query = EffectQuery(kind, "logit0-logit2", "without a0.h0", delta)
    low, high = query.bounds(lower, upper)
    for (sign, constant, _), x, y in zip(query.parts, low.tolist(), high.tolist(), strict=True):
        ends = [Fraction(constant) + Fraction(sign) * Fraction(end) for end in (lower, upper)]
        assert Fraction(x) <= min(ends)
        assert Fraction(y) >= max(ends)
    met = bool(query.claim(METRIC, 3, lower).met(low, high))
    assert (
        met
        == {
            "range": True,
            "necessary": lower >= delta,
            "faithful": -delta <= lower and upper <= delta,
        }[kind]
    )


@given(st.lists(st.floats(-10, 10), min_size=6, max_size=6), st.floats(0, 5))
def test_functionals_read_both_models(outputs: list[float], delta: float) -> None:
    both = torch.tensor(outputs, dtype=torch.float64)
    effect = float((both[0] - both[2]) - (both[3] - both[5]))
    for kind in ("range", "necessary", "faithful"):
        query = EffectQuery(kind, "logit0-logit2", "without a0.h0", delta)
        claim = query.claim(METRIC, 3, effect)
        values = torch.stack([f.value({}, both) for f in claim.functionals])
        assert torch.allclose(values, query.values([effect])[0], atol=1e-12)
        assert torch.allclose(claim.clean, values, atol=1e-12)


def test_what_is_no_claim_is_refused() -> None:
    for kind, delta in (("faithful", -1.0), ("necessary", float("inf")), ("minimal", 0.0)):
        with pytest.raises(QueryError):
            EffectQuery(kind, "logit0", "without a0", delta)
    with pytest.raises(QueryError, match=r"pl\.effect"):
        EffectQuery("range", "logit0", "without a0").bind(None)  # type: ignore[arg-type]
    assert EffectQuery("range", "logit0", "without a0").parts[0][2] is Sense.RANGE
