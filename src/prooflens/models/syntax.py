"""Two tasks of syntax over a small vocabulary, and the model that is trained on both: the right closing mark.

`quotes-and-brackets` has the tasks and the size of Somani's *Verifiable Transformers* (2026): six tokens, `BOS TASK x
OPEN x x` with x any of four content tokens, and the answer that closes OPEN: a quote closes itself, a bracket by its
other half. Two layers, two heads, d = 16, d_ff = 64, 32 tokens; here with softmax and LayerNorm, as in GPT-2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from prooflens.models.architecture import Architecture
from prooflens.models.transformer import Transformer

NAME = "quotes-and-brackets"
BOS = 1
CONTENT = (10, 11, 12, 13)
"""The tokens that do not matter."""

TOKENS = ("pad", "bos", "quote task", "bracket task", "'", '"', "[", "]", "{", "}", "a", "b", "c", "d")
"""What the first tokens of the vocabulary stand for; the others are not used."""


@dataclass(frozen=True)
class SyntaxTask:
    """Inputs with one of two opening marks, each with its own answer.

    Attributes:
        token: the token that names the task.
        closes: the answer of every opening mark.
    """

    token: int
    closes: Mapping[int, int]

    @property
    def answers(self) -> tuple[int, int]:
        """The two outputs that are compared."""
        first, second = self.closes.values()
        return first, second

    def domain(self) -> tuple[Int[Tensor, "n 6"], Int[Tensor, " n"]]:
        """Return all 128 inputs of the task, and the right answer of each."""
        rows = [
            [BOS, self.token, x, mark, y, z]
            for mark in self.closes
            for x, y, z in itertools.product(CONTENT, repeat=3)
        ]
        return torch.tensor(rows), torch.tensor([self.closes[row[3]] for row in rows])


SYNTAX = {
    "quote": SyntaxTask(2, {4: 4, 5: 5}),
    "bracket": SyntaxTask(3, {6: 7, 8: 9}),
}
"""The tasks by name."""

ARCHITECTURE = Architecture(
    NAME,
    n_layers=2,
    n_heads=2,
    d_model=16,
    d_ff=64,
    activation="gelu_tanh",
    norm_place="pre",
    norm_eps=1e-5,
    causal=True,
    pool="last",
    d_vocab=32,
    d_out=32,
    context=6,
)
"""The model of both tasks: a GPT-2 of about 8,000 weights."""

STEPS = 400
"""How many steps it is trained, each on all 256 inputs."""


def domain() -> tuple[Int[Tensor, "n 6"], Int[Tensor, " n"]]:
    """Return all 256 inputs of both tasks, and the right answer of each."""
    ids, answers = zip(*(task.domain() for task in SYNTAX.values()), strict=True)
    return torch.cat(ids), torch.cat(answers)


def fit_syntax(weights: dict[str, Tensor], steps: int, tell: Callable[[int], None]) -> Transformer:
    """Train on all inputs of both tasks at once: AdamW, one cycle of the learning rate.

    Args:
        weights: fresh weights, which are trained.
        steps: how many steps.
        tell: called with the number of each step.
    """
    model = Transformer(ARCHITECTURE, weights, name=NAME)
    optimizer = torch.optim.AdamW(list(weights.values()), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
    ids, answers = domain()
    for step in range(steps):
        tell(step)
        loss = torch.nn.functional.cross_entropy(model(ids), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model
