"""Models with a planted counterexample (after SoundnessBench): false claims that look true to gradients.

One neuron of the first feed-forward network is silent on the whole ball except within a sliver around one corner s:
g = relu(K(s·LN(x₀) − θ)), θ just below the value at that corner. Where it fires it throws the residual stream along a
fixed direction and flips the claim. Its gradient is 0 everywhere else, so PGD is led away, and a random corner is s
with probability 2⁻ᵈ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.models import Architecture, Transformer
from prooflens.models.train import initial_weights
from prooflens.problem import Problem
from prooflens.queries import Claim, parse_query
from prooflens.regions import Ball

WIDTH = 16
"""d: a random corner of the first token is the planted one with probability 2⁻¹⁶."""

SHARPNESS = 1e6
"""K: how fast the neuron rises once it fires."""

EPS = 0.05

THROW = 40.0
"""How far the residual stream is thrown, in units of its own norm."""


@dataclass(frozen=True, eq=False)
class Planted:
    """A false claim, and the factors that break it."""

    problem: Problem
    claim: Claim
    alpha: Float[Tensor, " p"]


def planted_case(seed: int, about_output: bool) -> Planted:
    """A claim about the output, or about a head of layer 1, that holds on the ball except around one corner."""
    generator = torch.Generator().manual_seed(seed)
    architecture = Architecture("encoder", 2, 1, WIDTH, 4, "relu", pool="first", d_out=2)
    weights = {
        name: 0.0 * t.detach().double() for name, t in initial_weights(architecture, generator).items()
    }
    for name in weights:
        if "norm" in name and name.endswith("weight"):
            weights[name] = torch.ones(WIDTH, dtype=torch.float64)
    # Balanced signs and a balanced direction: the norm's centring leaves both alone.
    signs = torch.ones(WIDTH, dtype=torch.float64)
    signs[torch.randperm(WIDTH, generator=generator)[: WIDTH // 2]] = -1.0
    unit = signs / signs.norm()
    direction = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    direction = direction - direction.mean() - (direction @ unit) * unit
    direction = direction / direction.norm()
    # Token 0 points along the direction and token 1 does not, so that the clean claim holds by a wide margin; along s
    # they point apart, so that the neuron can fire on token 0 only.
    x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    x = x - (x @ direction)[:, None] * direction - (x @ unit)[:, None] * unit
    x[0] = x[0] + 3.0 * direction + unit
    x[1] = x[1] - unit
    neighbour = signs.clone()
    neighbour[0] = -neighbour[0]
    at_corner = float(signs @ _normalised(x[0] + EPS * signs))
    next_best = float(signs @ _normalised(x[0] + EPS * neighbour))
    rise = 0.05 * (at_corner - next_best)
    weights["blocks.0.up.weight"][0] = SHARPNESS / rise * signs
    weights["blocks.0.up.bias"][0] = -SHARPNESS / rise * (at_corner - rise)
    weights["blocks.0.down.weight"][:, 0] = -THROW * WIDTH**0.5 / SHARPNESS * direction
    read = direction + 0.05 * torch.randn(WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    if about_output:
        weights["head.weight"][0] = read
        weights["head.weight"][1] = -read
    else:
        weights["blocks.1.q.bias"][0] = WIDTH**0.5
        weights["blocks.1.k.weight"][0] = read
    model = Transformer(architecture, weights, name="planted")
    problem = Problem(model, Ball(EPS, tokens=[0]).around(x))
    if about_output:
        claim = parse_query("argmax").bind(problem.setting([], output=True))[0]
    else:
        claim = parse_query("1.0:top1@0").bind(problem.setting([1]))[0]
    return Planted(problem, claim, signs)


def _normalised(x: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    return torch.nn.functional.layer_norm(x, x.shape, eps=1e-5)
