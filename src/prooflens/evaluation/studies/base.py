"""What a study is: a label of the paper, its published figures, and a function that measures ours.

A row of a result keeps four things apart that the paper's tables do not: what is *proved*, what is only *estimated*,
what an *attack leaves standing* (no proof can hold for more than that), and the paper's own figure.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from prooflens.errors import ProoflensError
from prooflens.evaluation.studies.revision import revision
from prooflens.models import Transformer, load
from prooflens.progress import Progress
from prooflens.queries.rows import suggestion
from prooflens.statistics import clopper_pearson
from prooflens.verdicts.settings import checked_device

T = TypeVar("T")

COUNT = "%"
"""The unit of rows whose figures are counts of n; the paper's figure is then a percentage."""

Group = Literal["synthetic", "pretrained", "probes", "pruning"]
"""The pages that studies are shown on."""


class StudyError(ProoflensError):
    """A study cannot run as asked, or has found something that must not be."""


@dataclass(frozen=True)
class StudyRow:
    """One line of a result. With unit `%`, `proved`, `estimated` and `attack` are counts of `n`, else values."""

    group: str
    label: str
    unit: str = COUNT
    engine: str = ""
    """Whose bound it is; empty where nothing is bounded."""
    paper: float | None = None
    """What the paper publishes for the same cell (a percentage with unit `%`)."""
    paper_attack: float | None = None
    """What its MC+PGD leaves standing, or attains."""
    proved: float | None = None
    estimated: float | None = None
    attack: float | None = None
    measured: float | None = None
    """What is read off inputs or weights, with no ball and no proof."""
    n: int | None = None
    false: int | None = None
    """Of an estimate: how many of its certificates the attack breaks."""
    seconds: float | None = None
    """Wall-clock seconds of the engine, per input."""
    note: str = ""

    def __post_init__(self) -> None:
        counts = [c for c in (self.proved, self.estimated, self.attack) if c is not None]
        if self.unit == COUNT and (self.n is None or any(not 0 <= c <= self.n for c in counts)):
            raise StudyError(
                f"row {self.group} / {self.label}: counts must lie in 0 … n, got {counts} of {self.n}"
            )

    @property
    def figure(self) -> float | None:
        """Ours: what is proved or, of an estimating engine, estimated."""
        return self.proved if self.proved is not None else self.estimated

    def interval(self, count: float | None) -> tuple[float, float] | None:
        """The Clopper–Pearson interval of a count, in per cent."""
        if count is None or self.unit != COUNT or not self.n:
            return None
        low, high = clopper_pearson(int(count), self.n)
        return 100 * low, 100 * high

    @property
    def against_paper(self) -> str | None:
        """Where the paper's rate lies: `inside` our interval, `above` or `below` it; None where there is none."""
        found = self.interval(self.figure)
        if found is None or self.paper is None:
            return None
        low, high = found
        return "inside" if low <= self.paper <= high else "above" if self.paper > high else "below"


