"""What is known of one claim: proved bounds, estimated bounds, a witness, and how far an attack came.

Proved and estimated bounds are kept apart, functional by functional. An estimate never tightens a proof, and a claim
that needs one of them for a single functional is `estimated`, whatever was proved of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines import Bounds, Guarantee
from prooflens.engines.attack import Witness
from prooflens.engines.bounds import Cover, Ledger, tighter
from prooflens.problem import Problem
from prooflens.queries import Claim
from prooflens.results.asked import Asked, explanation
from prooflens.results.outcome import Outcome, Verdict, least
from prooflens.results.tables import finite
from prooflens.verdicts.decide import PROVED_REASON, decide, reason_of, verdict_of

ATTACK = "attack"
"""The name of the attack, as an engine and as a stage."""

CLEAN = "clean"
"""What a verdict rests on where the clean input breaks the claim."""

MASK = "mask"
"""What a verdict rests on where no point could change anything: the claim is true by the mask alone."""

STARTS = 2
"""From so many corners of the weakest open functionals an attack also starts."""


@dataclass(frozen=True, eq=False)
class BoundSource:
    """Where a functional's lower bound is from: entry `place` of some bounds."""

    bounds: Bounds
    place: int

    @property
    def corner(self) -> Float[Tensor, " p"] | None:
        """The factors near which it is attained, if the engine knows."""
        return None if self.bounds.lower_corner is None else self.bounds.lower_corner[self.place]

    @property
    def ledger(self) -> Ledger | None:
        """How it adds up, if the engine knows."""
        held = self.bounds.lower_ledger
        return None if held is None else held.select(torch.tensor([self.place]))


@dataclass(eq=False)
class Known:
    """The best bounds of one guarantee, and where each lower bound is from."""

    guarantee: Guarantee
    lower: Float[Tensor, " F"]
    upper: Float[Tensor, " F"]
    sources: list[BoundSource | None]
    told: bool = False
    """Whether any engine said anything."""

    @classmethod
    def nothing(cls, claim: Claim, guarantee: Guarantee) -> Known:
        """Nothing is known but, if proved, the value of functionals that are constants.

        Args:
            claim: the claim.
            guarantee: what the bounds will be worth.
        """
        size = len(claim.conditions)
        lower = torch.full((size,), -torch.inf, dtype=torch.float64)
        upper = torch.full((size,), torch.inf, dtype=torch.float64)
        for i, functional in enumerate(claim.functionals):
            if guarantee is Guarantee.PROVED and not (functional.rows or functional.logits):
                lower[i] = upper[i] = functional.constant
        return cls(guarantee, lower, upper, [None] * size)

    def learn(self, chosen: Sequence[int], bounds: Bounds, first: int, engines: str) -> None:
        """Take over what is better: entries `first`, … of the bounds are those of the chosen functionals.

        Args:
            chosen: the numbers of the functionals that were asked about.
            bounds: what an engine proved of them, and perhaps of others.
            first: the place of the first of them in the bounds.
            engines: who gave the bounds, by name.
        """
        self.told = True
        here, places = slice(first, first + len(chosen)), torch.tensor(chosen)
        lower, upper, better, _ = tighter(
            (self.lower[places], self.upper[places]),
            (bounds.lower[here], bounds.upper[here]),
            self.guarantee,
            engines,
        )
        self.lower[places], self.upper[places] = lower, upper
        for offset in better.nonzero()[:, 0].tolist():
            self.sources[chosen[offset]] = BoundSource(bounds, first + offset)

    @property
    def bounds(self) -> Bounds:
        """The bounds alone, for `decide`."""
        return Bounds(self.lower, self.upper, self.guarantee, "", 0.0)


