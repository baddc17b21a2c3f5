"""Walk a program with tensor sets, and read bounds of forms off the sets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import FormBounds
from prooflens.engines.forms import Forms
from prooflens.engines.tensor_sets.forms import bound_scores
from prooflens.engines.tensor_sets.steps import Rules, SetOptions, Unbounded
from prooflens.engines.tensor_sets.tensor_set import FactorIds, TensorSet
from prooflens.models import OUTPUT, scores_name
from prooflens.models.program import INPUT, Program
from prooflens.models.sites import Scores, Softcap
from prooflens.numerics import up
from prooflens.problem import Problem
from prooflens.regions import Region


@dataclass(frozen=True)
class StageRecord:
    """One line of the generator table (`tab:gi_count_app`): counts before absorption, and the mean hull width."""

    name: str
    dependent: int
    independent: int
    width: float


@dataclass(eq=False)
class SetWalk:
    """The sets of the values that were asked for, and a record of every stage."""

    sets: dict[str, TensorSet] = field(default_factory=dict)
    stages: list[StageRecord] = field(default_factory=list)
    bounded: bool = True


def region_set(region: Region) -> TensorSet:
    """Return the input set, one linear generator per factor; the region's constraints are left out (sound)."""
    L = region.dense_generators()
    start = TensorSet.point(region.center)
    return TensorSet(start.c, L, torch.arange(len(L), device=L.device), start.Q, start.pairs, start.r)


def propagate(
    program: Program,
    region: Region,
    options: SetOptions,
    keep: Iterable[str],
    meaning: type[Rules] = Rules,
    limit: int | None = None,
) -> SetWalk:
    """Propagate sets through a program, and stop where a set leaves the float numbers.

    Args:
        program: the steps.
        region: the input set.
        options: which constraints and relaxations are used.
        keep: the names of the values whose sets are kept.
        meaning: what each step does to sets.
        limit: how many linear generators are kept; None for as many as the order of `options` says.
    """
    wanted = set(keep)
    last_use = {name: i for i, step in enumerate(program.steps) for name in step.inputs}
    rules = meaning(options, FactorIds(region.n_factors), limit or options.order * region.center.numel())
    live = {INPUT: region_set(region)}
    walk = SetWalk(stages=[_stage(INPUT, live[INPUT])])
    for i, step in enumerate(program.steps):
        if step.out in last_use or step.out in wanted:
            try:
                made, live[step.out] = rules(step, *(live[name] for name in step.inputs))
            except Unbounded:
                walk.bounded = False
                walk.stages.append(StageRecord(step.out, 0, 0, float("inf")))
                break
            walk.stages.append(_stage(step.out, made))
        for name in step.inputs:
            if last_use[name] == i and name not in wanted:
                live.pop(name, None)
    walk.sets = {name: x for name, x in live.items() if name in wanted}
    return walk


def _stage(name: str, x: TensorSet) -> StageRecord:
    low, high = x.hull()
    return StageRecord(name, x.dependent, x.independent, float((high - low).mean()))


def score_steps(problem: Problem, forms: Forms) -> dict[int, Scores | Softcap]:
    """Return the step that makes the scores of each layer that the forms read."""
    found: dict[int, Scores | Softcap] = {}
    for layer in forms.layers:
        step = problem.model.program(problem.n_tokens, scores_name(layer), problem.padding).steps[-1]
        assert isinstance(step, Scores | Softcap)
        found[layer] = step
    return found


def read_names(steps: dict[int, Scores | Softcap]) -> set[str]:
    """Return the values whose sets `bound_from` reads: queries and keys, or the scores if they are capped."""
    named = [step.inputs if isinstance(step, Scores) else (step.out,) for step in steps.values()]
    return {name for names in named for name in names}


def bound_from(
    sets: dict[str, TensorSet],
    problem: Problem,
    forms: Forms,
    steps: dict[int, Scores | Softcap],
    *,
    lemma: bool = False,
) -> FormBounds:
    """Bound forms by the sets of queries, keys and output; ±∞ where one is missing.

    Layers and the output are bounded apart and added up. The corners are those of the first layer.

    Args:
        sets: sets by the name of their value.
        problem: the model and the region.
        forms: what to bound.
        steps: the step that makes the scores of each layer.
        lemma: use the paper's `lem:quadratic_bound` alone.
    """
    lower = problem.region.center.new_zeros(forms.size)
    upper = lower.clone()
    corners: tuple[Tensor, Tensor] | None = None
    for layer, step in steps.items():
        part = _of_layer(forms, layer)
        read = [sets.get(name) for name in sorted(read_names({layer: step}))]
        if any(one is None for one in read):
            low, high = (torch.where(_touched(part), end, 0.0).to(lower) for end in (-torch.inf, torch.inf))
        elif isinstance(step, Softcap):
            low, high = _bound_capped(sets[step.out], part)
        else:
            q, k = (sets[name] for name in step.inputs)
            low, high, *found = bound_scores(step, q, k, part, problem.region.n_factors, lemma=lemma)
            corners = corners or (found[0], found[1])
        lower, upper = _sum_down(lower, low), up(upper + high)
    if forms.logits is not None:
        low, high = _bound_output(sets.get(OUTPUT), problem, forms.logits.to(lower))
        lower, upper = _sum_down(lower, low), up(upper + high)
    return FormBounds(lower, upper, *(corners or (None, None)))


def _bound_capped(scores: TensorSet, forms: Forms) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
    """Bound forms of one layer's capped scores, whose set is known itself."""
    weights = scores.c.new_zeros(forms.size, *scores.c.shape)
    place = (forms.index, forms.head, forms.position, forms.key)
    weights.index_put_(tuple(x.to(weights.device) for x in place), forms.weight.to(weights), accumulate=True)
    flat = weights.flatten(1)
    made = scores.linear(
        lambda x: x.flatten(-3) @ flat.T, lambda x: x.flatten(-3) @ flat.abs().T, flat.shape[1]
    )
    low, high = made.hull()
    return low, high


def _sum_down(x: Tensor, y: Tensor) -> Tensor:
    return -up(-x - y)


def _of_layer(forms: Forms, layer: int) -> Forms:
    here = forms.layer == layer
    names = ("index", "layer", "head", "position", "key", "weight")
    return replace(forms, logits=None, **{name: getattr(forms, name)[here] for name in names})


def _touched(forms: Forms) -> Tensor:
    touched = torch.zeros(forms.size, dtype=torch.bool)
    touched[forms.index] = True
    return touched


def _bound_output(
    output: TensorSet | None, problem: Problem, weights: Float[Tensor, "F C"]
) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
    if output is None:
        far = torch.where((weights != 0).any(-1), torch.inf, 0.0)
        return -far, far
    made = output.linear(
        lambda x: problem.read_output(x) @ weights.T,
        lambda x: problem.read_output(x) @ weights.abs().T,
        weights.shape[-1],
    )
    return tuple(made.hull())  # type: ignore[return-value]
