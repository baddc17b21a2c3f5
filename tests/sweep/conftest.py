from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from prooflens.sweep.drive import proceed, start
from prooflens.sweep.spec import parse_spec
from prooflens.sweep.store import SweepStore

SPEC: dict[str, Any] = {
    "models": ["toy"],
    "samples": [0, 1, 2, 3],
    "queries": ["top1", "mass>=0.2"],
    "regions": {"eps": [0.001, 0.02]},
    "budget": "100/3/15",
}
TASKS = 16


def rows_of(store: SweepStore) -> pa.Table:
    """All rows in order, without the time they took."""
    return (
        store.dataset().to_table().sort_by([("task", "ascending"), ("row", "ascending")]).drop_columns(["ms"])
    )


def run(path: Path, workers: int = 1, **changes: Any) -> SweepStore:
    store = start(parse_spec(SPEC | changes, "test"), path)
    finish(store, workers)
    return store


def finish(store: SweepStore, workers: int = 1) -> None:
    proceed(store, workers, 1, lambda stage, share: None)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SweepStore:
    return run(tmp_path_factory.mktemp("sweep") / "run")
