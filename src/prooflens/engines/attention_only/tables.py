"""Everything that a layer of an attention-only model knows of single tokens, as tables with their rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models import Transformer
from prooflens.models.held import edit_tables
from prooflens.models.knockouts import check_rows
from prooflens.models.tasks import TokenTask
from prooflens.numerics import gamma


def check_model(model: Transformer, task: TokenTask) -> None:
    """Raise an error, in one line, if a model is not one whose function is known here.

    Args:
        model: the model.
        task: what it is asked.
    """
    architecture = model.architecture
    if architecture.norm_place != "none" or architecture.has_network or architecture.n_heads != 1:
        raise ModelError(
            f"{model.name}: only attention-only models with one head per layer and no norms are known"
        )
    if not architecture.causal or architecture.is_rotary or architecture.score_cap or architecture.logit_cap:
        raise ModelError(
            f"{model.name}: only causal models with learned positions and without caps are known"
        )
    check_rows(model.weights, range(architecture.n_layers))
    if edit_tables(model.weights):
        raise ModelError(f"parts of {model.name} are held, or patterns frozen: ask about the model itself")
    if architecture.n_layers != task.layers or architecture.d_vocab != task.vocabulary:
        raise ModelError(f"{model.name} is no model of {task.name}: it has another depth or vocabulary")
    if architecture.pool != "last" or architecture.d_out != task.vocabulary:
        raise ModelError(f"{model.name} does not answer with a token at its last position")
    if model.dtype != torch.float64:
        raise ModelError(f"{model.name} is in {model.dtype}: load it as it is, in float64")


@dataclass(frozen=True, eq=False)
class Chain:
    """Products of weights as they are, or with everything in absolute values: rounding is relative to the latter.

    Attributes:
        weights: the weights of a model.
        absolute: whether absolute values are taken.
    """

    weights: Mapping[str, Tensor]
    absolute: bool

    def part(self, tensor: Tensor) -> Tensor:
        """Return a factor of the chain.

        Args:
            tensor: the factor.
        """
        return tensor.abs() if self.absolute else tensor

    def less(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x − y, in absolute values the sum.

        Args:
            x: a part of the chain.
            y: another.
        """
        return x + y if self.absolute else x - y

    def weight(self, name: str) -> Tensor:
        """Return a weight.

        Args:
            name: its name.
        """
        return self.part(self.weights[name])

    def add_bias(self, x: Tensor, name: str) -> Tensor:
        """Add a bias, if there is one.

        Args:
            x: a part of the chain.
            name: the name of what it is the bias of.
        """
        bias = self.weights.get(f"{name}.bias")
        return x if bias is None else x + self.part(bias)

    def project(self, name: str, x: Float[Tensor, "... d"]) -> Float[Tensor, "... c"]:
        """Return a projection of x.

        Args:
            name: its name, as in `blocks.0.q`.
            x: a part of the chain.
        """
        return self.add_bias(x @ self.weight(f"{name}.weight").T, name)


def embedded(model: Transformer, length: int) -> Float[Tensor, "n V d"]:
    """Return every token at every position; tables start from these float64 numbers.

    Args:
        model: a model that `check_model` accepts.
        length: n.
    """
    tokens = torch.arange(len(model.weights["embed.tokens"]))
    return model.embed(tokens[:, None].expand(-1, length)).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class OneLayer:
    """The tables of a one-layer model, V tokens and n positions.

    Attributes:
        scores: a[t_n, j, t]: what the last token gives to token t at position j.
        score_error: how far they are from the real ones.
        written: L[j, t, c]: what token t at position j writes to logit c through the head.
        written_error: how far that is from the real ones.
        direct: D[t_n, c]: what the last token writes itself, with biases.
        direct_error: how far that is.
    """

    scores: Float[Tensor, "V n V"]
    score_error: Float[Tensor, "V n V"]
    written: Float[Tensor, "n V C"]
    written_error: Float[Tensor, "n V C"]
    direct: Float[Tensor, "V C"]
    direct_error: Float[Tensor, "V C"]

    @classmethod
    def of(cls, model: Transformer, length: int) -> OneLayer:
        """Make the tables; each error is γ times the same product in absolute values.

        Args:
            model: a model that `check_model` accepts, with one layer.
            length: n.
        """
        x = embedded(model, length)
        scale = model.architecture.scale(0)
        unembedding, head_bias = model.head
        rounded = gamma(4 * x.shape[-1] + 64)

        def chain(absolute: bool) -> tuple[Tensor, Tensor, Tensor]:
            made = Chain(model.weights, absolute)
            inner = made.part(x)
            q, k, v = (made.project(f"blocks.0.{name}", inner) for name in "qkv")
            scores = torch.einsum("vc,jtc->vjt", q[-1], k) * scale
            through = made.part(unembedding).T
            written = v @ made.weight("blocks.0.o.weight").T @ through
            stream = made.add_bias(inner[-1], "blocks.0.o")
            return scores, written, stream @ through + made.part(head_bias)

        values, sizes = chain(False), chain(True)
        errors = [rounded * size + 2.0**-900 for size in sizes]
        return cls(values[0], errors[0], values[1], errors[1], values[2], errors[2])
