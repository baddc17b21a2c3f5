"""The table that `radius` returns, and what is kept so that somebody else can check it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pyarrow as pa

from prooflens.queries import Claim
from prooflens.results.asked import WAYS_ON
from prooflens.results.deployed import said_of_radii
from prooflens.results.frame import Frame, Subject
from prooflens.results.tables import NAMES

if TYPE_CHECKING:
    from prooflens.engines.attack import Witness

RADII = pa.schema(
    [
        *NAMES,
        ("token", pa.int32()),
        ("certified", pa.float64()),
        ("of_nearest", pa.float64()),
        ("of_length", pa.float64()),
        ("attack", pa.float64()),
        ("clean", pa.float64()),
        ("engine", pa.string()),
        ("ms", pa.float64()),
        ("reason", pa.string()),
        ("unit", pa.string()),
    ]
)
"""The columns of a radius: certified ≤ true ≤ attack; `of_nearest` and `of_length` are the certified one in tokens."""


TIME_ENDED = "the time ended before the search did"
"""What the reason of a row says whose search had no time for its end."""


UNASKED_SOMEWHERE = "; not asked at some ε: "
"""How a reason goes on that names engines for which there was no time or memory at an ε of the search."""


class RadiusEvidence(NamedTuple):
    """What a radius is about.

    Attributes:
        claim: what is claimed on the ball.
        witness: a point that breaks it, as near as one was found.
    """

    claim: Claim
    witness: Witness | None


class Radii(Frame):
    """Radii, one row per head × position × query (× token, if one moves at a time): certified ≤ true ≤ attack.

    A `certified` of 0 means that nothing is proved at the smallest ε, an `attack` of None that nothing was broken.
    `of_nearest` is the certified radius as a share of the distance to the nearest other token, `of_length` as a share
    of the length (ℓ2) of the shortest token that moves, when all of its coordinates move by that radius.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> options = dict(between=(0.01, 0.02), tolerance=1.0, budget="8/1/2")
        >>> rad = pl.radius(model, model.example(), "0.1:top1@-1", **options)
        >>> rad.certified, rad.attack is None
        (0.02, True)
    """

    title = "radii"
    later = ("of_nearest", "of_length")
    shown = (
        "layer",
        "head",
        "position",
        "query",
        "token",
        "certified",
        "of_nearest",
        "of_length",
        "attack",
        "clean",
        "unit",
        "engine",
        "reason",
    )

    def __init__(
        self, table: pa.Table, subject: Subject | None = None, evidence: Sequence[RadiusEvidence] = ()
    ) -> None:
        super().__init__(table, subject)
        self.evidence = tuple(evidence)
        """The claim and the breaking point of every row; empty for rows that were read from a run directory."""

    def _take(self, keep: list[int]) -> Self:
        evidence = [self.evidence[i] for i in keep] if self.evidence else []
        return type(self)(self.table.take(pa.array(keep, pa.int64())), self.subject, evidence)

    @property
    def summary(self) -> dict[str, Any]:
        """How many rows have a proved radius, and how many a broken one."""
        certified = self.table.column("certified").to_pylist()
        return {
            "rows": len(self),
            "certified": sum(value is None or value > 0 for value in certified),
            "broken": len(self) - self.table.column("attack").null_count,
        }

    @property
    def unfinished(self) -> int:
        """How many rows the time ended for before their search did; what they say is sound."""
        return sum(TIME_ENDED in reason for reason in self.to_arrow().column("reason").to_pylist())

    @property
    def ways_on(self) -> list[str]:
        """Who was not asked at some ε for want of time or memory, and the options that ask on; each said once."""
        tails = [
            reason.partition(UNASKED_SOMEWHERE)[2] for reason in self.to_arrow().column("reason").to_pylist()
        ]
        return list(dict.fromkeys(tail for tail in tails if WAYS_ON in tail))

    @property
    def precision(self) -> str | None:
        """How far margins were measured to move in the deployed precision on certified balls; None if not asked."""
        return said_of_radii(self.table)

    @property
    def effort(self) -> dict[str, Any]:
        """What was measured beside the radii, ready for JSON: `precision` where it was asked for."""
        return {} if self.precision is None else {"precision": self.precision}

    def save(self, path: Path | str, **configuration: object) -> None:
        """Write a run directory with the rows (`docs/certify.md`).

        Args:
            path: the directory; it must not hold a run yet.
            configuration: what was asked for, kept in `run.json`.
        """
        from prooflens.results.record import save_radii

        self._subject()
        save_radii(self, Path(path), configuration)
