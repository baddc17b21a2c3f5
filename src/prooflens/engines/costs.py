"""What a call of an engine takes, predicted from sizes alone, in units that hold on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from prooflens.models import Architecture
from prooflens.problem import Problem

FORM_STEPS = 45
"""Small steps that each form takes on its way to an engine and back, about."""


@dataclass(frozen=True)
class Cost:
    """What a call takes, about.

    Attributes:
        multiplications: of float64 numbers, in products of matrices.
        traffic: bytes that elementwise steps read and write.
        steps: small operations, whose time is that of calling them.
        memory: bytes that are held at the same time.
    """

    multiplications: float
    traffic: float
    steps: float
    memory: float


@runtime_checkable
class Priced(Protocol):
    """An engine that predicts what it takes."""

    def cost(self, problem: Problem, depth: int, size: int) -> Cost:
        """Predict what a call takes.

        Args:
            problem: the model and the region.
            depth: the deepest layer whose scores are read, or the number of layers for outputs.
            size: how many forms are asked.
        """
        ...


def block_weights(architecture: Architecture) -> int:
    """Return the number of weights of one block, without norms and biases.

    Args:
        architecture: what the model looks like.
    """
    width = architecture.n_heads * architecture.head_dim
    keys = 2 * architecture.kv_heads * architecture.head_dim
    network = (3 if architecture.gated else 2) * architecture.d_ff
    return architecture.d_model * (2 * width + keys + network)


def weights_before(architecture: Architecture, depth: int) -> int:
    """Return the number of weights that are read on the way to the scores of a layer, or to the vector of the head.

    Args:
        architecture: what the model looks like.
        depth: the layer, or the number of layers for the vector that the head reads.
    """
    blocks = min(depth, architecture.n_layers)
    last = 2 * architecture.d_model**2 if depth < architecture.n_layers else 0
    return blocks * block_weights(architecture) + last
