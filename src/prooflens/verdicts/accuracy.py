"""Accuracy of small attention-only models over all inputs of a task."""

from __future__ import annotations

from prooflens.engines.attention_only import Accuracy, bound_task, enumerate_task
from prooflens.errors import QueryError
from prooflens.models import Transformer, load
from prooflens.models.tasks import TASKS, TokenTask


def accuracy(model: Transformer | str, task: TokenTask | str, proof: bool = False) -> Accuracy:
    """Return on how many of all inputs of a task a model answers rightly.

    Args:
        model: an attention-only model (`prooflens train max-of-4`), or what `load` takes.
        task: the name of a task, `max-of-4` or `induction-2l`, or a task of other sizes.
        proof: prove it by cells of inputs, over the real numbers, in place of running every input in float64.

    Returns:
        The count, `enumerated` or `proved`.

    Raises:
        ModelError: if the model is not one whose function is known.
        QueryError: if there is no such task, or no proof for it.

    Example:
        >>> import prooflens as pl
        >>> pl.accuracy("max-of-4", "max-of-4", proof=True).right  # doctest: +SKIP
    """
    if isinstance(task, str):
        if task not in TASKS:
            raise QueryError(f"there is no task {task!r}: those are {', '.join(TASKS)}")
        task = TASKS[task]
    held = load(model) if isinstance(model, str) else model
    return bound_task(held, task) if proof else enumerate_task(held, task)
