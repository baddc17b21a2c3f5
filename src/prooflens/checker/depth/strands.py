"""Covectors of forms at the chains of walks: at what is read, at the sources, and behind and in front of mixings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from prooflens.checker.depth.beside import Site
from prooflens.checker.depth.boxes import Quadric
from prooflens.checker.depth.layers import End, Layer, Pooled
from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.pooling import PoolSite
from prooflens.checker.depth.shapes import Array, gamma, length, support, trace, up
from prooflens.checker.depth.values import Chain
from prooflens.checker.depth.walk import Walk

Covectors = dict[int, Array]
"""By token."""


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


def bundled(strands: Iterable[Strand]) -> tuple[list[Bundle], float]:
    """Covectors at the sources of every chain that strands stand on, added up there, and what rounding loses.

    Args:
        strands: the strands.
    """
    bundles, lost = list[Bundle](), 0.0
    for walk, place, seeds in strands:
        found, own = at_sources(place, seeds)
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


def at_sources(
    place: Layer | Pooled | End, seeds: dict[str, Covectors]
) -> tuple[dict[tuple[str, int], Array], float]:
    """Covectors at the sources of a chain by name and token, and what rounding loses on the way.

    Args:
        place: where they are read.
        seeds: covectors at the values there.
    """
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


def through(
    mix: MixSite | PoolSite | None, roots: Covectors, form: Quadric
) -> tuple[Quadric, float, dict[str, Covectors]]:
    """Covectors behind a mixing, taken to what it reads: with its second order, and a bound of what is beyond.

    Args:
        mix: the mixing.
        roots: the covectors at the root behind it.
        form: a quadratic form of the factors, to which the second order is added.
    """
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
