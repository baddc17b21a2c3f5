"""Thresholds of many claims on one grid of ε, by bisection.

What is proved on a ball holds on every smaller one and what is broken stays broken on every larger one, so both
thresholds are sound whatever the engine does in between. Order: a short attack from above, proofs below what it
broke, a full attack on what is left between. Each attack also starts at the witness that broke the claim at the
nearest larger ε, pulled in. Proofs of deeper layers are dear: where they are made is guessed (`radius_guess`), one ε
at a time, and every claim that can learn from it does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from torch import Tensor

from prooflens.engines.attack import Witness, attack_claims
from prooflens.problem import Problem
from prooflens.queries import Claim
from prooflens.regions import Region
from prooflens.results import Subject
from prooflens.results.asked import Asked, ways_on
from prooflens.results.deployed import Difference, with_differences
from prooflens.results.frame import query_name
from prooflens.results.outcome import least
from prooflens.results.radii import RADII, TIME_ENDED, UNASKED_SOMEWHERE, RadiusEvidence
from prooflens.results.tables import claim_place, finite
from prooflens.verdicts.chunks import chunks
from prooflens.verdicts.deployed import Precision
from prooflens.verdicts.evidence import ATTACK, Evidence
from prooflens.verdicts.forecast import deadline_of, depth_of
from prooflens.verdicts.portfolio import gather_evidence
from prooflens.verdicts.radius_guess import guessed
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.stages import default_budget, is_small

Probe = Callable[[float, list[int]], list[bool]]
"""Given an ε and numbers of claims, returns for each whether it is still good at that ε."""


@dataclass(eq=False)
class RadiusSearch:
    """Brackets of all claims on the grid: below `proved` (inclusive) it is proved, from `broken` on it is broken."""

    problem: Problem
    claims: list[Claim]
    grid: list[float]
    balls: Callable[[float], Region]
    settings: Settings
    proved: list[int] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    witnesses: dict[int, Witness] = field(default_factory=dict)
    engines: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    skipped: dict[str, Asked] = field(default_factory=dict)
    """Engines that were not asked at some ε, and what they would have needed."""
    reached: dict[int, dict[int, float]] = field(default_factory=dict)
    """The margins that proofs left, by claim and place on the grid."""
    ends: dict[int, int] = field(default_factory=dict)
    """What the short attack broke, by claim."""
    late: bool = False
    """Whether the time ended before the search did."""
    told: tuple[str, float] = ("", 0.0)
    """What was told last: the radii so far, and the share of the search that is done."""
    span: tuple[float, float] | None = None
    """When the search began and has to end, on the clock of `time.monotonic`; None without a deadline."""

    def __post_init__(self) -> None:
        self.proved = [-1] * len(self.claims)
        self.broken = [len(self.grid)] * len(self.claims)
        self.asked = [i for i, claim in enumerate(self.claims) if Evidence.about(claim).open]

    def run(self) -> None:
        """Attack shortly, prove, attack again; whenever it stops, `proved` and `broken` are sound."""
        attacked = [i for i in self.asked if self.claims[i].functionals]
        whole = self.settings
        self.span = None if whole.deadline is None else (time.monotonic(), whole.deadline)
        for share, prove in ((0.2, False), (0.8, True), (1.0, False)):
            if (left := whole.left) is not None:
                self.settings = whole.until(time.monotonic() + share * left, whole.allotted)
            if prove:
                self.ends = dict(enumerate(self.broken))
                self._bisect(self.asked, self.proved, list(self.broken), self._is_proved, 0.3, True)
            else:
                attack = self._survives(share)
                self._bisect(attacked, list(self.proved), self.broken, attack, 0.0 if share < 1.0 else 0.7)

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
        Engines that walk a deep model do the same work for one claim as for many: all that can learn from an ε do, and
        one ε is asked at a time.
        """
        step = dict.fromkeys(chosen, 1)
        deep = {i for i in chosen if from_above and depth_of(self.problem, self.claims[i])}
        gaps = [bad[i] - good[i] for i in chosen]
        while any(bad[i] - good[i] > 1 for i in chosen) and not self._is_late():
            wanted: dict[int, list[int]] = {}
            guesses: list[int] = []
            for i in chosen:
                if bad[i] - good[i] > 1:
                    place = (good[i] + bad[i]) // 2
                    if i in deep:
                        guesses.append(self._guess(i, good[i], bad[i]))
                        continue
                    if from_above and good[i] < 0 and bad[i] < len(self.grid):
                        place = max(place, bad[i] - step[i])
                        step[i] *= 2
                    wanted.setdefault(place, []).append(i)
            if guesses:
                wanted.setdefault(sorted(guesses)[len(guesses) // 2], [])
            for place, members in sorted(wanted.items(), reverse=True):
                asked = [i for i in chosen if good[i] < place < bad[i] and (i in members or i in deep)]
                if asked and not self._is_late():
                    left = sum(math.log(max(1, bad[i] - good[i])) for i in chosen)
                    share = 1.0 - left / sum(math.log(max(2, gap)) for gap in gaps)
                    self.told = f"{self._so_far()}; now ε={self.grid[place]:.2g}", done + 0.3 * share
                    self._tell("")
                    self._ask(probe, place, asked, good, bad)

    def _guess(self, i: int, good: int, bad: int) -> int:
        """Where a deep claim's next proof is made."""
        claim = self.claims[i]
        depth, clean = depth_of(self.problem, claim), least(claim, claim.clean)
        broken = self.ends.get(i, len(self.grid))
        return guessed(self.grid, good, bad, broken, clean, self.reached.get(i, {}), depth)

    def _ask(self, probe: Probe, place: int, members: list[int], good: list[int], bad: list[int]) -> None:
        start = time.perf_counter()
        for i, fine in zip(members, probe(self.grid[place], members), strict=True):
            (good if fine else bad)[i] = place
        spent = (time.perf_counter() - start) / len(members)
        for i in members:
            self.seconds[i] = self.seconds.get(i, 0.0) + spent

    def _tell(self, stage: str, share: float = 0.0) -> None:
        """Tell the radii so far and what an engine does; the share is that of the search, or that of its time."""
        text, done = self.told
        if self.span is not None:
            begun, end = self.span
            done = max(done, min(1.0, (time.monotonic() - begun) / max(end - begun, 1e-9)))
        self.settings.options.progress(f"{text}, {stage}" if stage else text, done)

    def _is_late(self) -> bool:
        """Whether the time ended; the search is then not at its end, and the rows say so."""
        self.late = self.late or self.settings.options.late
        return self.settings.options.late

    def _so_far(self) -> str:
        """The radii so far, in words: of one claim both ends, of several how many are proved and how far."""
        proved = [self.grid[self.proved[i]] for i in self.asked if self.proved[i] >= 0]
        broken = [self.grid[self.broken[i]] for i in self.asked if self.broken[i] < len(self.grid)]
        parts = [f"{len(proved)} of {len(self.asked)} proved"]
        if proved:
            parts[0] += f" (ε {min(proved):.2g} to {max(proved):.2g})"
        if broken:
            parts.append(f"{len(broken)} broken (from {min(broken):.2g})")
        return ", ".join(parts)

    def _at(self, eps: float) -> Problem:
        return replace(self.problem, region=self.balls(eps))

    def _is_proved(self, eps: float, members: list[int]) -> list[bool]:
        """Which claims the engines prove on the ball; nothing is attacked here."""
        problem = self._at(eps)
        claims = [self.claims[i] for i in members]
        done = [False] * len(members)
        for chunk in chunks(problem, claims, self.settings.memory):
            evidence = [Evidence.about(claims[place]) for place in chunk]
            gather_evidence(problem, evidence, deadline_of(self.proofs, problem, claims))
            for item in evidence:
                self.skipped |= {note.engine: note for note in item.asked if not note.tried}
            for place, item in zip(chunk, evidence, strict=True):
                self.reached.setdefault(members[place], {})[self.grid.index(eps)] = least(
                    item.claim, item.proved.lower
                )
                if not item.open:
                    self.engines[members[place]] = item.named()
                    done[place] = True
        return done

    @property
    def proofs(self) -> Settings:
        """The settings without the attack; engines say what they do beside the radii so far."""
        stages = tuple(stage for stage in self.settings.stages if stage.engine != ATTACK)
        return replace(self.settings, stages=stages, progress=self._tell)

    def _survives(self, share: float) -> Probe:
        """Which claims no attack breaks on the ball; the witnesses of the others are kept."""

        def probe(eps: float, members: list[int]) -> list[bool]:
            problem = self._at(eps)
            budget = (self.settings.budget or default_budget(problem)).part(share)
            starts = [self._start(i, problem.region) for i in members]
            claims = [self.claims[i] for i in members]
            options = self.settings.options
            result = attack_claims(
                problem, claims, budget, self.settings.seed, starts, not is_small(problem), options
            )
            for i, witness in zip(members, result.witnesses, strict=True):
                if witness is not None:
                    self.witnesses[i] = witness
            return [witness is None for witness in result.witnesses]

        return probe

    def _start(self, i: int, region: Region) -> Tensor | None:
        """The last witness of a claim in the factors of another ball, clipped into it."""
        witness = self.witnesses.get(i)
        if witness is None:
            return None
        move = (witness.x - region.center).flatten()[region.moving]
        return (move / region.scale).clamp(-1.0, 1.0)[None]

    def table(
        self,
        subject: Subject,
        token: int | None,
        note: str = "",
        shares: Callable[[float], tuple[float | None, float | None]] | None = None,
    ) -> pa.Table:
        """The rows of all claims; `shares` says what a radius is worth in tokens.

        Args:
            subject: what the rows are about.
            token: the token that moved alone; None where all did.
            note: is added to the reason of every row.
            shares: returns a radius as a share of the distance to the nearest other token and of a token's length.
        """
        size = len(self.claims)
        label = "ball" if token is None else f"ball on token {token}"
        columns: dict[str, Any] = subject.columns(size) | {"region": [label] * size}
        for number, name in enumerate(("layer", "head", "position")):
            columns[name] = [claim_place(claim)[number] for claim in self.claims]
        ends = [self._ends(i) for i in range(size)]
        worth = [(None, None) if end[0] is None or shares is None else shares(end[0]) for end in ends]
        columns |= {
            "query": [query_name(claim.query) for claim in self.claims],
            "token": [token] * size,
            "certified": [end[0] for end in ends],
            "of_nearest": [of[0] for of in worth],
            "of_length": [of[1] for of in worth],
            "attack": [end[1] for end in ends],
            "clean": [finite(least(c, c.clean)) for c in self.claims],
            "unit": [c.query.unit for c in self.claims],
            "engine": [self.engines.get(i, "none") for i in range(size)],
            "ms": [1e3 * self.seconds.get(i, 0.0) for i in range(size)],
            "reason": [
                end[2] + (self._missed() if i in self.asked else "") + note for i, end in enumerate(ends)
            ],
        }
        return pa.table({name: columns[name] for name in RADII.names}, RADII)

    @property
    def evidence(self) -> list[RadiusEvidence]:
        """What the rows of `table` are about, in their order."""
        return [RadiusEvidence(claim, self.witnesses.get(i)) for i, claim in enumerate(self.claims)]

    def measured(self, table: pa.Table, precision: Precision | None) -> pa.Table:
        """Return the rows with what the deployed precision changes on the ball of each certified radius.

        Args:
            table: the rows of all claims.
            precision: measures; None if that was not asked for.
        """
        if precision is None:
            return table
        found: list[Difference | None] = [None] * len(self.claims)
        radii = table.column("certified").to_pylist()
        for eps in dict.fromkeys(radii):
            chosen = [i for i, one in enumerate(radii) if one == eps]
            witnesses = [self.witnesses.get(i) for i in chosen]
            worst = [None if one is None else one.x.to(self.problem.region.center)[None] for one in witnesses]
            there = precision.within(self.balls(eps) if eps else None)
            for i, one in zip(
                chosen, there.differences([self.claims[i] for i in chosen], worst), strict=True
            ):
                found[i] = one
        return with_differences(table, found)

    def _missed(self) -> str:
        """What was not done: engines that were not asked, a search that had no time for its end."""
        said = f"; {TIME_ENDED}" if self.late else ""
        if self.skipped:
            named = ", ".join(f"{item.engine} ({item.needs or item.why})" for item in self.skipped.values())
            said += f"{UNASKED_SOMEWHERE}{named}"
            ways = ways_on(self.skipped.values())
            said += f"; {ways}" if ways else ""
        return said

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
