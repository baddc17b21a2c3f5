r"""Engine `beta-crown`: `alpha-crown`, and cases by the signs of ReLUs where a sign stays open (Wang et al. 2021).

A ReLU whose input has both signs on the region lies between a chord and a line; on the part of the region where its
input h is ≥ 0 it is h, and where h ≤ 0 it is 0. Splitting k of them makes 2ᵏ parts that cover the region, each with
exact lines for the split ones. The signs themselves are known as well: on a part with σh ≥ 0, for every β ≥ 0,

    f ≤ f + β σ h,

so β may be added to the coefficient of h on its way back, and like τ it is searched for: whatever it is, the bound is
proved. The upper bound of f is the largest of all parts. Parts whose bound is below 0 are done; of each of the others
the ReLUs whose lines lose most at the corner where the bound is attained are split next.

All parts use the boxes of the whole region, so a part costs one walk back, and parts go back together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.costs import FORM_STEPS, Cost
from prooflens.engines.crown.alpha import Descent, Key, SlopeSearch, by_step, descend
from prooflens.engines.crown.engine import Crown, bound_on, repeated, starts
from prooflens.engines.crown.lines import mixed
from prooflens.engines.crown.steps import Curve
from prooflens.engines.crown.walk import LineWalk, Start, plain, signs
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineBase, EngineOptions, OutOfTimeError, register
from prooflens.engines.relaxations.interval_walk import form_program
from prooflens.models import INPUT
from prooflens.models.sites import Elementwise
from prooflens.numerics import up
from prooflens.problem import Problem

TOGETHER = 64
"""So many parts are made at once while there are few: several ReLUs are split in one round."""

RATE = 0.1
"""The first step of a search in a part, which begins where the search of the larger part ended."""

SEARCHES = 20
"""How many walks back and forth a step of a search is reckoned as."""

UNTIMED = 512
"""How many parts are bounded for a form where nobody says how long it may take."""

HARDLY = 0.01
"""How much what a ReLU's lines may lose counts beside what they lose at the worst corner."""

AT_A_TIME = 256
"""How many parts are split in one round."""


class Parts(NamedTuple):
    """Parts of the region, by their open ReLUs.

    Attributes:
        side: the sign of each ReLU's input; 0 where it is not split.
        tau: τ of the line below it.
        beta: β in units of `unit`.
        unit: the size of the ReLU's coefficient when it was split, so that steps of a search are of one size.
        best: the best bound so far.
    """

    side: Int[Tensor, "N K"]
    tau: Float[Tensor, "N K"]
    beta: Float[Tensor, "N K"]
    unit: Float[Tensor, "N K"]
    best: Float[Tensor, " N"]

    def chosen(self, some: Tensor) -> Parts:
        """Return some of the parts."""
        return Parts(*(field[some] for field in self))


def joined(some: Sequence[Parts]) -> Parts:
    """Return all parts of some lists.

    Args:
        some: lists of parts.
    """
    return Parts(*(torch.cat(fields) for fields in zip(*some, strict=True)))


