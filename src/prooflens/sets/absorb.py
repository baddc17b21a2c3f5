"""Independent generators into dependent ones and back."""

import torch
from torch import Tensor

from prooflens.sets.arrays import diagonal_matrix, join, sum_up, take, zeros
from prooflens.sets.constrained import ConstrainedPolynomialZonotope, fresh_ids, replaced


def absorb(z: ConstrainedPolynomialZonotope) -> ConstrainedPolynomialZonotope:
    """Every column of GI becomes a dependent generator with a fresh factor (the paper's G_I absorption). Exact.

    Before a product this turns the conservative cross bounds |G_I||G| into monomials that can cancel.
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
    """Move generators back to GI whose factor acts there alone, linearly, and in no constraint.

    Exact for the set by itself; what other sets shared of those factors is forgotten, which only enlarges a later
    combination with them.
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

    Contains z: GI β lies in the box with radii Σ_j |GI_kj|. At most n new factors, however many columns GI had.
    """
    if z.independent <= z.dim:
        return absorb(z)
    return absorb(replaced(z, GI=diagonal_matrix(sum_up(abs(z.GI), 1))))


def lonely_factors(z: ConstrainedPolynomialZonotope) -> Tensor:
    """Which factors occur in exactly one generator, with exponent 1, in it alone, and in no constraint."""
    single_use = ((z.E > 0).sum(dim=1) == 1) & (z.E.sum(dim=1) == 1) & (z.R == 0).all(dim=1)
    linear_column = z.E.sum(dim=0) == 1
    in_linear = ((z.E > 0) & linear_column[None, :]).any(dim=1)
    return single_use & in_linear
