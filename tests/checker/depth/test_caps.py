"""Capped scores: what a cap leaves, mixings of capped scores, and whole networks, with and without each rule."""

from typing import Any

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens.checker.depth import caps, mixing, reading, row, scores
from prooflens.checker.depth.caps import Caps, capped
from prooflens.checker.depth.quadratics import Quadratic
from tests.checker.depth.cases import Case, worst
from tests.checker.depth.test_sites import try_mixing

SEEN = np.ones((1, 1, 1), bool)
SHARES = st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=6)


def one(cap: float, a: float, rho: float, E: float) -> list[float]:
    score, linear, beyond = (np.full((1, 1, 1), x) for x in (a, rho, E))
    found = capped(cap, score, linear, beyond, SEEN)
    return [float(part[0, 0, 0]) for part in found]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([0.5, 1.0, 30.0, 50.0]),
    st.floats(-80, 80),
    st.sampled_from([0.0, 1e-9, 1e-3, 0.1, 1.0, 20.0]),
    st.sampled_from([0.0, 1e-9, 1e-3, 0.1, 5.0]),
    SHARES,
)
def test_what_a_cap_leaves(cap: float, a: float, rho: float, E: float, shares: Any) -> None:
    value, slope, bend, rest, most = one(cap, a, rho, E)
    assert 0.0 <= slope <= 1.0
    with ctx.workprec(200):
        for first, second in ((1.0, 1.0), (-1.0, -1.0), (1.0, -1.0), *shares):
            linear = arb(first) * rho
            u = linear + arb(second) * E
            left = ((arb(a) + u) / cap).tanh() * cap - value - slope * u
            assert not abs(left) > most
            assert not abs(left - bend * linear**2) > rest
    assert max(rest, most) <= (rho + E) * (1.0 + 1e-9) + 1e-13 * (1.0 + cap)


@pytest.mark.parametrize("far", [np.inf, np.nan, 1e300])
def test_scores_that_move_without_end_prove_nothing(far: float) -> None:
    *_, rest, most = one(2.0, 0.3, far, 0.1)
    assert min(rest, most) > 1e100


def test_scores_that_no_query_sees_are_left_alone() -> None:
    a = np.array([[[0.3, 7.0]]])
    found = capped(2.0, a, a, a, np.array([[[True, False]]]))
    assert found.value[0, 0, 1] == 7.0
    assert [part[0, 0, 1] for part in found[1:]] == [1.0, 0.0, 0.0, 0.0]
    assert found.slope[0, 0, 0] < 1.0


@pytest.mark.parametrize("family", ["encoder", "gpt2", "llama"])
@pytest.mark.parametrize("cap", [0.5, 3.0])
@pytest.mark.parametrize("wide", [False, True])
def test_mixings_of_capped_scores(
    family: str, cap: float, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(row, "FEW", 0)
    assert max(try_mixing(family, seed, score_cap=cap) for seed in range(2)) <= 1.0


def tried() -> float:
    """Mixings in which what a cap leaves decides, and those and networks in which it is one part of many."""
    mixings = ((1, 0.01), (3, 0.03), (2, 0.5))
    found = max(try_mixing("encoder", seed, score_cap=cap) for seed, cap in mixings)
    cases = [
        Case.of(family, seed, eps, score_cap=cap)
        for family, seed, eps, cap in (
            ("encoder", 5, 0.01, 0.5),
            ("bert", 6, 0.1, 1.0),
            ("gpt2", 9, 0.03, 0.7),
        )
    ]
    return max(found, max(map(worst, cases)))


def without(**parts: Any) -> Any:
    """A cap of which some parts are 0, or as they are without a cap."""
    return lambda *arguments: capped(*arguments)._replace(
        **{name: np.full_like(arguments[1], number) for name, number in parts.items()}
    )


def straight(form: mixing.MixSite, v: Any, t: int) -> Any:
    """The second order of a mixing without what caps bend."""
    made, error = FORM(form, v, t)
    keep = len(made.L) - row.Row(form, t).uncapped.shape[0]
    return Quadratic(made.C[:, :keep], made.L[:keep], made.R[:keep]), error


FORM = mixing.MixSite.form
MUTANTS: dict[str, tuple[object, str, object]] = {
    "what a cap leaves forgotten": (scores, "capped", without(rest=0.0, most=0.0)),
    "slopes of caps forgotten": (scores, "capped", without(slope=1.0)),
    "bends of caps forgotten": (scores, "capped", without(bend=0.0, rest=0.0, most=0.0)),
    "bends of caps left out of forms": (mixing.MixSite, "form", straight),
    "caps' box left out of mixings": (row, "box", lambda columns, X: 0.0 * columns @ columns.T),
    "half of what a cap's Taylor series leaves": (caps, "high", lambda x: 0.5 * float(x.upper())),
}


def test_nothing_is_wrong_without_a_mutant() -> None:
    assert tried() <= 1.0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_caps_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert tried() > 1.0


def test_bends_join_the_hessian() -> None:
    """Near a point a margin of capped scores is its second order but for a share: κ is used and not bounded."""
    case = Case.of("encoder", 5, 1e-3, depth=1, score_cap=0.5)
    found: Caps | None = case.walk.layer(0).scores.caps
    assert found is not None
    assert found.bend.any()
    form = reading.score_form(case.walk, 0, [(1.0, 0, 1, 0), (-0.7, 0, 1, 1)])
    quadric, rest = form.expanded()
    assert rest < 0.2 * np.abs(quadric.H).sum()
