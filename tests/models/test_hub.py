"""The hub path, on a local stand-in for the hub: what is asked for, what is kept, what is refused."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from prooflens.errors import ModelError
from prooflens.models import load
from prooflens.models.cache import cached_models, model_folder
from tests.families import bert, gpt2

pytestmark = pytest.mark.usefixtures("online_home")


@pytest.fixture
def online_home(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    return empty_home


def hub_with(monkeypatch: pytest.MonkeyPatch, **repositories: Any) -> list[str]:
    """A hub that holds some modules under their names; returns the list of file patterns it was asked for."""
    asked: list[str] = []

    def snapshot(name: str, local_dir: Path, allow_patterns: list[str], **options: Any) -> str:
        asked.extend(allow_patterns)
        if name not in repositories:
            raise ConnectionError("no such repository")
        repositories[name].save_pretrained(local_dir)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return asked


def test_a_hub_name_is_fetched_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    module = gpt2()
    asked = hub_with(monkeypatch, gpt2=module)
    assert load("gpt2").sha256 == load(module).sha256
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked)
    hub_with(monkeypatch)
    assert load("gpt2").sha256 == load(module).sha256
    assert cached_models() == ["gpt2"]


def test_owner_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_with(monkeypatch, **{"prajjwal1/bert-tiny": bert()})
    assert load("prajjwal1/bert-tiny").architecture.family == "bert"
    assert model_folder("prajjwal1/bert-tiny").is_dir()
    assert cached_models() == ["prajjwal1/bert-tiny"]


def test_the_hub_comes_before_the_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bert(heads=False)
    hub_with(monkeypatch, **{"sentence-transformers/all-MiniLM-L6-v2": module})
    assert load("minilm").sha256 == load(module).sha256


def test_a_repository_without_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pickled:
        def save_pretrained(self, folder: Path) -> None:
            (Path(folder) / "config.json").write_text("{}")
            torch.save({}, Path(folder) / "pytorch_model.bin")

    hub_with(monkeypatch, **{"someone/pickled": Pickled()})
    with pytest.raises(ModelError, match="no safetensors weights"):
        load("someone/pickled")
    assert cached_models() == []


def test_a_name_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_with(monkeypatch)
    with pytest.raises(ModelError, match="cannot be had from the hub"):
        load("someone/nothing")


def test_an_interrupted_download_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def save_pretrained(self, folder: Path) -> None:
            (Path(folder) / "half").write_text("half of it")
            raise ConnectionError

    hub_with(monkeypatch, **{"someone/large": Interrupted()})
    with pytest.raises(ModelError, match="look at the name and the network"):
        load("someone/large")
    assert cached_models() == []
    seen: list[bool] = []

    class Whole:
        def save_pretrained(self, folder: Path) -> None:
            seen.append((Path(folder) / "half").is_file())
            (Path(folder) / "half").unlink()
            gpt2().save_pretrained(folder)

    hub_with(monkeypatch, **{"someone/large": Whole()})
    assert load("someone/large").architecture.family == "gpt2"
    assert seen == [True]
    assert cached_models() == ["someone/large"]
