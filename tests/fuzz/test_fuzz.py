"""No traceback, no hang, nothing written elsewhere, no code run: whatever a file or a string says.

The corpus holds a few good inputs of every kind, and inputs that once broke something. `python -m tests.fuzz` goes on
for as long as it is told, guided by coverage where atheris is installed.
"""

import pickle
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import CORPUS, TARGETS, EscapeError, survive, watched

LIMIT = 5.0
"""Seconds that one input may take."""

CHANGES = {
    "query": 400,
    "circuit": 300,
    "spec": 250,
    "family": 250,
    "config": 150,
    "weights": 150,
    "effect": 200,
    "run_json": 60,
    "effect_json": 30,
    "certificate": 25,
    "onnx": 60,
    "counts": 100,
}
"""How many changed inputs of each kind a test run tries."""


WORDS = (
    *[
        "top1",
        "mass>=",
        "0.2",
        "entropy",
        "<=",
        "spec{0}>{1}",
        "@-1",
        "@",
        "{",
        "}",
        "0.1:",
        "&",
        "rank2",
        "logit0>logit1",
        "argmax",
        "[0,1]",
    ],
    *(" + ", " > 0", "1 * ", '"a"', "all", "-", "1e400", ":", ","),
)
"""Pieces of queries."""


def examples(name: str) -> list[Path]:
    found = sorted((CORPUS / name).iterdir())
    assert found
    return found


def timed(name: str, data: bytes, folder: Path) -> str | None:
    start = time.perf_counter()
    said = survive(name, data, folder)
    assert time.perf_counter() - start < LIMIT
    return said


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str, tmp_path: Path) -> None:
    said = {path.name: timed(name, path.read_bytes(), tmp_path) for path in examples(name)}
    assert all((words is None) == file.startswith("good") for file, words in said.items()), said


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs(name: str, tmp_path: Path) -> None:
    choose = random.Random(name)
    files = [path.read_bytes() for path in examples(name)]
    for _ in range(CHANGES[name]):
        seed = choose.randrange(2**32)
        data = mutated(choose.choice(files), seed)
        try:
            timed(name, data, tmp_path)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} from {data[:2000]!r}") from error


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    text=st.one_of(
        st.text(max_size=40),
        st.lists(
            st.sampled_from(WORDS),
            max_size=8,
        ).map("".join),
    )
)
def test_any_query(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    timed("query", text.encode("utf-8", "surrogatepass"), tmp_path_factory.mktemp("query"))


def test_an_escape_would_be_seen(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with watched(inside):
        (inside / "fine").write_text("x")
    with pytest.raises(EscapeError, match="outside"), watched(inside):
        (tmp_path / "outside").write_text("x")
    with pytest.raises(EscapeError, match=r"pickle\.find_class"), watched(inside):
        pickle.loads(b"cbuiltins\nlen\n.")
