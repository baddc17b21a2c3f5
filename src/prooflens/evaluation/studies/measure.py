"""How a study measures: claims on many inputs, what each engine decides of them, what an attack leaves standing.

Every claim counts in the denominator, also one that the clean input breaks already or that ties: the paper counts so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxtyping import Float
from torch import Tensor

from prooflens.engines import Bounds, Engine, Guarantee, get_engine
from prooflens.engines.attack import AttackBudget, attack_claims
from prooflens.engines.functionals import bound_claims, refusal
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions
from prooflens.evaluation.studies.base import COUNT, StudyError, StudyRow
from prooflens.models import Prompt, Transformer
from prooflens.problem import Problem
from prooflens.queries import Claim, Query, parse_query
from prooflens.queries.attention import Entropy, RowQuery
from prooflens.queries.rows import Token
from prooflens.regions import Ball
from prooflens.verdicts.chunks import chunks
from prooflens.verdicts.decide import decide
from prooflens.verdicts.stages import is_small

FULL = AttackBudget(5_000, 10, 50)
"""The attack on small models (Tab. `mc_budgets`, layer 0)."""

QUICK = AttackBudget(500, 2, 20)
"""The attack where a study must be quick, and on models of pretrained size."""

ON_PROVED = AttackBudget(32, 1, 5)
"""The attack on claims of pretrained models that are proved already: a check, not a search."""

NAT = "nat"
"""The unit of ranges of entropy: their mean width."""


@dataclass(frozen=True, eq=False)
class StudyCase:
    """One input and its claims, by the name of the query (`Q1`, `Q2`, …)."""

    problem: Problem
    claims: dict[str, list[Claim]]

    @classmethod
    def of(
        cls,
        model: Transformer,
        prompt: Prompt,
        eps: float,
        queries: Mapping[str, str | Query],
        layer: int,
        positions: Sequence[Token] | None = None,
        heads: str | None = None,
    ) -> StudyCase:
        """Return queries about all heads (or some) of a layer on the ball around an input.

        Args:
            model: the model.
            prompt: the input.
            eps: the radius of the ball.
            queries: what is asked, by name.
            layer: the layer.
            positions: query positions; None for all.
            heads: some of the layer's heads; None for all.
        """
        problem = Problem(model, Ball(eps).around(prompt))
        return cls(problem, bind(problem, queries, layer, positions, heads))

    @property
    def all(self) -> list[Claim]:
        """The claims of all queries."""
        return [claim for claims in self.claims.values() for claim in claims]


def bind(
    problem: Problem,
    queries: Mapping[str, str | Query],
    layer: int,
    positions: Sequence[Token] | None = None,
    heads: str | None = None,
) -> dict[str, list[Claim]]:
    """Return the claims that queries make about one layer of a problem, by the names of the queries.

    Args:
        problem: the model and the region.
        queries: what is asked, by name.
        layer: the layer.
        positions: query positions; None for all.
        heads: some of the layer's heads, as in `"1.0,1.3"`; None for all.
    """
    setting = problem.setting([layer])
    found = {}
    for name, query in queries.items():
        asked = parse_query(query) if isinstance(query, str) else query
        if positions is not None and isinstance(asked, RowQuery):
            asked = replace(asked, positions=tuple(positions))
        found[name] = asked.bind(setting, heads or str(layer))
    return found


@dataclass(eq=False)
class Measured:
    """What somebody says of the claims of some cases: which hold, and how wide ranges are."""

    holds: dict[str, list[bool]] = field(default_factory=dict)
    widths: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    cases: int = 0
    bounds: list[list[Bounds]] = field(default_factory=list)
    """StudyCase by case, claim by claim; empty for an attack."""
    reason: str = ""
    """Why an engine gave no answer."""

    def count(self, name: str) -> int:
        """How many claims of a query hold."""
        return sum(self.holds[name])

    def width(self, name: str) -> float:
        """The mean width of the ranges of a query."""
        values = self.widths[name]
        return sum(values) / max(1, len(values))


def answered(
    engine: str | Engine, cases: Sequence[StudyCase], options: EngineOptions = NO_OPTIONS
) -> Measured:
    """What one engine decides of every claim of every case, within the options."""
    asked = get_engine(engine) if isinstance(engine, str) else engine
    tally = Measured()
    for case in cases:
        claims = case.all
        parts: dict[int, Bounds] = {}
        start = time.perf_counter()
        for chosen in chunks(case.problem, claims, None):
            some = [claims[i] for i in chosen]
            functionals = [f for claim in some for f in claim.functionals]
            if reason := refusal(asked, case.problem, functionals, options):
                return Measured(reason=reason)
            parts |= dict(
                zip(chosen, bound_claims(asked, case.problem, some, options=options)[0], strict=True)
            )
        tally.seconds += time.perf_counter() - start
        tally.cases += 1
        tally.bounds.append([parts[i] for i in range(len(claims))])
        place = iter(tally.bounds[-1])
        for name, group in case.claims.items():
            for claim in group:
                _record(tally, name, claim, next(place))
    return tally


def _record(tally: Measured, name: str, claim: Claim, part: Bounds) -> None:
    if claim.wants_range:
        tally.widths.setdefault(name, []).append(float((part.upper - part.lower).max()))
        return
    sound = claim.tie is None and claim.clean_holds
    tally.holds.setdefault(name, []).append(sound and decide(claim, part) is not None)


def attacked(
    cases: Sequence[StudyCase],
    budget: AttackBudget,
    seed: int = 0,
    known: Measured | None = None,
    check: AttackBudget | None = None,
) -> Measured:
    """What an attack leaves standing, and how wide the ranges are that it attains.

    It starts from the corners that an engine knows. Claims that the engine proves get the budget `check` if there is
    one: they cannot break, and if one does the caller is told by `rows_of`.

    Args:
        cases: problems and claims.
        budget: how hard to attack.
        seed: seed of the attack.
        known: what an engine said of the same cases; None if none was asked.
        check: the budget for claims that the engine proves; None for the same.
    """
    tally = Measured()
    for number, case in enumerate(cases):
        claims = case.all
        bounds = known.bounds[number] if known is not None and known.bounds else [None] * len(claims)
        start = time.perf_counter()
        signs = [i for i, claim in enumerate(claims) if not claim.wants_range]
        ranges = [i for i, claim in enumerate(claims) if claim.wants_range]
        chosen = [claims[i] for i in signs]
        left = _standing(case.problem, chosen, [bounds[i] for i in signs], budget, check, seed)
        held = dict(zip(signs, left, strict=True))
        spans = _attained_ranges(case.problem, [claims[i] for i in ranges], budget, seed)
        widths = dict(zip(ranges, spans, strict=True))
        names = (name for name, group in case.claims.items() for _ in group)
        for i, name in enumerate(names):
            if i in held:
                tally.holds.setdefault(name, []).append(held[i])
            else:
                tally.widths.setdefault(name, []).append(widths[i])
        tally.seconds += time.perf_counter() - start
        tally.cases += 1
    return tally


def _standing(
    problem: Problem,
    claims: Sequence[Claim],
    bounds: Sequence[Bounds | None],
    budget: AttackBudget,
    check: AttackBudget | None,
    seed: int,
) -> list[bool]:
    """Which claims stand; those that are proved get the budget `check`, if there is one."""
    left = [claim.tie is None and claim.clean_holds for claim in claims]
    decided = [
        part is not None and decide(claim, part) is not None
        for claim, part in zip(claims, bounds, strict=True)
    ]
    for proved, tries in ((True, check or budget), (False, budget)):
        chosen = [
            i for i, stands in enumerate(left) if stands and decided[i] is proved and claims[i].functionals
        ]
        if not chosen:
            continue
        found = attack_claims(
            problem,
            [claims[i] for i in chosen],
            tries,
            seed,
            [_corner(bounds[i]) for i in chosen],
            fast=not is_small(problem),
        )
        for i, witness in zip(chosen, found.witnesses, strict=True):
            left[i] = witness is None
    return left


def _corner(part: Bounds | None) -> Tensor | None:
    """Where an engine's weakest bound is nearly attained."""
    if part is None or part.lower_corner is None or not len(part.lower):
        return None
    return part.lower_corner[part.lower.argmin()][None].double()


