"""A sweep on disk; every file is complete or absent.

    RUN/sweep.json             the specification, the models' fingerprints, versions, the number of tasks
    RUN/shards/<key>.parquet   the rows of one task, zstd; written under a temporary name, synced and renamed
    RUN/rows/<name>.parquet    shards that `compact` put together
    RUN/errors/<key>.json      a task that failed, and why

A Parquet file names the tasks it holds and the sha256 of its rows in its own metadata, so it vouches for itself: there
is no index that could disagree with it. Where a task is in a compacted file, a shard of it is passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from prooflens.certificate.store import query_tables, write_atomically
from prooflens.errors import RunError
from prooflens.json_files import read_json
from prooflens.results.radii import RADII
from prooflens.results.tables import VERDICTS

SCHEMA = 2
"""Version of the format and of what a task's key is made of."""
HEADER = "sweep.json"
PART_ROWS = 1 << 17
"""A compacted file has about so many rows."""

_OWN = [("task", pa.string()), ("row", pa.int32()), ("prompt", pa.string())]
COLUMNS = {"verdicts": pa.schema([*_OWN, *VERDICTS]), "radii": pa.schema([*_OWN, *RADII])}
"""A row of a sweep: its task, its number there, the prompt, and the columns of a verdict or of a radius."""


@dataclass(frozen=True)
class SweepStore:
    """A sweep's folder."""

    path: Path

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> SweepStore:
        """A new sweep in a folder that does not exist or is empty.

        Args:
            path: the folder.
            header: what the sweep is about.
        """
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            hint = f"`prooflens resume {path}` goes on with it, or " if (path / HEADER).is_file() else ""
            raise RunError(f"{path} is not empty: {hint}choose another folder")
        store = cls(path)
        _write_json(path / HEADER, {"schema": SCHEMA, **header})
        return store

    @classmethod
    def open(cls, path: Path) -> SweepStore:
        """A sweep that is there."""
        store = cls(path)
        _ = store.header
        return store

    @property
    def header(self) -> dict[str, Any]:
        """What `sweep.json` says."""
        if not (self.path / HEADER).is_file():
            raise RunError(f"{self.path} is not a sweep: it has no {HEADER}")
        try:
            found = read_json(self.path / HEADER)
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / HEADER} is not readable JSON: {error}") from error
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise RunError(
                f"{self.path / HEADER} does not have schema {SCHEMA}: start the sweep anew in another folder"
            )
        regions = found["spec"].get("regions") if isinstance(found.get("spec"), dict) else None
        kinds = {"versions": dict, "models": dict, "tasks": int}
        if not isinstance(regions, dict) or any(
            not isinstance(found.get(k), kind) for k, kind in kinds.items()
        ):
            raise RunError(f"{self.path / HEADER} is damaged: it needs spec, {', '.join(kinds)}")
        return found

    @property
    def holds_radii(self) -> bool:
        """Whether the rows are radii that were searched, not verdicts."""
        return self.header["spec"]["regions"].get("radius") is not None

    def shard(self, key: str) -> Path:
        """Where the rows of a task are."""
        return self.path / "shards" / f"{key}.parquet"

    def write_shard(self, key: str, prompt: str, table: pa.Table) -> None:
        """The rows of a task, verdicts or radii, whole or not at all.

        Args:
            key: the task's.
            prompt: the prompt that it asked about.
            table: its rows.
        """
        size = table.num_rows
        table = table.add_column(0, "prompt", pa.repeat(pa.scalar(prompt), size))
        table = table.add_column(0, "row", pa.array(range(size), pa.int32()))
        table = table.add_column(0, "task", pa.repeat(pa.scalar(key), size))
        _write_rows(self.shard(key), table.cast(_columns(table)), [key])
        self._error(key).unlink(missing_ok=True)

    def write_error(self, key: str, record: dict[str, Any]) -> None:
        """Why a task failed.

        Args:
            key: the task's.
            record: what is said of the failure.
        """
        _write_json(self._error(key), record)

    def errors(self) -> dict[str, dict[str, Any]]:
        """The tasks that failed, by key."""
        found = {}
        for path in sorted((self.path / "errors").glob("*.json")):
            try:
                found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue  # removed meanwhile by the sweep that is running, or damaged: the task is redone anyway
        return found

    def done(self) -> set[str]:
        """The tasks whose files are there, by name and metadata alone."""
        return {key for keys in self._files().values() for key in keys}

    def files(self) -> list[Path]:
        """The files that hold all rows once."""
        return list(self._files())

    def damaged(self) -> list[Path]:
        """The files whose rows are not those that were written."""
        found = []
        for path in [*self._found("rows"), *self._found("shards")]:
            keys = verified_keys(path)
            if keys is None or (path.parent.name == "shards" and keys != [path.stem]):
                found.append(path)
        return found

    def repair(self) -> None:
        """Remove damaged files, so that their tasks are done again, and what a killed process left half written."""
        for folder in ("shards", "rows", "errors"):
            for left in (self.path / folder).glob(".*.tmp"):
                left.unlink(missing_ok=True)
        for path in self.damaged():
            path.unlink(missing_ok=True)

    def dataset(self) -> ds.Dataset:
        """All rows, read when they are asked for."""
        columns = COLUMNS["radii" if self.holds_radii else "verdicts"]
        return ds.dataset([str(path) for path in self.files()], schema=columns, format="parquet")

    def query(self, sql: str) -> pa.Table:
        """DuckDB over all rows, as table `rows`; an error names the file where one is damaged."""
        try:
            return query_tables({"rows": self.dataset()}, sql)
        except RunError:
            self._check_whole()
            raise

    def _check_whole(self) -> None:
        if damaged := self.damaged():
            raise RunError(f"{damaged[0]} is damaged: `prooflens resume {self.path}` does its tasks again")

    def compact(self) -> tuple[int, int]:
        """Put shards together into files of about `PART_ROWS` rows; how many shards went into how many files.

        A part is complete before a shard of it is removed, and readers pass over shards that a part names.
        """
        self._check_whole()
        names = {path: keys for path, keys in self._files().items() if path.parent.name == "shards"}
        parts = 0
        for group in _groups(list(names)):
            keys = [key for path in group for key in names[path]]
            digest = hashlib.sha256("".join(keys).encode()).hexdigest()
            tables = [pq.read_table(path).replace_schema_metadata() for path in group]
            table = pa.concat_tables(tables, promote_options="default")  # older parts may lack later columns
            _write_rows(self.path / "rows" / f"{digest}.parquet", table, keys)
            parts += 1
        held = {key for path in self._found("rows") for key in _keys(path) or ()}
        for path in self._found("shards"):
            if path.stem in held:
                path.unlink(missing_ok=True)
        return len(names), parts

    def _error(self, key: str) -> Path:
        return self.path / "errors" / f"{key}.json"

    def _found(self, folder: str) -> list[Path]:
        return sorted(p for p in (self.path / folder).glob("*.parquet") if not p.name.startswith("."))

    def _files(self) -> dict[Path, list[str]]:
        """Files and the tasks they hold; no task twice."""
        found = {path: _keys(path) or [] for path in self._found("rows")}
        held = {key for keys in found.values() for key in keys}
        return found | {path: [path.stem] for path in self._found("shards") if path.stem not in held}


