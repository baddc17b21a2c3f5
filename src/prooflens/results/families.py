"""What `family` returns: for every claim how many members satisfy it, which do not, and what that is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from prooflens.certificate.store import RunWriter
from prooflens.families import Family
from prooflens.notebook import picture_of
from prooflens.results.deployed import FamilyDifference
from prooflens.results.record import run_header

PROVED, ENUMERATED, ESTIMATED, INCOMPLETE = "proved", "enumerated", "estimated", "incomplete"
"""Over the reals, rounding counted; every member run in float64; a sample of them; not every member run."""

FAMILY_ROWS = pa.schema(
    [
        ("model", pa.string()),
        ("model_sha256", pa.string()),
        ("query", pa.string()),
        ("what", pa.string()),
        ("word", pa.string()),
        ("unit", pa.string()),
        ("members", pa.int64()),
        ("asked", pa.int64()),
        ("held", pa.int64()),
        ("share", pa.float64()),
        ("lower", pa.float64()),
        ("upper", pa.float64()),
        ("margin", pa.float64()),
        ("slot", pa.string()),
        ("filler", pa.string()),
        ("slot2", pa.string()),
        ("filler2", pa.string()),
        ("text", pa.string()),
        ("ids", pa.list_(pa.int64())),
        ("confirmed", pa.string()),
        ("note", pa.string()),
    ]
)
"""The columns of a family's run; `docs/families.md` says what each means."""

Pairs = Mapping[tuple[str, str], NDArray[np.int64]]


@dataclass(frozen=True)
class Judged:
    """One member and its margin.

    Attributes:
        text: the prompt.
        ids: its tokens.
        fillers: what stands in every slot.
        margin: the smallest functional of the claim, in float64.
        held: whether the member satisfies the claim.
        confirmed: what ball arithmetic says of the sign: `confirmed`, `contradicted`, `open`, or empty if not asked.
    """

    text: str
    ids: tuple[int, ...]
    fillers: Mapping[str, str]
    margin: float
    held: bool
    confirmed: str = ""


@dataclass(frozen=True, eq=False)
class FamilyRow:
    """One claim over a family.

    Attributes:
        query: the claim, with roles.
        unit: what its margins are measured in.
        word: `proved`, `enumerated`, `estimated`, or `incomplete` where it was stopped at the first failure or is one
            part of several.
        members: how many members the family has.
        asked: how many were run.
        held: how many of those satisfy the claim.
        interval: of the share, by Clopper and Pearson (95 %), where it is estimated; None where it is exact.
        failures: members that do not satisfy it; the first of them if there are very many.
        worst: the members with the smallest margins.
        nearest: the members whose margins are nearest to zero, with what ball arithmetic says of them.
        by_slot: for every slot, satisfied and run members by filler.
        by_pair: the same for pairs of slots.
        histogram: width of a bin, and counts of bins from −64 to 63 widths.
        note: what was confirmed in ball arithmetic, or why nothing was; and what the deployed precision changes.
        deployed: how far margins were measured to move in the deployed precision; None if that was not asked for.
    """

    query: str
    unit: str
    word: str
    members: int
    asked: int
    held: int
    interval: tuple[float, float] | None
    failures: Sequence[Judged]
    worst: Sequence[Judged]
    nearest: Sequence[Judged]
    by_slot: Mapping[str, NDArray[np.int64]]
    by_pair: Pairs
    histogram: tuple[float, NDArray[np.int64]]
    note: str
    deployed: FamilyDifference | None = None

    @property
    def stopped(self) -> bool:
        """Whether not every member was run, nor a sample: the share of the family is then not known."""
        return self.word == INCOMPLETE

    @property
    def share(self) -> float:
        """The share of the members that were run and satisfy the claim."""
        return self.held / self.asked

    @property
    def failed(self) -> int:
        """How many of the members that were run do not satisfy the claim, exactly."""
        return self.asked - self.held

    @property
    def least(self) -> float:
        """The smallest margin."""
        return min((judged.margin for judged in self.worst), default=math.inf)

    @property
    def smallest(self) -> float:
        """The smallest absolute margin: how near to zero a member comes."""
        return min((abs(judged.margin) for judged in self.nearest), default=math.inf)

    @property
    def verdict(self) -> str:
        """`fails` if a member does, `holds` if every member was run and none does; else `estimated` or `incomplete`."""
        if self.failed:
            return "fails"
        return self.word if self.word in (ESTIMATED, INCOMPLETE) else "holds"

    def to_dict(self) -> dict[str, Any]:
        """The row as plain numbers and texts, without the tables of pairs."""
        return {
            "query": self.query,
            "word": self.word,
            "verdict": self.verdict,
            "members": self.members,
            "asked": self.asked,
            "held": self.held,
            "share": None if self.stopped else self.share,
            "interval": None if self.interval is None else list(self.interval),
            "least": _finite(self.least),
            "smallest": _finite(self.smallest),
            "note": self.note,
            **({} if self.deployed is None else {"deployed": asdict(self.deployed)}),
            "failures": [
                {"text": judged.text, "margin": judged.margin, **judged.fillers} for judged in self.failures
            ],
        }

    def __str__(self) -> str:
        share = "" if self.stopped else f"{100 * self.share:.4g} %"
        if self.interval is not None:
            share += f" [{100 * self.interval[0]:.4g}, {100 * self.interval[1]:.4g}]"
        return f"{self.query:<32} {self.word:<10} {self.held:>9} of {self.asked:<9} {share}"


