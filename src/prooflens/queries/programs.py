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

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.numerics.rounding import down, up
from prooflens.queries.entropy import entropy_range
from prooflens.queries.functionals import Functional, Logit, LogSumExp, RowEntropy, Score
from prooflens.queries.outward import log_down, log_up, sum_down, sum_up
from prooflens.queries.rows import Row
from prooflens.queries.simplex import Box, maximum_mass, minimum_mass

Boxes = Mapping[Row, Box]
"""Weight boxes of rows, one batch shape for all."""


def functional_bounds(
    functionals: Sequence[Functional], boxes: Boxes
) -> tuple[Float[Tensor, "... F"], Float[Tensor, "... F"]]:
    """Proved bounds of functionals for all patterns in Δ_S ∩ [s̲, s̄]; −∞ or ∞ where a mass may vanish."""
    lows: list[list[Tensor]] = [[] for _ in functionals]
    highs: list[list[Tensor]] = [[] for _ in functionals]
    groups = {row: _groups(functionals, row) for f in functionals for row in f.rows}
    logs = {row: _log_masses(keys, _box(boxes, row)) for row, keys in groups.items()}
    entropies = {row: entropy_range(*_box(boxes, row)) for row in _entropy_rows(functionals)}
    for index, functional in enumerate(functionals):
        _check(functional)
        for weight, atom in functional.terms:
            if isinstance(atom, RowEntropy):
                low, high = entropies[atom.row]
            elif isinstance(atom, Score | LogSumExp):
                column = groups[atom.row].index(_keys(atom))
                low, high = (side[..., column] for side in logs[atom.row])
            lows[index].append(down(weight * (low if weight >= 0 else high)))
            highs[index].append(up(weight * (high if weight >= 0 else low)))
    shape = next(iter(boxes.values())).lower.shape[:-1] if boxes else torch.Size()
    return (
        torch.stack(
            [_total(part, f, shape, lower=True) for part, f in zip(lows, functionals, strict=True)], -1
        ),
        torch.stack(
            [_total(part, f, shape, lower=False) for part, f in zip(highs, functionals, strict=True)], -1
        ),
    )


def _total(
    parts: list[Tensor], functional: Functional, shape: torch.Size, lower: bool
) -> Float[Tensor, "..."]:
    constant = torch.full(shape, functional.constant, dtype=torch.float64)
    if not parts:
        return constant
    terms = torch.stack([*parts, constant.to(parts[0].device)], -1)
    return sum_down(terms) if lower else sum_up(terms)


def _box(boxes: Boxes, row: Row) -> Box:
    if row not in boxes:
        raise QueryError(f"the program needs a weight box of row {row}, which is not given")
    return boxes[row]


def _keys(atom: Score | LogSumExp) -> tuple[int, ...]:
    return (atom.key,) if isinstance(atom, Score) else atom.keys


def _groups(functionals: Sequence[Functional], row: Row) -> list[tuple[int, ...]]:
    atoms = (atom for f in functionals for _, atom in f.terms)
    found = (_keys(atom) for atom in atoms if isinstance(atom, Score | LogSumExp) and atom.row == row)
    return list(dict.fromkeys(found))


def _entropy_rows(functionals: Sequence[Functional]) -> set[Row]:
    return {atom.row for f in functionals for _, atom in f.terms if isinstance(atom, RowEntropy)}


def _log_masses(
    groups: list[tuple[int, ...]], box: Box
) -> tuple[Float[Tensor, "... G"], Float[Tensor, "... G"]]:
    """Bounds of the logarithm of each group's mass."""
    member = torch.zeros(len(groups), box.lower.shape[-1], dtype=torch.bool, device=box.lower.device)
    for index, keys in enumerate(groups):
        member[index, list(keys)] = True
    low, high = box.lower.unsqueeze(-2), box.upper.unsqueeze(-2)
    least, most = minimum_mass(member, low, high), maximum_mass(member, low, high)
    return log_down(least), log_up(most.clamp_max(1.0))


def _check(functional: Functional) -> None:
    """A functional of weights alone: no outputs, and score terms of each row whose weights cancel."""
    if any(isinstance(atom, Logit) for _, atom in functional.terms):
        raise QueryError(f"functional {functional.name!r} is about outputs: weight boxes do not bound it")
    for row in functional.rows:
        terms = ((w, atom) for w, atom in functional.terms if isinstance(atom, Score | LogSumExp))
        if math.fsum(w for w, atom in terms if atom.row == row) != 0.0:
            raise QueryError(
                f"functional {functional.name!r} changes when all scores of row {row} shift: "
                "weight boxes do not bound it"
            )