def verified_keys(path: Path) -> list[str] | None:
    """The tasks of a file whose rows are those that were written; None if it is damaged."""
    keys = _keys(path)
    if keys is None:
        return None
    try:
        table = pq.read_table(path)
        digest = _digest(table, keys)
        types = _columns(table).types
    except (pa.ArrowException, OSError, ValueError):
        return None
    stated = (table.schema.metadata or {}).get(b"sha256", b"")
    return keys if stated == digest.encode() and table.schema.types == types else None


def _keys(path: Path) -> list[str] | None:
    try:
        metadata = pq.read_schema(path).metadata or {}
        found = json.loads(metadata[b"tasks"])
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None
    return [str(key) for key in found]


def _columns(table: pa.Table) -> pa.Schema:
    """Which kind of rows these are, by the names of their columns."""
    for schema in COLUMNS.values():
        if schema.names == table.column_names:
            return schema
        older = schema.remove(schema.get_field_index("unit"))  # sweeps of versions without units
        if older.names == table.column_names:
            return older
    raise ValueError(f"these are no rows of a sweep: {', '.join(table.column_names)}")


def _digest(table: pa.Table, keys: list[str]) -> str:
    """sha256 of tasks and rows, however these are chunked, and whatever lies in memory under a null."""
    columns: dict[str, pa.ChunkedArray] = {}
    table = table.cast(_columns(table))  # Parquet calls the items of a list otherwise
    for name in table.column_names:
        column = table.column(name)
        if column.null_count:
            columns[f"{name} is there"] = column.is_valid().cast(pa.int8())
            column = column.fill_null("" if pa.types.is_string(column.type) else 0)
        columns[name] = column
    plain = pa.table(columns).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, plain.schema) as stream:
        stream.write_table(plain)
    digest = hashlib.sha256(json.dumps(keys).encode())
    digest.update(sink.getvalue())
    return digest.hexdigest()


def _write_rows(path: Path, table: pa.Table, keys: list[str]) -> None:
    """A Parquet file that names its tasks and the sha256 of its rows; no statistics: the sha256 does not cover them."""
    facts = {"tasks": json.dumps(keys), "sha256": _digest(table, keys)}
    marked = table.replace_schema_metadata(facts)
    write_atomically(
        path, lambda place: pq.write_table(marked, place, compression="zstd", write_statistics=False)
    )


def _groups(paths: list[Path]) -> Iterator[list[Path]]:
    """Files in order, together as many as make `PART_ROWS` rows."""
    group: list[Path] = []
    rows = 0
    for path in paths:
        group.append(path)
        rows += pq.read_metadata(path).num_rows
        if rows >= PART_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _write_json(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, lambda place: _write_text(place, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
