import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import prooflens
from prooflens import cli
from prooflens.errors import ModelError
from prooflens.models import Transformer, load

Call = Callable[..., tuple[int, str, str]]

# A busy machine makes an example slow, not wrong.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two test processes share two cores."""
    torch.set_num_threads(1)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line in this process: exit code, stdout, stderr."""

    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prooflens", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return invoke


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
