"""Turn independent generators into dependent ones, and back."""

import torch
from torch import Tensor

from prooflens.sets.arrays import diagonal_matrix, join, sum_up, take, zeros
from prooflens.sets.constrained import ConstrainedPolynomialZonotope, fresh_ids, replaced


def absorb(z: ConstrainedPolynomialZonotope) -> ConstrainedPolynomialZonotope:
    """Turn every column of GI into a dependent generator with a fresh factor (the paper's G_I absorption). Exact.

    Before a product this turns the conservative cross bounds |G_I||G| into monomials that can cancel.

    Args:
        z: the set.

    Example:
        >>> absorb(ConstrainedPolynomialZonotope([0.0], GI=[[2.0]]))
        ConstrainedPolynomialZonotope(dim=1, factors=1, dependent=1, independent=0, constraints=0)
    """
    m = z.independent
    if m == 0:
        return z
    p, h = z.E.shape
    E = torch.zeros((p + m, h + m), dtype=torch.int64)
    E[:p, :h] = z.E
    E[p:, h:] = torch.eye(m, dtype=torch.int64)
    R = torch.cat([z.R, torch.zeros((m, z.R.shape[1]), dtype=torch.int64)])
    return replaced(z, G=join([z.G, z.GI], 1), E=E, GI=zeros((z.dim, 0), z.c), R=R, ids=z.ids + fresh_ids(m))


def release(z: ConstrainedPolynomialZonotope) -> ConstrainedPolynomialZonotope:
    """Move those generators back to GI whose factor acts in them alone, linearly, and in no constraint.

    Exact for the set by itself. Other sets no longer share those factors, which only enlarges a later combination
    with them.

    Args:
        z: the set.

    Example:
        >>> release(ConstrainedPolynomialZonotope([0.0], [[2.0]]))
        ConstrainedPolynomialZonotope(dim=1, factors=0, dependent=0, independent=1, constraints=0)
    """
    alone = lonely_factors(z)
    used = (z.E[alone] == 1).any(dim=0)
    free, kept = torch.nonzero(used).flatten(), torch.nonzero(~used).flatten()
    rows = torch.nonzero(~alone).flatten()
    return replaced(
        z,
        G=take(z.G, kept),
        E=z.E[rows][:, kept],
        GI=join([z.GI, take(z.G, free)], 1),
        R=z.R[rows],
        ids=tuple(z.ids[k] for k in rows.tolist()),
    )


def restructure(z: ConstrainedPolynomialZonotope) -> ConstrainedPolynomialZonotope:
    """Box the independent generators and give each coordinate one fresh dependent factor (CORA's `restructure`).

    The result contains z: GI β lies in the box with radii Σ_j |GI_kj|. There are at most n new factors, however many
    columns GI had.

    Args:
        z: the set.

    Example:
        >>> restructure(ConstrainedPolynomialZonotope([0.0], GI=[[2.0, 1.0, 0.5]]))
        ConstrainedPolynomialZonotope(dim=1, factors=1, dependent=1, independent=0, constraints=0)
    """
    if z.independent <= z.dim:
        return absorb(z)
    return absorb(replaced(z, GI=diagonal_matrix(sum_up(abs(z.GI), 1))))


def lonely_factors(z: ConstrainedPolynomialZonotope) -> Tensor:
    """Return which factors occur in one generator only, alone in it, with exponent 1, and in no constraint."""
    single_use = ((z.E > 0).sum(dim=1) == 1) & (z.E.sum(dim=1) == 1) & (z.R == 0).all(dim=1)
    linear_column = z.E.sum(dim=0) == 1
    in_linear = ((z.E > 0) & linear_column[None, :]).any(dim=1)
    return single_use & in_linear
