"""Frozen attention patterns against runs in which the pattern is put in by hand."""

from __future__ import annotations

import pytest
import torch

import prooflens as pl
from prooflens.errors import ModelError
from prooflens.evaluation.soundness.cases import FAMILIES
from prooflens.models import INPUT, OUTPUT
from prooflens.models.edits import freeze
from prooflens.models.parts import Edit
from prooflens.models.prompt import Prompt
from tests.models.test_edits import drawn


def by_hand(
    model: pl.Transformer, x: torch.Tensor, layer: int, heads: list[int], pattern: torch.Tensor
) -> torch.Tensor:
    values = {INPUT: x}
    for step in model.program(x.shape[-2]).steps:
        made = step(*(values[name] for name in step.inputs))
        if step.out == f"blocks.{layer}.attn.hook_pattern":
            made[heads] = pattern[heads]
        values[step.out] = made
    return values[OUTPUT]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_head_has_the_pattern_of_its_prompt(family: str) -> None:
    model, x, generator = drawn(family)
    other = torch.randn(x.shape, generator=generator).double()
    pattern = model.pattern(other, 1)
    prompt = Prompt(other, tuple("abcd"))
    for place, heads in (("a1.h0", [0]), ("a1", list(range(model.architecture.n_heads)))):
        made = pl.edit(model, freeze(model, place, prompt))
        assert torch.allclose(made(x), by_hand(model, x, 1, heads, pattern), rtol=1e-11, atol=1e-11)
        assert made.sha256 != model.sha256
        assert torch.equal(
            made.run(x, "blocks.1.attn.hook_q")["blocks.1.attn.hook_q"][:, 0],
            model.run(x, "blocks.1.attn.hook_q")["blocks.1.attn.hook_q"][:, 0],
        )


def test_a_model_whose_patterns_are_all_frozen_is_affine_in_its_values(toy: pl.Transformer) -> None:
    x = toy.example()
    made = pl.edit(toy, [freeze(toy, "a0", x), freeze(toy, "a1", x)])
    assert torch.allclose(made(x), toy(x), atol=1e-12)
    read = pl.read_at(made, "blocks.0.attn.hook_z", 3, torch.eye(8).double())
    y = toy.example(1).x
    middle = read(0.5 * x.x + 0.5 * y)
    assert torch.allclose(middle, 0.5 * read(x.x) + 0.5 * read(y), atol=1e-12)


def test_names_lengths_and_claims_of_frozen_models(toy: pl.Transformer) -> None:
    x = toy.example()
    made = pl.edit(toy, freeze(toy, "a0.h1", x))
    assert made.name == "toy with a0.h1.pattern at another prompt"
    with pytest.raises(ModelError, match="prompt of 4 tokens"):
        made(x.x[:3])
    with pytest.raises(ModelError, match="patterns are frozen in layer 0"):
        pl.certify(made, x, pl.Ball(0.01), queries=["0.1:top1@-1"])
    with pytest.raises(ModelError, match="frozen already"):
        pl.edit(made, freeze(toy, "a0", x))
    for wrong in ("a0.h1.pattern", Edit("a0.pattern", torch.zeros(1, 4, 4))):
        with pytest.raises(ModelError, match=r"frozen at a prompt|scores of 2 heads"):
            pl.edit(toy, wrong)
    with pytest.raises(ModelError, match="there is no"):
        freeze(toy, "a9.h0", x)
    found = pl.effect(toy, "a0.h1.pattern", x, pl.Ball(0.001), "logit0-logit1", faithful=0.5, budget="20/1/2")
    assert "with a0.h1.pattern at the prompt" in str(found)
