"""Small problems that the engines' tests share."""

from functools import cache

import torch
from hypothesis import strategies as st
from torch import Tensor

from prooflens import Ball, Transformer
from prooflens.engines import Forms
from prooflens.models.architecture import Architecture
from prooflens.models.weights import optional_shapes, required_shapes
from prooflens.problem import Problem
from prooflens.queries import Row
from tests.engines import support
from tests.families import FAMILIES, VOCABULARY

MODELS = [*FAMILIES, "toy"]

model_of = cache(support.model_of)


def input_of(name: str, n_tokens: int = 4, seed: int = 1) -> Tensor:
    model = model_of(name)
    if name == "toy":
        return model.example(seed).x
    ids = torch.randint(4, VOCABULARY, (n_tokens,), generator=torch.Generator().manual_seed(seed))
    return model.embed(ids)


def problem_of(name: str, eps: float = 0.02, seed: int = 1) -> Problem:
    return Problem(model_of(name), Ball(eps).around(input_of(name, seed=seed)))


def tiny_model(
    seed: int, d_model: int = 4, n_heads: int = 1, n_layers: int = 1, **kind: object
) -> Transformer:
    """One layer or more with random weights; by default the paper's encoder, post-norm with ReLU."""
    options: dict[str, object] = {
        "activation": "relu",
        "norm_place": "post",
        "pool": "mean",
        "d_out": 2,
    } | kind
    architecture = Architecture("encoder", n_layers, n_heads, d_model, 2 * d_model, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    shapes = optional_shapes(architecture) | required_shapes(architecture)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        / (shape[-1] ** 0.5 if len(shape) > 1 else 4.0)
        for name, shape in shapes.items()
    }
    for name in weights:
        if "norm" in name and name.endswith("weight"):
            weights[name] = 1.0 + weights[name]
    return Transformer(architecture, weights, name=f"random {seed}")


def tiny_problem(seed: int, n_tokens: int, eps: float, **kind: object) -> Problem:
    model = tiny_model(seed, **kind)  # type: ignore[arg-type]
    x = torch.randn(
        n_tokens,
        model.architecture.d_model,
        generator=torch.Generator().manual_seed(seed + 1),
        dtype=torch.float64,
    )
    return Problem(model, Ball(eps).around(x))


def margins(problem: Problem, layer: int = 0) -> Forms:
    """a₀ − a_j of every row, for all keys j that take part."""
    entries = []
    number = 0
    for head in range(problem.model.architecture.n_heads):
        for i in range(problem.n_tokens):
            for j in range(1, problem.n_tokens):
                if problem.mask[i, 0] and problem.mask[i, j]:
                    entries += [(number, Row(layer, head, i), 0, 1.0), (number, Row(layer, head, i), j, -1.0)]
                    number += 1
    return Forms.of(entries, number)


def at(problem: Problem, forms: Forms, alpha: Tensor) -> Tensor:
    """Each form at its own factors, one by one through the model."""
    found = []
    for index, factors in enumerate(alpha):
        with torch.no_grad():
            x = problem.region.point(factors)[None]
            found.append(forms.evaluate(*problem.values(x, forms.layers, forms.logits is not None))[0, index])
    return torch.stack(found)


RANDOM_MODELS: dict[str, st.SearchStrategy[object]] = {
    "activation": st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "tanh", "relu2"]),
    "place": st.sampled_from(["pre", "post"]),
    "kind": st.sampled_from(["layer", "rms"]),
    "gated": st.booleans(),
}
"""What `tiny_model` is made of, for hypothesis."""
