"""Templates, swaps and lists as tokens: every member, its positions, its count; and what a bad one is told."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prooflens as pl
from prooflens.errors import ProoflensError
from prooflens.families import Family, Shape
from tests.enumeration.words import reader

NAMES = [" Mary", " John", " Kate", " Tom"]
TEXT = "When{A} and{B} met,{B} spoke"


def members(family: Family) -> list[tuple[str, tuple[int, ...]]]:
    return [(member.text, member.ids) for member in family]


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_members_are_all_combinations_and_their_tokens_those_of_their_texts(kind: str) -> None:
    model = reader(kind)
    template = pl.Template(TEXT, A=NAMES, B=[" Tom", " Mary", " Bob"], differ=[("A", "B")])
    family = template.of(model)
    texts = [
        f"When{a} and{b} met,{b} spoke"
        for a, b in itertools.product(NAMES, [" Tom", " Mary", " Bob"])
        if a != b
    ]
    assert sorted(text for text, _ in members(family)) == sorted(texts)
    assert len(family) == len(template) == len(texts)
    assert model.tokenizer is not None
    for member in family:
        assert list(member.ids) == model.tokenizer.encode(member.text)
        for slot, spans in member.roles.items():
            for span in spans:
                spelled = "".join(model.tokenizer.token(member.ids[i]) for i in span)
                assert spelled.lower() == member.fillers[slot].lower()
    assert sum(family.lengths.values()) == len(texts)
    assert len(family.lengths) == 2


def test_a_space_before_a_slot_and_one_in_the_filler_are_one() -> None:
    spaced = pl.Template("When {A} met", A=NAMES).of(reader())
    joined = pl.Template("When{A} met", A=NAMES).of(reader())
    bare = pl.Template("When {A} met", A=[name.strip() for name in NAMES]).of(reader())
    assert members(spaced) == members(joined) == members(bare)


def test_members_that_share_a_beginning_stand_side_by_side() -> None:
    ids = [ids for _, ids in members(pl.Template(TEXT, A=NAMES, B=NAMES).of(reader()))]
    for length in range(1, len(ids[0])):
        beginnings = [key for key, _ in itertools.groupby(ids, key=lambda row: row[:length])]
        assert len(beginnings) == len(set(beginnings))


def test_built_in_lists_keep_single_tokens() -> None:
    family = pl.Template("When{A} met", A=pl.NAMES).of(reader())
    assert set(family.words["A"]) == {" Mary", " John", " Kate", " Tom", " Alice", " James"}
    assert len(pl.NAMES.words) >= 100
    assert len(set(pl.NAMES.words)) == len(pl.NAMES.words)


def test_swaps_and_prompts() -> None:
    model = reader()
    swaps = pl.Swaps("When Mary and John met", {(1, 3): NAMES, 2: pl.ALL}).of(model)
    assert len(swaps) == 4 * 60
    assert all(member.ids[1] == member.ids[3] for member in swaps)
    assert {member.ids[2] for member in swaps} == set(range(60))
    texts = ["When Mary met", "When Tom", "When Alice met"]
    prompts = pl.Prompts(texts).of(model)
    assert sorted(text for text, _ in members(prompts)) == sorted(texts)
    assert prompts.lengths == {2: 1, 3: 2}
    assert [m.ids for m in pl.Prompts([[3, 4], [5, 6]]).of(model)] == [(3, 4), (5, 6)]


def test_samples_are_members_and_every_member_comes() -> None:
    family = pl.Template(TEXT, A=NAMES, B=[*NAMES, " Bob"], differ=[("A", "B")]).of(reader())
    drawn = {member.text for member in family.sample(400, seed=1)}
    assert drawn == {text for text, _ in members(family)}
    assert family.sample(5, seed=3) == family.sample(5, seed=3) != family.sample(5, seed=4)


lists = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True)


@given(st.lists(lists, min_size=1, max_size=4), st.data())
def test_counts_with_inequalities_equal_the_list(words: list[list[str]], data: Any) -> None:
    import numpy as np

    slots = [f"s{i}" for i in range(len(words))]
    pairs = list(itertools.combinations(slots, 2))
    apart = tuple(data.draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else ()
    held = dict(zip(slots, words, strict=True))
    shape = Shape(
        np.full(len(slots), -1),
        {slot: ((i, i + 1),) for i, slot in enumerate(slots)},
        {slot: np.arange(len(held[slot])) for slot in slots},
        {slot: (np.arange(len(held[slot]))[:, None],) for slot in slots},
        apart,
        held,
    )
    combinations = [dict(zip(slots, chosen, strict=True)) for chosen in itertools.product(*words)]
    true = sum(all(chosen[a] != chosen[b] for a, b in apart) for chosen in combinations)
    assert shape.members == true
    size = data.draw(st.integers(1, 7))
    blocks = list(shape.blocks(0, size))
    assert sum(len(digits) for _, digits in blocks) == true
    assert all(len(digits) == size for _, digits in blocks[:-1])
    if blocks:  # going on from a cursor gives the rest
        assert sum(len(d) for _, d in shape.blocks(blocks[0][0], size)) == true - len(blocks[0][1])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: pl.Template("When{A} met", B=NAMES), "slot {A} has no fillers"),
        (lambda: pl.Template("When{A} met", A=NAMES, B=NAMES), "no slot {B}"),
        (lambda: pl.Template("When met", A=NAMES), "has no slot"),
        (lambda: pl.Template("When{A} met", A=[]), "empty list"),
        (lambda: pl.Template("When{A} met", A=[" Mary"]), "never varies"),
        (lambda: pl.Template("When{A} met", A=[" Mary", "Mary"]), "twice"),
        (lambda: pl.Template("When{A} met", A=" Mary"), "must be a list"),
        (lambda: pl.Template("When{A} met", A=[" Mary", ""]), "is no filler"),
        (lambda: pl.Template("When{self} met", self=NAMES), "is no slot"),
        (lambda: pl.Template("When{A met", A=NAMES), "not well formed"),
        (lambda: pl.Template(TEXT, A=NAMES, B=NAMES, differ=[("A", "C")]), "which is no slot"),
        (lambda: pl.Template(TEXT, A=NAMES, B=NAMES, differ=["A"]), "two or more"),
        (lambda: pl.Template("When{A}{B}", A=["met", "Mary"], B=["met", "Mary"]).of(reader()), "tokenised"),
        (lambda: pl.Template("When{A} met", A=pl.OBJECTS).of(reader()), "single tokens"),
        (lambda: pl.Template("When{A}", A=NAMES).of(pl.load("toy")), "no vocabulary"),
        (lambda: pl.Template("When{A} met" + " and" * 30, A=NAMES).of(reader()), "reads at most"),
        (lambda: pl.Swaps("When Mary met", {7: NAMES}).of(reader()), "there is no token 7"),
        (lambda: pl.Swaps("When Mary met", {1: [" Bob", " Tom"]}).of(reader()), "is 4 tokens"),
        (lambda: pl.Swaps("When Mary met", {}), "at least one position"),
        (lambda: pl.Prompts([]), "at least one prompt"),
        (lambda: pl.Prompts(["a", "a"]), "twice"),
    ],
)
def test_bad_input_is_one_line(make: Any, told: str) -> None:
    with pytest.raises(ProoflensError) as error:
        make()
    assert told in str(error.value)
    assert "\n" not in str(error.value)
