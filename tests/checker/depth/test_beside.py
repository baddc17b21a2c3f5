"""Two networks side by side: bounds of differences of their outputs, against what both do."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb

from prooflens.checker.depth import Form, Walk, beside, output_form, reading, steps, strands, walk
from prooflens.checker.depth.shapes import Array
from prooflens.checker.network import Network
from prooflens.problem import Problem
from tests.checker.depth.cases import KNOWN, Case

PARTS = (
    "o.weight",
    "down.weight",
    "o.bias",
    "down.bias",
    "norm2.weight",
    "q.weight",
    "v.weight",
    "up.weight",
)


def changed(name: str, weight: Array, choose: random.Random) -> Array:
    """A weight of an edited network: columns gone, as edits do it, or any other numbers."""
    made = weight.copy()
    if made.ndim == 2 and choose.random() < 0.7:
        made[:, : made.shape[1] // 2] = 0.0
    else:
        made = made * choose.choice((0.0, 0.9, 1.5))
    return made


def pair_of(family: str, seed: int, only: str = "", **size: Any) -> tuple[Case, Case]:
    """A case, and one beside it whose network differs in one to three weights, which `only` ends in."""
    case, choose = Case.of(family, seed, **size), random.Random(f"pair {family} {seed}")
    names = [name for name in case.net.weights if name.endswith((only,) if only else (*PARTS, "head.weight"))]
    chosen = choose.sample(names, k=min(len(names), choose.choice((1, 1, 2, 3))))
    weights = dict(case.net.weights)
    weights |= {name: changed(name, weights[name], choose) for name in chosen}
    net = Network(case.net.arch, weights, case.net.tables)
    held = {name: torch.tensor(weights[name]) for name in case.problem.model.weights}
    edited = replace(case.problem.model, weights=held)
    first = Walk(case.net, case.walk.center, case.walk.generators, other=net)
    with np.errstate(all="ignore"):
        second = first.beside()
    problem = Problem(edited, case.problem.region)
    return replace(case, walk=first), Case(net, second, problem, seed)


def difference(first: Case, second: Case) -> Form:
    with np.errstate(all="ignore"):
        own, other = output_form(first.walk, {0: 1.0, 1: -1.0}), output_form(second.walk, {0: -1.0, 1: 1.0})
    return own.plus(other)


def worst(first: Case, second: Case) -> float:
    """How much of a bound is used at most: of either reading, and of what second order leaves."""
    form, used = difference(first, second), 0.0
    alpha = first.samples(toward=form.slope)
    outputs = [case.values(alpha)[1] for case in (first, second)]
    f = outputs[0][:, 0] - outputs[0][:, 1] - (outputs[1][:, 0] - outputs[1][:, 1])
    slack = 1e-12 * (1.0 + np.abs(np.stack(outputs)).max())
    with np.errstate(all="ignore"):
        ends, (H, rest) = (form.bounds(), form.tight_bounds()), form.expanded()
    for low, high in ends:
        if np.isfinite(high - low):
            far = np.where(f > form.center, high - form.center, form.center - low)
            used = max(used, float(((np.abs(f - form.center) - slack) / far).max()))
    if np.isfinite(rest):
        left = f - form.center - alpha @ form.slope - 0.5 * np.einsum("bp,pq,bq->b", alpha, H.H, alpha)
        used = max(used, float(((np.abs(left) - slack) / rest).max()))
    return used


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("seed", range(2))
def test_no_point_of_a_region_breaks_a_bound_of_an_effect(family: str, seed: int) -> None:
    assert worst(*pair_of(family, seed)) <= 1.0


@pytest.mark.parametrize("family", ["encoder", "gpt2", "llama", "olmo2"])
@pytest.mark.parametrize("part", ["o.weight", "down.weight"])
def test_what_both_share_cancels(family: str, part: str) -> None:
    """Never much looser than both alone, and tighter near a point; a network beside itself has hardly any effect."""
    first, second = pair_of(family, 3, f"blocks.1.{part}", eps=1e-3, depth=2)
    apart = [output_form(case.walk, {0: 1.0, 1: -1.0}) for case in (first, second)]
    joint = difference(first, second)
    for read in ("bounds", "tight_bounds"):
        (low, high), ends = getattr(joint, read)(), [getattr(form, read)() for form in apart]
        alone = sum(b - a for a, b in ends)
        assert high - low <= 0.9 * alone
    assert first.walk.layers[0] is second.walk.layers[0]
    again = replace(first, walk=replace(first.walk, other=first.net, layers=[]))
    same = difference(again, replace(again, walk=again.walk.beside()))
    assert max(map(abs, same.tight_bounds())) <= 0.01 * alone
    assert same.center == 0.0


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mpnet", "relative_bias"),
        ("gpt2", "blocks.0.norm1.weight"),
        ("gpt2", "blocks.1.k.weight"),
        ("gpt2", "final_norm.weight"),
        ("encoder", "head.weight"),
    ],
)
def test_no_weight_that_differs_is_taken_for_the_same(family: str, name: str) -> None:
    """Weights that no edit of today changes, those that stand in no block too."""
    first, second = pair_of(family, 2, name, eps=0.01, depth=2)
    assert first.net.sha256 != second.net.sha256
    assert worst(first, second) <= 1.0


@pytest.mark.parametrize("family", ["mpnet", "gpt2", "olmo2"])
def test_effects_over_the_reals_are_held(family: str) -> None:
    """Regions so small that rounding is all there is: values in Arb, without tolerance."""
    first, second = pair_of(family, 7, "o.weight", eps=1e-14, depth=2)
    form, exact = difference(first, second), np.frompyfunc(arb, 1, 1)
    alpha = np.sign(np.random.default_rng(0).standard_normal((3, len(form.slope))))
    c, G = exact(first.walk.center), exact(first.walk.generators)
    points = [c + np.tensordot(G, exact(one), 1) for one in alpha]
    outputs = [[at["logits"] for at in case.net.run(points, (), True)] for case in (first, second)]
    for low, high in (form.bounds(), form.tight_bounds()):
        assert high - low < 1e-3
        for one, other in zip(*outputs, strict=True):
            value = (one[0] - one[1]) - (other[0] - other[1])
            assert not value < low
            assert not value > high


def test_forms_of_different_depth_are_not_added() -> None:
    first, _ = pair_of("gpt2", 0, depth=2)
    with pytest.raises(ValueError, match="depth"):
        difference(first, first).plus(reading.score_form(first.walk, 0, [(1.0, 0, 1, 0)]))


@pytest.mark.parametrize("family", ["encoder", "gpt2"])
@pytest.mark.parametrize("part", ["o.weight", "down.weight"])
def test_what_writes_into_the_stream_shares_its_site(family: str, part: str) -> None:
    """Networks that differ in what they write have one mixing, and one remainder of their neurons."""
    first, second = pair_of(family, 3, f"blocks.0.{part}", depth=1)
    chain = second.walk.end().chain
    assert chain is first.walk.end().chain
    assert first.walk.kept(0).mix is second.walk.kept(0).mix
    if part == "down.weight":
        assert "blocks.0.network, edited" not in chain.shapes
    assert worst(first, second) <= 1.0


@pytest.mark.parametrize("family", ["encoder", "gpt2"])
def test_remainders_on_a_shared_chain_keep_their_names(family: str) -> None:
    """An edited network reads what the other one does: on one chain its remainder is another source."""
    first, second = pair_of(family, 3, "blocks.0.up.weight", depth=1)
    before = {name: shape.copy() for name, shape in first.walk.end().chain.shapes.items()}
    chain = second.walk.end().chain
    assert chain is first.walk.end().chain
    assert "blocks.0.network, edited" in chain.shapes
    assert not np.array_equal(chain.shapes["blocks.0.network, edited"], chain.shapes["blocks.0.network"])
    assert all(np.array_equal(chain.shapes[name], shape) for name, shape in before.items())
    read = second.walk.end().value.jacobians
    assert "blocks.0.network, edited" in read
    assert "blocks.0.network" not in read


BUNDLED = strands.bundled


def forgetful(strands: Any) -> Any:
    """Of two networks on different chains, remainders of the first alone."""
    bundles, lost = BUNDLED(strands)
    return bundles[:1], lost


MUTANTS: dict[str, tuple[object, str, object]] = {
    "other weights taken for the same": (steps, "alike", lambda *_: True),
    "another mixing taken for the same": (beside, "BEHIND_MIXING", ("v", "q", "k", *beside.BEHIND_MIXING)),
    "the walk beside begins too late": (walk, "apart", lambda *_: []),
    "remainders of one network forgotten": (reading, "bundled", forgetful),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_sharing_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    pairs = [
        pair_of(family, seed, part, depth=2)
        for family in ("encoder", "gpt2")
        for part in ("o.weight", "up.weight", "v.weight")
        for seed in (5, 6)
    ]
    assert max(worst(*pair) for pair in pairs) > 1.0
