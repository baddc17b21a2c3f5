"""What `circuit` returns: the parts of a circuit, its whole, and its weakest link."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from prooflens.results.outcome import Verdict
from prooflens.results.tables import Results, row_name


class CircuitResults(Results):
    """The parts of a circuit, one row each, and last the circuit as a whole."""

    @property
    def whole(self) -> Results:
        """The row of the circuit itself."""
        return self._split(True)

    @property
    def parts(self) -> Results:
        """The rows of its parts."""
        return self._split(False)

    def _split(self, whole: bool) -> Results:
        names = self.table.column("circuit").to_pylist()
        kept = [i for i, name in enumerate(names) if (name is not None) is whole]
        outcomes = [self.outcomes[i] for i in kept] if self.outcomes else []
        return Results(self.table.take(pa.array(kept, pa.int64())), self.subject, outcomes)

    @property
    def verdict(self) -> Verdict:
        """The verdict about the circuit. A weighted sum can hold even if some of its parts do not."""
        return (self.whole if len(self.whole) else self.parts).verdict

    @property
    def weakest_link(self) -> Results:
        """The part that is closest to failing."""
        return self.parts.weakest

    @property
    def summary(self) -> dict[str, Any]:
        """The verdict, the weakest link by name, and counts of the parts."""
        name = row_name(self.weakest_link.rows[0])
        return {"rows": len(self), "circuit": self.verdict.value, "weakest": name, **self.counts}
