"""Many functionals at once as index tensors, so that an engine does not loop over Python objects."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.queries.functionals import Functional, OutputAtom, Score, Scores


@dataclass(frozen=True, eq=False)
class MarginTable:
    """The functionals of a list that are a_plus − a_minus + constant in one row, one entry each."""

    index: Int[Tensor, " M"]
    """Which functional of the list."""
    layer: Int[Tensor, " M"]
    head: Int[Tensor, " M"]
    position: Int[Tensor, " M"]
    plus: Int[Tensor, " M"]
    minus: Int[Tensor, " M"]
    constant: Float[Tensor, " M"]

    def values(self, scores: Float[Tensor, "... L H S S"]) -> Float[Tensor, "... M"]:
        """Return all margins of stacked scores [..., layer, head, query, key], without a loop.

        Args:
            scores: scores of layers, shape [..., L, H, S, S].
        """
        where = self.layer, self.head, self.position
        difference = scores[..., *where, self.plus] - scores[..., *where, self.minus]
        return difference + self.constant.to(scores.device)


def margin_table(functionals: Sequence[Functional]) -> MarginTable:
    """Collect the score margins of a list of functionals; the others are not in `index`.

    Args:
        functionals: any functionals.

    Example:
        >>> from prooflens.queries.functionals import margin
        >>> from prooflens.queries.rows import Row
        >>> table = margin_table([margin(Row(0, 0, 1), 1, 0)])
        >>> table.values(torch.tensor([[[[0.0, 0.0], [1.0, 4.0]]]])).tolist()  # 4 − 1
        [3.0]
    """
    found: list[tuple[int, ...]] = []
    for number, functional in enumerate(functionals):
        match functional.terms:
            case ((1.0, Score(row=row, key=winner)), (-1.0, Score(row=same, key=loser))) if row == same:
                found.append((number, row.layer, row.head, row.position, winner, loser))
    index, layer, head, position, plus, minus = (
        torch.tensor(found, dtype=torch.long).reshape(-1, 6).unbind(-1)
    )
    constants = [functionals[entry[0]].constant for entry in found]
    constant = torch.tensor(constants, dtype=torch.float64)
    return MarginTable(index, layer, head, position, plus, minus, constant)


@dataclass(frozen=True, eq=False)
class Linearisation:
    """Clean values and gradients of F functionals. Gradients are sparse; entries at the same place are added."""

    value: Float[Tensor, " F"]
    index: Int[Tensor, " N"]
    """Which functional."""
    layer: Int[Tensor, " N"]
    head: Int[Tensor, " N"]
    position: Int[Tensor, " N"]
    key: Int[Tensor, " N"]
    weight: Float[Tensor, " N"]
    """∂f/∂a at the clean scores."""

    def dense(self, layer: int, n_heads: int, size: int) -> Float[Tensor, "F H S S"]:
        """Return the gradients with respect to all scores of one layer: covectors for a backward pass.

        Args:
            layer: which layer.
            n_heads: H.
            size: S.
        """
        out = torch.zeros(
            len(self.value), n_heads, size, size, dtype=self.weight.dtype, device=self.weight.device
        )
        here = self.layer == layer
        columns = (self.index, self.head, self.position, self.key)
        where = tuple(column[here].to(out.device) for column in columns)
        return out.index_put(where, self.weight[here.to(out.device)], accumulate=True)


def linearise(functionals: Sequence[Functional], scores: Scores) -> Linearisation:
    """Return values and gradients of attention functionals at the clean scores of one prompt.

    Args:
        functionals: functionals of scores; those about outputs are refused.
        scores: pre-softmax scores of every row that they read, without batch dimensions.

    Raises:
        QueryError: if a functional is about outputs.

    Example:
        >>> from prooflens.queries.functionals import margin
        >>> from prooflens.queries.rows import Row
        >>> found = linearise([margin(Row(0, 0, 1), 1, 0)], {Row(0, 0, 1): torch.tensor([1.0, 4.0])})
        >>> found.value.tolist(), found.key.tolist(), found.weight.tolist()
        ([3.0], [1, 0], [1.0, -1.0])
    """
    values: list[Tensor] = []
    entries: list[tuple[int, int, int, int, int]] = []
    weights: list[Tensor] = []
    for number, functional in enumerate(functionals):
        values.append(functional.value(scores))
        for weight, atom in functional.terms:
            if isinstance(atom, OutputAtom):
                raise QueryError(f"functional {functional.name!r} is about outputs; use its logit_gradient")
            row = atom.row
            keys = (atom.key,) if isinstance(atom, Score) else atom.keys
            if isinstance(atom, Score):
                weights.append(torch.tensor([weight], dtype=torch.float64, device=scores[row].device))
            else:
                weights.append(weight * atom.gradient(scores[row].double())[list(keys)])
            entries.extend((number, row.layer, row.head, row.position, at) for at in keys)
    index, layer, head, position, key = torch.tensor(entries, dtype=torch.long).reshape(-1, 5).unbind(-1)
    stacked = torch.cat(weights) if weights else torch.zeros(0, dtype=torch.float64)
    value = torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)
    return Linearisation(value, index, layer, head, position, key, stacked)