@dataclass(eq=False)
class Branching:
    """A linear function that is to be proved negative, by cases.

    Attributes:
        walk: boxes and rules of the whole region.
        start: one linear function.
        fixed: τ of all steps, from a search on the whole region.
        steps: how many points the search visits for each part.
    """

    walk: LineWalk
    start: Start
    fixed: Mapping[Key, Tensor]
    steps: int

    def __post_init__(self) -> None:
        self.open: dict[str, Tensor] = {}
        self.inputs: dict[str, str] = {}
        gaps, leans, chords = [], [], []
        for step, rule in self.walk.path(self.start):
            if isinstance(step, Elementwise) and step.function == "relu" and isinstance(rule, Curve):
                low, high = self.walk.boxes[step.inputs[0]]
                self.open[step.out] = (low < 0.0) & (high > 0.0)
                self.inputs[step.out] = step.inputs[0]
                chords.append(rule.lines.upper.slope[1, self.open[step.out]])
                gaps.append((-low * high / (high - low))[self.open[step.out]])
                leans.append(rule.lines.lower.slope[:, self.open[step.out]])
        like = next(iter(self.start.values.values()))
        self.gaps = torch.cat(gaps) if gaps else like.new_zeros(0)
        """The height of each open ReLU's chord over its kink."""
        self.chords = torch.cat(chords) if chords else like.new_zeros(0)
        """Its slope."""
        self.below = torch.cat(leans, -1) if leans else like.new_zeros(3, 0)
        """The slopes of the lines below the open ReLUs."""
        self.sizes = [len(part) for part in gaps]

    def whole(self, bound: Float[Tensor, " 1"]) -> Parts:
        """Return the region as one part, with τ of the search on it."""
        tau = [self.fixed[name, "lower"][:, mask] for name, mask in self.open.items()]
        zero = self.gaps.new_zeros(1, len(self.gaps))
        return Parts(zero.to(torch.int8), torch.cat(tau, -1) if tau else zero, zero, zero, bound)

    def prove(self, root: Parts, most: int, options: EngineOptions) -> Float[Tensor, ""]:
        """Split until every part is below 0, those with the worst bounds first; return the largest bound of all parts.

        Args:
            root: the region as one part.
            most: how many parts may be bounded.
            options: the time.
        """
        parts, closed, made = root, root.best.new_full((), -torch.inf), 0
        with suppress(OutOfTimeError):
            while len(parts.best) and made < most:
                order = parts.best.argsort(descending=True)
                worst, others = parts.chosen(order[:AT_A_TIME]), parts.chosen(order[AT_A_TIME:])
                free = (worst.side == 0).sum(-1)
                if not bool((free > 0).all()):
                    break
                options.in_time("parts", made / most)
                found = self._split(worst, int(free.min()), options)
                made += len(found.best)
                done = found.best < 0.0
                if bool(done.any()):
                    closed = torch.maximum(closed, found.best[done].max())
                parts = joined([others, found.chosen(~done)])
        return closed if not len(parts.best) else torch.maximum(closed, parts.best.max())

    def _split(self, parts: Parts, free: int, options: EngineOptions) -> Parts:
        """Split the ReLUs of every part that may cost most, and bound the parts that this makes.

        Where a line λh below a ReLU was used, β begins where the coefficient of h stays what it was, Aλ: on the side
        h ≥ 0 at |A|(1 − λ), on the other at |A|λ. So no part begins worse than the one it is a part of, and where the
        time ends it keeps the bound of that one.
        """
        A, lost = self._coefficients(parts)
        # Where nothing is lost at the corner, the largest loss that lines may have decides.
        cost = torch.where(parts.side == 0, lost.clamp(min=0.0) + HARDLY * A.abs() * self.gaps, -1.0)
        count = 1
        while count < free and len(parts.best) * 2 ** (count + 1) <= TOGETHER:
            count += 1
        chosen = cost.topk(count, -1).indices
        slope = mixed(self.below, parts.tau)
        unit = parts.unit.scatter(-1, chosen, A.abs().clamp(min=2.0**-100).gather(-1, chosen))
        made = []
        for case in range(2**count):
            sides = torch.tensor([1 if case >> place & 1 else -1 for place in range(count)]).to(parts.side)
            side = parts.side.scatter(-1, chosen, sides.expand_as(chosen))
            begin = torch.where(A < 0.0, torch.where(side > 0, 1.0 - slope, slope), 0.0)
            beta = parts.beta.scatter(-1, chosen, begin.gather(-1, chosen))
            made.append(parts._replace(side=side, beta=beta, unit=unit))
        children = joined(made)
        size = max(1, self.walk.chunk() // 4)
        every = (children.chosen(some) for some in torch.arange(len(children.best)).split(size))
        return joined([some if options.late else self._bound(some, options) for some in every])

    def _bound(self, parts: Parts, options: EngineOptions) -> Parts:
        """Search τ and β of some parts; a part is never worse than the one it is a part of."""
        free = {("", "tau"): parts.tau, ("", "beta"): parts.beta}
        start = self._repeated(len(parts.best))
        found = descend(self.walk, start, free, self.steps, lambda at: self._made(parts, at), RATE, options)
        best = torch.minimum(found.best, parts.best)
        return parts._replace(tau=found.tau["", "tau"], beta=found.tau["", "beta"], best=best)

    def _repeated(self, count: int) -> Start:
        return Start(
            {name: A.expand(count, *A.shape[1:]).contiguous() for name, A in self.start.values.items()}
        )

    def _made(self, parts: Parts, at: Mapping[Key, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the walk's parameters: those of the whole region, with τ, sides and β of the open ReLUs."""
        made = {step: dict(names) for step, names in by_step(self.fixed).items()}
        beta = at["", "beta"] * parts.unit
        pieces = (x.split(self.sizes, -1) for x in (at["", "tau"], parts.side, beta))
        for (name, mask), tau, side, push in zip(self.open.items(), *pieces, strict=True):
            for key, part in (("lower", tau), ("side", side.to(tau)), ("beta", push)):
                full = part.new_zeros(len(part), *mask.shape)
                full[:, mask] = part
                made[name][key] = full
        return made

    def _coefficients(self, parts: Parts) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"]]:
        """Return the coefficients of the open ReLUs on the way back, and what their lines lose at the worst corner.

        The corner is the one at which the bound of a part is attained; what lines lose there is a guess of what a
        split gains, no more.
        """
        start = self._repeated(len(parts.best))
        tau = self._made(parts, {("", "tau"): parts.tau, ("", "beta"): parts.beta})
        live = dict(start.values)
        found = {
            step.out: A[:, self.open[step.out]]
            for step, _, A, _ in self.walk.passes(start, live, tau)
            if step.out in self.open
        }
        A = torch.cat([found[name] for name in self.open], -1)
        problem = self.walk.problem
        corner = signs(problem.region.pullback(live[INPUT]))
        values = problem.model.program(problem.n_tokens, list(start.values), problem.padding).run(
            problem.region.point(corner)
        )
        h = torch.cat([values[self.inputs[name]][:, mask] for name, mask in self.open.items()], -1)
        above = self.chords * h + self.gaps - h.clamp(min=0.0)
        below = h.clamp(min=0.0) - mixed(self.below, parts.tau) * h
        return A, torch.where(A > 0.0, A * above, -A * below)


@register("beta-crown")
@dataclass(frozen=True)
class BetaCrown(EngineBase):
    """Bound linear forms as `alpha-crown` does, and by cases of ReLUs where a sign stays open; the bounds are proved.

    Attributes:
        name: the engine's name in the registry.
        guarantee: proved.
        steps: how many steps the search takes for each form on the whole region.
        part_steps: how many it takes for each part.
        most_parts: how many parts of the region may be bounded for each form where there is a deadline; without one,
            at most `UNTIMED`.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(0, 1, 3), 2, 1.0), (0, Row(0, 1, 3), 0, -1.0)], size=1)
        >>> 0.32 < BetaCrown(steps=2).bound_forms(problem, margin).lower.item() < 0.40
        True
    """

    name: str = "beta-crown"
    guarantee: Guarantee = Guarantee.PROVED
    steps: int = 20
    part_steps: int = 12
    most_parts: int = 2**16

    def cost(self, problem: Problem, depth: int, size: int) -> Cost:
        """Predict what `crown` takes, and the searches of a few forms; how many parts there will be is not known."""
        once = Crown().cost(problem, depth, size)
        return replace(once, steps=once.steps + SEARCHES * self.steps * FORM_STEPS)

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form; open signs by cases, the sign that the form has at the centre."""
        walk = LineWalk.through(problem, form_program(problem, forms), plain)
        found = bound_on(walk, forms)
        clean = self._values(problem, forms, problem.region.center[None])[0]
        slack = repeated(walk, forms).to(found.lower)
        corners = {1.0: found.lower_corner, -1.0: found.upper_corner}
        for part, start in starts(problem, walk, forms):
            for row, number in enumerate(part.tolist()):
                if bool(found.lower[number] > 0.0) or bool(found.upper[number] < 0.0):
                    continue
                sign = 1.0 if bool(clean[number] > 0.0) else -1.0
                corner = corners[sign]
                assert corner is not None
                worst = self._values(
                    problem, forms.select(torch.tensor([number])), problem.region.point(corner[number][None])
                )
                if bool(sign * worst[0, 0] <= 0.0):
                    continue  # it changes its sign: there is none to be proved
                asked = Start({name: -sign * A[row : row + 1] for name, A in start.values.items()})
                bound = up(self._least(walk, asked, options) + slack[number])
                if sign > 0.0:
                    found.lower[number] = torch.maximum(found.lower[number], -bound)
                else:
                    found.upper[number] = torch.minimum(found.upper[number], bound)
        return found

    def _values(self, problem: Problem, forms: Forms, points: Tensor) -> Float[Tensor, "n F"]:
        """Return the forms at points."""
        scores, output = problem.values(points, forms.layers, forms.logits is not None)
        return forms.evaluate(scores, output)

    def _least(self, walk: LineWalk, start: Start, options: EngineOptions) -> Float[Tensor, ""]:
        """Bound one linear function from above, by cases if the search on the whole region leaves it above 0."""
        bound, _ = plain(walk, start)
        found: Descent | None = SlopeSearch(self.steps, options).search(walk, start)
        if found is None:
            return bound[0]
        best = torch.minimum(bound, found.best)
        if bool(best[0] < 0.0):
            return best[0]
        branching = Branching(walk, start, found.tau, self.part_steps)
        most = self.most_parts if options.deadline is not None else min(self.most_parts, UNTIMED)
        return branching.prove(branching.whole(best), most, options)
