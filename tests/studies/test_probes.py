"""Probes: prompts, roles, circuits and what is said about heads that split."""

from collections import Counter

import pytest

from prooflens.models import load
from prooflens.studies import probes
from prooflens.studies.probes import Probe, alike, circuits_of, failure_modes, role_of, splits
from prooflens.studies.prompts import (
    NAMES,
    PLACES,
    THINGS,
    Duplicate,
    ioi_prompts,
    ioi_texts,
    repeated_sequences,
)
from tests.studies.conftest import Run


def test_sixty_texts_in_equal_shares() -> None:
    texts = ioi_texts(60)
    assert len(set(texts)) == 60
    counts = Counter(name for _, name in texts)
    assert set(counts) == set(NAMES)
    assert max(counts.values()) - min(counts.values()) <= 2
    for words, most in ((PLACES, 12), (THINGS, 12)):
        shares = [sum(f" {word}" in text for text, _ in texts) for word in words]
        assert sum(shares) == 60
        assert max(shares) <= most
    assert all(text.split().count(name) + text.split().count(f"{name},") == 2 for text, name in texts)


@pytest.mark.pretrained
def test_names_are_found_in_a_real_vocabulary() -> None:
    model = load("smollm2")
    for place, (_, name) in zip(ioi_prompts(model, 60), ioi_texts(60), strict=True):
        assert place.first < place.second
        assert {place.prompt.tokens[i].strip() for i in (place.first, place.second)} == {name}
    for place in repeated_sequences(model, 3):
        assert place.prompt.ids is not None
        assert place.prompt.ids[0] == place.prompt.ids[-1]
        assert place.second == len(place.prompt) - 1


def test_roles() -> None:
    place = Duplicate(load("toy").example(0), 1, 3)
    assert [role_of(key, place) for key in (1, 3, 2, 0)] == ["duplicate", "itself", "previous", "first token"]
    roles = {0: Counter(previous=5, other=1), 1: Counter(previous=4, itself=2), 2: Counter(other=6)}
    assert alike(roles, 6) == {"previous": [0, 1]}
    assert circuits_of(roles, 6) == ((0, 1),)


def probe(strong: int, weak: int) -> Probe:
    roles = {0: Counter(previous=10), 1: Counter(previous=9, other=1)}
    held = {"0.0": [i < strong for i in range(10)], "0.1": [i < weak for i in range(10)]}
    return Probe(0, 10, roles, ((0, 1),), {1e-3: held}, {1e-3: held}, 0.0)


def test_heads_that_split() -> None:
    (text,) = splits(probe(10, 1))
    assert text.startswith(
        "0.0 and 0.1 both look at: previous (10 and 9 of 10 prompts). At ε = 0.001 10 of 10"
    )
    assert "they split" in text
    assert "they are not told apart" in splits(probe(6, 5))[0]


def test_failure_modes_need_a_clean_start() -> None:
    clean = {
        "Q1 of 0.0": 10,
        "Q2 of 0.0": 10,
        "Q3 of 0.0": 10,
        "Q1 of 0.1": 10,
        "Q2 of 0.1": 2,
        "Q3 of 0.1": 10,
    }
    proved = {"Q1 of 0.0": 1, "Q2 of 0.0": 9, "Q3 of 0.0": 5, "Q1 of 0.1": 9, "Q2 of 0.1": 0, "Q3 of 0.1": 9}
    (text,) = failure_modes(clean, proved, 10)
    assert text.startswith("0.0 keeps Q2 and loses Q1 ")


def test_and_is_never_more_than_its_heads(run: Run) -> None:
    single = run("wang_probe", model="toy", samples=3)
    both = run("cross_head_circuit", model="toy", samples=3)
    assert {row.n for row in (*single.rows, *both.rows)} == {3}
    heads = {(row.group, row.label.split(" ")[0]): row.proved for row in single.rows}
    for row in both.rows:
        assert row.proved is not None
        assert row.attack is not None
        assert row.proved <= row.attack
        if row.label.endswith("AND"):
            names = row.label.split("}")[0].strip("{").split(", ")
            assert row.proved <= min(heads[row.group, name] or 0 for name in names)


def test_three_queries_per_head(run: Run) -> None:
    result = run("induction_probe", model="toy", samples=2)
    assert [row.label.split(" (")[0] for row in result.rows] == [
        f"Q{q} of 0.{h}" for h in (0, 1) for q in (1, 2, 3)
    ]
    assert {row.n for row in result.rows} == {2}
    for row in result.rows:
        clean = int(row.label.split("clean ")[1].split("/")[0])
        assert (row.proved or 0) <= (row.attack or 0) <= clean


def test_a_deeper_layer_can_be_asked(run: Run) -> None:
    result = run("wang_probe", model="toy", layer=1, engine="cpz")
    assert all(row.engine == "cpz" and row.label.startswith("1.") for row in result.rows)
    assert len({row.group for row in result.rows}) == 2
    assert probes.probe.cache_info().currsize == 1
