"""Atoms of the distribution over some outputs: the probability of one of them, and the divergence of two models.

With y the outputs and T a set of them, p_i = e^{y_i} / Σ_{j ∈ T} e^{y_j}: the softmax over T alone, renormalised there.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Probability:
    """The probability of one output among some: e^{y_i} / Σ_j e^{y_j}.

    Attributes:
        index: the output i.
        among: the outputs j, of which i is one.

    Example:
        >>> import torch
        >>> Probability(0, (0, 1)).value(torch.tensor([0.0, 0.0, 9.0])).item()
        0.5
    """

    index: int
    among: tuple[int, ...]

    @property
    def outputs(self) -> tuple[int, ...]:
        """All outputs that it reads."""
        return self.among

    def value(self, logits: Float[Tensor, "... C"]) -> Float[Tensor, "..."]:
        """Return the probability; differentiable.

        Args:
            logits: the outputs, shape [..., C].
        """
        shares = logits[..., list(self.among)].softmax(-1)
        return shares[..., self.among.index(self.index)]

    def moved(self, by: int) -> "Probability":
        """Return the same of outputs that stand further on.

        Args:
            by: how much further.
        """
        return Probability(self.index + by, tuple(index + by for index in self.among))


@dataclass(frozen=True)
class Divergence:
    """The Kullback–Leibler divergence Σ p log(p/q), in nats: p over some outputs, q over as many others.

    Attributes:
        first: the outputs of p.
        second: those of q, in the same order.

    Example:
        >>> import torch
        >>> round(Divergence((0, 1), (2, 3)).value(torch.tensor([0.0, 0.0, 1.0, 0.0])).item(), 4)
        0.1201
    """

    first: tuple[int, ...]
    second: tuple[int, ...]

    @property
    def outputs(self) -> tuple[int, ...]:
        """All outputs that it reads."""
        return (*self.first, *self.second)

    def value(self, logits: Float[Tensor, "... C"]) -> Float[Tensor, "..."]:
        """Return the divergence; differentiable.

        Args:
            logits: the outputs, shape [..., C].
        """
        p = logits[..., list(self.first)].log_softmax(-1)
        q = logits[..., list(self.second)].log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)

    def moved(self, by: int) -> "Divergence":
        """Return the divergence of the same p from outputs of q that stand further on.

        Args:
            by: how much further.
        """
        return Divergence(self.first, tuple(index + by for index in self.second))
