"""What engine tests share: small problems of every family, random forms, and a search for violations."""

from unittest.mock import patch

import torch
from torch import Tensor

from prooflens import Ball, Region, load
from prooflens.engines import FormBounds, Forms
from prooflens.engines.hidden import output_forms
from prooflens.engines.relaxations.ellipsoids import support
from prooflens.engines.taylor import Taylor
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.queries import Row
from tests.families import FAMILIES


def model_of(family: str) -> Transformer:
    return load(FAMILIES[family]()) if family in FAMILIES else load(family)


def center_of(model: Transformer, n_tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_tokens, model.architecture.d_model, generator=generator, dtype=torch.float64)


def random_problem(model: Transformer, n_tokens: int, eps: float, seed: int) -> Problem:
    """A ball on all or some tokens, or a few dense generators."""
    x = center_of(model, n_tokens, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    kind = seed % 3
    if kind == 0:
        return Problem(model, Ball(eps).around(x))
    if kind == 1:
        radii = torch.rand(n_tokens, generator=generator, dtype=torch.float64) * 2 * eps
        radii[0] = 0.0
        radii[-1] = eps
        return Problem(model, Ball(radii.tolist()).around(x))
    generators = torch.randn(4, *x.shape, generator=generator, dtype=torch.float64) * eps
    return Problem(model, Region(x, generators=generators))


def random_forms(problem: Problem, layer: int, count: int, seed: int) -> Forms:
    """Margins, weighted rows and sums over two rows, on keys that take part."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    heads = problem.model.architecture.n_heads
    entries: list[tuple[int, Row, int, float]] = []
    for form in range(count):
        for _ in range(1 + form % 2):
            row = Row(layer, draw(heads), draw(problem.n_tokens))
            keys = problem.mask[row.position].nonzero()[:, 0].tolist()
            if form % 3 == 0:
                entries += [(form, row, keys[draw(len(keys))], 1.0), (form, row, keys[draw(len(keys))], -1.0)]
            else:
                weights = torch.randn(len(keys), generator=generator, dtype=torch.float64).tolist()
                entries += [(form, row, key, weight) for key, weight in zip(keys, weights, strict=True)]
    return Forms.of(entries, count)


def attained(problem: Problem, forms: Forms, alpha: Tensor) -> Tensor:
    """The forms at factors α, as [points, forms]."""
    scores, output = problem.values(problem.region.point(alpha), forms.layers, forms.logits is not None)
    return forms.evaluate(scores, output)


def assert_contains(
    problem: Problem, forms: Forms, found: FormBounds, seed: int = 0, points: int = 300
) -> None:
    """No sampled point, no corner the engine returned and no sign step from there leaves the bounds."""
    candidates = [problem.region.sample(points, seed, corners=0.7)[1]]
    for corner in (found.lower_corner, found.upper_corner):
        if corner is not None:
            assert float(corner.abs().max()) <= 1.0
            candidates.append(corner)
    for sign in (-1.0, 1.0):
        alpha = torch.zeros(forms.size, problem.region.n_factors, dtype=torch.float64)
        for _ in range(3):
            alpha.requires_grad_()
            total = attained(problem, forms, alpha).diagonal().sum()
            (gradient,) = torch.autograd.grad(total, alpha)
            alpha = torch.where(gradient >= 0, sign, -sign).detach().to(torch.float64)
            candidates.append(alpha)
    with torch.no_grad():
        values = attained(problem, forms, torch.cat(candidates))
    assert bool((values >= found.lower).all())
    assert bool((values <= found.upper).all())


def walk_of(problem: Problem, quick: bool = False) -> TaylorWalk:
    """The walk of `taylor` up to the output, with nothing forgotten."""
    architecture = problem.model.architecture
    width = architecture.d_out or architecture.d_model
    forms = output_forms(torch.zeros(1, width, dtype=torch.float64))
    with torch.no_grad(), patch.object(Chain, "forget"):
        return Taylor().walk(problem, forms, quick=quick)


def worst_covectors(M: Tensor, points: Tensor) -> Tensor:
    """For each point the covector M⁻¹x, which shows best that x is not in the ellipsoid E(M)."""
    values, vectors = torch.linalg.eigh(M)
    w: Tensor = (points @ vectors / values.clamp(min=float(values[-1]) * 1e-16 + 1e-280)) @ vectors.T
    unit: Tensor = w / torch.linalg.vector_norm(w, dim=-1, keepdim=True).clamp(min=1e-280)
    return unit


def outside(M: Tensor, points: Tensor) -> float:
    """How far some point lies outside E(M); 0 or less where all lie inside, as they do where nothing is known."""
    if not bool(M.isfinite().all()):
        return -torch.inf
    w = worst_covectors(M, points)
    return float(((w * points).sum(-1).abs() - support(M, w)).max())
