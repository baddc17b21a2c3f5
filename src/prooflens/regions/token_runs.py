"""Generators that move one token each, as those of a box of pixels do: G is then a row of blocks, one per token.

Of p generators over S tokens of width d only p · d entries are not 0 then, and products with G are S times cheaper.
What is left out are products with 0, so nothing is rounded that was not rounded before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenRuns:
    """Runs of generators, each of one token, in the order of the factors.

    Attributes:
        tokens: the token of each run.
        blocks: the generators of each run at its token, shape [n, d].
        n_tokens: S.

    Example:
        >>> G = torch.zeros(3, 2, 4)
        >>> G[:2, 0], G[2, 1] = 1.0, 2.0
        >>> runs = TokenRuns.of(G)
        >>> runs.tokens, [len(block) for block in runs.blocks]
        ((0, 1), [2, 1])
    """

    tokens: tuple[int, ...]
    blocks: tuple[Float[Tensor, "n d"], ...]
    n_tokens: int

    @classmethod
    def of(cls, generators: Float[Tensor, "p S d"]) -> TokenRuns | None:
        """Return the runs; None where a generator moves several tokens, or where there are more runs than tokens.

        Args:
            generators: G, shape [p, S, d].
        """
        p, S, _ = generators.shape
        if p <= S:
            return None
        moved = (generators != 0).any(-1)
        if not bool((moved.sum(-1) == 1).all()):
            return None
        tokens, counts = torch.unique_consecutive(moved.int().argmax(-1), return_counts=True)
        if len(tokens) > S:
            return None
        named = tuple(tokens.tolist())
        parts = generators.split(counts.tolist())
        return cls(
            named, tuple(part[:, token].contiguous() for token, part in zip(named, parts, strict=True)), S
        )

    def pullback(self, covector: Float[Tensor, "... S d"]) -> Float[Tensor, "... p"]:
        """Return Gᵀv.

        Args:
            covector: v, shape [..., S, d].
        """
        pairs = zip(self.tokens, self.blocks, strict=True)
        return torch.cat([covector[..., token, :] @ block.T for token, block in pairs], -1)

    def moved(self, alpha: Float[Tensor, "... p"]) -> Float[Tensor, "... S d"]:
        """Return Gα; differentiable in α.

        Args:
            alpha: factors, shape [..., p].
        """
        parts = alpha.split([len(block) for block in self.blocks], -1)
        made = torch.stack([part @ block for part, block in zip(parts, self.blocks, strict=True)], -2)
        whole = made.new_zeros(*alpha.shape[:-1], self.n_tokens, made.shape[-1])
        return whole.index_add(-2, torch.tensor(self.tokens, device=made.device), made)
