"""What an attack makes small: targets, each the smallest of some functionals, evaluated for all targets at once.

A functional is Σ w·atom + constant (`queries.functionals`). Its atoms become columns (functional, kind, place, keys,
weight), so that the values of thousands of functionals at their own points are a few gathers and one sum, under
autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.queries import (
    Claim,
    Divergence,
    Functional,
    LargestLogit,
    Logit,
    LogSumExp,
    Probability,
    RowEntropy,
    Sense,
    Standing,
)

FAR_BELOW = 1e5
"""How far below the row's largest score masked keys are put: their weight is 0, and derivatives stay finite."""


class Kind(IntEnum):
    """Which function of a row an atom is."""

    SCORE = 0
    LOG_SUM = 1
    ENTROPY = 2


class _Group(NamedTuple):
    """The columns of one layer and kind."""

    layer: int
    kind: Kind
    function: Tensor
    owner: Tensor
    head: Tensor
    position: Tensor
    keys: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class Targets:
    """T targets, each the minimum over its functionals; functional f belongs to target `owner[f]`."""

    size: int
    owner: Int[Tensor, " F"]
    constant: Float[Tensor, " F"]
    logits: Float[Tensor, "F C"] | None
    function: Int[Tensor, " N"]
    kind: Int[Tensor, " N"]
    layer: Int[Tensor, " N"]
    head: Int[Tensor, " N"]
    position: Int[Tensor, " N"]
    keys: Bool[Tensor, "N S"]
    weight: Float[Tensor, " N"]
    prompt: Int[Tensor, " T"]
    """Which of several prompts each target is about."""
    standings: tuple[tuple[int, float, Standing], ...] = ()
    """Of functionals that are standings: their number, weight and atom."""

    @classmethod
    def of_forms(cls, forms: Forms, n_tokens: int) -> Targets:
        """Make a target of each form, and after them of the negative of each: the targets of a range."""
        both = torch.cat((forms.index, forms.index + forms.size))
        key = torch.nn.functional.one_hot(forms.key, n_tokens).bool()
        logits = None if forms.logits is None else torch.cat((forms.logits, -forms.logits))
        return cls(
            2 * forms.size,
            torch.arange(2 * forms.size),
            torch.zeros(2 * forms.size, dtype=torch.float64),
            logits,
            both,
            torch.zeros_like(both),
            forms.layer.repeat(2),
            forms.head.repeat(2),
            forms.position.repeat(2),
            key.repeat(2, 1),
            torch.cat((forms.weight, -forms.weight)),
            torch.zeros(2 * forms.size, dtype=torch.long),
        )

    @classmethod
    def of_claims(cls, claims: Sequence[Claim], n_tokens: int, n_outputs: int) -> Targets:
        """Make one target per claim, its smallest functional; ranges cannot be broken and take no part."""
        functionals: list[Functional] = []
        owner: list[int] = []
        for number, claim in enumerate(claims):
            for condition in claim.conditions:
                if condition.sense is not Sense.RANGE:
                    functionals.append(condition.functional)
                    owner.append(number)
        logits = torch.zeros(len(functionals), n_outputs, dtype=torch.float64)
        places: list[tuple[int, int, int, int, int]] = []
        weights: list[float] = []
        groups: list[tuple[int, ...]] = []
        standings: list[tuple[int, float, Standing]] = []
        for number, functional in enumerate(functionals):
            for weight, atom in functional.terms:
                if isinstance(atom, Logit):
                    logits[number, atom.index] += weight
                    continue
                if isinstance(atom, Standing):
                    standings.append((number, weight, atom))
                    continue
                assert not isinstance(atom, LargestLogit), "tails are attacked token by token"
                assert not isinstance(atom, Probability | Divergence), "these are attacked by `attack_metric`"
                kind = Kind.SCORE
                if isinstance(atom, LogSumExp | RowEntropy):
                    kind = Kind.LOG_SUM if isinstance(atom, LogSumExp) else Kind.ENTROPY
                places.append((number, kind, atom.row.layer, atom.row.head, atom.row.position))
                groups.append(atom.keys if isinstance(atom, LogSumExp | RowEntropy) else (atom.key,))
                weights.append(weight)
        keys = torch.zeros(len(groups), n_tokens, dtype=torch.bool)
        for number, group in enumerate(groups):
            keys[number, list(group)] = True
        function, kinds, layer, head, position = (
            torch.tensor(places, dtype=torch.long).reshape(-1, 5).unbind(-1)
        )
        constants = torch.tensor([f.constant for f in functionals], dtype=torch.float64)
        about_output = bool(logits.any()) or bool(standings)
        return cls(
            len(claims),
            torch.tensor(owner, dtype=torch.long),
            constants,
            logits if about_output else None,
            function,
            kinds,
            layer,
            head,
            position,
            keys,
            torch.tensor(weights, dtype=torch.float64),
            torch.zeros(len(claims), dtype=torch.long),
            tuple(standings),
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose scores are read."""
        return tuple(sorted(set(self.layer.tolist())))

    @property
    def n_functionals(self) -> int:
        """The number of functionals, F."""
        return len(self.owner)

    def to(self, like: Tensor) -> Targets:
        """Return the targets on the device and in the precision of a tensor."""
        moved: dict[str, Any] = {
            name: value.to(like) if value.is_floating_point() else value.to(like.device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def select(self, chosen: Int[Tensor, " M"]) -> Targets:
        """Return some of the targets, renumbered in the given order."""
        chosen = chosen.to(self.owner.device)
        place = torch.full((self.size,), -1, device=self.owner.device)
        place[chosen] = torch.arange(len(chosen), device=self.owner.device)
        functions = (place[self.owner] >= 0).nonzero()[:, 0]
        number = torch.full((self.n_functionals,), -1, device=self.owner.device)
        number[functions] = torch.arange(len(functions), device=self.owner.device)
        terms = number[self.function] >= 0
        return Targets(
            len(chosen),
            place[self.owner[functions]],
            self.constant[functions],
            None if self.logits is None else self.logits[functions],
            number[self.function[terms]],
            self.kind[terms],
            self.layer[terms],
            self.head[terms],
            self.position[terms],
            self.keys[terms],
            self.weight[terms],
            self.prompt[chosen],
            tuple((int(number[f]), w, atom) for f, w, atom in self.standings if number[f] >= 0),
        )

    def each(self) -> Targets:
        """Return every functional as a target of its own."""
        return replace(
            self,
            size=self.n_functionals,
            owner=torch.arange(self.n_functionals, device=self.owner.device),
            prompt=self.prompt[self.owner],
        )

    @cached_property
    def heads(self) -> list[int] | None:
        """The head that each target reads (−1: none), if all read a single head of one layer and no outputs."""
        found = [-1] * self.size
        if self.logits is not None or len(self.layers) != 1:
            return None
        for owner, head in zip(self.owner[self.function].tolist(), self.head.tolist(), strict=True):
            if found[owner] not in (-1, head):
                return None
            found[owner] = head
        return found

    def of_one_head(self) -> Targets:
        """Return the same targets for a model that has only the head they read."""
        return replace(self, head=torch.zeros_like(self.head))

    @cached_property
    def _one_each(self) -> bool:
        return self.owner.tolist() == list(range(self.size))

    @cached_property
    def _members(self) -> Int[Tensor, "T most"]:
        """The functionals of each target, filled up with F, which stands for +∞."""
        order = self.owner.argsort(stable=True)
        owner = self.owner[order]
        rank = torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)
        most = int(rank.max()) + 1 if len(rank) else 1
        members = torch.full((self.size, most), self.n_functionals, device=owner.device)
        members[owner, rank] = order
        return members

    @cached_property
    def _groups(self) -> list[_Group]:
        found = []
        for layer in self.layers:
            for kind in Kind:
                here = ((self.layer == layer) & (self.kind == kind)).nonzero()[:, 0]
                if len(here):
                    keys = self.keys[here]
                    function = self.function[here]
                    found.append(
                        _Group(
                            layer,
                            kind,
                            function,
                            self.owner[function],
                            self.head[here],
                            self.position[here],
                            keys.int().argmax(-1) if kind is Kind.SCORE else keys,
                            self.weight[here],
                        )
                    )
        return found

    def values(
        self,
        scores: dict[int, Float[Tensor, "N R H S S"]],
        output: Float[Tensor, "N R C"] | None,
        rows: Int[Tensor, " T"] | None = None,
    ) -> Float[Tensor, "T R"]:
        """Evaluate each target at the R points of its row; without rows at its own, or at the only ones there are."""
        some = next(iter(scores.values())) if scores else output
        assert some is not None
        shared, repeats = some.shape[0] == 1, some.shape[1]
        if rows is None:
            rows = torch.arange(self.size, device=self.owner.device) * (not shared)
        total = self.constant[:, None].expand(-1, repeats)
        for group in self._groups:
            place = (rows[group.owner], slice(None), group.head, group.position)
            terms = _atoms(group, scores[group.layer], place) * group.weight[:, None]
            total = total.index_add(0, group.function, terms)
        if self.logits is not None and output is not None:
            if shared:
                total = total + self.logits @ output[0].T
            else:
                total = total + (output[rows[self.owner]] @ self.logits[:, :, None])[..., 0]
            for function, weight, atom in self.standings:
                at = output[rows[self.owner[function]]]
                here = torch.tensor([function], device=total.device)
                total = total.index_add(0, here, weight * atom.value(at)[None])
        if self._one_each:
            return total
        nothing = total.new_full((1, repeats), torch.inf)
        return torch.cat((total, nothing))[self._members].amin(1)


def _atoms(
    group: _Group, scores: Float[Tensor, "T R H S S"], place: tuple[Tensor, slice, Tensor, Tensor]
) -> Float[Tensor, "N R"]:
    if group.kind is Kind.SCORE:
        return scores[*place, group.keys]
    rows = scores[place]
    far = rows.detach().amax(-1, keepdim=True) - FAR_BELOW
    rows = torch.where(group.keys[:, None, :], rows, far)
    if group.kind is Kind.LOG_SUM:
        return rows.logsumexp(-1)
    logs = rows.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)
