"""What an engine is: it bounds scalars of a model over a region, and says what its bounds are worth.

The core of every engine is `bound_forms`: bounds of *linear* forms of attention scores and outputs. Everything else
(log-odds of mass, entropies, circuits) is made of forms in `functionals.py`, once, for all engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.errors import EngineError
from prooflens.models import OUTPUT, Transformer, scores_name
from prooflens.queries import Functional, Row, Score, Setting
from prooflens.queries.functionals import Logit
from prooflens.regions import Region


@dataclass(frozen=True)
class Tail:
    """How the tokens of a vocabulary beside the named ones were decided: so many by each stage, so many left open."""

    box: int = 0
    linear: int = 0
    direct: int = 0
    open: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.box + self.linear + self.direct + self.open

    @property
    def refined(self) -> int:
        """Tokens for which the first bound was not enough."""
        return self.total - self.box

    def __str__(self) -> str:
        named = {
            "by the box": self.box,
            "by the linear part": self.linear,
            "one by one": self.direct,
            "open": self.open,
        }
        parts = ", ".join(f"{count} {name}" for name, count in named.items() if count)
        return f"{self.total} other tokens: {parts}"


class Guarantee(StrEnum):
    """What a bound is worth."""

    PROVED = "proved"
    ESTIMATED = "estimated"


@dataclass(frozen=True, eq=False)
class Problem:
    """A model and an input region: what every engine is asked about."""

    model: Transformer
    region: Region
    padding: Bool[Tensor, " S"] | None = None

    def __post_init__(self) -> None:
        self.model.check_input(self.region.center)
        self.region.check()

    @property
    def n_tokens(self) -> int:
        """S."""
        return self.region.center.shape[0]

    @property
    def mask(self) -> Bool[Tensor, "S S"]:
        """Which keys take part for each query."""
        return self.model.mask(self.n_tokens, self.padding)

    def values(
        self, x: Float[Tensor, "... S d"], layers: Iterable[int], output: bool
    ) -> tuple[dict[int, Float[Tensor, "... H S S"]], Float[Tensor, "... C"] | None]:
        """Scores of some layers, and the output if asked for, at concrete points."""
        names = {layer: scores_name(self.model.check_layer(layer)) for layer in layers}
        wanted = [*names.values(), *([OUTPUT] if output else [])]
        found = self.model.run(x, wanted, self.padding)
        scores = {layer: found[name] for layer, name in names.items()}
        return scores, self.read_output(found[OUTPUT]) if output else None

    def read_output(self, output: Tensor) -> Float[Tensor, "... C"]:
        """What `Logit` speaks of: the output or, in a model with one per token, that of the last real token."""
        if self.model.architecture.pool != "none":
            return output
        last = self.n_tokens - 1 if self.padding is None else int(self.padding.nonzero().max())
        return output[..., last, :]

    def setting(
        self, layers: Sequence[int], output: bool = False, tokens: tuple[str, ...] | None = None
    ) -> Setting:
        """What queries are bound to: the clean scores of some layers and the clean output."""
        with torch.no_grad():
            scores, logits = self.values(self.region.center, layers, output)
        architecture = self.model.architecture
        return Setting(scores, self.mask, architecture.n_layers, architecture.n_heads, tokens, logits)


@dataclass(frozen=True, eq=False)
class Forms:
    """F linear forms Σ weight · a[layer, head, position, key] + Σ logit_weights · logits, in coordinate form."""

    size: int
    index: Int[Tensor, " N"]
    layer: Int[Tensor, " N"]
    head: Int[Tensor, " N"]
    position: Int[Tensor, " N"]
    key: Int[Tensor, " N"]
    weight: Float[Tensor, " N"]
    logits: Float[Tensor, "F C"] | None = None
    signs: bool = False
    """Whether only the signs of the forms are asked for: an engine may then stop where they are decided."""

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Row, int, float]], size: int) -> Forms:
        """Forms from (form, row, key, weight) entries."""
        places = [(form, row.layer, row.head, row.position, key) for form, row, key, _ in entries]
        index, layer, head, position, key = torch.tensor(places, dtype=torch.long).reshape(-1, 5).unbind(-1)
        weight = torch.tensor([entry[3] for entry in entries], dtype=torch.float64)
        return cls(size, index, layer, head, position, key, weight)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers whose scores are read, in order."""
        return tuple(sorted(set(self.layer.tolist())))

    def select(self, chosen: Int[Tensor, " M"]) -> Forms:
        """Only some of the forms, renumbered."""
        place = torch.full((self.size,), -1, dtype=torch.long)
        place[chosen] = torch.arange(len(chosen))
        kept = place[self.index] >= 0
        return Forms(
            len(chosen),
            place[self.index[kept]],
            self.layer[kept],
            self.head[kept],
            self.position[kept],
            self.key[kept],
            self.weight[kept],
            None if self.logits is None else self.logits[chosen],
            self.signs,
        )

    def negated(self) -> Forms:
        """−f for every form."""
        return replace(self, weight=-self.weight, logits=None if self.logits is None else -self.logits)

    def evaluate(
        self, scores: dict[int, Float[Tensor, "B H S S"]], output: Float[Tensor, "B C"] | None
    ) -> Float[Tensor, "B F"]:
        """The forms on a batch of concrete points."""
        some = next(iter(scores.values())) if scores else output
        assert some is not None
        total = some.new_zeros(some.shape[0], self.size)
        for layer, values in scores.items():
            here = self.layer == layer
            terms = values[:, self.head[here], self.position[here], self.key[here]] * self.weight[here].to(
                some
            )
            total = total.index_add(-1, self.index[here].to(some.device), terms)
        if self.logits is not None and output is not None:
            total = total + output @ self.logits.to(output).T
        return total


