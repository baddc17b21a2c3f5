"""What `features` returns: the active features of a dictionary, and those nearest to becoming active."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import pyarrow as pa

from prooflens.queries import SiteQuery
from prooflens.results.frame import Subject
from prooflens.results.outcome import Outcome
from prooflens.results.tables import Results


class FeatureResults(Results):
    """One row per feature of a dictionary, the farthest from its threshold first; then those that are off.

    A feature that is active on the prompt is claimed to stay active on the whole region, one that is off to stay off.
    `clean` is its distance from the threshold, `lower` and `upper` enclose that distance on the region. The columns
    `feature` and `active` say which feature it is, and what it is on the prompt.
    """

    title = "features"
    shown = ("feature", "active", "verdict", "clean", "lower", "upper", "attack", "engine", "reason")
    size: int = 0
    """How many features the dictionary has."""

    @classmethod
    def about(cls, outcomes: Sequence[Outcome], subject: Subject, size: int) -> Self:
        """Make the rows of claims about features.

        Args:
            outcomes: how each claim ended.
            subject: the model that ends at the dictionary's hook, the prompt and the region.
            size: how many features the dictionary has.
        """
        made = cls.of(outcomes, subject)
        asked = [outcome.claim.query for outcome in outcomes]
        numbers = [query.index if isinstance(query, SiteQuery) else None for query in asked]
        active = [isinstance(query, SiteQuery) and query.comparison == ">" for query in asked]
        made.table = made.table.append_column("feature", pa.array(numbers, pa.int32())).append_column(
            "active", pa.array(active, pa.bool_())
        )
        made.size = size
        return made

    @property
    def queries(self) -> list[str]:
        """The claims, as `radius`, `way` and `family` take them."""
        return [str(query) for query in self.table.column("query").to_pylist()]

    @property
    def summary(self) -> dict[str, Any]:
        """How many features are active, how many of them are proved to stay so, and of how many that are off."""
        pairs = list(
            zip(*(self.table.column(name).to_pylist() for name in ("active", "verdict")), strict=True)
        )
        active = [verdict for on, verdict in pairs if on]
        off = [verdict for on, verdict in pairs if not on]
        return {
            "rows": len(self),
            "active": len(active),
            "stay active": active.count("holds"),
            "off": len(off),
            "stay off": off.count("holds"),
            **self.counts,
        }
