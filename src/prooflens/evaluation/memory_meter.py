"""The most memory that a piece of work has in use at once."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from types import TracebackType

import torch

INTERVAL = 0.005
"""Seconds between two looks at the process."""

STATM = Path("/proc/self/statm")


class MemoryMeter:
    """Bytes beyond what was in use before: the device's allocations, or the process's resident memory, sampled.

    On a cpu this is a lower bound: a short peak between two looks is missed, and memory that an allocator has kept
    from earlier work, or that the system takes back meanwhile, is not counted. Systems without /proc report 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._start = 0
        self.bytes = 0

    def __enter__(self) -> MemoryMeter:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        else:
            _trim()
            self._start = resident()
            self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._start
            return
        self._stop.set()
        self._watch.join()
        self.bytes = max(self.bytes, resident() - self._start)

    def _look(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.bytes = max(self.bytes, resident() - self._start)


def _trim() -> None:
    """Give back what the C library's allocator keeps, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if STATM.exists() else None
    if trim is not None:
        trim(0)


def resident() -> int:
    """Bytes of this process in memory."""
    import resource

    if not STATM.exists():
        return 0
    return int(STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
