"""Which keys a query position may read: a bool tensor [S_query, S_key], True where the key takes part.

A masked key has weight exactly 0: it is no challenger, carries no mass and adds nothing to an entropy.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from prooflens.errors import QueryError


def full_mask(size: int) -> Bool[Tensor, "S S"]:
    """Return the mask in which every query reads every key.

    Args:
        size: S, the number of tokens.
    """
    return torch.ones(size, size, dtype=torch.bool)


def causal_mask(size: int) -> Bool[Tensor, "S S"]:
    """Return the mask in which position i reads the keys 0 … i.

    Args:
        size: S, the number of tokens.

    Example:
        >>> causal_mask(2).tolist()
        [[True, False], [True, True]]
    """
    return full_mask(size).tril()


def padding_mask(real: Bool[Tensor, " S"]) -> Bool[Tensor, "S S"]:
    """Return the mask in which only real tokens read and are read; the row of a padding token is empty.

    Args:
        real: True at real tokens, shape [S].

    Example:
        >>> padding_mask(torch.tensor([True, False])).tolist()
        [[True, False], [False, False]]
    """
    return real[:, None] & real[None, :]


def keys_of(mask: Bool[Tensor, "S_query S_key"], position: int) -> tuple[int, ...]:
    """Return the keys that take part in the row of a query position.

    Args:
        mask: True where a key takes part, shape [S_query, S_key].
        position: the query position.

    Raises:
        QueryError: if the position is outside the mask.

    Example:
        >>> keys_of(causal_mask(3), 1)
        (0, 1)
    """
    if not 0 <= position < mask.shape[0]:
        raise QueryError(f"position {position} is outside the {mask.shape[0]} positions of the mask")
    return tuple(int(key) for key in mask[position].nonzero().flatten())
