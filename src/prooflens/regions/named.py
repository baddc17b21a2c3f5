"""Regions by name: ε-balls around a prompt, and hulls of paraphrases.

An ε-ball has G = εI and is kept as a vector of radii, never as a matrix. A paraphrase hull has one generator per
paraphrase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from prooflens.errors import RegionError
from prooflens.models.prompt import Prompt
from prooflens.regions.region import Constraints, Region, numbers, positive

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer


@dataclass(frozen=True)
class Ball:
    """An ℓ∞ ball around a prompt: one ε for all tokens, for chosen tokens, or a radius per token.

    Tokens are indices; `certify`, `circuit`, `output` and `radius` also take their texts.
    """

    eps: float | Mapping[int, float] | Mapping[str, float] | Sequence[float]
    tokens: Sequence[int | str] | int | str | None = None

    def around(self, prompt: Prompt | Tensor) -> Region:
        """The region of this ball around a prompt (or around an input of shape [S, d])."""
        x = prompt.x if isinstance(prompt, Prompt) else prompt
        if x.ndim != 2:
            raise RegionError(f"a ball stands around an input of shape [S, d], got {list(x.shape)}")
        per_token = torch.zeros(x.shape[0], dtype=x.dtype)
        eps: Any = self.eps.tolist() if hasattr(self.eps, "tolist") else self.eps
        several = isinstance(eps, Mapping) or (isinstance(eps, Sequence) and not isinstance(eps, str))
        if several and self.tokens is not None:
            raise RegionError("give one ε and the tokens that move, or a radius per token: not both")
        if isinstance(eps, Mapping):
            for token, value in eps.items():
                place = _token_index(token, len(x))
                if per_token[place] > 0:
                    raise RegionError(f"token {place} has two radii: give it one")
                per_token[place] = positive(value, "ε")
        elif several:
            if len(eps) != len(x):
                raise RegionError(f"{len(eps)} radii for {len(x)} tokens: give one per token")
            per_token[:] = torch.tensor([positive(e, "ε", zero=True) for e in eps], dtype=x.dtype)
        else:
            for token in range(len(x)) if self.tokens is None else listed(self.tokens):
                per_token[_token_index(token, len(x))] = positive(eps, "ε")
        if not bool((per_token > 0).any()):
            raise RegionError("no token moves: give at least one token with ε > 0")
        radius = per_token.to(x)[:, None].expand(x.shape).clone()
        return Region(x, radius=radius, label=str(self))

    def __str__(self) -> str:
        where = "" if self.tokens is None else f" on tokens {listed(self.tokens)}"
        eps: Any = self.eps.tolist() if hasattr(self.eps, "tolist") else self.eps
        if isinstance(eps, Mapping):
            eps = {token: float(value) for token, value in eps.items()}
        return f"ball ε={f'{eps:g}' if isinstance(eps, int | float) else eps}{where}"


@dataclass(frozen=True, eq=False)
class Paraphrases:
    """The hull of paraphrases of equal length ("Beyond ε-balls"): x̄ + Σ αᵢ(xᵢ − x̄), α ∈ [-1, 1]^n.

    With `convex`, the factors are also convex weights (αᵢ ≥ 0, Σαᵢ = 1): exactly the paraphrases' convex hull.
    """

    prompts: Sequence[Prompt | Tensor | str]
    convex: bool = False

    def of(self, model: Transformer) -> Paraphrases:
        """The same paraphrases with texts as prompts of a model."""
        made = [model.prompt(given) if isinstance(given, str) else given for given in _several(self.prompts)]
        return replace(self, prompts=made)

    def region(self) -> Region:
        """The region these paraphrases span."""
        points = [self._point(given) for given in _several(self.prompts)]
        if len(points) < 2:
            raise RegionError("a paraphrase hull needs at least two paraphrases")
        lengths = [len(p) for p in points]
        if len(set(lengths)) > 1:
            raise RegionError(f"paraphrases must have equal length in tokens, got {lengths}")
        if len({p.shape for p in points}) > 1:
            raise RegionError(f"paraphrases must have one width, got {sorted({p.shape[-1] for p in points})}")
        stack = torch.stack(points)
        center = stack.mean(0)
        constraints = None
        if self.convex:
            n = len(points)
            constraints = Constraints.of(
                n, torch.ones(1, n), torch.ones(1), A_ub=-torch.eye(n), b_ub=torch.zeros(n)
            )
        kind = "convex hull" if self.convex else "hull"
        return Region(
            center, generators=stack - center, constraints=constraints, label=f"{kind} of {len(points)} texts"
        )

    @staticmethod
    def _point(given: Prompt | Tensor | str) -> Tensor:
        if isinstance(given, str):
            raise RegionError(
                "a text is no point yet: give model.prompt(text), or Paraphrases([…]).of(model)"
            )
        return given.x if isinstance(given, Prompt) else numbers(given, "a paraphrase")


def listed(tokens: Sequence[Any] | Any) -> list[Any]:
    """Tokens as a list, also where a single one is given."""
    held = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return list(held) if isinstance(held, Iterable) and not isinstance(held, str) else [held]


def _several(prompts: Sequence[Prompt | Tensor | str]) -> list[Prompt | Tensor | str]:
    if isinstance(prompts, str | Prompt):
        raise RegionError("a paraphrase hull needs a list of at least two paraphrases")
    return list(prompts)


def _token_index(token: object, n_tokens: int) -> int:
    if (
        isinstance(token, bool)
        or not isinstance(token, SupportsIndex)
        or not -n_tokens <= int(token) < n_tokens
    ):
        raise RegionError(f"there is no token {token!r}: the input has tokens 0 … {n_tokens - 1}")
    return int(token) % n_tokens
