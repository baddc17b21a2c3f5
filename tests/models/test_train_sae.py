"""A dictionary is trained, written as SAELens keeps it, and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.errors import ModelError
from prooflens.models.train_sae import activations, read_texts, train_dictionary
from tests.enumeration.words import reader

TEXTS = [
    f"When{a} and{b} met{a}, {b} spoke to the{p}"
    for a in (" Mary", " John", " Kate")
    for b in (" Tom", " Alice", " James")
    for p in (" store", " park")
]


def test_activations_are_those_of_the_cache() -> None:
    model = reader("llama")
    hook = "blocks.0.hook_resid_post"
    found = activations(model, hook, TEXTS[:2])
    rows = torch.cat([model.run_with_cache(model.prompt(text).x)[1][hook][1:] for text in TEXTS[:2]])
    assert found.shape == rows.shape
    distance = torch.cdist(rows.float(), found).amin(1)
    assert float(distance.max()) < 1e-4 * float(rows.abs().max())


def test_a_dictionary_explains_what_it_was_trained_on(tmp_path: Path) -> None:
    model = reader("llama")
    made = train_dictionary(
        model,
        "blocks.0.hook_resid_post",
        TEXTS,
        tmp_path / "sae",
        features=32,
        sparsity=0.005,
        steps=300,
        batch=64,
    )
    assert made.explained > 0.5
    assert 0.0 < made.active <= 32
    sae = pl.Dictionary.load(made.folder)
    sae.check(model)
    prompt = model.prompt(TEXTS[0])
    active = sae.active(model.run(prompt, sae.hook)[sae.hook][-1])
    queries = [f"feature S.{i} {'active' if on else 'off'}@-1" for i, on in enumerate(active[:4])]
    found = pl.certify(model, prompt, pl.Ball(1e-7), queries=queries, vectors={"S": str(made.folder)})
    assert found.counts["fails"] == 0


def test_texts_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    for path in (tmp_path / "empty.txt", tmp_path / "missing.txt"):
        with pytest.raises(ModelError):
            read_texts(path, 10)
    (tmp_path / "some.tsv").write_text("sentence\tlabel\nwell done\t1\n")
    assert read_texts(tmp_path / "some.tsv", 10) == ["well done"]
    with pytest.raises(ModelError, match="two tokens"):
        activations(reader("llama"), "blocks.0.hook_resid_post", ["When"])
