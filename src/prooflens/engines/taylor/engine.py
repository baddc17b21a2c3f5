"""The engine `taylor`; the method is explained in the package's docstring."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.costs import Cost
from prooflens.engines.forms import Forms
from prooflens.engines.hidden import HiddenBounds, headless, nothing_known, output_forms
from prooflens.engines.protocol import (
    NO_OPTIONS,
    EngineBase,
    EngineOptions,
    OutOfTimeError,
    Workspace,
    allowed_memory,
    register,
)
from prooflens.engines.relaxations.ellipsoids import ball, support, total
from prooflens.engines.relaxations.norms import CHUNK, grow, identity, length
from prooflens.engines.taylor.chain import Fork
from prooflens.engines.taylor.cost import least_memory, needed_memory, walk_cost
from prooflens.engines.taylor.effects import EffectWalk
from prooflens.engines.taylor.held import earlier_walk, held_layer, hold_walk
from prooflens.engines.taylor.hessian import Hessian, HigherOrderBound, hessian_batch
from prooflens.engines.taylor.parts import FormBatch, bound_part, last_token, last_value, nothing_of
from prooflens.engines.taylor.pieces import PIECES, factors, pieces
from prooflens.engines.taylor.remainder_bounds import Eigenvalues, Supports
from prooflens.engines.taylor.segments import Segment, asked_segments
from prooflens.engines.taylor.third_order import ThirdOrder, moves_known, third_order_batch
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.errors import EngineError
from prooflens.models.sites import Rotary, Shift
from prooflens.numerics import gamma
from prooflens.problem import Problem

FEW = 2**22
"""Up to this many Hessian entries, compute every bound for every form, not only for forms whose sign is open."""


CORNERS = 32
"""How many forms at a time are evaluated in both corners of their linear parts."""

AT_A_TIME = 32
"""How many open forms a CPU tries before it asks whether that paid; it looks at the clock more often."""

SMALL = 2**20
"""Hessian entries that a CPU works on between two looks at the clock, however many forms that are."""

HESSIAN_BYTES = 2**30
"""On a CPU, how much memory Hessians may take that are worked on together; one may take more."""

Reading = Supports | type[Hessian]
"""How remainders are bounded: by one object for all forms, or by one per batch that holds matrices of its forms."""

STAGES: dict[type[Hessian], str] = {Hessian: "Hessians", ThirdOrder: "third orders"}
"""What a caller is told of progress."""

LEAST_PROMISE: dict[type[Hessian], float] = {Hessian: 1.0, ThirdOrder: 0.1}
"""The promise with remainders by ellipsoids from which matrices are made; squares leave a tenth of them, or less."""

QUICK_SHARE = 0.2
"""Of the work on forms whose sign alone is wanted, the share of the quick walk; measured on minilm's layer 1."""

READ_SHARES = (0.4, 0.5, 0.6, 0.7, 1.0)
"""Of the thorough work, what is done behind the walk, and behind each of the four ways to bound remainders."""

WIDEST = 8000
"""Sums of so many squares err by less than the 2⁻⁴⁰ that norms allow for (`taylor.layernorm`)."""


