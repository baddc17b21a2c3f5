"""What comes back: tables of verdicts and radii that behave in notebooks, and never call an estimate a proof."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from prooflens.errors import QueryError
from prooflens.models import Prompt, Transformer
from prooflens.outcomes import STRENGTH, Outcome, Verdict
from prooflens.queries import Claim, Mass, Query, Ranking, RowQuery, TopK, parse_query
from prooflens.queries.rows import suggestion
from prooflens.regions import Region

if TYPE_CHECKING:
    from pathlib import Path

    import pandas

    from prooflens.engines.attack import Witness

SHOWN_ROWS = 200
"""A notebook shows so many rows; `.to_pandas()` has them all."""

NAMES = [
    ("model", pa.string()),
    ("model_sha256", pa.string()),
    ("tokens", pa.list_(pa.string())),
    ("layer", pa.int32()),
    ("head", pa.int32()),
    ("position", pa.int32()),
    ("query", pa.string()),
    ("region", pa.string()),
]
VERDICTS = pa.schema(
    [
        *NAMES,
        ("eps", pa.float64()),
        ("engine", pa.string()),
        ("verdict", pa.string()),
        ("guarantee", pa.string()),
        ("lower", pa.float64()),
        ("upper", pa.float64()),
        ("clean", pa.float64()),
        ("attack", pa.float64()),
        ("ms", pa.float64()),
        ("reason", pa.string()),
        ("top", pa.int32()),
        ("circuit", pa.string()),
    ]
)
"""The columns of a verdict; `docs/certify.md` says what each means."""

RADII = pa.schema(
    [
        *NAMES,
        ("token", pa.int32()),
        ("certified", pa.float64()),
        ("attack", pa.float64()),
        ("clean", pa.float64()),
        ("engine", pa.string()),
        ("ms", pa.float64()),
        ("reason", pa.string()),
    ]
)
"""The columns of a radius: certified ≤ true ≤ attack."""


@dataclass(frozen=True, eq=False)
class Subject:
    """What results are about: a model, a prompt and a region, by name and fingerprint."""

    model: str
    model_sha256: str
    tokens: tuple[str, ...]
    text: str | None
    region: Region
    source: str | None = None
    layers: int | None = None
    """How many layers the model has: fewer than its weights' folder where it was cut."""

    @classmethod
    def of(cls, model: Transformer, prompt: Prompt, region: Region, source: str | None = None) -> Subject:
        """Names of a model and a prompt; the source is the folder that the weights were read from."""
        layers = model.architecture.n_layers
        return cls(model.name, model.sha256, prompt.tokens, prompt.text, region, source, layers)

    @property
    def eps(self) -> float | None:
        """The largest radius of a ball; None for other regions."""
        return None if self.region.radius is None else float(self.region.radius.max())

    def columns(self, size: int) -> dict[str, pa.Array]:
        """The columns that are the same in every row."""
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
    """The query without the heads and positions it was asked of: those are columns of their own."""
    return query.kind if isinstance(query, RowQuery) else str(query)


def claim_key(claim: Claim) -> tuple[object, ...]:
    """What identifies a claim within one model, prompt and region: layer, head, position, query."""
    return (*claim_place(claim), query_name(claim.query))


def claim_place(claim: Claim) -> tuple[int | None, int | None, int | None]:
    """Layer, head and position of a claim about one row, else three times None."""
    if isinstance(claim.query, RowQuery) and len(claim.rows) == 1:
        row = claim.rows[0]
        return row.layer, row.head, row.position
    return None, None, None


def finite(value: float | None) -> float | None:
    """The number as JSON and Parquet keep it: what is not finite says nothing and becomes null."""
    return value if value is not None and math.isfinite(value) else None


