"""What is asked about: a model, and the set of inputs on which something is to hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.models import OUTPUT, Transformer, scores_name
from prooflens.models.knockouts import check_rows
from prooflens.queries import Setting
from prooflens.regions import Region


@dataclass(frozen=True, eq=False)
class Problem:
    """A model and an input region: what every engine is asked about.

    Claims about logits are about those before a cap, if the model has one (Gemma 2): their order is the same.

    Attributes:
        model: the model.
        region: the set of inputs.
        padding: True at real tokens; None if all are real.

    Raises:
        ModelError: if the region does not have the model's width and dtype.
        RegionError: if no point satisfies the region's constraints.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> problem.n_tokens
        4
    """

    model: Transformer
    region: Region
    padding: Bool[Tensor, " S"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model.uncapped)
        self.model.check_input(self.region.center)
        self.region.check()

    @property
    def n_tokens(self) -> int:
        """The number of tokens, S."""
        return self.region.center.shape[0]

    @property
    def mask(self) -> Bool[Tensor, "S S"]:
        """Which keys take part for each query, in layers without a window; shape [S, S]."""
        return self.model.mask(self.n_tokens, self.padding)

    def mask_of(self, layer: int) -> Bool[Tensor, "S S"]:
        """Return which keys take part for each query of a layer."""
        return self.model.mask(self.n_tokens, self.padding, layer)

    def values(
        self, x: Float[Tensor, "... S d"], layers: Iterable[int], output: bool
    ) -> tuple[dict[int, Float[Tensor, "... H S S"]], Float[Tensor, "... C"] | None]:
        """Return scores of some layers, and the output if asked for, at concrete points.

        Args:
            x: points, shape [..., S, d].
            layers: the layers whose scores are wanted.
            output: whether the output is wanted.
        """
        names = {layer: scores_name(self.model.check_layer(layer)) for layer in layers}
        wanted = [*names.values(), *([OUTPUT] if output else [])]
        found = self.model.run(x, wanted, self.padding)
        scores = {layer: found[name] for layer, name in names.items()}
        return scores, self.read_output(found[OUTPUT]) if output else None

    def read_output(self, output: Tensor) -> Float[Tensor, "... C"]:
        """Return the output or, in a model with one output per token, that of the last real token."""
        if self.model.architecture.pool != "none":
            return output
        last = self.n_tokens - 1 if self.padding is None else int(self.padding.nonzero().max())
        return output[..., last, :]

    def setting(
        self, layers: Sequence[int], output: bool = False, tokens: tuple[str, ...] | None = None
    ) -> Setting:
        """Return what queries are bound to: clean scores of some layers and the clean output.

        The clean input is the region's reference.

        Args:
            layers: the layers whose scores are needed.
            output: whether the output is needed.
            tokens: the texts of the tokens.
        """
        check_rows(self.model.weights, layers)
        with torch.no_grad():
            scores, logits = self.values(self.region.reference, layers, output)
        architecture = self.model.architecture
        windows = {layer: self.mask_of(layer) for layer in layers if architecture.is_local(layer)}
        return Setting(
            scores, self.mask, architecture.n_layers, architecture.n_heads, tokens, logits, windows
        )
