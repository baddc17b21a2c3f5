"""Linear forms of a layer's scores, bounded on the whole region.

A form f = Σ w·a_hij + constant is, exactly, f(0) + a·α + Σ_s v_s·r_s + products of moves, v_s its covector at the
output of site s. Two readings, the second only where the first leaves a sign open:

1. v_s·r_s by the ellipsoids of the last chain, root included.
2. Covectors are walked back to the input. The second orders of all sites on the way add up to one quadratic form of
   the factors, ½αᵀHα, in which tokens, heads and sites cancel; what sites leave beyond it is bounded one by one. With
   a diagonal D ⪰ H, D ≥ 0,

       a·α + ½αᵀHα ≤ ‖a‖₁ + ½ΣD,   and   ≤ m(s) + Σ max(0, 2(D − G))   at the corner s = sign a, G = s ⊙ (a + Hs),

   m(s) the left-hand side there: for α = s − s ⊙ β, β ∈ [0, 2]ᵖ, it is at most m(s) + Σ(−G_kβ_k + ½D_kβ_k²), which is
   convex in each β_k.

A form of two networks side by side (`Form.plus`) is read likewise. Its slope, its H, and its covectors at whatever the
two walks share are sums, taken before norms are; only what stands behind the difference is bounded for each alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prooflens.checker.depth.beside import Site
from prooflens.checker.depth.boxes import Quadric, largest_on_box
from prooflens.checker.depth.layers import End, Layer, Pooled
from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.moving import MOST_FACTORS, Moving, Term
from prooflens.checker.depth.pooling import PoolSite
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
    trace,
    up,
)
from prooflens.checker.depth.values import ROOT, Chain, factor_weights
from prooflens.checker.depth.walk import LetGoError, Walk

Covectors = dict[int, Array]
"""By token."""
SMALL = 1e-5
"""Where sites leave less than this share of the slope, they are bounded one by one; any share is valid."""


class Strand(NamedTuple):
    """A place of a walk, and covectors at the values that are read there."""

    walk: Walk
    place: Layer | Pooled | End
    seeds: dict[str, Covectors]


class Bundle(NamedTuple):
    """A chain that strands stand on: one of their walks, the sites, and covectors at the sources by name and token."""

    walk: Walk
    chain: Chain
    sites: dict[str, Site]
    found: dict[tuple[str, int], Array]


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
        bundles, lost = _bundled(self.strands)
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
            form, rest = self.expanded()
        except LetGoError:
            return -np.inf, np.inf
        ends = [largest_on_box(sign * self.slope, Quadric(sign * form.H, form.error)) for sign in (-1.0, 1.0)]
        return self._around(ends[0] + rest, ends[1] + rest)

    def expanded(self) -> tuple[Quadric, float]:
        """H and a bound of |f(α) − center − slope·α − ½αᵀHα| over the region."""
        p = len(self.slope)
        form, rest, beyond = Quadric(np.zeros((p, p)), 0.0), self.noise, self.beyond
        steep = float(np.abs(self.slope).sum())
        for product, w in self.products:
            form = form.plus(product, np.array([w]))
        strands, number = list(self.strands), self.number
        while True:
            bundles, lost = _bundled(strands)
            rest += lost
            for bundle in bundles:
                form, lost = _with_sites(bundle, form)
                if lost + beyond > SMALL * steep:
                    lost, beyond = min(lost + beyond, _moved(bundle, self.terms if beyond else ())), 0.0
                rest, beyond = rest + lost + beyond, 0.0
            if number == 0:
                rest += sum(
                    float(support(bundle.chain.shapes[ROOT][t], v))
                    for bundle in bundles
                    for (s, t), v in bundle.found.items()
                    if s == ROOT and ROOT in bundle.chain.shapes
                )
                return form, float(up(np.asarray(rest)))
            number -= 1
            strands = []
            for bundle in bundles:
                place = bundle.walk.place(number)
                roots = {t: v for (s, t), v in bundle.found.items() if s == ROOT}
                form, lost, seeds = _through(place.mix, roots, form)
                rest += lost
                strands.append(Strand(bundle.walk, place, seeds))

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


def _bundled(strands: Iterable[Strand]) -> tuple[list[Bundle], float]:
    """Covectors at the sources of every chain that strands stand on, added up there, and what rounding loses."""
    bundles, lost = list[Bundle](), 0.0
    for walk, place, seeds in strands:
        found, own = _at_sources(place, seeds)
        lost += own
        here = next((bundle for bundle in bundles if bundle.chain is place.chain), None)
        if here is None:
            bundles.append(Bundle(walk, place.chain, dict(place.sites), found))
            continue
        here.sites.update(place.sites)
        for (s, t), v in found.items():
            other = here.found.get((s, t))
            here.found[s, t] = v if other is None else other + v
            if other is not None and s in place.chain.shapes:
                size = np.sqrt(trace(place.chain.shapes[s][t]))
                lost += gamma(4) * float((length(v) + length(other)) * size)
    return bundles, float(up(np.asarray(lost)))


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


def _moved(bundle: Bundle, terms: Sequence[tuple[Layer, list[Term]]]) -> float:
    """Another bound of what a chain's sites leave, and products of the queries and keys of `terms`: by `moving`."""
    if bundle.chain.N.shape[-1] > MOST_FACTORS or any(place.chain is not bundle.chain for place, _ in terms):
        return np.inf
    moving = Moving(bundle.chain)
    for place, listed in terms:
        moving.products(place.scores, listed)
    for (s, t), v in bundle.found.items():
        if s != ROOT:
            site = bundle.sites[s]
            moving.site(site.source, t, *site.quadratic(t).hessian(v))
            moving.rest += site.rest_alone(v, t)
    return moving.bound()


def _at_sources(
    place: Layer | Pooled | End, seeds: dict[str, Covectors]
) -> tuple[dict[tuple[str, int], Array], float]:
    """Covectors at the sources of a chain by name and token, and what rounding loses on the way."""
    found: dict[tuple[str, int], Array] = {}
    lost = 0.0
    for name, held in seeds.items():
        value = place.read[name]
        for t, w in held.items():
            size = float(length(w))
            lost += size * float(value.slip[t])
            for s, J in value.jacobians.items():
                v = w @ J[t]
                found[s, t] = found[s, t] + v if (s, t) in found else v
                if s in value.spans:
                    lost += gamma(len(w) + 16) * size * float(value.spans[s][t])
    return found, float(up(np.asarray(lost)))


def _through(
    mix: MixSite | PoolSite | None, roots: Covectors, form: Quadric
) -> tuple[Quadric, float, dict[str, Covectors]]:
    """Covectors behind a mixing, taken to what it reads: with its second order, and a bound of what is beyond."""
    assert mix is not None
    found, rest = defaultdict[str, Covectors](dict), 0.0
    for place, v in roots.items():
        t = mix.tokens[place]
        own, error = mix.form(v, t)
        form = form.plus(own, np.ones(1))
        form = Quadric(form.H, form.error + 2.0 * error)
        # Taking v back rounds by no more than the mixing's own noise.
        rest += float(support(mix.beyond[t], v)) + float(length(v)) * mix.noises[t]
        for name, back in mix.pull(v, t).items():
            for j, w in back.items():
                found[name][j] = found[name][j] + w if j in found[name] else w
    return form, rest, dict(found)
