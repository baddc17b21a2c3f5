"""Values of small models over the reals: Arb balls of 200 bits and more, by the checker's own forward pass."""

from typing import Any

import flint
import numpy as np
from torch import Tensor

from prooflens.checker.network import Network
from prooflens.engines import Forms
from prooflens.models import Transformer
from prooflens.problem import Problem
from tests.checker.test_network import torch_tables

balls = np.frompyfunc(flint.arb, 1, 1)


def network(model: Transformer) -> Network:
    weights = {name: tensor.numpy() for name, tensor in model.weights.items()}
    return Network(model.architecture.to_dict(), weights, torch_tables)


def real_points(problem: Problem, alpha: Tensor) -> list[Any]:
    """x₀ + Gα for each row of α, exactly."""
    region = problem.region
    G = balls(region.dense_generators().numpy())
    return [balls(region.center.numpy()) + np.tensordot(balls(a), G, 1) for a in alpha.numpy()]


def real_forms(problem: Problem, forms: Forms, points: list[Any]) -> list[list[flint.arb]]:
    """Every form at every point."""
    net = network(problem.model)
    found = []
    for values in net.run(points, forms.layers, forms.logits is not None):
        totals = [flint.arb(0) for _ in range(forms.size)]
        columns = (forms.index, forms.layer, forms.head, forms.position, forms.key, forms.weight)
        for form, layer, head, i, j, weight in zip(*(c.tolist() for c in columns), strict=True):
            totals[form] += values[layer][head, i, j] * weight
        if forms.logits is not None:
            for form, row in enumerate(forms.logits.tolist()):
                totals[form] += sum((v * w for v, w in zip(values["logits"], row, strict=True)), flint.arb(0))
        found.append(totals)
    return found
