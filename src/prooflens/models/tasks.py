"""Tasks over token ids whose inputs can all be listed, and the attention-only models that are trained on them.

- `max-of-4`: the largest of four tokens out of 64, by one layer and one head (Gross et al. 2024, *Compact Proofs of
  Model Performance via Mechanistic Interpretability*).
- `induction-2l`: five different tokens out of 16, then one of the first four again; what followed it? Two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import perm
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from prooflens.models.architecture import Architecture
from prooflens.models.transformer import Transformer
from prooflens.models.weights import required_shapes

BATCH = 1024
"""Inputs per step of training."""


@dataclass(frozen=True)
class TokenTask:
    """Inputs of n tokens with one right answer each.

    Attributes:
        name: the name of the recipe.
        kind: what is asked: the largest token, or the token that followed the last one before.
        vocabulary: V.
        length: n.
        layers: how many layers its model has.
        steps: how many steps it is trained.
        width: d of its model.
    """

    name: str
    kind: Literal["max", "induction"]
    vocabulary: int
    length: int
    layers: int
    steps: int
    width: int = 32

    @property
    def inputs(self) -> int:
        """How many inputs there are."""
        if self.kind == "max":
            return int(self.vocabulary**self.length)
        return perm(self.vocabulary, self.length - 1) * (self.length - 2)

    @property
    def architecture(self) -> Architecture:
        """One head per layer, learned positions, no norms, no feed-forward network, an untied head."""
        return Architecture(
            self.name,
            self.layers,
            1,
            self.width,
            self.width,
            "relu",
            norm_place="none",
            causal=True,
            has_network=False,
            pool="last",
            d_vocab=self.vocabulary,
            d_out=self.vocabulary,
            context=self.length,
        )

    def answers(self, ids: Int[Tensor, "... n"]) -> Int[Tensor, ...]:
        """Return the right answer of every input.

        Args:
            ids: token ids, shape [..., n].
        """
        if self.kind == "max":
            return ids.amax(-1)
        where = (ids[..., :-1] == ids[..., -1:]).long().argmax(-1, keepdim=True)
        return ids.gather(-1, where + 1)[..., 0]

    def draw(self, count: int, generator: torch.Generator) -> Int[Tensor, "count n"]:
        """Draw inputs uniformly.

        Args:
            count: how many.
            generator: the source of randomness.
        """
        if self.kind == "max":
            return torch.randint(self.vocabulary, (count, self.length), generator=generator)
        order = torch.rand(count, self.vocabulary, generator=generator).argsort(-1)[:, : self.length - 1]
        again = torch.randint(self.length - 2, (count, 1), generator=generator)
        return torch.cat((order, order.gather(-1, again)), -1)


TASKS = {
    task.name: task
    for task in (
        TokenTask("max-of-4", "max", vocabulary=64, length=4, layers=1, steps=3000),
        TokenTask("induction-2l", "induction", vocabulary=16, length=6, layers=2, steps=2500),
    )
}
"""The tasks by the name of their recipe."""


def fit(
    task: TokenTask, seed: int, steps: int, generator: torch.Generator, tell: Callable[[int], None]
) -> Transformer:
    """Train a model on random inputs of a task: AdamW, one cycle of the learning rate.

    Args:
        task: what to learn.
        seed: seed of the weights.
        steps: how many steps.
        generator: the source of the inputs.
        tell: called with the number of each step.
    """
    architecture = task.architecture
    shapes = required_shapes(architecture) | {
        "embed.positions": (task.length, task.width),
        "head.weight": (task.vocabulary, task.width),
    }
    source = torch.Generator().manual_seed(seed)
    weights = {
        name: (torch.randn(shape, generator=source) * shape[-1] ** -0.5).requires_grad_()
        for name, shape in sorted(shapes.items())
    }
    model = Transformer(architecture, weights, name=task.name)
    optimizer = torch.optim.AdamW(list(weights.values()), lr=1e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=6e-3, total_steps=steps + 1, pct_start=0.1
    )
    for step in range(steps):
        tell(step)
        ids = task.draw(BATCH, generator)
        loss = torch.nn.functional.cross_entropy(model(ids), task.answers(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model
