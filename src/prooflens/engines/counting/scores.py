"""Queries and keys of a whole vocabulary at layer 0, and how far computed scores are from the real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.engines.counting.enclosures import Enclosure, enclose, more, norm_upper
from prooflens.errors import ModelError, QueryError
from prooflens.models import INPUT, Transformer, scores_name
from prooflens.models.held import edits_first_scores
from prooflens.models.knockouts import check_rows
from prooflens.models.sites import AnyStep, Rotary, Scores, Shift
from prooflens.numerics import check_arithmetic, gamma

TILE_ELEMENTS = 2**24
"""How many numbers one step of the walk from tokens to queries and keys may hold."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """Queries or keys of some tokens at one position, of one head.

    Attributes:
        middle: computed vectors, shape [T, d_h].
        length: an upper bound of ‖middle‖₂ per token.
        error: an upper bound of ‖real − middle‖₂ per token.
    """

    middle: Float[Tensor, "T c"]
    length: Float[Tensor, " T"]
    error: Float[Tensor, " T"]

    def of(self, tokens: Int[Tensor, " N"]) -> Vectors:
        """Return the vectors of some of the tokens."""
        return Vectors(self.middle[tokens], self.length[tokens], self.error[tokens])


class FirstScores:
    """The scores a_ij(t_i, t_j) of layer 0 for prompts of one length.

    The cap of scores, c·tanh(a/c), is left out: it is increasing, so it changes no order.

    Args:
        model: a float64 model with a vocabulary and attention in its first block.
        length: n, how many tokens prompts have.
        padding: True at real tokens; None if all are.

    Raises:
        ModelError: if the first scores of the model are no function of two tokens and their places.
    """

    def __init__(self, model: Transformer, length: int, padding: Bool[Tensor, " S"] | None = None) -> None:
        refuse(model, length)
        check_arithmetic(model.device)
        self.model, self.length = model, length
        name = scores_name(0) + ("_uncapped" if model.architecture.score_cap is not None else "")
        self.value_name = "blocks.0.attn.hook_v"
        program = model.program(length, (name, self.value_name), padding)
        (step,) = (step for step in program.steps if isinstance(step, Scores))
        self.step = step
        self.query_name, self.key_name = step.inputs
        self.program = program.slice((*step.inputs, self.value_name))
        self.mask = step.mask
        self._held: dict[tuple[str, int, int], Vectors] = {}
        self._unplaced: dict[tuple[str, int | None], Enclosure] = {}

    @property
    def vocabulary(self) -> int:
        """V, the number of tokens."""
        assert self.model.architecture.d_vocab is not None
        return self.model.architecture.d_vocab

    @property
    def n_heads(self) -> int:
        """The number of query heads."""
        return self.model.architecture.n_heads

    def visible(self, position: int) -> list[int]:
        """Return the keys that a query position attends to."""
        keys: list[int] = self.mask[position].nonzero()[:, 0].tolist()
        return keys

    def queries(self, head: int, position: int) -> Vectors:
        """Return the queries of all tokens at a position."""
        return self._vectors(self.query_name, head, position)

    def keys(self, head: int, position: int) -> Vectors:
        """Return the keys of all tokens at a position, of the key head that a query head reads."""
        architecture = self.model.architecture
        return self._vectors(self.key_name, head * architecture.kv_heads // architecture.n_heads, position)

    def values(self, head: int, position: int) -> Vectors:
        """Return the values of all tokens at a position, of the value head that a query head reads."""
        architecture = self.model.architecture
        return self._vectors(self.value_name, head * architecture.kv_heads // architecture.n_heads, position)

    def forget(self) -> None:
        """Drop the vectors that are held."""
        self._held.clear()
        self._unplaced.clear()

    def bias(self, head: int, position: int, key: int) -> float:
        """Return what the model adds to a score, whatever the tokens."""
        return 0.0 if self.step.bias is None else float(self.step.bias[head, position, key])

    def errors(
        self, queries: Vectors, keys: Sequence[Vectors], biases: Sequence[float]
    ) -> Float[Tensor, " T"]:
        """Return E per query: all its computed scores, with one number added to each, err by at most E.

        Args:
            queries: vectors of query tokens.
            keys: vectors of keys, one entry per position.
            biases: the numbers that are added to the scores of each position, in absolute value.
        """
        largest = max((abs(bias) for bias in biases), default=0.0)
        return product_errors(queries, keys, abs(self.step.scale), largest)

    def _vectors(self, name: str, head: int, position: int) -> Vectors:
        """Walk every token of the vocabulary to a value of the program at one position."""
        if (name, head, position) not in self._held:
            self._walk(name, position)
        return self._held[name, head, position]

    def _walk(self, name: str, position: int) -> None:
        """Enclose the vectors of all heads at one position."""
        program = self.program.slice((name,))
        placed = next(
            (i for i, step in enumerate(program.steps) if isinstance(step, Rotary | Shift)),
            len(program.steps),
        )
        moves = "embed.positions" in self.model.weights
        start = position if moves else None
        if (name, start) not in self._unplaced:
            parts = [self._enclose(program.steps[:placed], ids, position) for ids in self._tiles()]
            middle, radius = (torch.cat(ends) for ends in zip(*parts, strict=True))
            self._unplaced[name, start] = Enclosure(middle, radius)
        found = self._unplaced[name, start]
        for step in program.steps[placed:]:
            found = enclose(_at(step, position), found)
        if moves:
            del self._unplaced[name, start]
        middle, radius = (part[:, 0] for part in found)
        length, error = norm_upper(middle), norm_upper(radius)
        if not bool((length.isfinite() & error.isfinite()).all()):
            raise QueryError(
                f"{name} of {self.model.name} is not finite for some tokens: nothing can be counted"
            )
        for head in range(middle.shape[1]):
            self._held[name, head, position] = Vectors(
                *(part[:, head].contiguous() for part in (middle, length, error))
            )

    def _tiles(self) -> Iterator[Int[Tensor, " T"]]:
        size = max(1, TILE_ELEMENTS // (self.length * self.model.architecture.d_model))
        yield from torch.arange(self.vocabulary, device=self.model.device).split(size)

    def _enclose(self, steps: Sequence[AnyStep], ids: Int[Tensor, " T"], position: int) -> Enclosure:
        """Walk some tokens through steps that know no positions; the embedding is a float64 vector as it is."""
        with torch.no_grad():
            x = self.model.embed(ids[:, None].expand(-1, position + 1))[:, position:]
            found = {INPUT: Enclosure(x, torch.zeros_like(x))}
            last = INPUT
            for step in steps:
                found[step.out] = enclose(step, *(found[name] for name in step.inputs))
                last = step.out
        return found[last]


def product_errors(
    left: Vectors, right: Sequence[Vectors], scale: float, added: float
) -> Float[Tensor, " T"]:
    """Return E per vector on the left: computed numbers scale · (l·r) + b for all r on the right err by at most E.

    |fl(l̂·r̂) − l·r| ≤ γ|l̂||r̂| + |δl||r̂| + |l̂||δr| + |δl||δr| by Cauchy and Schwarz; the scale and two sums round once
    each, relative to what they yield.

    Args:
        left: vectors with their errors.
        right: vectors that they are multiplied by.
        scale: the factor, not negative.
        added: the largest |b|, and the sum of both where two numbers are added.
    """
    length = max(float(some.length.max()) for some in right)
    error = max(float(some.error.max()) for some in right)
    size = left.length * length
    spread = left.error * length + left.length * error + left.error * error
    rounded = gamma(left.middle.shape[-1] + 8) * size
    return more(more(more(rounded + spread) * scale) + gamma(4) * added)


def _at(step: AnyStep, position: int) -> AnyStep:
    """Return what a step does at one position."""
    one = slice(position, position + 1)
    if isinstance(step, Rotary):
        return replace(step, cos=step.cos[one], sin=step.sin[one])
    return replace(step, offset=step.offset[one]) if isinstance(step, Shift) else step


def refuse(model: Transformer, length: int) -> None:
    """Raise an error, in one line, if layer 0 of a model cannot be counted.

    Args:
        model: the model.
        length: how many tokens prompts have.
    """
    architecture = model.architecture
    if architecture.d_vocab is None or "embed.tokens" not in model.weights:
        raise ModelError(f"{model.name} reads no tokens: there is no vocabulary to count over")
    if not architecture.has_attention:
        raise ModelError(f"{model.name} has no attention in its first block: there are no scores to count")
    check_rows(model.weights, [0])
    if edits_first_scores(model.weights) or architecture.free:
        raise ModelError(f"parts of {model.name} are held, or patterns frozen: ask about the model itself")
    if model.dtype != torch.float64:
        raise ModelError(f"{model.name} is in {model.dtype}: counts are proved in float64, load it as it is")
    if architecture.context is not None and length > architecture.context:
        raise QueryError(
            f"{model.name} reads at most {architecture.context} tokens: a length of {length} is too long"
        )
