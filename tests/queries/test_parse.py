"""Short strings: round trips, meanings, and what a mistyped one is told."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prooflens.errors import QueryError
from prooflens.queries import (
    Argmax,
    Circuit,
    Entropy,
    Mass,
    Query,
    Ranking,
    Row,
    Setting,
    Specialised,
    TopK,
    full_mask,
    parse_heads,
    parse_query,
)
from prooflens.queries.rows import find_token, find_tokens

WORDS = ("When", " Mary", " and", " John", " went", ",", " John")


def setting() -> Setting:
    scores = torch.randn(2, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Setting({0: scores}, full_mask(7), n_layers=4, n_heads=2, tokens=WORDS)


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("top1", TopK(1)),
        ("top3", TopK(3)),
        ("rank3", Ranking(3)),
        ("mass>=0.2", Mass()),
        ("mass>=0.2@{0,1}", Mass([0, 1], 0.2)),  # type: ignore[arg-type]
        ("mass >= .25 @ {Mary, -1} @ 3", Mass(("Mary", -1), 0.25, positions=(3,))),
        ("mass>=0.2@3", Mass(positions=3)),  # type: ignore[arg-type]
        ('mass>=0.2@{"Mary"}', Mass("Mary")),  # type: ignore[arg-type]
        ("entropy", Entropy()),
        ("entropy<=1.5", Entropy(upper=1.5)),
        ("entropy>=1", Entropy(lower=1.0)),
        ("0.5<=entropy<=1.5", Entropy(0.5, 1.5)),
        ("spec{1,2}>{3}", Specialised((1, 2), (3,))),
        ("2.4:top1@-1", TopK(1, heads="2.4", positions=(-1,))),
        ('0-2,3.1:rank2@[0,"a]b"]', Ranking(2, heads="0-2,3.1", positions=(0, "a]b"))),
        ("top1@all", TopK(1)),
        ('top1@"all"', TopK(1, positions=("all",))),
        ("0.3:top1 & 0.4:top1", Circuit([TopK(1, heads="0.3"), TopK(1, heads="0.4")])),  # type: ignore[arg-type]
        (
            "0.5 * 0.3:spec{1}>{2}@-1 + -2 * 0.4:mass>=0.2@3 > 0",
            Circuit(
                (Specialised((1,), (2,), heads="0.3", positions=(-1,)), Mass(heads="0.4", positions=(3,))),
                (0.5, -2),
            ),
        ),
        ("argmax", Argmax()),
    ],
)
def test_meaning_and_round_trip(text: str, query: Query) -> None:
    assert parse_query(text) == query
    assert parse_query(str(query)) == query
    assert hash(parse_query(text)) == hash(query)


tokens = st.one_of(st.integers(-99, 99), st.text(min_size=1, max_size=6))
token_lists = st.lists(tokens, min_size=1, max_size=3).map(tuple)
number = st.floats(allow_nan=False, allow_infinity=False)
where = {
    "heads": st.sampled_from([None, "1.10", "0-2", "all", "0.10,1.3", "2"]),
    "positions": st.none() | token_lists,
}
row_queries = st.one_of(
    st.builds(TopK, st.integers(1, 99), **where),
    st.builds(Ranking, st.integers(1, 99), **where),
    st.builds(Mass, st.none() | token_lists, st.floats(0, 1, exclude_min=True, exclude_max=True), **where),
    st.builds(Specialised, token_lists, token_lists, **where),
    st.builds(Entropy, st.none() | number, st.none(), **where),
    st.builds(Entropy, st.just(0.0), st.floats(0, 9), **where),
)
part_lists = st.lists(row_queries | st.just(Argmax()), min_size=2, max_size=4).map(tuple)


@given(
    st.one_of(
        row_queries,
        st.builds(Circuit, part_lists),
        st.lists(st.tuples(row_queries, number), min_size=1, max_size=3).map(
            lambda pairs: Circuit(tuple(q for q, _ in pairs), tuple(w for _, w in pairs))
        ),
    )
)
def test_every_query_reads_back(query: Query) -> None:
    assert parse_query(str(query)) == query


@given(st.text(alphabet='top1mass>=0.2@{},[]&"* +entropyspc:-', max_size=14))
def test_any_text_is_a_query_or_a_query_error(text: str) -> None:
    try:
        query = parse_query(text)
    except QueryError:
        return
    assert parse_query(str(query)) == query


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topp1", "did you mean 'top1'"),
        ("mas>=0.2", "did you mean 'mass>=0.2'"),
        ("entrpy<=1", "did you mean 'entropy<=1.5'"),
        ("xyzzy", "known are top1"),
        ("top", "write it as in 'top1'"),
        ("top0", "at least 1"),
        ("mass>=1.2", "strictly between 0 and 1"),
        ("top1@{1}", "only mass takes tokens in braces"),
        ("1:2:top1", "twice"),
        ("argmax@3", "about outputs"),
        ('top1@"Mary', "not closed"),
        ("spec{1>{2}", "brackets do not match"),
        ("spec{}>{2}", "does not name a token"),
        ("2<=entropy<=1", "swap"),
        ("1 * 0.3:spec{1}>{2}", "ends in '> 0'"),
        ("x * 0.3:spec{1}>{2} > 0", "weight \\* query"),
    ],
)
def test_mistyped_queries_are_told_what_to_write(text: str, words: str) -> None:
    with pytest.raises(QueryError, match=words):
        parse_query(text)


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ("1.1", [(1, 1)]),
        ("2", [(2, 0), (2, 1)]),
        ("0-1", [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ("3.0, 0.1,3.0", [(3, 0), (0, 1)]),
    ],
)
def test_heads(text: str, heads: list[tuple[int, int]]) -> None:
    assert parse_heads(text, 4, 2) == heads
    assert len(parse_heads("all", 4, 2)) == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1.7", "did you mean '1.1'"),
        ("9", "layers are 0-3"),
        ("2-1", "no layers"),
        ("1,1", "x"),
        ("1;1", "'1.1'"),
    ],
)
def test_mistyped_heads(text: str, words: str) -> None:
    if words == "x":
        assert parse_heads(text, 4, 2) == [(1, 0), (1, 1)]
        return
    with pytest.raises(QueryError, match=words):
        parse_heads(text, 4, 2)


def test_tokens_by_index_and_text() -> None:
    assert find_token(-1, 7, WORDS) == [6]
    assert find_token("John", 7, WORDS) == [3, 6]
    assert find_token(" Mary", 7, WORDS) == [1]
    assert find_tokens(("John", 3, 0), 7, WORDS) == [3, 6, 0]
    with pytest.raises(QueryError, match="did you mean 'Mary'"):
        find_token("Marry", 7, WORDS)
    with pytest.raises(QueryError, match="0-6"):
        find_token(7, 7, WORDS)
    with pytest.raises(QueryError, match="use an index"):
        find_token("Mary", 7, None)


def test_names_are_checked_against_the_setting() -> None:
    claims = parse_query("0.1:top1@John").bind(setting())
    assert [claim.rows for claim in claims] == [(Row(0, 1, 3),), (Row(0, 1, 6),)]
    assert str(claims[0]) == '0.1:top1@"John" on 0.1@3'
    with pytest.raises(QueryError, match="layers \\[3\\], which were not computed"):
        parse_query("3.0:top1").bind(setting())
    with pytest.raises(QueryError, match="did you mean 'went'"):
        parse_query("top1@wend").bind(setting())
    with pytest.raises(QueryError, match="disjoint"):
        parse_query("spec{John}>{3}").bind(setting())
    with pytest.raises(QueryError, match="no logits"):
        parse_query("argmax").bind(setting())
