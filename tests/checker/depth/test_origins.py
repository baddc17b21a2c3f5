"""What the e of a root comes from: the same points lie in what is kept apart, and less is counted twice."""

from dataclasses import replace

import numpy as np
import pytest

from prooflens.checker.depth import Walk, origins, score_form, values, walk
from prooflens.checker.depth.mixing import MixSite
from prooflens.checker.depth.origins import (
    Carried,
    Column,
    Origin,
    carried_on,
    column_of,
    kept_apart,
    narrowed,
)
from prooflens.checker.depth.shapes import support, total
from prooflens.checker.depth.values import ROOT
from tests.checker.depth.cases import KNOWN, Case, worst


def members(shapes: np.ndarray, rng: np.random.Generator, n: int) -> np.ndarray:
    """Points on the boundaries of ellipsoids [R, m, m]: [n, R, m]."""
    w = rng.standard_normal((n, *shapes.shape[:2]))
    moved = np.einsum("rij,nrj->nri", shapes, w)
    size = np.sqrt(np.einsum("nri,nri->nr", w, moved))[..., None]
    return np.asarray(np.divide(moved, size, out=np.zeros_like(moved), where=size > 0.0))


def shapes_of(rng: np.random.Generator, R: int, m: int) -> np.ndarray:
    L = rng.standard_normal((R, m, m)) * 10.0 ** rng.uniform(-3.0, 1.0, (R, 1, 1))
    return np.asarray(L @ np.swapaxes(L, -1, -2))


