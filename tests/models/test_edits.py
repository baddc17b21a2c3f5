"""Edited models against runs in which the hook is set by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import prooflens as pl
from prooflens.errors import ModelError
from prooflens.evaluation.soundness.cases import FAMILIES, NETWORKS, SOLU, random_model
from prooflens.models import INPUT, OUTPUT
from prooflens.models.changes import Changes
from prooflens.models.edits import find_place, mean_of, places_of, value_on
from prooflens.models.parts import Edit
from prooflens.models.prompt import Prompt

S = 4
Change = Callable[[torch.Tensor], torch.Tensor]


def drawn(family: str, seed: int = 0) -> tuple[pl.Transformer, torch.Tensor, torch.Generator]:
    model = random_model(family, random.Random(f"edit {family} {seed}"), 2)
    generator = torch.Generator().manual_seed(seed)
    return model, torch.randn(S, model.architecture.d_model, generator=generator).double(), generator


def hooked(model: pl.Transformer, x: torch.Tensor, hook: str, change: Change) -> torch.Tensor:
    """Run the model step by step and change the value of one hook when it is made."""
    values = {INPUT: x}
    for step in model.program(len(x)).steps:
        made = step(*(values[name] for name in step.inputs))
        if step.out == hook:
            made = change(made.reshape(len(made), -1)).reshape(made.shape)
        values[step.out] = made
    return values[OUTPUT]


def held(name: str, model: pl.Transformer, value: torch.Tensor | None) -> Change:
    place = find_place(model.architecture, name)

    def change(found: torch.Tensor) -> torch.Tensor:
        found = found.clone()
        kept = slice(None) if place.columns is None else slice(place.columns.start, place.columns.stop)
        found[:, kept] = 0.0 if value is None else value
        return found

    return change


def value_of(one: Edit) -> torch.Tensor:
    assert one.value is not None
    return one.value


def names(model: pl.Transformer) -> list[str]:
    a = model.architecture
    found = [*places_of(a), *places_of(a, neurons=True)]
    return [*found, *(f"a{layer}" for layer in range(a.n_layers) if a.has_attention)]


@pytest.mark.parametrize("family", [*FAMILIES, NETWORKS, SOLU])
def test_an_edited_model_is_the_model_with_its_hook_set(family: str) -> None:
    model, x, generator = drawn(family)
    for name in dict.fromkeys(names(model)):
        place = find_place(model.architecture, name)
        width = model.architecture.d_model if place.columns is None else len(place.columns)
        for value in (None, torch.randn(width, generator=generator).double()):
            made = pl.edit(model, Edit(name, value))
            expected = hooked(model, x, place.hook, held(name, model, value))
            assert torch.allclose(made(x), expected, rtol=1e-12, atol=1e-12), name
            assert made.sha256 != model.sha256


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "encoder", "olmo2"])
def test_a_direction_is_taken_out_of_what_a_block_writes(family: str) -> None:
    model, x, generator = drawn(family)
    v = torch.randn(model.architecture.d_model, generator=generator).double()
    unit = v / v.norm()
    for name in ("a1", "m0"):
        hook = find_place(model.architecture, name).hook
        for value in (0.0, 0.75):

            def moved(h: torch.Tensor, value: float = value) -> torch.Tensor:
                return h + torch.outer(value - h @ unit, unit)

            one = Edit(name, torch.tensor([value]) if value else None, direction=v)
            expected = hooked(model, x, hook, moved)
            assert torch.allclose(pl.edit(model, one)(x), expected, rtol=1e-12, atol=1e-12)


def test_means_and_patches_are_what_the_cache_holds() -> None:
    model = pl.load("toy")
    prompts = [model.example(i) for i in range(3)]
    caches = [model.run_with_cache(prompt)[1] for prompt in prompts]
    z = torch.stack([cache["blocks.1.attn.hook_z"][:, 1] for cache in caches])
    assert torch.allclose(value_of(mean_of(model, "a1.h1", prompts)), z.mean((0, 1)))
    assert torch.allclose(value_of(mean_of(model, "a1.h1", prompts, -1)), z[:, -1].mean(0))
    patch = value_on(model, "m0.n2", prompts[1], 2)
    assert torch.equal(value_of(patch), caches[1]["blocks.0.mlp.hook_post"][2, [2]])
    assert pl.edit(model, patch).name == "toy with m0.n2 at its value at 2 of another prompt"


def test_several_edits_at_once_and_their_name() -> None:
    model, x, _ = drawn("llama")
    both = pl.edit(model, ["a0.h0", "m1"])
    assert torch.equal(both(x), pl.edit(pl.edit(model, "m1"), "a0.h0")(x))
    assert both.name == "random llama without a0.h0, m1"
    assert "without a0.h0, m1" in str(both)


def test_the_method_is_the_function(toy: pl.Transformer) -> None:
    edits: list[str | Edit] = ["a0.h1", pl.Edit("m1", torch.ones(toy.architecture.d_model).double())]
    made, method = pl.edit(toy, edits), toy.edit(edits)
    assert (method.name, method.sha256) == (made.name, made.sha256)
    with pytest.raises(ModelError, match="nothing is edited"):
        toy.edit([])


def test_a_readout_of_an_edited_model_is_an_edited_readout() -> None:
    model, x, _ = drawn("gpt2")
    read = pl.read_at(pl.edit(model, "m0"), "blocks.1.hook_resid_post", 2, [0, 1])
    assert torch.equal(read(x), pl.edit(pl.read_at(model, "blocks.1.hook_resid_post", 2, [0, 1]), "m0")(x))


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ([], "nothing is edited"),
        ("9.6", "write a head as a9.h6"),
        ("a9.h0", "layers are 0 … 1"),
        ("a0.h9", "heads are 0 … 1"),
        ("m0.n9999", "neurons are"),
        (["a0.h0", "a0.h0"], "edited twice"),
        (["a0.h0", "a0"], "edited twice"),
        (Edit("m0", torch.zeros(3)), "finite numbers"),
        (Edit("a0.h0", direction=torch.zeros(8)), "give a direction of a0"),
    ],
)
def test_what_cannot_be_edited_says_why(edits: object, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        pl.edit(pl.load("toy"), edits)  # type: ignore[arg-type]
    bare = random_model("bare", random.Random(0), 1)
    with pytest.raises(ModelError, match="no network"):
        pl.edit(bare, "m0")


@pytest.mark.parametrize(
    "edits", ["a1.h0", "m0", ["a0.h1", "m1.n3", "m1.n4"], Edit("m0", direction=torch.arange(8.0))]
)
def test_changes_give_the_edited_weights_again(toy: pl.Transformer, edits: str | list[str] | Edit) -> None:
    edited = pl.edit(toy, edits)
    changes = Changes.between(toy, edited)
    weights = {name: t.clone() for name, t in toy.weights.items() if name not in changes.removed}
    for name, ranges in changes.zeroed.items():
        for start, stop in ranges:
            weights[name][:, start:stop] = 0.0
    again = replace(toy, weights=weights | dict(changes.replaced))
    assert again.sha256 == edited.sha256
    assert bool(changes.replaced) == isinstance(edits, Edit)
    same = Changes.between(toy, toy)
    assert (dict(same.zeroed), dict(same.replaced), same.removed) == ({}, {}, ())


@pytest.mark.parametrize("family", ["gpt2", "encoder", "llama"])
def test_what_a_head_writes_is_held_at_a_constant(family: str) -> None:
    """The result W_O z of a head at c: its columns go, and c is added; at some tokens only there."""
    model, x, generator = drawn(family)
    c = torch.randn(model.architecture.d_model, generator=generator).double()
    last = model.architecture.n_heads - 1
    weight = model.weights["blocks.1.o.weight"]
    without = held(f"a1.h{last}", model, None)
    place = find_place(model.architecture, f"a1.h{last}")
    assert place.columns is not None
    some = slice(place.columns.start, place.columns.stop)
    for at, rows in (("", slice(None)), ("@-1", [-1])):

        def change(z: torch.Tensor, rows: slice | list[int] = rows) -> torch.Tensor:
            kept = z.clone()
            kept[rows] = without(z)[rows]
            return kept

        def added(out: torch.Tensor, rows: slice | list[int] = rows) -> torch.Tensor:
            out = out.clone()
            out[rows] = out[rows] + c
            return out

        values = {INPUT: x}
        for step in model.program(len(x)).steps:
            made = step(*(values[name] for name in step.inputs))
            if step.out == "blocks.1.attn.hook_z":
                made = change(made.reshape(len(made), -1)).reshape(made.shape)
            values[step.out] = added(made) if step.out == "blocks.1.hook_attn_out" else made
        name = f"a1.h{last}.result{at}"
        made = pl.edit(model, Edit(name, c))(x)
        assert torch.allclose(made, values[OUTPUT], rtol=1e-10, atol=1e-10)
        z = pl.edit(model, f"a1.h{last}{at}")(x)
        assert torch.allclose(pl.edit(model, name)(x), z, rtol=1e-10, atol=1e-10)
    prompt = Prompt(x, tuple("abcd"))
    result = value_of(value_on(model, f"a1.h{last}.result", prompt, -1))
    z = value_of(value_on(model, f"a1.h{last}", prompt, -1))
    assert torch.allclose(result, weight[:, some] @ z)
    with pytest.raises(ModelError, match="twice"):
        pl.edit(model, [f"a1.h{last}.result", f"a1.h{last}"])