@dataclass
class Sheet:
    """Where a study writes what it finds, line by line."""

    rows: list[StudyRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """Whatever else is worth keeping: per-seed values, prompts, percentiles."""
    model: str | None = None
    """The model that was asked, where it is not the study's usual one."""

    def add(self, *rows: StudyRow) -> None:
        """Rows of the table."""
        self.rows += rows

    def note(self, text: str) -> None:
        """A sentence about the numbers, made from them."""
        self.notes.append(text)


def silent(stage: str, share: float) -> None:
    """Progress that nobody is told."""


@dataclass(frozen=True)
class StudySettings:
    """How a study runs: how much of it, on which model, by whom."""

    quick: bool = False
    model: str | None = None
    engine: str | None = None
    """Another engine in the place of the one that a study asks first."""
    layer: int | None = None
    samples: int | None = None
    device: str | None = None
    seed: int = 0
    tell: Progress = field(default=silent, compare=False)
    kept: Path | None = field(default=None, compare=False)
    """The folder of results that a study about other studies may read."""
    jobs: int = field(default=1, compare=False)
    """How many processes answer, where a study can use several: nothing that is counted depends on it."""

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise StudyError(f"a study needs at least one input, got --samples {self.samples}")
        if self.jobs < 1:
            raise StudyError(f"a study needs at least one process, got --jobs {self.jobs}")

    def count(self, full: int, quick: int) -> int:
        """How many inputs: as asked, few where it must be quick, else as many as the paper."""
        return self.samples or (min(quick, full) if self.quick else full)

    def some(self, all_of_them: Sequence[T], quick: int) -> Sequence[T]:
        """All, or the first few where it must be quick."""
        return all_of_them[:quick] if self.quick else all_of_them

    def load(self, usual: str) -> Transformer:
        """The model that was asked for, or the usual one, on the device."""
        model = load(self.model or usual, self.tell)
        return model if self.device is None else model.to(checked_device(self.device))

    @property
    def model_name(self) -> str | None:
        """The model that was asked for; of a folder, its name."""
        return Path(self.model).name if self.model and Path(self.model).expanduser().is_dir() else self.model

    @property
    def arguments(self) -> list[str]:
        """The options that give these settings on the command line."""
        found = ["--quick"] if self.quick else []
        for name in CHOICES:
            if getattr(self, name) is not None:
                found += [f"--{name}", str(getattr(self, name))]
        return found + (["--seed", str(self.seed)] if self.seed else [])

    def only(self, names: Collection[str]) -> StudySettings:
        """These settings with no other choices than the named ones."""
        held: dict[str, Any] = {e.name: object.__getattribute__(self, e.name) for e in fields(StudySettings)}
        return StudySettings(**held | {name: None for name in CHOICES if name not in names})


CHOICES = ("model", "engine", "layer", "samples", "device")
"""StudySettings that only some studies look at; a result names those that it depends on."""


@dataclass(frozen=True)
class _Watched(StudySettings):
    """StudySettings that remember which choices a study looked at."""

    seen: set[str] = field(init=False, default_factory=set, compare=False, repr=False)

    def __post_init__(self) -> None:
        """What is watched was checked when it was given; to check it again would be to look at it."""

    def __getattribute__(self, name: str) -> Any:
        if name in CHOICES:
            object.__getattribute__(self, "seen").add(name)
        return object.__getattribute__(self, name)


OPTIONAL = {"variant", "commit"}
"""What the file of a result may leave out."""


@dataclass(frozen=True)
class Result:
    """What a study found, ready to be kept: `to_dict` is JSON, `from_dict` reads it back."""

    name: str
    title: str
    group: str
    command: str
    model: str
    quick: bool
    minutes: float
    version: str
    rows: list[StudyRow]
    notes: list[str]
    data: dict[str, Any] = field(default_factory=dict)
    variant: str = ""
    """What sets it apart from the usual result of its study: `layer2`."""
    commit: str = ""
    """What it ran from, with a `+` where the package was changed since; empty where that is not known."""

    @property
    def code(self) -> str:
        """What it ran from, in words."""
        return f"commit {self.commit}" if self.commit else f"prooflens {self.version}"

    @property
    def key(self) -> str:
        """The name of its file, picture and section."""
        return f"{self.name}-{self.variant}" if self.variant else self.name

    def to_dict(self) -> dict[str, Any]:
        """A JSON document."""
        found = {k: v for k, v in asdict(self).items() if k not in OPTIONAL or v}
        found["rows"] = [{k: v for k, v in asdict(row).items() if v not in (None, "")} for row in self.rows]
        return found

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Result:
        """Read back `to_dict`."""
        known = {entry.name for entry in fields(cls)}
        if set(document) | OPTIONAL != known:
            raise StudyError(f"not the result of a study: expected {', '.join(sorted(known))}")
        return cls(**{**document, "rows": [StudyRow(**row) for row in document["rows"]]})


@dataclass(frozen=True)
class Study:
    """A label of the paper and how it is measured here."""

    name: str
    title: str
    group: Group
    model: str
    run: Callable[[StudySettings, Sheet], None]
    paper_model: str | None = None
    """What the paper used, where `model` only stands in for it."""

    def titled(self, model: str, chosen: bool = False) -> str:
        """The title, which says so where a stand-in was used and not `chosen` by the user."""
        if self.paper_model is not None and not chosen:
            return f"{self.title} — on {model}, standing in for {self.paper_model}"
        return self.title if model == self.model else f"{self.title} — on {model}"

    def __call__(self, settings: StudySettings) -> Result:
        """Run it; what was run with these settings in this process is not run again.

        The result names the choices that the study looked at, and no others: its command says what it is of.
        """
        plain = settings.only(CHOICES)
        if (self.name, plain) not in _RESULTS:
            watched = _Watched(**{entry.name: getattr(plain, entry.name) for entry in fields(plain)})
            _RESULTS[self.name, plain] = self._result(watched), watched.seen
        result, seen = _RESULTS[self.name, plain]
        if isinstance(settings, _Watched):  # a study that reads this one depends on the same
            settings.seen.update(seen)
        return result

    def _result(self, watched: _Watched) -> Result:
        from prooflens.version import __version__

        commit = revision()
        sheet, start = Sheet(), time.perf_counter()
        self.run(watched, sheet)
        settings = watched.only(watched.seen)
        model = settings.model_name or sheet.model or self.model
        return Result(
            name=self.name,
            title=self.titled(model, settings.model is not None and model != self.model),
            group=self.group,
            command=shlex.join(["prooflens", "reproduce", self.name, *settings.arguments]),
            model=model,
            quick=settings.quick,
            minutes=round((time.perf_counter() - start) / 60, 2),
            version=__version__,
            rows=[replace(row, seconds=rounded(row.seconds)) for row in sheet.rows],
            notes=sheet.notes,
            data=sheet.data,
            variant="" if settings.layer is None else f"layer{settings.layer}",
            commit=commit,
        )


def rounded(value: float | None) -> float | None:
    """Four figures: seconds are not worth more."""
    return None if value is None else float(f"{value:.4g}")


_STUDIES: dict[str, Study] = {}
_RESULTS: dict[tuple[str, StudySettings], tuple[Result, set[str]]] = {}


def study(
    name: str, title: str, group: Group, model: str, paper_model: str | None = None
) -> Callable[[Callable[[StudySettings, Sheet], None]], Callable[[StudySettings, Sheet], None]]:
    """Enter a function as the study of a label.

    Args:
        name: the label, by which the study is asked for.
        title: what its page is called.
        group: the page that it stands on.
        model: the model that it measures.
        paper_model: the model that the paper measures there; None if it is the same.
    """

    def enter(run: Callable[[StudySettings, Sheet], None]) -> Callable[[StudySettings, Sheet], None]:
        if name in _STUDIES:
            raise StudyError(f"there are two studies of {name}")
        _STUDIES[name] = Study(name, title, group, model, run, paper_model)
        return run

    return enter


def study_names() -> list[str]:
    """The labels that can be reproduced, in the order in which they were entered."""
    return list(_STUDIES)


def get_study(name: str) -> Study:
    """A study by its label (`tab:` and `fig:` may be left out)."""
    plain = name.removeprefix("tab:").removeprefix("fig:")
    if plain not in _STUDIES:
        hint = suggestion(plain, _STUDIES) or "; `prooflens reproduce --list` shows them"
        raise StudyError(f"there is no study {name!r}{hint}")
    return _STUDIES[plain]
