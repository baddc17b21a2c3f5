"""Linear forms of a layer's scores, bounded on the whole region.

A form f = Σ w·a_hij + constant is, exactly, f(0) + a·α + Σ_s v_s·r_s + products of moves, v_s its covector at the
output of site s. Two readings, the second only where the first leaves a sign open:

1. v_s·r_s by the ellipsoids of the last chain, root included.
2. Covectors are walked back to the input. The second orders of all sites on the way add up to one quadratic form of
   the factors, ½αᵀHα, in which tokens, heads and sites cancel; what sites leave beyond it is bounded one by one, or
   all at once as it moves with the factors (`moving`). With a diagonal D ⪰ H, D ≥ 0,

       a·α + ½αᵀHα ≤ ‖a‖₁ + ½ΣD,   and   ≤ m(s) + Σ max(0, 2(D − G))   at the corner s = sign a, G = s ⊙ (a + Hs),

   m(s) the left-hand side there: for α = s − s ⊙ β, β ∈ [0, 2]ᵖ, it is at most m(s) + Σ(−G_kβ_k + ½D_kβ_k²), which is
   convex in each β_k.

A form of two networks side by side (`Form.plus`) is read likewise. Its slope, its H, and its covectors at whatever the
two walks share are sums, taken before norms are; only what stands behind the difference is bounded for each alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prooflens.checker.depth.boxes import Quadric, largest_on_box
from prooflens.checker.depth.layers import Layer, Pooled
from prooflens.checker.depth.moving import MOST_FACTORS, Left, Moving, Term
from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.scores import ScoreSite
from prooflens.checker.depth.shapes import (
    Array,
    ball,
    gamma,
    gram,
    length,
    meeting,
    scaled,
    support,
    supports,
    total,
    up,
)
from prooflens.checker.depth.strands import Bundle, Covectors, Strand, bundled, through
from prooflens.checker.depth.values import ROOT, factor_weights
from prooflens.checker.depth.walk import LetGoError, Walk

Terms = Sequence[tuple[Layer, list[Term]]]
"""Scores of layers."""
SMALL = 1e-5
"""Where sites leave less than this share of the slope, they are bounded one by one; any share is valid."""


class Level(NamedTuple):
    """Chains as many mixings behind the input as each other, and what stands in front of each; nothing at the input."""

    bundles: list[Bundle]
    places: list[Layer | Pooled]


@dataclass(frozen=True, eq=False)
class Form:
    """A linear form of scores or of outputs: f = center + slope·α + Σ_s v_s·r_s + products of moves + noise.

    Attributes:
        strands: where the form is read, in one network or in two, and its covectors there.
        number: the number of the layer where that is, or of layers for outputs.
        center: f at the centre, as it is computed.
        slope: its linear part [p].
        noise: what rounding makes of `center` and `slope`.
        second: sup of the products of moves, at Aα.
        beyond: what e adds to them.
        products: the products at Aα as quadratic maps of the factors, and their weights.
        terms: the scores that the form reads, if it reads scores.
    """

    strands: tuple[Strand, ...]
    number: int
    center: float
    slope: Array
    noise: float
    second: float = 0.0
    beyond: float = 0.0
    products: tuple[tuple[Quadratic, float], ...] = ()
    terms: tuple[tuple[Layer, list[Term]], ...] = ()

    def bounds(self) -> tuple[float, float]:
        """The first reading: f from below and from above."""
        bundles, lost = bundled(self.strands)
        missed = sum(
            float(support(bundle.chain.shapes[s][t], v))
            for bundle in bundles
            for (s, t), v in bundle.found.items()
            if s in bundle.chain.shapes
        )
        far = float(np.abs(self.slope).sum()) * (1.0 + gamma(len(self.slope) + 8)) + missed + lost
        return self._around(
            far + self.second + self.beyond + self.noise, far + self.second + self.beyond + self.noise
        )

    def tight_bounds(self) -> tuple[float, float]:
        """The second reading: f from below and from above; nothing where the walk has let go of earlier layers."""
        try:
            form, known, left = self._expansion()
        except LetGoError:
            return -np.inf, np.inf
        ends, most = [], sum(part.most for part in left)
        for sign in (-1.0, 1.0):
            joined, rest = Quadric(sign * form.H, form.error), 0.0
            alone = largest_on_box(sign * self.slope, joined) + most
            for part in left:
                joined, own = part.joined(joined, self.corner)
                rest += own
            ends.append(
                min(alone, largest_on_box(sign * self.slope, joined) + rest if left else np.inf) + known
            )
        return self._around(*ends)

    @property
    def corner(self) -> Array:
        """The factors at which the linear part is largest."""
        return np.where(self.slope >= 0.0, 1.0, -1.0)

    def expanded(self) -> tuple[Quadric, float]:
        """H and a bound of |f(α) − center − slope·α − ½αᵀHα| over the region."""
        form, known, left = self._expansion()
        return form, float(up(np.asarray(known + sum(part.most for part in left))))

    def _expansion(self) -> tuple[Quadric, float, list[Left]]:
        """H, what is known to be left beyond second order wherever the factors are, and what moves with them."""
        p = len(self.slope)
        form, rest, beyond = Quadric(np.zeros((p, p)), 0.0), self.noise, self.beyond
        steep = float(np.abs(self.slope).sum())
        for product, w in self.products:
            form = form.plus(product, np.array([w]))
        strands, number, left, levels = list(self.strands), self.number, list[Left](), list[Level]()
        while True:
            bundles, lost = bundled(strands)
            rest += lost
            for bundle in bundles:
                form, lost = _with_sites(bundle, form)
                left.append(self._left(bundle, lost, beyond))
                beyond = 0.0
            if number == 0:
                levels.append(Level(bundles, []))
                if len(levels) > 1 and sum(part.most for part in left) > SMALL * steep:
                    left = min(
                        (left, self._carried(levels)), key=lambda parts: sum(x.at(self.corner) for x in parts)
                    )
                rest += sum(
                    float(support(bundle.chain.shapes[ROOT][t], v))
                    for bundle in bundles
                    for (s, t), v in bundle.found.items()
                    if s == ROOT and ROOT in bundle.chain.shapes
                )
                return form, float(up(np.asarray(rest))), left
            number -= 1
            strands = []
            levels.append(Level(bundles, [bundle.walk.place(number) for bundle in bundles]))
            for bundle, place in zip(*levels[-1], strict=True):
                roots = {t: v for (s, t), v in bundle.found.items() if s == ROOT}
                form, lost, seeds = through(place.mix, roots, form)
                rest += lost
                strands.append(Strand(bundle.walk, place, seeds))

    def _left(self, bundle: Bundle, lost: float, beyond: float) -> Left:
        """What a chain's sites leave: one by one, or all at once.

        Args:
            bundle: the chain.
            lost: what they leave one by one.
            beyond: what e adds to products of queries and keys that are read there.
        """
        alone = lost + beyond
        apart = Left.fixed(alone, len(self.slope))
        moving = Moving(bundle.chain)
        small = alone <= SMALL * float(np.abs(self.slope).sum())
        if small or not _moves_on(moving, bundle, self.terms if beyond else ()):
            return apart
        return min(apart, moving.left(self.corner), key=lambda left: left.at(self.corner))

    def _carried(self, levels: Sequence[Level]) -> list[Left]:
        """The same of all chains, from the last one on: what meets the root of one goes on to the chain in front.

        Args:
            levels: the chains.
        """
        every, found = dict[int, Moving](), list[Left]()
        for level in levels:
            for number, bundle in enumerate(level.bundles):
                moving = every.get(id(bundle.chain)) or Moving(bundle.chain)
                if not _moves_on(moving, bundle, () if every else self.terms):
                    return [Left.fixed(np.inf, len(self.slope))]
                missed = None
                if level.places:
                    place = level.places[number]
                    assert place.mix is not None
                    earlier = every.setdefault(id(place.chain), Moving(place.chain))
                    moving.onward(place.mix, place.read, earlier)
                    missed = [place.mix.missed[t] for t in place.mix.tokens]
                found.append(moving.left(self.corner, missed))
        return found

    def plus(self, other: Form) -> Form:
        """The sum with a form of the same network, or of one that is walked beside it, read as deep.

        Args:
            other: the form that is added.
        """
        if self.number != other.number:
            raise ValueError("forms are added that are not read at the same depth")
        sizes = sum(abs(form.center) + float(np.abs(form.slope).sum()) for form in (self, other))
        return Form(
            (*self.strands, *other.strands),
            self.number,
            self.center + other.center,
            self.slope + other.slope,
            float(up(np.asarray(self.noise + other.noise + gamma(4) * sizes))),
            self.second + other.second,
            self.beyond + other.beyond,
            (*self.products, *other.products),
            (*self.terms, *other.terms),
        )

    def _around(self, below: float, above: float) -> tuple[float, float]:
        """center − below and center + above, rounded outward; nothing where they are not finite."""
        low, high = (
            self.center + sign * float(up(np.asarray(far))) for sign, far in ((-1.0, below), (1.0, above))
        )
        if not (np.isfinite(low) and np.isfinite(high)):
            return -np.inf, np.inf
        return float(np.nextafter(low, -np.inf)), float(np.nextafter(high, np.inf))


def score_form(walk: Walk, layer: int, terms: list[Term]) -> Form:
    """Σ w·a_hij of one layer's scores."""
    place = walk.layer(layer)
    scores = place.scores
    rows = [w * scores.row(h, i, j) for w, h, i, j in terms]
    values = [w * float(scores.center[h, i, j]) for w, h, i, j in terms]
    noise = sum(abs(w) * float(scores.noise[h, i, j]) for w, h, i, j in terms)
    # Products with w and their sum round by γ of themselves, at the centre and in the slope.
    noise += gamma(len(terms) + 8) * float(sum(map(abs, values)) + sum(np.abs(row).sum() for row in rows))
    seeds: dict[str, Covectors] = {"q": {}, "k": {}}
    n, products = scores.q.width, []
    for w, h, i, j in terms:
        g = int(scores.k.groups[h])
        factor = float(scores.factors[h, i, j])
        for name, heads, t, part, other in (
            ("q", scores.q, i, h, scores.k.c[j, h]),
            ("k", scores.k, j, g, scores.q.c[i, h]),
        ):
            held = seeds[name].setdefault(t, np.zeros(heads.value.c.shape[1]))
            held[part * n : (part + 1) * n] += w * factor * other
        products.append((Quadratic(np.full((1, n), factor), scores.q.A[i, h], scores.k.A[j, g]), w))
    second, beyond = _moves(scores, terms)
    if (caps := scores.caps) is not None:
        for w, h, i, j in terms:
            row, rest = scores.raw_row(h, i, j)[None], float(caps.rest[h, i, j])
            products.append((Quadratic(caps.bend[None, None, h, i, j], row, row), w))
            noise, second = (
                noise + abs(w) * rest,
                second + abs(w) * max(float(caps.most[h, i, j]) - rest, 0.0),
            )
    slope = sum(rows, np.zeros(scores.q.A.shape[-1]))
    strands = (Strand(walk, place, seeds),)
    read = ((place, terms),)
    return Form(strands, layer, float(sum(values)), slope, noise, second, beyond, tuple(products), read)


