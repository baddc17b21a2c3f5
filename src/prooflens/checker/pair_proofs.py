"""Proved ranges of effects: sums of outputs of a network and of its edit, on a whole region.

Both are walked side by side (`depth`): what stands in front of the edit is walked once and cancels, slopes and second
orders are subtracted before norms are taken, and what the two make beyond that is bounded for each and added.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from flint import arb

from prooflens.checker.claims import Functional
from prooflens.checker.depth import Form, Walk, output_form
from prooflens.checker.distributions import KINDS as DISTRIBUTIONS
from prooflens.checker.distributions import effect_range
from prooflens.checker.proofs import MOST_NUMBERS, NOTHING, Prover, Range, outward


class PairProver(Prover):
    """Bounds functionals of a network and its edit: output i is that of the network, output C + i that of its edit."""

    net: Any
    """The pair: `first` and `second`."""

    @cached_property
    def refusal(self) -> str:
        """Why nothing is proved; empty if it is."""
        numbers = 2 * self.region.center.size * self.region.n_factors
        if numbers > MOST_NUMBERS:
            return f"linear parts of {numbers:,} numbers are more than the checker holds"
        for net in (self.net.first, self.net.second):
            if why := Walk.refuses(net):
                return f"the checker's proofs of depth do not know this network: {why}"
        return ""

    @cached_property
    def walk(self) -> Walk:
        """The network on the region."""
        told = lambda layer: self.tell(f"layer {layer}")  # noqa: E731
        region = self.region
        return Walk(self.net.first, region.center, region.factors, told, self.blur, other=self.net.second)

    @cached_property
    def edited(self) -> Walk:
        """Its edit, beside it."""
        return self.walk.beside()

    def _output_form(self, weights: dict[int, float]) -> Form:
        outputs = len(self.walk.end().head[0])
        own = {i: w for i, w in weights.items() if i < outputs}
        other = {i - outputs: w for i, w in weights.items() if i >= outputs}
        forms = [output_form(walk, w) for walk, w in ((self.walk, own), (self.edited, other)) if w]
        return forms[0] if len(forms) == 1 else forms[0].plus(forms[1])

    def bounds(self, functional: Functional, tight: bool) -> Range:
        """A functional on the whole region; distributions from ranges of differences of outputs."""
        if not functional["terms"] or functional["terms"][0][1] not in DISTRIBUTIONS:
            return super().bounds(functional, tight)
        sign = 1 if functional["terms"][0][0] > 0 else -1
        terms = [[sign * weight, *rest] for weight, *rest in functional["terms"]]
        weights = [term[0] for term in terms]
        if self.refusal or weights != ([1] if terms[0][1] == "divergence" else [1, -1]):
            return NOTHING
        found = effect_range(terms, lambda asked: self._linear({"constant": 0.0, "terms": asked}, tight)[:2])
        if found is None:
            return NOTHING
        low, high = found if sign > 0 else (-found[1], -found[0])
        constant = arb(functional["constant"])
        return Range(outward(constant + low)[0], outward(constant + high)[1])

    def _against_largest(self, functional: Functional, tight: bool) -> Range:
        """Nothing is known: the effect on a largest output is no sum of outputs."""
        return NOTHING
