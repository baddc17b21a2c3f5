"""Roles: tokens that queries name by their part in a prompt, looked up where the prompt is known.

`resolve` turns a query with roles into ordinary queries about positions and outputs, which every engine, run directory
and checker reads. Slots stand at the same positions in all members of one shape; only outputs depend on the member.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prooflens.errors import QueryError
from prooflens.queries.attention import RowQuery
from prooflens.queries.base import Query
from prooflens.queries.circuit import Argmax, Beats, Circuit
from prooflens.queries.lens import AttributionQuery, Lens, SiteComparison
from prooflens.queries.measures import DistributionQuery
from prooflens.queries.rows import Named, Role, find_tokens, suggestion
from prooflens.queries.sites import SiteQuery

Places = Mapping[str, tuple[tuple[int, ...], ...]]
"""The positions of every slot, occurrence by occurrence."""

FIELDS = ("tokens", "A", "B")


def resolve(query: Query, places: Places, size: int, ids: Sequence[int] | None = None) -> list[Query]:
    """Return ordinary queries that together say what a query with roles says.

    Args:
        query: any query; one without roles comes back as it is.
        places: the positions of the template's slots.
        size: S, the number of tokens of the prompt.
        ids: the tokens of the prompt, which outputs are named by; None leaves the roles of outputs as they are.

    Raises:
        QueryError: if there is no such slot, or it has no such occurrence.

    Example:
        >>> from prooflens.queries import parse_query
        >>> [found] = resolve(parse_query("0.3:top1={B.2}@-1", ["B"]), {"B": ((3,), (9,))}, 14)
        >>> str(found)
        '0.3:top1={9}@-1'
    """
    if isinstance(query, Circuit):
        parts = [resolve(part, places, size, ids) for part in query.parts]
        if query.weights is not None and any(len(part) != 1 for part in parts):
            raise QueryError("a part of a weighted sum that reads {self} needs one position, as in '@-1'")
        return [replace(query, parts=tuple(found for part in parts for found in part))]
    if isinstance(query, Argmax | Beats | AttributionQuery | DistributionQuery):
        return [query if ids is None else _with_outputs(query, places, ids)]
    if isinstance(query, Lens):
        (inner,) = resolve(query.query, places, size, ids)
        return [replace(query, query=inner)]
    if isinstance(query, SiteComparison):
        first, second = (resolve(side, places, size, ids) for side in query.sides)
        if len(first) != 1 or len(second) != 1:
            raise QueryError(f"{query} reads several tokens: name one, as in {{A.1}}")
        return [SiteComparison.of(first[0], str(query.comparison), second[0])]
    if isinstance(query, SiteQuery):
        return [replace(query, position=token) for token in _looked_up(query.position, places)]
    if isinstance(query, RowQuery):
        return list(_row_queries(query, places, size))
    return [query]


def has_roles(query: Query) -> bool:
    """Say whether a query names tokens or outputs by role.

    Args:
        query: any query.
    """
    if isinstance(query, Circuit):
        return any(map(has_roles, query.parts))
    if isinstance(query, Lens):
        return has_roles(query.query)
    if isinstance(query, Beats | AttributionQuery):
        return isinstance(query.winner, Role) or isinstance(query.loser, Role)
    if isinstance(query, Argmax):
        return isinstance(query.answer, Role)
    if isinstance(query, DistributionQuery):
        return any(isinstance(named, Role) for named in query.named)
    if isinstance(query, SiteComparison):
        return any(map(has_roles, query.sides))
    if isinstance(query, SiteQuery):
        return isinstance(query.position, Role)
    named = [token for name in (*FIELDS, "positions") for token in getattr(query, name, None) or ()]
    return any(isinstance(token, Role) for token in named)


def positions_of(role: Role, places: Places) -> tuple[int, ...]:
    """Return the positions that a slot's role names, in the order of the text.

    Args:
        role: a slot, perhaps one occurrence, perhaps one token of it.
        places: the positions of the template's slots.

    Raises:
        QueryError: if there is no such slot, or it has no such occurrence.
    """
    if role.name not in places:
        known = f": slots are {', '.join(places)}" if places else ": this prompt is not a template's member"
        raise QueryError(f"there is no slot {{{role.name}}}{known}{suggestion(role.name, places)}")
    spans = places[role.name]
    if role.occurrence is not None:
        if not 1 <= role.occurrence <= len(spans):
            raise QueryError(
                f"slot {role.name} stands {len(spans)} times in the template: there is no {{{role}}}"
            )
        spans = spans[role.occurrence - 1 : role.occurrence]
    if role.part is not None:
        spans = tuple(span[:1] if role.part == "first" else span[-1:] for span in spans)
    return tuple(position for span in spans for position in span)


def output_of(role: Role, places: Places) -> tuple[int, ...]:
    """Return the positions whose tokens a role names as an output: the first token of each occurrence's filler.

    Args:
        role: a slot, perhaps one occurrence, perhaps its last token.
        places: the positions of the template's slots.
    """
    first = role if role.part is not None else replace(role, part="first")
    return positions_of(first, places)


def _with_outputs(
    query: Argmax | Beats | AttributionQuery | DistributionQuery, places: Places, ids: Sequence[int]
) -> Query:
    def found(named: int | Role) -> int:
        if not isinstance(named, Role):
            return named
        tokens = {ids[position] for position in output_of(named, places)}
        if len(tokens) > 1:
            raise QueryError(
                f"slot {named} has other tokens at other places: say which, as in {{{named.name}.1}}"
            )
        return tokens.pop()

    if isinstance(query, DistributionQuery):
        return query.of_outputs([found(named) for named in query.named])
    if isinstance(query, Argmax):
        return query if query.answer is None else replace(query, answer=found(query.answer))
    return replace(query, winner=found(query.winner), loser=found(query.loser))


def _row_queries(query: RowQuery, places: Places, size: int) -> Iterator[RowQuery]:
    """The query with slots as positions; one query per position where it reads tokens relative to its own."""
    if not has_roles(query):
        yield query
        return
    if query.positions is not None:
        if any(isinstance(token, Role) and token.name == "self" for token in query.positions):
            raise QueryError(f"{query}: a query position is a token or a slot; {{self}} is relative to it")
        named = [_looked_up(token, places) for token in query.positions]
        query = replace(query, positions=tuple(position for group in named for position in group))
    held = {name: getattr(query, name) for name in FIELDS if getattr(query, name, None) is not None}
    slots = {
        name: tuple(found for token in tokens for found in _looked_up(token, places))
        for name, tokens in held.items()
    }
    if not any(isinstance(token, Role) for tokens in slots.values() for token in tokens):
        yield _with_tokens(query, slots)
        return
    given = query.positions
    for position in range(size) if given is None else find_tokens(given, size, None):
        near = {name: tuple(_near(token, position) for token in tokens) for name, tokens in slots.items()}
        outside = [
            t for tokens in near.values() for t in tokens if isinstance(t, int) and not -size <= t < size
        ]
        below = any(t is None for tokens in near.values() for t in tokens)
        if not outside and not below:
            yield _with_tokens(replace(query, positions=(position,)), near)
        elif given is not None:
            raise QueryError(f"{query} reads a token outside the prompt at position {position}")


def _with_tokens(query: RowQuery, fields: Mapping[str, Any]) -> RowQuery:
    return replace(query, **fields)


def _looked_up(token: Named, places: Places) -> tuple[Named, ...]:
    """The positions of a slot; other tokens, and those relative to the query, as they are."""
    if isinstance(token, Role) and token.name != "self":
        return positions_of(token, places)
    return (token,)


def _near(token: Named, position: int) -> Named | None:
    """The index of a token relative to the query; None before the first."""
    if not isinstance(token, Role):
        return token
    return position + token.offset if position + token.offset >= 0 else None
