"""Amounts of memory: parse them, measure what is left, and cap what this process may take.

A cap limits the private memory that this process may still take (Linux: RLIMIT_DATA). What goes beyond it fails
inside this process, with one line that says so, and the system need not kill anything.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

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


LEAST = 2**20
"""Less memory than this is a slip: a number without its unit."""


def parse_memory(text: str | float | None) -> int | None:
    """Return the bytes of `8GB`, `512MiB`, `1e9` or a number of bytes.

    Args:
        text: an amount; None stays None.

    Raises:
        EngineError: if it is no amount of memory.

    Example:
        >>> parse_memory("2MiB"), parse_memory("8GB")
        (2097152, 8000000000)
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([KMGT]?I?)B?\s*", str(text), re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS or not float(match[1]) > 0:
        raise EngineError(f"{text!r} is no amount of memory: write it as in 8GB or 512MiB")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < LEAST:
        more = "give more" if match[2] else "write the unit"
        raise EngineError(f"{text!r} is {size} bytes of memory: {more}, as in 8GB or 512MiB")
    return size


STATUS = Path("/proc/self/status")
MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
KEPT_BLOCK, KEPT = 2**27, 2**29
"""The bytes of the largest block that is kept when it is freed, and of all of them together."""


def available() -> int | None:
    """Return the bytes that this process may still take: free memory, its group's share, its limits; None if
    unknown."""
    import resource

    if not STATUS.exists():
        return None
    held = _kilobytes(STATUS)
    left = [_kilobytes(MEMINFO).get("MemAvailable")]
    for name, kind in (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and name in held:
            left.append(max(0, limit - held[name]))
    most, used = (_number(GROUP / name) for name in ("memory.max", "memory.current"))
    if most is not None and used is not None:
        left.append(max(0, most - used))
    return min((value for value in left if value is not None), default=None)


def cap(size: int) -> None:
    """Limit what this process may take beyond what it holds; systems without such limits ignore it.

    Args:
        size: bytes.
    """
    import resource

    if not STATUS.exists():
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _kilobytes(STATUS).get("VmData", 0) + size
    resource.setrlimit(
        resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def keep_freed() -> None:
    """Let the C library keep a little of what is freed for the next matrix, where it can (glibc).

    A proof makes and frees matrices of some MiB thousands of times. By default each goes back to the system, which
    zeroes and maps its pages again for the next one: a tenth to a fifth of a proof's time on a cpu. At most `KEPT` is
    held, and no block larger than `KEPT_BLOCK`; nothing changes where less than 16 times that may be used. It is
    meant for processes of our own that have no cap: a library leaves its caller's allocator alone.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None) if STATUS.exists() else None
    if change is not None and (available() or 0) >= 16 * KEPT:
        change(M_MMAP_THRESHOLD, KEPT_BLOCK)
        change(M_TRIM_THRESHOLD, KEPT)


def is_shortage(error: BaseException) -> bool:
    """Say whether an error means that memory ran out, on the cpu or on a GPU."""
    return isinstance(error, MemoryError) or any(
        words in str(error).lower()
        for words in ("out of memory", "can't allocate memory", "cannot allocate memory")
    )


def written(size: float) -> str:
    """Return an amount of memory for people, as in `1.5 GiB` or `300 MiB`."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _kilobytes(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines() if line.endswith(" kB"))
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
