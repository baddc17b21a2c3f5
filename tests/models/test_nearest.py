"""ε in words: shares of the distance to the nearest other token, and of a token's length."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import prooflens as pl
from prooflens.models import Prompt, Transformer
from prooflens.models.nearest import NearToken, Yardstick, nearest_token, nearest_tokens, yardstick
from prooflens.report.data import collect
from prooflens.report.page import render
from tests.conftest import Call
from tests.enumeration.words import reader


def brute(model: Transformer, ids: tuple[int, ...], position: int, x: torch.Tensor, other: bool) -> float:
    """Every token of the vocabulary in the place of one, embedded with its neighbours."""
    gaps = []
    for token in range(model.weights["embed.tokens"].shape[0]):
        text = (*ids[:position], token, *ids[position + 1 :])
        if not (other and token == ids[position]):
            gaps.append(float((model.embed(torch.tensor(text))[position] - x).abs().max()))
    return min(gaps)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("other", [True, False])
def test_the_nearest_tokens_are_those_of_brute_force(kind: str, other: bool) -> None:
    model = reader(kind)
    prompt = _prompt(model)
    assert prompt.ids is not None
    moved = prompt.x + 0.1 * torch.randn(prompt.x.shape, generator=torch.Generator().manual_seed(0)).to(
        prompt.x
    )
    found = nearest_tokens(model, prompt.ids, range(len(prompt)), moved, other)
    for t, near in enumerate(found):
        assert near.distance == pytest.approx(brute(model, prompt.ids, t, moved[t], other), rel=1e-12)
        assert near == nearest_token(model, prompt.ids, t, moved[t], other)


def _prompt(model: Transformer) -> Prompt:
    size = model.weights["embed.tokens"].shape[0]
    return model.prompt([1 % size, 3 % size, 2 % size])


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=5),
    st.floats(1e-9, 1e3),
    st.data(),
)
def test_a_share_is_the_largest_of_the_moving_tokens(
    sizes: list[tuple[float, float]], eps: float, data: st.DataObject
) -> None:
    names = tuple(f"t{i}" for i in range(len(sizes)))
    made = Yardstick(names, tuple(a for a, _ in sizes), tuple(NearToken(b, "other") for _, b in sizes))
    moving = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    near, length = made.shares(eps, moving)
    assert near == max(eps / sizes[t][1] for t in moving)
    assert length == max(eps / sizes[t][0] for t in moving)
    assert "nearest other token" in made.words(eps, moving)


def test_models_without_text_have_a_length_alone(call: Call, tmp_path: Path) -> None:
    toy = pl.load("toy")
    x = toy.example().x
    rad = pl.radius(toy, toy.example(), "0.1:top1@-1", tokens=[2])
    moved = rad.certified * math.sqrt(x.shape[-1])
    assert rad.of_length == pytest.approx(moved / float(x[2].norm()))
    assert rad.of_nearest is None
    _, out, _ = call("certify", "toy", "--eps", "0.01", "--layer", "0", "-o", str(tmp_path / "run"))
    words = yardstick(toy, toy.example()).words(0.01)
    assert words in out
    assert words in render(collect(tmp_path / "run"))
    _, out, _ = call("certify", "toy", "--eps", "0.01", "--layer", "0", "--json")
    assert json.loads(out)["eps_in_words"] == words
    _, out, _ = call("certify", "toy", "--to", "1", "--layer", "0", "--json")
    assert "eps_in_words" not in json.loads(out)
    for command in (
        "circuit toy 0.0,0.1 --eps 0.01",
        "output toy --eps 0.01",
        "attack toy --eps 0.01 --heads 0.1",
    ):
        _, out, _ = call(*command.split(), "--budget", "8/1/2")
        assert words in out
        _, out, _ = call(*command.split(), "--budget", "8/1/2", "--json")
        assert json.loads(out)["eps_in_words"] == words
    assert pl.yardstick(toy, toy.example()).words(0.01) == words
    rad.save(tmp_path / "radii")
    assert pl.Radii.load(tmp_path / "radii").of_length == rad.of_length
    assert "of_length" in render(collect(rad))


def test_a_pass_over_the_vocabulary_is_made_where_it_is_short_or_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = reader()
    prompt = _prompt(model)
    assert yardstick(model, prompt).nearest is not None
    assert yardstick(model, prompt, nearest=False).nearest is None
    monkeypatch.setattr("prooflens.models.nearest.MOST_NUMBERS", 0)
    assert yardstick(model, prompt).nearest is None
    assert yardstick(model, prompt, nearest=True).nearest is not None


def test_radii_of_older_versions_are_read() -> None:
    folder = Path(__file__).parents[1] / "certificate" / "written-by-0.1.0" / "radii"
    (file,) = (folder / "rows").glob("*.parquet")
    assert "of_length" not in pq.read_schema(file).names
    assert pl.Radii.load(folder).table.column("of_length").null_count == len(pl.Radii.load(folder))
