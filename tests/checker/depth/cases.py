"""Random networks on random regions, and what they really do there."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from prooflens.checker.depth import Form, Walk, output_form, score_form
from prooflens.checker.network import Network
from prooflens.evaluation.soundness.cases import FAMILIES, SOLU, random_model
from prooflens.models.sites import rotary_tables
from prooflens.problem import Problem
from prooflens.regions import Ball

Evaluate = Callable[[Any, Any], Any]
"""A form of scores by layer and of outputs."""

KNOWN = (*(family for family in FAMILIES if family != "mixed"), SOLU)
"""Families that no network of is refused."""


def tables(n: int, width: int, theta: float) -> Any:
    """RoPE's tables as the package makes them."""
    return tuple(t.numpy() for t in rotary_tables(n, width, theta, torch.zeros(1, dtype=torch.float64)))


@dataclass(frozen=True, eq=False)
class Case:
    """A network on c + Gα, and the model that it is."""

    net: Network
    walk: Walk
    problem: Problem
    seed: int

    @classmethod
    def of(
        cls, family: str, seed: int, eps: float | None = None, depth: int | None = None, **arch: Any
    ) -> "Case":
        """A reproducible case: one to three layers, a ball or a few dense factors; `arch` changes the architecture."""
        choose, rng = random.Random(f"{family} {seed}"), np.random.default_rng(seed)
        model = random_model(family, choose, depth or choose.choice((1, 2, 3)))
        model = replace(model, architecture=replace(model.architecture, **arch)) if arch else model
        weights = {name: t.numpy() for name, t in model.weights.items()}
        net = Network.made(model.architecture.to_dict(), weights, tables)
        S, d = choose.randint(2, 4), model.architecture.d_model
        c = rng.standard_normal((S, d))
        eps = eps or 10.0 ** choose.uniform(-3.5, -1.0)
        p = S * d if choose.random() < 0.5 else choose.randint(1, 5)
        G = eps * (np.eye(p).reshape(S, d, p) if p == S * d else rng.standard_normal((S, d, p)))
        return cls(net, Walk(net, c, G), Problem(model, Ball(0.1).around(torch.tensor(c))), seed)

    def samples(self, n: int = 200, toward: Any = None) -> Any:
        """Factors: corners, points inside, and the two corners that a slope points to."""
        rng, p = np.random.default_rng(self.seed), self.walk.generators.shape[-1]
        found = [np.sign(rng.standard_normal((n, p))), rng.uniform(-1.0, 1.0, (n // 2, p))]
        if toward is not None:
            found.append(np.array([[1.0], [-1.0]]) * np.where(toward >= 0.0, 1.0, -1.0))
        return np.concatenate(found)

    def values(self, alpha: Any) -> tuple[Any, Any]:
        """Scores by layer and outputs of the model itself, at points."""
        points = self.walk.center + np.einsum("sdp,bp->bsd", self.walk.generators, alpha)
        layers = tuple(range(self.net.arch["n_layers"]))
        scores, outputs = self.problem.values(torch.tensor(points), layers, True)
        assert outputs is not None
        return {layer: a.numpy() for layer, a in scores.items()}, outputs.numpy()

    def forms(self, count: int) -> list[tuple[Form, Evaluate]]:
        """Differences of scores of every layer and of outputs, each with a function that evaluates it."""
        choose, found = random.Random(self.seed), list[tuple[Form, Evaluate]]()
        with np.errstate(all="ignore"):
            for layer in range(self.net.arch["n_layers"]):
                mask = self.walk.layer(layer).scores.mask
                for _ in range(count):
                    h, i = choose.randrange(self.net.arch["n_heads"]), choose.randrange(len(mask[0]))
                    j, k = choose.choices([int(key) for key in np.flatnonzero(mask[h, i])], k=2)
                    form = score_form(self.walk, layer, [(1.0, h, i, j), (-0.7, h, i, k)])
                    found.append((form, _difference(layer, h, i, j, k)))
            found.append((output_form(self.walk, {0: 1.0, 1: -1.0}), lambda a, o: o[:, 0] - o[:, 1]))
        return found


def _difference(layer: int, h: int, i: int, j: int, k: int) -> Evaluate:
    return lambda a, o: a[layer][:, h, i, j] - 0.7 * a[layer][:, h, i, k]


def worst(case: Case, count: int = 2) -> float:
    """How much of a bound is used at most: of either reading, and of what second order leaves. Above 1 is a defect.

    A share 1e-12 of the values is allowed for the rounding of the model itself, which is run in float64.
    """
    used = 0.0
    for form, evaluate in case.forms(count):
        alpha = case.samples(toward=form.slope)
        f = evaluate(*case.values(alpha))
        slack = 1e-12 * (1.0 + np.abs(f))
        with np.errstate(all="ignore"):
            (low, high), (least, most), (H, rest) = form.bounds(), form.tight_bounds(), form.expanded()
        for a, b in ((low, high), (least, most)):
            if np.isfinite(b - a):
                used = max(
                    used,
                    float(
                        (
                            (np.abs(f - form.center) - slack)
                            / np.where(f > form.center, b - form.center, form.center - a)
                        ).max()
                    ),
                )
        if np.isfinite(rest):
            left = f - form.center - alpha @ form.slope - 0.5 * np.einsum("bp,pq,bq->b", alpha, H.H, alpha)
            used = max(used, float(((np.abs(left) - slack) / rest).max()))
    return used
