"""Readouts of two values together, each at its own hook and token: by every engine, jointly, and by the checker."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.engines.hidden import output_forms
from prooflens.errors import ModelError
from prooflens.evaluation.soundness import modest, random_model
from prooflens.evaluation.soundness.cases import DRAWN, random_case
from prooflens.evaluation.soundness.forms import random_readout
from prooflens.models.reads import Hook, hooks_of, read_beside
from prooflens.problem import Problem
from prooflens.regions import Ball, Segment
from tests.checker.forging import TOY, edit
from tests.engines.test_later_steps import assert_not_crossed

S = 3
ENGINES = ("interval", "crown", "taylor", "chebyshev", "cpz", "zonotope", "jacobian-proved")


def drawn(family: str, seed: int, same_token: bool) -> tuple[pl.Transformer, list[Hook], list[int]]:
    """A random model, two of its hooks, the one of the later block first, and a token for each."""
    choose = random.Random(f"{family} {seed}")
    model = random_model(family, choose, 2)
    hooks = sorted(choose.sample(hooks_of(model.architecture), 2), key=lambda hook: -hook.layer)
    first = choose.randrange(S)
    return model, hooks, [first, first if same_token else choose.randrange(S)]


def input_of(model: pl.Transformer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(S, model.architecture.d_model, generator=generator, dtype=torch.float64)


def pair_of(family: str, seed: int, same_token: bool) -> tuple[pl.Transformer, list[pl.Transformer]]:
    """A readout of two values, output 0 that of the first and output 1 that of the second; and each of them alone."""
    model, hooks, tokens = drawn(family, seed, same_token)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(1, hook.width, generator=generator, dtype=torch.float64) for hook in hooks]
    places = [(hook.name, token) for hook, token in zip(hooks, tokens, strict=True)]
    both = read_beside(model, places[0], places[1], torch.block_diag(*rows))
    return both, [pl.read_at(model, *place, row) for place, row in zip(places, rows, strict=True)]


@pytest.mark.parametrize("family", DRAWN)
def test_the_outputs_are_those_of_both_readouts(family: str) -> None:
    for seed in range(4):
        both, alone = pair_of(family, seed, seed % 2 == 0)
        x = input_of(both)
        found = both(x)
        assert torch.allclose(found, torch.cat([read(x) for read in alone]), rtol=1e-11, atol=1e-12)
        assert both.sha256 != alone[0].sha256
        read = both.architecture
        again = pl.read_at(both, str(read.read_hook), int(read.read_position or 0), alone[0].head[0])
        assert again.architecture.beside_hook is None
        assert torch.allclose(again(x), found[:1])
        assert torch.allclose(both.with_head(both.head[0].flip(0), both.head[1])(x), found.flip(0))


@pytest.mark.parametrize("name", ENGINES)
def test_differences_are_bounded_jointly(name: str) -> None:
    """Never wider than the difference of both bounds, but for rounding, and narrower where the values share factors."""
    engine, narrower = modest(name), 0
    one, difference = (output_forms(torch.tensor(w, dtype=torch.float64)) for w in ([[1.0]], [[1.0, -1.0]]))
    for number, family in enumerate(DRAWN[:: 2 if name in ENGINES[:3] else 6]):
        both, alone = pair_of(family, 20 + number, number % 2 == 0)
        x = input_of(both)
        way = Segment(x, x + 0.02 * x.flip(0)).region()
        region = way if name == "chebyshev" else Ball(0.005).around(x)
        problem = Problem(both, region)
        if engine.refuses(problem, difference) is not None:
            continue
        found = engine.bound_forms(problem, difference)
        assert_not_crossed(problem, difference, found)
        parts = [engine.bound_forms(Problem(read, region), one) for read in alone]
        apart = sum(float(part.upper - part.lower) for part in parts)
        width = float(found.upper - found.lower)
        assert width <= apart * (1.0 + 1e-4) + 1e-11
        narrower += width < 0.99 * apart
    assert narrower > 0 or name in ("interval", "chebyshev")


def test_bounds_of_another_token_are_crossed() -> None:
    """What is carried beside the stream belongs to its token: the bounds of another one do not hold."""
    model, _, _ = drawn("gpt2", 1, False)
    d, x = model.architecture.d_model, input_of(model)
    W = torch.randn(1, 2 * d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right, wrong = (
        read_beside(model, ("blocks.1.hook_resid_post", 2), ("blocks.0.hook_resid_post", token), W)
        for token in (0, 1)
    )
    form, region = output_forms(torch.ones(1, 1, dtype=torch.float64)), Ball(1e-3).around(x)
    for name in ("crown", "taylor", "cpz"):
        found = modest(name).bound_forms(Problem(wrong, region), form)
        with pytest.raises(AssertionError):
            assert_not_crossed(Problem(right, region), form, found)


def test_what_does_not_fit_is_refused() -> None:
    model = pl.load("toy")
    d = model.architecture.d_model
    late, early = ("blocks.1.hook_resid_post", 2), ("blocks.0.hook_resid_post", 1)
    with pytest.raises(ModelError, match="name the later one first"):
        read_beside(model, early, late, torch.ones(1, 2 * d))
    with pytest.raises(ModelError, match="have shape"):
        read_beside(model, late, early, torch.ones(1, d))
    with pytest.raises(ModelError, match="count from 0"):
        read_beside(model, late, (early[0], -1), torch.ones(1, 2 * d))
    with pytest.raises(ModelError, match="position 9"):
        read_beside(model, late, (early[0], 9), torch.ones(1, 2 * d))(model.example())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    toy = pl.load("toy")
    d, generator = toy.architecture.d_model, torch.Generator().manual_seed(0)
    D, E = (torch.randn(d, generator=generator, dtype=torch.float64) for _ in range(2))
    sides = "read(blocks.1.hook_resid_post@-1,D)", "read(blocks.0.hook_resid_post@1,D)"
    queries = [f"{sides[0]}{over}{sides[1]}" for over in (">", "<=")]
    found = pl.certify(
        toy, toy.example(), Ball(2e-3), queries=queries, vectors={"D": D, "E": E}, out=tmp_path / "run"
    )
    assert sorted(found.table["verdict"].to_pylist()) == ["fails", "holds"]
    report = check(tmp_path / "run", TOY)
    assert report.ok
    assert report.counts["witness confirmed"] == report.counts["re-proved"] == 1
    return tmp_path / "run"


def test_neurons_at_two_tokens_are_compared_and_checked(tmp_path: Path) -> None:
    toy = pl.load("toy")
    found = pl.certify(
        toy, toy.example(), Ball(1e-3), queries=["neuron 1.3@2>neuron 1.3@-1"], out=tmp_path / "run"
    )
    pre = toy.run_with_cache(toy.example())[1]["blocks.1.mlp.hook_pre"][:, 3]
    assert found.table["verdict"].to_pylist() == ["holds" if pre[2] > pre[3] else "fails"]
    assert check(tmp_path / "run", TOY).ok


@pytest.mark.parametrize("change", [{"position": 2}, {"hook": "blocks.0.hook_resid_pre"}, None])
def test_another_place_is_seen(run: Path, change: dict[str, Any] | None) -> None:
    info = json.loads((run / "run.json").read_text())
    if change is None:
        info["read"]["names"].reverse()
    else:
        info["read"]["beside"] |= change
    (run / "run.json").write_text(json.dumps(info))
    report = check(run, TOY)
    assert not report.ok or report.counts["WRONG"]


def test_a_direction_that_reads_both_values_is_seen(run: Path) -> None:
    """The fingerprint covers directions, so the run is forged from the start: an output that mixes the two places."""

    def turned(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        for row in rows:
            row["query"] = row["query"].replace("read(blocks.0.hook_resid_post@1,D)", "neuron 0.1@1")
        return 0

    edit(run, turned)
    assert check(run, TOY).counts["WRONG"] == 2


def test_the_soundness_run_draws_them() -> None:
    pairs = [
        random_readout(random_case(seed).problem, random.Random(seed), seed).architecture.beside_hook
        for seed in range(30)
    ]
    assert 3 <= sum(hook is not None for hook in pairs) <= 15
