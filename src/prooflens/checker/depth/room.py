"""How much a walk may hold: shares of the machine's memory, so that a laptop checks what fits into it."""

from __future__ import annotations

import os

UNKNOWN = 2**33
"""Bytes that are taken to be there where the system does not say."""


def numbers(share: float) -> int:
    """How many float64 numbers a share of this machine's memory holds.

    Args:
        share: between 0 and 1.
    """
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        size = UNKNOWN
    return int(share * (size if size > 0 else UNKNOWN)) // 8
