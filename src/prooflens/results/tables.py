"""The table that `certify` returns. It behaves in notebooks and never calls an estimate a proof."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from prooflens.engines.bounds import Guarantee
from prooflens.errors import QueryError
from prooflens.queries import Circuit, Claim, Mass, Ranking, RowQuery, TopK
from prooflens.results.asked import Asked, by_engine, open_rows, option_sets
from prooflens.results.deployed import said_of_precision, with_differences
from prooflens.results.frame import Frame, Subject, query_name
from prooflens.results.outcome import STRENGTH, Outcome, Verdict

if TYPE_CHECKING:
    from prooflens.engines.attack import Witness

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
        ("unit", pa.string()),
    ]
)
"""The columns of a verdict; `docs/certify.md` says what each means."""


def claim_key(claim: Claim) -> tuple[object, ...]:
    """Return what identifies a claim within one model, prompt and region: layer, head, position, query.

    Args:
        claim: what is claimed.
    """
    return (*claim_place(claim), query_name(claim.query))


def claim_place(claim: Claim) -> tuple[int | None, int | None, int | None]:
    """Return layer, head and position of a claim about one row of attention, else three times None.

    Args:
        claim: what is claimed.
    """
    if isinstance(claim.query, RowQuery) and len(claim.rows) == 1:
        row = claim.rows[0]
        return row.layer, row.head, row.position
    return None, None, None


def finite(value: float | None) -> float | None:
    """Return the number as JSON and Parquet keep it: what is not finite becomes null.

    Args:
        value: any number; None stays None.
    """
    return value if value is not None and math.isfinite(value) else None


WITNESS = "witness"
GUARANTEES = frozenset({*(guarantee.value for guarantee in Guarantee), WITNESS, "none"})
"""What a row rests on: bounds that are proved or estimated, a point that breaks it, or nothing."""


class Results(Frame):
    """Verdicts, one row per head × position × query.

    For several rows together, `verdict` is the weakest (fails < unknown < estimated < holds), `bound` is the smallest
    lower bound, and `witness` is the first that there is. Which row is the weakest is printed with them, and
    `weakest` is that row.

    Attributes:
        table: the rows as an Arrow table, with the columns of `VERDICTS`.
        subject: what the rows are about; None for rows that were read from a run directory.
        outcomes: bounds and witness behind each row; empty for rows that were read from a run directory.
        by_subject: the tables that these rows were joined from, each about one model and prompt; else empty.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> res = pl.certify(model, model.example(), pl.Ball(0.02), "0.1", positions=[-1])
        >>> res
        <Results: 1 row, 1 holds, 0 fails, 0 unknown, 0 estimated>
        >>> res["0.1"].engine, res.bound > 0
        ('layer0', True)
    """

    title = "verdicts"
    words = MappingProxyType(
        {"verdict": frozenset(verdict.value for verdict in Verdict), "guarantee": GUARANTEES}
    )
    shown: ClassVar[tuple[str, ...]] = (
        "layer",
        "head",
        "position",
        "query",
        "top",
        "verdict",
        "lower",
        "attack",
        "clean",
        "unit",
        "engine",
        "reason",
    )

    def __init__(
        self, table: pa.Table, subject: Subject | None = None, outcomes: Sequence[Outcome] = ()
    ) -> None:
        super().__init__(table, subject)
        self.outcomes = list(outcomes)
        self.by_subject: tuple[Self, ...] = ()

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], subject: Subject) -> Self:
        """Make a table of outcomes about one subject.

        Args:
            outcomes: how each claim ended, in the order of the rows.
            subject: the model, the prompt and the region.
        """
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
            "circuit": [str(o.claim.query) if isinstance(o.claim.query, Circuit) else None for o in outcomes],
            "unit": [o.claim.query.unit for o in outcomes],
        }
        table = pa.table({name: columns[name] for name in VERDICTS.names}, VERDICTS)
        return cls(with_differences(table, [o.deployed for o in outcomes]), subject, outcomes)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of several tables, about several subjects, in one; runs and reports are about one each.

        Args:
            parts: the tables, at least one.
        """
        outcomes = [outcome for part in parts for outcome in part.outcomes]
        made = cls(pa.concat_tables([part.table for part in parts]), None, outcomes)
        made.by_subject = tuple(parts)
        return made

    def _take(self, keep: list[int]) -> Self:
        outcomes = [self.outcomes[i] for i in keep] if self.outcomes else []
        taken = type(self)(self.table.take(pa.array(keep, pa.int64())), self.subject, outcomes)
        taken.by_subject = self.by_subject
        return taken

    @property
    def verdict(self) -> Verdict:
        """The weakest verdict of all rows."""
        if not len(self):
            raise QueryError("no rows, no verdict")
        return min((Verdict(v) for v in self.table.column("verdict").to_pylist()), key=STRENGTH.index)

    @property
    def bound(self) -> float | None:
        """The smallest lower bound of all rows; None if a row has no bound."""
        values = self.table.column("lower").to_pylist()
        return None if not values or None in values else float(min(values))

    @property
    def witness(self) -> Witness | None:
        """The first point that breaks one of the rows; None if no row fails."""
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
        """What identifies each row, for `certify(skip=…)`."""
        names = ("layer", "head", "position", "query")
        return set(zip(*(self.table.column(name).to_pylist() for name in names), strict=True))

    @property
    def summary(self) -> dict[str, Any]:
        """The number of rows with each verdict."""
        return {"rows": len(self), **self.counts}

    @property
    def engines(self) -> list[dict[str, Any]]:
        """Who was asked and who was not, one entry per engine: rows, seconds taken and predicted, memory, why not.

        Empty for rows that were read from a run directory: its `run.json` has them.
        """
        return by_engine(o.asked for o in self.outcomes)

    @property
    def precision(self) -> str | None:
        """How proved margins compare with what the deployed precision was measured to change; None if not asked."""
        return said_of_precision(self.table)

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The columns that tables show: with the upper bound where the range of a value is asked for."""
        names = super().shown_names
        if "upper" in names or not any(o.claim.wants_range for o in self.outcomes):
            return names
        place = names.index("lower") + 1
        return (*names[:place], "upper", *names[place:])

    @property
    def advice(self) -> str | None:
        """Why rows are unknown, once for all of them, and which options ask on; None if no row is."""
        return open_rows(self._open)

    @property
    def ways_on(self) -> list[dict[str, str]]:
        """Options that ask those who were not asked about unknown rows, such as `{"time": "400s"}`, best first."""
        return option_sets(item for asked in self._open for item in asked)

    @property
    def _open(self) -> list[tuple[Asked, ...]]:
        return [o.asked for o in self.outcomes if o.verdict is Verdict.UNKNOWN]

    @property
    def effort(self) -> dict[str, Any]:
        """What was done and what was not, ready for JSON: `engines`, `advice`, `ways_on`, and `precision` if asked."""
        measured = {} if self.precision is None else {"precision": self.precision}
        return {"engines": self.engines, "advice": self.advice, "ways_on": self.ways_on, **measured}

    def save(self, path: Path | str, **configuration: object) -> None:
        """Write a run directory with rows, bounds, witnesses and fingerprints (`docs/certify.md`).

        Args:
            path: the directory; it must not hold a run yet.
            configuration: what was asked for, kept in `run.json`.
        """
        from prooflens.results.record import save

        if self.by_subject:
            raise QueryError("these rows are about several prompts or hooks: save each of `.by_subject`")
        self._subject()
        save(self, path, configuration)

    def __repr__(self) -> str:
        """The counts, and of several rows the weakest by name: its verdict is that of all of them."""
        if len(self) < 2 or "weakest" in self.summary:
            return super().__repr__()
        row = self.weakest
        return f"<{type(self).__name__}: {self.line}; weakest: {row_name(row.rows[0])} {row.verdict}>"

    @property
    def weakest(self) -> Self:
        """The row that is closest to failing: the weakest verdict, then the smallest bound."""
        verdicts, lowers = (self.table.column(name).to_pylist() for name in ("verdict", "lower"))

        def strength(i: int) -> tuple[int, float]:
            low = lowers[i]
            return STRENGTH.index(Verdict(verdicts[i])), -math.inf if low is None else low

        return self._take([min(range(len(self)), key=strength)])


def row_name(row: Mapping[str, Any]) -> str:
    """Return the name of a row, as in `0.4:top1@3`; of outputs and circuits the query alone.

    Args:
        row: a row with the columns layer, head, position and query.
    """
    return (
        str(row["query"])
        if row["layer"] is None
        else f"{row['layer']}.{row['head']}:{row['query']}@{row['position']}"
    )


def _guarantee(outcome: Outcome) -> str:
    """Return what the bounds are worth, or `none` if there are no bounds, as after an attack alone.

    A row that fails rests on its witness; bounds beside that word are proved ones.
    """
    if outcome.verdict is Verdict.FAILS and outcome.bounds.guarantee is Guarantee.PROVED:
        return WITNESS
    bounded = outcome.verdict is Verdict.HOLDS or math.isfinite(outcome.lower) or math.isfinite(outcome.upper)
    return outcome.bounds.guarantee.value if bounded else "none"


def _top(claim: Claim) -> int | None:
    """Return the most attended key of the clean row, if the claim is about it."""
    asks = isinstance(claim.query, TopK | Ranking) or (
        isinstance(claim.query, Mass) and claim.query.tokens is None
    )
    terms = claim.conditions[0].functional.terms if asks and claim.conditions else ()
    return getattr(terms[0][1], "key", None) if terms else None
