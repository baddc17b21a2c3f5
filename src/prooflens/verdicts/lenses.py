"""Logit lenses: the model cut behind a block, and what may be asked of its outputs."""

from __future__ import annotations

from collections.abc import Sequence

from prooflens.errors import QueryError
from prooflens.models import Transformer
from prooflens.queries import OutputLevel, Query


def lens_of(model: Transformer, layer: int) -> Transformer:
    """Return the model whose final norm and head read the stream behind a block.

    Args:
        model: the model.
        layer: the block, from 0.

    Raises:
        ModelError: if there is no such block, or the model predicts nothing.
    """
    cut = model.cut(model.check_layer(layer) + 1)
    _ = cut.head  # a model that predicts nothing has no outputs to ask about: its error says so
    return cut


def check_cap(model: Transformer, queries: Sequence[Query]) -> None:
    """Refuse sizes of outputs of a model that caps them.

    Args:
        model: the model.
        queries: what is asked.
    """
    if model.architecture.logit_cap and any(isinstance(query, OutputLevel) for query in queries):
        raise QueryError(
            "logits of this model go through a cap, and claims are about those before it: compare two"
        )
