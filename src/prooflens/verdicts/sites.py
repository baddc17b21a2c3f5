"""Claims about values inside a model, as claims about the outputs of the model that ends there.

Queries that read one hook at one token become one readout (`models.reads`): a row of directions for each of them, and a
condition on that output. Comparisons of values at two places become a readout of both together. Lenses at one layer are
claims about the model cut there. The proofs, the attack, the run and its check are those of outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.models import Prompt, Transformer
from prooflens.models.attribution import attribution, attribution_error
from prooflens.models.dictionaries import Dictionary
from prooflens.models.reads import find_hook, read_at, read_beside
from prooflens.problem import Problem
from prooflens.queries import (
    AttributionQuery,
    Circuit,
    Claim,
    Condition,
    InsideQuery,
    Lens,
    Query,
    SiteComparison,
    SiteQuery,
    Standing,
    TopFeature,
    resolve,
)
from prooflens.queries.base import make_claim
from prooflens.queries.rows import find_token, suggestion
from prooflens.queries.sites import compared_condition, level_condition, standing_condition, sum_error
from prooflens.regions import Region
from prooflens.verdicts.lenses import check_cap, lens_of

Vectors = Mapping[str, object]
"""Directions (tensors of one dimension) and dictionaries (`Dictionary`, folders, SAELens objects) by name."""

Place = tuple[str, int]
"""A hook and a token."""


@dataclass(frozen=True, eq=False)
class _Site:
    """One query with its token found: what it reads, and how far its output may be off from what is meant.

    `other` is the readout that it is compared with; None where it is compared with a number. `rivals` are all other
    features of its dictionary, where it is asked whether it is among the k largest.
    """

    query: SiteQuery
    hook: str
    position: int
    row: Float[Tensor, " n"]
    bias: float
    error: float
    name: str
    other: _Site | None = None
    rivals: tuple[_Site, ...] = ()

    @property
    def read(self) -> list[_Site]:
        """Everything that is read: it itself, and what it is compared with."""
        return [self, *([] if self.other is None else [self.other]), *self.rivals]

    @property
    def place(self) -> Place:
        """The hook and the token that it is read at."""
        return self.hook, self.position

    @property
    def places(self) -> tuple[Place, ...]:
        """The places that are read: one, or that of the later block and the other one."""
        found = [*dict.fromkeys(site.place for site in self.read)]
        return tuple(sorted(found, key=lambda place: -int(place[0].split(".")[1])))

    def condition(self, index: Mapping[str, int]) -> Condition:
        """What is wanted of the output that reads it, outputs being numbered by name."""
        query, own = self.query, index[self.name]
        if isinstance(query, TopFeature):
            standing = Standing(own, tuple(index[rival.name] for rival in self.rivals), query.k)
            largest = self.error + max((rival.error for rival in self.rivals), default=0.0)
            return standing_condition(
                standing, str(query.comparison), math.nextafter(largest, math.inf), str(query)
            )
        if self.other is None:
            return level_condition(own, query.comparison, query.threshold, self.error, self.name)
        error = (
            math.nextafter(self.error + self.other.error, math.inf) if self.error or self.other.error else 0.0
        )
        return compared_condition(own, index[self.other.name], str(query.comparison), error, str(query))


def are_inside(queries: Sequence[Query], *places: object) -> bool:
    """Say whether queries are about values inside the model.

    Args:
        queries: what is asked.
        places: the heads, layer and positions that are given beside them; None where none are.

    Raises:
        QueryError: if some are and some are not, or places are given: each of these names its own.
    """
    inside = [query for query in queries if isinstance(query, InsideQuery)]
    if inside and len(inside) < len(queries):
        raise QueryError(
            f"{inside[0]} is about a value inside the model: ask for attention and outputs apart from it"
        )
    if inside and any(place is not None for place in places):
        raise QueryError(f"{inside[0]} names its own layer and position: give no heads, layer or positions")
    return bool(inside)


def by_place(
    model: Transformer, prompt: Prompt, queries: Sequence[Query], vectors: Vectors | None
) -> list[list[InsideQuery]]:
    """Return queries grouped by the hook and the token, or the lens, that they read, in the order of their first.

    Args:
        model: the model.
        prompt: its tokens.
        queries: what is asked, all about values inside the model.
        vectors: directions and dictionaries by name.
    """
    groups: dict[tuple[Place, ...], list[InsideQuery]] = {}
    for query in _resolved(prompt, queries):
        if isinstance(query, Lens):
            groups.setdefault((("lens", query.layer),), []).append(query)
            continue
        for site in _sites(model, prompt, query, vectors or {}):
            groups.setdefault(site.places, []).append(site.query)
    return list(groups.values())


def inside_claims(
    model: Transformer, prompt: Prompt, region: Region, queries: Sequence[Query], vectors: Vectors | None
) -> tuple[Transformer, Problem, list[Claim]]:
    """Bind queries about values inside a model, all of one hook and one token, of the same two, or of one lens.

    Args:
        model: the model.
        prompt: its tokens.
        region: where the claims are to hold.
        queries: what is asked.
        vectors: directions and dictionaries by name.

    Returns:
        The model that ends there, with the problem that engines are asked about and the claims.

    Raises:
        QueryError: if they read several places, or name what is not given.
    """
    groups = by_place(model, prompt, queries, vectors)
    if len(groups) > 1:
        several = ", ".join(str(group[0]) for group in groups[:3])
        raise QueryError(
            f"one proof reads one hook at one token, these read several ({several}): ask for each apart"
        )
    sites = [query for query in groups[0] if isinstance(query, SiteQuery)]
    if sites:
        held = _gathered([site for query in sites for site in _sites(model, prompt, query, vectors or {})])
        read = held.of(model)
        problem = Problem(read, region)
        setting = problem.setting([], True, prompt.tokens)
        return read, problem, [make_claim(query, setting, (), [wanted]) for query, wanted in held.wanted]
    lenses = [query for query in groups[0] if isinstance(query, Lens)]
    cut = lens_of(model, lenses[0].layer)
    check_cap(cut, [lens.query for lens in lenses])
    problem = Problem(cut, region)
    setting = problem.setting([], True, prompt.tokens)
    return cut, problem, [replace(claim, query=lens) for lens in lenses for claim in lens.query.bind(setting)]


@dataclass(frozen=True, eq=False)
class Readouts:
    """Linear readouts of one hook at one token, or of two together, and what is wanted of them.

    Attributes:
        hook: the name of the value.
        position: the token.
        names: what the outputs are called.
        weight: a row of directions for each output, shape [F, n]; those of the other place stand behind.
        bias: what is added to each, shape [F].
        wanted: queries, and conditions on the outputs.
        beside: the hook and token of the other value; None for none.
    """

    hook: str
    position: int
    names: tuple[str, ...]
    weight: Float[Tensor, "F n"]
    bias: Float[Tensor, " F"]
    wanted: tuple[tuple[SiteQuery, Condition], ...]
    beside: Place | None = None

    def of(self, model: Transformer) -> Transformer:
        """Return the model whose outputs they are.

        Args:
            model: the model that is read.
        """
        bias = self.bias if bool(self.bias.any()) else None
        if self.beside is not None:
            here = self.hook, self.position
            return read_beside(model, here, self.beside, self.weight, bias, self.names)
        return read_at(model, self.hook, self.position, self.weight, bias, self.names)


def readouts(model: Transformer, prompt: Prompt, query: Query, vectors: Vectors | None) -> list[Readouts]:
    """Return what a query about values inside the model reads, one for every token that it names.

    Args:
        model: the model.
        prompt: its tokens, and the slots that they stand in.
        query: a readout with a threshold, a range, or a comparison of two.
        vectors: directions and dictionaries by name.
    """
    found = [one for one in _resolved(prompt, [query]) if isinstance(one, SiteQuery)]
    sites = [site for one in found for site in _sites(model, prompt, one, vectors or {})]
    return [_gathered([site]) for site in sites]


def _gathered(sites: Sequence[_Site]) -> Readouts:
    """Sites of one hook and token, or of the same two, as one readout: every direction once."""
    names, index = list[str](), dict[str, int]()
    rows, biases = [], []
    (first, *others), widths = sites[0].places, {site.place: len(site.row) for site in sites[0].read}
    for site in [read for one in sites for read in one.read]:
        if site.name not in index:
            index[site.name] = len(names)
            names.append(site.name)
            parts = [torch.zeros(widths[place], dtype=torch.float64) for place in (first, *others)]
            parts[0 if site.place == first else 1] = site.row.to(torch.float64)
            rows.append(torch.cat(parts))
            biases.append(site.bias)
    bias = torch.tensor(biases, dtype=torch.float64)
    wanted = tuple((site.query, site.condition(index)) for site in sites)
    beside = others[0] if others else None
    return Readouts(*first, tuple(names), torch.stack(rows), bias, wanted, beside)


def _resolved(prompt: Prompt, queries: Sequence[Query]) -> list[InsideQuery]:
    """Queries with slots looked up in the prompt."""
    found = [one for query in queries for one in resolve(query, prompt.roles, len(prompt), prompt.ids)]
    return [query for query in found if isinstance(query, InsideQuery)]


def _sites(model: Transformer, prompt: Prompt, query: SiteQuery, vectors: Vectors) -> list[_Site]:
    """Return what a query reads, at each token that it names."""
    if isinstance(query, AttributionQuery):
        return [_attributed(model, prompt, query)]
    if isinstance(query, SiteComparison):
        return [_compared(model, prompt, query, vectors)]
    found = []
    for position in find_token(query.position, len(prompt), prompt.tokens):
        placed = replace(query, position=position)
        if query.kind == "neuron":
            assert query.index is not None
            hook = f"blocks.{query.place}.mlp.hook_pre"
            width = find_hook(model.architecture, hook).width
            if query.index >= width:
                raise QueryError(f"there is no neuron {query.place}.{query.index}: a layer has {width}")
            row = torch.zeros(width, dtype=torch.float64)
            row[query.index] = 1.0
            found.append(_Site(placed, hook, position, row, 0.0, 0.0, f"neuron {query.place}.{query.index}"))
        elif query.kind == "feature":
            found.append(_active(model, placed, position, _named(query.name, vectors)))
        else:
            held = _named(query.name, vectors)
            assert query.place is not None
            width = find_hook(model.architecture, query.place).width
            row = (
                torch.as_tensor(held, dtype=torch.float64).cpu()
                if isinstance(held, Tensor)
                else torch.zeros(0)
            )
            if row.shape != (width,) or not bool(row.isfinite().all()):
                raise QueryError(
                    f"the direction {query.name!r} must be a tensor of {width} finite numbers, as {query.place} is"
                )
            found.append(_Site(placed, query.place, position, row, 0.0, 0.0, query.name))
    return found


@dataclass(frozen=True, eq=False)
class Crossed:
    """Two readouts at different hooks or tokens, and what is wanted of both together.

    Attributes:
        sides: the readouts, one output each.
        condition: what is wanted of the two outputs, the first and the second.
    """

    sides: tuple[Readouts, Readouts]
    condition: Condition


def crossed(model: Transformer, prompt: Prompt, query: Query, vectors: Vectors | None) -> Crossed | None:
    """Return a comparison of readouts at different hooks or tokens; None for every other query.

    Args:
        model: the model.
        prompt: its tokens, and the slots that they stand in.
        query: what is claimed.
        vectors: directions and dictionaries by name.
    """
    if not isinstance(query, SiteComparison):
        return None
    (placed,) = _resolved(prompt, [query])
    assert isinstance(placed, SiteComparison)
    one, other = _sides(model, prompt, placed, vectors or {})
    if one.place == other.place:
        return None
    error = math.nextafter(one.error + other.error, math.inf) if one.error or other.error else 0.0
    condition = compared_condition(0, 1, str(query.comparison), error, str(query))
    return Crossed((_gathered([one]), _gathered([other])), condition)


def _sides(
    model: Transformer, prompt: Prompt, query: SiteComparison, vectors: Vectors
) -> tuple[_Site, _Site]:
    """Both readouts of a comparison, at one token each."""
    first, second = (_sites(model, prompt, side, vectors) for side in query.sides)
    if len(first) != 1 or len(second) != 1:
        raise QueryError(f"{query} reads several tokens: name each by its index")
    one, other = first[0], second[0]
    if (one.place, one.name) == (other.place, other.name):
        raise QueryError(f"{query} compares a readout with itself: name two")
    return one, other


def _compared(model: Transformer, prompt: Prompt, query: SiteComparison, vectors: Vectors) -> _Site:
    """Two readouts; at two places they are called as they are written, since one name may stand at both."""
    one, other = _sides(model, prompt, query, vectors)
    placed = SiteComparison.of(one.query, str(query.comparison), other.query)
    if one.place != other.place:
        one, other = (replace(side, name=str(side.query)) for side in (one, other))
    return replace(one, query=placed, other=other)


def _attributed(model: Transformer, prompt: Prompt, query: AttributionQuery) -> _Site:
    """What a part adds to a difference of logits, read at the last token."""
    if not (isinstance(query.winner, int) and isinstance(query.loser, int)):
        raise QueryError(f"{query} names a slot of a template, and this prompt is not a template's member")
    if query.winner == query.loser:
        raise QueryError(f"{query} compares an output with itself: name two")
    part, pair = str(query.place), (query.winner, query.loser)
    hook, row = attribution(model, part, pair, prompt)
    error = attribution_error(model, part, pair, prompt)
    return _Site(query, hook, len(prompt) - 1, row.cpu(), 0.0, error, query.readout)


def explicit(query: Query, vectors: Vectors | None) -> Query:
    """Return a query that says itself what `active` means: of TopK dictionaries, to be among the k largest.

    Args:
        query: any query.
        vectors: directions and dictionaries by name.
    """
    if isinstance(query, Circuit):
        return replace(query, parts=tuple(explicit(part, vectors) for part in query.parts))
    if not isinstance(query, SiteQuery) or query.kind != "feature" or query.name not in (vectors or {}):
        return query
    return _ranked(query, Dictionary.adopt((vectors or {})[query.name]))


def _ranked(query: SiteQuery, dictionary: Dictionary) -> SiteQuery:
    if dictionary.k is None or query.comparison is None or isinstance(query, TopFeature):
        return query
    if (query.comparison, query.threshold) not in ((">", 0.0), ("<=", 0.0)):
        raise QueryError(
            f"{query}: features of a TopK dictionary are active or off, or have a range; write 'active'"
        )
    named = (query.kind, query.place, query.name, query.index, query.comparison, 0.0, query.position)
    return TopFeature(*named, dictionary.k)


def _active(model: Transformer, query: SiteQuery, position: int, held: object) -> _Site:
    """A feature that is active or off, or its range; in a TopK dictionary with all others, its rivals."""
    dictionary = Dictionary.adopt(held)
    site = _feature(model, query, position, dictionary)
    query = _ranked(query, dictionary)
    if not isinstance(query, TopFeature):
        return site
    others = [i for i in range(dictionary.size) if i != query.index]
    ranges = (SiteQuery("feature", None, query.name, i, position=position) for i in others)
    rivals = tuple(_feature(model, one, position, dictionary) for one in ranges)
    return replace(site, query=query, rivals=rivals)


def _feature(model: Transformer, query: SiteQuery, position: int, held: object) -> _Site:
    dictionary, index = Dictionary.adopt(held), query.index
    dictionary.check(model)
    assert index is not None
    if index >= dictionary.size:
        raise QueryError(f"there is no feature {query.name}.{index}: the dictionary has {dictionary.size}")
    row, (offset, size) = dictionary.weight[index], dictionary.offset(index)
    error = sum_error(size, len(row))
    return _Site(query, dictionary.hook, position, row, offset, error, f"{query.name}.{index}")


def _named(name: str, vectors: Vectors) -> object:
    if name not in vectors:
        known = f"; given are {', '.join(sorted(vectors))}" if vectors else ""
        known += f": give it with --vector {name}=PATH, in Python with vectors={{{name!r}: …}}"
        raise QueryError(f"no direction or dictionary is called {name!r}{suggestion(name, vectors) or known}")
    return vectors[name]
