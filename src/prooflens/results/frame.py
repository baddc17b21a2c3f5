"""Tables that behave in notebooks: rows with named columns, and what they are about."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.models import Prompt, Transformer
from prooflens.models.changes import Changes
from prooflens.models.reads import READ
from prooflens.notebook import picture_of
from prooflens.queries import Query, RowQuery, parse_query
from prooflens.queries.rows import suggestion
from prooflens.regions import Region

if TYPE_CHECKING:
    import pandas

NAME = re.compile(r"(?P<layer>\d+)\.(?P<head>\d+)(:(?P<query>.+?))?(@(?P<position>-?\d+))?")
"""A head, perhaps with the query that it was asked and the position: `2.4`, `2.4@3`, `2.4:top1@-1`."""

SHOWN_ROWS = 200
"""How many rows a notebook shows; `.to_pandas()` has them all."""


@dataclass(frozen=True, eq=False)
class Readout:
    """What a model that ends at a hook reads there.

    Attributes:
        hook: the name of the value.
        position: the token.
        names: what the outputs are called; None if they have numbers only.
        weight: one direction for each output; those of the other value stand behind.
        bias: what is added to them; None for 0.
        beside: the hook and token of another value that is read too; None for none.
    """

    hook: str
    position: int
    names: tuple[str, ...] | None
    weight: Tensor
    bias: Tensor | None
    beside: tuple[str, int] | None = None

    @classmethod
    def of(cls, model: Transformer) -> Readout | None:
        """Return what a model reads; None for a whole model.

        Args:
            model: the model.
        """
        hook, position = model.architecture.read_hook, model.architecture.read_position
        if hook is None or position is None:
            return None
        other, there = model.architecture.beside_hook, model.architecture.beside_position
        beside = None if other is None or there is None else (other, there)
        return cls(hook, position, model.outputs, model.weights[READ], model.weights.get("read.bias"), beside)


@dataclass(frozen=True, eq=False)
class EditedModel:
    """The edited model of an effect.

    Attributes:
        name: its name.
        sha256: its fingerprint; that of its readout, where a value inside the model is measured.
        edit: what was done to the model, in words.
        changes: how its weights differ from those of the model.
    """

    name: str
    sha256: str
    edit: str
    changes: Changes

    @classmethod
    def of(cls, model: Transformer, edited: Transformer, name: str, edit: str) -> EditedModel:
        """Describe an edited model.

        Args:
            model: the model that was asked about.
            edited: the edited one.
            name: the name of the whole edited model.
            edit: what was done to the model, in words.
        """
        return cls(name, edited.sha256, edit, Changes.between(model, edited))


@dataclass(frozen=True, eq=False)
class Subject:
    """What results are about: a model, a prompt and a region, by name and fingerprint.

    Attributes:
        model: the model's name.
        model_sha256: the fingerprint of its architecture and weights.
        tokens: the tokens of the prompt.
        text: the text of the prompt; None if it was given as ids or as a tensor.
        region: the input set.
        source: the folder that the weights were read from, if there is one.
        layers: how many layers the model has.
        readout: what a model that ends at a hook reads there; None for whole models.
        edited: the other model, where results are about the effect of an edit.
    """

    model: str
    model_sha256: str
    tokens: tuple[str, ...]
    text: str | None
    region: Region
    source: str | None = None
    layers: int | None = None
    """How many layers the model has: fewer than its weights' folder if it was cut."""
    readout: Readout | None = None
    edited: EditedModel | None = None

    @classmethod
    def of(cls, model: Transformer, prompt: Prompt, region: Region, source: str | None = None) -> Subject:
        """Describe a model, a prompt and a region.

        Args:
            model: the model.
            prompt: its tokens and text are kept.
            region: the input set.
            source: the folder that the weights were read from.
        """
        layers, readout = model.architecture.n_layers, Readout.of(model)
        return cls(model.name, model.sha256, prompt.tokens, prompt.text, region, source, layers, readout)

    @property
    def eps(self) -> float | None:
        """The largest radius of a ball; None for other regions."""
        radius, d = self.region.radius, self.region.center.shape[1] - self.region.free
        return None if radius is None else float(radius[:, :d].max())

    def columns(self, size: int) -> dict[str, pa.Array]:
        """Return the columns that are the same in every row of a table with `size` rows.

        Args:
            size: how many rows the table has.
        """
        values = pa.array(self.tokens, pa.string())
        offsets = pa.array(range(0, size * len(values) + 1, max(1, len(values))), pa.int32())
        tokens = pa.chunked_array([values] * size, pa.string()).combine_chunks() if size else values[:0]
        return {
            "model": pa.repeat(pa.scalar(self.model), size),
            "model_sha256": pa.repeat(pa.scalar(self.model_sha256), size),
            "tokens": pa.ListArray.from_arrays(offsets, tokens),
            "region": pa.repeat(pa.scalar(self.region.label), size),
        }


