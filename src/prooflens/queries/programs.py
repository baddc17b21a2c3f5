"""Bounds of functionals over weight boxes: the simplex programs of the queries, in the functionals' own units.

Within a row the weights of `Score` and `LogSumExp` terms add up to 0, so the row's normaliser cancels and the terms
are Σ w log(mass of a group). A group's least mass and another's greatest are reached by one greedy pattern (fill the
second group first and the first group last), so for the difference of two disjoint groups the sum of the separate
bounds is the optimum: log(min Σ_A s) − log(max Σ_B s) > 0 iff min Σ_A s − Σ_B s > 0, the tests of `prop:cert_attn`,
`cor:topk_ranking`, `prop:evidence_mass` and `prop:head_spec`. Across rows the programs are independent (the paper's
remark on circuits), which is sound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.numerics.rounding import TINY, down, gamma, up
from prooflens.queries.entropy import entropy_range
from prooflens.queries.functionals import Functional, Logit, LogSumExp, RowEntropy, Score
from prooflens.queries.outward import log_down, log_up
from prooflens.queries.rows import Row
from prooflens.queries.simplex import Box, maximum_mass, minimum_mass

Boxes = Mapping[Row, Box]
"""Weight boxes of rows, all of one shape."""

Group = tuple[Row, tuple[int, ...]]
Bounds = tuple[Float[Tensor, "... F"], Float[Tensor, "... F"]]


@dataclass
class _Terms:
    """The terms of many functionals as columns: which functional, its weight, and which group or entropy."""

    owner: list[int] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    column: list[int] = field(default_factory=list)

    def add(self, owner: int, weight: float, column: int) -> None:
        self.owner.append(owner)
        self.weight.append(weight)
        self.column.append(column)


def functional_bounds(functionals: Sequence[Functional], boxes: Boxes) -> Bounds:
    """Proved bounds of functionals for all patterns in Δ_S ∩ [s̲, s̄]; −∞ or ∞ where a mass may vanish.

    All rows and functionals at once: one program per distinct group of keys, one entropy range per row.
    """
    groups: dict[Group, int] = {}
    rows: dict[Row, int] = {}
    masses, entropies = _Terms(), _Terms()
    for index, functional in enumerate(functionals):
        _check(functional)
        for weight, atom in functional.terms:
            if isinstance(atom, RowEntropy):
                entropies.add(index, weight, rows.setdefault(atom.row, len(rows)))
            elif isinstance(atom, Score | LogSumExp):
                keys = (atom.key,) if isinstance(atom, Score) else atom.keys
                masses.add(index, weight, groups.setdefault((atom.row, keys), len(groups)))
    parts = []
    if groups:
        parts.append(_weighted(masses, *_log_masses(list(groups), boxes)))
    if rows:
        parts.append(_weighted(entropies, *entropy_range(*_stack(list(rows), boxes))))
    return _add_up(functionals, masses.owner + entropies.owner, parts, boxes)


def _weighted(terms: _Terms, low: Float[Tensor, "... C"], high: Float[Tensor, "... C"]) -> Bounds:
    """Bounds of weight · column, per term."""
    weight = torch.tensor(terms.weight, dtype=torch.float64, device=low.device)
    low, high = low[..., terms.column], high[..., terms.column]
    positive = weight >= 0
    return (
        down(weight * torch.where(positive, low, high)),
        up(weight * torch.where(positive, high, low)),
    )


def _add_up(functionals: Sequence[Functional], owner: list[int], parts: list[Bounds], boxes: Boxes) -> Bounds:
    """Constants plus the terms of each functional, with the rounding of the sums moved outward."""
    some = next(iter(boxes.values()), None)
    shape, device = (torch.Size(), None) if some is None else (some.lower.shape[:-1], some.lower.device)
    constant = torch.tensor([f.constant for f in functionals], dtype=torch.float64, device=device)
    constant = constant.expand(*shape, len(functionals))
    if not parts:
        return constant, constant
    index = torch.tensor(owner, device=device)
    most_terms = 1 + max(len(f.terms) for f in functionals)
    sums = []
    for side in (0, 1):
        terms = torch.cat([part[side] for part in parts], -1)
        total = constant.index_add(-1, index, terms)
        magnitude = constant.abs().index_add(-1, index, terms.abs())
        slack = gamma(2 * most_terms + 4) * magnitude + TINY
        sums.append(up(total + slack) if side else down(total - slack))
    return sums[0], sums[1]


def _stack(rows: list[Row], boxes: Boxes) -> Box:
    """The boxes of rows as [..., row, S]."""
    for row in rows:
        if row not in boxes:
            raise QueryError(f"the program needs a weight box of row {row}, which is not given")
    return Box(
        torch.stack([boxes[row].lower for row in rows], -2),
        torch.stack([boxes[row].upper for row in rows], -2),
    )


def _log_masses(groups: list[Group], boxes: Boxes) -> Bounds:
    """Bounds of the logarithm of each group's mass."""
    rows = list(dict.fromkeys(row for row, _ in groups))
    place = {row: index for index, row in enumerate(rows)}
    stacked = _stack(rows, boxes)
    low, high = (side[..., [place[row] for row, _ in groups], :] for side in stacked)
    member = torch.zeros(len(groups), low.shape[-1], dtype=torch.bool)
    lengths = torch.tensor([len(keys) for _, keys in groups])
    flat = torch.tensor([key for _, keys in groups for key in keys])
    member[torch.arange(len(groups)).repeat_interleave(lengths), flat] = True
    member = member.to(low.device)
    least, most = minimum_mass(member, low, high), maximum_mass(member, low, high)
    return log_down(least), log_up(most.clamp_max(1.0))


def _check(functional: Functional) -> None:
    """A functional of weights alone: no outputs, and score terms of each row whose weights cancel."""
    sums: dict[Row, list[float]] = {}
    for weight, atom in functional.terms:
        if isinstance(atom, Logit):
            raise QueryError(f"functional {functional.name!r} is about outputs: weight boxes do not bound it")
        if isinstance(atom, Score | LogSumExp):
            sums.setdefault(atom.row, []).append(weight)
    for row, weights in sums.items():
        if math.fsum(weights) != 0.0:
            raise QueryError(
                f"functional {functional.name!r} changes when all scores of row {row} shift: "
                "weight boxes do not bound it"
            )
