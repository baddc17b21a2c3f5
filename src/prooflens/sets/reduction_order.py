"""The choice of the generators that an order reduction drops."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import SetError
from prooflens.sets.arrays import as_float


def smallest_columns(
    G: Float[Tensor, "n h"], dim: int, order: float
) -> tuple[Int[Tensor, " dropped"], Int[Tensor, " kept"]]:
    """Choose the columns to box and those to keep, so that kept + n ≤ order·n (Girard).

    Columns with small ‖g‖₁ − ‖g‖_∞ are nearly parallel to an axis, and lose least in a box. Nothing is dropped if the
    order is met already. Ties go by position, so a larger order keeps a superset.

    Args:
        G: generators as columns, shape [n, h].
        dim: n.
        order: generators per dimension, at least 1.

    Returns:
        The indices of the dropped columns and of the kept ones.
    """
    if order < 1:
        raise SetError(f"an order below 1 cannot be reached by a full-dimensional box; got {order}")
    h = int(G.shape[1])
    if h <= order * dim:
        return torch.zeros(0, dtype=torch.int64), torch.arange(h)
    size = as_float(G).abs()
    metric = size.sum(dim=0) - size.amax(dim=0)
    ranking = torch.argsort(metric, descending=True, stable=True).cpu()
    keep = max(math.floor(order * dim) - dim, 0)
    return ranking[keep:].sort().values, ranking[:keep].sort().values
