"""Metrics of effects that are distributions over outputs: the probability of one, and a divergence of two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prooflens.errors import QueryError
from prooflens.queries.base import Claim, Condition, Query, Sense, Setting, make_claim
from prooflens.queries.distributions import Divergence, Probability
from prooflens.queries.functionals import Functional
from prooflens.queries.rows import Role


@dataclass(frozen=True)
class DistributionQuery(Query):
    """Measure a distribution over outputs: the probability of one of them, or how far an edit's is from the model's.

    Attributes:
        index: the output whose probability is measured; None for the divergence.
        among: the outputs that share the probability; None for all, which a divergence cannot be measured on.

    Example:
        >>> str(DistributionQuery(3, (3, 5))), str(DistributionQuery(3, None)), str(DistributionQuery(None, (3, 5)))
        ('prob(3|3,5)', 'prob(3)', 'kl(3,5)')
    """

    index: int | Role | None
    among: tuple[int | Role, ...] | None = None

    def __post_init__(self) -> None:
        if self.index is None and self.among is None:
            raise QueryError("a divergence is measured on named outputs: write kl(3,5)")
        if self.among is None:
            return
        if len(set(self.among)) < len(self.among):
            raise QueryError(f"{self} names an output twice: name it once")
        if len(self.among) < 2:
            raise QueryError(f"{self} is the same whatever the model does: name at least two outputs")
        if self.index is not None and self.index not in self.among:
            raise QueryError(
                f"{self} is 0 whatever the model does: {_named(self.index)} must be one of the outputs"
            )

    def __str__(self) -> str:
        among = ",".join(map(_named, self.among or ()))
        if self.index is None:
            return f"kl({among})"
        return f"prob({_named(self.index)}{'|' if among else ''}{among})"

    @property
    def unit(self) -> str:
        """Nats of a divergence, or a probability."""
        return "nats" if self.index is None else "probability"

    @property
    def named(self) -> list[int | Role]:
        """All outputs that it names."""
        return [*([] if self.index is None else [self.index]), *(self.among or ())]

    def of_outputs(self, found: Sequence[int]) -> DistributionQuery:
        """Return the query with outputs in place of slots.

        Args:
            found: the outputs, in the order of `named`.
        """
        start = 0 if self.index is None else 1
        among = None if self.among is None else tuple(found[start:])
        return DistributionQuery(found[0] if start else None, among)

    def atom(self, outputs: int) -> Probability | Divergence:
        """Return what is measured on one model; its divergence is that from itself.

        Args:
            outputs: how many outputs a model has.

        Raises:
            QueryError: if an output is named that there is not, or by a slot that was not looked up.
        """
        for index in self.named:
            if isinstance(index, Role):
                raise QueryError(
                    f"{{{index}}} is a slot of a template, and this prompt is not a template's member"
                )
            if index >= outputs:
                raise QueryError(f"there is no output {index}: the model has {outputs}")
        among = tuple(range(outputs)) if self.among is None else tuple(map(_index, self.among))
        return Divergence(among, among) if self.index is None else Probability(_index(self.index), among)

    def bind(self, setting: Setting, heads: str | None = None) -> list[Claim]:
        """Return one claim, about no row of attention: its range on one model.

        Args:
            setting: the prompt in the model; it needs the clean logits.
            heads: ignored, since the metric is about outputs.
        """
        atom = self.atom(0 if setting.logits is None else len(setting.logits))
        condition = Condition(Functional(((1.0, atom),), 0.0, str(self)), Sense.RANGE)
        return [make_claim(self, setting, (), [condition])]


def _index(output: int | Role) -> int:
    assert isinstance(output, int)
    return output


def _named(output: int | Role) -> str:
    return f"{{{output}}}" if isinstance(output, Role) else str(output)
