"""What a proof by `taylor` costs, before it is begun: bytes and multiplications."""

from __future__ import annotations

from prooflens.engines.costs import FORM_STEPS, Cost
from prooflens.engines.forms import Forms
from prooflens.engines.taylor.next_root import one_token
from prooflens.models import Architecture
from prooflens.problem import Problem


def least_memory(problem: Problem, forms: Forms, whole: bool = False, quick: bool = False) -> int:
    """Return the bytes that must be held at once: the kept chains, and one layer at work.

    Args:
        problem: a model and a region.
        forms: what is asked.
        whole: keep all chains, as a walk back to the input needs them.
        quick: bound mixings in few steps, and keep no linear parts of scores for Hessians.
    """
    architecture, depth = problem.model.architecture, deepest(problem, forms)
    kept = depth if whole else min(depth, len(forms.layers))
    return needed_memory(architecture, problem.n_tokens, problem.region.n_factors, depth, kept, quick)


def deepest(problem: Problem, forms: Forms) -> int:
    """Return how many blocks a walk to what forms read passes.

    Args:
        problem: a model and a region.
        forms: what is asked.
    """
    layers = problem.model.architecture.n_layers
    return max((*forms.layers, 0)) if forms.logits is None else layers


def needed_memory(
    architecture: Architecture, n_tokens: int, factors: int, depth: int, kept: int, quick: bool = False
) -> int:
    """Return the bytes of a walk forward, from sizes alone.

    Args:
        architecture: what the model looks like.
        n_tokens: how many tokens.
        factors: how many factors the region has.
        depth: how many blocks are walked.
        kept: how many chains are kept besides the one at work.
        quick: bound mixings in few steps, and keep no linear parts of scores for Hessians.
    """
    S, d, p = n_tokens, architecture.d_model, max(1, factors)
    H, c, f, groups = architecture.n_heads, architecture.head_dim, architecture.d_ff, architecture.kv_heads
    rows = 2 if architecture.score_cap is None else 3
    chain = S * d * (40 * d + p)
    if architecture.activation == "solu":  # its neurons are values of the chain, and so are normed ones
        chain += S * f * (4 * d + (40 if architecture.network_norm else 16) * f)
    moves = S * (H + 2 * groups) * c * p + rows * H * S * S * p
    mixing = 4 * S * H * c * d
    if not quick:
        mixing += one_token(S, H, groups, c, d, p) + 2 * (S * groups * c) ** 2
    work = max(mixing, (24 if architecture.gated else 6) * f * f) if depth else 0
    return 8 * ((kept + 1) * chain + (1 if quick else kept + 1) * moves + S * d * p + work)


def taylor_work(problem: Problem, depth: int) -> float:
    """Estimate how many multiplications the walk forward takes."""
    architecture = problem.model.architecture
    S, d, f, H = problem.n_tokens, architecture.d_model, architecture.d_ff, architecture.n_heads
    p, width = max(1, problem.region.n_factors), H * architecture.head_dim
    jacobians = S * d * (60.0 * d * d + 8.0 * S * d * d + 2.0 * S * d * p + 2.0 * d * p)
    network = S * ((4.0 if architecture.gated else 1.0) * (f * d * (d + f) + 3.0 * f * f * d) + f * d * p)
    if architecture.activation == "solu":
        network += S * (80.0 if architecture.network_norm else 20.0) * f**3
    attention = 4.0 * (S * width) ** 2 * p / S + S * ((S * width) ** 2 * 8.0 + 40.0 * d**3 + 2.0 * S * d**3)
    return min(depth, architecture.n_layers) * 2.0 * (jacobians + network + attention)


WALK_SHARE = 0.85
"""The share of the multiplications that `taylor_work` counts that a walk takes (benchmarks/plan.py)."""
FIRST_SHARE = 0.6
"""What the first layer takes of what others do: each token moves by factors of its own there (benchmarks/plan.py)."""
CAUSAL_SHARE = 0.45
"""The share of that which is left where a mask hides later tokens (benchmarks/laptop.py, smollm2)."""


def walk_cost(problem: Problem, depth: int, size: int, passed: int = 0) -> Cost:
    """Predict what a walk forward takes, and the forms' way back.

    Args:
        problem: the model and the region.
        depth: the deepest layer whose scores are read, or the number of layers for outputs.
        size: how many forms are asked.
        passed: the layer whose scores a walk ends at that this one goes on from; 0 if there is none.
    """
    architecture, p = problem.model.architecture, problem.region.n_factors
    back = 4.0 * size * problem.n_tokens * max(1, depth) * architecture.d_model**2
    memory = needed_memory(architecture, problem.n_tokens, p, depth, min(depth, 1), quick=True)
    ahead = max(0, depth - passed)
    steps = 20000.0 * problem.n_tokens * (ahead + 1) + FORM_STEPS * size
    share = WALK_SHARE * (CAUSAL_SHARE if architecture.causal else 1.0)
    saved = 0.0 if passed or not ahead else (1.0 - FIRST_SHARE) * taylor_work(problem, 1)
    return Cost(share * (taylor_work(problem, ahead) - saved) + back, 8.0 * 8 * size * p, steps, memory)
