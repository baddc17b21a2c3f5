"""The difference of a form between two models that share factors: f(M) − f(M′), all of it at once.

    f − f′ = f(0) − f′(0) + (a − a′)·α + Σ_s v_s·r_s − Σ_s v′_s·r′_s,      α in the box of both.

Linear parts are subtracted before norms are taken, and second orders are collected in one Hessian H − H′. Up to the
first edited step both walks have the same sites, and a site's remainder r_s is *one* function of the input: there the
covectors are subtracted, (v_s − v′_s)·r_s, before the remainder is bounded. The first walk leaves its covectors at
shared sites (`Meeting`), the second adds its own, those of −f′. The rounding of a covector is that of each by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.protocol import Workspace
from prooflens.engines.taylor.chain import Chain, Fork
from prooflens.engines.taylor.hessian import Hessian, HigherOrderBound, hessian_batch
from prooflens.engines.taylor.parts import Collected, FormBatch, assembled, collect
from prooflens.engines.taylor.remainder_bounds import Eigenvalues, Supports
from prooflens.engines.taylor.segments import Segment, asked_segments
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.numerics import down, up
from prooflens.problem import Problem

AT_ONCE = 32
"""How many forms are walked back together."""

Key = tuple[int, str, int]
"""A chain, the name of a site (none for the mixing), and a token."""


@dataclass(frozen=True)
class Shared:
    """What two programs have in common, from the input on.

    Attributes:
        chains: how many chains are the same, mixing included.
        front: in the next chain, the outputs of the steps before the first that differs.
    """

    chains: int
    front: frozenset[str]

    @classmethod
    def of(cls, first: list[Segment], second: list[Segment]) -> Shared:
        """Compare the chains of two programs, weights included."""
        chains = 0
        for one, other in zip(first, second, strict=True):
            if not alike(one, other):
                same = itertools.takewhile(
                    lambda pair: alike(*pair), zip(one.steps, other.steps, strict=False)
                )
                return cls(chains, frozenset(step.out for step, _ in same))
            chains += 1
        return cls(chains, frozenset())

    def __contains__(self, place: tuple[int, str]) -> bool:
        """Say whether a site of a chain is shared, or its mixing, which has no name."""
        number, name = place
        return number < self.chains or (number == self.chains and name in self.front)


@dataclass(eq=False)
class Meeting:
    """Covectors of the first walk at sites that both walks share, until those of the second come.

    Attributes:
        shared: what is shared.
        waiting: covectors of the first walk.
        second: whether the second walk is under way.
        numbers: the chains of the walk by their identity.
    """

    shared: Shared
    waiting: dict[Key, Tensor] = field(default_factory=dict)
    second: bool = False
    numbers: dict[int, int] = field(default_factory=dict)

    def enter(self, walk: TaylorWalk, second: bool) -> None:
        """Be told whose covectors come next."""
        self.second = second
        self.numbers = {id(chain): number for number, chain in enumerate(walk.chains)}

    def at(
        self,
        key: tuple[Chain, str, int],
        v: Float[Tensor, "F n"],
        own: Float[Tensor, "F 2"],
        bound: Callable[[Float[Tensor, "F n"]], Float[Tensor, "F 2"]],
    ) -> Float[Tensor, "F 2"]:
        """Leave covectors at a shared site, or bound those of both walks; elsewhere bound these.

        Args:
            key: the chain, the name of the site, and the token.
            v: covectors of this walk.
            own: what each walk's own rounding counts at a shared site.
            bound: bounds covectors.
        """
        chain, name, t = key
        number = self.numbers[id(chain)]
        if (number, name) not in self.shared:
            return bound(v)
        place = (number, name, t)
        if not self.second:
            self.waiting[place] = self.waiting[place] + v if place in self.waiting else v
            return own
        before = self.waiting.pop(place, None)
        return own + bound(v if before is None else before + v)


class JointEigenvalues(Eigenvalues):
    """Bound remainders of both walks by one eigenvalue per site, at shared sites that of the difference.

    Args:
        meeting: where covectors meet.
    """

    may_stop = False

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Bound v·r and −v·r at a norm or a network, or leave v there.

        Args:
            chain: the chain that the covectors walk.
            name: the norm or network.
            v: covectors, shape [F, n].
            t: the token.
        """
        plain = super().site
        return self.meeting.at(
            (chain, name, t), v, _noise(chain, name, v, t), lambda w: plain(chain, name, w, t)
        )

    def mixing(self, chain: Chain, place: int, u: Float[Tensor, "F d"]) -> Float[Tensor, "F 2"]:
        """Bound u·r and −u·r at the mixing of the chain, or leave u there; its rounding is counted by the walk."""
        plain = super().mixing
        nothing = u.new_zeros(len(u), 2)
        return self.meeting.at((chain, "", place), u, nothing, lambda w: plain(chain, place, w))


