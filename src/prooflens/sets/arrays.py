"""Arrays the exact operations run on: float64 torch tensors, or numpy object arrays of `fractions.Fraction`.

Both know + − * @ and indexing, which is all the exact algebra uses; the few constructors that differ are here. The
rational arrays exist so that tests can compare whole operations without a tolerance. Annotations say `Tensor`.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prooflens.errors import SetError
from prooflens.numerics import gamma, up


def is_rational(x: Any) -> bool:
    """Say whether x is a numpy object array (of Fractions) rather than a torch tensor."""
    return isinstance(x, np.ndarray) and x.dtype == object


def parse(value: Any, name: str) -> Tensor:
    """Return a float64 tensor, or an object array as it is.

    Args:
        value: numbers, nested lists of numbers, a tensor, or an object array of Fractions.
        name: how an error message names it.

    Raises:
        SetError: if it is not numeric, or holds NaN or infinite entries.
    """
    if is_rational(value):
        return value  # type: ignore[no-any-return]
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SetError(f"{name} is not a numeric array: {error}") from error
    if not bool(tensor.isfinite().all()):
        raise SetError(f"{name} contains NaN or infinite entries")
    return tensor


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros of the kind and device of `like`."""
    if is_rational(like):
        filled: Any = np.full(shape, Fraction(0), dtype=object)
        return filled  # type: ignore[no-any-return]
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def take(G: Tensor, columns: Tensor) -> Tensor:
    """Return the columns with these indices; numpy would read a tensor of one index as a scalar."""
    return G[:, columns.tolist()] if is_rational(G) else G[:, columns]


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate along `dim`."""
    if any(is_rational(part) for part in parts):
        joined: Any = np.concatenate([np.asarray(part, dtype=object) for part in parts], axis=dim)
        return joined  # type: ignore[no-any-return]
    return torch.cat(list(parts), dim=dim)


def diagonal_matrix(entries: Tensor) -> Tensor:
    """Return the square matrix with these entries on its diagonal."""
    if is_rational(entries):
        matrix = zeros((len(entries), len(entries)), entries)
        for i, entry in enumerate(entries):
            matrix[i, i] = entry
        return matrix
    return torch.diag(entries)


def sum_up(terms: Tensor, dim: int = -1) -> Tensor:
    """Return an upper bound of the real sum of the terms along `dim`; for rationals the sum itself.

    Any order of summation errs by at most γ_{n−1} Σ|x|. The computed Σ|x| is itself rounded, so γ_{2n+2} of it is
    used.
    """
    if is_rational(terms):
        return terms.sum(dim)
    size = terms.abs().sum(dim)
    total = terms.sum(dim)
    # A sum of zeros is exact. Additions do not underflow, and the step up covers the underflow of γΣ|x|.
    return torch.where(size > 0, up(total + gamma(2 * terms.shape[dim] + 2) * size), total)


def sum_down(terms: Tensor, dim: int = -1) -> Tensor:
    """Return a lower bound of the real sum of the terms along `dim`."""
    return -sum_up(-terms, dim)


def sum_with_error(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded row sums, and a bound of their error that is 0 if no addition was inexact.

    Pairs are added with Knuth's two-sum, whose error term is exact, so dyadic data come out without slack.

    Example:
        >>> total, error = sum_with_error(torch.tensor([[0.5, 0.25, 1.0]], dtype=torch.float64))
        >>> total.tolist(), error.tolist()
        ([1.75], [0.0])
    """
    if is_rational(columns) or columns.shape[1] == 0:
        return columns.sum(1), zeros((int(columns.shape[0]),), columns)
    total, errors = columns, [columns[:, :0]]
    while total.shape[1] > 1:
        if total.shape[1] % 2:
            total = torch.cat([total, torch.zeros_like(total[:, :1])], dim=1)
        a, b = total[:, ::2], total[:, 1::2]
        total = a + b
        t = total - a
        errors.append(((a - (total - t)) + (b - t)).abs())
    error = torch.cat(errors, dim=1)
    return total[:, 0], torch.where((error > 0).any(dim=1), sum_up(error), 0.0)


def outward(x: Tensor) -> Tensor:
    """Return the next float above a correctly rounded result: at least the real one; rationals are exact already."""
    return x if is_rational(x) else up(x)


def halved(x: Tensor) -> Tensor:
    """Return x/2 in the kind of x."""
    return x / 2


def as_float(x: Tensor) -> Tensor:
    """Return a float64 tensor of the same entries; rationals are rounded to nearest."""
    return torch.tensor(np.asarray(x, dtype=np.float64)) if is_rational(x) else x
