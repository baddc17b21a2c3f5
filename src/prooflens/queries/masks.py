"""Which keys a query position may read: a bool tensor [S_query, S_key], True where the key takes part.

A masked key has weight exactly 0: it is no challenger, carries no mass and adds nothing to an entropy.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from prooflens.errors import QueryError


def full_mask(size: int) -> Bool[Tensor, "S S"]:
    """Every key takes part."""
    return torch.ones(size, size, dtype=torch.bool)


def causal_mask(size: int) -> Bool[Tensor, "S S"]:
    """Position i reads the keys 0 … i."""
    return full_mask(size).tril()


def padding_mask(real: Bool[Tensor, " S"]) -> Bool[Tensor, "S S"]:
    """Only real tokens are read, and only real tokens read: the row of a padding token is empty."""
    return real[:, None] & real[None, :]


def keys_of(mask: Bool[Tensor, "S_query S_key"], position: int) -> tuple[int, ...]:
    """The keys that take part in the row of a query position."""
    if not 0 <= position < mask.shape[0]:
        raise QueryError(f"position {position} is outside the {mask.shape[0]} positions of the mask")
    return tuple(int(key) for key in mask[position].nonzero().flatten())
