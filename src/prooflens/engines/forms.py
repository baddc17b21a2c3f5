"""Linear forms of attention scores and outputs: what every engine bounds.

Everything else (log-odds of mass, entropies, circuits) is made of forms in `functionals.py`, once, for all engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.errors import EngineError
from prooflens.queries import Functional, Row, Score
from prooflens.queries.functionals import Logit


@dataclass(frozen=True, eq=False)
class Forms:
    """F linear forms Σ weight · a[layer, head, position, key] + Σ logit_weights · logits.

    The score terms are in coordinate form: N entries, of which those with equal `index` belong to one form.

    Attributes:
        size: F, how many forms there are.
        index: which form each entry belongs to, shape [N].
        layer: the layer of each entry, shape [N].
        head: the head of each entry, shape [N].
        position: the query position of each entry, shape [N].
        key: the key position of each entry, shape [N].
        weight: the weight of each entry, shape [N].
        logits: the weights of the outputs, shape [F, C]; None if no form reads outputs.
        signs: whether only signs are wanted.

    Example:
        >>> row = Row(layer=0, head=1, position=3)
        >>> margin = Forms.of([(0, row, 2, 1.0), (0, row, 0, -1.0)], size=1)  # a[2] − a[0]
        >>> scores = torch.tensor([0.5, 0.0, 4.0, 0.0]).expand(1, 2, 4, 4)
        >>> margin.evaluate({0: scores}, None).tolist()
        [[3.5]]
    """

    size: int
    index: Int[Tensor, " N"]
    layer: Int[Tensor, " N"]
    head: Int[Tensor, " N"]
    position: Int[Tensor, " N"]
    key: Int[Tensor, " N"]
    weight: Float[Tensor, " N"]
    logits: Float[Tensor, "F C"] | None = None
    signs: bool = False
    """Whether only the signs of the forms are wanted: an engine may stop as soon as they are decided."""

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Row, int, float]], size: int) -> Forms:
        """Make forms of score entries.

        Args:
            entries: tuples (form, row, key, weight); entries of the same form are added.
            size: how many forms there are.
        """
        places = [(form, row.layer, row.head, row.position, key) for form, row, key, _ in entries]
        index, layer, head, position, key = torch.tensor(places, dtype=torch.long).reshape(-1, 5).unbind(-1)
        weight = torch.tensor([entry[3] for entry in entries], dtype=torch.float64)
        return cls(size, index, layer, head, position, key, weight)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers whose scores are read, in order."""
        return tuple(sorted(set(self.layer.tolist())))

    @property
    def are_margins(self) -> bool:
        """Whether every form is the difference of two scores."""
        if self.logits is not None or len(self.weight) != 2 * self.size:
            return False
        counts = self.index.bincount(minlength=self.size)
        sums = torch.zeros(self.size, dtype=torch.float64).index_add(0, self.index, self.weight)
        return bool((counts == 2).all()) and bool((sums == 0).all()) and bool((self.weight.abs() == 1).all())

    def select(self, chosen: Int[Tensor, " M"]) -> Forms:
        """Return some of the forms, renumbered.

        Args:
            chosen: the numbers of the forms to keep.
        """
        place = torch.full((self.size,), -1, dtype=torch.long)
        place[chosen] = torch.arange(len(chosen))
        kept = place[self.index] >= 0
        return Forms(
            len(chosen),
            place[self.index[kept]],
            self.layer[kept],
            self.head[kept],
            self.position[kept],
            self.key[kept],
            self.weight[kept],
            None if self.logits is None else self.logits[chosen],
            self.signs,
        )

    def tokens_read(self, n_tokens: int) -> Bool[Tensor, "F S"]:
        """Say which tokens the scores of each form are made of: the queries and the keys of its entries.

        Args:
            n_tokens: S, how many tokens the prompt has.
        """
        used = torch.zeros(self.size, n_tokens, dtype=torch.bool)
        used[self.index, self.position] = True
        used[self.index, self.key] = True
        return used

    def negated(self) -> Forms:
        """Return −f for every form."""
        return replace(self, weight=-self.weight, logits=None if self.logits is None else -self.logits)

    def evaluate(
        self, scores: dict[int, Float[Tensor, "B H S S"]], output: Float[Tensor, "B C"] | None
    ) -> Float[Tensor, "B F"]:
        """Evaluate the forms at a batch of concrete points.

        Args:
            scores: pre-softmax scores [B, H, S, S] by layer.
            output: the outputs [B, C]; None if no form reads them.
        """
        some = next(iter(scores.values())) if scores else output
        assert some is not None
        total = some.new_zeros(some.shape[0], self.size)
        for layer, values in scores.items():
            here = self.layer == layer
            terms = values[:, self.head[here], self.position[here], self.key[here]] * self.weight[here].to(
                some
            )
            total = total.index_add(-1, self.index[here].to(some.device), terms)
        if self.logits is not None and output is not None:
            total = total + output @ self.logits.to(output).T
        return total


def forms_of(functionals: Sequence[Functional], n_outputs: int = 0) -> Forms:
    """Return the forms of linear functionals; their constants are left out.

    Args:
        functionals: functionals of `Score` and `Logit` atoms.
        n_outputs: C, the number of outputs of the model.

    Raises:
        EngineError: if a functional is not linear in scores and outputs.
    """
    entries: list[tuple[int, Row, int, float]] = []
    read: list[tuple[int, int, float]] = []
    for number, functional in enumerate(functionals):
        for weight, atom in functional.terms:
            if isinstance(atom, Score):
                entries.append((number, atom.row, atom.key, weight))
            elif isinstance(atom, Logit):
                read.append((number, atom.index, weight))
            else:
                raise EngineError(f"functional {functional.name!r} is not linear in scores and outputs")
    made = Forms.of(entries, len(functionals))
    if not read:  # no matrix as wide as a vocabulary for nothing
        return made
    logits = torch.zeros(len(functionals), n_outputs, dtype=torch.float64)
    for number, index, weight in read:
        logits[number, index] += weight
    return replace(made, logits=logits)
