"""`prooflens models`: families, short names, what is cached and what a proof needs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.engines.forms import Forms
from prooflens.engines.taylor import least_memory
from prooflens.evaluation.catalogue import TOKENS, layer1_memory
from prooflens.models.files import write_model
from prooflens.models.huggingface import FAMILIES
from prooflens.problem import Problem
from prooflens.queries.rows import Row
from tests.conftest import Call


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, with one hub model and a damaged one."""
    monkeypatch.setenv("PROOFLENS_HOME", str(tmp_path))
    toy = pl.load("toy")
    write_model(tmp_path / "models" / "someone--theirs", toy.architecture, toy.weights)
    shutil.copytree(tmp_path / "models" / "someone--theirs", tmp_path / "models" / "someone--broken")
    (tmp_path / "models" / "someone--broken" / "config.json").write_text('{"model_type": "bert"}')
    return tmp_path


def test_one_document(call: Call, cache: Path) -> None:
    code, out, err = call("models", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert [family["model_type"] for family in document["families"]] == list(FAMILIES)
    assert all(family["special"] for family in document["families"])
    rows = {row["name"]: row for row in document["models"]}
    assert {"toy", "minilm", "mpnet", "smollm2", "bert-tiny-sst2", "someone/theirs"} <= set(rows)
    assert rows["minilm"] == {
        "name": "minilm",
        "source": "hub or package index",
        "bytes": None,
        "memory": None,
    }
    held = cache / "models" / "someone--theirs"
    assert rows["someone/theirs"]["bytes"] == sum(path.stat().st_size for path in held.iterdir())
    assert rows["someone/theirs"]["memory"] == layer1_memory(pl.load("toy").architecture, document["tokens"])
    assert rows["someone/broken"]["bytes"] > 0
    assert rows["someone/broken"]["memory"] is None


def test_the_table_names_every_family_and_model(call: Call, cache: Path) -> None:
    code, out, _ = call("models")
    assert code == 0
    for name in (*FAMILIES, "toy-4layer", "smollm2", "someone/theirs"):
        assert name in out
    assert "KiB" in out


def test_memory_is_what_the_engine_asks_for() -> None:
    model = pl.load("toy-4layer")
    region = pl.Ball(0.1).around(torch.zeros(TOKENS, model.architecture.d_model, dtype=torch.float64))
    forms = Forms.of([(0, Row(1, 0, 0), 0, 1.0)], 1)
    needed = layer1_memory(model.architecture)
    assert needed == least_memory(Problem(model, region), forms)
    capped = layer1_memory(replace(model.architecture, score_cap=1.0))
    assert needed is not None
    assert capped is not None
    assert capped > needed  # the linear parts of scores before the cap are kept as well
    assert layer1_memory(replace(model.architecture, n_layers=1)) is None


def test_the_page_about_models_names_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page[page.index("## Families") : page.index("## TransformerLens")]
    assert [name for name in FAMILIES if f"`{name}`" not in table] == []
