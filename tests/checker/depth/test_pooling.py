"""Poolers behind a mean of tokens, alone and beside an edited network, and prompts with padding."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb

from prooflens.checker.depth import Walk, output_form, pooling
from prooflens.checker.depth.pooling import PoolSite
from prooflens.checker.depth.shapes import supports
from prooflens.checker.depth.values import ROOT, Chain
from prooflens.checker.plain import PlainNetwork
from prooflens.problem import Problem
from tests.checker.depth.cases import Case, worst
from tests.checker.depth.test_beside import pair_of
from tests.checker.depth.test_beside import worst as worst_of_pair

MEAN: dict[str, Any] = {"pool": "mean"}
"""What makes BERT's pooler read a mean."""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("eps", [None, 0.03])
def test_poolers_behind_a_mean(seed: int, eps: float | None) -> None:
    assert worst(Case.of("bert", seed, eps, **MEAN)) <= 1.0


@pytest.mark.parametrize("seed", range(6))
def test_effects_that_a_pooler_reads_through_a_mean(seed: int) -> None:
    assert worst_of_pair(*pair_of("bert", seed, **MEAN)) <= 1.0


def try_mean(seed: int) -> float:
    """The root behind a mean against the mean itself: its ellipsoid, of what is not linear."""
    case = Case.of("bert", seed, 0.02, depth=1, **MEAN)
    chain, plain, alpha = case.walk.end().chain, PlainNetwork(case.net), case.samples(60)
    x = case.walk.center + np.einsum("sdp,bp->bsd", case.walk.generators, alpha)
    for layer in range(case.net.arch["n_layers"]):
        x = plain._block(layer, x)[0]
    e = x.mean(1) - chain.c[0] - alpha @ chain.N[0].T
    W = np.concatenate(
        (np.random.default_rng(seed).standard_normal((6, e.shape[1])), e[:6] / np.abs(e).max())
    )
    return float((np.abs(e @ W.T) / supports(chain.shapes[ROOT][0], W)).max())


@pytest.mark.parametrize("seed", range(6))
def test_means_stay_in_their_ellipsoids(seed: int) -> None:
    assert try_mean(seed) <= 1.0


def test_means_over_the_reals_are_held() -> None:
    """A region so small that rounding is all there is: values in Arb, without tolerance."""
    case = Case.of("bert", 4, eps=1e-14, depth=2, **MEAN)
    form, exact = output_form(case.walk, {0: 1.0, 1: -1.0}), np.frompyfunc(arb, 1, 1)
    alpha = np.sign(np.random.default_rng(0).standard_normal((3, len(form.slope))))
    c, G = exact(case.walk.center), exact(case.walk.generators)
    found = case.net.run([c + np.tensordot(G, exact(one), 1) for one in alpha], (), True)
    for low, high in (form.bounds(), form.tight_bounds()):
        assert high - low < 1e-3
        for at in found:
            value = at["logits"][0] - at["logits"][1]
            assert not value < low
            assert not value > high


def padded(family: str, seed: int, **arch: Any) -> Case:
    """A case whose last tokens are padding, one at least."""
    case = Case.of(family, seed, **arch)
    real = np.arange(case.walk.n_tokens) < case.walk.n_tokens - 1 - (case.walk.n_tokens > 3)
    walk = Walk(case.net, case.walk.center, case.walk.generators, padding=real)
    held = Problem(case.problem.model, case.problem.region, torch.tensor(real))
    return replace(case, walk=walk, problem=held)


@pytest.mark.parametrize("family", ["encoder", "bert", "mpnet", "gpt2", "llama"])
@pytest.mark.parametrize("seed", range(2))
def test_padding(family: str, seed: int) -> None:
    assert worst(padded(family, seed)) <= 1.0


@pytest.mark.parametrize("seed", range(2))
def test_padding_is_left_out_of_means_that_a_pooler_reads(seed: int) -> None:
    assert worst(padded("bert", seed, **MEAN)) <= 1.0


def test_padding_that_nothing_can_be_attended_besides_is_refused() -> None:
    case = Case.of("gpt2", 0)
    walk = Walk(case.net, case.walk.center, case.walk.generators, padding=np.arange(case.walk.n_tokens) > 0)
    with pytest.raises(ValueError, match="padding alone"):
        walk.layer(0)


def test_edits_of_padded_prompts_are_refused() -> None:
    case = Case.of("gpt2", 0)
    net = replace(case.net, weights=case.net.weights | {"blocks.0.knocked_out.at": np.zeros((0, 3))})
    held = {f"blocks.0.o.held.{part}": np.zeros((0, 3)) for part in ("at", "values", "read")}
    net = replace(case.net, weights=case.net.weights | held)
    with pytest.raises(ValueError, match="padded prompt"):
        Walk(net, case.walk.center, case.walk.generators, padding=np.arange(case.walk.n_tokens) < 1)


def tried() -> float:
    """Means of tokens that move a lot, and prompts with padding."""
    cases = [Case.of("bert", seed, 0.03, depth=1, **MEAN) for seed in range(4)]
    cases += [padded(family, seed, eps=0.01) for family in ("encoder", "bert") for seed in range(4)]
    return max(*map(try_mean, range(4)), *map(worst, cases))


def without_padding(walk: Walk, number: int) -> Any:
    return walk.net.masks(walk.n_tokens, number)


FOLLOWED = Chain.followed_by
MUTANTS: dict[str, tuple[object, str, object]] = {
    "what sites left at tokens forgotten": (pooling, "image", lambda L, M: 0.0 * M),
    "what a mean misses forgotten": (
        Chain,
        "followed_by",
        lambda self, c, N, own, A: FOLLOWED(self, c, N, own if len(c) > 1 else 0.0 * own, 0.0 * A),
    ),
    "covectors of a mean with the wrong sign": (
        PoolSite,
        "pull",
        lambda self, v, t: {"stream": {place: -w * v for place, w in enumerate(self.shares.tolist())}},
    ),
    "padding attended to": (Walk, "_mask", without_padding),
}


def test_nothing_is_wrong_without_a_mutant() -> None:
    assert tried() <= 1.0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_means_and_padding_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert tried() > 1.0


def test_padding_that_is_pooled_is_caught() -> None:
    case = padded("encoder", 1, eps=0.01)
    case.walk.layer(case.net.arch["n_layers"] - 1)
    case.walk._real = np.ones_like(case.walk._real)
    assert worst(case) > 1.0
