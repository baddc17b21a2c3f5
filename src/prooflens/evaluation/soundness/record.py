"""What a soundness run tried, per family, engine and query, and what it found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Violation:
    """A proved statement that is false. There must be none."""

    seed: int
    family: str
    engine: str
    what: str


@dataclass
class SoundnessReport:
    """What a run tried and what it found."""

    cases: Counter[str] = field(default_factory=Counter)
    """Per kind of case."""
    proved: int = 0
    attacked: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Proved bounds that were attacked, per family, engine and query."""
    planted: Counter[str] = field(default_factory=Counter)
    """False claims with a hidden counterexample that an engine was asked about."""
    tightest: dict[str, float] = field(default_factory=dict)
    """Per engine, the least slack of a bound over what was attained, relative to the range that was."""
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def bounds(self) -> int:
        """All proved bounds that were attacked."""
        return self.attacked.total()

    def note_slack(self, engine: str, slack: float) -> None:
        """Keep the least one."""
        self.tightest[engine] = min(self.tightest.get(engine, slack), slack)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "cases": dict(self.cases),
            "bounds_attacked": self.bounds,
            "claims_proved": self.proved,
            "planted": dict(self.planted),
            "violations": [vars(v) for v in self.violations],
            "tightest_relative_gap": self.tightest,
            "attacked": [
                {"family": family, "engine": engine, "query": query, "bounds": count}
                for (family, engine, query), count in sorted(self.attacked.items())
            ],
            "seconds": self.seconds,
        }
