"""Bounds of functionals over boxes of weights or scores: the queries' programs, in the functionals' own units.

Over weights: within a row the coefficients of `Score` and `LogSumExp` terms add up to 0, so the row's normaliser
cancels and the terms are Σ w log(mass of a group). A group's least mass and another's greatest are reached by one
greedy pattern (fill the second group first and the first group last), so for the difference of two disjoint groups
the sum of the separate bounds is the optimum: log(min Σ_A s) − log(max Σ_B s) > 0 iff min Σ_A s − Σ_B s > 0, the
tests of `prop:cert_attn`, `cor:topk_ranking`, `prop:evidence_mass` and `prop:head_spec`. Across rows the programs are
independent (the paper's remark on circuits), which is sound.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.numerics.rounding import TINY, down, gamma, up
from prooflens.queries.entropy import entropy_range
from prooflens.queries.functionals import Functional, LogSumExp, OutputAtom, RowEntropy, Score
from prooflens.queries.outward import log_down, log_sum_exp_down, log_sum_exp_up, log_up
from prooflens.queries.rows import Row
from prooflens.queries.simplex import Box, maximum_mass, minimum_mass
from prooflens.queries.weights import weight_box

Boxes = Mapping[Row, Box]
"""Boxes by row, of weights or of scores, all of one shape."""

Group = tuple[Row, tuple[int, ...]]
Bounds = tuple[Float[Tensor, "... F"], Float[Tensor, "... F"]]


class _Terms:
    """The terms of one kind in many functionals, as columns: the functional, the weight, the group of keys."""

    def __init__(
        self, functionals: Sequence[Functional], *kinds: type[Score | LogSumExp | RowEntropy]
    ) -> None:
        places: dict[Group, int] = {}
        self.owner: list[int] = []
        self.weight: list[float] = []
        self.column: list[int] = []
        for index, functional in enumerate(functionals):
            for weight, atom in functional.terms:
                if not isinstance(atom, OutputAtom) and isinstance(atom, kinds):
                    keys = (atom.key,) if isinstance(atom, Score) else atom.keys
                    self.owner.append(index)
                    self.weight.append(weight)
                    self.column.append(places.setdefault((atom.row, keys), len(places)))
        self.groups = list(places)

    def boxes(self, boxes: Boxes) -> Box:
        """Return the boxes of the groups' rows as [..., group, S]."""
        rows = [row for row, _ in self.groups]
        if missing := [row for row in rows if row not in boxes]:
            raise QueryError(f"the program needs a box of row {missing[0]}, which is not given")
        return Box(
            torch.stack([boxes[row].lower for row in rows], -2),
            torch.stack([boxes[row].upper for row in rows], -2),
        )

    def member(self, size: int, device: torch.device) -> Bool[Tensor, "G S"]:
        """Return which keys belong to each group."""
        member = torch.zeros(len(self.groups), size, dtype=torch.bool)
        lengths = torch.tensor([len(keys) for _, keys in self.groups])
        flat = torch.tensor([key for _, keys in self.groups for key in keys])
        member[torch.arange(len(self.groups)).repeat_interleave(lengths), flat] = True
        return member.to(device)


def functional_bounds(functionals: Sequence[Functional], boxes: Boxes) -> Bounds:
    """Bound functionals over all attention patterns in Δ_S ∩ [s̲, s̄] of their rows; the bounds are proved.

    Args:
        functionals: functionals of attention. Within each row, the weights of score terms must add up to 0.
        boxes: weight boxes of all rows that they read.

    Returns:
        Lower and upper bounds, shape [..., F]; −∞ or ∞ where a mass may vanish.

    Raises:
        QueryError: if a functional is about outputs, changes under a shift of all scores, or lacks a box.

    Example:
        >>> from prooflens.queries.functionals import margin
        >>> row = Row(0, 0, 1)
        >>> box = Box(torch.tensor([0.75, 0.0]).double(), torch.tensor([1.0, 0.25]).double())
        >>> low, high = functional_bounds([margin(row, 0, 1)], {row: box})  # log(0.75/0.25)
        >>> round(low.item(), 6), high.item()
        (1.098612, inf)
    """
    for functional in functionals:
        _check(functional)

    def log_masses(member: Bool[Tensor, "G S"], box: Box) -> Bounds:
        least, most = minimum_mass(member, *box), maximum_mass(member, *box)
        return log_down(least), log_up(most.clamp_max(1.0))

    return _bounds(functionals, boxes, log_masses, lambda _, box: entropy_range(*box))


