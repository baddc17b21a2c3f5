"""Distributions over outputs of every member of a shape: probabilities, and divergences of an edited model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.models import Transformer

LOGITS = 2**27
"""Outputs that are computed at a time."""


@dataclass(frozen=True)
class MemberDistribution:
    """A metric of a distribution, its outputs by index or by the position whose token they are.

    Attributes:
        index: the output whose probability is measured; None for a divergence.
        among: the outputs that share the probability; None for all.
    """

    index: tuple[int, bool] | None
    among: tuple[tuple[int, bool], ...] | None

    def logs(
        self, model: Transformer, hidden: Float[Tensor, "B d"], ids: Int[Tensor, "B S"]
    ) -> Float[Tensor, "B n"]:
        """Return logarithms of probabilities: of all outputs that are named, or of the one.

        Args:
            model: the model.
            hidden: the vectors that its head reads.
            ids: the tokens of the members.

        Raises:
            QueryError: if two of the named outputs are one, on some member.
        """
        weight, bias = model.head
        if self.among is None:
            assert self.index is not None
            own, size = _outputs(self.index, ids), max(1, LOGITS // len(weight))
            found = []
            for some, chosen in zip(hidden.split(size), own.split(size), strict=True):
                logits = torch.nn.functional.linear(some, weight, bias)
                found.append(logits.log_softmax(-1).gather(-1, chosen[:, None]))
            return torch.cat(found)
        named = torch.stack([_outputs(output, ids) for output in self.among], -1)
        ordered = named.sort(-1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise QueryError("two outputs of the metric are one token on some member: name each once")
        logits = (weight[named] @ hidden[:, :, None])[..., 0] + bias[named]
        return logits.log_softmax(-1)

    def metric(self, logs: Float[Tensor, "B n"]) -> Float[Tensor, " B"]:
        """Return what is measured on one model: the probability; 0 for a divergence, which is that of two.

        Args:
            logs: what `logs` returned.
        """
        if self.index is None:
            return torch.zeros_like(logs[:, 0])
        place = 0 if self.among is None else self.among.index(self.index)
        return logs[:, place].exp()

    def effect(self, first: Float[Tensor, "B n"], second: Float[Tensor, "B n"]) -> Float[Tensor, " B"]:
        """Return p − p′, or KL(p ‖ p′), of every member.

        Args:
            first: what `logs` returned of the model.
            second: what it returned of the edited one.
        """
        if self.index is None:
            return (first.exp() * (first - second)).sum(-1).clamp_min(0.0)  # rounding alone makes it negative
        return self.metric(first) - self.metric(second)


def _outputs(output: tuple[int, bool], ids: Int[Tensor, "B S"]) -> Int[Tensor, " B"]:
    number, by_token = output
    return ids[:, number] if by_token else ids.new_full((len(ids),), number)
