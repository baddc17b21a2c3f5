"""Radii: the largest ε that is proved and the smallest that is broken, certified ≤ true ≤ attack.

All claims share one grid of ε, equally spaced in log ε, and each bisects on it: a call of an engine at one ε serves
every claim whose next question is that ε. What is proved on a ball holds on every smaller one and what is broken stays
broken on every larger one, so both thresholds are sound whatever the engine does in between. Order: a short attack
from above, proofs below what it broke, a full attack on what is left between. Each attack also starts at the witness
that broke the claim at the nearest larger ε, pulled in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from torch import Tensor

from prooflens.certify import Heads, ask, chunks, parse_budget
from prooflens.engines import Guarantee, Problem
from prooflens.engines.attack import Budget, Witness, attack_claims
from prooflens.errors import EngineError, QueryError, RegionError
from prooflens.frames import Subject, query_name
from prooflens.memory import parse_memory
from prooflens.models import Prompt, Transformer, load
from prooflens.portfolio import (
    ATTACK,
    Evidence,
    Settings,
    default_budget,
    depth_of,
    gather,
    is_small,
    part_of,
    stages_of,
)
from prooflens.progress import Progress, Show, shown
from prooflens.queries import Claim, Query
from prooflens.queries.rows import Token, find_tokens
from prooflens.regions import Ball, Region, listed
from prooflens.results import RADII, Radii, claim_place, finite

SMALLEST, LARGEST = 1e-7, 10.0
"""The ends of the grid of ε, unless others are asked for."""


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C during `radius`; `radii` has what is proved and broken so far, which is sound but not the end of it."""

    def __init__(self, radii: Radii) -> None:
        super().__init__("interrupted")
        self.radii = radii


Probe = Callable[[float, list[int]], list[bool]]
"""Told an ε and claims, says which of them are still good there."""


def radius(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    queries: str | Query | Sequence[str | Query] = ("top1",),
    heads: Heads = None,
    *,
    layer: int | None = None,
    tokens: Sequence[Token] | None = None,
    per_token: bool = False,
    engine: str = "auto",
    tolerance: float = 0.1,
    between: tuple[float, float] = (SMALLEST, LARGEST),
    memory: int | str | None = None,
    device: str | None = None,
    progress: Show = False,
    seed: int = 0,
    budget: Budget | str | None = None,
    positions: Sequence[Token] | None = None,
) -> Radii:
    """The certified and the attacked radius of every claim: proved for all of the ball of radius `certified`.

    Queries as in `certify`; `"2.4:top1@-1"` is one head at one position. Balls move the given `tokens` (default: all),
    or with `per_token` one token at a time, a row for each. Radii lie on a grid with steps of a factor 1 + `tolerance`;
    a certified radius of 0 means that nothing is proved at the smallest ε, an attack of null that nothing was broken at
    the largest.
    """
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise RegionError(f"the tolerance must be a positive number, got {tolerance}")
    low, high = between
    if not (0 < low < high and high / low < math.inf):
        raise RegionError(
            f"radii are searched between two positive numbers with a finite quotient, got {low} and {high}"
        )
    stages = stages_of(engine)
    settings = Settings(stages, parse_budget(budget), seed, parse_memory(memory))
    if engine not in ("auto", ATTACK) and settings.engine(engine).guarantee is not Guarantee.PROVED:
        raise EngineError(f"{engine} only estimates: a certified radius needs an engine that proves")
    model = load(model)
    count = math.ceil(math.log(high / low) / math.log1p(tolerance))
    grid = [low * (high / low) ** (k / count) for k in range(count + 1)]
    first = ask(
        model,
        prompt,
        Ball(1.0, tokens),
        heads,
        layer=layer,
        queries=queries,
        device=device,
        positions=positions,
    )
    if ranged := next((claim for claim in first.claims if claim.wants_range), None):
        raise QueryError(f"{ranged.query} has no radius: give a threshold, as in 'entropy<=1.5'")
    center = first.problem.region.center
    size = len(center)
    places = None if tokens is None else find_tokens(listed(tokens), size, first.subject.tokens)
    moves: list[int | None] = [None]
    if per_token:
        moves = [*(range(size) if places is None else places)]
    frames = []
    with shown(progress) as tell:
        for number, token in enumerate(moves):
            chosen = places if token is None else [token]

            def balls(eps: float, chosen: Sequence[int] | None = chosen) -> Region:
                return Ball(eps, chosen).around(center)

            def report(
                stage: str, share: float, number: int = number, name: str = f"token {token} " * per_token
            ) -> None:
                tell(name + stage, (number + share) / len(moves))

            search = Search(
                first.problem, first.claims, grid, balls, replace(settings, progress=None), report
            )
            try:
                search.run()
            except KeyboardInterrupt:
                frames.append(search.table(first.subject, token, "; the search was interrupted"))
                raise SearchInterrupted(Radii(pa.concat_tables(frames), first.subject)) from None
            frames.append(search.table(first.subject, token))
    return Radii(pa.concat_tables(frames), first.subject)


