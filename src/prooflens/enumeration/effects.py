"""Effects of edits over a family of prompts: every member through the model and through every edit of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prooflens.enumeration.claims import check_query
from prooflens.enumeration.distributions import LOGITS, MemberDistribution
from prooflens.enumeration.enumerate import bound_family, check_values
from prooflens.enumeration.tally import Margins, Tally
from prooflens.enumeration.walk import Plan, Walk
from prooflens.errors import ModelError, QueryError
from prooflens.families import Family, Given, Member, Shape
from prooflens.families.shapes import Numbers
from prooflens.memory import parse_memory
from prooflens.models import Prompt, Transformer, load
from prooflens.models.edits import edit
from prooflens.models.knockouts import check_tokens
from prooflens.models.tree import Runner
from prooflens.progress import Show, shown
from prooflens.queries import Beats, DistributionQuery, Query, parse_metric
from prooflens.queries.parse import metric_text
from prooflens.results.effects import FamilyEffect, FamilyEffects
from prooflens.results.families import ENUMERATED, ESTIMATED
from prooflens.results.frame import EditedModel
from prooflens.verdicts.effect import check_thresholds
from prooflens.verdicts.pair import Edits, check_metric, edit_text
from prooflens.verdicts.patched import patches
from prooflens.verdicts.question import as_prompt, source_of
from prooflens.verdicts.settings import checked_device


def family_effects(
    model: Transformer | str,
    edits: Sequence[Edits],
    prompts: Given,
    metric: str,
    *,
    necessary: float | None = None,
    faithful: float | None = None,
    sufficient: bool = False,
    patched: Prompt | str | None = None,
    sample: int | None = None,
    seed: int = 0,
    tree: bool = True,
    batch: int | None = None,
    memory: int | str | None = None,
    device: str | None = None,
    progress: Show = False,
) -> FamilyEffects:
    """Run every member of a family through a model and through edits of it, and count their effects exactly.

    Args:
        model: a model, or what `load` takes.
        edits: the edits, each asked about by itself: edited models, or what `edit` takes.
        prompts: a `Template`, `Swaps`, `Prompts`, or one of these in the model.
        metric: a difference of two outputs, as in `"logit{A}-logit{B}"`, a probability, as in `"prob({A})"` or
            `"prob({A}|{A},{B})"`, or a divergence, as in `"kl({A},{B})"`.
        necessary: count the members whose effect is at least this.
        faithful: count the members whose effect lies within ± this.
        sufficient: count the members on which both models give the same answer.
        patched: another prompt of the model: parts that are given by their names are held at their values on it (not at
            zero), and members are counted on which the edited model's metric has the sign that the member's metric
            has on the outputs of the model at that prompt.
        sample: run so many members drawn by chance instead of all: counts are then `estimated`.
        seed: of the sample.
        tree: run every prefix once; False runs every member by itself.
        batch: members of one batch; None for as many as fit.
        memory: bytes that a batch may take, as in "8GB"; None for what there is.
        device: where to run; None for where the model is.
        progress: show how far it is, or a function that is told.

    Returns:
        One row per edit: the least and the largest effect with their prompts, the mean, and the counts.

    Raises:
        ProoflensError: where an argument is not what it should be; the message says what to do.

    Example:
        >>> import prooflens as pl
        >>> template = pl.Template("When{A} and{B} met,{B} spoke to", A=pl.NAMES, B=pl.NAMES, differ=[("A", "B")])
        >>> pl.family_effects("smollm2", ["a17.h0"], template, "logit{A}-logit{B}")  # doctest: +SKIP
    """
    begin = time.perf_counter()
    check_thresholds(necessary, faithful)
    held = load(model) if device is None else load(model).to(checked_device(device))
    members = bound_family(prompts, held)
    query = parse_metric(metric, members.slots)
    if not isinstance(query, Beats | DistributionQuery):
        raise QueryError(
            f"over a family a difference of outputs or a distribution is measured, not {metric!r}: "
            "logit{A}-logit{B}, prob({A}), kl({A},{B})"
        )
    check_query(query)
    check_metric(held, query)
    other = None if patched is None else as_prompt(held, patched)
    if other is not None:
        check_patch(query, other)
        source = patched if isinstance(patched, str) else other
        edits = [patches(held, one, source) for one in edits]
    made = [one.to(held.device) if isinstance(one, Transformer) else edit(held, one) for one in edits]
    if not made:
        raise ModelError("no edit is given: give at least one, as in ['a9.h6']")
    for one in made:
        check_values(one)
    if wrong := [one.name for one in made if one.architecture != held.architecture]:
        raise ModelError(f"{wrong[0]} is no edit of {held.name}: their architectures differ")
    for one in made:
        check_tokens(one.weights, one.architecture.n_layers, max(members.lengths))
    plan = Plan(as_tree=tree, batch=batch, memory=parse_memory(memory))
    sums = [Sums(necessary, faithful) for _ in made]
    side = None if other is None else held(torch.tensor(other.ids, device=held.device))[-1]
    with shown(progress) as tell:
        tally = Tally({slot: len(words) for slot, words in members.words.items()}, 0, 1)
        walk = EffectWalk(
            members, [query], [tally], plan, None, tell, edited=made, sums=sums, answers=sufficient, side=side
        )
        walk.check()
        if sample is not None:
            walk.sample(sample, seed)
        else:
            walk.enumerate()
    rows = [one.row(held, other) for one, other in zip(sums, made, strict=True)]
    return FamilyEffects(
        members,
        tally.asked,
        ENUMERATED if sample is None else ESTIMATED,
        metric_text(query),
        necessary,
        faithful,
        time.perf_counter() - begin,
        source_of(model),
        rows,
        None if other is None else tuple(other.ids or ()),
    )


def check_patch(metric: Query, other: Prompt) -> None:
    """Raise a `QueryError` unless a metric over a family has a side, and the other prompt has tokens.

    Args:
        metric: what is measured.
        other: the prompt whose values are patched in.
    """
    if not isinstance(metric, Beats):
        raise QueryError(f"{metric} has no side: over a family patched is about a difference of outputs")
    if other.ids is None:
        raise QueryError(
            "the other prompt has no tokens: give a text, or a prompt that the model made of one"
        )


class MemberAnswers(NamedTuple):
    """Of some members: do both models give the same answer, and take the other prompt's side; None if not asked."""

    same: NDArray[np.bool_] | None
    sided: NDArray[np.bool_] | None


