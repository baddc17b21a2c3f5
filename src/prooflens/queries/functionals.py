"""Functionals: scalars of the attention (or of the output) whose sign or range is a query.

A functional is a constant plus a weighted sum of atoms, each a function of one row of pre-softmax scores a:

| atom | value | gradient |
|---|---|---|
| `Score(row, key)` | a_key | e_key |
| `LogSumExp(row, keys)` | log Σ_keys e^a | p = softmax of a over the keys |
| `RowEntropy(row, keys)` | H(s), s = softmax of a over the keys that take part | −s_j (log s_j + H) |
| `Logit(index)` | an output | e_index (of the logits) |
| `LargestLogit(but)` | the largest output, some left out | – (an engine bounds it output by output) |
| `Standing(index, rivals, k)` | min(y, k-th smallest of y − y_j), y an output, j its rivals | – (`engines.standings`) |
| `Probability(index, among)`, `Divergence` | of the softmax over some outputs | – (`engines.distributions`) |

What an engine needs beyond the linear term is in `remainder`; many functionals at once are in `tables`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.queries.distributions import Divergence, Probability
from prooflens.queries.rows import Row

Scores: TypeAlias = Mapping[Row, Float[Tensor, "... S"]]
"""Pre-softmax scores by row, with any leading dimensions (samples); masked keys are never read."""


@dataclass(frozen=True)
class Score:
    """The pre-softmax score of one key.

    Attributes:
        row: layer, head and query position.
        key: the key position.
    """

    row: Row
    key: int

    def value(self, scores: Float[Tensor, "... S"]) -> Float[Tensor, "..."]:
        """Return a_key.

        Args:
            scores: the scores of the row, shape [..., S].
        """
        return scores[..., self.key]

    def gradient(self, scores: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """Return the unit vector e_key.

        Args:
            scores: the scores of the row, shape [..., S].
        """
        return _spread((self.key,), torch.ones_like(scores[..., :1]), scores)


@dataclass(frozen=True)
class LogSumExp:
    """log Σ e^a over a group of keys: the logarithm of the group's attention mass, up to the row's normaliser.

    Attributes:
        row: layer, head and query position.
        keys: the key positions of the group.

    Example:
        >>> LogSumExp(Row(0, 1, 3), (0, 1)).value(torch.tensor([0.0, 0.0, 5.0])).item()  # log 2
        0.6931471824645996
    """

    row: Row
    keys: tuple[int, ...]

    def value(self, scores: Float[Tensor, "... S"]) -> Float[Tensor, "..."]:
        """Return log Σ_keys e^a.

        Args:
            scores: the scores of the row, shape [..., S].
        """
        return scores[..., self.keys].logsumexp(-1)

    def gradient(self, scores: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """Return the softmax over the group, and 0 at the other keys.

        Args:
            scores: the scores of the row, shape [..., S].
        """
        return _spread(self.keys, scores[..., self.keys].softmax(-1), scores)


@dataclass(frozen=True)
class RowEntropy:
    """The Shannon entropy, in nats, of the attention over the keys that take part.

    Attributes:
        row: layer, head and query position.
        keys: the key positions that the mask lets take part.
    """

    row: Row
    keys: tuple[int, ...]

    def value(self, scores: Float[Tensor, "... S"]) -> Float[Tensor, "..."]:
        """Return H(softmax a).

        Args:
            scores: the scores of the row, shape [..., S].
        """
        logs = scores[..., self.keys].log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)

    def gradient(self, scores: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """Return −s_j (log s_j + H).

        Args:
            scores: the scores of the row, shape [..., S].
        """
        logs = scores[..., self.keys].log_softmax(-1)
        s = logs.exp()
        H = -(s * logs).sum(-1, keepdim=True)
        return _spread(self.keys, -s * (logs + H), scores)


@dataclass(frozen=True)
class Logit:
    """One output of the model, by its index."""

    index: int


@dataclass(frozen=True)
class LargestLogit:
    """The largest of all outputs except those listed in `but`: the rest of a vocabulary beside a few named tokens."""

    but: tuple[int, ...]

    def value(self, logits: Float[Tensor, "... C"]) -> Float[Tensor, "..."]:
        """Return the maximum over all c not in `but`; −∞ if there is none.

        Args:
            logits: the outputs, shape [..., C].
        """
        kept = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
        kept[list(self.but)] = False
        return torch.where(kept, logits, -torch.inf).amax(-1)


@dataclass(frozen=True)
class Standing:
    """How far an output is above 0 and among the k largest of a group: positive iff it is both.

    With y the output and y_j its rivals this is min(y, the k-th smallest of y − y_j): at most k − 1 rivals are at least
    as large as y iff the k-th smallest difference is positive. With k rivals or fewer than that, only y counts.

    Attributes:
        index: the output.
        rivals: the other outputs of the group.
        k: how many are the largest.

    Example:
        >>> Standing(0, (1, 2), 1).value(torch.tensor([0.5, 0.25, 2.0])).item()  # below output 2
        -1.5
        >>> Standing(0, (1, 2), 2).value(torch.tensor([0.5, 0.25, 2.0])).item()  # above output 1
        0.25
    """

    index: int
    rivals: tuple[int, ...]
    k: int

    def value(self, logits: Float[Tensor, "... C"]) -> Float[Tensor, "..."]:
        """Return min(y, k-th smallest y − y_j); differentiable.

        Args:
            logits: the outputs, shape [..., C].
        """
        own = logits[..., self.index]
        if self.k > len(self.rivals):
            return own
        gaps = own[..., None] - logits[..., list(self.rivals)]
        return torch.minimum(own, gaps.kthvalue(self.k, dim=-1).values)


AttentionAtom: TypeAlias = Score | LogSumExp | RowEntropy
OutputAtom: TypeAlias = Logit | LargestLogit | Standing | Probability | Divergence
Atom: TypeAlias = AttentionAtom | OutputAtom


def _spread(
    keys: tuple[int, ...], values: Float[Tensor, "... K"], like: Float[Tensor, "... S"]
) -> Float[Tensor, "... S"]:
    out = torch.zeros_like(like)
    out[..., list(keys)] = values
    return out


@dataclass(frozen=True)
class Functional:
    """A scalar Σ weight · atom + constant of scores and outputs, whose sign or range a query asks about.

    Attributes:
        terms: pairs of a weight and an atom (`Score`, `LogSumExp`, `RowEntropy`, `Logit`, `LargestLogit`,
            `Standing`, `Probability`, `Divergence`).
        constant: is added to the sum.
        name: how messages and reports write it.

    Raises:
        QueryError: if a weight or the constant is not finite.

    Example:
        >>> row = Row(layer=0, head=1, position=3)
        >>> margin = Functional(((1.0, Score(row, 2)), (-1.0, Score(row, 0))), constant=0.5)
        >>> margin.value({row: torch.tensor([1.0, 0.0, 4.0])}).item()  # 4 − 1 + 0.5
        3.5
        >>> margin.gradient({row: torch.tensor([1.0, 0.0, 4.0])})[row].tolist()
        [-1.0, 0.0, 1.0]
    """

    terms: tuple[tuple[float, Atom], ...]
    constant: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if not all(math.isfinite(number) for number in (self.constant, *(w for w, _ in self.terms))):
            raise QueryError(f"functional {self.name!r} has a weight or constant that is not finite")
        if len(self.terms) > 1 and self.standing is not None:
            raise QueryError(f"functional {self.name!r} adds something to a standing: it must be alone")
        if any(weight == 0.0 for weight, _ in self.terms):
            object.__setattr__(self, "terms", tuple(term for term in self.terms if term[0] != 0.0))

    def __str__(self) -> str:
        return self.name

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of attention that it reads, in the order of first use."""
        return tuple(dict.fromkeys(atom.row for _, atom in self.terms if not isinstance(atom, OutputAtom)))

    @cached_property
    def logits(self) -> tuple[int, ...]:
        """The outputs that it reads by index; of a standing the one that is compared."""
        named: list[int] = []
        for _, atom in self.terms:
            if isinstance(atom, Logit | Standing):
                named.append(atom.index)
            elif isinstance(atom, Probability | Divergence):
                named += atom.outputs
        return tuple(dict.fromkeys(named))

    @property
    def standing(self) -> tuple[float, Standing] | None:
        """Its weight and its standing, if it is one; None for all others."""
        return next(((weight, atom) for weight, atom in self.terms if isinstance(atom, Standing)), None)

    @cached_property
    def is_linear(self) -> bool:
        """Whether it is affine in scores and logits, so that its Taylor remainder is 0."""
        return all(isinstance(atom, Score | Logit) for _, atom in self.terms)

    def value(self, scores: Scores, logits: Float[Tensor, "... C"] | None = None) -> Float[Tensor, "..."]:
        """Evaluate it on concrete scores and logits; differentiable.

        Args:
            scores: pre-softmax scores of every row that it reads.
            logits: the outputs, if it reads any.

        Raises:
            QueryError: if something that it reads is not given.
        """
        total = self._zero(scores, logits) + self.constant
        for weight, atom in self.terms:
            if isinstance(atom, Logit):
                total = total + weight * self._needed(logits)[..., atom.index]
            elif isinstance(atom, LargestLogit | Standing | Probability | Divergence):
                total = total + weight * atom.value(self._needed(logits))
            else:
                total = total + weight * atom.value(self._row(scores, atom.row))
        return total

    def gradient(self, scores: Scores) -> dict[Row, Float[Tensor, "... S"]]:
        """Return its gradient with respect to the scores of each of its rows, in closed form.

        Args:
            scores: pre-softmax scores of every row that it reads.
        """
        out: dict[Row, Tensor] = {}
        for weight, atom in self.terms:
            if not isinstance(atom, OutputAtom):
                part = weight * atom.gradient(self._row(scores, atom.row))
                out[atom.row] = out[atom.row] + part if atom.row in out else part
        return out

    def logit_gradient(self, n_classes: int) -> Float[Tensor, " C"]:
        """Return its gradient with respect to the logits, which is constant; terms that are not linear are left out.

        Args:
            n_classes: the number of outputs.
        """
        out = torch.zeros(n_classes, dtype=torch.float64)
        for weight, atom in self.terms:
            if isinstance(atom, Logit):
                out[atom.index] += weight
        return out

    def scaled(self, factor: float) -> "Functional":
        """Return factor · self.

        Args:
            factor: what weights and constant are multiplied by.
        """
        terms = tuple((factor * weight, atom) for weight, atom in self.terms)
        return Functional(terms, factor * self.constant, f"{factor:g}*({self.name})")

    def __add__(self, other: "Functional") -> "Functional":
        return Functional(
            self.terms + other.terms, self.constant + other.constant, f"{self.name} + {other.name}"
        )

    def _row(self, scores: Scores, row: Row) -> Float[Tensor, "... S"]:
        if row not in scores:
            raise QueryError(f"functional {self.name!r} needs the scores of row {row}, which are not given")
        return scores[row]

    def _needed(self, logits: Float[Tensor, "... C"] | None) -> Float[Tensor, "... C"]:
        if logits is None:
            raise QueryError(f"functional {self.name!r} is about outputs and needs logits")
        return logits

    def _zero(self, scores: Scores, logits: Float[Tensor, "... C"] | None) -> Float[Tensor, "..."]:
        """Return a zero of the batch shape, so that constant functionals broadcast like the others."""
        for tensor in (*scores.values(), *(() if logits is None else (logits,))):
            return torch.zeros(tensor.shape[:-1], dtype=tensor.dtype, device=tensor.device)
        return torch.zeros((), dtype=torch.float64)


