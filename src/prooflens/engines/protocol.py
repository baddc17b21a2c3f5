"""What an engine is: it bounds linear forms of a model over a region, and says what its bounds are worth."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.forms import Forms
from prooflens.errors import EngineError
from prooflens.models import Architecture
from prooflens.problem import Problem
from prooflens.progress import Progress, silent


class OutOfTimeError(EngineError):
    """The time that an engine was allowed ended before it knew anything."""


Made = TypeVar("Made")


class Workspace:
    """What engines keep for later calls: a model in another precision, norms of its weights, a walk to a layer.

    A caller who asks one model many things gives all calls the same workspace; what it holds ends with it. No answer
    depends on it, but for rounding.

    Example:
        >>> made = []
        >>> work, owner = Workspace(), object()
        >>> for _ in range(2):
        ...     _ = work.shared("list", owner, lambda: made.append(1))
        >>> made
        [1]
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, object]] = {}

    def shared(self, name: str, owner: object, make: Callable[[], Made]) -> Made:
        """Return what is held under a name about an owner; it is made where nothing is, or about another.

        Args:
            name: what it is; one name is always of one type.
            owner: what it was made from, which is compared by identity.
            make: makes it.
        """
        held = self._held.get(name)
        if held is None or held[0] is not owner:
            self._held.pop(name, None)
            held = self._held[name] = (owner, make())
        return held[1]  # type: ignore[return-value]

    def put(self, name: str, owner: object, value: object) -> None:
        """Hold something under a name.

        Args:
            name: what it is.
            owner: what it was made from.
            value: the thing itself.
        """
        self._held[name] = (owner, value)

    def take(self, name: str) -> object | None:
        """Return what is held under a name, and hold it no longer; None for nothing.

        Args:
            name: what it is.
        """
        return self._held.pop(name, (None, None))[1]

    def look(self, name: str) -> object | None:
        """Return what is held under a name, which goes on being held; None for nothing.

        Args:
            name: what it is.
        """
        return self._held.get(name, (None, None))[1]

    def forget(self, owner: object) -> None:
        """Let go of what was made from an owner.

        Args:
            owner: compared by identity.
        """
        self._held = {name: held for name, held in self._held.items() if held[0] is not owner}

    def clear(self) -> None:
        """Let go of everything."""
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)


@dataclass(frozen=True)
class EngineOptions:
    """What a caller allows an engine, and who is told of progress; the same for every engine.

    Attributes:
        memory: bytes that the engine may use; None for what it thinks the machine can spare.
        progress: called with what is being done and which share of it is done.
        deadline: when to stop, on the clock of `time.monotonic`, and return what is proved by then; None for never.
            Engines with loops look at it between their steps.
        workspace: where an engine may keep what later calls can use; None for nowhere.
    """

    memory: int | None = None
    progress: Progress = silent
    deadline: float | None = None
    workspace: Workspace | None = None

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def leaves(self, seconds: float) -> bool:
        """Say whether the deadline leaves so many seconds.

        Args:
            seconds: how long something may take.
        """
        return self.deadline is None or time.monotonic() + seconds <= self.deadline

    def shared(self, name: str, owner: object, make: Callable[[], Made]) -> Made:
        """Return what the workspace holds under a name about an owner, made where it holds nothing.

        Args:
            name: what it is; one name is always of one type.
            owner: what it was made from, which is compared by identity.
            make: makes it.
        """
        return make() if self.workspace is None else self.workspace.shared(name, owner, make)

    def part(self, first: float, last: float) -> EngineOptions:
        """Return the same options for a part of the work: what it tells is a share of the whole.

        Args:
            first: the share of the whole that is done before the part.
            last: the share that is done behind it.
        """
        return replace(
            self, progress=lambda stage, share: self.progress(stage, first + share * (last - first))
        )

    def in_time(self, stage: str, share: float) -> None:
        """Tell how far the work is, and end it if the deadline has passed.

        Args:
            stage: what is being done.
            share: which share of it is done.

        Raises:
            OutOfTimeError: after the deadline.
        """
        self.progress(stage, share)
        if self.late:
            raise OutOfTimeError(f"the time that was allowed ended at {stage}")


NO_OPTIONS = EngineOptions()
"""The default options: whatever memory the machine has, and no progress reports."""


