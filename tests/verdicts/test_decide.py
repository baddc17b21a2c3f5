"""The one place that decides: what is a proof, what is only an estimate, and that the weakest part counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import prooflens as pl
from prooflens.engines import Bounds, FormBounds, Forms, Guarantee
from prooflens.engines.protocol import _REGISTRY, EngineBase, EngineOptions, register
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.queries import Claim
from prooflens.results import Verdict
from prooflens.verdicts.certify import decide_question
from prooflens.verdicts.decide import decide, is_proved
from prooflens.verdicts.evidence import Evidence
from prooflens.verdicts.question import Question, ask
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.stages import Stage

PROVED, ESTIMATED = Guarantee.PROVED, Guarantee.ESTIMATED


@pytest.fixture
def question(toy: Transformer) -> Question:
    return ask(toy, toy.example(0), pl.Ball(0.05), "0.0", positions=[-1])


@pytest.fixture
def claim(question: Question) -> Claim:
    return question.claims[0]


def bounds(claim: Claim, lower: list[float], guarantee: Guarantee = PROVED) -> Bounds:
    low = torch.tensor(lower, dtype=torch.float64)
    assert len(low) == len(claim.functionals)
    return Bounds(low, torch.full_like(low, 9.0), guarantee, guarantee.value, 0.0)


def test_a_proof_needs_every_functional(claim: Claim) -> None:
    assert decide(claim, bounds(claim, [1.0, 1.0, 1.0])) is PROVED
    assert decide(claim, bounds(claim, [1.0, 0.0, 1.0])) is None
    assert decide(claim, bounds(claim, [1.0, math.nan, 1.0])) is None
    assert decide(claim) is None
    assert is_proved(claim, bounds(claim, [1.0, 1.0, 1.0]))
    assert not is_proved(claim, bounds(claim, [1.0, 1.0, 1.0], ESTIMATED))


def test_bounds_of_other_functionals_decide_nothing(claim: Claim) -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert decide(claim, Bounds(one, one, PROVED, "short", 0.0)) is None


def test_the_weakest_guarantee_counts(claim: Claim) -> None:
    some = bounds(claim, [1.0, -1.0, 1.0])
    others = bounds(claim, [-1.0, 1.0, -1.0])
    guess = bounds(claim, [-1.0, 1.0, -1.0], ESTIMATED)
    assert decide(claim, some, others) is PROVED
    assert decide(claim, some, guess) is ESTIMATED
    assert decide(claim, guess, some) is ESTIMATED
    assert decide(claim, guess) is None


def test_a_tie_is_never_decided(toy: Transformer) -> None:
    x = torch.ones(3, toy.architecture.d_model, dtype=torch.float64)
    (claim,) = ask(toy, x, pl.Ball(0.01), "0.0", positions=[-1]).claims
    assert claim.tie is not None
    assert decide(claim, bounds(claim, [1.0] * len(claim.functionals))) is None


LOWER = st.lists(st.sampled_from([-1.0, 0.0, 1.0, math.nan]), min_size=3, max_size=3)


@given(st.lists(st.tuples(LOWER, st.sampled_from([PROVED, ESTIMATED])), max_size=4))
def test_evidence_says_what_decide_says_in_any_order(known: list[tuple[list[float], Guarantee]]) -> None:
    toy = pl.load("toy")
    (claim,) = ask(toy, toy.example(0), pl.Ball(0.05), "0.0", positions=[-1]).claims
    wanted = decide(claim, *(bounds(claim, lower, guarantee) for lower, guarantee in known))
    met = {
        kind: [any(low[i] > 0 for low, guarantee in known if guarantee is kind) for i in range(3)]
        for kind in Guarantee
    }
    assert (wanted is PROVED) == all(met[PROVED])
    assert (wanted is None) == any(not (a or b) for a, b in zip(met[PROVED], met[ESTIMATED], strict=True))
    for order in itertools.permutations(known):
        evidence = Evidence.about(claim)
        for lower, guarantee in order:
            evidence.learn([0, 1, 2], bounds(claim, lower, guarantee), 0)
        assert evidence.guarantee is wanted
        if wanted is not None:
            assert evidence.bounds().guarantee is wanted
            assert claim.met(evidence.bounds().lower, evidence.bounds().upper)


def test_an_estimate_does_not_tighten_a_proof(claim: Claim) -> None:
    evidence = Evidence.about(claim)
    evidence.learn([0, 1, 2], bounds(claim, [0.5, 0.5, 0.5]), 0)
    evidence.learn([0, 1, 2], bounds(claim, [0.9, 0.9, 0.9], ESTIMATED), 0)
    assert evidence.bounds().lower.tolist() == [0.5] * 3
    assert evidence.bounds().guarantee is PROVED


def test_estimates_may_contradict_each_other_and_proofs_may_not(claim: Claim) -> None:
    evidence = Evidence.about(claim)
    evidence.learn([0, 1, 2], bounds(claim, [-1.0] * 3), 0)
    for low in (1.0, 20.0):  # 20 is above the upper bound of all
        evidence.learn([0, 1, 2], bounds(claim, [low] * 3, ESTIMATED), 0)
    with pytest.raises(pl.errors.EngineError, match="contradict"):
        evidence.learn([0, 1, 2], bounds(claim, [20.0] * 3), 0)


@dataclass(frozen=True)
class Says(EngineBase):
    """An engine that knows its bounds beforehand, form by form, by how many forms it is asked about."""

    name: str
    guarantee: Guarantee
    lower: dict[int, list[float]]

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        low = torch.tensor(self.lower[forms.size], dtype=torch.float64)
        return FormBounds(low, torch.full_like(low, 9.0))


def itself(engine: Says) -> Says:
    return engine


@pytest.fixture
def engines() -> Iterator[None]:
    """`guesses` is sure of the first form only, `proves` of all but the first."""
    guesses = Says("guesses", ESTIMATED, {3: [1.0, -1.0, -1.0], 1: [1.0]})
    proves = Says("proves", PROVED, {3: [-1.0, 1.0, 1.0]})
    for engine in (guesses, proves):
        register(engine.name)(partial(itself, engine))
    yield
    for engine in (guesses, proves):
        del _REGISTRY[engine.name]


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("stages", [("guesses", "proves"), ("proves", "guesses")])
def test_a_proof_of_a_part_does_not_make_a_proof_of_an_estimate(
    question: Question, stages: tuple[str, str]
) -> None:
    """Whoever is asked last: what was only estimated stays so, and the claim with it."""
    settings = Settings(tuple(Stage(name) for name in stages))
    (outcome,) = decide_question(question, settings).outcomes
    assert outcome.verdict is Verdict.ESTIMATED
    assert outcome.bounds.guarantee is ESTIMATED
    assert outcome.bounds.lower.tolist() == pytest.approx([1.0] * 3)
    assert "guesses only estimates" in outcome.reason
