"""Hooks that TransformerLens users write: read as edits, and what is no edit is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import prooflens as pl
from prooflens.errors import ModelError
from prooflens.evaluation.soundness.cases import random_model
from prooflens.models.hook_edits import Hook, HookPoint, from_hooks
from prooflens.models.parts import Edit

Function = Callable[..., Tensor | None]


def zero_head(z: Tensor, hook: Any) -> Tensor:
    z[:, :, 1] = 0.0
    return z


def zero_last_in_place(z: Tensor, hook: HookPoint) -> None:
    assert hook.name.startswith(f"blocks.{hook.layer()}.")
    z[:, -1] = 0.0


def patch_tokens(z: Tensor, hook: Any) -> Tensor:
    rows = torch.arange(float(z[0, 1:3].numel())).reshape(z[0, 1:3].shape)
    return torch.cat((z[:, :1], rows.to(z).expand(len(z), *rows.shape), z[:, 3:]), 1)


def one_neuron(post: Tensor, hook: Any) -> Tensor:
    post[..., 5] = 2.5
    return post


def hide_keys(scores: Tensor, hook: Any) -> Tensor:
    scores[:, 0, 2, 1] = -torch.inf
    scores[:, 1, :2, 3] = torch.finfo(torch.float32).min
    return scores


@pytest.mark.parametrize(
    ("name", "function", "wanted"),
    [
        ("blocks.1.attn.hook_z", zero_head, ["without a1.h1"]),
        ("blocks.0.attn.hook_z", zero_last_in_place, ["without a0.h0@3", "without a0.h1@3"]),
        ("blocks.1.attn.hook_result", zero_head, ["without a1.h1.result"]),
        ("blocks.1.hook_attn_out", zero_last_in_place, ["without a1@3"]),
        ("blocks.0.hook_mlp_out", patch_tokens, ["with m0@1@2 at what the hook blocks.0.hook_mlp_out sets"]),
        ("blocks.0.mlp.hook_post", one_neuron, ["with m0.n5 at what the hook blocks.0.mlp.hook_post sets"]),
        (
            "blocks.1.attn.hook_attn_scores",
            hide_keys,
            ["without a1.h0.q2.k1", "without a1.h1.q0.k3", "without a1.h1.q1.k3"],
        ),
    ],
)
def test_the_edited_model_computes_what_the_hooked_one_does(
    name: str, function: Function, wanted: list[str]
) -> None:
    model = pl.load("toy")
    x = model.example().x
    found = from_hooks(model, (name, function), len(x))
    assert [str(one) for one in found] == wanted
    values = {"blocks.0.hook_resid_pre": x}
    for step in model.program(len(x)).steps:
        made = step(*(values[source] for source in step.inputs))
        if step.out == name:
            value = made.clone()[None].reshape(1, *made.shape)
            changed = function(value, hook=HookPoint(name))
            made = (value if changed is None else changed)[0].reshape(made.shape)
        if step.out == name.replace("_result", "_z") != name:  # results are parts of what attention writes
            made = made.clone()
            made[:, 1] = 0.0
        values[step.out] = made
    assert torch.allclose(pl.edit(model, found)(x), values["output"], atol=1e-12)


def test_effects_take_hooks_beside_parts() -> None:
    model = pl.load("toy")
    asked: list[str | Hook] = [("blocks.1.attn.hook_z", zero_last_in_place), "m0"]
    found = pl.effect(model, asked, model.example(), pl.Ball(0.005), "logit0-logit1", faithful=5.0)
    named = pl.effect(
        model, ["a1.h0@-1", "a1.h1@-1", "m0"], model.example(), pl.Ball(0.005), "logit0-logit1", faithful=5.0
    )
    assert found.ends == pytest.approx(named.ends, rel=1e-9)
    assert found.claims[0].verdict == named.claims[0].verdict


def halved(z: Tensor, hook: Any) -> Tensor:
    return 0.5 * z


def averaged(z: Tensor, hook: Any) -> Tensor:
    return z.mean(0, keepdim=True).expand_as(z)


def half_a_head(z: Tensor, hook: Any) -> Tensor:
    z[:, 0, 0, :2] = 0.0
    return z


def some_scores(scores: Tensor, hook: Any) -> Tensor:
    scores[:, 0, 2, 1] = 3.0
    return scores


def nothing(z: Tensor, hook: Any) -> None:
    return None


def failing(z: Tensor, hook: Any) -> Tensor:
    raise KeyError("clean")


def cut(z: Tensor, hook: Any) -> Tensor:
    return z[:, 1:]


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("blocks.1.attn.hook_z", halved, "computes something of what it reads"),
        ("blocks.1.attn.hook_z", averaged, "computes something of what it reads"),
        ("blocks.1.attn.hook_z", half_a_head, "sets a part of a1.h0 alone"),
        ("blocks.1.attn.hook_attn_scores", some_scores, "only −∞"),
        ("blocks.1.attn.hook_z", nothing, "changes nothing"),
        ("blocks.1.attn.hook_z", failing, "failed on a value of shape"),
        ("blocks.1.attn.hook_z", cut, "must return a value of shape"),
        ("blocks.1.attn.hook_pattern", nothing, "no hook with edits"),
        ("blocks.7.attn.hook_z", zero_head, "layer"),
    ],
)
def test_what_is_no_edit_is_refused(name: str, function: Function, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hooks(pl.load("toy"), [(name, function)], 4)


@pytest.mark.parametrize("site", ["hook_attn_out", "hook_mlp_out"])
def test_what_a_norm_reads_before_it_is_added_is_another_value_there(site: str) -> None:
    """TransformerLens has these hooks behind the norm of a block's output; zero is zero in front of it, too."""
    model = random_model("gemma2", random.Random(1), 2)

    def ones(value: Tensor, hook: Any) -> Tensor:
        value[:] = 1.0
        return value

    with pytest.raises(ModelError, match="what a norm reads"):
        from_hooks(model, (f"blocks.1.{site}", ones), 3)
    (found,) = from_hooks(model, (f"blocks.1.{site}", zero_last_in_place), 3)
    assert str(found) == f"without {'a' if 'attn' in site else 'm'}1@2"


def test_hooks_need_a_length() -> None:
    with pytest.raises(ModelError, match="prompts of one length"):
        pl.edit(pl.load("toy"), ("blocks.1.attn.hook_z", zero_head))
    with pytest.raises(ModelError, match="prompts of one length"):
        pl.edit(pl.load("toy"), [Edit("m0"), ("blocks.1.attn.hook_z", zero_head)])