@dataclass(eq=False)
class Sums:
    """What is kept of one edit's effects as members come.

    Attributes:
        necessary: the least effect of a member that counts as one that the edit matters to; None to count none.
        faithful: the largest size of an effect that counts as none; None to count none.
    """

    necessary: float | None = None
    faithful: float | None = None
    asked: int = 0
    total: float = 0.0
    least: tuple[float, Member | None] = (np.inf, None)
    most: tuple[float, Member | None] = (-np.inf, None)
    large: int = 0
    small: int = 0
    same: int | None = None
    patched: int | None = None

    def add(
        self, effects: Margins, found: MemberAnswers, family: Family, shape: Shape, digits: Numbers
    ) -> None:
        """Count some members.

        Args:
            effects: their effects.
            found: whether both models give the same answer, and whether the other prompt's side is taken.
            family: the prompts.
            shape: the members' shape.
            digits: which members they are.
        """

        def at(place: int) -> Member:
            (member,) = family.members(shape, digits[place : place + 1])
            return member

        low, high = int(effects.argmin()), int(effects.argmax())
        if effects[low] < self.least[0]:
            self.least = float(effects[low]), at(low)
        if effects[high] > self.most[0]:
            self.most = float(effects[high]), at(high)
        self.asked += len(effects)
        self.total += float(effects.sum())
        self.large += 0 if self.necessary is None else int((effects >= self.necessary).sum())
        self.small += 0 if self.faithful is None else int((np.abs(effects) <= self.faithful).sum())
        if found.same is not None:
            self.same = (self.same or 0) + int(found.same.sum())
        if found.sided is not None:
            self.patched = (self.patched or 0) + int(found.sided.sum())

    def row(self, model: Transformer, edited: Transformer) -> FamilyEffect:
        """Return the counts of an edited model.

        Args:
            model: the model.
            edited: the edited one.
        """
        (low, least), (high, most) = self.least, self.most
        assert least is not None
        assert most is not None
        return FamilyEffect(
            EditedModel.of(model, edited, edited.name, edit_text(model, edited)),
            (low, least.text),
            (high, most.text),
            least.ids,
            most.ids,
            self.total / max(1, self.asked),
            None if self.necessary is None else self.large,
            None if self.faithful is None else self.small,
            self.same,
            self.patched,
        )


