"""A progress bar on stderr, as the callback that long jobs take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float], None]
"""A callback: it is told what is being done and which share of all is done."""


def silent(stage: str, share: float) -> None:
    """Tell nobody."""


Show = bool | Progress
"""Whether to show a bar, or a callback in its place."""


@contextmanager
def shown(show: Show) -> Iterator[Progress]:
    """Yield the callback to report to: the given one, a bar with the time left, or none if nobody would see it."""
    if not isinstance(show, bool):
        yield show
        return
    if not show:
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)
