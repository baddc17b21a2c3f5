"""Counts over whole vocabularies against running every prompt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from prooflens.engines.counting import FirstScores, Slots, count_most_attended
from prooflens.engines.counting.counter import Counts
from prooflens.errors import ModelError, QueryError
from prooflens.models import Transformer, load, scores_name
from prooflens.statistics import clopper_pearson
from tests.engines.counting.models import KINDS, VOCABULARY, model_of


def prompts_of(slots: Slots) -> Tensor:
    """Every prompt, as token ids."""
    lists = [range(slots.vocabulary) if slot.tokens is None else slot.tokens for slot in slots.slots]
    rows = []
    for choice in itertools.product(*lists):
        ids = [0] * slots.length
        for slot, token in zip(slots.slots, choice, strict=True):
            for position in slot.positions:
                ids[position] = token
        rows.append(ids)
    return torch.tensor(rows)


def enumerated(
    model: Transformer,
    slots: Slots,
    head: int,
    position: int,
    keys: Sequence[int],
    shifts: Mapping[int, float] | None = None,
    padding: Tensor | None = None,
) -> dict[tuple[int, int], int]:
    """Run every prompt: how often is each key on top, by query token."""
    prompts = prompts_of(slots)
    name = scores_name(0)
    scores = model.run(model.embed(prompts), name, padding)[name][:, head, position]
    for key, shift in (shifts or {}).items():
        scores[:, key] += shift
    best = torch.tensor(list(keys))[scores[:, list(keys)].argmax(-1)]
    found: dict[tuple[int, int], int] = {}
    for token, key in zip(prompts[:, position].tolist(), best.tolist(), strict=True):
        found[token, key] = found.get((token, key), 0) + 1
    return found


def assert_equal(counts: Counts, truth: dict[tuple[int, int], int]) -> None:
    assert counts.lower == counts.upper
    for token, row in zip(counts.tokens, counts.lower, strict=True):
        assert list(row) == [truth.get((token, key), 0) for key in counts.keys]
        assert sum(row) == counts.each


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_enumeration(kind: str, length: int) -> None:
    model = model_of(kind)
    scores, slots = FirstScores(model, length), Slots.of(length, VOCABULARY)
    for head, position in ((0, length - 1), (1, length // 2)):
        counts = count_most_attended(scores, slots, head, position)
        assert counts.prompts == VOCABULARY**length
        assert_equal(counts, enumerated(model, slots, head, position, counts.keys))


@pytest.mark.parametrize("kind", ["learned", "bert", "rotary"])
@pytest.mark.parametrize(
    ("same", "choices"),
    [
        ([(0, 4)], {}),
        ([(1, 2)], {}),
        ([(0, 3), (1, 4)], {2: [1, 5, 6]}),
        ([(0, 1, 2)], {0: [7, 2], 4: [3, 0, 1]}),
    ],
)
def test_repeated_and_restricted_slots(
    kind: str, same: list[tuple[int, ...]], choices: dict[int, list[int]]
) -> None:
    model = model_of(kind, seed=3)
    scores, slots = FirstScores(model, 5), Slots.of(5, VOCABULARY, same, choices)
    for position in (4, 2):
        counts = count_most_attended(scores, slots, 1, position)
        assert counts.prompts == slots.prompts
        assert_equal(counts, enumerated(model, slots, 1, position, counts.keys))


def test_padding_some_keys_shifts_and_some_tokens() -> None:
    model = model_of("bert", seed=4)
    padding = torch.tensor([True, True, True, False])
    scores, slots = FirstScores(model, 4, padding), Slots.of(4, VOCABULARY)
    counts = count_most_attended(scores, slots, 0, 1)
    assert counts.keys == (0, 1, 2)
    assert_equal(counts, enumerated(model, slots, 0, 1, counts.keys, padding=padding))
    shifts = {2: 0.75, 0: -0.5}
    some = count_most_attended(scores, slots, 0, 1, keys=[0, 2], shifts=shifts, tokens=[6, 1])
    assert some.tokens == (6, 1)
    assert_equal(some, enumerated(model, slots, 0, 1, [0, 2], shifts, padding))


@pytest.mark.parametrize("pieces", [4, 64, 4096])
def test_pieces_enclose_the_exact_count(pieces: int) -> None:
    for kind in ("rotary", "bert"):
        model = model_of(kind, seed=5)
        scores = FirstScores(model, 5)
        for slots in (Slots.of(5, VOCABULARY), Slots.of(5, VOCABULARY, [(0, 2)])):
            exact = count_most_attended(scores, slots, 0, 4)
            rough = count_most_attended(scores, slots, 0, 4, pieces=pieces)
            for rows in zip(rough.lower, exact.lower, rough.upper, strict=True):
                assert all(low <= true <= high for low, true, high in zip(*rows, strict=True))
    if pieces == 4:
        assert rough.lower != rough.upper


def test_ties_stand_between_lower_and_upper() -> None:
    """Without positions equal tokens have equal scores: no key is on top alone where the best token stands twice."""
    model = model_of("attention only", seed=2)
    weights = {name: tensor for name, tensor in model.weights.items() if name != "embed.positions"}
    plain = Transformer(model.architecture, weights)
    slots = Slots.of(3, VOCABULARY)
    counts = count_most_attended(FirstScores(plain, 3), slots, 0, 2)
    prompts = prompts_of(slots)
    scores = plain.scores(prompts, 0)[:, 0, 2]
    gap = scores[:, None, :] - scores[:, :, None]
    strict = ((gap < -1e-9) | torch.eye(3, dtype=torch.bool)).all(-1)
    weak = (gap < 1e-9).all(-1)
    for key in range(3):
        assert counts.total(key) == (int(strict[:, key].sum()), int(weak[:, key].sum()))
    assert sum(counts.total(key)[0] for key in range(3)) < counts.prompts


def test_products_beyond_64_bits_are_exact() -> None:
    """Shares of a model with 2,000 tokens and 8 positions: far beyond int64, and the keys' counts add up exactly."""
    model = model_of("rotary", vocabulary=2000, seed=6)
    scores, slots = FirstScores(model, 6), Slots.of(6, 2000)
    few = count_most_attended(scores, slots, 0, 5, tokens=[3, 1999])
    assert few.each == 2000**5
    assert few.lower == few.upper
    assert all(sum(row) == few.each for row in few.lower)
    long = model_of("alibi", vocabulary=2000, seed=6)
    padded = Slots.of(6, 2000, choices={5: [7]})
    wide = count_most_attended(FirstScores(long, 6), padded, 1, 5)
    assert all(sum(row) == 2000**5 for row in wide.lower)


