"""Queries about what parts and layers say of the outputs: direct logit attribution, and the logit lens.

`verdicts.sites` binds them: an attribution is a readout of the part's hook (`models.attribution`), a lens is a claim
about the outputs of the model cut after a block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prooflens.errors import QueryError
from prooflens.queries.base import Claim, Query, Setting
from prooflens.queries.circuit import Argmax, Beats
from prooflens.queries.rows import Role
from prooflens.queries.sites import OutputLevel, SiteQuery, inside_alone, level_text


@dataclass(frozen=True)
class AttributionQuery(SiteQuery):
    """Claim something about what a part adds directly to a difference of logits, or ask for its range.

    The last norm is frozen at its scale on the prompt or, with `live`, has the scale of every input. Both scales are
    positive, so the signs are the same; of a live one only a sign can be asked for.

    Attributes:
        place: the part: a head `a9.h6`, an attention `a9` or a network `m3`.
        winner: the output that counts positively: its index, or the slot of a template whose token it is.
        loser: the one that counts negatively, likewise.
        live: whether the norm is that of every input.

    Example:
        >>> str(AttributionQuery.about("9.6", 3, 5, (">", 0.0), live=False))
        'dla 9.6 logit3-logit5>0.0'
    """

    winner: int | Role = 0
    loser: int | Role = 0
    live: bool = False

    @classmethod
    def about(
        cls, part: str, winner: int | Role, loser: int | Role, level: tuple[str | None, float], live: bool
    ) -> AttributionQuery:
        """Make a query about a part.

        Args:
            part: `9.6` or `a9.h6` for a head, `a9` for an attention, `m3` for a network.
            winner: the output that counts positively.
            loser: the one that counts negatively.
            level: the comparison and its threshold; the comparison is None to ask for the range.
            live: whether the norm is that of every input.
        """
        head = re.fullmatch(r"(\d+)\.(\d+)", part)
        place = f"a{head[1]}.h{head[2]}" if head else part
        return cls("dla", place, "", None, *level, -1, winner, loser, live)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.live and (self.comparison is None or self.threshold != 0.0):
            raise QueryError(
                "with a live norm only a sign can be proved: compare with 0, or ask for 'dla', the norm frozen"
            )

    @property
    def readout(self) -> str:
        """What is read, without the comparison; the frozen and the live one are one readout."""
        head = re.fullmatch(r"a(\d+)\.h(\d+)", str(self.place))
        part = f"{head[1]}.{head[2]}" if head else self.place
        sides = (f"{{{side}}}" if isinstance(side, Role) else str(side) for side in (self.winner, self.loser))
        return f"dla {part} {'logit{}-logit{}'.format(*sides)}"

    def __str__(self) -> str:
        name = self.readout.replace("dla ", "dla-live ", 1) if self.live else self.readout
        return name + level_text(self.comparison, self.threshold)


@dataclass(frozen=True)
class SiteComparison(SiteQuery):
    """Claim that one readout stays above another, of the same hook and token or of others.

    Attributes:
        first: the readout that should be larger, without a threshold.
        second: the one that should be smaller, likewise.

    Example:
        >>> first, second = (SiteQuery("neuron", "5", "", n, position=-1) for n in (10, 11))
        >>> str(SiteComparison.of(first, ">", second))
        'neuron 5.10@-1>neuron 5.11@-1'
    """

    first: SiteQuery | None = None
    second: SiteQuery | None = None

    @classmethod
    def of(cls, first: Query, comparison: str, second: Query) -> SiteComparison:
        """Compare two readouts.

        Args:
            first: a readout without a threshold.
            comparison: `>`, `>=`, `<` or `<=`.
            second: another one.

        Raises:
            QueryError: if one of them is no readout, or has a threshold of its own.
        """
        for side in (first, second):
            if not isinstance(side, SiteQuery) or side.comparison is not None:
                raise QueryError(f"{side} is no readout to compare: write 'neuron 5.10@-1>neuron 5.11@-1'")
        assert isinstance(first, SiteQuery)
        assert isinstance(second, SiteQuery)
        return cls("compare", None, "", None, comparison, 0.0, first.position, first, second)

    @property
    def sides(self) -> tuple[SiteQuery, SiteQuery]:
        """Both readouts."""
        assert self.first is not None
        assert self.second is not None
        return self.first, self.second

    def __str__(self) -> str:
        first, second = self.sides
        return f"{first}{self.comparison}{second}"


@dataclass(frozen=True)
class Lens(Query):
    """Claim something about what the model's head says of the stream behind a block (the logit lens).

    Final norm, pooling and head, which follow the last block, follow this one.

    Attributes:
        layer: the block, from 0.
        query: what is claimed of the outputs there: `Argmax`, `Beats` or `OutputLevel`.

    Example:
        >>> str(Lens(12, Beats(3, 5)))
        'lens 12 logit3>logit5'
    """

    layer: int
    query: Query

    def __post_init__(self) -> None:
        if not isinstance(self.query, Argmax | Beats | OutputLevel):
            raise QueryError(
                f"a lens reads outputs, and {self.query} is about something else: write 'lens 12 argmax'"
            )

    def __str__(self) -> str:
        return f"lens {self.layer} {self.query}"

    @property
    def unit(self) -> str:
        """What the claim about outputs is measured in."""
        return self.query.unit

    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Refuse: a lens is bound to the model that is cut after its block (`verdicts.sites`).

        Args:
            setting: not used.
            heads: not used.
        """
        raise inside_alone(self)


InsideQuery = SiteQuery | Lens
"""Queries that are bound to a model of their own: one that ends at a hook, or is cut after a block."""
