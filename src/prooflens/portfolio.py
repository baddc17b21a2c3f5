"""Who is asked, and in which order: cheap engines first, an attack in between, dear engines on what is left.

`PORTFOLIO` is data: a stage names an engine (or the attack) and where it is worth asking. Only functionals that are
still open go to the next stage, and a claim that is proved or broken takes no further part. Proved bounds intersect; an
estimate is never mixed with a proof.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from prooflens.engines import Bounds, Engine, Guarantee, Problem, engine_names, get_engine
from prooflens.engines.attack import Budget, Witness, attack_claims
from prooflens.engines.base import Ledger
from prooflens.engines.crown import crown_work
from prooflens.engines.functionals import bound_functionals, refusal
from prooflens.engines.taylor import taylor_work
from prooflens.engines.vocabulary import is_tail
from prooflens.errors import EngineError
from prooflens.outcomes import Outcome, Verdict
from prooflens.progress import Progress
from prooflens.queries import Claim, Functional
from prooflens.queries.base import Sense
from prooflens.queries.rows import suggestion

ATTACK = "attack"
SMALL_FACTORS = 2000
SMALL_WIDTH = 128
"""Up to this many factors and this width polynomial zonotopes are affordable and attacks may be thorough."""

MOST_WORK = 1e12
"""Multiplications that a stage of the portfolio may take: about a minute on one core."""

STARTS = 2
"""From so many corners of the weakest open functionals an attack also starts."""


def is_small(problem: Problem) -> bool:
    """Whether a problem is small enough for engines that keep one generator per factor."""
    return problem.region.n_factors <= SMALL_FACTORS and problem.model.architecture.d_model <= SMALL_WIDTH


@dataclass(frozen=True)
class Stage:
    """One line of the portfolio: an engine, the depths it is asked about, and whether only for small problems."""

    engine: str
    depths: range = range(10**6)
    small_only: bool = False
    share: float = 1.0
    """Of an attack: the share of the whole budget."""
    work: Callable[[Problem, int], float] | None = None
    """About how many multiplications it takes at a depth; beyond `MOST_WORK` it is not asked."""

    def applies(self, problem: Problem, depth: int) -> bool:
        """Whether it is worth asking; depth is the deepest layer read, the number of layers for outputs."""
        known = self.engine == ATTACK or self.engine in engine_names()
        cheap = self.work is None or self.work(problem, depth) <= MOST_WORK
        return known and depth in self.depths and cheap and (is_small(problem) or not self.small_only)


def work_of_lines(problem: Problem, depth: int) -> float:
    """What `crown` costs; where the first scores are exactly quadratic it has nothing to add to `layer0`."""
    behind_norm = problem.model.architecture.norm_place == "pre"
    return crown_work(problem, depth) if depth or behind_norm else math.inf


def work_of_walks(problem: Problem, depth: int) -> float:
    """What `taylor` costs, in the time that one core takes for `MOST_WORK`: minutes are allowed, and a GPU counts."""
    return taylor_work(problem, depth) / (1000.0 if problem.model.device.type == "cuda" else 10.0)


DEEPER = range(1, 10**6)
PORTFOLIO: tuple[Stage, ...] = (
    Stage("layer0", range(1)),
    Stage("interval"),
    Stage(ATTACK, share=0.2),
    Stage("taylor", DEEPER, work=work_of_walks),
    Stage("crown", work=work_of_lines),
    Stage("cpz", small_only=True),
    Stage(ATTACK),
)


def stages_of(engine: str) -> tuple[Stage, ...]:
    """The stages that a name means: the portfolio for `auto`, the attack alone, or one engine and the attack."""
    if engine == "auto":
        return PORTFOLIO
    if engine == ATTACK:
        return (Stage(ATTACK),)
    if engine not in engine_names():
        known = ["auto", *engine_names()]
        raise EngineError(
            f"there is no engine {engine!r}{suggestion(str(engine), known) or '; engines: ' + ', '.join(known)}"
        )
    return (Stage(engine), Stage(ATTACK))


def default_budget(problem: Problem) -> Budget:
    """How hard to attack: thorough on small problems, minutes rather than hours on pretrained ones."""
    return Budget(2000, 10, 50) if is_small(problem) else Budget(128, 2, 16)


@dataclass(frozen=True)
class Settings:
    """How claims are settled: stages, budget of the attack, seed, memory for engines that take a limit, progress."""

    stages: tuple[Stage, ...] = PORTFOLIO
    budget: Budget | None = None
    seed: int = 0
    memory: int | None = None
    progress: Progress | None = None

    def engine(self, name: str) -> Engine:
        """An engine with the limits that it has fields for."""
        return equipped(get_engine(name), memory=self.memory, progress=self.progress)


def equipped(engine: Engine, **values: Any) -> Engine:
    """The engine with those of its dataclass fields set that are given and that it has."""
    held = getattr(engine, "__dataclass_fields__", {})
    changes = {name: value for name, value in values.items() if name in held and value is not None}
    made: Engine = replace(engine, **changes) if changes else engine  # type: ignore[type-var]
    return made


@dataclass(eq=False)
class Evidence:
    """What is known of one claim so far."""

    claim: Claim
    lower: Tensor
    upper: Tensor
    sources: list[tuple[Bounds, int] | None]
    """Per functional: the bounds, and the place in them, that its lower bound is from."""
    engines: list[str]
    broken: bool
    """Whether the clean input lies in the region and breaks the claim."""
    guarantee: Guarantee = Guarantee.PROVED
    witness: Witness | None = None
    attack: float | None = None
    reached: Tensor | None = None
    """The factors at which an attack attained its smallest value."""
    seconds: float = 0.0

    @classmethod
    def about(cls, claim: Claim, centred: bool = True) -> Evidence:
        """Nothing is known but the constants; `centred` says whether the clean input is a point of the region."""
        size = len(claim.conditions)
        lower = torch.full((size,), -torch.inf, dtype=torch.float64)
        upper = torch.full((size,), torch.inf, dtype=torch.float64)
        for i, functional in enumerate(claim.functionals):
            if not (functional.rows or functional.logits):
                lower[i] = upper[i] = functional.constant
        return cls(claim, lower, upper, [None] * size, [], centred and claim.clean_breaks)

    @property
    def settable(self) -> bool:
        """Whether there is something to prove: no tie, and not broken by the clean input."""
        return self.claim.tie is None and not self.broken

    @property
    def verdict(self) -> Verdict:
        """What the evidence is worth."""
        if self.claim.tie is not None:
            return Verdict.UNKNOWN
        if self.witness is not None or self.broken:
            return Verdict.FAILS
        if self.claim.decide(self.lower, self.upper) == "holds":
            return Verdict.HOLDS if self.guarantee is Guarantee.PROVED else Verdict.ESTIMATED
        return Verdict.UNKNOWN

    @property
    def open(self) -> bool:
        """Whether more work could decide it."""
        return self.settable and self.witness is None and bool(self.missing())

    def missing(self) -> list[int]:
        """The functionals whose bounds do not yet do what is wanted of them."""
        ends = zip(self.claim.conditions, self.lower.tolist(), self.upper.tolist(), strict=True)
        return [i for i, (condition, low, high) in enumerate(ends) if not _done(condition.sense, low, high)]

    def wanted(self) -> list[int]:
        """The functionals that another engine is asked about: what is missing, and ranges, which can be tighter."""
        if not self.settable or self.witness is not None:
            return []
        if self.claim.wants_range:
            return list(range(len(self.claim.conditions)))
        return self.missing()

    def learn(self, chosen: Sequence[int], bounds: Bounds, first: int) -> None:
        """Take over what is better: entries `first`, … of the bounds are those of the chosen functionals."""
        here = slice(first, first + len(chosen))
        places = torch.tensor(chosen)
        better = bounds.lower[here] > self.lower[places]
        for offset in better.nonzero()[:, 0].tolist():
            self.sources[chosen[offset]] = (bounds, first + offset)
        # Not by the larger of both, which would be NaN where an engine has none: what is known stays known.
        self.lower[places] = torch.where(better, bounds.lower[here], self.lower[places])
        lower_end = bounds.upper[here] < self.upper[places]
        self.upper[places] = torch.where(lower_end, bounds.upper[here], self.upper[places])
        if bounds.engine not in self.engines:
            self.engines.append(bounds.engine)
        if bool((self.lower > self.upper).any()) and bounds.guarantee is Guarantee.PROVED:
            raise EngineError(
                f"bounds of {'+'.join(self.engines)} contradict each other: one of them is wrong"
            )
        self.guarantee = bounds.guarantee

    def corners(self) -> Tensor | None:
        """Where to start an attack: how far one came, and where the weakest open functionals are nearly attained."""
        order = sorted(self.missing(), key=lambda i: float(self.lower[i]))
        found = [corner for i in order if (corner := self._corner(i)) is not None][:STARTS]
        found += [] if self.reached is None else [self.reached]
        return torch.stack(found) if found else None

    def _corner(self, i: int) -> Tensor | None:
        source = self.sources[i]
        if source is None or source[0].lower_corner is None:
            return None
        return source[0].lower_corner[source[1]]

    def outcome(self, problem: Problem) -> Outcome:
        """The claim as it ends."""
        verdict, witness = self.verdict, self.witness
        clean = verdict is Verdict.FAILS and witness is None
        if clean:
            zero = torch.zeros(problem.region.n_factors).to(problem.region.center)
            witness = Witness(problem.region.center, zero, self.claim.clean)
        attack = self.attack if witness is None else _least(witness.values)
        engine = ("clean" if clean else ATTACK) if verdict is Verdict.FAILS else self.named()
        return Outcome(
            self.claim, verdict, self._bounds(), witness, self._reason(clean), engine, attack, self.seconds
        )

    def named(self) -> str:
        """The engines that the lower bounds are from; all that were asked where nothing is proved."""
        behind = dict.fromkeys(source[0].engine for source in self.sources if source is not None)
        if self.open or self.claim.tie is not None:
            return "+".join(self.engines) or ("none" if self.attack is None else ATTACK)
        return "+".join(behind) or "mask"

    def _bounds(self) -> Bounds:
        found = [self._corner(i) for i in range(len(self.sources))]
        corners = [corner for corner in found if corner is not None]
        whole = bool(corners) and len(corners) == len(found)
        return Bounds(
            self.lower,
            self.upper,
            self.guarantee,
            self.named(),
            self.seconds,
            lower_corner=_signs(torch.stack(corners)) if whole else None,
            lower_ledger=self._ledger(),
            tail=next((s[0].tail for s in self.sources if s is not None and s[0].tail is not None), None),
        )

    def _ledger(self) -> Ledger | None:
        parts: list[Ledger] = []
        for source in self.sources:
            if source is None or source[0].lower_ledger is None:
                return None
            parts.append(source[0].lower_ledger.select(torch.tensor([source[1]])))
        if not parts:
            return None
        corner, value, penalty = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("corner", "value", "penalty")
        )
        return Ledger(_signs(corner), value, penalty)

    def _reason(self, clean: bool) -> str:
        verdict = self.verdict
        if verdict is Verdict.HOLDS:
            tail = self._bounds().tail
            proved = "proved on the whole region" if self.engines else "true by the mask alone"
            return proved if tail is None else f"{proved}; {tail}"
        if verdict is Verdict.FAILS:
            return "the clean input breaks it" if clean else "broken by a point of the region"
        if verdict is Verdict.ESTIMATED:
            return f"{'+'.join(self.engines)} only estimates: not a proof"
        return self.claim.tie or "neither proved nor broken"


def _least(values: Tensor) -> float | None:
    return float(values.min()) if len(values) else None


def _done(sense: Sense, lower: float, upper: float) -> bool:
    if sense is Sense.RANGE:
        return math.isfinite(lower) and math.isfinite(upper)
    return lower > 0 if sense is Sense.POSITIVE else lower >= 0


def _signs(corner: Tensor) -> Tensor:
    """Corners of the factor box as int8: an eighth of the memory."""
    return corner.to(torch.int8) if bool((corner.abs() == 1).all()) else corner


def depth_of(problem: Problem, claim: Claim) -> int:
    """The deepest layer that a claim reads; the number of layers if it reads outputs."""
    if any(f.logits for f in claim.functionals):
        return problem.model.architecture.n_layers
    return max((row.layer for f in claim.functionals for row in f.rows), default=0)


def gather(problem: Problem, evidence: Sequence[Evidence], settings: Settings) -> None:
    """Run the stages on claims of one depth, in place; stops as soon as nothing is open.

    An engine that refuses is passed over, unless it is the only one that was asked for: then its reason is the error.
    """
    depth = max((depth_of(problem, item.claim) for item in evidence), default=0)
    only = len([stage for stage in settings.stages if stage.engine != ATTACK]) == 1
    for stage in settings.stages:
        if not stage.applies(problem, depth):
            continue
        if stage.engine == ATTACK:
            attack(problem, evidence, settings, stage.share)
        else:
            prove(problem, evidence, settings.engine(stage.engine), required=only)


def prove(problem: Problem, evidence: Sequence[Evidence], engine: Engine, required: bool = False) -> None:
    """Ask one engine about every functional that is still open."""
    for linear in (True, False):
        # Apart, since a call that is all margins keeps the ledger of its bounds.
        asked: list[tuple[Evidence, list[int]]] = []
        for item in evidence:
            chosen = [i for i in item.wanted() if _is_margin(item.claim.functionals[i]) is linear]
            if len(item.missing()) > len(
                chosen
            ):  # a vocabulary is worth asking once the named tokens are beaten
                chosen = [i for i in chosen if not is_tail(item.claim.functionals[i])]
            if chosen:
                asked.append((item, chosen))
        functionals = [item.claim.functionals[i] for item, chosen in asked for i in chosen]
        if not functionals:
            continue
        if reason := refusal(engine, problem, functionals):
            if required:
                raise EngineError(f"{engine.name} cannot answer: {reason}")
            continue
        bounds = bound_functionals(engine, problem, functionals)
        first = 0
        for item, chosen in asked:
            item.learn(chosen, bounds, first)
            item.seconds += bounds.seconds * len(chosen) / len(functionals)
            first += len(chosen)


def _is_margin(functional: Functional) -> bool:
    return functional.is_linear and functional.constant == 0.0


def attack(problem: Problem, evidence: Sequence[Evidence], settings: Settings, share: float = 1.0) -> None:
    """Look for points that break what is not proved; remember how far down each claim was brought."""
    targets = [
        item
        for item in evidence
        if item.settable and not item.claim.wants_range and item.witness is None
        if item.missing() or item.guarantee is Guarantee.ESTIMATED
    ]
    budget = settings.budget or default_budget(problem)
    budget = part_of(budget, share)
    if not targets or not (budget.samples or budget.restarts):
        return
    start = time.perf_counter()
    starts = [item.corners() for item in targets]
    fast = not is_small(problem)
    siege = attack_claims(problem, [item.claim for item in targets], budget, settings.seed, starts, fast)
    seconds = (time.perf_counter() - start) / len(targets)
    found = zip(targets, siege.witnesses, siege.values.tolist(), siege.alpha, strict=True)
    for item, witness, value, alpha in found:
        item.witness = witness
        item.seconds += seconds
        if math.isfinite(value) and (item.attack is None or value < item.attack):
            item.attack, item.reached = value, alpha


def part_of(budget: Budget, share: float) -> Budget:
    """A share of a budget, at least one of everything that it has."""
    if share == 1.0:
        return budget
    return Budget(*(min(whole, max(1, round(share * whole))) for whole in vars(budget).values()))
