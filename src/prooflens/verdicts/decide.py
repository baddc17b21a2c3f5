"""The one place that decides: is a claim met, and by bounds of which guarantee?

`Sense.met` says when one functional's bounds are enough, `Claim.met_each` asks it of all of them, and `decide` says
what that is worth. Proved and estimated bounds are never mixed: an estimate may fill a gap between proofs, and then
the whole is an estimate, because the weakest part counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prooflens.engines import Bounds, Guarantee
from prooflens.queries import Claim
from prooflens.results.outcome import Verdict

PROVED_REASON = "proved on the whole region"
OPEN_REASON = "neither proved nor broken"


def decide(claim: Claim, *known: Bounds) -> Guarantee | None:
    """Say what shows that a claim holds.

    Args:
        claim: what is claimed.
        known: bounds of all its functionals, in their order; each has one guarantee.

    Returns:
        `PROVED` if every condition is met by proved bounds, `ESTIMATED` if that takes an estimate, None if some
        condition is met by neither, or if the clean input leaves open what is claimed (a tie).

    Example:
        >>> import prooflens as pl
        >>> from prooflens.verdicts.question import ask
        >>> question = ask("toy", pl.load("toy").example(), pl.Ball(0.01), "0.0", positions=[-1])
        >>> claim = question.claims[0]
        >>> size = len(claim.functionals)
        >>> one, zero = torch.ones(size), torch.zeros(size)
        >>> decide(claim, Bounds(one, 2 * one, Guarantee.PROVED, "mine", 0.0))
        <Guarantee.PROVED: 'proved'>
        >>> decide(claim, Bounds(zero, 2 * one, Guarantee.PROVED, "mine", 0.0)) is None
        True
    """
    if claim.tie is not None:
        return None
    met = {guarantee: torch.zeros(len(claim.conditions), dtype=torch.bool) for guarantee in Guarantee}
    for bounds in known:
        if len(bounds.lower) == len(claim.conditions):
            met[bounds.guarantee] |= claim.met_each(bounds.lower, bounds.upper).cpu()
    if bool(met[Guarantee.PROVED].all()):
        return Guarantee.PROVED
    return Guarantee.ESTIMATED if bool((met[Guarantee.PROVED] | met[Guarantee.ESTIMATED]).all()) else None


def verdict_of(claim: Claim, broken: bool, *known: Bounds) -> Verdict:
    """Say how a claim ends.

    Args:
        claim: what is claimed.
        broken: whether a point of the region was found at which it is false.
        known: bounds of all its functionals, in their order; each has one guarantee.

    Returns:
        `unknown` for a tie, `fails` if it is broken, else what `decide` makes of the bounds.
    """
    if claim.tie is not None:
        return Verdict.UNKNOWN
    if broken:
        return Verdict.FAILS
    return VERDICTS[decide(claim, *known)]


VERDICTS = {Guarantee.PROVED: Verdict.HOLDS, Guarantee.ESTIMATED: Verdict.ESTIMATED, None: Verdict.UNKNOWN}
"""What a guarantee of all conditions makes of a claim that is not broken."""


def reason_of(
    claim: Claim,
    verdict: Verdict,
    guessed: Iterable[str],
    proved: str = PROVED_REASON,
    open_: str = OPEN_REASON,
) -> str:
    """Say in words why a claim ends as it does.

    Args:
        claim: what is claimed.
        verdict: how it ends.
        guessed: the engines whose estimates it rests on.
        proved: what to say of a claim that holds.
        open_: what to say of a claim that is neither proved nor broken.
    """
    match verdict:
        case Verdict.HOLDS:
            return proved
        case Verdict.FAILS:
            return "broken by a point of the region"
        case Verdict.ESTIMATED:
            return f"{'+'.join(dict.fromkeys(guessed))} only estimates: not a proof"
        case Verdict.UNKNOWN:
            return claim.tie or open_


def is_proved(claim: Claim, bounds: Bounds) -> bool:
    """Say whether bounds prove a claim.

    Args:
        claim: what is claimed.
        bounds: bounds of all its functionals, in their order.
    """
    return decide(claim, bounds) is Guarantee.PROVED