@dataclass(eq=False)
class Evidence:
    """What is known of one claim so far."""

    claim: Claim
    proved: Known
    estimated: Known
    broken: bool
    """Whether the clean input lies in the region and breaks the claim."""
    engines: list[str] = field(default_factory=list)
    witness: Witness | None = None
    attack: float | None = None
    reached: Float[Tensor, " p"] | None = None
    """The factors at which an attack attained its smallest value."""
    seconds: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    """Who was asked so far, and who was not."""
    share: float | None = None
    """Of a witness on the way to another prompt: its share of the way."""

    @classmethod
    def about(cls, claim: Claim, centred: bool = True) -> Evidence:
        """Start with nothing.

        Args:
            claim: what is claimed.
            centred: whether the clean input is a point of the region, so that it can break the claim.
        """
        proved, estimated = (Known.nothing(claim, kind) for kind in (Guarantee.PROVED, Guarantee.ESTIMATED))
        return cls(claim, proved, estimated, centred and claim.clean_breaks)

    @property
    def provable(self) -> bool:
        """Whether there is something to prove: no tie, and not broken by the clean input."""
        return self.claim.tie is None and not self.broken

    @property
    def guarantee(self) -> Guarantee | None:
        """What shows that the claim holds; None if nothing does."""
        return decide(self.claim, *self._known)

    @property
    def verdict(self) -> Verdict:
        """What the evidence is worth."""
        broken = self.witness is not None or self.broken
        return verdict_of(self.claim, broken, *self._known)

    @property
    def _known(self) -> list[Bounds]:
        """What is proved, and what is estimated if anything is."""
        return [known.bounds for known in (self.proved, self.estimated) if known is self.proved or known.told]

    @property
    def open(self) -> bool:
        """Whether more work could decide it by proof or by a witness."""
        return self.provable and self.witness is None and self.guarantee is not Guarantee.PROVED

    @property
    def decided(self) -> bool:
        """Whether there is an answer that more work need not change."""
        return not self.open or self.guarantee is not None

    def missing(self) -> list[int]:
        """The functionals whose proved bounds do not yet do what is wanted of them."""
        met = self.claim.met_each(self.proved.lower, self.proved.upper)
        return [i for i, done in enumerate(met.tolist()) if not done]

    def wanted(self) -> list[int]:
        """The functionals that another engine is asked about: what is missing, and ranges, which can be tighter."""
        if not self.provable or self.witness is not None:
            return []
        if self.claim.wants_range:
            return list(range(len(self.claim.conditions)))
        return self.missing()

    def learn(self, chosen: Sequence[int], bounds: Bounds, first: int) -> None:
        """Take over what is better, among bounds of the same guarantee.

        Args:
            chosen: numbers of functionals of the claim.
            bounds: bounds of many functionals, with their guarantee.
            first: the entry of `bounds` that is the first chosen functional's; the others follow it.
        """
        if bounds.engine not in self.engines:
            self.engines.append(bounds.engine)
        known = self.proved if bounds.guarantee is Guarantee.PROVED else self.estimated
        known.learn(chosen, bounds, first, "+".join(self.engines))

    def corners(self) -> Float[Tensor, "K p"] | None:
        """Where to start an attack: how far one came, and where the weakest open functionals are nearly attained."""
        lower = torch.where(self._guessed(), self.estimated.lower, self.proved.lower)
        every = self._sources()
        sources = [every[i] for i in sorted(self.missing(), key=lambda i: float(lower[i]))]
        found = [s.corner for s in sources if s is not None and s.corner is not None][:STARTS]
        found += [] if self.reached is None else [self.reached]
        return torch.stack(found) if found else None

    def outcome(self, problem: Problem) -> Outcome:
        """The claim as it ends.

        Args:
            problem: the model and the region.
        """
        verdict, witness = self.verdict, self.witness
        clean = verdict is Verdict.FAILS and witness is None
        if clean:
            region = problem.region
            witness = Witness(region.reference, region.anchor_factors, self.claim.clean)
        attack = self.attack if witness is None else finite(least(self.claim, witness.values))
        engine = (CLEAN if clean else ATTACK) if verdict is Verdict.FAILS else self.named()
        return Outcome(
            self.claim,
            verdict,
            self.bounds(),
            witness,
            self._reason(clean),
            engine,
            attack,
            self.seconds,
            tuple(self.asked),
        )

    def named(self) -> str:
        """The engines that the lower bounds are from; all that were asked where nothing is decided."""
        if (self.open and self.guarantee is None) or self.claim.tie is not None:
            return "+".join(self.engines) or ("none" if self.attack is None else ATTACK)
        return "+".join(dict.fromkeys(s.bounds.engine for s in self._sources() if s is not None)) or MASK

    def bounds(self) -> Bounds:
        """The bounds that are shown, functional by functional, with the weakest of their guarantees."""
        guessed, sources = self._guessed(), self._sources()
        corners = [s.corner for s in sources if s is not None and s.corner is not None]
        whole = bool(corners) and len(corners) == len(sources)
        return Bounds(
            torch.where(guessed, self.estimated.lower, self.proved.lower),
            torch.where(guessed, self.estimated.upper, self.proved.upper),
            Guarantee.ESTIMATED if bool(guessed.any()) else Guarantee.PROVED,
            self.named(),
            self.seconds,
            lower_corner=_signs(torch.stack(corners)) if whole else None,
            lower_ledger=_ledger(sources),
            cover=self._cover(),
            tail=next((s.bounds.tail for s in sources if s is not None and s.bounds.tail is not None), None),
        )

    def _cover(self) -> Cover | None:
        """The pieces on which one engine proved what it did, with the other bounds on every piece; None for none."""
        sources = self._sources()
        cut = next((s.bounds for s in sources if s is not None and s.bounds.cover is not None), None)
        if cut is None or cut.cover is None or bool(self._guessed().any()):
            return None
        pieces = len(cut.cover.low)
        lower, upper = (side.expand(pieces, -1).clone() for side in (self.proved.lower, self.proved.upper))
        for i, source in enumerate(sources):
            if source is not None and source.bounds is cut:
                lower[:, i], upper[:, i] = cut.cover.lower[:, source.place], cut.cover.upper[:, source.place]
        return Cover(cut.cover.low, cut.cover.high, lower, upper)

    def _guessed(self) -> Bool[Tensor, " F"]:
        """For which functionals the estimate stands: it does what no proof does, or nothing is proved at all."""
        proved, estimated = self.proved, self.estimated
        if not estimated.told:
            return torch.zeros(len(proved.lower), dtype=torch.bool)
        enough, guess = (self.claim.met_each(known.lower, known.upper) for known in (proved, estimated))
        return ~enough & (guess | (_is_blank(proved) & ~_is_blank(estimated)))

    def _sources(self) -> list[BoundSource | None]:
        """Where the bounds that are shown are from."""
        pairs = zip(self._guessed().tolist(), self.estimated.sources, self.proved.sources, strict=True)
        return [estimate if guessed else proof for guessed, estimate, proof in pairs]

    def _reason(self, clean: bool) -> str:
        if clean:
            return "the clean input breaks it"
        if self.share is not None:
            return f"it breaks first at {100.0 * self.share:.3g} % of the way"
        behind = [source.bounds for source in self._sources() if source is not None]
        tail = next((bounds.tail for bounds in behind if bounds.tail is not None), None)
        proved = PROVED_REASON if self.engines else "true by the mask alone"
        guessed = [bounds.engine for bounds in behind if bounds.guarantee is Guarantee.ESTIMATED]
        whole = proved if tail is None else f"{proved}; {tail}"
        return reason_of(self.claim, self.verdict, guessed, whole, explanation(self.asked))


def _is_blank(known: Known) -> Bool[Tensor, " F"]:
    """Where nothing is known on either side."""
    return ~(known.lower.isfinite() | known.upper.isfinite())


def _ledger(sources: Sequence[BoundSource | None]) -> Ledger | None:
    """The ledgers of all functionals as one; None where one of them has none."""
    found = [None if source is None else source.ledger for source in sources]
    parts = [part for part in found if part is not None]
    if not parts or len(parts) < len(found):
        return None
    corner, value, penalty = (
        torch.cat([part.corner for part in parts]),
        torch.cat([part.value for part in parts]),
        torch.cat([part.penalty for part in parts]),
    )
    return Ledger(_signs(corner), value, penalty)


def _signs(corner: Tensor) -> Tensor:
    """Corners of the factor box as int8: an eighth of the memory. What a functional does not read stays at 0."""
    return corner.to(torch.int8) if bool((corner == corner.sign()).all()) else corner
