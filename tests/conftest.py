import os
from pathlib import Path

import pytest
import torch

import prooflens
from prooflens.errors import ModelError
from prooflens.models import Transformer, load

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two test processes share two cores."""
    torch.set_num_threads(1)


def pretrained(name: str) -> Transformer:
    """A real model, fetched once into the cache; where it cannot be had the test is skipped and says so."""
    try:
        return load(name)
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} cannot be had here: {error}")


@pytest.fixture(scope="session")
def minilm() -> Transformer:
    return pretrained("minilm")


@pytest.fixture(scope="session")
def smollm2() -> Transformer:
    return pretrained("smollm2")


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory with nothing in it, and no hub."""
    monkeypatch.setenv("PROOFLENS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def toy() -> Transformer:
    return prooflens.load("toy")