def attained_entropies(
    problem: Problem, claims: Sequence[Claim], budget: AttackBudget, seed: int = 0
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Return the smallest and the largest entropy that an attack attains, for every row that the claims read.

    Args:
        problem: the model and the region.
        claims: their rows are read.
        budget: how hard to attack.
        seed: seed of the attack.
    """
    setting = problem.setting(sorted({row.layer for claim in claims for row in claim.rows}))
    most = math.log(problem.n_tokens) + 1.0  # no entropy reaches it, so that no attack stops early
    ends = []
    for low, high in ((0.0, None), (None, most)):
        asked = [
            Entropy(low, high, heads=row.head_name, positions=(row.position,))
            for claim in claims
            for row in claim.rows
        ]
        bound = [claim for query in asked for claim in query.bind(setting)]
        fast = not is_small(problem)
        ends.append(attack_claims(problem, bound, budget, seed, None, fast).values.cpu())
    return ends[0], most - ends[1]


def _attained_ranges(
    problem: Problem, claims: Sequence[Claim], budget: AttackBudget, seed: int
) -> Iterator[float]:
    """Largest minus smallest entropy that an attack attains, row by row."""
    if not claims:
        return iter(())
    smallest, largest = attained_entropies(problem, claims, budget, seed)
    return iter((largest - smallest).clamp(min=0.0).tolist())


Published = Mapping[tuple[str, str], float]
"""The paper's figures by (method, query); its MC+PGD is the method `attack`."""


def rows_of(
    group: str,
    cases: Sequence[StudyCase],
    engines: Mapping[str, str | Engine],
    budget: AttackBudget,
    paper: Published | None = None,
    seed: int = 0,
    check: AttackBudget | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[StudyRow]:
    """A row per query and engine, the attack beside each. `engines` maps the paper's method to ours, best first.

    A claim that an engine proves and the attack breaks is a defect of the engine, and an error.

    Args:
        group: what the rows stand under.
        cases: problems and claims.
        engines: the engine for each of the paper's methods.
        budget: how hard the attack beside them tries.
        paper: the paper's figures; None if it has none.
        seed: seed of the attack.
        check: the budget for claims that an engine proves; None for the same.
        labels: other names for queries in the table; None for their own.
    """
    tallies = {method: answered(engine, cases) for method, engine in engines.items()}
    first = next((t for t in tallies.values() if t.bounds), None)
    left = attacked(cases, budget, seed, first, check)
    published = paper or {}
    rows = []
    for name in cases[0].claims:
        for method, engine in engines.items():
            asked = get_engine(engine) if isinstance(engine, str) else engine
            base = StudyRow(
                group,
                (labels or {}).get(name, name),
                unit=NAT if name in left.widths else COUNT,
                engine=asked.name,
                paper=published.get((method, name)),
                paper_attack=published.get(("attack", name)),
                attack=left.width(name) if name in left.widths else left.count(name),
                n=len(left.widths[name] if name in left.widths else left.holds[name]),
                note=tallies[method].reason,
            )
            rows.append(_filled(base, name, asked, tallies[method], left))
    return rows


def _filled(base: StudyRow, name: str, engine: Engine, tally: Measured, left: Measured) -> StudyRow:
    """The row with what the engine says; as it is where the engine refused."""
    if tally.reason:
        return base
    proved = engine.guarantee is Guarantee.PROVED
    seconds, false = tally.seconds / max(1, tally.cases), None
    if base.unit == NAT:
        figure: float = tally.width(name)
    else:
        figure = tally.count(name)
        pairs = zip(tally.holds[name], left.holds[name], strict=True)
        false = sum(holds and not stands for holds, stands in pairs)
        if false and proved:
            raise StudyError(
                f"{engine.name} proved {false} claims of {name} that the attack breaks: report this"
            )
    if proved:
        return replace(base, proved=figure, seconds=seconds)
    wrong = base.unit == NAT and base.attack is not None and figure < base.attack
    note = "the estimated range is narrower than what the attack attains: wrong" if wrong else ""
    return replace(base, estimated=figure, seconds=seconds, false=false, note=note)
