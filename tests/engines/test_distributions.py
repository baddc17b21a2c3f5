"""Effects on probabilities and divergences: no point of a box, and no point of a region, lies outside the bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prooflens as pl
from prooflens.checker.distributions import effect_range
from prooflens.engines import Engine, distributions, get_engine
from prooflens.engines.attack.effects import attack_metric
from prooflens.engines.attack.search import AttackBudget
from prooflens.engines.chebyshev import Chebyshev
from prooflens.engines.distributions import Distribution, Known, Tangent, bound_distribution
from prooflens.engines.relational import both_alone
from prooflens.errors import EngineError
from prooflens.evaluation.soundness.second import SecondProof
from prooflens.models.architecture import Architecture
from prooflens.models.weights import required_shapes
from prooflens.problem import Problem
from prooflens.queries.simplex import Box, minimise
from tests.engines.test_relational import pair

SEEDS = st.integers(0, 2**32 - 1)


class Gaps:
    """Random gaps of two models that share a part, in boxes: g = g₀ + r·x, h = h₀ + r·x + r′·x′."""

    def __init__(self, seed: int, n: int, far: float, apart: float) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(scale: float) -> torch.Tensor:
            found = scale * torch.randn(n, generator=generator, dtype=torch.float64)
            found[0] = 0.0
            return found

        self.n, self.generator = n, generator
        self.g0, self.h0 = draw(2.0), draw(2.0)
        self.r, self.other = draw(far).abs(), draw(apart).abs()

    def points(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (
            2.0 * torch.rand(2, count, self.n, generator=self.generator, dtype=torch.float64) - 1.0
        ).round(decimals=0)
        return self.g0 + self.r * x, self.h0 + self.r * x + self.other * y

    def form(self, a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
        """The range of a·g − b·h, a hair wider."""
        middle = float(a @ self.g0 - b @ self.h0)
        far = float((a - b).abs() @ self.r + b.abs() @ self.other)
        room = 1e-12 * (1.0 + abs(middle) + far)
        return middle - far - room, middle + far + room

    def known(self, measured: Distribution) -> Known:
        tangent = Tangent.at(measured, self.g0, self.h0)
        rows, none = torch.eye(self.n).double(), torch.zeros(self.n, self.n).double()
        sides = [(rows, rows), (rows, none), (none, -rows)]
        ends = [self.form(a, b) for side in sides for a, b in zip(*side, strict=True)]
        ends.append(self.form(tangent.a, tangent.b))
        low, high = torch.tensor(ends, dtype=torch.float64).T
        return Known.of(measured, tangent, Box(low[None], high[None]))

    def linear(self, terms: list[list[Any]]) -> tuple[float, float]:
        """The same for the checker: output 0 of both is the reference, output n + j that of the second."""
        a, b = torch.zeros(2, self.n, dtype=torch.float64)
        for weight, _, index in terms:
            if index < self.n:
                a[index] += weight
            else:
                b[index - self.n] -= weight
        return self.form(a, b)


@pytest.mark.parametrize("target", [0, None])
@given(
    seed=SEEDS,
    n=st.integers(2, 7),
    far=st.sampled_from([1e-6, 0.01, 0.5, 4.0, 900.0]),
    apart=st.sampled_from([0.0, 0.1, 1.0]),
)
@settings(max_examples=20, deadline=None)
def test_no_point_of_a_box_lies_outside(
    target: int | None, seed: int, n: int, far: float, apart: float
) -> None:
    gaps, measured = Gaps(seed, n, far, apart), Distribution(n, target)
    box = gaps.known(measured).effect()
    first, second = measured.metrics(*gaps.points(200))
    effects = first - second
    room = 1e-13
    assert float(box.lower) <= float(effects.min()) + room
    assert float(effects.max()) <= float(box.upper) + room
    every = list(range(n))
    terms = [[1.0, "divergence", every, [i + n for i in every]]]
    if target is not None:
        terms = [[1.0, "probability", 0, every], [-1.0, "probability", n, [i + n for i in every]]]
    own = effect_range(terms, gaps.linear)
    assert own is not None
    assert float(own[0]) <= float(effects.min()) + room
    assert float(effects.max()) <= float(own[1]) + room
    if far <= 0.01 and apart == 0.0:  # the tangent's width, and a second order beyond it
        slope = abs(gaps.known(measured).linear.upper - gaps.known(measured).linear.lower)
        assert float(box.upper - box.lower) <= float(slope) + 20.0 * n * far**2 + 1e-9


@pytest.mark.parametrize("target", [0, None])
@pytest.mark.parametrize("forgets", ["the second order", "the slope", "the larger side"])
def test_what_is_forgotten_is_caught(
    target: int | None, forgets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgets == "the second order":
        monkeypatch.setattr(distributions, "_mean_square", lambda shares, most: 0.0 * most[:, 0])
    elif forgets == "the slope":
        monkeypatch.setattr(Tangent, "constant", property(lambda self: self.value))
    else:
        monkeypatch.setattr(distributions, "maximise", minimise)
    caught = 0
    for seed in range(12):
        gaps, measured = Gaps(seed, 4, 0.5, 0.1), Distribution(4, target)
        first, second = measured.metrics(*gaps.points(200))
        try:
            box = gaps.known(measured).effect()
        except EngineError:  # bounds that contradict each other
            caught += 1
            continue
        caught += int(float(box.lower) > float((first - second).min()) + 1e-12)
        caught += int(float(box.upper) < float((first - second).max()) - 1e-12)
    assert caught


@pytest.mark.parametrize("family", ["encoder", "gpt2", "llama"])
@pytest.mark.parametrize("segment", [False, True])
def test_no_point_of_a_region_lies_outside(family: str, segment: bool) -> None:
    problem, edited, _ = pair(family, 3, 0.1 if segment else 5e-3, segment=segment)
    n = problem.model.architecture.d_out or 0
    engines: list[Engine] = [get_engine("taylor"), get_engine("interval")]
    engines += [Chebyshev(most_walks=4)] if segment else []
    for target in (1, None):
        measured = Distribution(n, target)
        found = [bound_distribution(engine, problem, edited, measured) for engine in engines]
        reached = attack_metric(problem, edited, measured.metrics, AttackBudget(64, 2, 8), 0, found)
        for bounds in found:
            assert float(bounds.lower) <= float(reached.lower) + 1e-13
            assert float(reached.upper) <= float(bounds.upper) + 1e-13


def test_a_joint_bound_is_not_looser_than_both_alone() -> None:
    problem, edited, _ = pair("gpt2", 2, 1e-3)
    measured, engine = Distribution(problem.model.architecture.d_out or 0, 0), get_engine("taylor")
    joint = bound_distribution(engine, problem, edited, measured)

    def alone(engine: Engine, *asked: Any, alone: bool = False, **given: Any) -> Any:
        return both_alone(engine, *asked, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributions, "bound_effects", alone)
        apart = bound_distribution(engine, problem, edited, measured)
    assert float(joint.lower) >= float(apart.lower) - 1e-15
    assert float(joint.upper) <= float(apart.upper) + 1e-15
    assert float(joint.upper - joint.lower) < 0.9 * float(apart.upper - apart.lower)


@pytest.mark.parametrize("target", [0, None])
@pytest.mark.parametrize("far", [300.0, 1000.0, 1e5])
def test_gaps_so_wide_that_exponentials_vanish_say_nothing(target: int | None, far: float) -> None:
    """A lower end of R rounds to a number below 0 there, which no R is: the soundness run found it."""
    measured = Distribution(2, target)
    wide = torch.tensor([[0.0, 2.0 * far, 0.0, far, 0.0, far, 1e6]]).double()
    none = torch.zeros(2).double()
    box = Known.of(measured, Tangent.at(measured, none, none), Box(-wide, wide)).effect()
    assert float(box.upper) >= 1.0 - 1e-12
    assert float(box.lower) <= (-1.0 + 1e-12 if target == 0 else 0.0)


@pytest.mark.parametrize("target", [0, None])
def test_the_checker_takes_part_in_the_soundness_run(target: int | None) -> None:
    model = pl.load("toy")
    region = pl.Ball(0.005).around(model.example(14))
    problem, edited = Problem(model, region), Problem(pl.edit(model, ["m0", "a0.h1"]), region)
    measured = Distribution(2, target)
    found = bound_distribution(SecondProof(), problem, edited, measured)
    reached = attack_metric(problem, edited, measured.metrics, AttackBudget(50, 1, 5), 0, [found])
    assert float(found.lower) <= float(reached.lower) <= float(reached.upper) <= float(found.upper)


def test_models_with_positions_of_queries_and_keys_have_effects() -> None:
    """Their tables need the length that the head's model once dropped."""
    a = Architecture(
        "placed", 1, 2, 4, 8, "relu", norm_place="none", causal=True, pool="last", d_vocab=5, d_out=5, context=4,
        head_positions=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shapes = required_shapes(a) | {"embed.positions": (4, 4), "head.weight": (5, 4)}
    weights = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
    model = pl.Transformer(a, weights)
    prompt = model.prompt([0, 1, 2, 3])
    found = pl.effect(model, "a0.h0", prompt, pl.Ball(1e-3), "kl(0,1,2)", budget="20/1/2")
    assert found.lower <= found.least.effect <= found.most.effect <= found.upper
