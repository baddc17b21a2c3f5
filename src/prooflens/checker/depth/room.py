"""How much a walk may hold: shares of the memory that it is given, so that a laptop checks what fits into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

UNKNOWN = 2**33
"""Bytes that are taken to be there where the system does not say."""
MEMINFO = Path("/proc/meminfo")
"""Where Linux says how much memory is free."""
_GIVEN: ContextVar[int | None] = ContextVar("given", default=None)


@contextmanager
def within(size: int | None) -> Iterator[None]:
    """Give all walks so much memory for as long as this lasts.

    Args:
        size: bytes; None for what is free now.
    """
    token = _GIVEN.set(free() if size is None else size)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def free() -> int:
    """Return the bytes that are free; where the system does not say, those that the machine has."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return _whole()


def numbers(share: float) -> int:
    """How many float64 numbers a share of the given memory holds: of the machine's where none was given.

    Args:
        share: between 0 and 1.
    """
    given = _GIVEN.get()
    return int(share * (_whole() if given is None else given)) // 8


def _whole() -> int:
    """The bytes that the machine has."""
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        size = UNKNOWN
    return size if size > 0 else UNKNOWN
