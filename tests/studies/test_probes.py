"""Probes: prompts, roles, circuits and what is said about heads that split."""

from collections import Counter
from dataclasses import replace

import pytest

from prooflens.models import load
from prooflens.studies import base, probes
from prooflens.studies.probes import Pair, Probe, alike, circuits_of, failure_modes, furthest, role_of, told
from prooflens.studies.prompts import (
    FIRST,
    OTHERS,
    Duplicate,
    Words,
    ioi_prompts,
    ioi_texts,
    repeated_sequences,
)
from tests.studies.conftest import Run


@pytest.mark.parametrize("words", [FIRST, OTHERS])
def test_sixty_texts_in_equal_shares(words: Words) -> None:
    texts = ioi_texts(60, words)
    assert len(set(texts)) == 60
    counts = Counter(name for _, name in texts)
    assert set(counts) == set(words.names)
    assert max(counts.values()) - min(counts.values()) <= 2
    for some, most in ((words.places, 12), (words.things, 12)):
        shares = [sum(f" {word}" in text for text, _ in texts) for word in some]
        assert sum(shares) == 60
        assert max(shares) <= most
    assert all(text.split().count(name) + text.split().count(f"{name},") == 2 for text, name in texts)


def test_other_prompts_share_no_word() -> None:
    for name in ("names", "places", "things"):
        assert not set(getattr(FIRST, name)) & set(getattr(OTHERS, name))
    assert not set(ioi_texts(60)) & set(ioi_texts(60, OTHERS))


@pytest.mark.pretrained
@pytest.mark.parametrize("words", [FIRST, OTHERS])
def test_names_are_found_in_a_real_vocabulary(words: Words) -> None:
    model = load("smollm2")
    for place, (_, name) in zip(ioi_prompts(model, 60, words), ioi_texts(60, words), strict=True):
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
    assert furthest(probe(10, 1)) == [Pair("previous", 0, 1, 1e-3)]
    (pair,) = furthest(probe(1, 10))
    assert (pair.strong, pair.weak) == (1, 0)
    text = told(Pair("previous", 0, 1, 1e-3), probe(10, 1))
    assert text.startswith("0.0 and 0.1 look at: previous, on 10 and 9 of 10 prompts. At ε = 0.001 10 of 10")
    assert "they split (95 % intervals)" in text
    assert "they are not told apart" in told(Pair("previous", 0, 1, 1e-3), probe(6, 5))


def test_a_pair_is_held_to_a_stricter_test_beside_others() -> None:
    """10 and 3 of 10: from 0.692 and up to 0.652 at 95 %; from 0.645 and up to 0.692 at 97.5 %."""
    pair, wide = Pair("previous", 0, 1, 1e-3), probe(10, 3)
    assert "they split" in told(pair, wide)
    assert "they are not told apart (97.5 % intervals)" in told(pair, wide, tests=2)


def test_pairs_are_asked_again_on_other_prompts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair and its ε come from the first prompts, whatever the others say."""
    monkeypatch.setattr(probes, "furthest", lambda found: [Pair("previous", 1, 0, max(found.proved))])
    result = run("wang_probe", model="toy", samples=2)
    rows = [row for row in result.rows if row.group.startswith("other prompts")]
    assert [row.label.split(" ")[0] for row in rows] == ["0.0", "0.1"]
    assert {(row.group, row.n) for row in rows} == {("other prompts, ε = 0.002", 2)}
    (first, again) = [note for note in result.notes if " look at: " in note]
    assert first.startswith("0.1 and 0.0 look at: previous")
    assert again.startswith("Other prompts: 0.1 and 0.0 look at: previous")
    assert result.notes[-1] == "So 0 of 1 pairs split where they were chosen, and 0 on the other prompts."
    assert set(result.data["roles on other prompts"]) == {"0.0", "0.1"}


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
    (text,) = failure_modes(clean, proved, proved, 10)
    assert text.startswith(
        "0.0 keeps Q2 and loses Q1 (proved: Q1 1, Q2 9, Q3 5 of 10; an attack leaves: Q1 1, "
    )
    (text,) = failure_modes(clean, proved, {**proved, "Q1 of 0.0": 8}, 10)
    assert text.startswith("there is no head"), "what is not proved is not lost"


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


def test_processes_count_as_one_does(run: Run) -> None:
    alone = run("wang_probe", model="toy", samples=3)
    probes.probe.cache_clear()
    base._RESULTS.clear()
    several = run("wang_probe", model="toy", samples=3, jobs=2)
    assert [replace(row, seconds=None) for row in several.rows] == [
        replace(row, seconds=None) for row in alone.rows
    ]
    assert (several.notes, several.command) == (alone.notes, alone.command)


def test_a_deeper_layer_can_be_asked(run: Run) -> None:
    result = run("wang_probe", model="toy", layer=1, engine="cpz")
    assert all(row.engine == "cpz" and row.label.startswith("1.") for row in result.rows)
    assert result.key == "wang_probe-layer1"
    assert len({row.group for row in result.rows if row.group.startswith("ε")}) == 2
    assert [max(probes.radii_at(layer)) for layer in (0, 1, 2, 3)] == [2e-3, 1e-3, 1e-3, 3e-4]
    assert probes.probe.cache_info().currsize == 1