def forms_of(functionals: Sequence[Functional], n_outputs: int = 0) -> Forms:
    """The forms of functionals that are linear; their constants are left out."""
    entries: list[tuple[int, Row, int, float]] = []
    logits = torch.zeros(len(functionals), n_outputs, dtype=torch.float64)
    about_output = False
    for number, functional in enumerate(functionals):
        for weight, atom in functional.terms:
            if isinstance(atom, Score):
                entries.append((number, atom.row, atom.key, weight))
            elif isinstance(atom, Logit):
                logits[number, atom.index] += weight
                about_output = True
            else:
                raise EngineError(f"functional {functional.name!r} is not linear in scores and outputs")
    made = Forms.of(entries, len(functionals))
    return replace(made, logits=logits) if about_output else made


@dataclass(frozen=True, eq=False)
class Ledger:
    """How bounds add up, for a checker: bound = value at a corner + what each token may add beyond it.

    For upper bounds f ≤ value + Σ_t penalty[t]; for lower bounds f ≥ value − Σ_t penalty[t]. `value` bounds f at the
    corner from the same side, the corner is a point of the region, and no penalty is negative.
    """

    corner: Float[Tensor, "F p"]
    value: Float[Tensor, " F"]
    penalty: Float[Tensor, "F S"]

    def select(self, chosen: Tensor) -> Ledger:
        """The entries of some forms."""
        return Ledger(self.corner[chosen], self.value[chosen], self.penalty[chosen])


@dataclass(frozen=True, eq=False)
class FormBounds:
    """Bounds of linear forms, and, if the engine has them, factors α near which they are (almost) attained."""

    lower: Float[Tensor, " F"]
    upper: Float[Tensor, " F"]
    lower_corner: Float[Tensor, "F p"] | None = None
    upper_corner: Float[Tensor, "F p"] | None = None
    lower_ledger: Ledger | None = None
    upper_ledger: Ledger | None = None


@runtime_checkable
class Engine(Protocol):
    """Bounds linear forms of scores and outputs over a region. One engine, one file, one line in the registry."""

    @property
    def name(self) -> str:
        """Its name in the registry."""
        ...

    @property
    def guarantee(self) -> Guarantee:
        """What its bounds are worth."""
        ...

    def refuses(self, problem: Problem, forms: Forms) -> str | None:
        """Why this engine cannot answer, or None if it can."""
        ...

    def bound_forms(self, problem: Problem, forms: Forms) -> FormBounds:
        """Bounds of every form over the whole region; ±∞ where the engine knows nothing."""
        ...


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of functionals over a region, with their guarantee."""

    lower: Float[Tensor, " F"]
    upper: Float[Tensor, " F"]
    guarantee: Guarantee
    engine: str
    seconds: float
    lower_corner: Float[Tensor, "F p"] | None = field(default=None, repr=False)
    upper_corner: Float[Tensor, "F p"] | None = field(default=None, repr=False)
    lower_ledger: Ledger | None = field(default=None, repr=False)
    upper_ledger: Ledger | None = field(default=None, repr=False)
    tail: Tail | None = None

    def select(self, chosen: Int[Tensor, " M"]) -> Bounds:
        """The bounds of some of the functionals."""
        return Bounds(
            self.lower[chosen],
            self.upper[chosen],
            self.guarantee,
            self.engine,
            self.seconds,
            None if self.lower_corner is None else self.lower_corner[chosen],
            None if self.upper_corner is None else self.upper_corner[chosen],
            None if self.lower_ledger is None else self.lower_ledger.select(chosen),
            None if self.upper_ledger is None else self.upper_ledger.select(chosen),
        )

    def intersect(self, other: Bounds) -> Bounds:
        """Both bounds at once. Two proved ones give a proved one; an estimate never tightens a proof."""
        if self.guarantee is not other.guarantee:
            raise EngineError("a proved bound and an estimated one cannot be intersected")
        better_low, better_high = other.lower > self.lower, other.upper < self.upper
        if bool((torch.maximum(self.lower, other.lower) > torch.minimum(self.upper, other.upper)).any()):
            raise EngineError(f"{self.engine} and {other.engine} contradict each other: one of them is wrong")
        return Bounds(
            torch.where(better_low, other.lower, self.lower),
            torch.where(better_high, other.upper, self.upper),
            self.guarantee,
            f"{self.engine}+{other.engine}",
            self.seconds + other.seconds,
            _choose(better_low, other.lower_corner, self.lower_corner),
            _choose(better_high, other.upper_corner, self.upper_corner),
        )


def _choose(where: Tensor, yes: Tensor | None, no: Tensor | None) -> Tensor | None:
    if yes is None or no is None:
        return yes if no is None else no
    return torch.where(where[:, None], yes, no)


_REGISTRY: dict[str, Callable[[], Engine]] = {}


def register(name: str) -> Callable[[Callable[[], Engine]], Callable[[], Engine]]:
    """Enter an engine under its name; it then takes part in `certify`, `compare` and the soundness run."""

    def enter(make: Callable[[], Engine]) -> Callable[[], Engine]:
        _REGISTRY[name] = make
        return make

    return enter


def engine_names() -> list[str]:
    """All registered engines."""
    return sorted(_REGISTRY)


def get_engine(name: str) -> Engine:
    """A fresh engine by name."""
    if name not in _REGISTRY:
        raise EngineError(f"there is no engine {name!r}; engines: {', '.join(engine_names())}")
    return _REGISTRY[name]()


class Stopwatch:
    """Seconds since it was made, with the device's work finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self) -> float:
        """Time gone by."""
        return self._now() - self._start
