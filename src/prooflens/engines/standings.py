"""Bounds of standings: is an output above 0 and among the k largest of a group?

A standing is min(y, k-th smallest of y − y_j) over its rivals j. Order statistics are monotone: where every difference
lies in [l_j, u_j], their k-th smallest lies between the k-th smallest l_j and the k-th smallest u_j. So any engine's
bounds of the linear forms y and y − y_j bound a standing, whichever rivals change places inside the region.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prooflens.engines.bounds import Bounds
from prooflens.numerics import down, up
from prooflens.queries import Functional
from prooflens.queries.functionals import Logit


def unfolded(functionals: Sequence[Functional]) -> tuple[list[Functional], list[list[int]]]:
    """Return functionals without standings that bound all of them, and which of those each is made of.

    Args:
        functionals: any functionals. One that is no standing is made of itself alone; a standing of y, and then of its
            differences to every rival. What several have in common is listed once.
    """
    plain: dict[tuple[object, ...], int] = {}
    listed, parts = list[Functional](), list[list[int]]()
    for functional in functionals:
        needed = [functional] if functional.standing is None else _differences(functional)
        places = []
        for one in needed:
            key = (one.terms, one.constant)
            if key not in plain:
                plain[key] = len(listed)
                listed.append(one)
            places.append(plain[key])
        parts.append(places)
    return listed, parts


def _differences(functional: Functional) -> list[Functional]:
    assert functional.standing is not None
    _, atom = functional.standing
    own = (1.0, Logit(atom.index))
    rivals = [] if atom.k > len(atom.rivals) else atom.rivals
    return [
        Functional((own,), name=functional.name),
        *(Functional((own, (-1.0, Logit(rival))), name=functional.name) for rival in rivals),
    ]


def folded(functionals: Sequence[Functional], parts: Sequence[Sequence[int]], found: Bounds) -> Bounds:
    """Return bounds of functionals from those of what they are made of.

    Args:
        functionals: what is to be bounded.
        parts: what each is made of (`unfolded`).
        found: the bounds of those.
    """
    lower, upper = (torch.empty(len(functionals), dtype=torch.float64) for _ in range(2))
    for i, (functional, places) in enumerate(zip(functionals, parts, strict=True)):
        low, high = found.lower[list(places)].cpu(), found.upper[list(places)].cpu()
        if functional.standing is None:
            lower[i], upper[i] = low[0], high[0]
            continue
        weight, atom = functional.standing
        ends = [side[0] if len(side) == 1 else torch.minimum(side[0], side[1:].kthvalue(atom.k).values)
                for side in (low, high)]  # fmt: skip
        ends = ends if weight > 0.0 else ends[::-1]
        constant = torch.tensor(functional.constant, dtype=torch.float64)
        lower[i] = down(down(weight * ends[0]) + constant)
        upper[i] = up(up(weight * ends[1]) + constant)
    return Bounds(lower, upper, found.guarantee, found.engine, found.seconds, tail=found.tail)
