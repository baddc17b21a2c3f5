"""Covectors that move, through mixings to the input, and what they leave where a form's slope decides."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prooflens.checker.depth import moving, reading
from prooflens.checker.depth.boxes import Quadric, largest_on_box
from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.moving import Left, Moving
from prooflens.checker.depth.values import ROOT, Chain, Value
from prooflens.checker.plain import PlainNetwork
from tests.checker.depth.cases import Case, worst
from tests.checker.depth.test_sites import stream_behind


def try_onward(family: str, seed: int) -> float:
    """(Kα)·e of the root behind two mixings, taken on to the input: the share of its bound that is used."""
    case = Case.of(family, seed, eps=0.01, depth=3)
    walk, plain = case.walk, PlainNetwork(case.net)
    with np.errstate(all="ignore"):
        chain = walk.layer(2).chain
    alpha = case.samples(60)
    x = walk.center + np.einsum("sdp,bp->bsd", walk.generators, alpha)
    x = plain._block(0, x)[0]
    e = stream_behind(plain, 1, x) - chain.c - np.einsum("sdp,bp->bsd", chain.N, alpha)
    most = 0.0
    for b in range(0, len(alpha), 10):
        u, w = e[b] / np.linalg.norm(e[b]), np.where(alpha[b] >= 0.0, 1.0, -1.0)
        now, lefts = Moving(chain), list[Left]()
        for t in range(len(u)):
            now.meet(chain.start, t, u[t][:, None] * w, 0.0)
        for number in (1, 0):
            place = walk.kept(number)
            assert place.mix is not None
            earlier = Moving(place.chain)
            now.onward(place.mix, place.read, earlier)
            lefts.append(now.left(w, [place.mix.missed[t] for t in place.mix.tokens]))
            now = earlier
        lefts.append(now.left(w))
        met = np.abs((alpha @ w) * np.einsum("bsd,sd->b", e, u))
        at = sum(
            np.sqrt(np.einsum("bp,pq,bq->b", alpha, left.K.H, alpha).clip(0.0)) + left.rest for left in lefts
        )
        limit = sum(left.most for left in lefts)
        if np.isfinite(limit):
            most = max(most, float((met / at).max()), float(met.max() / limit))
    return most


@pytest.mark.parametrize("family", ["encoder", "bert", "gpt2", "llama"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5])
def test_what_moves_through_mixings(family: str, seed: int) -> None:
    assert 0.0 < try_onward(family, seed) <= 1.0


def test_what_a_linear_part_is_off_by_meets_e_as_well() -> None:
    """(HAα)·e where A as it is computed is 0, and the real one is not."""
    chain = Chain(np.zeros((1, 1)), np.zeros((1, 1, 4)), {ROOT: np.full((1, 1, 1), 9.0)})
    value = Value(chain, np.zeros((1, 1)), {ROOT: np.ones((1, 1, 1))}, np.zeros(1))
    value.__dict__ |= {"slip": np.array([0.5]), "E": chain.shapes[ROOT]}
    now = Moving(chain)
    now.site(value, 0, np.full((1, 1), 2.0), 0.0)
    assert now.left(np.ones(4)).most >= 2.0 * 0.5 * 3.0 + 0.5 * 2.0 * 3.0**2


def try_joined(seed: int) -> float:
    """What joins a form: a·α + ½αᵀHα + √(αᵀKα) at random factors and at the form's corner, against its bound."""
    rng = np.random.default_rng(seed)
    p = int(rng.integers(1, 9))
    a, H, X = rng.standard_normal(p), rng.standard_normal((p, p)), rng.standard_normal((p, p))
    H, K, rest = 0.1 * (H + H.T), 10.0 ** rng.uniform(-4, 1) * X @ X.T, float(rng.uniform(0.0, 0.1))
    left = Left(Quadric(K, 0.0), rest, rest + float(np.sqrt(np.abs(K).sum())))
    form, more = left.joined(Quadric(H, 0.0), np.where(a >= 0.0, 1.0, -1.0))
    alpha = np.concatenate((np.sign(rng.standard_normal((500, p))), np.where(a >= 0.0, 1.0, -1.0)[None]))
    quadratic = 0.5 * np.einsum("bp,pq,bq->b", alpha, H, alpha)
    reached = alpha @ a + quadratic + np.sqrt(np.einsum("bp,pq,bq->b", alpha, K, alpha).clip(0.0)) + rest
    return float(reached.max() - largest_on_box(a, form) - more)


@pytest.mark.parametrize("seed", range(40))
def test_what_joins_a_form(seed: int) -> None:
    assert try_joined(seed) <= 1e-12


def test_joining_is_exact_where_the_slope_decides() -> None:
    K = np.array([[1.0, -0.9], [-0.9, 1.0]])
    form, rest = Left(Quadric(K, 0.0), 0.0, 2.0).joined(Quadric(np.zeros((2, 2)), 0.0), np.ones(2))
    assert largest_on_box(np.array([50.0, 50.0]), form) + rest == pytest.approx(100.0 + 0.2**0.5)


@pytest.mark.parametrize("family", ["encoder", "gpt2"])
def test_taking_it_on_makes_deep_forms_tighter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.of(family, 2, 0.003, depth=4)

    def left() -> float:
        with np.errstate(all="ignore"):
            return sum(form.expanded()[1] for form, _ in case.forms(2))

    taken = left()
    monkeypatch.setattr(reading.Form, "_carried", lambda self, levels: [Left.fixed(np.inf, len(self.slope))])
    assert taken < left()


def tried() -> float:
    """Covectors that move on, what joins forms, and whole networks."""
    found = max(try_onward(*case) for case in (("encoder", 2), ("gpt2", 3), ("llama", 5), ("bert", 0)))
    joined = 2.0 if max(map(try_joined, range(20))) > 1e-12 else 0.0
    return max(found, joined, worst(Case.of("encoder", 5, depth=3)))


PULL, LEFT, JOINED = MixSite.pull, Moving.left, Left.joined


def without(*names: str) -> Callable[..., Any]:
    return lambda self, v, t: {name: back for name, back in PULL(self, v, t).items() if name not in names}


MUTANTS: dict[str, tuple[object, str, object]] = {
    "nothing goes on": (Moving, "onward", lambda self, mix, read, earlier: None),
    "the stream goes on alone": (MixSite, "pull", without("q", "k", "v")),
    "the stream is forgotten": (MixSite, "pull", without("stream")),
    "what mixings miss forgotten": (
        Moving,
        "left",
        lambda self, corner, missed=None: LEFT(
            self, corner, None if missed is None else [0.0 * M for M in missed]
        ),
    ),
    "weights of sources too small": (moving, "shares", lambda sizes: np.full(len(sizes), 0.01)),
    "nothing joins a form": (Left, "joined", lambda self, form, corner: (form, self.rest)),
    "half of τ": (Left, "joined", lambda self, form, corner: JOINED(self._replace(rest=0.0), form, corner)),
}


def test_nothing_is_wrong_without_a_mutant() -> None:
    assert tried() <= 1.0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_what_moves_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert tried() > 1.0
