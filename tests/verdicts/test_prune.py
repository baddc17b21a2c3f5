"""Pruning heads: the mask is exact, rules choose as they say, attacks stay in the ball."""

import json
from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.errors import QueryError
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.verdicts.prune import (
    HeadProfile,
    answers,
    choose,
    evaluate,
    head_gradients,
    profile,
    prune,
    read_answer,
    survivors,
)
from tests.conftest import Call


@pytest.fixture
def model() -> Transformer:
    return pl.load("toy-induction")


def test_a_pruned_head_contributes_nothing(model: Transformer) -> None:
    x = model.example(0).x
    small = prune(model, "0.1")
    _, whole = model.run_with_cache(x)
    _, cut = small.run_with_cache(x)
    z = whole["blocks.0.attn.hook_z"].clone()
    z[:, 1] = 0.0
    expected = z.flatten(-2) @ model.weights["blocks.0.o.weight"].T + model.weights["blocks.0.o.bias"]
    assert torch.allclose(cut["blocks.0.hook_attn_out"], expected, atol=1e-14)
    assert torch.equal(cut["blocks.0.attn.hook_pattern"], whole["blocks.0.attn.hook_pattern"])
    assert small.sha256 != model.sha256
    assert small.name == "toy-induction without 0.1"
    assert torch.equal(prune(prune(model, "0.0"), "1.1")(x), prune(model, "0.0,1.1")(x))


@pytest.mark.parametrize(
    ("heads", "message"),
    [("all", "nothing would be left"), ([], "no head is named"), ("0.7", "no head '0.7'")],
)
def test_bad_heads(model: Transformer, heads: str, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        prune(model, heads)


def one(head: int, **values: float) -> HeadProfile:
    usual = {"gradient": 1.0, "ablation": 0.1, "entropy": 1.0, "stable": 5, "heavy": 5, "width": 0.1}
    return HeadProfile((0, head), flipped=0, rows=10, **{**usual, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "other", "pruned"),
    [
        ("certified", {"stable": 9}, 1),
        ("certified", {"heavy": 9}, 1),
        ("certified", {"width": 0.01}, 1),
        ("certified", {}, 0),
        ("responsive", {"stable": 9}, 0),
        ("gradient", {"gradient": 0.5}, 1),
        ("ablation", {"ablation": 0.5}, 0),
        ("entropy", {"entropy": 1.5}, 1),
    ],
)
def test_rules(rule: str, other: dict[str, float], pruned: int) -> None:
    assert choose([one(0), one(1, **other)], rule) == (0, pruned)  # type: ignore[arg-type]


def test_gradients_through_heads_add_up(model: Transformer) -> None:
    """With one head the path gradient is that of all attention; it agrees with a finite difference."""
    prompt = model.example(1)
    labels = answers(model, [prompt])
    found = head_gradients(model, [prompt], labels, 0)
    x = prompt.x.clone()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)

    def loss(t: float, head: int) -> torch.Tensor:
        """The loss where only this head of layer 0 sees the moved input."""
        _, still = model.run_with_cache(x)
        _, moved = model.run_with_cache(x + t * direction)
        z = still["blocks.0.attn.hook_z"].clone()
        z[:, head] = moved["blocks.0.attn.hook_z"][:, head]
        out = z.flatten(-2) @ model.weights["blocks.0.o.weight"].T + model.weights["blocks.0.o.bias"]
        steps = model.program(len(x)).steps
        values = dict(still)
        values["blocks.0.hook_attn_out"] = out
        start = next(i for i, step in enumerate(steps) if step.out == "blocks.0.hook_attn_out")
        for step in steps[start + 1 :]:
            values[step.out] = step(*(values[name] for name in step.inputs))
        return torch.nn.functional.cross_entropy(values["output"][None], labels)

    for head in range(2):
        slope = abs(float(loss(1e-4, head) - loss(-1e-4, head))) / 2e-4
        assert slope <= float(found[head]) * float(direction.norm()) * (1 + 1e-3) + 1e-9


def test_survivors_are_attacked_inside_the_ball(model: Transformer) -> None:
    prompts = [model.example(i) for i in range(8)]
    x, labels = torch.stack([prompt.x for prompt in prompts]), answers(model, prompts)
    counts = [sum(survivors(model, x, labels, eps, restarts=3, steps=15)) for eps in (0.01, 0.5, 3.0)]
    assert counts[0] >= counts[1] >= counts[2]
    assert counts[2] < 8
    assert not any(survivors(model, x, 1 - labels, 0.01, 1, 1)), "a wrong clean answer does not survive"


def test_worth(model: Transformer) -> None:
    prompts = [model.example(i) for i in range(4)]
    labels = answers(model, prompts)
    found = evaluate(prune(model, "0.0"), prompts, labels, 0.02, restarts=2, steps=5)
    assert found.n == 4
    assert found.proved is not None
    assert found.proved <= found.attack <= found.clean <= 4
    problem = Problem(model, pl.Ball(0.02).around(prompts[0]))
    points = problem.region.sample(200)[0]
    assert bool((read_answer(model, points).argmax(-1) == labels[0]).all())


def test_profile_counts_rows(model: Transformer) -> None:
    found = profile(model, [model.example(0), model.example(1)], 0.02, engine="layer0", budget="100/2/10")
    assert [entry.head for entry in found] == [(0, 0), (0, 1)]
    for entry in found:
        assert entry.rows == 2 * 6
        assert 0 <= entry.stable + entry.flipped <= entry.rows


def test_the_command_writes_a_model(call: Call, tmp_path: Path) -> None:
    arguments = ("--eps", "0.02", "--samples", "2", "--engine", "layer0", "--budget", "20/1/5", "--json")
    code, out, err = call("prune", "toy-induction", *arguments, "-o", str(tmp_path / "small"))
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert {row["head"] for row in document["heads"]} == {"0.0", "0.1"}
    small = pl.load(str(tmp_path / "small"))
    assert small.sha256 == document["sha256"] == prune(pl.load("toy-induction"), document["pruned"]).sha256
    assert small.examples is not None


def test_no_other_folder_is_replaced_and_nothing_is_computed_for_it(call: Call, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = call("prune", "no-such-model", "--eps", "0.02", "-o", str(tmp_path))
    assert code == 1
    assert "notes.txt" in err


def test_errors_of_the_command(call: Call) -> None:
    code, _, err = call(
        "prune", "toy-induction", "--eps", "0.02", "--samples", "1", "--rule", "luck", "--engine", "layer0"
    )
    assert code == 1
    assert err.startswith("error: there is no rule 'luck'")
