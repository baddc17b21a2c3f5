"""Direct logit attribution: contributions of all parts add up to the logits, and claims about one are proved."""

from __future__ import annotations

import pytest
import torch

import prooflens as pl
from prooflens.errors import ModelError
from prooflens.models.edits import places_of
from tests.enumeration.words import reader

TEXT = "When Mary and John met the store"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_contributions_add_up_to_the_logits(kind: str) -> None:
    model = reader(kind)
    x = model.prompt(TEXT)
    row = torch.randn(model.architecture.d_out or 0, generator=torch.Generator().manual_seed(0)).double()
    _, cache = model.run_with_cache(x)
    total = 0.0
    for part in places_of(model.architecture):
        hook, v = pl.attribution(model, part, row, x)
        total += float(v @ cache[hook][-1].flatten())
    last = f"blocks.{model.architecture.n_layers - 1}.hook_resid_post"
    _, u = pl.attribution(model, "m0", row, x)  # reads the stream itself
    biases = sum(
        float(u @ model.weights[f"blocks.{layer}.o.bias"])
        for layer in range(model.architecture.n_layers)
        if f"blocks.{layer}.o.bias" in model.weights
    )
    start = float(u @ cache["blocks.0.hook_resid_pre"][-1])
    assert abs(total + biases + start - float(u @ cache[last][-1])) < 1e-9
    weight, bias = model.head
    shift = model.weights.get("final_norm.bias")
    constant = float(row @ bias) + (0.0 if shift is None else float(row @ weight @ shift))
    assert abs(float(u @ cache[last][-1]) + constant - float(row @ model(x)[-1])) < 1e-9


def test_a_contribution_is_proved_on_a_ball() -> None:
    model = reader("gpt2")
    x = model.prompt(TEXT)
    hook, v = pl.attribution(model, "a1.h0", (1, 2), x)
    value = float(v @ model.run_with_cache(x)[1][hook][-1].flatten())
    sign = ">" if value > 0 else "<"
    res = pl.certify(
        model, x, pl.Ball(1e-6), queries=f"read({hook}@-1,V){sign}0", vectors={"V": v}, engine="taylor"
    )
    assert res.verdict == "holds"
    assert abs(res.table["clean"][0].as_py()) == pytest.approx(abs(value))


def test_what_has_no_attributions_says_so(toy: pl.Transformer) -> None:
    with pytest.raises(ModelError, match="do not add up"):
        pl.attribution(toy, "a0.h0", (0, 1), toy.example())
    model = reader("gpt2")
    x = model.prompt("When")
    with pytest.raises(ModelError, match="one neuron"):
        pl.attribution(model, "m0.n1", (0, 1), x)
    with pytest.raises(ModelError, match="weights of logits"):
        pl.attribution(model, "m0", torch.ones(3), x)
