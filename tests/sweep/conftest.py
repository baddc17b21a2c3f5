import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from prooflens.sweep.drive import pending, proceed, start
from prooflens.sweep.executors import Crew
from prooflens.sweep.spec import parse_spec
from prooflens.sweep.store import SweepStore
from prooflens.sweep.work import perform

SPEC: dict[str, Any] = {
    "models": ["toy"],
    "samples": [0, 1],
    "queries": ["top1", "mass>=0.2"],
    "regions": {"eps": [0.001, 0.02]},
    "budget": "100/3/15",
}
TASKS = 8


def rows_of(store: SweepStore) -> pa.Table:
    """All rows in order, without the time they took."""
    return (
        store.dataset().to_table().sort_by([("task", "ascending"), ("row", "ascending")]).drop_columns(["ms"])
    )


def run(path: Path, workers: int = 1, crew: Crew | None = None, **changes: Any) -> SweepStore:
    store = start(parse_spec(SPEC | changes, "test"), path)
    finish(store, workers, crew)
    return store


def finish(store: SweepStore, workers: int = 1, crew: Crew | None = None) -> None:
    proceed(store, crew or Crew(workers=workers), lambda stage, share: None)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs: an orphan that nobody reaps stays as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def performed(path: Path, **changes: object) -> SweepStore:
    """A sweep done in this process."""
    store = start(parse_spec(SPEC | {"samples": [0]} | changes, "test"), path)
    for task in pending(store)[0]:
        assert perform(task, store).error is None
    return store


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SweepStore:
    return run(tmp_path_factory.mktemp("sweep") / "run")