def default_memory(device: torch.device) -> int:
    """Return the bytes that an engine may use by default: two thirds of what the device has.

    Args:
        device: where it works.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory * 2 // 3
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 2 // 3


def allowed_memory(problem: Problem, options: EngineOptions) -> int:
    """Return the bytes that an engine may use for a problem.

    Args:
        problem: the model and the region.
        options: what the caller allows.
    """
    return options.memory or default_memory(problem.model.device)


@runtime_checkable
class Engine(Protocol):
    """Something that bounds linear forms of scores and outputs over a region.

    `EngineBase` has the checks that all engines share. `get_engine(name)` makes one by its name.
    """

    @property
    def name(self) -> str:
        """The engine's name in the registry."""
        ...

    @property
    def guarantee(self) -> Guarantee:
        """What the engine's bounds are worth: proved or estimated."""
        ...

    def refuses(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> str | None:
        """Say why this engine cannot bound these forms within the options, or return None if it can."""
        ...

    def bound_forms(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> FormBounds:
        """Bound every form over the whole region; ±∞ where the engine knows nothing."""
        ...


class EngineBase(ABC):
    """An engine with the checks that all share: a float64 model, and what the engine itself cannot do.

    A subclass has a `name` and a `guarantee`, implements `_bound`, and overrides `_limits` if there is something that
    it cannot do.
    """

    name: str
    guarantee: Guarantee

    def refuses(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> str | None:
        """Say why this engine cannot bound these forms, or return None if it can.

        Args:
            problem: the model and the region.
            forms: what is asked.
            options: memory that may be used.
        """
        if problem.model.dtype != torch.float64:
            return f"{self.name} needs a float64 model"
        return self._limits(problem, forms, options)

    def bound_forms(self, problem: Problem, forms: Forms, options: EngineOptions = NO_OPTIONS) -> FormBounds:
        """Bound every form over the whole region.

        Args:
            problem: the model and the region.
            forms: what is asked.
            options: memory that may be used, and who is told of progress.

        Returns:
            Lower and upper bounds, ±∞ where the engine knows nothing.

        Raises:
            EngineError: where `refuses` has a reason.
        """
        if reason := self.refuses(problem, forms, options):
            raise EngineError(reason)
        with torch.no_grad():
            return self._bound(problem, forms, options)

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        """Say what this engine cannot do of what is asked; nothing by default."""
        return None

    @abstractmethod
    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound the forms; they were checked already."""


def unknown_steps(architecture: Architecture, engine: str) -> str | None:
    """Say why a model's scores are not products of affine queries and keys; None if they are.

    Args:
        architecture: what the model looks like.
        engine: the name of the engine that needs such scores, for the message.
    """
    if architecture.score_cap is not None:
        return f"{engine} has no rule for capped scores (score_cap): ask crown or interval"
    if architecture.qk_norm != "none":
        return f"{engine} has no rule for norms of queries and keys (qk_norm): ask taylor or crown"
    if architecture.head_positions:
        return f"{engine} has no rule for positions of queries and keys (head_positions): ask taylor or crown"
    return None


_REGISTRY: dict[str, Callable[[], Engine]] = {}


def register(name: str) -> Callable[[Callable[[], Engine]], Callable[[], Engine]]:
    """Return a decorator that enters an engine under a name.

    The engine then takes part in `certify`, `compare` and the soundness run.

    Args:
        name: the engine's name.
    """

    def enter(make: Callable[[], Engine]) -> Callable[[], Engine]:
        _REGISTRY[name] = make
        return make

    return enter


def engine_names() -> list[str]:
    """Return the names of all registered engines.

    Example:
        >>> import prooflens.engines
        >>> "taylor" in engine_names()
        True
    """
    return sorted(_REGISTRY)


def get_engine(name: str) -> Engine:
    """Make an engine by its name.

    Args:
        name: one of `engine_names()`.

    Raises:
        EngineError: if there is no such engine.

    Example:
        >>> import prooflens.engines
        >>> get_engine("crown").guarantee
        <Guarantee.PROVED: 'proved'>
    """
    if name not in _REGISTRY:
        raise EngineError(f"there is no engine {name!r}; engines: {', '.join(engine_names())}")
    return _REGISTRY[name]()


class Stopwatch:
    """Measure seconds since it was made; pending work of the device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since the watch was made."""
        return self._now() - self._start