def _moves(scores: ScoreSite, terms: list[Term]) -> tuple[float, float]:
    """What products of moves add: at Aα, and through e. Terms of one head and query are taken together."""
    groups = defaultdict[tuple[int, int], list[tuple[float, int]]](list)
    for w, h, i, j in terms:
        groups[h, i].append((w * float(scores.factors[h, i, j]), j))
    second = beyond = 0.0
    E_q, E_k, P_q = scores.q.blocks("E"), scores.k.blocks("E"), scores.q.blocks("P")
    for (h, i), held in groups.items():
        A = np.asarray(sum(w * scores.k.A[j, scores.k.groups[h]] for w, j in held))
        error = gamma(len(held) + 8) * sum(abs(w) * float(scores.k.A_size[j, h]) for w, j in held)
        slip = error + sum(abs(w) * float(scores.k.value.slip[j]) for w, j in held)
        P = total([gram(A * factor_weights(A)), ball(np.asarray(slip), len(A))])
        E = total([scaled(E_k[j, h], w * w) for w, j in held])
        whole = total([P_q[i, h], E_q[i, h]])
        second += float(meeting(P_q[i, h], P))
        beyond += float(meeting(whole, E) + meeting(E_q[i, h], P))
    return float(up(np.asarray(second))), float(up(np.asarray(beyond)))


