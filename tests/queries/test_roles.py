"""Roles: how they are written, what they stand for at a prompt, and what a wrong one is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prooflens as pl
from prooflens.errors import QueryError
from prooflens.queries import (
    Argmax,
    Beats,
    Circuit,
    Mass,
    Query,
    Role,
    Specialised,
    TopK,
    parse_query,
    resolve,
)
from tests.enumeration.words import reader

SLOTS = ("A", "B", "place")
PLACES = {"A": ((1,),), "B": ((3, 4), (8, 9)), "place": ((6,),)}
IDS = [10, 11, 12, 13, 14, 15, 16, 17, 13, 14]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("18.6:top1={B.1}@-1", TopK(1, Role("B", 1), heads="18.6", positions=-1)),  # type: ignore[arg-type]
        ("top2={A, B.2.last}", TopK(2, (Role("A"), Role("B", 2, "last")))),
        ("top1={self}", TopK(1, (Role("self"),))),
        ("top1={-1}", TopK(1, (Role("self", offset=-1),))),
        ("top1={self-1}", TopK(1, (-1,))),
        ("top1={4}@all", TopK(1, (4,))),
        ("mass>=0.5@{A}", Mass((Role("A"),), 0.5)),
        ("mass>=0.5@{A}@{B.2}", Mass((Role("A"),), 0.5, positions=(Role("B", 2),))),
        ("mass>=0.5@[B.2]", Mass(None, 0.5, positions=(Role("B", 2),))),
        ("mass>=0.5@{self-2}@3", Mass((Role("self", offset=-2),), 0.5, positions=(3,))),
        ('mass>=0.5@{"A"}', Mass(("A",), 0.5)),
        ("spec{A}>{B}", Specialised((Role("A"),), (Role("B"),))),
        ("spec{place}>{other}", Specialised((Role("place"),), ("other",))),
        ("logit{A}>logit{B.2}", Beats(Role("A"), Role("B", 2))),
        ("logit{A}>logit7", Beats(Role("A"), 7)),
        ("argmax={A}", Argmax(answer=Role("A"))),
        ("argmax=7", Argmax(answer=7)),
        ("top1={A}@{B.2} & argmax={A}", None),
    ],
)
def test_meaning_and_round_trip(text: str, query: Query | None) -> None:
    found = parse_query(text, SLOTS)
    assert query is None or found == query
    assert parse_query(str(found), SLOTS) == found


roles = st.builds(
    Role, st.sampled_from(SLOTS), st.none() | st.integers(1, 9), st.sampled_from([None, "first", "last"])
)
near = st.builds(Role, st.just("self"), offset=st.integers(-9, 9))
texts = st.text(min_size=1, max_size=4)
tokens = st.lists(roles | near | st.integers(0, 9) | texts, min_size=1, max_size=3).map(tuple)
places = st.none() | st.lists(roles | st.integers(-9, 9) | texts, min_size=1, max_size=3).map(tuple)
outputs = roles | st.integers(0, 99)


@given(
    st.one_of(
        st.builds(TopK, st.integers(1, 9), tokens, positions=places),
        st.builds(Mass, st.none() | tokens, st.just(0.3), positions=places, heads=st.just("1.0")),
        st.builds(Specialised, tokens, tokens, positions=places),
        st.builds(Beats, outputs, outputs),
        st.builds(Argmax, st.none(), outputs),
    )
)
def test_every_query_is_read_back(query: Query) -> None:
    assert parse_query(str(query), SLOTS) == query


@pytest.mark.parametrize(
    ("text", "ordinary"),
    [
        ("0.1:top1={A}@-1", ["0.1:top1={1}@-1"]),
        ("0.1:top2={B.2}@{B.1.last}", ["0.1:top2={8,9}@4"]),
        ("0.1:mass>=0.5@{B}@-1", ["0.1:mass>=0.5@{3,4,8,9}@-1"]),
        ("0.1:spec{A}>{B.2.first}@{place}", ["0.1:spec{1}>{8}@6"]),
        ("0.1:top1={self-1}@{B.2}", ["0.1:top1={7}@8", "0.1:top1={8}@9"]),
        ("0.1:top1={self+8}", ["0.1:top1={8}@0", "0.1:top1={9}@1"]),
        ("logit{A}>logit{B}", ["logit11>logit13"]),
        ("logit{B.last}>logit{place}", ["logit14>logit16"]),
        ("argmax={place}", ["argmax=16"]),
        ("top1@3", ["top1@3"]),
        ("0.1:top1={A}@-1 & logit{A}>logit{B}", ["0.1:top1={1}@-1 & logit11>logit13"]),
    ],
)
def test_roles_become_positions_and_outputs(text: str, ordinary: list[str]) -> None:
    assert [str(found) for found in resolve(parse_query(text, SLOTS), PLACES, 10, IDS)] == ordinary


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("logit{plaice}>logit{B}", "did you mean 'place'"),
        ("0.1:top1={B.3}@-1", "stands 2 times"),
        ("0.1:top1={self-1}@0", "outside the prompt"),
        ("logit{self}>logit3", "does not name an output"),
        ("0.1:top1@{3}", "only mass takes tokens in braces"),
    ],
)
def test_wrong_roles_are_told(text: str, told: str) -> None:
    with pytest.raises(QueryError, match=told):
        resolve(parse_query(text, SLOTS), PLACES, 10, IDS)


def test_tokens_of_a_slot_that_differ_by_place_must_be_named() -> None:
    with pytest.raises(QueryError, match=r"\{B\.1\}"):
        resolve(parse_query("argmax={B}", SLOTS), PLACES, 10, [*IDS[:8], 20, 21])


def test_roles_are_asked_of_balls_and_hulls_at_a_member() -> None:
    """Queries with roles say the same as the ordinary ones, on every region, for every command that binds queries."""
    model = reader()
    family = pl.Template("When{A} and{B} met,{B} spoke", A=[" Mary", " Tom"], B=[" John", " Kate"]).of(model)
    first, second = (family.prompt(member) for member in list(family)[:2])
    for region in (pl.Ball(1e-4), pl.Hull([first, second])):
        named = pl.certify(model, first, region, queries=["1.0:top1={B.1}@{B.2}", "logit{A}>logit{B}"])
        plain = pl.certify(model, first, region, queries=["1.0:top1={3}@6", "logit1>logit2"])
        assert named.table.select(["query", "verdict", "lower"]) == plain.table.select(
            ["query", "verdict", "lower"]
        )
    (claim,) = [outcome.claim for outcome in named.outcomes if outcome.claim.rows]
    assert isinstance(claim.query, TopK)
    assert claim.query.tokens == (3,)
    with pytest.raises(QueryError, match="not a template's member"):
        pl.certify(model, "When Mary met", pl.Ball(0.01), queries="logit{A}>logit{B}")


def test_top_of_named_tokens_is_false_where_the_mask_leaves_one_out() -> None:
    model = reader()
    found = pl.certify(model, "When Mary met", pl.Ball(1e-4), queries="0.0:top1={2}@1")
    assert [row["verdict"] for row in found.rows] == ["fails"]
    with pytest.raises(QueryError, match="names 2 tokens"):
        pl.certify(model, "When Mary met", pl.Ball(1e-4), queries="0.0:top1={0,1}@1")
    assert isinstance(parse_query("0.0:top1={1} & argmax=3"), Circuit)