def score_bounds(functionals: Sequence[Functional], boxes: Boxes) -> Bounds:
    """Bound functionals over boxes of **scores** a̲ ≤ a ≤ ā of their rows; the bounds are proved.

    Score and log-sum-exp grow with every score, so the range is exact for groups that share no key, and never wider
    than through weights. Entropy goes through the exact weight box.

    Args:
        functionals: functionals of attention.
        boxes: score boxes of all rows that they read.

    Returns:
        Lower and upper bounds, shape [..., F].

    Example:
        >>> from prooflens.queries.functionals import margin
        >>> row = Row(0, 0, 1)
        >>> box = Box(torch.tensor([3.0, 0.0]).double(), torch.tensor([4.0, 1.0]).double())
        >>> low, high = score_bounds([margin(row, 0, 1)], {row: box})
        >>> round(low.item(), 9), round(high.item(), 9)  # from 3 − 1 to 4 − 0
        (2.0, 4.0)
    """

    def log_sums(member: Bool[Tensor, "G S"], box: Box) -> Bounds:
        return log_sum_exp_down(box.lower, member), log_sum_exp_up(box.upper, member)

    def entropies(member: Bool[Tensor, "G S"], box: Box) -> Bounds:
        return entropy_range(*weight_box(box.lower, box.upper, mask=member.expand(box.lower.shape)))

    return _bounds(functionals, boxes, log_sums, entropies)


GroupBounds = Callable[[Bool[Tensor, "G S"], Box], Bounds]


def _bounds(
    functionals: Sequence[Functional], boxes: Boxes, groups: GroupBounds, entropies: GroupBounds
) -> Bounds:
    owner: list[int] = []
    parts: list[Bounds] = []
    for terms, bound in (
        (_Terms(functionals, Score, LogSumExp), groups),
        (_Terms(functionals, RowEntropy), entropies),
    ):
        if terms.groups:
            box = terms.boxes(boxes)
            member = terms.member(box.lower.shape[-1], box.lower.device)
            owner += terms.owner
            parts.append(_weighted(terms, *bound(member, box)))
    return _add_up(functionals, owner, parts, boxes)


def _weighted(terms: _Terms, low: Float[Tensor, "... C"], high: Float[Tensor, "... C"]) -> Bounds:
    """Bound weight · column, per term."""
    weight = torch.tensor(terms.weight, dtype=torch.float64, device=low.device)
    low, high = low[..., terms.column], high[..., terms.column]
    positive = weight >= 0
    return (
        down(weight * torch.where(positive, low, high)),
        up(weight * torch.where(positive, high, low)),
    )


def _add_up(functionals: Sequence[Functional], owner: list[int], parts: list[Bounds], boxes: Boxes) -> Bounds:
    """Add the constants and the terms of each functional, and move the sums outward by their rounding."""
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


def _check(functional: Functional) -> None:
    """Refuse a functional that reads outputs, or whose score terms in a row do not cancel."""
    sums: dict[Row, list[float]] = {}
    for weight, atom in functional.terms:
        if isinstance(atom, OutputAtom):
            raise QueryError(f"functional {functional.name!r} is about outputs: weight boxes do not bound it")
        if isinstance(atom, Score | LogSumExp):
            sums.setdefault(atom.row, []).append(weight)
    for row, weights in sums.items():
        if math.fsum(weights) != 0.0:
            raise QueryError(
                f"functional {functional.name!r} changes when all scores of row {row} shift: "
                "weight boxes do not bound it"
            )
