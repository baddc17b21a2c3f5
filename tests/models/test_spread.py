"""Parts at any value of a set: the model beside the input's, against plain edits at single values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.errors import ModelError, ProoflensError
from prooflens.evaluation.soundness.cases import FAMILIES
from prooflens.models.edits import between, find_place, freeze
from prooflens.models.export import export
from prooflens.models.held_edits import feature
from prooflens.models.parts import Edit
from prooflens.models.spread import RADII, STREAM, beside, moved_tokens
from tests.engines.test_edit_tables import dictionary
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader
from tests.models.test_edits import S, drawn, names


def at_value(one: Edit, beta: torch.Tensor, size: int) -> Edit:
    """The plain edit at one value of the set, c + Σ β g."""
    center = torch.zeros(size).double() if one.value is None else one.value
    moved = (
        beta.reshape(center.shape) * one.spread
        if isinstance(one.spread, float)
        else torch.tensordot(beta, torch.as_tensor(one.spread), 1)
    )
    return Edit(one.place, center + moved, direction=one.direction)


def widened(x: torch.Tensor, edited: pl.Transformer, beta: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, (beta * edited.weights[RADII]).expand(len(x), -1)), 1)


def sets_of(name: str, size: int, generator: torch.Generator) -> list[Edit]:
    """A box around zero, two generators around a constant, and rows for two tokens with a generator each."""
    value = torch.randn(2, size, generator=generator).double()
    some = torch.randn(2, size, generator=generator).double()
    rows = torch.randn(3, 2, size, generator=generator).double()
    return [
        Edit(f"{name}@-1", spread=0.3),
        Edit(name, value[0], spread=some),
        Edit(f"{name}@1@-1", value, spread=rows),
        Edit(f"{name}@0@2", value, spread=0.01),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_is_that_of_a_plain_edit(family: str) -> None:
    model, x, generator = drawn(family)
    for number, name in enumerate(dict.fromkeys(names(model))):
        place = find_place(model.architecture, name)
        size = model.architecture.d_model if place.columns is None else len(place.columns)
        one = sets_of(name, size, generator)[number % 4]
        made = pl.edit(model, one)
        beta = torch.rand(made.architecture.free, generator=generator).double() * 2 - 1
        for point in (beta, beta.sign()):
            plain = pl.edit(model, at_value(one, point, size))(x)
            assert torch.allclose(made(widened(x, made, point)), plain, rtol=1e-11, atol=1e-11), one.place
        assert torch.equal(beside(model, made)(widened(x, made, beta)), model(x))


def test_directions_and_several_parts_have_values_of_their_own() -> None:
    model, x, generator = drawn("gpt2")
    d = model.architecture.d_model
    v = torch.randn(d, generator=generator).double()
    every = [
        Edit("blocks.1.hook_resid_pre", torch.tensor([0.5]).double(), direction=v, spread=0.2),
        Edit("m0@1", torch.tensor([0.1]).double(), direction=v, spread=torch.tensor([[0.3]]).double()),
        Edit("a0.h0.result@-1", spread=0.1),
        Edit("a0.h1@0", torch.ones(model.architecture.head_dim).double(), spread=0.1),
    ]
    sizes = [1, 1, d, model.architecture.head_dim]
    made = pl.edit(model, every)
    beta = torch.rand(sum(sizes), generator=generator).double() * 2 - 1
    plain = [at_value(one, b, n) for one, b, n in zip(every, beta.split(sizes), sizes, strict=True)]
    found = made(widened(x, made, beta))
    assert torch.allclose(found, pl.edit(model, plain)(x), rtol=1e-11, atol=1e-11)
    # One after the other: what is there already keeps its coordinates.
    again = pl.edit(pl.edit(model, every[:1]), every[1:])
    assert torch.allclose(again(widened(x, again, beta)), found, rtol=1e-11, atol=1e-11)
    assert moved_tokens(made, S)[:3] == (tuple(range(S)), (1,), (S - 1,))
    assert torch.allclose(
        pl.read_at(made, "blocks.0.hook_resid_pre", 1, [0])(widened(x, made, beta)), x[1, :1]
    )
    assert STREAM in {step.out for step in made.program(S).steps}


def test_no_generators_are_the_plain_edit(toy: pl.Transformer) -> None:
    value = torch.ones(4).double()
    nothing = torch.zeros(0, 4).double()
    for spread in (nothing, torch.zeros(2, 4).double(), 0.0):
        for place in ("a1.h0", "a1.h0@-1"):
            made, plain = pl.edit(toy, Edit(place, value, spread=spread)), pl.edit(toy, Edit(place, value))
            assert (made.sha256, made.architecture) == (plain.sha256, plain.architecture)


def test_values_between_two_prompts(toy: pl.Transformer) -> None:
    first, other = toy.example(1), toy.example(2)
    one = between(toy, "m0", first, other)
    made = pl.edit(toy, one)
    for end, prompt in ((-1.0, first), (1.0, other)):
        plain = pl.edit(toy, Edit("m0", toy.run(prompt, "blocks.0.hook_mlp_out")["blocks.0.hook_mlp_out"]))
        point = widened(toy.example().x, made, torch.tensor([end]).double())
        assert torch.allclose(made(point), plain(toy.example()), atol=1e-10)
    assert made.name == "toy with m0 at any value between those on a prompt and a prompt"
    # A prompt means the middle of the set.
    middle = pl.edit(toy, Edit("m0", one.value))
    assert torch.allclose(made(toy.example()), middle(toy.example()), atol=1e-10)
    with pytest.raises(ModelError, match="name tokens"):
        between(toy, "m0", first, first.x[:2])  # type: ignore[arg-type]


def test_the_model_travels_and_its_fingerprint_covers_the_set(toy: pl.Transformer, tmp_path: Path) -> None:
    edited = pl.edit(toy, Edit("a1.h0@-1", spread=0.1))
    again = pl.load(export(edited, tmp_path / "edited"))
    assert (again.sha256, again.architecture) == (edited.sha256, edited.architecture)
    assert edited.sha256 != pl.edit(toy, Edit("a1.h0@-1", spread=0.2)).sha256
    assert beside(toy, edited).sha256 == toy.sha256


WRONG = {
    "shape": Edit("a1.h0", spread=torch.ones(2, 3).double()),
    "rows": Edit("a1.h0@0@1", torch.ones(2, 4).double(), spread=torch.ones(2, 4).double()),
    "NaN": Edit("a1.h0", spread=torch.full((1, 4), torch.nan).double()),
    "infinite": Edit("a1.h0", spread=float("inf")),
    "negative": Edit("a1.h0", spread=-0.1),
    "key": Edit("a1.h0.k1", spread=0.1),
    "edge": Edit("a0.h0->m1", spread=0.1),
}


@pytest.mark.parametrize("kind", WRONG)
def test_sets_that_are_none_are_refused(kind: str) -> None:
    model = drawn("gpt2")[0] if kind == "edge" else pl.load("toy")
    with pytest.raises(ModelError, match=r"spread of|at any value of a set"):
        pl.edit(model, WRONG[kind])


def test_what_has_one_value_alone_is_refused(toy: pl.Transformer) -> None:
    held = feature(dictionary("blocks.0.hook_resid_post", 8, torch.Generator()), 1)
    for one in (held, freeze(toy, "a0.h1", toy.example())):
        with pytest.raises(ModelError, match="at any value of a set"):
            pl.edit(toy, Edit(one.place, one.value, feature=one.feature, spread=0.1))


def test_what_asks_about_one_value_refuses_sets(toy: pl.Transformer) -> None:
    edited = pl.edit(toy, Edit("a1.h0@-1", spread=0.1))
    with pytest.raises(ModelError, match=r"pl.effect"):
        pl.certify(edited, toy.example(), pl.Ball(0.01))
    with pytest.raises(ModelError, match="the last 4 of which say"):
        edited(toy.example().x)
    words = reader("gpt2")
    wide = [Edit("a0.h1@-1", spread=0.1)]
    with pytest.raises(ModelError, match="over a family"):
        pl.family_effects(words, [wide], TEMPLATE, "logit{A}-logit{B}")
    with pytest.raises(ProoflensError, match="over a family"):
        pl.family(pl.edit(words, wide), TEMPLATE, queries="argmax={A}")
