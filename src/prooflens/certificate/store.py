"""Run directories on disk: `run.json`, Parquet rows, safetensors; every file is hashed. No torch.

    RUN/run.json                         configuration, fingerprints, versions, sha256 of every file below
    RUN/rows/part-00000.parquet          one row per claim, zstd
    RUN/tensors/part-00000.safetensors   regions, bounds, corners, ledgers, witnesses of the rows of that part

A file is written under a temporary name beside its own, flushed to disk and renamed; `run.json` names a part only
when the part is complete. What a crash leaves behind is a run without its last part.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialise

from prooflens.certificate.folders import not_a_run
from prooflens.errors import RunError
from prooflens.json_files import read_json

SCHEMA = 1
"""The version of the format; a reader refuses others."""

HEADER = "run.json"
NEEDED = ("schema", "kind", "model", "tokens", "rows", "files")

Array = np.ndarray[Any, np.dtype[Any]]


def sha256_of(path: Path) -> str:
    """Return the fingerprint of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a whole file or none: beside its place, flushed to disk, then renamed.

    Args:
        path: where the file is to be.
        write: writes the content to the path it is given.

    Raises:
        RunError: if the file cannot be written.
    """
    temporary = path.with_name(
        f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    )  # machines may share a folder
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary.exists():
            temporary.unlink()


@dataclass(eq=False)
class RunWriter:
    """Writes a run part by part.

    Attributes:
        path: the run directory.
        header: the content of `run.json`.
    """

    path: Path
    header: dict[str, Any]

    @classmethod
    def create(cls, path: Path, header: dict[str, Any], hint: str = "") -> RunWriter:
        """Start a run in a folder that does not exist, is empty, or was left by a run without rows.

        Args:
            path: the run directory.
            header: what `run.json` says beyond the parts themselves.
            hint: what else can be done if there is a run already, for the error message.

        Raises:
            RunError: if the folder holds something, or cannot be written.
        """
        cls.check_room(path, hint)
        writer = cls(path, {"schema": SCHEMA, **header, "rows": 0, "complete": False, "files": {}})
        writer._write_header({})
        return writer

    @staticmethod
    def check_room(path: Path, hint: str = "") -> None:
        """Raise a `RunError` if a run cannot be created in this folder: it holds something, or cannot be written.

        Args:
            path: the folder.
            hint: what else can be done if there is a run already, for the error message.
        """
        if path.exists() and not (path.is_dir() and _is_empty(path)):
            hint = hint if (path / HEADER).is_file() else ""
            raise RunError(f"{path} is not empty: {hint}choose another folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror or error}") from error

    @classmethod
    def resume(cls, path: Path, header: dict[str, Any]) -> tuple[RunWriter, Run]:
        """Go on with a run about the same model, prompt and region.

        Args:
            path: the run directory.
            header: what `run.json` would say; kind, model, tokens and region must be the same.

        Returns:
            The writer, and the run as it is so far.

        Raises:
            RunError: if the run is about something else, or is damaged.
        """
        run = read_run(path)
        for name in ("kind", "model", "tokens", "region"):
            if run.info.get(name) != header.get(name):
                raise RunError(f"{path} was made with another {name}: resume with the same one")
        return cls(path, run.info | {"complete": False}), run

    @property
    def rows(self) -> int:
        """How many rows are written; the next row gets this number."""
        return int(self.header["rows"])

    def append(self, table: pa.Table, tensors: Mapping[str, Array]) -> None:
        """Write one more part; a column `row` with the global row numbers is put first.

        Args:
            table: the rows.
            tensors: their tensors by name.
        """
        part = f"part-{len(self.header['files']) // 2:05d}"
        numbers = pa.array(np.arange(self.rows, self.rows + table.num_rows), pa.int64())
        table = table.add_column(0, "row", numbers)
        rows, values = f"rows/{part}.parquet", f"tensors/{part}.safetensors"
        write_atomically(self.path / rows, lambda path: pq.write_table(table, path, compression="zstd"))
        held = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
        write_atomically(self.path / values, lambda path: _write_bytes(path, serialise(held)))
        files = self.header["files"] | {name: sha256_of(self.path / name) for name in (rows, values)}
        self._write_header({"files": files, "rows": self.rows + table.num_rows})

    def finish(self, **facts: Any) -> None:
        """Mark the run as complete.

        Args:
            facts: what the whole came to, kept in `run.json`.
        """
        self._write_header({**facts, "complete": True})

    def _write_header(self, changes: Mapping[str, Any]) -> None:
        """Write the header, then keep it: after an interruption it is that of the disk or the one before it."""
        header = {**self.header, **changes}
        text = json.dumps(header, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self.path / HEADER, lambda path: _write_bytes(path, text.encode()))
        self.header = header


def _is_empty(folder: Path) -> bool:
    """Say whether there is nothing in a folder but the header of a run without rows."""
    names = [entry.name for entry in folder.iterdir()]
    if names != [HEADER]:
        return not names
    return bool(_read_header(folder)["rows"] == 0)


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@dataclass(frozen=True, eq=False)
class Tensors(Mapping[str, Array]):
    """The tensors of all parts by name, read when they are asked for."""

    homes: dict[str, Path]
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, paths: list[Path]) -> Tensors:
        """Collect the names in some safetensors files."""
        opened = {path: _opened(path) for path in paths}
        return cls({name: path for path, file in opened.items() for name in file.keys()}, opened)  # noqa: SIM118

    def __getitem__(self, name: str) -> Array:
        if name not in self.homes:
            raise KeyError(name)
        try:
            found: Array = self._open[self.homes[name]].get_tensor(name)
        except (SafetensorError, TypeError, ValueError) as error:
            raise RunError(f"{self.homes[name]}: tensor {name} cannot be read: {error}") from error
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.homes)

    def __len__(self) -> int:
        return len(self.homes)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is not a readable safetensors file: {error}") from error


@dataclass(frozen=True, eq=False)
class Run:
    """A run as it was read.

    Attributes:
        path: the run directory.
        info: the content of `run.json`.
        table: the rows.
        tensors: bounds, witnesses and regions by name, read when they are asked for.
    """

    path: Path
    info: dict[str, Any]
    table: pa.Table
    tensors: Tensors

    @property
    def rows(self) -> pa.Table:
        """The rows; a `RunError` if the run ended before it decided anything."""
        if not self.table.num_columns:
            raise RunError(f"{self.path} holds no rows: the run ended before it decided anything")
        return self.table


def read_run(path: Path | str, verify: bool = True) -> Run:
    """Read a run directory.

    Args:
        path: the directory that `certify(…, out=path)` or `Results.save` wrote.
        verify: whether every file must have the fingerprint that `run.json` states.

    Raises:
        RunError: if it is not a run, or is damaged.

    Example:
        >>> import prooflens as pl, tempfile
        >>> model = pl.load("toy")
        >>> res = pl.certify(model, model.example(), pl.Ball(0.02), "0.1", positions=[-1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     res.save(f"{folder}/run")
        ...     read_run(f"{folder}/run").rows.column("verdict").to_pylist()
        ['holds']
    """
    path = Path(path)
    info = _read_header(path)
    files = info["files"]
    for name, fingerprint in files.items():
        where = path / name
        if not where.resolve().is_relative_to(path.resolve()):
            raise RunError(f"{path / HEADER} names a file outside the run: {name}")
        if not where.is_file():
            raise RunError(f"{where} is missing: the run is damaged")
        if verify and sha256_of(where) != fingerprint:
            raise RunError(f"{where} is not the file that {HEADER} describes: it is damaged or was changed")
    tables = [_read_table(path / name) for name in files if name.startswith("rows/")]
    try:
        table = pa.concat_tables(tables) if tables else pa.table({})
    except pa.ArrowException as error:
        raise RunError(f"the parts of {path} do not have the same columns: {error}") from error
    if table.num_rows != info["rows"]:
        raise RunError(f"{path} has {table.num_rows} rows, {HEADER} says {info['rows']}: the run is damaged")
    tensors = Tensors.of([path / name for name in files if name.startswith("tensors/")])
    return Run(path, info, table, tensors)


def _read_header(path: Path) -> dict[str, Any]:
    if not (path / HEADER).is_file():
        raise not_a_run(path)
    try:
        info = read_json(path / HEADER)
    except (OSError, ValueError) as error:
        raise RunError(f"{path / HEADER} is not readable JSON: {error}") from error
    if not isinstance(info, dict) or not all(name in info for name in NEEDED):
        raise RunError(f"{path / HEADER} is incomplete: it needs {', '.join(NEEDED)}")
    if info["schema"] != SCHEMA:
        raise RunError(f"{path} has schema {info['schema']!r}, this version reads {SCHEMA}")
    _check_header(path / HEADER, info)
    return info


class _Lenient(BaseModel):
    """Entries of a header that readers rely on; others may stand beside them."""

    model_config = ConfigDict(extra="allow", strict=True)


class _ModelEntry(_Lenient):
    name: str
    sha256: str | None = None
    source: str | None = None


class _RegionEntry(_Lenient):
    label: str | None = None
    eps: float | None = None


class _Configuration(_Lenient):
    command: str | None = None


class _Header(_Lenient):
    kind: str
    model: _ModelEntry
    tokens: list[str]
    rows: NonNegativeInt
    files: dict[str, str]
    text: str | None = None
    layers: int | None = None
    complete: bool = True
    region: _RegionEntry = _RegionEntry()
    configuration: _Configuration = _Configuration()


def _check_header(path: Path, info: Mapping[str, Any]) -> None:
    """Raise a `RunError` unless the entries that readers rely on have the right types."""
    try:
        _Header.model_validate(info)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{path} is damaged: {where}: {first['msg']}") from error


def _read_table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise RunError(f"{path} is not a readable Parquet file: {error}") from error


def query_rows(path: Path | str, sql: str) -> pa.Table:
    """Run a SQL query (DuckDB) over the rows of a run, as table `rows`.

    Args:
        path: the run's folder.
        sql: the query.
    """
    if not sql.strip():
        raise RunError(
            "the query is empty: write one, as in 'select verdict, count(*) from rows group by all'"
        )
    return query_tables({"rows": read_run(path).rows}, sql)


def query_tables(tables: Mapping[str, Any], sql: str) -> pa.Table:
    """Run a SQL query (DuckDB) over Arrow tables. It sees nothing else: no files, no network, no variables.

    Args:
        tables: Arrow tables or data sets by name.
        sql: the query.

    Raises:
        RunError: if the query fails.

    Example:
        >>> query_tables({"rows": pa.table({"x": [1, 2]})}, "select max(x) as x from rows").column("x").to_pylist()
        [2]
    """
    import duckdb

    connection = duckdb.connect(":memory:")
    try:
        for name, table in tables.items():
            connection.register(name, table)
        connection.execute("set python_enable_replacements = false")
        connection.execute("set enable_external_access = false")
        connection.execute("set lock_configuration = true")
        found = connection.sql(sql)
        return pa.table({}) if found is None else found.to_arrow_table()
    except duckdb.Error as error:
        raise RunError(f"the query failed: {str(error).splitlines()[0]}") from error
    finally:
        connection.close()
