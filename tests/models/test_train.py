"""The recipes: deterministic for a seed, and what the embedded models can do."""

from pathlib import Path

import pytest
import torch

from prooflens.errors import ModelError
from prooflens.models import EMBEDDED, Transformer, load
from prooflens.models.train import RECIPES, read_sst2, sst2_folder, train
from tests.conftest import SHARED


def test_toy_is_the_papers_size(toy: Transformer) -> None:
    assert toy.n_parameters == 1218
    assert toy.architecture.norm_eps == 1e-5


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models_do_their_task(name: str) -> None:
    model, recipe = load(name), RECIPES[name]
    x, y = recipe.task(1000, recipe.n_tokens, model.architecture.d_model, torch.Generator().manual_seed(99))
    accuracy = float((model(x.double()).argmax(-1) == y).double().mean())
    assert accuracy == 1.0 if name in ("toy", "toy-induction") else accuracy > 0.98
    assert model.examples is not None
    assert model.examples.shape == (20, recipe.n_tokens, model.architecture.d_model)


def test_the_largest_scaled_model_has_the_papers_size() -> None:
    architecture = RECIPES["toy-d128"].architecture
    assert (architecture.d_model, architecture.n_heads, architecture.d_ff) == (128, 4, 256)


def test_training_is_deterministic(tmp_path: Path) -> None:
    first = train("toy", seed=3, target=tmp_path / "a", epochs=1)
    second = train("toy", seed=3, target=tmp_path / "b", epochs=1)
    other = train("toy", seed=4, target=tmp_path / "c", epochs=1)
    assert load(first.folder).sha256 == load(second.folder).sha256 != load(other.folder).sha256
    assert first.accuracy == second.accuracy


def test_unknown_recipe_and_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="recipes: toy"):
        train("toys")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="--data FOLDER"):
        sst2_folder()
    (tmp_path / "train.tsv").write_text("text\tlabel\n")
    (tmp_path / "test.tsv").write_text("text\tlabel\n")
    monkeypatch.setenv("PROOFLENS_DATA", str(tmp_path))
    assert sst2_folder() == tmp_path
    with pytest.raises(ModelError, match="elsewhere"):  # a folder that was asked for is not passed over
        sst2_folder(tmp_path / "elsewhere")


def test_training_replaces_nothing_but_a_model(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.tex"
    kept.write_text("years of work")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="name a new or an empty folder"):
        train("toy", target=tmp_path, epochs=1)
    with pytest.raises(ModelError, match="is a file"):
        train("toy", target=kept, epochs=1)
    with pytest.raises(ModelError, match="can be written to"):
        train("toy", target=kept / "model", epochs=1)
    assert kept.read_text() == "years of work"
    folder = tmp_path / "model"
    assert train("toy", target=folder, epochs=1).folder == train("toy", target=folder, epochs=1).folder


def test_sst2_is_read_line_by_line() -> None:
    if not (SHARED / "data" / "sst2").is_dir():
        pytest.skip("SST-2 is not beside this checkout")
    rows = read_sst2(SHARED / "data" / "sst2" / "test.tsv")
    assert len(rows) == 872
    assert {label for _, label in rows} == {0, 1}


def test_a_gpt2_is_trained_on_sentences_and_loads_as_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    lines = [
        f"a film about {thing} is {word}\t1" for thing in "abcdefghij" for word in ("good", "long", "warm")
    ]
    for part in ("train", "test"):
        (tmp_path / f"{part}.tsv").write_text("\n".join(["text\tlabel", *lines]))
    folders = [
        train("gpt2-sst2", data=tmp_path, target=tmp_path / name, epochs=1).folder for name in ("a", "b")
    ]
    model, again = map(load, folders)
    assert model.sha256 == again.sha256
    assert (model.architecture.family, model.architecture.n_layers, model.architecture.d_model) == (
        "gpt2",
        4,
        256,
    )
    assert "".join(model.prompt("a film about a is warm").tokens) == "a film about a is warm"
    (tmp_path / "train.tsv").write_text("text\tlabel\ntoo short\t1")
    with pytest.raises(ModelError, match="give the whole files"):
        train("gpt2-sst2", data=tmp_path, target=tmp_path / "c")