@dataclass(eq=False)
class EffectWalk(Walk):
    """A walk over a family that runs every member through a model and through edits of it.

    Its tally counts the model's own metric.

    Attributes:
        edited: the edited models.
        sums: what is kept of each.
        answers: whether answers are compared.
        side: the outputs of the model at another prompt, whose side is to be taken; None if that is not asked.
    """

    edited: Sequence[Transformer] = ()
    sums: Sequence[Sums] = ()
    answers: bool = False
    side: Float[Tensor, " C"] | None = None
    _runners: dict[int, list[Runner]] = field(default_factory=dict)

    def _judge(self, number: int, shape: Shape, digits: Numbers) -> list[tuple[Margins, NDArray[np.bool_]]]:
        """The metric of every member, and the effects of all edits on it, which are counted once all are known."""
        _, runner = self._compiled(number, shape)
        if number not in self._runners:
            again = [Runner.of(one, shape.n_tokens, (), True, self.plan.as_tree) for one in self.edited]
            self._runners = {number: again}
        ids = torch.as_tensor(shape.ids_of(digits)).to(self.family.model.device)
        clean, answer = self._measured(self.family.model, runner, ids)
        effects = []
        for model, other in zip(self.edited, self._runners[number], strict=True):
            metric, given = self._measured(model, other, ids)
            same = None if answer is None or given is None else (answer == given).cpu().numpy()
            told = MemberAnswers(same, self._sided(metric, ids))
            effects.append((self._effect(clean, metric).cpu().numpy(), told))
        for sums, (found, told) in zip(self.sums, effects, strict=True):
            sums.add(found, told, self.family, shape, digits)
        distribution = self._distribution
        values = (clean[:, 0] if distribution is None else distribution.metric(clean)).cpu().numpy()
        return [(values, values > 0.0)]

    @property
    def _distribution(self) -> MemberDistribution | None:
        assert self._held is not None
        return self._held[1][0].distribution

    def _effect(self, clean: Float[Tensor, "B n"], metric: Float[Tensor, "B n"]) -> Float[Tensor, " B"]:
        """The effect on some members, from what was measured on both models."""
        distribution = self._distribution
        return (clean - metric)[:, 0] if distribution is None else distribution.effect(clean, metric)

    def _sided(self, metric: Float[Tensor, "B n"], ids: Int[Tensor, "B S"]) -> NDArray[np.bool_] | None:
        """Whether the edited model's metric has the side of the other prompt, measured by each member's outputs."""
        if self.side is None:
            return None
        assert self._held is not None
        winner, loser = self._held[1][0].outputs[0].outputs(ids)
        assert loser is not None
        found: NDArray[np.bool_] = ((self.side[winner] - self.side[loser]) * metric[:, 0] > 0.0).cpu().numpy()
        return found

    def _measured(
        self, model: Transformer, runner: Runner, ids: Int[Tensor, "B S"]
    ) -> tuple[Float[Tensor, "B n"], Int[Tensor, " B"] | None]:
        """The metric of some members, or what a distribution is made of, and the model's answers if compared."""
        assert self._held is not None
        (claim,), reading = self._held[1], runner(ids)
        if claim.distribution is not None:
            assert reading.hidden is not None
            metric = claim.distribution.logs(model, reading.hidden, ids)
        else:
            metric = claim.judge(reading, model, ids)[0][:, None]
        if bool(metric.isnan().any()):
            raise ModelError(f"{model.name} gives no number on some members: its weights or inputs overflow")
        if not self.answers:
            return metric, None
        assert reading.hidden is not None
        weight, bias = model.head
        rows = reading.hidden.split(max(1, LOGITS // len(weight)))
        return metric, torch.cat([torch.nn.functional.linear(some, weight, bias).argmax(-1) for some in rows])
