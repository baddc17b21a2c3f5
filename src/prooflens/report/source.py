"""What a report is made from, read one way: results in memory, or a run directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from prooflens.errors import ProoflensError, RunError
from prooflens.json_files import read_json

if TYPE_CHECKING:
    from prooflens.results.frame import Frame

Margins = tuple[dict[str, Any], list[float], list[float]]
"""A claim as `docs/certify.md` describes it, and the lower and upper bounds of its functionals."""

PROVED = ("proved", "witness")
"""The guarantees of rows whose bounds are proved: of those that fail, the witness comes first."""

SEARCHED = "balls, their radius searched"


@dataclass(frozen=True, eq=False)
class RowSource:
    """Rows of one run, with what the header of a report says about them."""

    name: str
    kind: str
    table: pa.Table
    model: str
    model_sha256: str
    model_source: str | None
    text: str | None
    tokens: tuple[str, ...]
    region: str
    command: str | None
    held: Any = field(default=None, repr=False)
    """The tensors of a run, or the outcomes of results."""
    pixels: Any = field(default=None, repr=False)
    """The image of a region in memory, bytes [C, H, W]."""
    eps_in_words: str | None = None
    """What the radius of the ball is worth in tokens, where the run says so."""
    advice: str | None = None
    """Why rows are open: who was asked about them, and who was not."""
    precision: str | None = None
    """How proved margins compare with what the deployed precision was measured to change."""

    @property
    def image(self) -> Any | None:
        """The image that the tokens were made of, bytes [C, H, W], where the region has one."""
        if self.pixels is not None or not isinstance(self.held, Mapping):
            return self.pixels
        return self.held.get("image")

    @property
    def circuit(self) -> bool:
        """Whether the rows are the parts of a circuit and the circuit itself."""
        names = self.table.column_names
        return "circuit" in names and self.table.column("circuit").null_count < self.table.num_rows

    @property
    def eps(self) -> float | None:
        """The radius of the ball, where the rows are about one."""
        found = (
            self.table.column("eps")[0].as_py()
            if "eps" in self.table.column_names and len(self.table)
            else None
        )
        return None if found is None else float(found)

    def distinct(self, column: str) -> list[str]:
        """The values of a column of texts.

        Args:
            column: the name of the column.
        """
        return [str(v) for v in pc.unique(self.table.column(column)).to_pylist() if v is not None]

    def bounds(self, rows: list[int]) -> Iterator[Margins]:
        """The claims of some rows with the bounds of their functionals.

        Args:
            rows: the numbers of the rows.
        """
        if isinstance(self.held, list):
            from prooflens.results.record import describe

            for i in rows:
                bounds = self.held[i].bounds
                yield json.loads(describe(self.held[i].claim)), bounds.lower.tolist(), bounds.upper.tolist()
            return
        claims = self.table.column("claim").take(pa.array(rows, pa.int64())).to_pylist()
        numbers = self.table.column("row").take(pa.array(rows, pa.int64())).to_pylist()
        for claim, number in zip(claims, numbers, strict=True):
            low, high = (self.held[f"row/{number}/{side}"].tolist() for side in ("lower", "upper"))
            yield json.loads(claim), low, high

    def nearest_tokens(self) -> Sequence[tuple[float, str]] | None:
        """Per position the ℓ∞ distance, after embedding, to the nearest other token of the vocabulary, and its text.

        The radii of a ball are measured in this space, so the numbers compare. None for models without text, or where
        the weights are not at hand.
        """
        if self.text is None:
            return None
        from prooflens.models import load
        from prooflens.models.nearest import nearest_tokens
        from prooflens.verdicts.question import source_of

        # A run names its model; nothing is fetched because a file says so.
        folder = source_of(self.model_source or self.model)
        if folder is None:
            return None
        try:
            model = load(folder)
            prompt = model.prompt(self.text)
        except ProoflensError:
            return None
        if prompt.ids is None or model.sha256 != self.model_sha256 or prompt.tokens != self.tokens:
            return None
        return nearest_tokens(model, prompt.ids, range(len(prompt)), prompt.x, other=True)


def read_source(item: Frame | Path | str) -> RowSource:
    """Results, radii, or the path of a run.

    Args:
        item: any of these.
    """
    if isinstance(item, str | Path):
        return _from_run(Path(item))
    from prooflens.results import Radii, Results
    from prooflens.results.frame import Frame
    from prooflens.results.record import region_tensors

    if not isinstance(item, Frame):
        raise RunError(
            f"a report is made from results, radii and paths of runs, not from a {type(item).__name__}"
        )
    subject = item.subject
    if isinstance(item, Results) and item.by_subject:
        raise RunError(
            "these rows are about several prompts or hooks: give each of `.by_subject` a report of its own"
        )
    if subject is None:
        raise RunError("these rows were read from a run: give the run's path to the report")
    kind = "radii" if isinstance(item, Radii) else "verdicts"
    return RowSource(
        f"{type(item).__name__} about {subject.model}, {subject.text or 'an input'!r}",
        kind,
        item.table,
        subject.model,
        subject.model_sha256,
        subject.source,
        subject.text,
        subject.tokens,
        SEARCHED if kind == "radii" else subject.region.label,
        None,
        item.outcomes if isinstance(item, Results) else None,
        region_tensors(subject.region, "region").get("image"),
        advice=item.advice if isinstance(item, Results) else None,
        precision=item.precision if isinstance(item, Results | Radii) else None,
    )


def _from_run(path: Path) -> RowSource:
    from prooflens.certificate import read_run

    run = read_run(path)
    info = run.info
    if info["kind"] == "family":
        raise RunError(f"{path} is about a family of prompts, which has a report of its own: give it alone")
    if info["kind"] == "vocabulary":
        raise RunError(f"{path} counts over all prompts, which has a report of its own: give it alone")
    if info["kind"] == "family effects":
        raise RunError(f"{path} is about effects over a family: give only such runs to one report")
    model = info["model"]
    kind = "radii" if info["kind"] == "radii" else "verdicts"
    region = SEARCHED if kind == "radii" else (info.get("region") or {}).get("label") or "region"
    return RowSource(
        str(path),
        kind,
        with_badges(run.rows, path),
        model["name"],
        model["sha256"],
        model.get("source"),
        info.get("text"),
        tuple(info["tokens"]),
        region,
        (info.get("configuration") or {}).get("command"),
        run.tensors,
        eps_in_words=_text((info.get("configuration") or {}).get("eps_in_words")),
        advice=_text((info.get("effort") or {}).get("advice")),
        precision=_text((info.get("effort") or {}).get("precision")),
    )


def with_badges(rows: pa.Table, path: Path) -> pa.Table:
    """The rows of a run with what `prooflens check` last said of each, where its check.json is about this very run.

    Args:
        rows: the rows.
        path: the run directory.
    """
    try:
        found = read_json(path / "check.json")
        same = found["run_sha256"] == hashlib.sha256((path / "run.json").read_bytes()).hexdigest()
        words = {int(row): str(word) for row, (word, _) in found["rows"].items()} if same else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        words = {}
    if not words or "row" not in rows.column_names:
        return rows
    badges = [words.get(row) for row in rows.column("row").to_pylist()]
    return rows.append_column("checked", pa.array(badges, pa.string()))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
