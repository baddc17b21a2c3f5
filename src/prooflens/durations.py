"""Amounts of time: parse them, and write them for people."""

from __future__ import annotations

import math
import re

from prooflens.errors import EngineError

UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_time(text: str | float | None) -> float | None:
    """Return the seconds of `60s`, `2m`, `1.5h` or a number of seconds.

    Args:
        text: an amount; None stays None.

    Raises:
        EngineError: if it is no amount of time.

    Example:
        >>> parse_time("2m"), parse_time("90s"), parse_time(5)
        (120.0, 90.0, 5.0)
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z]*)\s*", str(text), re.IGNORECASE)
    seconds = float(match[1]) * UNITS.get(match[2].lower(), math.nan) if match is not None else math.nan
    if not 0.0 < seconds < math.inf:
        raise EngineError(f"{text!r} is no amount of time: write it as in 60s, 2m or 1.5h")
    return seconds


def written_time(seconds: float) -> str:
    """Return an amount of time for people, as in `0.05 s`, `90 s`, `12 min` or `3.5 h`.

    Args:
        seconds: how long; what is infinite is `very long`.

    Example:
        >>> [written_time(s) for s in (0.0123, 4.21, 104.0, 720.0, 12600.0)]
        ['0.012 s', '4.2 s', '104 s', '12 min', '3.5 h']
    """
    if not math.isfinite(seconds):
        return "very long"
    if seconds >= 2 * 3600.0:
        return f"{seconds / 3600.0:.2g} h" if seconds < 36000.0 else f"{seconds / 3600.0:.0f} h"
    if seconds >= 600.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10.0 else f"{seconds:.2g} s"


def asked_time(seconds: float) -> str:
    """Return a time as an option takes it, rounded up to two figures: `110s`.

    Args:
        seconds: at least so long.
    """
    size = 10.0 ** max(0, math.floor(math.log10(max(seconds, 1.0))) - 1)
    return f"{math.ceil(seconds / size) * size:.0f}s"
