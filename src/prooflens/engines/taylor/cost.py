"""What a proof by `taylor` costs, before it is begun: bytes and multiplications."""

from __future__ import annotations

from prooflens.engines.costs import FORM_STEPS, Cost
from prooflens.engines.forms import Forms
from prooflens.engines.taylor.walk import one_token
from prooflens.models import Architecture
from prooflens.problem import Problem


def least_memory(problem: Problem, forms: Forms, whole: bool = False) -> int:
    """Return the bytes that must be held at once: the kept chains (all if `whole`), and one layer at work."""
    architecture = problem.model.architecture
    depth = max((*forms.layers, 0)) if forms.logits is None else architecture.n_layers
    kept = depth if whole else min(depth, len(forms.layers))
    return needed_memory(architecture, problem.n_tokens, problem.region.n_factors, depth, kept)


def needed_memory(architecture: Architecture, n_tokens: int, factors: int, depth: int, kept: int) -> int:
    """Return the bytes of a walk forward, from sizes alone.

    Args:
        architecture: what the model looks like.
        n_tokens: how many tokens.
        factors: how many factors the region has.
        depth: how many blocks are walked.
        kept: how many chains are kept besides the one at work.
    """
    S, d, p = n_tokens, architecture.d_model, max(1, factors)
    H, c, f = architecture.n_heads, architecture.head_dim, architecture.d_ff
    rows = 2 if architecture.score_cap is None else 3
    chain = S * d * (70 * d + 2 * p) + 3 * S * H * c * p + rows * H * S * S * p
    mixing = one_token(S, H, c, d, p) + 3 * S * S * H * c * d + 2 * (S * architecture.kv_heads * c) ** 2
    work = max(mixing, (24 if architecture.gated else 6) * f * f) if depth else 0
    return 8 * ((kept + 1) * chain + work)


def taylor_work(problem: Problem, depth: int) -> float:
    """Estimate how many multiplications the walk forward takes."""
    architecture = problem.model.architecture
    S, d, f, H = problem.n_tokens, architecture.d_model, architecture.d_ff, architecture.n_heads
    p, width = max(1, problem.region.n_factors), H * architecture.head_dim
    jacobians = S * d * (60.0 * d * d + 8.0 * S * d * d + 2.0 * S * d * p + 2.0 * d * p)
    network = S * ((4.0 if architecture.gated else 1.0) * (f * d * (d + f) + 3.0 * f * f * d) + f * d * p)
    attention = 4.0 * (S * width) ** 2 * p / S + S * ((S * width) ** 2 * 8.0 + 40.0 * d**3 + 2.0 * S * d**3)
    return min(depth, architecture.n_layers) * 2.0 * (jacobians + network + attention)


WALK_SHARE = 0.65
"""The share of the multiplications that `taylor_work` counts that a walk takes (benchmarks/plan.py)."""


def walk_cost(problem: Problem, depth: int, size: int) -> Cost:
    """Predict what a walk forward takes, and the forms' way back.

    Args:
        problem: the model and the region.
        depth: the deepest layer whose scores are read, or the number of layers for outputs.
        size: how many forms are asked.
    """
    architecture, p = problem.model.architecture, problem.region.n_factors
    back = 4.0 * size * problem.n_tokens * max(1, depth) * architecture.d_model**2
    memory = needed_memory(architecture, problem.n_tokens, p, depth, min(depth, 1))
    steps = 20000.0 * problem.n_tokens * (depth + 1) + FORM_STEPS * size
    return Cost(WALK_SHARE * taylor_work(problem, depth) + back, 8.0 * 8 * size * p, steps, memory)
