"""Parts that are held at some tokens, against runs in which the hook is set there by hand."""

from __future__ import annotations

import pytest
import torch

import prooflens as pl
from prooflens.errors import ModelError
from prooflens.evaluation.soundness.cases import FAMILIES, NETWORKS
from prooflens.models.edits import find_place, value_on
from prooflens.models.held import hooks_at
from prooflens.models.parts import Edit
from tests.models.test_edits import S, drawn, hooked, names


@pytest.mark.parametrize("family", [*FAMILIES, NETWORKS])
def test_a_part_is_held_at_its_tokens_and_nowhere_else(family: str) -> None:
    model, x, generator = drawn(family)
    for name in dict.fromkeys(names(model)):
        place = find_place(model.architecture, name)
        width = model.architecture.d_model if place.columns is None else len(place.columns)
        some = slice(None) if place.columns is None else slice(place.columns.start, place.columns.stop)
        for value in (None, torch.randn(2, width, generator=generator).double()):

            def change(
                found: torch.Tensor, value: torch.Tensor | None = value, some: slice = some
            ) -> torch.Tensor:
                found = found.clone()
                found[[1, -1], some] = 0.0 if value is None else value
                return found

            made = pl.edit(model, Edit(f"{name}@1@-1", value))
            assert torch.allclose(made(x), hooked(model, x, place.hook, change), rtol=1e-12, atol=1e-12), name
            assert made.sha256 != model.sha256


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "encoder", "olmo2"])
def test_a_direction_of_a_value_is_held_at_its_tokens(family: str) -> None:
    model, x, generator = drawn(family)
    v = torch.randn(model.architecture.d_model, generator=generator).double()
    unit = v / v.norm()
    for hook in hooks_at(model.architecture, 1):

        def change(h: torch.Tensor) -> torch.Tensor:
            h = h.clone()
            h[2] += (0.75 - h[2] @ unit) * unit
            return h

        made = pl.edit(model, Edit(f"{hook}@2", torch.tensor([0.75]), direction=v))
        at = hook
        if hook.endswith("resid_pre"):
            steps = {step.out for step in model.program(S).steps}
            at = next(
                n for n in ("blocks.0.hook_normalized_resid_post", "blocks.0.hook_resid_post") if n in steps
            )
        assert torch.allclose(made(x), hooked(model, x, at, change), rtol=1e-11, atol=1e-11), hook
        read = pl.read_at(made, hook, 2, unit[None])
        assert torch.allclose(read(x), torch.tensor([0.75]).double(), atol=1e-9)


def test_a_patch_from_another_prompt_goes_token_by_token() -> None:
    model = pl.load("toy")
    x, other = model.example(0), model.example(1)
    z = model.run_with_cache(other)[1]["blocks.1.attn.hook_z"].flatten(1)
    place = find_place(model.architecture, "a1.h1")

    def change(found: torch.Tensor) -> torch.Tensor:
        found = found.clone()
        found[:, place.columns] = place.read(z)
        return found

    patch = value_on(model, "a1.h1", other)
    assert torch.allclose(pl.edit(model, patch)(x), hooked(model, x.x, place.hook, change), atol=1e-12)
    one = value_on(model, "a1.h1@-1", other)
    assert one.value is not None
    assert torch.equal(one.value, place.read(z)[[-1]])
    assert pl.edit(model, one).name == "toy with a1.h1@-1 at its value on another prompt"


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        (["a0.h0@1", "a0.h0@2"], "edited twice"),
        (["a0.h0@1", "a0@2"], "edited twice"),
        (["a0.h0@1@1"], "a token twice"),
        (["a0.h0@x"], "names no tokens"),
        ([Edit("a0.h0@1", torch.zeros(2, 4).double())], "a row for each token"),
        ([Edit("blocks.0.hook_resid_pre@1")], "give a direction of it"),
        ([Edit("blocks.0.hook_q", direction=torch.ones(8))], "no direction of"),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_line(edits: list[str | Edit], says: str) -> None:
    with pytest.raises(ModelError, match=says) as raised:
        pl.edit(pl.load("toy"), edits)
    assert "\n" not in str(raised.value)


def test_what_is_held_already_is_not_edited_again() -> None:
    held = pl.edit(pl.load("toy"), "a0.h0@1")
    for other in ("a0.h0", "a0", "a0.h0@2"):
        with pytest.raises(ModelError, match="already"):
            pl.edit(held, other)
    assert pl.edit(held, "a0.h1@2").name == "toy without a0.h0@1 without a0.h1@2"


def test_a_token_that_the_prompt_does_not_have_is_refused() -> None:
    model = pl.load("toy")
    with pytest.raises(ModelError, match="held at token 9"):
        pl.effect(model, "a0.h0@9", model.example(), pl.Ball(0.01), "logit0-logit1")
