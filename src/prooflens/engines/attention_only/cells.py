"""A proof of a model's accuracy on a task by cells of inputs: which method knows which task."""

from __future__ import annotations

from prooflens.engines.attention_only.enumeration import Accuracy
from prooflens.engines.attention_only.one_layer import bound_largest
from prooflens.engines.attention_only.tables import check_model
from prooflens.engines.attention_only.two_layers import bound_induction
from prooflens.errors import QueryError
from prooflens.models import Transformer
from prooflens.models.tasks import TokenTask
from prooflens.numerics import check_arithmetic

METHODS = {("max", 1): bound_largest, ("induction", 2): bound_induction}
"""The methods by the kind of task and the number of layers."""


def bound_task(model: Transformer, task: TokenTask) -> Accuracy:
    """Prove on how many inputs, at least and at most, a model answers rightly.

    What is proved: over the real numbers, from the float64 embeddings on, the logit of the answer is above all others
    on at least `right` and at most `most` inputs.

    Args:
        model: an attention-only model with one head per layer.
        task: the largest token by one layer, or the token that followed by two.

    Raises:
        ModelError: if the model is not one whose function is known.
        QueryError: if there is no proof for such a task, or rounding leaves none.
    """
    check_model(model, task)
    check_arithmetic(model.device)
    method = METHODS.get((task.kind, task.layers))
    if method is None:
        raise QueryError(
            f"{task.name}: there is no proof for {task.kind} by {task.layers} layer(s): enumerate it"
        )
    return method(model, task)