@register("taylor")
@dataclass(frozen=True)
class Taylor(EngineBase):
    """Bound linear forms of scores and outputs, at any layer of any family; the bounds are proved.

    Attributes:
        name: the engine's name in the registry.
        guarantee: proved.
        thorough: walk forms whose sign is still open back to the input.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> problem = Problem(pl.load("toy"), pl.Ball(0.02).around(pl.load("toy").example()))
        >>> margin = Forms.of([(0, Row(1, 0, 3), 2, 1.0), (0, Row(1, 0, 3), 0, -1.0)], size=1)
        >>> found = Taylor().bound_forms(problem, margin)
        >>> 0.02 < found.lower.item() < found.upper.item() < 0.11
        True
    """

    name: str = "taylor"
    guarantee: Guarantee = Guarantee.PROVED
    thorough: bool = True
    """Whether forms whose sign is still open are walked back to the input, one eigenvalue per site and covector."""

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        """Refuse models with unknown steps, and jobs that do not fit into memory."""
        architecture = problem.model.architecture
        neurons = architecture.d_ff if architecture.network_norm else 0
        if max(architecture.d_model, architecture.n_heads * architecture.head_dim, neurons) > WIDEST:
            return f"taylor counts the rounding of norms for widths up to {WIDEST}: ask crown or interval"
        need, allowed = least_memory(problem, forms, quick=True), allowed_memory(problem, options)
        if need > allowed:
            return (
                f"taylor needs about {need / 2**30:.1f} GiB for {problem.region.n_factors} factors, "
                f"{allowed / 2**30:.1f} GiB are allowed: give more memory, fewer moving tokens, or another engine"
            )
        return None

    def cost(self, problem: Problem, depth: int, size: int) -> Cost:
        """Predict a walk forward and the forms' way back; where signs stay open it takes about twice that."""
        return walk_cost(problem, depth, size)

    def cost_on(self, problem: Problem, depth: int, size: int, passed: int) -> Cost:
        """Predict the same where a walk to the scores of an earlier layer is held.

        Args:
            problem: the model and the region.
            depth: the deepest layer whose scores are read, or the number of layers for outputs.
            size: how many forms are asked.
            passed: the layer whose scores the held walk ends at; 0 if there is none.
        """
        return walk_cost(problem, depth, size, passed)

    def held_layer(self, problem: Problem, workspace: Workspace | None) -> int:
        """Return the layer whose scores a held walk about this problem ends at; 0 if there is none.

        Args:
            problem: the model and the region.
            workspace: what the caller's calls share.
        """
        return held_layer(problem, workspace)

    def would_hold(self, problem: Problem, depth: int, options: EngineOptions) -> bool:
        """Return whether a call about the scores of a layer leaves its walk to later calls, as `hold_walk` decides.

        Args:
            problem: the model and the region.
            depth: the layer.
            options: the memory that may be used.
        """
        architecture, p = problem.model.architecture, problem.region.n_factors
        sizes = (
            needed_memory(architecture, problem.n_tokens, p, depth, min(depth, 1), quick)
            for quick in (True, False)
        )
        return 0 < depth < architecture.n_layers and sum(sizes) <= allowed_memory(problem, options)

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form, with the corners that their linear parts point to."""
        begun = time.monotonic()
        fits = least_memory(problem, forms) <= allowed_memory(problem, options)
        if fits and not forms.signs:
            found = self._found(problem, forms, options)
        else:
            walk = self.walk(problem, forms, options.part(0.0, QUICK_SHARE), quick=True)
            walk.progress = options.part(QUICK_SHARE, QUICK_SHARE).in_time
            found = self._parts(walk, problem, forms, Supports())
            drop_sign_changes(problem, forms, found)
            if walk.kept is None:
                with suppress(OutOfTimeError):
                    self._refine(walk, problem, forms, found, Eigenvalues())
            del walk
            # The thorough walk takes at least as long as the quick one did.
            if fits and len(chosen := found.open()) and options.leaves(time.monotonic() - begun):
                with suppress(OutOfTimeError):  # what the quick walk found stands
                    again = options.part(QUICK_SHARE, 1.0)
                    found.improve(chosen, self._found(problem, forms.select(chosen.cpu()), again))
        if fits:
            with suppress(OutOfTimeError):
                self._ask_pieces(problem, forms, options, found)
        return FormBounds(found.lower, found.upper, -found.corner, found.corner)

    def bound_effects(
        self,
        problem: Problem,
        edited: Problem,
        forms: Forms,
        options: EngineOptions = NO_OPTIONS,
        other: Forms | None = None,
    ) -> FormBounds | None:
        """Bound every form's difference between two models, jointly; None if their walks have other factors.

        Args:
            problem: the model and the region.
            edited: the other model, of the same architecture, and the same region.
            forms: what is asked.
            options: memory that may be used, and who is told of progress.
            other: what is asked of the other model, of the same layers; None for the same.

        Raises:
            EngineError: where `refuses` has a reason.
        """
        if reason := self.refuses(problem, forms, options):
            raise EngineError(reason)
        quick = least_memory(problem, forms) > allowed_memory(problem, options)

        # Walks that go on with other tokens behind the last attention share nothing.
        reads = [read_tokens(one, asked_segments(one, forms)) for one in (problem, edited)]
        alike = reads[0] == reads[1]

        def walk_of(asked: Problem, widths: Tensor | None, fork_at: int, fork: Fork | None) -> TaylorWalk:
            """Walk `asked` by factors of half-widths `widths`, with a fork at `fork_at`, or on from `fork`."""
            at, start = (fork_at, fork) if alike else (-1, None)
            return self.walk(asked, forms, options, quick, half_widths=widths, fork_at=at, fork=start)

        with torch.no_grad():
            found = EffectWalk(problem, edited, forms, other or forms).run(walk_of, options.workspace)
        return found and FormBounds(found.lower, found.upper, -found.corner, found.corner)

    def bound_hidden(self, problem: Problem, options: EngineOptions = NO_OPTIONS) -> HiddenBounds:
        """Enclose the vector that the head reads: h₀ + Aα + e with e in an ellipsoid."""
        forms = output_forms(torch.zeros(1, problem.model.architecture.d_model, dtype=torch.float64))
        asked = headless(problem)
        if reason := self.refuses(asked, forms, options):
            raise EngineError(reason)
        with torch.no_grad():
            quick = least_memory(asked, forms) > allowed_memory(asked, options)
            walk = self.walk(asked, forms, options, quick)
            value, t = last_value(walk, asked)
            root = value.root
            A = (value.J[t] @ root.N[t]) * root.half_widths
            # The product JN is counted in `shape_e`; that with the half-widths rounds by a unit of `stretch`.
            tiny = grow(gamma(64) * 4.0 * (length(value.u[t]) + value.stretch[t]))
            M = total([value.shape_e[t], ball(tiny, len(value.u[t]))])
            E = support(M, identity(M, len(M)))
            known = E.isfinite().all() & A.isfinite().all()
        if not bool(known):
            return nothing_known(asked)
        return HiddenBounds(value.u[t], E, A[:, : asked.region.n_factors], shape=M)

    def _ask_pieces(self, problem: Problem, forms: Forms, options: EngineOptions, found: FormBatch) -> None:
        """Bound open forms on pieces of a box of few factors: what holds on all pieces holds."""
        chosen = found.open()
        if not (self.thorough and 0 < problem.region.n_factors <= len(PIECES)):
            return
        worst: FormBatch | None = None
        for piece, blur in pieces(problem.region):
            if not len(chosen):
                return
            part = self._found(replace(problem, region=piece), forms.select(chosen.cpu()), options, blur)
            if worst is not None:
                part = part._replace(
                    lower=torch.minimum(part.lower, worst.lower), upper=torch.maximum(part.upper, worst.upper)
                )
            decided = part.decided()
            chosen, worst = chosen[decided], FormBatch(*(side[decided] for side in part))
        if worst is not None:
            found.improve(chosen, worst)

    def _found(self, problem: Problem, forms: Forms, options: EngineOptions, blur: float = 0.0) -> FormBatch:
        """Compute all bounds in turn, each for forms whose sign the one before leaves open."""
        ends = READ_SHARES
        walk = self.walk(problem, forms, options.part(0.0, ends[0]), blur=blur)
        walk.progress = options.part(ends[0], ends[1]).in_time
        found = self._parts(walk, problem, forms, Supports())
        if walk.kept is None:
            readings: tuple[Reading, ...] = (Eigenvalues(), Hessian, ThirdOrder)
            with suppress(OutOfTimeError):
                for reading, first, last in zip(readings, ends[1:-1], ends[2:], strict=True):
                    walk.progress = options.part(first, last).in_time
                    if reading is not ThirdOrder or moves_known(walk):
                        self._refine(walk, problem, forms, found, reading)
        return found

    def _refine(
        self, walk: TaylorWalk, problem: Problem, forms: Forms, found: FormBatch, reading: Reading
    ) -> None:
        """Bound forms with an open sign again if that may decide it; with few Hessian entries, all forms.

        A CPU takes the most promising first, and stops where a batch decides nothing.
        """
        factors = len(walk.chains[0].root.half_widths)
        whole = not forms.signs and forms.size * factors**2 <= FEW
        chosen = torch.arange(forms.size, device=found.corner.device) if whole else found.open()
        if isinstance(reading, type) and not assembled_batch(walk, reading):
            return
        promise = found.promise()[chosen]
        if isinstance(reading, type) and len(chosen) and not whole:
            tell = walk.progress
            walk.progress = lambda stage, share: tell(stage, 0.0)  # what follows is the work
            least = self._parts(walk, problem, forms.select(chosen.cpu()), HigherOrderBound())
            walk.progress = tell
            provable = least.promise() > LEAST_PROMISE[reading]
            chosen, promise = chosen[provable], least.promise()[provable]
        if not len(chosen):
            return
        at_once = whole or not forms.signs or found.corner.is_cuda
        few = max(1, forms.size) if at_once else max(AT_A_TIME, SMALL // max(1, factors) ** 2)
        for some in chosen[promise.argsort(descending=True)].split(few):
            again = self._parts(walk, problem, forms.select(some.cpu()), reading)
            found.improve(some, again)
            if not at_once and not bool(again.decided().any()):
                return
            walk.progress(STAGES[reading] if isinstance(reading, type) else "open functionals", 1.0)

    def _parts(self, walk: TaylorWalk, problem: Problem, forms: Forms, reading: Reading) -> FormBatch:
        """Bound all forms, as many at a time as fit into memory.

        Of forms that the time does not suffice for nothing is known.
        """
        half_widths = walk.chains[0].root.half_widths
        # A CPU gains nothing from large batches, and between them the time is looked at.
        on_cpu, small = half_widths.device.type == "cpu", SMALL // max(1, len(half_widths)) ** 2
        if isinstance(reading, type):
            size, stage = assembled_batch(walk, reading), STAGES[reading]
            few = max(1, hessian_batch(HESSIAN_BYTES, len(half_widths)))
            size = min(size, few, max(AT_A_TIME // 8, small)) if on_cpu else size
        elif reading.deep:
            size, stage = walk.batch(problem.n_tokens), "open functionals"
            size = min(size, max(AT_A_TIME // 2, small)) if on_cpu else size
        else:
            size, stage = walk.wide_batch(), "functionals"
        parts = []
        for start in range(0, forms.size, size):
            some = forms.select(torch.arange(start, min(start + size, forms.size)))
            one = reading(half_widths, some.size) if isinstance(reading, type) else reading
            try:
                parts.append(bound_part(walk, problem, some, one))
                walk.progress(stage, min(1.0, (start + size) / forms.size))
            except OutOfTimeError:
                if not parts:
                    raise
                if left := forms.size - sum(len(part.lower) for part in parts):
                    parts.append(nothing_of(left, parts[0]))
                break
        return FormBatch(*(torch.cat(side) for side in zip(*parts, strict=True)))

    def walk(
        self,
        problem: Problem,
        forms: Forms,
        options: EngineOptions = NO_OPTIONS,
        quick: bool = False,
        blur: float = 0.0,
        half_widths: Float[Tensor, " p"] | None = None,
        fork_at: int | None = None,
        fork: Fork | None = None,
    ) -> TaylorWalk:
        """Walk forward: compute what does not depend on a form.

        Args:
            problem: the model and the region.
            forms: what is asked; how deep the walk goes, and which layers it keeps.
            options: memory and time.
            quick: bound mixings in few steps; such a walk cannot serve Hessians.
            blur: by how much the centre may be off.
            half_widths: those of the factors; None for what suits the first layer.
            fork_at: the chain at which another walk is to go on; None for no other walk.
            fork: where this walk goes on from another; None for the input.
        """
        allowed = allowed_memory(problem, options)
        spare = allowed - least_memory(problem, forms, quick=quick) // 2
        whole = self.thorough and least_memory(problem, forms, whole=True, quick=quick) <= allowed
        kept = None if whole else frozenset(forms.layers)
        walk = TaylorWalk(
            max(spare, 2**26), options.in_time, kept, quick, blur, half_widths=half_widths, fork_at=fork_at
        )
        segments = asked_segments(problem, forms)
        read = read_tokens(problem, segments)
        if fork is None and fork_at is None:
            fork = earlier_walk(options, problem, segments, walk)
        if fork is None:
            walk.forward(segments, problem.region.center, factors(problem.region), read)
        else:
            walk.go_on(segments, fork, read)
        if fork_at is None:
            hold_walk(options, problem, forms, walk)
        return walk


def read_tokens(problem: Problem, segments: list[Segment]) -> list[int] | None:
    """Return the tokens that are walked behind the last attention; None for all.

    Args:
        problem: the model and the region.
        segments: its program, cut at its attentions.
    """
    if segments[-1].final is None:
        return None
    last = max((i for i, segment in enumerate(segments) if segment.attention is not None), default=-1)
    if any(isinstance(step, Rotary | Shift) for later in segments[last + 1 :] for step in later.steps):
        return None  # what depends on the position needs every token in its place
    pool = next((segment.pool for segment in segments if segment.pool is not None), None)
    return [last_token(problem)] if pool is None else pool.weights.nonzero()[:, 0].tolist()


def assembled_batch(walk: TaylorWalk, reading: type[Hessian]) -> int:
    """Return for how many forms at a time there is memory, perhaps for none.

    Args:
        walk: the walk forward.
        reading: what is held of each form.
    """
    if issubclass(reading, ThirdOrder):
        return third_order_batch(walk)
    return hessian_batch(walk.memory, len(walk.chains[0].root.half_widths))


def drop_sign_changes(problem: Problem, forms: Forms, found: FormBatch) -> None:
    """Mark forms that change sign between the corners of their linear part: they have no sign to be proved."""
    chosen = found.open()
    architecture = problem.model.architecture
    widest = max(architecture.d_ff, architecture.n_heads * problem.n_tokens)
    if forms.logits is not None:
        widest = max(widest, forms.logits.shape[-1])
    step = min(CORNERS, max(1, CHUNK // (2 * problem.n_tokens * widest)))
    for start in range(0, len(chosen), step):
        some = chosen[start : start + step]
        asked = forms.select(some.cpu())
        corners = torch.cat((found.corner[some], -found.corner[some]))
        scores, output = problem.values(problem.region.point(corners), forms.layers, forms.logits is not None)
        one, other = asked.evaluate(scores, output).reshape(2, len(some), len(some)).diagonal(dim1=1, dim2=2)
        found.provable[some] &= one * other > 0.0