class Frame:
    """Rows with named columns: an Arrow table that can be cut, converted and shown."""

    title: ClassVar[str] = "rows"
    shown: ClassVar[tuple[str, ...]] = ()

    def __init__(self, table: pa.Table, subject: Subject | None = None) -> None:
        self.table = table
        self.subject = subject

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[Self]:
        return (self._take([i]) for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        """The value of a column, in a frame of one row."""
        if name.startswith("_") or name == "table" or name not in self.table.column_names:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        values = self.table.column(name).to_pylist()
        if len(values) != 1:
            raise AttributeError(
                f"{len(values)} rows have no single {name!r}: choose one, or use `.to_arrow()`"
            )
        return values[0]

    def __getitem__(self, name: str | int | slice | tuple[int, int]) -> Self:
        """Row number `name` or a slice of rows; the rows of a head `"2.4"` or (2, 4), or of one position `"2.4@3"`."""
        if isinstance(name, int):
            return self._take([range(len(self))[name]])
        if isinstance(name, slice):
            return self._take(list(range(len(self))[name]))
        name = ".".join(map(str, name)) if isinstance(name, tuple) else str(name)
        head, _, position = name.partition("@")
        layer, dot, number = head.partition(".")
        if not (dot and layer.isdigit() and number.isdigit() and (position or "0").lstrip("-").isdigit()):
            raise QueryError(f"{name!r} does not name a head (as in '2.4') or a row of one ('2.4@3')")
        places: dict[str, object] = {"layer": int(layer), "head": int(number)}
        if position:
            places["position"] = int(position)
        found = self.sel(**places)
        if not len(found):
            heads = zip(*(self.table.column(c).to_pylist() for c in ("layer", "head")), strict=True)
            known = sorted({f"{a}.{b}" for a, b in heads if a is not None})
            raise QueryError(f"no result is about {name!r}{suggestion(head, known)}")
        return found

    def sel(self, **wanted: object) -> Self:
        """The rows whose columns have these values (or one of several, for a list); `query` in any spelling."""
        keep = list(range(len(self)))
        for name, value in wanted.items():
            if name not in self.table.column_names:
                raise QueryError(f"there is no column {name!r}{suggestion(name, self.table.column_names)}")
            several = value if isinstance(value, list | tuple | set | range) else [value]
            allowed = {self._spelled(name, item) for item in several}
            values = self.table.column(name).to_pylist()
            keep = [i for i in keep if values[i] in allowed]
        return self._take(keep)

    def _spelled(self, name: str, value: object) -> object:
        if name == "query" and isinstance(value, str):
            return query_name(parse_query(value))
        if name == "position" and isinstance(value, int) and value < 0 and len(self):
            return value + len(self.table.column("tokens")[0])
        return value

    def _take(self, keep: list[int]) -> Self:
        return type(self)(self.table.take(pa.array(keep, pa.int64())), self.subject)

    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return self.table

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a pandas frame."""
        return self.table.to_pandas()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries, ready for JSON."""
        found: list[dict[str, Any]] = self.table.to_pylist()
        return found

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers that stand for all rows."""
        return {"rows": len(self)}

    def to_dict(self) -> dict[str, Any]:
        """`{"rows": […], "summary": {…}}`."""
        return {"rows": self.rows, "summary": self.summary}

    @property
    def line(self) -> str:
        """The summary in words: counts first."""
        facts = self.summary.items()
        counts = [f"{value} {name}" for name, value in facts if isinstance(value, int)]
        return ", ".join(
            [*counts, *(f"{name}: {value}" for name, value in facts if not isinstance(value, int))]
        )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The rows of a run directory; witnesses and bounds are tensors of `certificate.read_run(path)`."""
        from prooflens.certificate import read_run

        table = read_run(path).table
        if not set(cls.shown) <= set(table.column_names):
            raise QueryError(f"{path} holds no {cls.title}")
        return cls(
            table.drop_columns([name for name in table.column_names if name in ("row", "claim", "region_id")])
        )

    def _subject(self) -> Subject:
        """What the rows are about, for a run directory of them."""
        if self.subject is None:
            raise QueryError("these rows were read from a run: copy its folder")
        return self.subject

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.line}>"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.shown)
        few = self.table.slice(0, SHOWN_ROWS).select(self.shown).to_pylist()
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_cell(row[name]))}</td>' for name in self.shown)}</tr>"
            for row in few
        )
        more = f"<p>… {len(self) - len(few)} more rows</p>" if len(self) > len(few) else ""
        return f"<p>{html.escape(repr(self)[1:-1])}</p><table><tr>{head}</tr>{body}</table>{more}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Results(Frame):
    """Verdicts, one row per head × position × query.

    Of several rows together, `verdict` is the weakest (fails < unknown < estimated < holds), `bound` the smallest lower
    bound, `witness` the first there is.
    """

    title = "verdicts"
    shown = ("layer", "head", "position", "query", "verdict", "lower", "attack", "clean", "engine", "reason")

    def __init__(
        self, table: pa.Table, subject: Subject | None = None, outcomes: Sequence[Outcome] = ()
    ) -> None:
        super().__init__(table, subject)
        self.outcomes = list(outcomes)

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], subject: Subject) -> Self:
        """A table of outcomes about one subject."""
        size = len(outcomes)
        places = [claim_place(o.claim) for o in outcomes]
        columns: dict[str, Any] = subject.columns(size)
        for i, name in enumerate(("layer", "head", "position")):
            columns[name] = [place[i] for place in places]
        columns |= {
            "query": [query_name(o.claim.query) for o in outcomes],
            "eps": [subject.eps] * size,
            "engine": [o.engine for o in outcomes],
            "verdict": [o.verdict.value for o in outcomes],
            "guarantee": [_guarantee(o) for o in outcomes],
            "lower": [finite(o.lower) for o in outcomes],
            "upper": [finite(o.upper) for o in outcomes],
            "clean": [finite(o.clean) for o in outcomes],
            "attack": [finite(o.attack) for o in outcomes],
            "ms": [1e3 * o.seconds for o in outcomes],
            "reason": [o.reason for o in outcomes],
            "top": [_top(o.claim) for o in outcomes],
            "circuit": [
                str(o.claim.query) if place[0] is None and o.claim.rows else None
                for o, place in zip(outcomes, places, strict=True)
            ],
        }
        return cls(pa.table({name: columns[name] for name in VERDICTS.names}, VERDICTS), subject, outcomes)

    def _take(self, keep: list[int]) -> Self:
        outcomes = [self.outcomes[i] for i in keep] if self.outcomes else []
        return type(self)(self.table.take(pa.array(keep, pa.int64())), self.subject, outcomes)

    @property
    def verdict(self) -> Verdict:
        """The weakest verdict."""
        if not len(self):
            raise QueryError("no rows, no verdict")
        return min((Verdict(v) for v in self.table.column("verdict").to_pylist()), key=STRENGTH.index)

    @property
    def bound(self) -> float | None:
        """The smallest lower bound of the rows; None where one of them has none."""
        values = self.table.column("lower").to_pylist()
        return None if not values or None in values else float(min(values))

    @property
    def witness(self) -> Witness | None:
        """The first point that breaks one of the rows."""
        if not self.outcomes and self.counts[Verdict.FAILS.value]:
            raise QueryError(
                "rows that were read from a run come without points: `certificate.read_run(path).tensors` has them "
                "as 'row/<number>/witness'"
            )
        return next((o.witness for o in self.outcomes if o.witness is not None), None)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many rows have each verdict."""
        found = Counter(self.table.column("verdict").to_pylist())
        return {verdict.value: found[verdict.value] for verdict in Verdict}

    @property
    def keys(self) -> set[tuple[object, ...]]:
        """The keys of the rows, for `certify(skip=…)`."""
        names = ("layer", "head", "position", "query")
        return set(zip(*(self.table.column(name).to_pylist() for name in names), strict=True))

    @property
    def summary(self) -> dict[str, Any]:
        """Counts per verdict."""
        return {"rows": len(self), **self.counts}

    def save(self, path: Path | str, **configuration: object) -> None:
        """Write a run directory: rows, bounds, witnesses, fingerprints (`docs/certify.md`)."""
        from prooflens.certificate.record import save

        self._subject()
        save(self, path, configuration)

    @property
    def weakest(self) -> Self:
        """The row that is closest to failing: the weakest verdict, then the smallest bound."""
        verdicts, lowers = (self.table.column(name).to_pylist() for name in ("verdict", "lower"))

        def strength(i: int) -> tuple[int, float]:
            low = lowers[i]
            return STRENGTH.index(Verdict(verdicts[i])), -math.inf if low is None else low

        return self._take([min(range(len(self)), key=strength)])


def _guarantee(outcome: Outcome) -> str:
    """What the bounds are worth; `none` where there are no bounds, as after an attack alone."""
    bounded = outcome.verdict is Verdict.HOLDS or math.isfinite(outcome.lower) or math.isfinite(outcome.upper)
    return outcome.bounds.guarantee.value if bounded else "none"


def _top(claim: Claim) -> int | None:
    """The most attended key of the clean row, where the claim is about it."""
    asks = isinstance(claim.query, TopK | Ranking) or (
        isinstance(claim.query, Mass) and claim.query.tokens is None
    )
    terms = claim.conditions[0].functional.terms if asks and claim.conditions else ()
    return getattr(terms[0][1], "key", None) if terms else None


class Radii(Frame):
    """Radii, one row per head × position × query (× token, where one moves at a time): certified ≤ true ≤ attack."""

    title = "radii"
    shown = (
        "layer",
        "head",
        "position",
        "query",
        "token",
        "certified",
        "attack",
        "clean",
        "engine",
        "reason",
    )

    @property
    def summary(self) -> dict[str, Any]:
        """How many rows have a proved radius, and how many a broken one."""
        certified = self.table.column("certified").to_pylist()
        return {
            "rows": len(self),
            "certified": sum(value is None or value > 0 for value in certified),
            "broken": len(self) - self.table.column("attack").null_count,
        }

    def save(self, path: Path | str, **configuration: object) -> None:
        """Write a run directory of the rows (`docs/certify.md`)."""
        from prooflens.certificate.record import save_frame

        self._subject()
        save_frame(self, Path(path), configuration, "radii")