@dataclass(eq=False)
class Search:
    """Brackets of all claims on the grid: below `proved` (inclusive) it is proved, from `broken` on it is broken."""

    problem: Problem
    claims: list[Claim]
    grid: list[float]
    balls: Callable[[float], Region]
    settings: Settings
    tell: Progress
    proved: list[int] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    witnesses: dict[int, Witness] = field(default_factory=dict)
    engines: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.proved = [-1] * len(self.claims)
        self.broken = [len(self.grid)] * len(self.claims)
        self.asked = [i for i, claim in enumerate(self.claims) if Evidence.about(claim).open]

    def run(self) -> None:
        """Attack shortly, prove, attack again; whenever it stops, `proved` and `broken` are sound."""
        attacked = [i for i in self.asked if self.claims[i].functionals]
        self._bisect(attacked, list(self.proved), self.broken, self._survives(0.2), 0.0)
        self._bisect(self.asked, self.proved, list(self.broken), self._is_proved, 0.3, from_above=True)
        self._bisect(attacked, list(self.proved), self.broken, self._survives(1.0), 0.7)

    def _bisect(
        self,
        chosen: list[int],
        good: list[int],
        bad: list[int],
        probe: Probe,
        done: float,
        from_above: bool = False,
    ) -> None:
        """Move `good` up and `bad` down until they are neighbours; one probe per ε and round.

        `from_above`: a claim first goes down from `bad` in steps of 1, 2, 4, … since proofs end near what is broken.
        Engines that walk a deep model do the same work for one claim as for many: all that can learn from an ε do.
        """
        step = dict.fromkeys(chosen, 1)
        deep = {i for i in chosen if from_above and depth_of(self.problem, self.claims[i])}
        gaps = [bad[i] - good[i] for i in chosen]
        while any(bad[i] - good[i] > 1 for i in chosen):
            wanted: dict[int, list[int]] = {}
            for i in chosen:
                if bad[i] - good[i] > 1:
                    place = (good[i] + bad[i]) // 2
                    if from_above and good[i] < 0 and bad[i] < len(self.grid):
                        place = max(place, bad[i] - step[i])
                        step[i] *= 2
                    wanted.setdefault(place, []).append(i)
            for place, members in sorted(wanted.items(), reverse=True):
                asked = [i for i in chosen if good[i] < place < bad[i] and (i in members or i in deep)]
                if asked:
                    left = sum(math.log(max(1, bad[i] - good[i])) for i in chosen)
                    share = 1.0 - left / sum(math.log(max(2, gap)) for gap in gaps)
                    self.tell(f"ε={self.grid[place]:.2g}", done + 0.3 * share)
                    self._ask(probe, place, asked, good, bad)

    def _ask(self, probe: Probe, place: int, members: list[int], good: list[int], bad: list[int]) -> None:
        start = time.perf_counter()
        for i, fine in zip(members, probe(self.grid[place], members), strict=True):
            (good if fine else bad)[i] = place
        spent = (time.perf_counter() - start) / len(members)
        for i in members:
            self.seconds[i] = self.seconds.get(i, 0.0) + spent

    def _at(self, eps: float) -> Problem:
        return replace(self.problem, region=self.balls(eps))

    def _is_proved(self, eps: float, members: list[int]) -> list[bool]:
        """Which claims the engines prove on the ball; nothing is attacked here."""
        problem = self._at(eps)
        claims = [self.claims[i] for i in members]
        done = [False] * len(members)
        for chunk in chunks(problem, claims, self.settings.memory):
            evidence = [Evidence.about(claims[place]) for place in chunk]
            gather(problem, evidence, self.proofs)
            for place, item in zip(chunk, evidence, strict=True):
                if not item.open:
                    self.engines[members[place]] = item.named()
                    done[place] = True
        return done

    @property
    def proofs(self) -> Settings:
        """The settings without the attack."""
        stages = tuple(stage for stage in self.settings.stages if stage.engine != ATTACK)
        return replace(self.settings, stages=stages)

    def _survives(self, share: float) -> Probe:
        """Which claims no attack breaks on the ball; the witnesses of the others are kept."""

        def probe(eps: float, members: list[int]) -> list[bool]:
            problem = self._at(eps)
            budget = part_of(self.settings.budget or default_budget(problem), share)
            starts = [self._start(i, problem.region) for i in members]
            claims = [self.claims[i] for i in members]
            siege = attack_claims(problem, claims, budget, self.settings.seed, starts, not is_small(problem))
            for i, witness in zip(members, siege.witnesses, strict=True):
                if witness is not None:
                    self.witnesses[i] = witness
            return [witness is None for witness in siege.witnesses]

        return probe

    def _start(self, i: int, region: Region) -> Tensor | None:
        """The last witness of a claim in the factors of another ball, clipped into it."""
        witness = self.witnesses.get(i)
        if witness is None:
            return None
        move = (witness.x - region.center).flatten()[region.moving]
        return (move / region.scale).clamp(-1.0, 1.0)[None]

    def table(self, subject: Subject, token: int | None, note: str = "") -> pa.Table:
        """The rows of all claims."""
        size = len(self.claims)
        label = "ball" if token is None else f"ball on token {token}"
        columns: dict[str, Any] = subject.columns(size) | {"region": [label] * size}
        for number, name in enumerate(("layer", "head", "position")):
            columns[name] = [claim_place(claim)[number] for claim in self.claims]
        ends = [self._ends(i) for i in range(size)]
        columns |= {
            "query": [query_name(claim.query) for claim in self.claims],
            "token": [token] * size,
            "certified": [end[0] for end in ends],
            "attack": [end[1] for end in ends],
            "clean": [finite(float(c.clean.min())) if len(c.clean) else None for c in self.claims],
            "engine": [self.engines.get(i, "none") for i in range(size)],
            "ms": [1e3 * self.seconds.get(i, 0.0) for i in range(size)],
            "reason": [end[2] + note for end in ends],
        }
        return pa.table({name: columns[name] for name in RADII.names}, RADII)

    def _ends(self, i: int) -> tuple[float | None, float | None, str]:
        """Certified radius, attacked radius, and in words what they are."""
        claim = self.claims[i]
        if claim.tie is not None:
            return 0.0, None, claim.tie
        if claim.clean_breaks:
            return 0.0, 0.0, "the clean input breaks it"
        if i not in self.asked:
            return None, None, "true for every ε by the mask alone"
        certified = self.grid[self.proved[i]] if self.proved[i] >= 0 else 0.0
        if i not in self.witnesses:
            return certified, None, f"proved at ε={certified:.3g}; not broken up to {self.grid[-1]:.3g}"
        far = float((self.witnesses[i].x - self.problem.region.center).abs().max())
        # The distance rounds by half a unit in the last place; the ball it was found in is a bound as well.
        broken = min(math.nextafter(far, math.inf), self.grid[self.broken[i]])
        return certified, broken, f"proved at ε={certified:.3g}, broken at {broken:.3g}"