def margin(row: Row, winner: int, loser: int) -> Functional:
    """Return a_winner − a_loser: it is positive if and only if the winner gets more attention (`thm:margin_sound`).

    Args:
        row: layer, head and query position.
        winner: the key that should get more attention.
        loser: the key that should get less.
    """
    terms = ((1.0, Score(row, winner)), (-1.0, Score(row, loser)))
    return Functional(terms, name=f"{row}: a[{winner}] - a[{loser}]")


def group_log_ratio(row: Row, plus: tuple[int, ...], minus: tuple[int, ...]) -> Functional:
    """Return log(mass on `plus` / mass on `minus`); for single keys this is the score margin.

    Args:
        row: layer, head and query position.
        plus: keys of the first group.
        minus: keys of the second group.
    """
    return Functional(
        ((1.0, _group(row, plus)), (-1.0, _group(row, minus))),
        name=f"{row}: log mass{list(plus)} - log mass{list(minus)}",
    )


def _group(row: Row, keys: tuple[int, ...]) -> Score | LogSumExp:
    return Score(row, keys[0]) if len(keys) == 1 else LogSumExp(row, keys)


def logit_margin(winner: int, loser: int) -> Functional:
    """Return Logit(winner) − Logit(loser).

    Args:
        winner: the output that should be larger.
        loser: the one that should be smaller.
    """
    return Functional(((1.0, Logit(winner)), (-1.0, Logit(loser))), name=f"logit[{winner}] - logit[{loser}]")


def tail_margin(winner: int, but: tuple[int, ...]) -> Functional:
    """Return Logit(winner) − the largest output that is neither the winner nor one of `but`.

    Args:
        winner: the index of the answer.
        but: outputs that have a margin of their own.
    """
    left = tuple(sorted({winner, *but}))
    name = f"logit[{winner}] - largest logit but {len(left)}"
    return Functional(((1.0, Logit(winner)), (-1.0, LargestLogit(left))), name=name)
