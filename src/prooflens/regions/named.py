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
from prooflens.regions.starts import starts_of

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer


@dataclass(frozen=True)
class Ball:
    """An ℓ∞ ball around a prompt: every coordinate of the tokens that move may change by at most ε.

    Attributes:
        eps: one ε for all tokens that move, a dictionary from token to ε, or one radius per token (0: does not move).
        tokens: the tokens that move, if there is one ε; None for all. A token is an index; `certify`, `circuit`,
            `output` and `radius` also take its text.

    Example:
        >>> import torch
        >>> x = torch.zeros(2, 3, dtype=torch.float64)
        >>> Ball(0.1, tokens=[1]).around(x).half_widths().tolist()
        [[0.0, 0.0, 0.0], [0.1, 0.1, 0.1]]
    """

    eps: float | Mapping[int, float] | Mapping[str, float] | Sequence[float]
    tokens: Sequence[int | str] | int | str | None = None

    def around(self, prompt: Prompt | Tensor) -> Region:
        """Return the region of this ball around an input.

        Args:
            prompt: the centre: a prompt, or an input of shape [S, d].

        Raises:
            RegionError: if a token does not exist, an ε is not a positive number, or no token moves.
        """
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
        return Region(x, radius=radius, label=str(self), starts=starts_of([prompt], [None]))

    def __str__(self) -> str:
        where = "" if self.tokens is None else f" on tokens {listed(self.tokens)}"
        eps: Any = self.eps.tolist() if hasattr(self.eps, "tolist") else self.eps
        if isinstance(eps, Mapping):
            eps = {token: float(value) for token, value in eps.items()}
        return f"ball ε={f'{eps:g}' if isinstance(eps, int | float) else eps}{where}"


@dataclass(frozen=True, eq=False)
class Paraphrases:
    """A hull of paraphrases of equal length: x̄ + Σ αᵢ(xᵢ − x̄) with α ∈ [-1, 1]^n, where x̄ is the mean of the xᵢ.

    Attributes:
        prompts: at least two paraphrases: prompts, inputs [S, d], or texts, all with the same number of tokens.
        convex: also ask αᵢ ≥ 0 and Σαᵢ = 1; then the region is exactly the convex hull of the paraphrases.

    Example:
        >>> import torch
        >>> first, second, between, beyond = torch.tensor([0.0, 4.0, 1.0, 5.0]).double().reshape(4, 1, 1)
        >>> region = Paraphrases([first, second], convex=True).region()
        >>> region.center.tolist()
        [[2.0]]
        >>> region.contains(between), region.contains(beyond)
        (True, False)
    """

    prompts: Sequence[Prompt | Tensor | str]
    convex: bool = False

    def of(self, model: Transformer) -> Paraphrases:
        """Return the same paraphrases with every text tokenised and embedded by a model.

        Args:
            model: the model that reads the texts.
        """
        made = [model.prompt(given) if isinstance(given, str) else given for given in _several(self.prompts)]
        return replace(self, prompts=made)

    def region(self) -> Region:
        """Return the region that these paraphrases span.

        Raises:
            RegionError: if there are fewer than two, if they differ in length or width, or if one is still a text.
        """
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
            center,
            generators=stack - center,
            constraints=constraints,
            label=f"{kind} of {len(points)} texts",
            starts=starts_of(self.prompts, list(torch.eye(len(points), dtype=torch.float64))),
        )

    @staticmethod
    def _point(given: Prompt | Tensor | str) -> Tensor:
        if isinstance(given, str):
            raise RegionError(
                "a text is no point yet: give model.prompt(text), or Paraphrases([…]).of(model)"
            )
        return given.x if isinstance(given, Prompt) else numbers(given, "a paraphrase")


def listed(tokens: Sequence[Any] | Any) -> list[Any]:
    """Return what was given as a list; a single token, or a text, becomes a list of one.

    Args:
        tokens: a token, a sequence of tokens, or a tensor.

    Example:
        >>> listed("cat"), listed([0, 2])
        (['cat'], [0, 2])
    """
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