class JointHessian(Hessian):
    """Collect the second orders of both walks in one matrix; at shared sites bound the rest of the difference.

    Args:
        half_widths: half-widths of the factors, shape [p].
        forms: how many forms there are.
        meeting: where covectors meet.
    """

    def __init__(self, half_widths: Float[Tensor, " p"], forms: int, meeting: Meeting) -> None:
        super().__init__(half_widths, forms)
        self.meeting = meeting

    def site(self, chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Keep the site's second order for the root, and bound what is beyond it, or leave v there.

        Args:
            chain: the chain that the covectors walk.
            name: the norm or network.
            v: covectors, shape [F, n].
            t: the token.
        """
        super().site(chain, name, v, t)
        rest = HigherOrderBound()
        return self.meeting.at(
            (chain, name, t), v, _noise(chain, name, v, t), lambda w: rest.site(chain, name, w, t)
        )

    def mixing(self, chain: Chain, place: int, u: Float[Tensor, "F d"]) -> Float[Tensor, "F 2"]:
        """Add the mixing's second order, and bound what is beyond it, or leave u there."""
        super().mixing(chain, place, u)
        rest, nothing = HigherOrderBound(), u.new_zeros(len(u), 2)
        return self.meeting.at((chain, "", place), u, nothing, lambda w: rest.mixing(chain, place, w))


def _noise(chain: Chain, name: str, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
    return chain.sites[name].noise(v, t)[:, None].expand(-1, 2)


@dataclass(eq=False)
class _Chunk:
    """Some forms of both models, how they are read, and what each walk collects of them by each reading."""

    forms: Forms
    other: Forms
    readings: list[Supports]
    collected: list[list[Collected]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class FirstWalk:
    """What an effect takes from the walk through the unedited model; other edits of it may take the same.

    Attributes:
        problem: the model and the region.
        forms: what was asked.
        half_widths: half-widths of the factors, shape [p].
        roots: what tells where its chains start.
        fork: where the walk through the edited model goes on; None if they share no chain.
        collected: what it knows of the forms, where only ellipsoids were asked; None where covectors went back.
    """

    problem: Problem
    forms: Forms
    half_widths: Float[Tensor, " p"]
    roots: list[tuple[Tensor, Tensor]]
    fork: Fork | None
    collected: list[list[Collected]] | None

    def serves(self, problem: Problem, forms: Forms, shared: Shared) -> bool:
        """Say whether an effect may do without a first walk of its own.

        Args:
            problem: the model and the region.
            forms: what is asked.
            shared: what both models have in common.
        """
        near = self.fork is not None and len(self.fork.chains) <= shared.chains
        return self.problem is problem and near and alike(self.forms, forms)


WalkOf = Callable[[Problem, Tensor | None, int, Fork | None], TaylorWalk]
"""Walks a model forward: by factors of given half-widths if there are any, with a fork at a chain, or from a fork."""

FIRST = "taylor, first walk of effects"
"""Under which name a workspace holds a `FirstWalk`."""


@dataclass(eq=False)
class EffectWalk:
    """Two walks, one after the other, and what they say together.

    The second goes on where the models part. Where only ellipsoids are asked, the first may serve several edits.

    Attributes:
        problem: the model and the region.
        edited: the edited model and the same region.
        forms: what is asked of the model.
        other: what is asked of the edited one, and subtracted.
        chunks: the forms in parts, once the first walk is done.
    """

    problem: Problem
    edited: Problem
    forms: Forms
    other: Forms
    chunks: list[_Chunk] = field(default_factory=list)

    def run(self, walk_of: WalkOf, workspace: Workspace | None = None) -> FormBatch | None:
        """Return bounds of all differences; None if the two walks have other factors.

        Args:
            walk_of: walks a model forward.
            workspace: where the first walk may be kept for other edits; None for nowhere.
        """
        shared = Shared.of(*(asked_segments(p, self.forms) for p in (self.problem, self.edited)))
        first = self._first(walk_of, shared, workspace)
        walk = walk_of(self.edited, first.half_widths, -1, first.fork and first.fork.copied())
        if not torch.equal(first.half_widths, walk.chains[0].root.half_widths):
            return None
        self._collect(walk, self.edited, second=True)
        # A remainder is one function if both walks expand it at the same point, in the same factors.
        same = _count_same(first.roots, _prints(walk))
        parts = [self._assembled(chunk, same, first.half_widths) for chunk in self.chunks]
        return FormBatch(*(torch.cat(side) for side in zip(*parts, strict=True)))

    def _first(self, walk_of: WalkOf, shared: Shared, workspace: Workspace | None) -> FirstWalk:
        """Walk through the model, or take what a walk through it left for other edits."""
        held = None if workspace is None else workspace.look(FIRST)
        known = isinstance(held, FirstWalk) and held.serves(self.problem, self.forms, shared)
        if isinstance(held, FirstWalk) and known and held.collected is not None:
            self._prepare([Supports()] for _ in held.collected)
            for chunk, found in zip(self.chunks, held.collected, strict=True):
                chunk.collected.append(found)
            return held
        walk = walk_of(self.problem, None, shared.chains or -1, None)
        self._prepare(self._readings(walk, shared))
        self._collect(walk, self.problem, second=False)
        collected = None if walk.kept is None else [chunk.collected[0] for chunk in self.chunks]
        widths = walk.chains[0].root.half_widths
        first = FirstWalk(self.problem, self.forms, widths, _prints(walk), walk.fork, collected)
        if workspace is not None and collected is not None:
            workspace.put(FIRST, self.problem, first)
        return first

    def _readings(self, walk: TaylorWalk, shared: Shared) -> Iterator[list[Supports]]:
        """Yield how remainders are bounded, chunk by chunk."""
        size, widths = self.forms.size, walk.chains[0].root.half_widths
        deep = walk.kept is None
        exact = deep and not walk.quick and size <= hessian_batch(walk.memory, len(widths))
        for start in range(0, size, AT_ONCE):
            readings: list[Supports] = [Supports()]
            if deep:
                readings += [Eigenvalues(), JointEigenvalues(Meeting(shared))]
            if exact:
                readings.append(JointHessian(widths, min(AT_ONCE, size - start), Meeting(shared)))
            yield readings

    def _prepare(self, readings: Iterable[list[Supports]]) -> None:
        """Cut the forms into chunks, each with its readings."""
        for chosen, some in zip(torch.arange(self.forms.size).split(AT_ONCE), readings, strict=True):
            self.chunks.append(_Chunk(self.forms.select(chosen), self.other.select(chosen), some))

    def _collect(self, walk: TaylorWalk, problem: Problem, second: bool) -> None:
        for number, chunk in enumerate(self.chunks):
            forms = chunk.other.negated() if second else chunk.forms
            found = []
            for reading in chunk.readings:
                if isinstance(reading, JointEigenvalues | JointHessian):
                    reading.meeting.enter(walk, second)
                found.append(collect(walk, problem, forms, reading))
            chunk.collected.append(found)
            walk.progress("effects", (number + 1) / len(self.chunks))

    def _assembled(self, chunk: _Chunk, same: int, half_widths: Float[Tensor, " p"]) -> FormBatch:
        """The best of what the readings say together, and of what they say of both models alone."""
        together: list[FormBatch] = []
        alone: tuple[list[FormBatch], list[FormBatch]] = ([], [])
        for reading, first, second in zip(chunk.readings, *chunk.collected, strict=True):
            if isinstance(reading, JointEigenvalues | JointHessian):
                meeting = reading.meeting
                if meeting.waiting or meeting.shared.chains + bool(meeting.shared.front) > same:
                    continue
            else:
                for held, part in zip(alone, (first, second), strict=True):
                    held.append(assembled(part, half_widths, self.problem, reading))
            together.append(assembled(first.plus(second), half_widths, self.problem, reading))
        one, other = (_best(held) for held in alone)
        apart = together[-1]._replace(lower=down(one.lower + other.lower), upper=up(one.upper + other.upper))
        return _best([*together, apart])


def _best(batches: list[FormBatch]) -> FormBatch:
    """The tightest of several bounds of the same forms, with the corners of the last of them."""
    lower, upper = (torch.stack([getattr(batch, side) for batch in batches]) for side in ("lower", "upper"))
    return batches[-1]._replace(lower=lower.amax(0), upper=upper.amin(0))


def _prints(walk: TaylorWalk) -> list[tuple[Tensor, Tensor]]:
    """What tells whether two walks expand at the same points: centres, and sums of linear parts over factors."""
    return [(chain.root.u, chain.root.reads) for chain in walk.chains]


def _count_same(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> int:
    """How many chains, from the first, start at the same centre with the same linear parts in both walks."""
    found = 0
    for one, other in zip(first, second, strict=True):
        if not all(map(torch.equal, one, other)):
            break
        found += 1
    return found


def alike(one: object, other: object) -> bool:
    """Say whether two steps, or lists and parts of steps, are the same map, weights included."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if is_dataclass(one) and type(one) is type(other):
        return all(alike(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return bool(one == other)
