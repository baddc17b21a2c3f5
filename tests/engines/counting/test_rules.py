"""Every rule of the count: brackets by hypothesis, rounding in Arb, and mutations that tests must see."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod

import numpy as np
import pytest
import torch
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

from prooflens.checker.network import Network
from prooflens.engines.counting import FirstScores, Slots, count_most_attended, differences, ordering
from prooflens.engines.counting import counter as counter_module
from prooflens.engines.counting.integers import sums_of_products
from prooflens.engines.counting.masses import mass_margins
from prooflens.engines.counting.ordering import _order, brackets
from prooflens.models import Transformer
from prooflens.models.sites import rotary_tables
from tests.engines.counting.models import KINDS, VOCABULARY, model_of
from tests.engines.counting.test_counts import assert_equal, enumerated


@settings(max_examples=60, deadline=None)
@given(
    lists=st.lists(st.lists(st.integers(-12, 12), min_size=1, max_size=5), min_size=1, max_size=4),
    apart=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_brackets_hold_for_whatever_the_real_scores_are(
    lists: list[list[int]], apart: float, seed: int
) -> None:
    """Real scores anywhere within apart/2 of the computed ones: the count of each group lies in its bracket."""
    generator = np.random.default_rng(seed)
    items = [(float(value), g) for g, values in enumerate(lists) for value in values]
    order = sorted(range(len(items)), key=lambda i: items[i][0])
    values = torch.tensor([items[i][0] for i in order], dtype=torch.float64)
    group = torch.tensor([items[i][1] for i in order])
    members, sizes = [(g,) for g in range(len(lists))], [len(values) for values in lists]
    low, high = brackets(values, group, 1 << group, apart, members, sizes)
    for _ in range(4):
        real = [[v + generator.uniform(-0.5, 0.5) * apart for v in values] for values in lists]
        wins = [0] * len(lists)
        for combination in itertools.product(*real):
            best = max(combination)
            if combination.count(best) == 1:
                wins[combination.index(best)] += 1
        assert all(a <= w <= b for a, w, b in zip(low, wins, high, strict=True))
    if apart == 0.0:
        assert sum(low) <= prod(sizes) <= sum(high)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31), min_size=3, max_size=3), min_size=1, max_size=9))
def test_sums_of_products_are_exact(rows: list[list[int]]) -> None:
    factors = [torch.tensor(row) for row in rows]
    expected = sum(prod(row[i] for row in rows) for i in range(3))
    assert sums_of_products(factors, [2**31] * len(rows)) == [expected]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([5, 5000, 60_000]),
    st.sampled_from([1e-300, 1e-9, 1.0, 1e12]),
    st.sampled_from([3, 8, 16]),
)
def test_the_order_is_sorted(seed: int, size: int, scale: float, digits: int) -> None:
    row = np.random.default_rng(seed).standard_normal(size).round(digits) ** 3 * scale
    found, order = _order(row)
    assert sorted(order.tolist()) == list(range(size))
    assert (found == np.sort(row)).all()
    assert (found == row[order]).all()


@settings(max_examples=100, deadline=None)
@given(
    share=st.floats(0.001, 0.999),
    scores=st.lists(st.floats(-8, 8), min_size=2, max_size=6),
    inside=st.integers(1, 5),
)
def test_mass_margins_are_enough_and_necessary(share: float, scores: list[float], inside: int) -> None:
    inside = min(inside, len(scores) - 1)
    enough, necessary = mass_margins(share, inside, len(scores) - inside)
    gap = max(scores[:inside]) - max(scores[inside:])
    weights = [arb(score).exp() for score in scores]
    mass = sum(weights[:inside], arb(0)) / sum(weights, arb(0))
    assert not (gap > enough and mass < arb(share))
    assert not (gap < necessary and mass > arb(share))


def tables(n: int, d_head: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = rotary_tables(n, d_head, theta, torch.zeros(1, dtype=torch.float64))
    return cos.numpy(), sin.numpy()


@pytest.mark.parametrize("spread", [0.8, 1e3, 1e-3])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"softcap"}))
def test_errors_cover_the_real_scores(kind: str, spread: float) -> None:
    """The scores of the network in ball arithmetic are within E of those that are sorted."""
    model, n = model_of(kind, seed=31, spread=spread), 3
    scores = FirstScores(model, n)
    arch = model.architecture.to_dict()
    weights = {name: tensor.numpy() for name, tensor in model.weights.items()}
    defaults = {"n_kv_heads": None, "d_head": None, "rope_theta": None, "relative_buckets": None}
    net = Network(
        defaults | {"relative_max_distance": 128, "norm_place": "post", "norm_kind": "layer"} | arch,
        weights,
        tables,
    )
    for ids in ([1, 5, 2], [7, 0, 7]):
        point = np.array([[arb(v) for v in row] for row in model.embed(torch.tensor(ids)).tolist()])
        real = net.run([point], [0])[0][0]
        for head in range(2):
            queries = scores.queries(head, n - 1).of(torch.tensor([ids[-1]]))
            for key in scores.visible(n - 1):
                read = scores.keys(head, key)
                bias = scores.bias(head, n - 1, key)
                error = float(scores.errors(queries, [read], [abs(bias)])[0])
                found = float((queries.middle * scores.step.scale * read.middle[ids[key]]).sum() + bias)
                assert abs(arb(found) - real[head, n - 1, key]) <= arb(error)
                size = float(queries.length[0] * read.length.max()) * scores.step.scale + abs(bias)
                assert error < 1e-11 * size


def is_right(model: Transformer, slots: Slots) -> bool:
    """Whether counts equal enumeration; ties make brackets."""
    counts = count_most_attended(FirstScores(model, slots.length), slots, 0, slots.length - 1)
    truth = enumerated(model, slots, 0, slots.length - 1, counts.keys)
    try:
        assert_equal(counts, truth)
    except AssertionError:
        return False
    return True


def _drop_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstScores, "bias", lambda self, head, position, key: 0.0)


def _descending(monkeypatch: pytest.MonkeyPatch) -> None:
    ascending = ordering.ascending
    monkeypatch.setattr(counter_module, "ascending", lambda values: ascending(-values))


def _wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = FirstScores.keys
    monkeypatch.setattr(FirstScores, "keys", lambda self, head, position: keys(self, head, 0))


def _no_singles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "_add_single", lambda *parts: None)


def _wrong_head(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = FirstScores.queries
    monkeypatch.setattr(
        FirstScores, "queries", lambda self, head, position: queries(self, 1 - head, position)
    )


MUTATIONS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("alibi", _drop_bias),
    ("rotary", _descending),
    ("learned", _wrong_position),
    ("bert", _no_singles),
    ("bert", _wrong_head),
]


@pytest.mark.parametrize(("kind", "mutate"), MUTATIONS)
def test_mutations_are_seen(
    monkeypatch: pytest.MonkeyPatch, kind: str, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    model, slots = model_of(kind, seed=32), Slots.of(4, VOCABULARY)
    assert is_right(model, slots)
    mutate(monkeypatch)
    assert not is_right(model, slots)


@pytest.mark.parametrize("mutation", ["none", "runs", "errors"])
def test_near_ties_are_left_open_and_a_mutation_that_decides_them_is_seen(
    monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    """Two tokens whose embeddings differ in the last place: which scores more is in doubt, so the ends differ."""
    model = model_of("attention only", seed=33)
    weights = {name: tensor for name, tensor in model.weights.items() if name != "embed.positions"}
    weights["embed.tokens"] = weights["embed.tokens"].clone()
    weights["embed.tokens"][3] = weights["embed.tokens"][5] * (1.0 + 2.0**-48)
    twins = Transformer(model.architecture, weights)
    if mutation == "runs":
        monkeypatch.setattr(differences, "_runs", lambda rows: ([], []))
    elif mutation == "errors":
        nothing = torch.zeros(1, dtype=torch.float64)
        monkeypatch.setattr(
            FirstScores, "errors", lambda self, queries, *parts: nothing.expand(len(queries.length))
        )
    slots = Slots.of(3, VOCABULARY, choices={0: [3], 1: [5], 2: [1]})
    counts = count_most_attended(FirstScores(twins, 3), slots, 0, 2, keys=[0, 1])
    assert (counts.lower != counts.upper) == (mutation == "none")


@pytest.mark.parametrize("apart", [0.0, 0.001, 0.02, 5.0])
@pytest.mark.parametrize("shared", [False, True])
def test_differences_equal_brackets(apart: float, shared: bool) -> None:
    """The fast way and the slow one agree, runs and doubts included."""
    generator = torch.Generator().manual_seed(4)
    sizes, members = [30, 1, 20, 25], [(0,), (1,), (2, 3) if shared else (2,), (4,) if shared else (3,)]
    group = torch.cat([torch.full((size,), g) for g, size in enumerate(sizes)])
    values = torch.randn(6, len(group), generator=generator, dtype=torch.float64)
    values, order = values.sort(-1)
    groups = group[order]
    first = torch.tensor([1 << keys[0] for keys in members])[groups]
    either = torch.where(torch.rand(groups.shape, generator=generator) < 0.1, 0b1100, 0b1000)
    owners = torch.where(groups == 2, either, first) if shared else None
    rows = differences.SortedRows(
        values, groups, owners, torch.full((6,), apart, dtype=torch.float64), members, sizes
    )
    low, high, hard = differences.count_rows(rows)
    assert (len(hard) == 6) == (apart == 5.0)
    for row in set(range(6)) - set(hard):
        slow = brackets(values[row], groups[row], rows.bits(row), apart, members, sizes)
        assert all(a <= b for a, b in zip(low[row], high[row], strict=True))
        assert (low[row], high[row]) == slow
