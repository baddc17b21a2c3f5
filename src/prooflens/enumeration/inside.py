"""Claims of families about outputs that are read elsewhere: attributions of parts, and the logit lens.

Both are margins of outputs, like those of the whole model, of another vector than the one behind the last block. A lens
reads the stream behind its block through the final norm. An attribution reads what its part adds to that vector; every
member has its own norm, so a sign can be asked for and no size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.models import OUTPUT, Transformer
from prooflens.models.attribution import contribution
from prooflens.models.edits import find_place
from prooflens.models.reads import stream_name
from prooflens.queries import Argmax, AttributionQuery, Beats, Lens, Query, Sense


@dataclass(frozen=True)
class Elsewhere:
    """A vector that the head reads in place of the one behind the last block.

    Attributes:
        hook: the value that it is made of, at the last token.
        position: the last token.
        part: the part whose direct contribution it is; None for the logit lens.
        sign: 1, or −1 where the opposite is claimed.
        sense: what is wanted of the margin.
    """

    hook: str
    position: int
    part: str | None
    sign: float = 1.0
    sense: Sense = Sense.POSITIVE

    @classmethod
    def of(cls, query: AttributionQuery | Lens, model: Transformer, n_tokens: int) -> Elsewhere:
        """Return what a query reads.

        Args:
            query: an attribution or a lens.
            model: the model.
            n_tokens: the length of the prompts.

        Raises:
            ProoflensError: if the model has no such part or block, or no head that reads the last token.
        """
        if isinstance(query, Lens):
            layer = model.check_layer(query.layer)
            behind = model.headless.architecture
            cut = any(name.startswith("final_norm.edges.") for name in model.weights)
            if behind.pool != "last" or behind.norm_place == "post" or cut:
                raise QueryError(
                    f"a lens over a family reads the last token of the stream, and {model.name} is not read so: "
                    f"give model.cut({layer + 1}) and '{query.query}'"
                )
            return cls(f"blocks.{layer}.hook_resid_post", n_tokens - 1, None)
        part, comparison = str(query.place), str(query.comparison)
        sense = Sense.NONNEGATIVE if comparison.endswith("=") else Sense.POSITIVE
        hook = find_place(model.architecture, part).hook
        return cls(hook, n_tokens - 1, part, 1.0 if comparison.startswith(">") else -1.0, sense)

    def vector(self, model: Transformer, h: Float[Tensor, "B n"]) -> Float[Tensor, "B d"]:
        """Return what the head reads, from values of the hook.

        Args:
            model: the model.
            h: the values, shape [B, n].
        """
        if self.part is not None:
            return contribution(model, self.part, h)
        steps = model.headless.program(1).steps
        values = {stream_name({step.out for step in steps}, model.architecture.n_layers): h[:, None]}
        for step in steps:  # those behind the last block: what they read is known
            if all(name in values for name in step.inputs):
                values[step.out] = step(*(values[name] for name in step.inputs))
        return values[OUTPUT]

    def bias(self, bias: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
        """Return what the head adds: its bias, which is no part's.

        Args:
            bias: the head's.
        """
        return bias if self.part is None else torch.zeros_like(bias)


def check_elsewhere(query: Query) -> None:
    """Raise a `QueryError` unless a lens or an attribution says of every prompt by itself whether it holds.

    Args:
        query: any query; others pass.
    """
    if isinstance(query, Lens) and not isinstance(query.query, Argmax | Beats):
        raise QueryError(
            f"{query}: a lens over a family compares outputs; write 'lens 12 argmax={{A}}' or 'lens 12 logit3>logit5'"
        )
    if isinstance(query, Lens) and isinstance(query.query, Argmax) and query.query.answer is None:
        raise QueryError(f"{query} compares with a clean prompt, and a family has none: write 'argmax={{A}}'")
    if isinstance(query, AttributionQuery) and (query.comparison is None or query.threshold != 0.0):
        raise QueryError(
            f"{query}: every member of a family has its own last norm, so only signs are asked for: compare with 0"
        )
