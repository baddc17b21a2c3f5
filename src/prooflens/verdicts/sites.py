"""Claims about values inside a model, as claims about the outputs of the model that ends there.

Queries that read one hook at one token become one readout (`models.reads`): a row of directions for each of them, and a
condition on that output. The proofs, the attack, the run and its check are those of outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.models import Prompt, Transformer
from prooflens.models.dictionaries import Dictionary
from prooflens.models.reads import find_hook, read_at
from prooflens.problem import Problem
from prooflens.queries import Claim, Condition, Query, SiteQuery
from prooflens.queries.base import make_claim
from prooflens.queries.rows import find_token, suggestion
from prooflens.queries.sites import level_condition, sum_error

Vectors = Mapping[str, object]
"""Directions (tensors of one dimension) and dictionaries (`Dictionary`, folders, SAELens objects) by name."""


@dataclass(frozen=True, eq=False)
class _Site:
    """One query with its token found: what it reads, and how far its output may be off from what is meant."""

    query: SiteQuery
    hook: str
    position: int
    row: Float[Tensor, " n"]
    bias: float
    error: float
    name: str

    def condition(self, index: int) -> Condition:
        """What is wanted of the output that reads it."""
        query = self.query
        return level_condition(index, query.comparison, query.threshold, self.error, self.name)


def are_sites(queries: Sequence[Query], *places: object) -> bool:
    """Say whether queries are about values inside the model.

    Args:
        queries: what is asked.
        places: the heads, layer and positions that are given beside them; None where none are.

    Raises:
        QueryError: if some are and some are not, or places are given: each of these names its own.
    """
    sites = [query for query in queries if isinstance(query, SiteQuery)]
    if sites and len(sites) < len(queries):
        raise QueryError(
            f"{sites[0]} is about a value inside the model: ask for attention and outputs apart from it"
        )
    if sites and any(place is not None for place in places):
        raise QueryError(f"{sites[0]} names its own layer and position: give no heads, layer or positions")
    return bool(sites)


def by_place(
    model: Transformer, prompt: Prompt, queries: Sequence[SiteQuery], vectors: Vectors | None
) -> list[list[SiteQuery]]:
    """Return the queries grouped by the hook and the token that they read, in the order of their first.

    Args:
        model: the model.
        prompt: its tokens.
        queries: what is asked.
        vectors: directions and dictionaries by name.
    """
    groups: dict[tuple[str, int], list[SiteQuery]] = {}
    for query in queries:
        for site in _sites(model, prompt, query, vectors or {}):
            groups.setdefault((site.hook, site.position), []).append(site.query)
    return list(groups.values())


def read_model(
    model: Transformer, prompt: Prompt, queries: Sequence[SiteQuery], vectors: Vectors | None
) -> tuple[Transformer, list[tuple[SiteQuery, Condition]]]:
    """Return the model whose outputs are what the queries read, and what each wants of them.

    Args:
        model: the model.
        prompt: its tokens.
        queries: what is asked, all of one hook and one token.
        vectors: directions and dictionaries by name.

    Raises:
        QueryError: if they read several hooks or tokens, or name what is not given.
    """
    sites = [site for query in queries for site in _sites(model, prompt, query, vectors or {})]
    places = list(dict.fromkeys((site.hook, site.position) for site in sites))
    if len(places) > 1:
        several = ", ".join(f"{hook}@{position}" for hook, position in places[:3])
        raise QueryError(f"one proof reads one hook at one token, these read {several}: ask for each apart")
    (hook, position), names, index = places[0], list[str](), dict[str, int]()
    rows, biases = [], []
    for site in sites:
        if site.name not in index:
            index[site.name] = len(names)
            names.append(site.name)
            rows.append(site.row)
            biases.append(site.bias)
    bias = torch.tensor(biases, dtype=torch.float64)
    read = read_at(model, hook, position, torch.stack(rows), bias if bool(bias.any()) else None, names)
    return read, [(site.query, site.condition(index[site.name])) for site in sites]


def site_claims(
    problem: Problem, tokens: tuple[str, ...], wanted: Sequence[tuple[SiteQuery, Condition]]
) -> list[Claim]:
    """Bind conditions on the outputs of a readout to its prompt.

    Args:
        problem: the readout and the region.
        tokens: the texts of the tokens.
        wanted: queries and their conditions.
    """
    setting = problem.setting([], True, tokens)
    return [make_claim(query, setting, (), [condition]) for query, condition in wanted]


def _sites(model: Transformer, prompt: Prompt, query: SiteQuery, vectors: Vectors) -> list[_Site]:
    """Return what a query reads, at each token that it names."""
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
            found.append(_feature(model, placed, position, _named(query.name, vectors)))
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
        known = f"; given are {', '.join(sorted(vectors))}" if vectors else "; none are given"
        raise QueryError(f"no direction or dictionary is called {name!r}{suggestion(name, vectors) or known}")
    return vectors[name]
