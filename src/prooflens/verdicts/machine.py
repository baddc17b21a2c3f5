"""How fast this machine is: measured once for a device and a number of threads, and kept beside the models.

Predictions of time divide what a call takes (`engines.costs.Cost`) by these speeds. They decide who is asked, and are
no part of any proof.
"""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from prooflens.engines.costs import Cost
from prooflens.json_files import read_json
from prooflens.models.cache import home

MATRIX = 1024
"""The size of the matrices that are multiplied to measure a device."""

ARRAY = 2**21
"""How many numbers are added to measure its memory; a new array takes them, as in an engine."""


@dataclass(frozen=True)
class Speed:
    """What a device does in a second.

    Attributes:
        multiplications: of float64 numbers in products of matrices.
        traffic: bytes that elementwise steps read and write.
        steps: small operations that are called one by one.
    """

    multiplications: float
    traffic: float
    steps: float

    def seconds(self, cost: Cost) -> float:
        """Predict how long a call takes.

        Args:
            cost: what it takes.

        Example:
            >>> Speed(1e9, 1e10, 1e5).seconds(Cost(2e9, 1e10, 1e5, 0.0))
            4.0
        """
        return (
            cost.multiplications / self.multiplications
            + cost.traffic / self.traffic
            + cost.steps / self.steps
        )


_KNOWN: dict[str, Speed] = {}


def speed_of(device: torch.device) -> Speed:
    """Return the speed of a device: measured in this process, read from the cache folder, or measured now.

    Args:
        device: where the model is.
    """
    name = device_name(device)
    if name not in _KNOWN:
        path = home() / "speed.json"
        held = _read(path)
        if name not in held:
            held[name] = measure(device)
            _write(path, held)
        _KNOWN[name] = held[name]
    return _KNOWN[name]


def measure_again(device: torch.device) -> Speed:
    """Measure a device anew, for this process only; other work on a machine changes its speed.

    Args:
        device: where the model is.
    """
    _KNOWN[device_name(device)] = measure(device)
    return _KNOWN[device_name(device)]


def device_name(device: torch.device) -> str:
    """Return the name under which a device's speed is kept; a processor's has its number of threads.

    Args:
        device: where the model is.
    """
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.node()} {platform.machine()}, {torch.get_num_threads()} threads"


def measure(device: torch.device) -> Speed:
    """Measure a device: a product of matrices, a sum of arrays and a chain of small steps; about a second.

    Args:
        device: what to measure.
    """
    square = torch.ones(MATRIX, MATRIX, dtype=torch.float64, device=device)
    array = torch.ones(ARRAY, dtype=torch.float64, device=device)
    small = torch.ones(8, dtype=torch.float64, device=device)

    def chain() -> None:
        for _ in range(1000):
            small + small

    product = statistics.median(_times(device, lambda: square @ square))  # a burst is no speed to plan by
    total, calls = (min(_times(device, work)) for work in (lambda: array + array, chain))
    return Speed(MATRIX**3 / product, 3 * 8 * ARRAY / total, 1000.0 / calls)


def _times(device: torch.device, work: Callable[[], object], tries: int = 11) -> list[float]:
    """Return the seconds that some work took each time; a first try warms up.

    On a processor they are those of the calling thread: other work on the machine does not count, or hardly.
    """
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    taken = []
    for _ in range(tries + 1):
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(clock() - start)
    return [max(seconds, 1e-9) for seconds in taken[1:]]


def _read(path: Path) -> dict[str, Speed]:
    """Return the speeds that the cache holds; what is damaged is measured again."""
    try:
        found = {
            str(name): Speed(**{key: float(value) for key, value in held.items()})
            for name, held in read_json(path).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {name: speed for name, speed in found.items() if all(v > 0 for v in asdict(speed).values())}


def _write(path: Path, held: dict[str, Speed]) -> None:
    """Keep the speeds; a cache that cannot be written is measured again next time."""
    text = json.dumps({name: asdict(speed) for name, speed in held.items()}, indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.replace(path)