def query_name(query: Query) -> str:
    """Return a query's text without heads and positions, which are columns of their own.

    Args:
        query: the query.
    """
    return query.kind if isinstance(query, RowQuery) else str(query)


class Frame:
    """A table with named columns that can be indexed by head, filtered, converted and shown in a notebook.

    In a frame of one row, every column is also an attribute (`res["0.1@-1"].verdict`).

    Attributes:
        table: the rows as an Arrow table.
        subject: what the rows are about; None for rows that were read from a run directory.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> res = pl.certify(model, model.example(), pl.Ball(0.01), "0.1", positions=[2, 3])
        >>> len(res), len(res["0.1@3"]), len(res.sel(position=[2, 3]))
        (2, 1, 2)
    """

    title: ClassVar[str] = "rows"
    shown: ClassVar[tuple[str, ...]] = ()
    later: ClassVar[tuple[str, ...]] = ()
    """Columns of numbers that runs of older versions do not have."""
    words: ClassVar[Mapping[str, frozenset[object]]] = {}
    """Columns whose values are words from a list."""

    def __init__(self, table: pa.Table, subject: Subject | None = None) -> None:
        self.table = table
        self.subject = subject

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[Self]:
        return (self._take([i]) for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        """Return the value of a column, in a frame of one row."""
        if name.startswith("_") or name == "table" or name not in self.table.column_names:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        values = self.table.column(name).to_pylist()
        if len(values) != 1:
            raise AttributeError(
                f"{len(values)} rows have no single {name!r}: choose one, or use `.to_arrow()`"
            )
        return values[0]

    def __dir__(self) -> list[str]:
        """Columns are attributes of a frame of one row."""
        return [*super().__dir__(), *self.table.column_names]

    def __getitem__(self, name: str | int | slice | tuple[int, int]) -> Self:
        """Select rows by number, slice, head or row of attention.

        Args:
            name: a row number, a slice, a head `"2.4"` or (2, 4), a head at one position `"2.4@3"`, or one that was
                asked one query, `"2.4:mass>=0.2"` or `"2.4:mass>=0.2@3"`.

        Raises:
            QueryError: if no row is about that head.
        """
        if isinstance(name, int):
            if not -len(self) <= name < len(self):
                raise IndexError(f"there is no row {name}: there are {len(self)}, counted from 0")
            return self._take([range(len(self))[name]])
        if isinstance(name, slice):
            return self._take(list(range(len(self))[name]))
        name = ".".join(map(str, name)) if isinstance(name, tuple) else str(name)
        split = NAME.fullmatch(name)
        if split is None:
            raise QueryError(
                f"{name!r} does not name a head (as in '2.4') or a row of one ('2.4@3', '2.4:top1@3')"
            )
        head = f"{split['layer']}.{split['head']}"
        places: dict[str, object] = {"layer": int(split["layer"]), "head": int(split["head"])}
        if split["query"]:
            places["query"] = split["query"]
        if split["position"]:
            places["position"] = int(split["position"])
        found = self.sel(**places)
        if not len(found):
            heads = zip(*(self.table.column(c).to_pylist() for c in ("layer", "head")), strict=True)
            known = sorted({f"{a}.{b}" for a, b in heads if a is not None})
            raise QueryError(f"no result is about {name!r}{suggestion(head, known)}")
        return found

    def sel(self, **wanted: object) -> Self:
        """Select the rows whose columns have the given values.

        Args:
            wanted: column=value, or column=[several values]; `query` is understood in any spelling, and a negative
                `position` counts from the end.

        Raises:
            QueryError: if there is no such column, or a column of words has no such word (`verdict="hold"`).
        """
        keep = list(range(len(self)))
        for name, value in wanted.items():
            if name not in self.table.column_names:
                raise QueryError(f"there is no column {name!r}{suggestion(name, self.table.column_names)}")
            several = value if isinstance(value, list | tuple | set | range) else [value]
            allowed = {self._spelled(name, item) for item in several}
            values = self.table.column(name).to_pylist()
            if name in self.words and (unknown := allowed - self.words[name]):
                word = str(next(iter(unknown)))
                raise QueryError(
                    f"{word!r} is no {name}{suggestion(word, map(str, self.words[name]))}; "
                    f"there are {', '.join(sorted(map(str, self.words[name])))}"
                )
            from_end = values
            if name == "position" and any(isinstance(item, int) and item < 0 for item in allowed):
                sizes = self.table.column("tokens").to_pylist()
                from_end = [v if v is None else v - len(t) for v, t in zip(values, sizes, strict=True)]
            keep = [i for i in keep if values[i] in allowed or from_end[i] in allowed]
        return self._take(keep)

    def _spelled(self, name: str, value: object) -> object:
        if name == "query" and isinstance(value, str):
            return query_name(parse_query(value))
        return value

    def _take(self, keep: list[int]) -> Self:
        return type(self)(self.table.take(pa.array(keep, pa.int64())), self.subject)

    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        return self.table

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a pandas data frame."""
        return self.table.to_pandas()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries, ready for JSON."""
        found: list[dict[str, Any]] = self.table.to_pylist()
        return found

    def shown_rows(self, most: int) -> list[dict[str, Any]]:
        """Return rows as tables show them: a key is named by its number and the text of its token.

        Args:
            most: how many rows, the first ones.
        """
        return [with_text(row, row.get("tokens") or ()) for row in self.table.slice(0, most).to_pylist()]

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The columns that tables show: with the measured difference, where one was asked for."""
        if "difference" not in self.table.column_names:
            return self.shown
        place = self.shown.index("lower" if "lower" in self.shown else "attack") + 1
        return (*self.shown[:place], "difference", *self.shown[place:])

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers that stand for all rows."""
        return {"rows": len(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return `{"rows": […], "summary": {…}}`."""
        return {"rows": self.rows, "summary": self.summary}

    @property
    def line(self) -> str:
        """The summary in words, counts first."""
        facts = self.summary.items()
        counts = [
            "1 row" if (name, value) == ("rows", 1) else f"{value} {name}"
            for name, value in facts
            if isinstance(value, int)
        ]
        return ", ".join(
            [*counts, *(f"{name}: {value}" for name, value in facts if not isinstance(value, int))]
        )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read the rows of a run directory; bounds and witnesses are tensors of `certificate.read_run(path)`.

        Args:
            path: the run directory.

        Raises:
            QueryError: if the run holds rows of another kind.
            RunError: if it is not a run directory, or is damaged.
        """
        from prooflens.certificate import read_run

        run = read_run(path)
        table = with_later_columns(with_units(run.rows), cls.later)
        if not set(cls.shown) <= set(table.column_names):
            raise QueryError(f"{path} holds no {cls.title}: its rows are {run.info['kind']}")
        return cls(
            table.drop_columns([name for name in table.column_names if name in ("row", "claim", "region_id")])
        )

    def _subject(self) -> Subject:
        """Return what the rows are about; rows that were read from a run have no subject to write again."""
        if self.subject is None:
            raise QueryError("these rows were read from a run: copy its folder")
        return self.subject

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.line}>"

    def _repr_html_(self) -> str:
        """The rows as a table, under a picture of them."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.shown_names)
        few = self.shown_rows(SHOWN_ROWS)
        cells = ([html.escape(_cell(row[name])) for name in self.shown_names] for row in few)
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
        more = f"<p>… {len(self) - len(few)} more rows</p>" if len(self) > len(few) else ""
        said = f"<p>{html.escape(repr(self)[1:-1])}</p>"
        return f"{said}{picture_of(self)}<table><tr>{head}</tr>{body}</table>{more}"


def with_text(row: dict[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Return a row whose most attended key (`top`) is named by its number and the text of its token.

    Args:
        row: a row; without a key it comes back as it is.
        tokens: the tokens of its prompt.
    """
    top = row.get("top")
    return row | {"top": f"{top} {tokens[top]}"} if top is not None and 0 <= top < len(tokens) else row


def with_later_columns(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the rows of a run with columns of numbers that it may be too old to have; those are null.

    Args:
        table: the rows.
        names: the columns.
    """
    for name in names:
        if "certified" in table.column_names and name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, pa.float64()))
    return table


def with_units(table: pa.Table) -> pa.Table:
    """Return the rows of a run with a column of units; runs of older versions have none, and get nulls.

    Args:
        table: the rows.
    """
    if "unit" in table.column_names:
        return table
    return table.append_column("unit", pa.nulls(table.num_rows, pa.string()))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
