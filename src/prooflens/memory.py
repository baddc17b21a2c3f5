"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from prooflens.errors import EngineError

UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def parse_memory(text: str | None) -> int | None:
    """Bytes of `8GB`, `512MiB` or `1e9`."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS or not float(match[1]) > 0:
        raise EngineError(f"{text!r} is no amount of memory: write it as in 8GB or 512MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])
