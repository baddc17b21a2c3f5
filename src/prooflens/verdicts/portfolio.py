"""Who is asked, and in which order: cheap engines first, an attack in between, dear engines on what is left.

Only functionals that are still open go to the next stage, and a claim that is proved or broken takes no further part.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from prooflens.engines import Engine, get_engine
from prooflens.engines.attack import AttackBudget, AttackCase, AttackResult, attack_cases, attack_claims
from prooflens.engines.functionals import bound_functionals, refusal
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions, OutOfTimeError
from prooflens.engines.rivals import is_tail
from prooflens.errors import EngineError
from prooflens.problem import Problem
from prooflens.progress import Progress
from prooflens.results.asked import Asked, State
from prooflens.verdicts.breaks import is_way, moved_to_first_break
from prooflens.verdicts.evidence import ATTACK, Evidence
from prooflens.verdicts.forecast import (
    NOTHING_EXPECTED,
    Forecast,
    Obstacle,
    depth_of,
    forecast,
    is_margin,
    more_memory,
    obstacle,
    stage_end,
)
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.stages import Stage, default_budget, is_small


def gather_evidence(problem: Problem, evidence: Sequence[Evidence], settings: Settings) -> None:
    """Run the stages on claims of one depth, in place; stops as soon as nothing is open.

    A stage of the portfolio that would take longer than there is time, or more memory, is not begun; every claim that
    is open remembers that, and what the stage would need. An engine that refuses is passed over, unless it is the only
    one that was asked for: then its reason is the error.

    Args:
        problem: the model and the region.
        evidence: what is known of each claim, which is added to.
        settings: engines, time and memory.
    """
    for order in evidence_steps(problem, evidence, settings):
        order.carry_out()


def evidence_steps(
    problem: Problem, evidence: Sequence[Evidence], settings: Settings
) -> Iterator[AttackOrder]:
    """Run the stages as `gather_evidence` does, but leave attacks to the caller, who makes each before going on.

    Several problems can so be attacked together. What the caller does between two steps beyond the attack itself does
    not count as time of this problem.

    Args:
        problem: the model and the region.
        evidence: what is known of each claim, which is added to.
        settings: engines, time and memory.
    """
    depth = max((depth_of(problem, item.claim) for item in evidence), default=0)
    stages = [stage for stage in settings.stages if stage.applies(problem, depth)]
    board = StageBoard.of(problem, evidence, stages, settings)
    for place, stage in enumerate(stages):
        open_ = [item for item in evidence if item.wanted()]
        if not open_:
            return
        claims = [item.claim for item in open_]
        allowed = stage_end(stage, stages[place + 1 :], settings)
        allowed = replace(allowed, progress=board.part(place))
        if stage.engine == ATTACK:
            expected = forecast(stage, problem, claims, settings)
            order = AttackOrder(problem, evidence, allowed, stage.share, expected)
            begun = time.monotonic()
            yield order
            if settings.deadline is not None:
                waited = time.monotonic() - begun - order.seconds
                settings = settings.until(settings.deadline + max(0.0, waited), settings.allotted)
            continue
        expected = forecast(stage, problem, claims, settings)
        if hindered := obstacle(stage, problem, expected, allowed):
            note_unasked(problem, open_, stage, expected, hindered, allowed)
        else:
            prove(
                problem, evidence, get_engine(stage.engine), allowed.options, not settings.planned, expected
            )


def note_unasked(
    problem: Problem,
    open_: Sequence[Evidence],
    stage: Stage,
    expected: Forecast,
    hindered: Obstacle,
    settings: Settings,
) -> None:
    """Let every open claim remember that an engine was not asked, why, and the options with which it would be.

    Args:
        problem: the model and the region.
        open_: what is known of each open claim.
        stage: the engine.
        expected: what it would take.
        hindered: why it was not asked.
        settings: what was allowed.
    """
    why, options = hindered.why, dict(hindered.options)
    functionals = [f for item in open_ for f in item.claim.functionals]
    reason = refusal(get_engine(stage.engine), problem, functionals, settings.options) if options else None
    if reason is not None:  # more time alone would not do
        why, options = f"{why}; {reason}", options | _memory_for(reason, problem, expected)
    note = Asked(
        stage.engine,
        State.NOT_ASKED,
        predicted=expected.seconds,
        memory=expected.memory,
        why=why,
        options=options,
        call=next(CALLS),
    )
    for item in open_:
        item.asked.append(note)


def _memory_for(reason: str, problem: Problem, expected: Forecast) -> dict[str, str]:
    """The option that gives an engine the memory for want of which it refuses."""
    short = expected.memory is not None and "GiB" in reason
    return more_memory(problem, expected.memory or 0.0) if short else {}


CALLS = itertools.count(1)
"""Numbers of calls."""


@dataclass(frozen=True)
class StageBoard:
    """How far the work on one chunk is: stages count by their predicted seconds.

    Attributes:
        tell: who is told.
        names: the engines of the stages.
        ends: the share of all that is done after each stage.
    """

    tell: Progress
    names: tuple[str, ...]
    ends: tuple[float, ...]

    @classmethod
    def of(
        cls, problem: Problem, evidence: Sequence[Evidence], stages: Sequence[Stage], settings: Settings
    ) -> StageBoard:
        """Weigh the stages that can be asked.

        Args:
            problem: the model and the region.
            evidence: the claims.
            stages: the stages that apply.
            settings: engines, time and memory.
        """
        claims = [item.claim for item in evidence]
        expected = [forecast(stage, problem, claims, settings) for stage in stages]
        weights = [
            0.0
            if obstacle(stage, problem, one, settings)
            else UNPREDICTED
            if one.seconds is None
            else one.seconds
            for stage, one in zip(stages, expected, strict=True)
        ]
        whole = max(sum(weights), 1e-9)
        ends = tuple(total / whole for total in itertools.accumulate(weights))
        return cls(settings.options.progress, tuple(stage.engine for stage in stages), ends)

    def part(self, place: int) -> Progress:
        """Return whom one stage tells how far it is.

        Args:
            place: the number of the stage.
        """
        first = self.ends[place - 1] if place else 0.0

        def tell(stage: str, share: float) -> None:
            self.tell(f"{self.names[place]} {stage}".strip(), first + share * (self.ends[place] - first))

        tell("", 0.0)
        return tell


UNPREDICTED = 1.0
"""Seconds that count for a stage whose time nobody can tell."""


def prove(
    problem: Problem,
    evidence: Sequence[Evidence],
    engine: Engine,
    options: EngineOptions = NO_OPTIONS,
    required: bool = False,
    expected: Forecast = NOTHING_EXPECTED,
) -> None:
    """Ask one engine about every functional that is still open.

    Args:
        problem: the model and the region.
        evidence: what is known of each claim; what the engine says is added.
        engine: who is asked.
        options: what it may use.
        required: whether it is an error if the engine refuses; otherwise it is passed over.
        expected: what it was predicted to take, for the record.
    """
    for linear in (True, False):
        # Apart, since a call that is all margins keeps the ledger of its bounds.
        asked = [(item, chosen) for item in evidence if (chosen := _chosen(item, linear))]
        functionals = [item.claim.functionals[i] for item, chosen in asked for i in chosen]
        if not functionals:
            continue
        predicted = expected.margins if linear else expected.others
        note = Asked(engine.name, State.ASKED, 0.0, predicted, expected.memory, call=next(CALLS))
        if reason := refusal(engine, problem, functionals, options):
            if required:
                raise EngineError(f"{engine.name} cannot answer: {reason}")
            more = _memory_for(reason, problem, expected)
            note = replace(note, state=State.REFUSED, why=reason, options=more)
            for item, _ in asked:
                item.asked.append(note)
            continue
        start = time.perf_counter()
        try:
            bounds = bound_functionals(engine, problem, functionals, options=options)
        except OutOfTimeError as error:
            taken = time.perf_counter() - start
            note = replace(note, state=State.LATE, seconds=taken, why=str(error), options=expected.more)
            for item, _ in asked:
                item.asked.append(note)
            continue
        first = 0
        for item, chosen in asked:
            item.learn(chosen, bounds, first)
            item.seconds += bounds.seconds * len(chosen) / len(functionals)
            reached = float(bounds.lower[first : first + len(chosen)].min())
            item.asked.append(replace(note, seconds=bounds.seconds, reached=reached))
            first += len(chosen)


def _chosen(item: Evidence, linear: bool) -> list[int]:
    """The functionals of a claim to ask about; a vocabulary is worth asking once the named tokens are beaten."""
    functionals = item.claim.functionals
    chosen = [i for i in item.wanted() if is_margin(functionals[i]) is linear]
    if len(item.missing()) > len(chosen):
        chosen = [i for i in chosen if not is_tail(functionals[i])]
    return chosen


@dataclass(eq=False)
class AttackOrder:
    """An attack that is to be made: it looks for points that break what is not proved.

    Attributes:
        problem: the model and the region.
        evidence: what is known of each claim; witnesses and attained values are added.
        settings: budget and seed.
        share: the share of the budget to use.
        expected: what it was predicted to take, for the record.
        targets: what is open, and can be broken.
        left: the seconds that it had when it was ordered; None for no end.
        seconds: what it took.
    """

    problem: Problem
    evidence: Sequence[Evidence]
    settings: Settings
    share: float = 1.0
    expected: Forecast = NOTHING_EXPECTED
    targets: list[Evidence] = field(init=False)
    left: float | None = field(init=False)
    seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.left = self.settings.left
        self.targets = [item for item in self.evidence if item.open and not item.claim.wants_range]

    @property
    def budget(self) -> AttackBudget:
        """How hard it tries."""
        return (self.settings.budget or default_budget(self.problem)).part(self.share)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to attack, or nothing to attack with."""
        budget = self.budget
        late = self.left is not None and self.left <= 0.0
        return not self.targets or not (budget.samples or budget.restarts) or late

    @property
    def case(self) -> AttackCase:
        """The claims, and where the search starts."""
        claims = [item.claim for item in self.targets]
        return AttackCase(self.problem, claims, [item.corners() for item in self.targets])

    def carry_out(self) -> None:
        """Make the attack, and remember how far down each claim was brought."""
        if self.is_empty:
            return
        start = time.perf_counter()
        case, fast = self.case, not is_small(self.problem)
        seed, options = self.settings.seed, self.settings.options
        result = attack_claims(self.problem, case.claims, self.budget, seed, case.starts, fast, options)
        self.learn(result, time.perf_counter() - start)

    def learn(self, result: AttackResult, taken: float) -> None:
        """Take over what was found.

        Args:
            result: of the targets.
            taken: the seconds that it took.
        """
        self.seconds = taken
        note = Asked(
            ATTACK, State.ASKED, taken, self.expected.seconds, self.expected.memory, call=next(CALLS)
        )
        found = zip(self.targets, result.witnesses, result.values.tolist(), result.alpha, strict=True)
        for item, witness, value, alpha in found:
            item.witness = witness
            if witness is not None and is_way(self.problem.region):
                moved = moved_to_first_break(self.problem, item.claim, witness)
                item.witness, item.share = moved if moved is not None else (witness, None)
            item.seconds += taken / len(self.targets)
            item.asked.append(replace(note, reached=value))
            if math.isfinite(value) and (item.attack is None or value < item.attack):
                item.attack, item.reached = value, alpha


def carry_out_together(orders: Sequence[AttackOrder]) -> None:
    """Make the attacks of several prompts, those that are alike in the same passes through the model.

    Args:
        orders: attacks with the same settings but for deadlines, on claims without tails over a vocabulary.
    """
    waiting: dict[tuple[AttackBudget, bool], list[AttackOrder]] = {}
    for order in orders:
        if not order.is_empty:
            waiting.setdefault((order.budget, is_small(order.problem)), []).append(order)
    for (budget, small), some in waiting.items():
        start, left = time.perf_counter(), [order.left for order in some if order.left is not None]
        settings = some[0].settings
        options = replace(settings.options, deadline=time.monotonic() + sum(left) if left else None)
        results = attack_cases([order.case for order in some], budget, settings.seed, not small, options)
        taken = time.perf_counter() - start
        whole = sum(len(order.targets) for order in some)
        for order, result in zip(some, results, strict=True):
            order.learn(result, taken * len(order.targets) / whole)