@dataclass(frozen=True, eq=False)
class FamilyResults:
    """All claims over one family.

    Attributes:
        family: the prompts, as tokens of the model.
        rows: one per claim.
        source: the folder of the model's weights, if it is known.
        seconds: how long it took.
        configuration: what was asked for.
        directions: of readouts that claims name: the hook, the direction and the bias by name.
    """

    family: Family
    rows: Sequence[FamilyRow]
    source: str | None
    seconds: float
    configuration: Mapping[str, Any] = field(default_factory=dict)
    directions: Mapping[str, tuple[str, NDArray[np.float64], float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[FamilyRow]:
        return iter(self.rows)

    def __getitem__(self, number: int) -> FamilyRow:
        return self.rows[number]

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The claims as a table, for notebooks, under a picture of the first."""
        names = ("claim", "word", "held", "of", "share", "smallest margin", "nearest to 0")
        head = "".join(f"<th>{name}</th>" for name in names)
        lines = []
        for row in self.rows:
            share = "" if row.stopped else f"{100 * row.share:.4g} %"
            cells = (
                row.query,
                row.word,
                row.held,
                row.asked,
                share,
                f"{row.least:.4g}",
                f"{row.smallest:.4g}",
            )
            lines.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
        return (
            f"{picture_of(self)}<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and texts, without the tables of pairs."""
        model = self.family.model
        return {
            "model": model.name,
            "model_sha256": model.sha256,
            "family": {
                "label": self.family.label,
                "members": self.family.size,
                "lengths": self.family.lengths,
            },
            "seconds": self.seconds,
            "rows": [row.to_dict() for row in self.rows],
        }

    def shares(self, query: str | int, slot: str) -> dict[str, tuple[int, int]]:
        """For every filler of a slot: how many members satisfy a claim, and how many were run.

        Args:
            query: the claim, by its text or its number.
            slot: the slot.
        """
        row = self.rows[query] if isinstance(query, int) else next(r for r in self.rows if r.query == query)
        names = (self.family.filler(slot, i) for i in range(len(self.family.words[slot])))
        return dict(zip(names, map(tuple, row.by_slot[slot].T.tolist()), strict=True))

    @property
    def table(self) -> pa.Table:
        """One row per claim, per filler of a slot, per pair of fillers, and per member that is listed."""
        found = [entry for row in self.rows for entry in self._entries(row)]
        columns = {field.name: [entry.get(field.name) for entry in found] for field in FAMILY_ROWS}
        return pa.table(columns, schema=FAMILY_ROWS)

    def _entries(self, row: FamilyRow) -> Iterator[dict[str, Any]]:
        model = self.family.model
        about = {"model": model.name, "model_sha256": model.sha256, "query": row.query, "word": row.word}
        about["unit"] = row.unit
        low, high = row.interval or (None, None)
        yield about | {
            "what": "claim",
            "members": row.members if row.members < 2**63 else None,
            "asked": row.asked,
            "held": row.held,
            "share": None if row.stopped else row.share,
            "lower": low,
            "upper": high,
            "margin": _finite(row.least),
            "note": row.note,
        }
        for what in ("failures", "worst", "nearest"):
            for judged in getattr(row, what):
                yield about | {
                    "what": what.removesuffix("s"),
                    "held": int(judged.held),
                    "margin": _finite(judged.margin),
                    "text": judged.text,
                    "ids": list(judged.ids),
                    "confirmed": judged.confirmed or None,
                }
        for slot, table in row.by_slot.items():
            for number in np.flatnonzero(table[1]).tolist():
                held, asked = (int(side[number]) for side in table)
                yield (
                    about
                    | _counted("filler", held, asked)
                    | {
                        "slot": slot,
                        "filler": self.family.filler(slot, number),
                    }
                )
        for (a, b), table in row.by_pair.items():
            for i, j in np.argwhere(table[0] < table[1]).tolist():
                held, asked = (int(side[i, j]) for side in table)
                yield (
                    about
                    | _counted("pair", held, asked)
                    | {
                        "slot": a,
                        "filler": self.family.filler(a, i),
                        "slot2": b,
                        "filler2": self.family.filler(b, j),
                    }
                )

    def save(self, path: Path | str) -> None:
        """Write a run directory, which `prooflens query`, `check` and `report` read.

        Args:
            path: the directory; it must not hold a run yet.
        """
        held = family_header("family", self.family, self.source, self.configuration, self.seconds)
        if self.directions:
            held["reads"] = {name: hook for name, (hook, *_) in self.directions.items()}
        writer = RunWriter.create(Path(path), held)
        tensors = shape_tensors(self.family)
        for name, (_, weight, bias) in self.directions.items():
            tensors |= {f"read/{name}/weight": weight, f"read/{name}/bias": np.array([bias])}
        for number, row in enumerate(self.rows):
            tensors[f"claim/{number}/histogram"] = row.histogram[1]
            tensors[f"claim/{number}/width"] = np.array([row.histogram[0]])
            for slot, counts in row.by_slot.items():
                tensors[f"claim/{number}/slot/{slot}"] = counts
            for (a, b), counts in row.by_pair.items():
                tensors[f"claim/{number}/pair/{a}/{b}"] = counts
        writer.append(self.table, tensors)
        writer.finish(counts={row.query: row.held for row in self.rows})


def family_header(
    kind: str, family: Family, source: str | None, configuration: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """Return the contents of `run.json` of a run about a family.

    Args:
        kind: what the rows are.
        family: the prompts.
        source: the folder of the model's weights, if it is known.
        configuration: what was asked for.
        seconds: how long it took.
    """
    model = family.model
    held = run_header(kind, {"name": model.name, "sha256": model.sha256, "source": source}, configuration)
    return held | {
        "tokens": [],
        "text": None,
        "region": {"label": family.label, "eps": None},
        "family": family.to_dict(),
        "seconds": seconds,
    }


def shape_tensors(family: Family) -> dict[str, Any]:
    """Return the tokens of all fillers, shape by shape, as a run keeps them.

    Args:
        family: the prompts.
    """
    tensors: dict[str, Any] = {}
    for number, shape in enumerate(family.shapes):
        for slot in shape.slots:
            tensors[f"shape/{number}/{slot}/fillers"] = shape.fillers[slot]
            for place, tokens in enumerate(shape.tokens[slot]):
                tensors[f"shape/{number}/{slot}/tokens/{place}"] = tokens
    return tensors


def _counted(what: str, held: int, asked: int) -> dict[str, Any]:
    return {"what": what, "held": held, "asked": asked, "share": held / asked}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
