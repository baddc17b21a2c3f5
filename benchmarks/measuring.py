"""One JSON line per result, at once, and time and memory of a piece of work."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from prooflens.engines.protocol import Stopwatch
from prooflens.evaluation.memory_meter import MemoryMeter, resident

Line = dict[str, object]


def tell(line: Line, path: Path | None) -> None:
    """Print a result and append it to the file, so that nothing is lost when the run is stopped."""
    text = json.dumps(line, ensure_ascii=False)
    print(text, flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def told(path: Path | None) -> list[Line]:
    """The results that a file holds already."""
    if path is None or not path.exists():
        return []
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]


def known(lines: Sequence[Line], **wanted: object) -> bool:
    """Whether one of the results is about this."""
    return any(all(line.get(name) == value for name, value in wanted.items()) for line in lines)


class Meter:
    """Seconds, and peak GiB: allocated on the device, or on a cpu the size of the process, sampled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = self.gib = 0.0
        self._peak = MemoryMeter(device)

    def __enter__(self) -> "Meter":
        self._peak.__enter__()
        on_device = self.device.type == "cuda"
        self._before = torch.cuda.memory_allocated(self.device) if on_device else resident()
        self._watch = Stopwatch(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = self._watch.seconds()
        self._peak.__exit__(kind, value, trace)
        self.gib = (self._before + self._peak.bytes) / 2**30