@pytest.mark.parametrize("seed", range(20))
def test_every_member_stays_in_what_is_carried_on(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random origins through random steps, tokens that read nothing of some, and origins that are added up."""
    rng = np.random.default_rng(seed)
    S, d, own = 3, 4, shapes_of(rng, 3, 4)
    held, e = [Origin(own)], members(own, rng, 50)
    if seed % 2:
        monkeypatch.setattr(origins, "numbers", lambda share: S * d * S * d)
    for _ in range(4):
        A = rng.standard_normal((S, d, S, d)) * (rng.random((S, 1, S, 1)) < 0.7)
        carried = carried_on(held, A)
        new = shapes_of(rng, S, d)
        e = np.einsum("tirj,nrj->nti", A, e)
        for t in range(S):
            w = rng.standard_normal((30, d))
            limit = support(total([shape[t] for shape in carried.reached]), w)
            assert (np.abs(e[:, t] @ w.T) <= limit + 1e-12).all()
        held, e = kept_apart(carried, new), e + members(new, rng, 50)
    assert (len(held) <= 4) == bool(seed % 2)


def test_what_tokens_share_is_not_counted_twice() -> None:
    """Two tokens that miss the same x, and a mixing that subtracts them: nothing is left."""
    x = Origin(np.eye(2)[None], [Column(np.arange(2), np.stack([np.eye(2)] * 2))])
    A = np.concatenate((np.eye(2)[:, None], -np.eye(2)[:, None]), 1)[None]
    carried = carried_on([x], A)
    assert float(support(carried.reached[0][0], np.ones(2))) < 1e-12


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_the_stream_brings_what_a_token_missed_even_where_no_head_reads_it(family: str) -> None:
    """A token whose own key is hidden in every head, and an attention that writes nothing."""
    case = Case.of(family, 1, eps=0.003, depth=3)
    case.walk.layer(2)
    mix = case.walk.kept(1).mix
    assert mix is not None
    t = mix.S - 1
    mask = mix.scores.mask.copy()
    mask[:, t, t] = False
    mask[:, t, 0] = True
    hidden = MixSite(replace(mix.scores, mask=mask), mix.v, mix.stream, 0.0 * mix.out, mix.bias)
    root = hidden.next([t])
    w = np.random.default_rng(0).standard_normal((50, len(mix.out)))
    for one in w:
        missed = float(support(mix.stream.E[t], one))
        assert missed > 0.0
        assert float(support(root.shapes[ROOT][0], one)) >= 0.3 * missed


@pytest.mark.parametrize("family", KNOWN)
def test_networks_whose_origins_are_all_added_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "numbers", lambda share: 0)
    assert worst(Case.of(family, 5, depth=3)) <= 1.0


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_origins_make_deep_values_tighter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.of(family, 2, eps=0.003, depth=4)

    def spread(of: Walk) -> float:
        with np.errstate(all="ignore"):
            return float(np.trace(of.layer(3).chain.shapes[ROOT], axis1=1, axis2=2).sum())

    apart = spread(case.walk)
    monkeypatch.setattr(values, "kept_apart", lambda carried, own: [])
    together = spread(Walk(case.net, case.walk.center, case.walk.generators))
    assert apart < together


def test_rounding_of_a_product_is_counted() -> None:
    rng = np.random.default_rng(0)
    shapes = shapes_of(rng, 2, 3)
    J = rng.integers(-9, 9, (2, 3, 2, 3)) / 8.0
    held = [Origin(shapes, [column_of(J, r) for r in range(2)])]
    carried: Carried = carried_on(held, np.eye(6).reshape(2, 3, 2, 3))
    assert (carried.noise > 0.0).all()
    assert held == []


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-42, 1e30, 1e60])
def test_what_single_precision_loses_is_counted(size: float) -> None:
    """Also where numbers are subnormal there; where they are too large for it they stay in double precision."""
    rng = np.random.default_rng(0)
    J, x = size * rng.standard_normal((2, 3, 2, 3)), members(shapes := shapes_of(rng, 2, 3), rng, 100)
    carried = carried_on([Origin(shapes)], J)
    columns = carried.origins[0].J
    assert columns is not None
    assert {column.blocks.dtype for column in columns} == {
        np.dtype(np.float64 if size > 1e38 else np.float32)
    }
    kept = np.stack([column.wide for column in columns], 2)
    off = np.linalg.norm(np.einsum("tirj,nrj->nti", J - kept, x), axis=-1)
    assert (off <= carried.noise).all()
    if size <= 1e30:
        assert off.max() > 0.0
        assert (
            float(carried.noise.max())
            < 1e-6 * float(np.linalg.norm(x, axis=(1, 2)).max()) * max(size, 1e-31) * 20
        )


def test_columns_leave_out_tokens_that_nothing_comes_to() -> None:
    J = np.zeros((3, 2, 3, 2))
    for t in range(3):
        J[t, :, : t + 1] = t + 1.0
    columns = [narrowed(column_of(J, r))[0] for r in range(3)]
    assert [column.tokens.tolist() for column in columns] == [[0, 1, 2], [1, 2], [2]]
    assert 2 * Origin(np.zeros((3, 2, 2)), columns).size == 6 * 4


def test_a_walk_holds_the_jacobians_of_one_root_and_two_walks_side_by_side_those_of_all() -> None:
    case = Case.of("gpt2", 2, eps=0.003, depth=4)
    chains = [case.walk.layer(number).chain for number in range(4)]
    assert [len(chain.origins) for chain in chains] == [0, 0, 0, 3]
    both = Walk(case.net, case.walk.center, case.walk.generators, other=case.net)
    assert [len(both.layer(number).chain.origins) for number in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_a_walk_that_lets_go_of_layers_says_the_same_of_the_last(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reading is the same; the second, which goes back to the input, says nothing."""
    case = Case.of(family, 4, eps=1e-3, depth=3)
    wanted = [form.bounds() for form, _ in case.forms(2)]
    monkeypatch.setattr(walk, "numbers", lambda share: 0)
    small = replace(case, walk=Walk(case.net, case.walk.center, case.walk.generators))
    found = small.forms(2)
    assert small.walk.layers[:2] == [None, None]
    assert [form.bounds() for form, _ in found] == wanted
    assert found[-1][0].tight_bounds() == (-np.inf, np.inf)
    assert (
        score_form(small.walk, 0, [(1.0, 0, 1, 0)]).bounds()
        == score_form(case.walk, 0, [(1.0, 0, 1, 0)]).bounds()
    )
    assert len(small.walk.layers) == 1