def test_sampling_lies_in_its_interval() -> None:
    model = model_of("rotary", vocabulary=300, seed=7)
    slots = Slots.of(6, 300)
    counts = count_most_attended(FirstScores(model, 6), slots, 0, 5)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(300, (20_000, 6), generator=generator)
    best = model.scores(ids, 0)[:, 0, 5].argmax(-1)
    for key in counts.keys:
        low, high = clopper_pearson(int((best == key).sum()), len(ids), confidence=1.0 - 1e-9)
        least, most = counts.total(key)
        assert low <= least / counts.prompts <= most / counts.prompts <= high


def test_refusals_are_one_line() -> None:
    with pytest.raises(ModelError, match="no vocabulary to count over"):
        FirstScores(load("toy"), 4)
    model = model_of("learned")
    with pytest.raises(QueryError, match="at most 6 tokens"):
        FirstScores(model, 7)
    with pytest.raises(ModelError, match="float32"):
        FirstScores(model.to(dtype=torch.float32), 3)
    scores = FirstScores(model, 3)
    with pytest.raises(QueryError, match=r"attends to the keys \[0, 1\], not to 2"):
        count_most_attended(scores, Slots.of(3, VOCABULARY), 0, 1, keys=[2])
    with pytest.raises(QueryError, match="token 5 cannot stand"):
        count_most_attended(scores, Slots.of(3, VOCABULARY, choices={2: [1]}), 0, 2, tokens=[5])


@pytest.mark.parametrize(
    ("same", "choices", "message"),
    [
        ([(0, 7)], {}, "positions 0 … 3, not 7"),
        ([(1, 1)], {}, "at least two different positions"),
        ([(0, 1), (1, 2)], {}, "stands in two groups"),
        ([], {1: []}, "is empty"),
        ([], {1: [2, 2]}, "names a token twice"),
        ([], {1: [8]}, "8 is no token id"),
        ([(0, 1)], {0: [1], 1: [2]}, "has two lists"),
    ],
)
def test_bad_slots_are_one_line(
    same: list[tuple[int, ...]], choices: dict[int, list[int]], message: str
) -> None:
    with pytest.raises(QueryError, match=message):
        Slots.of(4, VOCABULARY, same, choices)


def test_a_count_that_is_stopped_leaves_the_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    model, slots = model_of("learned"), Slots.of(3, VOCABULARY)
    with pytest.raises(KeyboardInterrupt):
        count_most_attended(FirstScores(model, 3), slots, 0, 2, progress=stop)
    assert told[-1:] == [torch.get_num_threads()]
