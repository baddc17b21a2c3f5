"""The canonical form of a set: equal exponents merged, zeros dropped, constants in the centre."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.sets.arrays import is_rational, take, zeros
from prooflens.sets.constrained import ConstrainedPolynomialZonotope, replaced


def compact(z: ConstrainedPolynomialZonotope) -> ConstrainedPolynomialZonotope:
    """Return the same set with one generator per monomial, in order of first appearance. Exact.

    Constant monomials move into c, zero columns of G and GI go, and constraint columns are merged in the same way.
    Factors stay, used or not, so that ids keep their meaning across sets.

    Args:
        z: the set.

    Example:
        >>> z = compact(ConstrainedPolynomialZonotope([1.0], [[2.0, 3.0, 4.0]], [[1, 1, 0]]))
        >>> z.c.tolist(), z.G.tolist()  # 1 + 2α + 3α + 4
        ([5.0], [[5.0]])
    """
    G, E = merge_columns(z.G, z.E)
    constant = (E == 0).all(dim=0)
    where = torch.nonzero(constant).flatten()
    c = z.c + take(G, where).sum(1) if len(where) else z.c
    G, E = _select(G, E, ~constant & _nonzero(G))
    A, R = merge_columns(z.A, z.R)
    fixed = torch.nonzero((R == 0).all(dim=0)).flatten()
    b = z.b - take(A, fixed).sum(1) if len(fixed) else z.b
    A, R = _select(A, R, ~(R == 0).all(dim=0) & _nonzero(A))
    GI = take(z.GI, torch.nonzero(_nonzero(z.GI)).flatten())
    return replaced(z, c=c, G=G, E=E, GI=GI, A=A, b=b, R=R)


def merge_columns(
    G: Float[Tensor, "n h"], E: Int[Tensor, "p h"]
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "p k"]]:
    """Add up the columns of G whose columns of E agree, in order of first appearance.

    Args:
        G: coefficients, shape [n, h].
        E: exponents, shape [p, h].
    """
    h = E.shape[1]
    if h == 0:
        return G, E
    first, group = _groups(E)
    if len(first) == h:
        return G, E
    if is_rational(G):
        merged = zeros((G.shape[0], len(first)), G)
        for column, target in enumerate(group.tolist()):
            merged[:, target] = merged[:, target] + G[:, column]
    else:
        merged = zeros((G.shape[0], len(first)), G).index_add(1, group.to(G.device), G)
    return merged, E[:, first]


def _groups(E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first column of every group of equal columns, and the group of each column.

    Columns are told apart by a random 64-bit hash, then compared entry by entry with the first of their group; in the
    improbable case of a collision the columns themselves are sorted.
    """
    weights = torch.randint(-(2**62), 2**62, (E.shape[0],), generator=torch.Generator().manual_seed(1))
    keys = (weights @ E).numpy()
    _, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
    if not torch.equal(E[:, torch.from_numpy(index[inverse])], E):
        _, index, inverse = np.unique(E.numpy(), axis=1, return_index=True, return_inverse=True)
    order = np.argsort(index)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return torch.from_numpy(index[order]), torch.from_numpy(rank[inverse.reshape(-1)])


def _nonzero(G: Tensor) -> Tensor:
    if G.shape[1] == 0:
        return torch.zeros(0, dtype=torch.bool)
    return (
        torch.as_tensor(np.asarray((G != 0).any(0), dtype=bool)) if is_rational(G) else (G != 0).any(0).cpu()
    )


def _select(G: Tensor, E: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    where = torch.nonzero(keep).flatten()
    return take(G, where), E[:, where]
