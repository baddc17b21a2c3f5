"""How claims are decided: one object for `certify`, `radius`, `output`, `circuit`, `compare` and their command line."""

from __future__ import annotations

import time as clock
from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch

from prooflens.durations import parse_time
from prooflens.engines import Guarantee, get_engine
from prooflens.engines.attack import BUDGETS, AttackBudget
from prooflens.engines.protocol import EngineOptions
from prooflens.engines.protocol import Workspace as Workspace
from prooflens.errors import EngineError, PromptError
from prooflens.memory import parse_memory
from prooflens.progress import Show, silent
from prooflens.queries.rows import suggestion
from prooflens.regions import listed
from prooflens.verdicts.evidence import ATTACK
from prooflens.verdicts.stages import PORTFOLIO, Stage, stages_of


class Options(TypedDict, total=False):
    """The keyword arguments that `certify`, `radius`, `output` and `circuit` share; all of them may be left out.

    - `engine`: `"auto"` asks a portfolio of engines; a name asks that engine and then attacks (default: `"auto"`).
    - `memory`: what engines may use, in bytes or as in `"8GB"` (default: what the machine can spare).
    - `time`: how long all of it may take, in seconds or as in `"60s"`, `"2m"`; what is proved by then is returned
      (default: two minutes for every layer that is asked about; an engine that is named has no limit).
    - `device`: `"cpu"`, `"cuda"`, `"cuda:1"` (default: where the model is).
    - `progress`: True for a progress bar (a line now and then where there is no terminal), or a function that is told
      a stage and a share (default: False).
    - `seed`: seed of the attack (default: 0).
    - `budget`: how hard to attack: a row of `BUDGETS`, `"samples/restarts/steps"` or an `AttackBudget` (default: one
      that fits the size of the problem).
    - `workspace`: what calls about one model share: its weights in float32, norms of them (default: each call its own).
    """

    engine: str
    memory: int | str | None
    time: float | str | None
    device: str | None
    progress: Show
    seed: int
    budget: AttackBudget | str | None
    workspace: Workspace


@dataclass(frozen=True)
class Settings:
    """How claims are decided.

    Attributes:
        stages: who is asked, in order.
        budget: how hard to attack; None for a budget that fits the problem's size.
        seed: seed of the attack.
        memory: bytes that engines may use; None for what the machine can spare.
        device: where to run; None for where the model is.
        progress: whether to show a bar, or who is told instead.
        time: seconds that all of it may take; None for the default of the portfolio.
        deadline: when to stop, on the clock of `time.monotonic`; None for never.
        allotted: how many seconds there were from the start to the deadline of the whole call.
        workspace: where engines keep what later calls of theirs can use; it ends with the settings.
    """

    stages: tuple[Stage, ...] = PORTFOLIO
    budget: AttackBudget | None = None
    seed: int = 0
    memory: int | None = None
    device: str | None = None
    progress: Show = False
    time: float | None = None
    deadline: float | None = None
    allotted: float | None = None
    workspace: Workspace = field(default_factory=Workspace, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        engine: str = "auto",
        memory: int | str | None = None,
        device: str | None = None,
        progress: Show = False,
        seed: int = 0,
        budget: AttackBudget | str | None = None,
        time: float | str | None = None,
        workspace: Workspace | None = None,
        **unknown: object,
    ) -> Settings:
        """Read settings as people write them: the keyword arguments are those of `Options`.

        Args:
            engine: `auto`, `attack`, or the name of an engine.
            memory: bytes that engines may use, as in "2GB"; None for what there is.
            device: where to run; None for where the model is.
            progress: show how far it is, or a function that is told.
            seed: of samples and attacks.
            budget: how hard to attack: a name, `samples/restarts/steps`, or an `AttackBudget`; None for the default.
            time: seconds that all may take, or a text such as "5min"; None for as long as it takes.
            workspace: what calls share; None for a new one.
            unknown: arguments that there are not; they are refused.

        Raises:
            TypeError: for an argument that there is not, with the nearest that there is.
            EngineError: for an engine or a budget that there is not, or an amount of memory or time that is none.
            PromptError: for a device that cannot be used.

        Example:
            >>> Settings.of(engine="crown", memory="2GB", budget="100/2/10").budget
            AttackBudget(samples=100, restarts=2, steps=10)
        """
        if unknown:
            name = next(iter(unknown))
            known = [
                *Options.__annotations__,
                "heads",
                "layer",
                "queries",
                "positions",
                "vectors",
                "deployed",
            ]
            raise TypeError(f"there is no argument {name!r}{suggestion(name, known)}")
        named = None if device is None else checked_device(device)
        return cls(
            stages_of(engine),
            parse_budget(budget),
            seed,
            parse_memory(memory),
            named,
            progress,
            parse_time(time),
            workspace=Workspace() if workspace is None else workspace,
        )

    @property
    def planned(self) -> bool:
        """Whether several engines are asked as a portfolio, by what they take."""
        return len(self.engines) > 1

    @property
    def left(self) -> float | None:
        """The seconds until the deadline; None if there is none."""
        return None if self.deadline is None else self.deadline - clock.monotonic()

    def until(self, deadline: float, allotted: float | None) -> Settings:
        """Return the same settings with a deadline.

        Args:
            deadline: when to stop, on the clock of `time.monotonic`.
            allotted: how many seconds the whole call has.
        """
        return replace(self, deadline=deadline, allotted=allotted)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that are asked, without the attack."""
        return tuple(stage.engine for stage in self.stages if stage.engine != ATTACK)

    @property
    def proves(self) -> bool:
        """Whether every engine that is asked proves; an attack alone breaks, and does not estimate."""
        return all(get_engine(name).guarantee is Guarantee.PROVED for name in self.engines)

    @property
    def options(self) -> EngineOptions:
        """What every engine is allowed, and who it tells how far it is."""
        tell = silent if isinstance(self.progress, bool) else self.progress
        return EngineOptions(self.memory, tell, self.deadline, self.workspace)


def parse_budget(budget: AttackBudget | str | None) -> AttackBudget | None:
    """Read a budget: a row of `BUDGETS` by name, `samples/restarts/steps`, or a budget as it is.

    Args:
        budget: any of these; None for the default.

    Raises:
        EngineError: if it is none of them.

    Example:
        >>> parse_budget("100/2/10")
        AttackBudget(samples=100, restarts=2, steps=10)
    """
    if budget is None or isinstance(budget, AttackBudget):
        return budget
    budget = budget if isinstance(budget, str) else "/".join(map(str, listed(budget)))
    if budget in BUDGETS:
        return BUDGETS[budget]
    parts = budget.split("/")
    if len(parts) == 3 and all(part.isdigit() for part in parts):
        return AttackBudget(*map(int, parts))
    raise EngineError(
        f"there is no budget {budget!r}{suggestion(budget, BUDGETS)}; budgets are {', '.join(BUDGETS)} "
        "and samples/restarts/steps such as 2000/10/50"
    )


def checked_device(device: str) -> str:
    """Return the device if it can be used.

    Args:
        device: as torch names it: `cpu`, `cuda`, `cuda:1`.

    Raises:
        PromptError: if it cannot, with the first line of why.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        line = str(error).splitlines()[0]
        raise PromptError(f"device {device!r} cannot be used: {line}") from error
    return device
