"""From linear forms to functionals: how any engine bounds log-odds of mass, entropies and circuits.

An engine bounds linear forms of scores. A functional f that is not linear is bounded in two ways that are
intersected:

1. **Directly.** Around the clean scores ã (as computed: any point will do), f(a) = f(ã) + ∇f(ã)·(a − ã) + rest. The
   middle term is one linear form, so rows and heads keep their shared factors; the rest is bounded by
   `queries.remainder` from the engine's own bounds of all score differences. The computed weights w differ from ∇f(ã)
   by rounding: γ times their terms' size, times |a − ã|, is added.
2. **Through weights.** The differences give weight boxes, and the simplex programs of `queries.programs` the bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import Bounds, FormBounds
from prooflens.engines.forms import Forms, forms_of
from prooflens.engines.protocol import NO_OPTIONS, Engine, EngineOptions, Stopwatch
from prooflens.engines.standings import folded, unfolded
from prooflens.engines.vocabulary import bound_outputs, output_refusal, reads_vector
from prooflens.numerics import check_arithmetic, down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.problem import Problem
from prooflens.queries import Claim, Functional, Row, RowEntropy, remainder
from prooflens.queries.functionals import OutputAtom
from prooflens.queries.masks import keys_of
from prooflens.queries.programs import functional_bounds
from prooflens.queries.simplex import Box
from prooflens.queries.weights import weight_box


def bound_functionals(
    engine: Engine,
    problem: Problem,
    functionals: Sequence[Functional],
    widths: bool = False,
    options: EngineOptions = NO_OPTIONS,
) -> Bounds:
    """Bound functionals over the region of a problem, with the engine's guarantee.

    One call of the engine serves all of them. Functionals of the logits of one token, and tails of a vocabulary, go
    through `vocabulary` in a call of their own.

    Args:
        engine: who bounds the linear forms.
        problem: the model and the region.
        functionals: what to bound.
        widths: whether both ends matter; without it an engine may stop when all signs are decided.
        options: memory that may be used, and who is told of progress.

    Returns:
        Bounds in the order of the functionals.

    Raises:
        EngineError: if the engine refuses.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.engines import get_engine
        >>> from prooflens.queries.functionals import margin
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> found = bound_functionals(get_engine("crown"), problem, [margin(Row(0, 1, 3), 2, 0)])
        >>> 0.32 < found.lower.item() < found.upper.item() < 0.40
        True
    """
    check_arithmetic(problem.model.device)
    if any(f.standing for f in functionals):
        listed, parts = unfolded(functionals)
        return folded(functionals, parts, bound_functionals(engine, problem, listed, True, options))
    if through := [i for i, f in enumerate(functionals) if reads_vector(problem, f)]:
        return _with_outputs(engine, problem, functionals, through, widths, options)
    watch = Stopwatch(problem.model.device)
    # What reads nothing is its constant; no engine is asked about it.
    fixed = [i for i, f in enumerate(functionals) if not (f.rows or f.logits)]
    linear = [i for i, f in enumerate(functionals) if f.is_linear and i not in fixed]
    curved = [i for i, f in enumerate(functionals) if not f.is_linear]
    outputs = problem.model.architecture.d_out or 0
    forms = forms_of([functionals[i] for i in linear], outputs)
    curvature = _Curved.of(problem, [functionals[i] for i in curved]) if curved else None
    if curvature is not None:
        forms = _joined(forms, curvature.forms)
    elif not widths and not any(functionals[i].constant for i in linear):
        forms = replace(forms, signs=True)
    lower, upper = (torch.empty(len(functionals), dtype=torch.float64) for _ in range(2))
    for i in fixed:
        lower[i] = upper[i] = functionals[i].constant
    if not forms.size:
        return Bounds(lower, upper, engine.guarantee, engine.name, watch.seconds())
    found = engine.bound_forms(problem, forms, options)
    constants = torch.tensor([functionals[i].constant for i in linear], dtype=torch.float64)
    n = len(linear)
    lower[linear] = down(found.lower[:n].cpu() + constants)
    upper[linear] = up(found.upper[:n].cpu() + constants)
    if curvature is not None:
        lower[curved], upper[curved] = curvature.bounds(_slice(found, n))
    corners = _corners(found, linear, curved, fixed)
    plain = n == len(functionals) and not bool(constants.any())
    return Bounds(
        lower,
        upper,
        engine.guarantee,
        engine.name,
        watch.seconds(),
        *corners,
        lower_ledger=found.lower_ledger if plain else None,
        upper_ledger=found.upper_ledger if plain else None,
        cover=found.cover if plain else None,
    )


def _with_outputs(
    engine: Engine,
    problem: Problem,
    functionals: Sequence[Functional],
    through: list[int],
    widths: bool,
    options: EngineOptions,
) -> Bounds:
    outputs = bound_outputs(engine, problem, [functionals[i] for i in through], options)
    if len(through) == len(functionals):
        return outputs
    others = [i for i in range(len(functionals)) if i not in set(through)]
    rest = bound_functionals(engine, problem, [functionals[i] for i in others], widths, options)
    lower, upper = (torch.empty(len(functionals), dtype=torch.float64) for _ in range(2))
    for chosen, found in ((through, outputs), (others, rest)):
        lower[chosen], upper[chosen] = found.lower, found.upper
    seconds = outputs.seconds + rest.seconds
    return Bounds(lower, upper, engine.guarantee, engine.name, seconds, tail=outputs.tail)


def refusal(
    engine: Engine,
    problem: Problem,
    functionals: Sequence[Functional],
    options: EngineOptions = NO_OPTIONS,
) -> str | None:
    """Say why an engine cannot bound these functionals, or return None if it can.

    Args:
        engine: who is asked.
        problem: the model and the region.
        functionals: what is to be bounded.
        options: memory that may be used.
    """
    functionals, _ = unfolded(functionals)
    others = [f for f in functionals if not reads_vector(problem, f)]
    if len(others) < len(functionals):
        reason = output_refusal(engine, problem, options)
        return reason or (refusal(engine, problem, others, options) if others else None)
    rows = list(dict.fromkeys(row for f in functionals for row in f.rows))
    linear = forms_of([f for f in functionals if f.is_linear], problem.model.architecture.d_out or 0)
    read = Forms.of(
        [
            (i, row, keys_of(problem.mask_of(row.layer).cpu(), row.position)[0], 1.0)
            for i, row in enumerate(rows)
        ],
        len(rows),
    )
    return engine.refuses(problem, _joined(linear, read), options)


def bound_claims(
    engine: Engine,
    problem: Problem,
    claims: Sequence[Claim],
    widths: bool = False,
    options: EngineOptions = NO_OPTIONS,
) -> tuple[list[Bounds], Bounds]:
    """Bound the functionals of many claims in one call of an engine.

    Args:
        engine: who bounds the linear forms.
        problem: the model and the region.
        claims: what is claimed.
        widths: whether both ends matter; without it an engine may stop when all signs are decided.
        options: memory that may be used, and who is told of progress.

    Returns:
        The bounds of each claim, and those of all functionals together.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.engines import get_engine
        >>> from prooflens.queries import parse_query
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> claims = parse_query("0.1:top1@-1").bind(problem.setting([0]))
        >>> [found], _ = bound_claims(get_engine("layer0"), problem, claims)
        >>> found.lower.min().item() > 0  # proved
        True
    """
    functionals = [f for claim in claims for f in claim.functionals]
    together = bound_functionals(engine, problem, functionals, widths, options)
    parts, start = [], 0
    for claim in claims:
        stop = start + len(claim.functionals)
        parts.append(together.select(torch.arange(start, stop)))
        start = stop
    return parts, together


def _joined(first: Forms, second: Forms) -> Forms:
    """Join two lists of forms; the second reads scores only."""
    logits = first.logits
    if logits is not None:
        logits = torch.cat((logits, logits.new_zeros(second.size, logits.shape[1])))

    def both(name: str) -> Tensor:
        return torch.cat((getattr(first, name), getattr(second, name)))

    return Forms(
        first.size + second.size,
        torch.cat((first.index, second.index + first.size)),
        both("layer"),
        both("head"),
        both("position"),
        both("key"),
        both("weight"),
        logits,
    )


def _slice(found: FormBounds, start: int) -> FormBounds:
    return FormBounds(found.lower[start:].cpu(), found.upper[start:].cpu())


def _corners(
    found: FormBounds, linear: list[int], curved: list[int], fixed: list[int]
) -> tuple[Tensor | None, Tensor | None]:
    """Return corners per functional: a curved one uses those of its linear part, a constant the first there is."""
    place = torch.zeros(len(linear) + len(curved) + len(fixed), dtype=torch.long)
    place[linear] = torch.arange(len(linear))
    place[curved] = len(linear) + torch.arange(len(curved))
    low, high = found.lower_corner, found.upper_corner
    return (
        None if low is None else low[place.to(low.device)],
        None if high is None else high[place.to(high.device)],
    )


@dataclass(frozen=True, eq=False)
class _Curved:
    """Functionals that are not linear, and the forms that bound them: tangents, score differences, single scores."""

    functionals: list[Functional]
    rows: list[Row]
    keys: dict[Row, tuple[int, ...]]
    clean: dict[Row, Float[Tensor, " S"]]
    masks: dict[int, Tensor]
    forms: Forms

    @classmethod
    def of(cls, problem: Problem, functionals: list[Functional]) -> _Curved:
        """Read the clean scores and list the forms."""
        rows = list(dict.fromkeys(row for f in functionals for row in f.rows))
        masks = {layer: problem.mask_of(layer).cpu() for layer in {row.layer for row in rows}}
        keys = {row: keys_of(masks[row.layer], row.position) for row in rows}
        scores = problem.setting(sorted({row.layer for row in rows})).rows(rows)
        clean = {row: value.cpu() for row, value in scores.items()}
        entries: list[tuple[int, Row, int, float]] = []
        for number, functional in enumerate(functionals):
            for row, gradient in functional.gradient(clean).items():
                entries.extend((number, row, key, float(gradient[key])) for key in keys[row])
        size = len(functionals)
        for row in rows:
            for j, k in itertools.combinations(keys[row], 2):
                entries += [(size, row, j, 1.0), (size, row, k, -1.0)]
                size += 1
            for j in keys[row]:
                entries.append((size, row, j, 1.0))
                size += 1
        return cls(functionals, rows, keys, clean, masks, Forms.of(entries, size))

    def bounds(self, found: FormBounds) -> tuple[Tensor, Tensor]:
        """Bound the functionals directly and through weights, and intersect both."""
        differences, moves, boxes = self._rows(found)
        lower = torch.full((len(self.functionals),), -math.inf, dtype=torch.float64)
        upper = torch.full_like(lower, math.inf)
        for number, functional in enumerate(self.functionals):
            rows = functional.rows
            if not any(isinstance(atom, OutputAtom) for _, atom in functional.terms) and _balanced(
                functional
            ):
                low, high = functional_bounds([functional], {row: boxes[row] for row in rows})
                lower[number], upper[number] = low[0], high[0]
            if all(bool(differences[row].isfinite().all()) for row in rows):
                low, high = self._direct(number, found, differences, moves)
                lower[number] = torch.where(low > lower[number], low, lower[number])
                upper[number] = torch.where(high < upper[number], high, upper[number])
        return lower, upper

    def _rows(self, found: FormBounds) -> tuple[dict[Row, Tensor], dict[Row, Tensor], dict[Row, Box]]:
        """Return, per row, D[j, k] ≥ u_j − u_k for the deviations u = a − ã, bounds of |u|, and the weight box."""
        place = len(self.functionals)
        differences, moves, boxes = {}, {}, {}
        for row in self.rows:
            keys, a = self.keys[row], self.clean[row]
            S = len(a)
            gaps = torch.zeros(S, S, dtype=torch.float64)
            for j, k in itertools.combinations(keys, 2):
                gaps[j, k], gaps[k, j] = found.upper[place], -found.lower[place]
                place += 1
            move = torch.zeros(S, dtype=torch.float64)
            for j in keys:
                move[j] = torch.maximum(up(found.upper[place] - a[j]), up(a[j] - found.lower[place])).clamp(
                    min=0.0
                )
                place += 1
            boxes[row] = weight_box(differences=gaps, mask=self.masks[row.layer][row.position])
            differences[row] = up(gaps - down(a[:, None] - a[None, :])).fill_diagonal_(0.0)
            moves[row] = move
        return differences, moves, boxes

    def _direct(
        self, number: int, found: FormBounds, differences: dict[Row, Tensor], moves: dict[Row, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return f(ã) + [the tangent's range − its value at ã] + remainder, rounded outward."""
        functional = self.functionals[number]
        low, high = remainder(functional, self.clean, differences)
        value = functional.value(self.clean)
        at_clean, size, mismatch = (torch.zeros((), dtype=torch.float64) for _ in range(3))
        size = size + abs(functional.constant)
        for row, gradient in functional.gradient(self.clean).items():
            keys = list(self.keys[row])
            a = self.clean[row][keys]
            at_clean = at_clean + gradient[keys] @ a
            terms = _gradient_terms(functional, row, self.clean[row], keys)
            size = size + terms.sum() * (1.0 + a.abs().max() + math.log(len(keys) + 1))
            mismatch = mismatch + terms @ moves[row][keys]
        length = 4 * max(len(keys) for keys in self.keys.values()) + 128
        slack = up(gamma(length) * up(size + mismatch) * (1.0 + gamma(length)) + TINY)
        base = value - at_clean
        return (
            down(down(base + found.lower[number]) + down(low - slack)),
            up(up(base + found.upper[number]) + up(high + slack)),
        )


def _gradient_terms(functional: Functional, row: Row, a: Tensor, keys: list[int]) -> Float[Tensor, " K"]:
    """Return the sizes of the terms that each computed weight ∂f/∂a_j is a sum of."""
    total = torch.zeros(len(keys), dtype=torch.float64)
    for weight, atom in functional.terms:
        if isinstance(atom, OutputAtom) or atom.row != row:
            continue
        if isinstance(atom, RowEntropy):
            logs = a[keys].log_softmax(-1)
            s = logs.exp()
            total = total + abs(weight) * s * (1.0 + logs.abs() + (s * logs.abs()).sum())
        else:
            total = total + abs(weight) * atom.gradient(a)[keys].abs()
    return total


def _balanced(functional: Functional) -> bool:
    """Say whether score terms cancel row by row, so that weights alone determine the functional."""
    sums: dict[Row, list[float]] = {}
    for weight, atom in functional.terms:
        if not isinstance(atom, OutputAtom | RowEntropy):
            sums.setdefault(atom.row, []).append(weight)
    return all(math.fsum(weights) == 0.0 for weights in sums.values())