def output_form(walk: Walk, weights: dict[int, float]) -> Form:
    """Σ w·output_index."""
    end = walk.end()
    W, bias = end.head
    rows = np.array(list(weights))
    w = np.array(list(weights.values()))
    covector, constant = w @ W[rows], float(w @ bias[rows])
    error = gamma(len(rows) + 8) * float(np.abs(w) @ length(W[rows]))
    size = float(length(covector)) + error
    center, slope, noise, seeds = constant, np.zeros(walk.generators.shape[-1]), 0.0, Covectors()
    for t, share in enumerate(end.shares.tolist()):
        if share:
            seeds[t] = share * covector
            center += float(seeds[t] @ end.value.c[t])
            slope = slope + seeds[t] @ end.value.linear[t]
            # The covector errs by `error`, which meets the whole value; its products with centre and slope round.
            moved = float(end.value.size[t]) * abs(share)
            noise += (error + gamma(len(covector) + len(rows) + 32) * 4.0 * size) * moved
    noise += gamma(len(rows) + 8) * float(np.abs(w) @ np.abs(bias[rows]))
    strands = (Strand(walk, end, {"value": seeds}),)
    return Form(strands, end.number, center, slope, float(up(np.asarray(noise))))


def output_floors(walk: Walk, weights: dict[int, float], rival: float, others: list[int]) -> Array:
    """Lower bounds of Σ w·output_index + rival·output_other for many others at once, by two ellipsoids per token.

    The linear part is bounded by its ellipsoid and not exactly, so a floor may be lower than `Form.bounds`.

    Args:
        walk: a walk as far as the outputs.
        weights: w by the index of its output.
        rival: the weight of each other output.
        others: the indices of the other outputs, one floor each.
    """
    end = walk.end()
    W, bias = end.head
    rows, w = np.array(list(weights), dtype=int), np.array(list(weights.values()))
    D = w @ W[rows] + rival * W[others]
    # Sums of len(rows) + 1 products, in the covectors and in the constants; then products with the value, as above.
    terms = np.abs(w) @ length(W[rows]) + abs(rival) * length(W[others])
    error = gamma(len(rows) + 16) * terms
    lows = w @ bias[rows] + rival * bias[others]
    far = gamma(len(rows) + 16) * (np.abs(w) @ np.abs(bias[rows]) + abs(rival) * np.abs(bias[others]))
    for t, share in enumerate(end.shares.tolist()):
        if share:
            value, size = end.value, float(end.value.size[t])
            lows = lows + share * (D @ value.c[t])
            moved = supports(value.P[t], D) + supports(value.E[t], D)
            far = far + abs(share) * (moved + (error + gamma(D.shape[1] + 32) * 4.0 * terms) * size)
    found = np.nextafter(lows - up(far), -np.inf)
    return np.where(np.isfinite(found), found, -np.inf)


