"""`layer0` on normed queries and keys: against points, attacks and `taylor`; scalars alone; mutations; refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.engines import Forms, get_engine
from prooflens.engines.layer0.normed import NormedScores, Scalars, one_row
from prooflens.engines.protocol import NO_OPTIONS
from prooflens.evaluation.soundness.cases import random_model
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.queries import Row
from prooflens.regions import Ball, Region, Segment
from prooflens.verdicts.certify import certify
from tests.engines.support import attained
from tests.engines.test_later_steps import assert_not_crossed, question

FAMILIES = ("qwen3", "olmo2", "gemma3")
CASES = {
    "family": st.sampled_from(FAMILIES),
    "seed": st.integers(0, 10**6),
    "eps": st.sampled_from((1e-6, 1e-3, 0.05, 0.5)),
    "moves": st.sampled_from(("ball", "token", "way")),
}


def drawn(family: str, seed: int, eps: float, moves: str = "ball") -> Problem:
    choose = random.Random(seed)
    model = random_model(family, choose, 1)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, model.architecture.d_model, generator=generator, dtype=torch.float64)
    region: Region
    if moves == "way":
        region = Segment(x, x + eps * torch.randn(x.shape, generator=generator, dtype=torch.float64)).region()
    else:
        region = Ball(eps, tokens=[1] if moves == "token" else None).around(x)
    return Problem(model, region)


def mixed_forms(problem: Problem, seed: int) -> Forms:
    """Margins, a form of all keys of a row, single scores, and forms of two rows; visible keys alone."""
    choose = random.Random(seed)
    entries, size = [], 0
    heads = problem.model.architecture.n_heads
    mask = problem.mask_of(0)
    for kind in ("margin", "row", "one", "rows", "rows"):
        rows = [
            Row(0, choose.randrange(heads), choose.randrange(1, 3)) for _ in range(2 if kind == "rows" else 1)
        ]
        for row in rows:
            keys = [j for j in range(3) if bool(mask[..., row.position, j].all())]
            chosen = (
                keys if kind == "row" else [choose.choice(keys) for _ in range(1 if kind == "one" else 2)]
            )
            entries += [(size, row, j, choose.uniform(-1, 1)) for j in chosen]
        size += 1
    return Forms.of(entries, size)


@settings(deadline=None, max_examples=40)
@given(**CASES)
def test_no_point_of_the_region_lies_outside(family: str, seed: int, eps: float, moves: str) -> None:
    problem = drawn(family, seed, eps, moves)
    forms = mixed_forms(problem, seed)
    alpha = problem.region.sample(200, seed, corners=0.5)[1]
    values = attained(problem, forms, alpha)
    for asked in (forms, replace(forms, signs=True)):
        bounds = get_engine("layer0").bound_forms(problem, asked)
        slack = 1e-11 * (1.0 + values.abs().amax(0))
        assert bool((values >= bounds.lower - slack).all())
        assert bool((values <= bounds.upper + slack).all())


def scalars_at(problem: Problem, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The scalars of queries and keys at points, by token and query head."""
    model, names = problem.model, {}
    kind = model.architecture.qk_norm
    found = []
    for letter in "qk":
        name = f"blocks.0.attn.hook_{letter}" + ("_flat" if kind == "whole" else "")
        names[letter] = name
        value = model.run(problem.region.point(alpha), [name])[name]
        value = value[..., None, :] if kind == "whole" else value
        n = torch.rsqrt(value.square().mean(-1) + model.architecture.norm_eps)
        found.append(n.repeat_interleave(model.architecture.n_heads // n.shape[-1], -1))
    return found[0], found[1]


@settings(deadline=None, max_examples=40)
@given(**CASES)
def test_scalars_and_their_first_order_hold(family: str, seed: int, eps: float, moves: str) -> None:
    problem = drawn(family, seed, eps, moves)
    scores = NormedScores.of(problem, NO_OPTIONS)
    alpha = problem.region.sample(100, seed, corners=0.5)[1]
    move = problem.region.point(alpha) - problem.region.center
    for made, real in zip((scores.n, scores.m), scalars_at(problem, alpha), strict=True):
        room = 1e-11 * real
        assert bool((real >= made.box.lower - room).all() & (real <= made.box.upper + room).all())
        assert bool(((real - made.middle).abs() <= made.off + room).all())
        assert not bool(missed(made, real, move).any())


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_as_tight_as_the_attack_on_small_balls(family: str) -> None:
    problem, forms = question(family, 1, 1e-4, depth=1, layer=0)
    bounds = get_engine("layer0").bound_forms(problem, forms)
    assert_not_crossed(problem, forms, bounds)
    found = get_engine("attack").bound_forms(problem, forms)
    assert float((bounds.upper - bounds.lower).mean()) <= 1.02 * float((found.upper - found.lower).mean())


def missed(made: Scalars, real: Tensor, move: Tensor) -> Tensor:
    line = made.middle + torch.einsum("psd,shd->psh", move, made.slope)
    return (real - line).abs() > made.rest + 1e-11 * real


def with_less_rest(made: Scalars) -> Scalars:
    return replace(made, rest=0.3 * made.rest)


def without_slope(made: Scalars) -> Scalars:
    return replace(made, slope=0.0 * made.slope)


@pytest.mark.parametrize("mutation", [with_less_rest, without_slope])
def test_changed_scalars_are_caught(mutation: Callable[[Scalars], Scalars]) -> None:
    wrong = 0
    for seed in range(20):
        problem = drawn("qwen3", seed, 0.02, "way")
        scores = NormedScores.of(problem, NO_OPTIONS)
        alpha = problem.region.sample(20, seed, corners=0.9)[1]
        move = problem.region.point(alpha) - problem.region.center
        wrong += int(missed(mutation(scores.m), scalars_at(problem, alpha)[1], move).any())
    assert wrong > 0


def test_forms_without_the_scalars_first_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, kept = 0, NormedScores.drifting
    monkeypatch.setattr(
        NormedScores, "drifting", lambda self, single: replace(kept(self, single), drift=None)
    )
    for seed in range(6):
        problem, forms = question("qwen3", seed, 1e-3, depth=1, layer=0)
        bounds, found = (get_engine(name).bound_forms(problem, forms) for name in ("layer0", "attack"))
        wrong += int(((found.lower < bounds.lower) | (found.upper > bounds.upper)).any())
    assert wrong > 0


def test_rows_are_recognised() -> None:
    a, b = Row(0, 0, 1), Row(0, 1, 1)
    entries = [(0, a, 0, 1.0), (0, a, 1, -1.0), (1, a, 0, 1.0), (1, b, 0, -1.0), (2, b, 1, 1.0)]
    assert one_row(Forms.of(entries, 3)).tolist() == [True, False, True]


def test_biases_behind_these_norms_are_refused_by_one_line() -> None:
    problem, forms = question("qwen3", 1, 1e-3, depth=1, layer=0)
    model = problem.model
    bias = torch.full((model.architecture.head_dim,), 0.1, dtype=torch.float64)
    changed = Transformer(model.architecture, {**model.weights, "blocks.0.q_norm.bias": bias}, name="biased")
    reason = get_engine("layer0").refuses(Problem(changed, problem.region), forms)
    assert "LayerNorms of queries and keys" in str(reason)


def test_auto_decides_most_by_it() -> None:
    problem, _ = question("qwen3", 1, 1e-4, depth=1, layer=0)
    found = certify(problem.model, problem.region.center, Ball(1e-4), layer=0, budget="32/1/8")
    engines = found.table["engine"].to_pylist()
    assert engines.count("layer0") > len(engines) // 2
