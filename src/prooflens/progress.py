"""How far long jobs are, on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prooflens.durations import written_time

Progress = Callable[[str, float], None]
"""A callback: it is told what is being done and which share of all is done."""

EVERY = 15.0
"""Seconds between two lines where stderr is no terminal."""


def silent(stage: str, share: float) -> None:
    """Tell nobody."""


Show = bool | Progress
"""Whether to show a bar, or a callback in its place."""


@contextmanager
def shown(show: Show) -> Iterator[Progress]:
    """Yield the callback to report to: the given one, a bar, or lines on stderr where there is no terminal.

    Args:
        show: whether to show anything, or who is told instead.
    """
    if not isinstance(show, bool):
        yield show
        return
    if not show:
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        with Lines(EVERY).at_work() as lines:
            yield lines
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0, left="")
        start = time.monotonic()

        def tell(stage: str, share: float) -> None:
            left = time_left(time.monotonic() - start, share)
            bar.update(task, description=stage, completed=share, left=left)

        yield tell


def time_left(elapsed: float, share: float) -> str:
    """Return the time that is left in words, if the rest goes as the first share did; empty at the start.

    Args:
        elapsed: seconds so far.
        share: which share of all is done.

    Example:
        >>> time_left(60.0, 0.25)
        'about 180 s left'
    """
    if not 0.02 < share <= 1.0:
        return ""
    return f"about {written_time(elapsed * (1.0 - share) / share)} left"


@dataclass(eq=False)
class Lines:
    """A line on stderr now and then: what is being done, which share is done, how long it took and may take yet.

    A thread of its own writes them, so that a long step without news is seen to be at work.

    Attributes:
        every: seconds between two lines; the first comes after so long, too.
    """

    every: float = EVERY
    stage: str = ""
    share: float = 0.0
    _start: float = field(default_factory=time.monotonic)
    _done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, stage: str, share: float) -> None:
        """Remember how far the work is."""
        self.stage, self.share = stage, share

    @contextmanager
    def at_work(self) -> Iterator[Lines]:
        """Write lines until the work ends."""
        writer = threading.Thread(target=self._write, daemon=True)
        writer.start()
        try:
            yield self
        finally:
            self._done.set()
            writer.join()

    def _write(self) -> None:
        while not self._done.wait(self.every):
            sys.stderr.write(f"{self.line}\n")
            sys.stderr.flush()

    @property
    def line(self) -> str:
        """What the next line says."""
        elapsed = time.monotonic() - self._start
        parts = [f"{100 * self.share:.0f} % after {written_time(elapsed)}"]
        parts += [left] if (left := time_left(elapsed, self.share)) else []
        return f"{self.stage or 'at work'}: {', '.join(parts)}"
