"""The engine `chebyshev`; the method is explained in the package's docstring."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.bounds import Cover, FormBounds, Guarantee
from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.chebyshev.pieces import Box, Chart
from prooflens.engines.chebyshev.ranges import polynomial_range
from prooflens.engines.chebyshev.readings import (
    EffectReading,
    Reading,
    first_moving,
    piece_memory,
    reading_of,
)
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import (
    NO_OPTIONS,
    EngineBase,
    EngineOptions,
    OutOfTimeError,
    allowed_memory,
    register,
)
from prooflens.errors import EngineError
from prooflens.numerics import down, up
from prooflens.problem import Problem

MOST_FACTORS = 6
"""Regions with more factors are refused: a grid has (D + 1)^k points."""

DEGREES = {1: 10, 2: 6, 3: 5, 4: 4, 5: 3, 6: 2}
"""The degree in each factor, by how many factors there are."""

SMALLEST = {1: 2.0**-9, 2: 2.0**-12, 3: 2.0**-12}
"""The smallest share of the region that is asked about; 2⁻¹² for more factors."""

TIGHT = 0.02
"""Where ranges are wanted and not signs: pieces are cut until errors are at most this share of the range."""


START = 0.2
"""What counts as done when the tokens that do not move are walked, which all pieces share."""

ENDS = ("low", "high")
AT_ONCE = 8
"""On a device that walks many pieces as fast as one, regions are cut into so many before the first is walked."""
MOST_WALKS = 256
"""Where ranges are wanted and not signs: no more pieces are walked than this, unless a caller says so."""
SIGNS = 8
"""Where signs are wanted, so many times as many are."""


@register("chebyshev")
@dataclass(frozen=True)
class Chebyshev(EngineBase):
    """Bound linear forms over regions of few factors (segments, hulls, spans) at any depth; the bounds are proved.

    Attributes:
        name: the engine's name in the registry.
        guarantee: proved.
        degree: the degree in each factor; None for one that goes with the number of factors.
        most_walks: how many pieces are walked at most where ranges are wanted; for signs eight times as many.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> x = model.example().x
        >>> problem = Problem(model, pl.Segment(x, x + 0.2 * (x.flip(0) - x)).region())
        >>> margin = Forms.of([(0, Row(1, 0, 3), 2, 1.0), (0, Row(1, 0, 3), 0, -1.0)], size=1)
        >>> found = Chebyshev().bound_forms(problem, margin)
        >>> bool(found.lower < found.upper)
        True
    """

    name: str = "chebyshev"
    guarantee: Guarantee = Guarantee.PROVED
    degree: int | None = None
    most_walks: int = MOST_WALKS

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        """Refuse regions of many factors, and models of which one piece does not fit into memory."""
        k = problem.region.n_factors
        if k > MOST_FACTORS:
            return f"chebyshev is for regions of at most {MOST_FACTORS} factors (segments, hulls, spans), not {k}"
        need = piece_memory(problem, grid_of(problem, self.degree), first_moving(problem))
        if need > (allowed := allowed_memory(problem, options)):
            return (
                f"chebyshev needs about {need / 2**30:.1f} GiB for one piece, {allowed / 2**30:.1f} GiB are allowed: "
                "give more memory, fewer factors, or prompts that differ later"
            )
        return None

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form on pieces that cover the region, the most open piece first."""
        search = Search.start(problem, forms, options, self.degree)
        search.most_walks = self.most_walks
        return search.run()

    def bound_effects(
        self,
        problem: Problem,
        edited: Problem,
        forms: Forms,
        options: EngineOptions = NO_OPTIONS,
        other: Forms | None = None,
    ) -> FormBounds:
        """Bound every form's difference between two models on the same pieces of the region.

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
        with torch.no_grad():
            beside = edited, other or forms
            search = Search.start(problem, forms, options, self.degree, edited=beside)
            search.most_walks = self.most_walks
            return search.run()

    def bound_rivals(self, problem: Problem, winner: int, options: EngineOptions = NO_OPTIONS) -> FormBounds:
        """Bound one output's margin over every other, over the whole vocabulary; the winner's own margin is 1.

        Args:
            problem: the model and the region.
            winner: the output that is to be the largest.
            options: memory that may be used, and who is told of progress.

        Raises:
            EngineError: where `refuses` has a reason.
        """
        outputs = len(problem.model.head[0])
        forms = replace(Forms.of([], outputs), logits=torch.zeros(1, 1, dtype=torch.float64), signs=True)
        if reason := self.refuses(problem, forms, options):
            raise EngineError(reason)
        with torch.no_grad():
            return Search.start(problem, forms, options, self.degree, winner).run()


def grid_of(problem: Problem, degree: int | None = None) -> Grid:
    """The points of a piece.

    Args:
        problem: the model and the region.
        degree: the degree in each factor; None for one that goes with the number of factors.
    """
    k = problem.region.n_factors
    return Grid((degree or DEGREES.get(k, 2),) * k, problem.region.center)


@dataclass(eq=False)
class Leaf:
    """A piece and what is known of the forms on it."""

    box: Box
    lower: Float[Tensor, " F"]
    upper: Float[Tensor, " F"]
    axis: int = 0
    """Where to cut it."""

    def halves(self) -> list[Leaf]:
        """Both halves, with what is known of the whole; the next cut is across another factor."""
        after = (self.axis + 1) % max(1, len(self.box.low))
        return [Leaf(half, self.lower.clone(), self.upper.clone(), after) for half in self.box.cut(self.axis)]

    @property
    def rank(self) -> float:
        """Large pieces first."""
        return self.box.share


@dataclass(eq=False)
class Search:
    """Pieces that cover a region: those that are done, and those that are still to be asked or cut.

    Attributes:
        problem: the model and the region.
        forms: what is asked.
        options: memory, and who is told of progress.
        grid: the points of a piece.
        reading: walks pieces and reads the forms off.
        chart: how coordinates stand for inputs.
        waiting: pieces that were not walked yet, with what is known of the piece they were cut from.
        done: pieces that are left as they are.
        provable: forms whose sign may be proved: no two points with opposite signs are known.
        sign: the sign that every piece must have, 0 while no point is known.
        corners: coordinates of the points with the least and the greatest value so far.
        extremes: these values.
        walks: how many pieces were walked.
        most_walks: where ranges are wanted, how many may be.
    """

    problem: Problem
    forms: Forms
    options: EngineOptions
    grid: Grid
    reading: Reading
    chart: Chart
    waiting: list[Leaf]
    provable: Tensor
    sign: Tensor
    corners: Float[Tensor, "2 F k"]
    extremes: Float[Tensor, "2 F"]
    done: list[Leaf] = field(default_factory=list)
    walks: int = 0
    most_walks: int = MOST_WALKS
    resolution: float | None = None
    """Where a map is wanted: pieces on which a form has both signs are cut down to this share of the region."""

    @classmethod
    def start(
        cls,
        problem: Problem,
        forms: Forms,
        options: EngineOptions,
        degree: int | None = None,
        winner: int | None = None,
        edited: tuple[Problem, Forms] | None = None,
    ) -> Search:
        """Prepare what all pieces share: the tokens that do not move are walked once.

        Args:
            problem: the model and the region.
            forms: what is asked.
            options: memory that may be used, the deadline, and who is told of progress.
            degree: the degree in each factor; None for one that goes with the number of factors.
            winner: the output whose margins over all others are asked, in place of forms of outputs; None for none.
            edited: another model on the same region, and what is asked of it, which is subtracted; None for none.
        """
        region, like = problem.region, problem.region.center
        k, grid = region.n_factors, grid_of(problem, degree)
        middle = START if edited is None else 0.5 * START
        reading = reading_of(problem, forms, winner, options.part(0.0, middle).in_time)
        if edited is not None:
            reading = EffectReading.of(reading, *edited, options.part(middle, START).in_time)
        F = forms.size
        infinite = like.new_full((F,), torch.inf)
        leaf = Leaf(Box.whole(k), -infinite, infinite)
        zero = like.new_zeros(2, F, k)
        extremes = torch.stack((infinite, -infinite))
        unknown = torch.zeros(F, dtype=torch.long, device=like.device)
        provable = torch.ones(F, dtype=torch.bool, device=like.device)
        return cls(
            problem, forms, options, grid, reading, Chart(region), [leaf], provable, unknown, zero, extremes
        )

    def run(self) -> FormBounds:
        """Walk pieces until none is left, or the time ends."""
        while self.step():
            if self.options.late:
                self.stop()
        return self.found()

    def step(self) -> bool:
        """Walk the next pieces; False if none is left."""
        if not self.waiting:
            return False
        if not self.walks and self.problem.region.center.device.type != "cpu":
            while self.grid.degrees and len(self.waiting) < min(AT_ONCE, self._batch()):
                self.waiting = [half for leaf in self.waiting for half in leaf.halves()]
        self.waiting.sort(key=lambda leaf: leaf.rank)
        batch = [self.waiting.pop() for _ in range(min(self._batch(), len(self.waiting)))]
        outside = [leaf for leaf in batch if self.chart.excludes(leaf.box)]
        for leaf in outside:  # everything holds on a piece without a point
            leaf.lower, leaf.upper = (
                torch.full_like(leaf.lower, torch.inf),
                torch.full_like(leaf.upper, -torch.inf),
            )
        self.done += outside
        if batch := [leaf for leaf in batch if leaf not in outside]:
            self._try(batch)
        self.options.progress(f"{self.walks} pieces", self._covered())
        return True

    def _covered(self) -> float:
        """Which share of all is done: of what pieces share, and of the region."""
        return START + (1.0 - START) * min(1.0, sum(leaf.box.share for leaf in self.done))

    def _try(self, batch: list[Leaf]) -> None:
        """Walk pieces; where the time ends in between, they are left as they are, and so are all that wait."""
        walked, covered = self.walks, self._covered()

        def tell(stage: str, share: float) -> None:
            self.options.in_time(f"piece {walked + 1}, {stage}", covered)

        self.reading.told(tell)
        try:
            self._ask(batch)
        except OutOfTimeError:
            if not self.walks:
                raise
            self.done += batch
            self.stop()

    def stop(self) -> None:
        """Leave the pieces that still wait as they are: what was known of the piece they were cut from holds."""
        self.done += self.waiting
        self.waiting = []

    def _batch(self) -> int:
        """How many pieces are walked at a time: as many as fit; on a processor a few, which saves calls and no more."""
        device, each = (
            self.problem.region.center.device,
            piece_memory(self.problem, self.grid, self.reading.first),
        )
        if device.type == "cpu":
            return max(1, min(8, 2**26 // each))
        return max(1, int(0.5 * allowed_memory(self.problem, self.options) // each))

    def _ask(self, batch: list[Leaf]) -> None:
        coordinates = torch.stack([leaf.box.at(self.grid.points) for leaf in batch])
        points = self.chart.inputs(coordinates)
        runs, missed = self.reading.read(self.grid, points)
        missed = missed.nan_to_num(nan=torch.inf, posinf=torch.inf)
        self.walks += len(batch)
        coefficients, off = self.grid.coefficients(runs)
        lower, upper = polynomial_range(self.grid, coefficients, off)
        lower, upper = down(lower - missed), up(upper + missed)
        known = missed.isfinite() & runs.isfinite().all(1)
        lower, upper = torch.where(known, lower, -torch.inf), torch.where(known, upper, torch.inf)
        self._note(coordinates, runs, missed)
        slopes = self._slopes(coefficients)
        for number, leaf in enumerate(batch):
            leaf.lower = torch.maximum(leaf.lower, lower[number])
            leaf.upper = torch.minimum(leaf.upper, upper[number])
            leaf.axis = int(slopes[number].argmax()) if len(self.grid.degrees) else 0
            mixed = (runs[number] < -missed[number]).any(0) & (runs[number] > missed[number]).any(0)
            if not self._is_open(leaf, missed[number], mixed) or leaf.box.share <= self._smallest():
                self.done.append(leaf)
            else:
                self.waiting += leaf.halves()

    def _smallest(self) -> float:
        return SMALLEST.get(len(self.grid.degrees), 2.0**-12) if self.grid.degrees else 1.0

    def _slopes(self, coefficients: Float[Tensor, "b N F"]) -> Float[Tensor, "b k"]:
        """How much the open forms change along each factor."""
        weights = self.provable.to(coefficients) / (coefficients[:, 0].abs() + 1e-9)
        size = (coefficients.abs() * weights[:, None]).sum(-1)
        return torch.einsum("kn,bn->bk", (self.grid.exponents > 0).to(size), size)

    def _note(self, coordinates: Tensor, runs: Float[Tensor, "b N F"], missed: Float[Tensor, "b F"]) -> None:
        """Remember where forms are least and greatest, and drop those that surely take both signs."""
        for side, best in enumerate((runs.amin(1), runs.amax(1))):
            value, piece = best.min(0) if side == 0 else best.max(0)
            better = value < self.extremes[0] if side == 0 else value > self.extremes[1]
            places = (runs.argmin(1) if side == 0 else runs.argmax(1)).gather(0, piece[None])[0]
            self.corners[side] = torch.where(better[:, None], coordinates[piece, places], self.corners[side])
            self.extremes[side] = torch.where(better, value, self.extremes[side])
        sure = missed[:, None].isfinite()
        positive = ((runs > missed[:, None]) & sure).any(1).any(0)
        negative = ((runs < -missed[:, None]) & sure).any(1).any(0)
        self.provable &= ~((positive | (self.sign > 0)) & (negative | (self.sign < 0)))
        self.sign = torch.where(self.sign == 0, positive.long() - negative.long(), self.sign)

    def _is_open(self, leaf: Leaf, missed: Float[Tensor, " F"], mixed: Bool[Tensor, " F"]) -> bool:
        """Say whether cutting a piece may say more of what is asked."""
        if self.walks + len(self.waiting) > (SIGNS if self.forms.signs else 1) * self.most_walks:
            return False
        if self.forms.signs:
            undecided = (leaf.lower <= 0.0) & (leaf.upper >= 0.0)
            if self.resolution is not None:
                return bool((undecided & ~(mixed & (leaf.box.share <= self.resolution))).any())
            return bool((undecided & self.provable).any())
        width = (self.extremes[1] - self.extremes[0]).clamp(min=0.0)
        return bool((missed > TIGHT * width + 1e-12).any())

    def found(self) -> FormBounds:
        """What holds on all pieces."""
        lower = torch.stack([leaf.lower for leaf in self.done]).amin(0)
        upper = torch.stack([leaf.upper for leaf in self.done]).amax(0)
        corners = [self.chart.factors(side) for side in self.corners]
        return FormBounds(lower, upper, corners[0], corners[1], cover=self.cover())

    def cover(self) -> Cover:
        """All pieces, and what is proved on each."""
        ends = [
            torch.tensor([getattr(leaf.box, side) for leaf in self.done], dtype=torch.float64)
            for side in ENDS
        ]
        lower, upper = (
            torch.stack([getattr(leaf, side) for leaf in self.done]).cpu() for side in ("lower", "upper")
        )
        return Cover(ends[0], ends[1], lower, upper)
