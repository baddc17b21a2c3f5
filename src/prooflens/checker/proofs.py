"""Proved ranges of functionals on a whole region, by code that shares nothing with the engines.

Linear forms come first: differences of scores of layer 0 from `first_layer`, everything else from `depth`.
Functionals that a common shift of a row's scores leaves unchanged are functions of the attention weights, and s_j =
1/(1 + Σ e^{a_k − a_j}) with proved differences gives a box for those; masses and entropies are then programs over the
simplex, in Arb.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from flint import arb

from prooflens.checker.claims import OUTPUTS, Functional, keys_of
from prooflens.checker.depth import Form, Walk, output_floors, output_form, score_form
from prooflens.checker.first_layer import FirstLayer
from prooflens.checker.network import Array, Network
from prooflens.checker.region import Region

MOST_NUMBERS = 2**27
"""The largest linear part that is held: 1 GiB. A walk holds about ten of them."""


class OutOfTimeError(Exception):
    """The time that a check may take is over."""


class Range(NamedTuple):
    """Proved bounds, and a value that the functional reaches or stays below somewhere (∞: none known)."""

    low: float
    high: float
    reached: float = np.inf


NOTHING = Range(-np.inf, np.inf)


class Prover:
    """Bounds functionals of a network on a region.

    Args:
        net: the network.
        region: the region; constraints on its factors are left out, which only makes it larger.
        tell: called with what is being done; it may raise `OutOfTimeError`.
        blur: by how much the centre of each token may be off [S]; layer 0 is then proved by `depth` alone.
    """

    def __init__(
        self,
        net: Network,
        region: Region,
        tell: Callable[[str], None] = lambda what: None,
        blur: Array | None = None,
    ) -> None:
        self.net, self.region, self.tell, self.blur = net, region, tell, blur
        self._forms: dict[tuple[Any, ...], tuple[float, float]] = {}

    @cached_property
    def first(self) -> FirstLayer:
        """Layer 0 on the region, or on the box around it."""
        return FirstLayer(self.net, self.region.center, self.region.half_widths)

    @cached_property
    def refusal(self) -> str:
        """Why nothing beyond layer 0 is proved; empty if it is."""
        numbers = self.region.center.size * self.region.n_factors
        if numbers > MOST_NUMBERS:
            return f"a linear part of {numbers:,} numbers is more than the checker holds"
        why = Walk.refuses(self.net)
        return f"the checker's proofs of depth do not know this network: {why}" if why else ""

    @cached_property
    def walk(self) -> Walk:
        """The network on the region, as deep as it was asked."""
        told = lambda layer: self.tell(f"layer {layer}")  # noqa: E731
        return Walk(self.net, self.region.center, self.region.factors, told, self.blur)

    def give_up(self, why: str) -> None:
        """Prove nothing beyond layer 0 from now on, and let go of what was walked.

        Args:
            why: the reason.
        """
        self.__dict__.pop("walk", None)
        self.__dict__["refusal"] = f"proofs of depth were given up: {why}"

    def bounds(self, functional: Functional, tight: bool) -> Range:
        """A functional on the whole region; `tight` takes covectors back to the input, which costs more."""
        terms = functional["terms"]
        straight = [term for term in terms if term[1] in ("score", "logit")]
        if len(straight) == len(terms):
            return self._linear(functional, tight)
        if [term[1] for term in terms] == ["standing"]:
            return self._standing(functional, tight)
        if any(term[1] in OUTPUTS for term in terms):
            return self._against_largest(functional, tight)
        rows: set[tuple[int, int, int]] = {tuple(term[2:5]) for term in terms}
        for row in rows:
            if sum(Fraction(t[0]) for t in terms if tuple(t[2:5]) == row and t[1] != "entropy") != 0:
                return NOTHING
        total = arb(functional["constant"])
        boxes = {row: self._weights(*row, tight) for row in rows}
        if not all(boxes.values()):
            return NOTHING
        for term in terms:
            part = _of_weights(term, boxes[tuple(term[2:5])])
            if part is None:
                return NOTHING
            total += term[0] * part
        return Range(*outward(total))

    def _linear(self, functional: Functional, tight: bool) -> Range:
        """A sum of scores and of outputs: layer by layer, each a form of its own."""
        by_layer, outputs = defaultdict[int, list[Any]](list), dict[int, float]()
        for term in functional["terms"]:
            if term[1] == "logit":
                outputs[term[2]] = outputs.get(term[2], 0.0) + term[0]
            else:
                by_layer[term[2]].append((term[0], *term[3:6]))
        low = high = arb(functional["constant"])
        reached = arb("inf")
        for layer, terms in by_layer.items():
            own, value = self._scores(layer, terms, tight)
            low, high = low + own[0], high + own[1]
            if layer == 0 and len(by_layer) == 1 and not outputs:
                reached = functional["constant"] + arb(value)
        if outputs:
            own = self._outputs(outputs, tight)
            low, high = low + own[0], high + own[1]
        return Range(outward(low)[0], outward(high)[1], outward(reached)[1])

    def _scores(self, layer: int, terms: list[Any], tight: bool) -> tuple[tuple[float, float], float]:
        """Bounds of Σ w·a_hij of a layer, and a value that some point reaches or stays below (∞: none known)."""
        low, high, reached = -np.inf, np.inf, np.inf
        if layer == 0 and self.blur is None and self.first.knows and (pair := _difference(terms)):
            weight, head, i, j, k = pair
            most, least = self.first.upper(head, i, j, k)[0], self.first.upper(head, i, k, j)
            low = outward(weight * arb(-least[0]))[0]
            high = outward(weight * arb(most))[1]
            reached = outward(weight * arb(-least[1]))[1]
            if self.region.radius is not None:
                return (low, high), reached
        if not self.refusal:
            own = self._form(
                ("scores", layer, *map(tuple, terms)), lambda: score_form(self.walk, layer, terms), tight
            )
            low, high = max(low, own[0]), min(high, own[1])
        return (low, high), reached

    def _outputs(self, weights: dict[int, float], tight: bool) -> tuple[float, float]:
        if self.refusal:
            return -np.inf, np.inf
        key = ("outputs", *sorted(weights.items()))
        return self._form(key, lambda: self._output_form(weights), tight)

    def _output_form(self, weights: dict[int, float]) -> Form:
        """Σ w·output_index."""
        return output_form(self.walk, weights)

    def _form(self, key: tuple[Any, ...], make: Callable[[], Form], tight: bool) -> tuple[float, float]:
        """The bounds of a form, or its tight ones. What is not finite on the way proves nothing (`Form.bounds`)."""
        with np.errstate(all="ignore"):
            if key not in self._forms:
                self.tell("forms")
                self._forms[key] = make().bounds()
            low, high = self._forms[key]
            if tight and ("tight", *key) not in self._forms:
                self.tell("forms")
                again = make().tight_bounds()
                self._forms["tight", *key] = max(low, again[0]), min(high, again[1])
        return self._forms.get(("tight", *key), (low, high))

    def _standing(self, functional: Functional, tight: bool) -> Range:
        """c ± min(y, k-th smallest of y − y_j): order statistics are monotone, so bounds of differences bound it."""
        ((weight, _, index, k, rivals),) = functional["terms"]
        ends = [self._linear({"constant": 0.0, "terms": [[1.0, "logit", index]]}, tight)]
        if k <= len(rivals):
            gaps = [
                self._linear(
                    {"constant": 0.0, "terms": [[1.0, "logit", index], [-1.0, "logit", rival]]}, tight
                )
                for rival in rivals
            ]
            ends.append(Range(sorted(g.low for g in gaps)[k - 1], sorted(g.high for g in gaps)[k - 1]))
        sides = [arb(weight) * min(end[side] for end in ends) for side in (0, 1)]
        low, high = sides if weight > 0.0 else sides[::-1]
        constant = arb(functional["constant"])
        return Range(outward(constant + low)[0], outward(constant + high)[1])

    def _against_largest(self, functional: Functional, tight: bool) -> Range:
        """c + Σ w·logit − w₀·max of the other outputs, from below: the least over those others."""
        terms = functional["terms"]
        largest = [term for term in terms if term[1] == "largest"]
        rest = [term for term in terms if term[1] == "logit"]
        named = {term[2] for term in rest}
        if len(largest) != 1 or len(named) != len(terms) - 1 or largest[0][0] >= 0.0:
            return NOTHING
        weight, _, left_out = largest[0]
        if self.refusal:
            return NOTHING
        with np.errstate(all="ignore"):
            others = sorted(set(range(len(self.walk.end().head[0]))) - set(left_out))
            read = {int(term[2]): float(term[0]) for term in rest}
            floors = output_floors(self.walk, read, float(weight), others) if others else np.zeros(0)
        low = np.inf
        for other, floor in zip(others, floors.tolist(), strict=True):
            least = outward(arb(functional["constant"]) + arb(floor))[0]
            if least <= 0.0:
                again = {**functional, "terms": [*rest, [weight, "logit", other]]}
                least = max(least, self._linear(again, tight).low)
            low = min(low, least)
            if low == -np.inf or (low <= 0.0 and not tight):
                return NOTHING
        return Range(low, np.inf)

    def _weights(self, layer: int, head: int, i: int, tight: bool) -> dict[int, tuple[arb, arb]]:
        """Lower and upper bounds of the attention weights of a row; empty if nothing is known."""
        keys = [int(j) for j in np.flatnonzero(self.net.masks(len(self.region.center), layer)[head, i])]
        gaps = {}
        for j, k in itertools.combinations(keys, 2):
            (low, high), _ = self._scores(layer, [(1.0, head, i, j), (-1.0, head, i, k)], tight)
            gaps[j, k], gaps[k, j] = (low, high), (-high, -low)
        if not np.isfinite(list(gaps.values())).all():
            return {}
        box = {}
        for j in keys:
            others = [k for k in keys if k != j]
            most = sum((arb(gaps[k, j][1]).exp() for k in others), arb(1))
            least = sum((arb(gaps[k, j][0]).exp() for k in others), arb(1))
            box[j] = ((1 / most).lower(), (1 / least).upper())
        return box


def _difference(terms: list[Any]) -> tuple[float, int, int, int, int] | None:
    """w(a_ij − a_ik) of one head, with w > 0, if that is what the terms are: w, head, i, j, k."""
    if len(terms) != 2 or tuple(terms[0][1:3]) != tuple(terms[1][1:3]) or terms[0][0] != -terms[1][0]:
        return None
    (weight, head, i, j), k = terms[0], terms[1][3]
    return (weight, head, i, j, k) if weight > 0 else (-weight, head, i, k, j)


def _of_weights(term: list[Any], box: dict[int, tuple[arb, arb]]) -> arb | None:
    """An entropy or the logarithm of a mass, as a ball around its range; None where nothing is known."""
    if term[1] == "entropy":
        least, most = _entropy(list(box.values()))
        return least.union(most)
    inside = [box[key] for key in keys_of(term)]
    rest = [box[key] for key in set(box) - set(keys_of(term))]
    without = [1 - sum((s[side] for s in rest), arb(0)) for side in (1, 0)]
    low = max(sum(s[0] for s in inside), without[0].lower(), key=float)
    high = min(sum(s[1] for s in inside), without[1].upper(), key=float)
    return arb(low).log().union(arb(high).log()) if low > 0 else None


def outward(x: arb) -> tuple[float, float]:
    """Floats below and above a ball."""
    low, high = float(x.lower()), float(x.upper())
    return (np.nextafter(low, -np.inf), np.nextafter(high, np.inf)) if x.is_finite() else (-np.inf, np.inf)


def _entropy(box: list[tuple[arb, arb]]) -> tuple[arb, arb]:
    """Bounds of the entropy of all s in the box with Σs = 1.

    Below: no k weights sum to more than M_k = min(k largest upper, 1 − (S−k) smallest lower bounds), so s is majorised
    by the increments of M. Above, for every level θ: Σ h(x) + ν(1 − Σx), x = clip(θ), ν = −1 − log θ (weak duality).
    """
    lows = sorted(float(s[0]) for s in box)
    highs = sorted((float(s[1].max(arb(0))) for s in box), reverse=True)
    S, M = len(box), [0.0]
    for k in range(1, S):
        sums = sum(map(arb, highs[:k]), arb(0)), 1 - sum(map(arb, lows[: S - k]), arb(0))
        M.append(min(1.0, max(M[-1], min(outward(most)[1] for most in sums))))
    steps = [arb(b) - arb(a) for a, b in itertools.pairwise([*M, 1.0])]
    least = sum((_plogp(step) for step in steps if step.upper() > 0), arb(0)).lower().max(arb(0))
    left, right = 0.0, 1.0
    for _ in range(60):
        theta = 0.5 * (left + right)
        total = sum(min(float(s[1]), max(float(s[0]), theta)) for s in box)
        left, right = (theta, right) if total < 1.0 else (left, theta)
    x = [s[1].min(s[0].max(arb(right))) for s in box]
    most = sum(map(_plogp, x), arb(0)) + (-1 - arb(right).log()) * (1 - sum(x, arb(0)))
    return least, most.upper()


def _plogp(x: arb) -> arb:
    return -x * x.log()
