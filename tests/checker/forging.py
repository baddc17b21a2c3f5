"""What a careful forger does: change rows, tensors and the header of a run, and write fresh hashes."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file, save_file

import prooflens as pl

PACKAGE = Path(pl.__file__).parent
TOY = PACKAGE / "models" / "embedded" / "toy"


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run / "rows").to_pylist()
    return rows


def rehash(run: Path) -> None:
    """What a careful forger does last."""
    info = json.loads((run / "run.json").read_text())
    info["files"] = {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in info["files"]}
    rows = rows_of(run)
    info["counts"] = Counter(row.get("verdict") for row in rows)
    info["region"]["eps"] = Counter(row.get("eps") for row in rows).most_common()[0][0]
    (run / "run.json").write_text(json.dumps(info))


Change = Callable[[list[dict[str, Any]], dict[str, Any]], int]


def edit(run: Path, change: Change) -> int:
    """Change rows and tensors, write them back with fresh hashes; the row that was changed."""
    table = pq.read_table(next((run / "rows").iterdir()))
    tensors = load_file(next((run / "tensors").iterdir()))
    rows = table.to_pylist()
    changed = change(rows, tensors)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), next((run / "rows").iterdir()))
    save_file(tensors, next((run / "tensors").iterdir()))
    rehash(run)
    return changed


def first(rows: list[dict[str, Any]], **wanted: object) -> int:
    return next(i for i, row in enumerate(rows) if all(row[k] == v for k, v in wanted.items()))


def column(name: str, value: object, **wanted: object) -> Change:
    """Another value in one column of the first row of layer 0 that is wanted."""

    def change(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        i = first(rows, layer=0, **wanted)
        rows[i][name] = value
        return i

    change.__name__ = f"{name}_{value}"
    return change


def head(run: Path, **changes: Any) -> None:
    """Other entries of run.json; those of a dictionary are put into it."""
    info = json.loads((run / "run.json").read_text())
    for name, value in changes.items():
        info[name] = info[name] | value if isinstance(value, dict) else value
    (run / "run.json").write_text(json.dumps(info))
