"""Who was asked about a claim, how far each came, and what those would need that were not asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prooflens.durations import written_time

GIB = 2**30

UNASKED = "; not asked: "
WAYS_ON = "to ask on: "
"""How an explanation goes on behind how far engines came."""


class State(StrEnum):
    """What became of a stage: the engine was asked, refused, ended for want of time, or was not asked."""

    ASKED = "asked"
    REFUSED = "refused"
    LATE = "out of time"
    NOT_ASKED = "not asked"


@dataclass(frozen=True)
class Asked:
    """One stage of the work on a claim.

    Attributes:
        engine: who was, or was not, asked.
        state: what became of it.
        seconds: how long the call took, all of its claims together.
        predicted: how many seconds were predicted; None if nobody can tell.
        memory: how many bytes were predicted; None if nobody can tell.
        reached: the smallest lower bound that it gave for this claim.
        why: why it was not asked, or did not answer.
        options: the options with which it would be asked, as in `{"time": "400s"}`.
        call: the number of the call; claims that were asked together share it.
    """

    engine: str
    state: State
    seconds: float = 0.0
    predicted: float | None = None
    memory: float | None = None
    reached: float | None = None
    why: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    call: int = 0

    @property
    def tried(self) -> bool:
        """Whether the engine was at work at all."""
        return self.state in (State.ASKED, State.LATE)

    @property
    def needs(self) -> str:
        """What it would take: `about 310 s and 1.2 GiB`; empty if nobody can tell."""
        parts = [] if self.predicted is None else [written_time(self.predicted)]
        if self.memory is not None:
            parts.append(f"{self.memory / GIB:.1f} GiB")
        return f"about {' and '.join(parts)}" if parts else ""


def explanation(asked: Sequence[Asked]) -> str:
    """Say why a claim is open: who was asked and how far each came, who was not, and how to ask them.

    Args:
        asked: the stages of the work on the claim.
    """
    parts = [*_reached(asked), *_late(asked)]
    others = [item for item in asked if not item.tried]
    said = f"neither proved nor broken: {', '.join(parts) or 'no engine was asked, or none knew anything'}"
    if others:
        said += f"{UNASKED}{', '.join(_unasked(item) for item in others)}"
    ways = ways_on(asked)
    return f"{said}; {ways}" if ways else said


def _reached(asked: Sequence[Asked]) -> list[str]:
    """How far each engine came, once for each: the best of its lower bounds, the lowest point of all attacks."""
    best: dict[str, float] = {}
    for item in asked:
        if item.state is State.ASKED and item.reached is not None:
            better = min if item.engine == "attack" else max
            best[item.engine] = better(best.get(item.engine, item.reached), item.reached)
    return [
        f"{engine} {'came down to' if engine == 'attack' else 'proves at least'} {_short(value)}"
        for engine, value in best.items()
    ]


def _late(asked: Sequence[Asked]) -> list[str]:
    """The engines that ran out of time."""
    return [
        f"{item.engine} ran out of time after {written_time(item.seconds)}"
        for item in asked
        if item.state is State.LATE
    ]


def how_far(reason: str) -> str:
    """Return the part of an explanation that is about one claim: how far each engine came.

    Args:
        reason: the reason of a row; one without such a part comes back as it is.

    Example:
        >>> how_far("neither proved nor broken: attack came down to 0.1; not asked: taylor (about 9 s)")
        'neither proved nor broken: attack came down to 0.1'
    """
    return reason.partition(UNASKED)[0].partition(f"; {WAYS_ON}")[0]


def ways_on(asked: Iterable[Asked]) -> str:
    """Say which options ask those who were not asked, on the command line and in Python; empty if none does.

    Args:
        asked: the stages of the work on one claim or on many.
    """
    sets = option_sets(asked)
    if not sets:
        return ""
    lines = " or ".join(" ".join(f"--{name} {value}" for name, value in one.items()) for one in sets)
    calls = " or ".join(", ".join(f'{name}="{value}"' for name, value in one.items()) for one in sets)
    return f"{WAYS_ON}{lines} (in Python {calls})"


def option_sets(asked: Iterable[Asked]) -> list[dict[str, str]]:
    """Return the options that ask those who were not asked: the next in time and memory, then engines by name.

    Of several that want more time the one that wants least is asked next; what it leaves open says how to go on.

    Args:
        asked: the stages of the work on one claim or on many.
    """
    left = [item for item in asked if item.state is not State.ASKED and item.options]
    more: dict[str, dict[str, str]] = {}
    for item in left:
        if "engine" not in item.options:
            held = more.setdefault(item.engine, {})
            for name, value in item.options.items():
                held[name] = max(held.get(name, value), value, key=_amount)
    named = [dict(item.options) for item in left if "engine" in item.options]
    soonest = sorted(more.values(), key=lambda options: _amount(options.get("time", "0s")))[:1]
    return [*soonest, *[one for i, one in enumerate(named) if one not in named[:i]]]


def _amount(text: str) -> float:
    """Return the number at the front of an amount; all amounts of one option have one unit."""
    return float(text.rstrip("sGB")) if text.rstrip("sGB").replace(".", "", 1).isdigit() else 0.0


def _unasked(item: Asked) -> str:
    inside = "; ".join(part for part in (item.needs, item.why) if part)
    return f"{item.engine} ({inside})" if inside else item.engine


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "nothing"


def open_rows(all_asked: Sequence[Sequence[Asked]]) -> str | None:
    """Say once for many open claims who was asked and how far each came, who was not, and how to ask on.

    Args:
        all_asked: the stages of the work on each claim that is open; claims with a tie were never worked on.
    """
    worked = [asked for asked in all_asked if asked]
    if not worked:
        return None
    tried, others = [], []
    for entry in by_engine(worked):
        if entry["engine"] == "attack":
            continue
        if entry["state"] == State.ASKED:
            tried.append(
                f"{entry['engine']} ({written_time(entry['seconds'])}, {_far(worked, entry['engine'])})"
            )
        elif entry["state"] == State.LATE:
            tried.append(f"{entry['engine']} (out of time after {written_time(entry['seconds'])})")
        else:
            parts = (
                []
                if entry["predicted_seconds"] is None
                else [f"about {written_time(entry['predicted_seconds'])}"]
            )
            parts += [] if entry["predicted_gib"] is None else [f"{entry['predicted_gib']:.1f} GiB"]
            parts += [entry["why"]] if entry["why"] else []
            others.append(f"{entry['engine']} ({', '.join(parts)})")
    rows = f"{len(worked)} {'row is' if len(worked) == 1 else 'rows are'} open"
    if not tried and not others:
        said = "only an attack was asked, which proves nothing"
        return f"{rows}; {said}: `certify` with its default engine asks for proofs"
    said = f"{rows}; asked: {', '.join(tried) or 'nobody'}"
    return f"{said}; not asked: {', '.join(others)}" if others else f"{said}; nobody else could be asked"


def _far(worked: Sequence[Sequence[Asked]], engine: str) -> str:
    """How far an engine came: its best and its worst lower bound of these claims."""
    reached = [
        item.reached
        for asked in worked
        for item in asked
        if item.engine == engine and item.reached is not None and math.isfinite(item.reached)
    ]
    if not reached:
        return "no bounds"
    low, high = min(reached), max(reached)
    return f"lower bounds from {low:.3g} to {high:.3g}" if low < high else f"lower bound {low:.3g}"


def by_engine(all_asked: Iterable[Sequence[Asked]]) -> list[dict[str, Any]]:
    """Return one entry per engine and state for many claims: how many rows, seconds taken and predicted, memory.

    Args:
        all_asked: the stages of the work on each claim.
    """
    groups: dict[tuple[str, str], list[Asked]] = {}
    for asked in all_asked:
        for item in asked:
            groups.setdefault((item.engine, item.state.value), []).append(item)
    return [_entry(engine, state, items) for (engine, state), items in groups.items()]


def _entry(engine: str, state: str, items: Sequence[Asked]) -> dict[str, Any]:
    calls = list({item.call: item for item in items}.values())
    predicted = [item.predicted for item in calls if item.predicted is not None]
    memory = [item.memory for item in calls if item.memory is not None]
    reached = [item.reached for item in items if item.reached is not None and math.isfinite(item.reached)]
    return {
        "engine": engine,
        "state": state,
        "rows": len(items),
        "seconds": sum(item.seconds for item in calls),
        "predicted_seconds": sum(predicted) if predicted else None,
        "predicted_gib": max(memory) / GIB if memory else None,
        "least_lower": min(reached) if reached else None,
        "why": next((item.why for item in items if item.why), None),
    }