def _with_sites(bundle: Bundle, form: Quadric) -> tuple[Quadric, float]:
    """A form with the second orders of a chain's sites, and a bound of what they leave, site by site."""
    roots, rest = dict[int, Quadric](), 0.0
    for (s, t), v in bundle.found.items():
        if s != ROOT:
            site = bundle.sites[s]
            d = site.source.J.shape[-1]
            before = roots.get(t) or Quadric(np.zeros((d, d)), 0.0)
            roots[t] = before.plus(site.quadratic(t), v, site.source.J[t])
            rest += site.rest(v, t)
    for t, at_root in roots.items():
        form = form.with_image(at_root, bundle.chain.N[t])
    return form, rest


def _moves_on(moving: Moving, bundle: Bundle, terms: Terms) -> bool:
    """Add what a chain's sites and products of queries and keys leave; whether they are its own and few enough."""
    if bundle.chain.N.shape[-1] > MOST_FACTORS or any(place.chain is not bundle.chain for place, _ in terms):
        return False
    for place, listed in terms:
        moving.products(place.scores, listed)
    for (s, t), v in bundle.found.items():
        if s != ROOT:
            site = bundle.sites[s]
            moving.site(site.source, t, *site.quadratic(t).hessian(v))
            moving.rest += site.rest_alone(v, t)
    return True
