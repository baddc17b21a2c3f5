"""Many bounds at once: hundreds of linear forms per random model, one attack for the bounds of all engines.

A lower bound of a form is false if any point goes below it, whichever engine gave it. So the smallest and the largest
value of every form are searched for once, in one batch that starts at the corners of all engines, and every engine's
bounds must enclose what was attained.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prooflens.engines import Engine, FormBounds, forms_of
from prooflens.engines.attack import attained
from prooflens.engines.attack.effects import corners_of
from prooflens.engines.attack.landscape import Landscape
from prooflens.engines.attack.search import AttackBudget, AttackSearch, inside
from prooflens.engines.attack.targets import Targets
from prooflens.engines.functionals import bound_functionals
from prooflens.errors import ModelError
from prooflens.evaluation.soundness.cases import Case
from prooflens.evaluation.soundness.record import SoundnessReport, Violation
from prooflens.models import Prompt, Transformer, read_at
from prooflens.models.attribution import attribution
from prooflens.models.edits import places_of
from prooflens.models.reads import hooks_of, read_beside
from prooflens.problem import Problem
from prooflens.queries import Functional, Logit, Row, Score, Standing

MOST_FORMS = 200
"""Forms per case."""

MOST_PROJECTED = 24
"""… and where every step of the attack is projected onto constraints."""

WEIGHTED = 150
"""Random combinations of outputs in cases of effects and of readouts alone: models are walked once for all of them."""

READS = 0.5
"""The share of cases about outputs that are about a value inside the model."""

DIRECTIONS = 3
"""How many directions are read there."""

PAIRS = 0.25
"""The share of readouts that are of two values together, at different hooks or tokens."""

LENSES = 0.2
"""The share of these that is a logit lens, and the share that is direct logit attributions, where there are any."""

WALKS = ("cpz", "jacobian-proved", "pz", "pz-norm", "pz-simplex", "zonotope")
SMALL_INPUT = 32
"""Engines that carry sets through the model are asked about inputs of so many numbers: time is spent on many cases."""


def random_functionals(problem: Problem, layer: int, choose: random.Random) -> list[Functional]:
    """Margins of all pairs of keys, scores, weighted rows, sums over two rows, and differences of outputs."""
    found: list[Functional] = []
    rows = []
    for head in range(problem.model.architecture.n_heads):
        for position in range(problem.n_tokens):
            row = Row(layer, head, position)
            keys = problem.mask_of(layer)[position].nonzero()[:, 0].tolist()
            rows.append((row, keys))
            found += [
                Functional(((1.0, Score(row, a)), (-1.0, Score(row, b))), name="margin")
                for a in keys
                for b in keys
                if a < b
            ]
            found += [Functional(((1.0, Score(row, key)),), name="score") for key in keys]
            terms = tuple((choose.gauss(0.0, 1.0), Score(row, key)) for key in keys)
            found.append(Functional(terms, name="weighted row"))
    for _ in range(MOST_FORMS // 4):
        some = choose.sample(rows, min(2, len(rows)))
        terms = tuple((choose.gauss(0.0, 1.0), Score(row, choose.choice(keys))) for row, keys in some)
        found.append(Functional(terms, name="sum of rows"))
    return choose.sample(found, min(MOST_FORMS, len(found)))


def output_functionals(
    n_outputs: int, choose: random.Random, weighted: int = MOST_FORMS // 4
) -> list[Functional]:
    """Return outputs, their differences and random combinations of them.

    Args:
        n_outputs: how many outputs there are.
        choose: what draws the combinations.
        weighted: how many of them.
    """
    found = [Functional(((1.0, Logit(i)),), name="output") for i in range(n_outputs)]
    found += [
        Functional(((1.0, Logit(a)), (-1.0, Logit(b))), name="output margin")
        for a in range(n_outputs)
        for b in range(a)
    ]
    for _ in range(weighted):
        terms = tuple((choose.gauss(0.0, 1.0), Logit(i)) for i in range(n_outputs))
        found.append(Functional(terms, name="weighted output"))
    return found


def random_readout(problem: Problem, choose: random.Random, seed: int) -> Transformer:
    """The model of a problem, ended at a random hook and token with random directions, or cut after a block.

    Directions of some are direct logit attributions of a part, where the model's parts have them, and some read two
    values together.

    Args:
        problem: the model and the region.
        choose: what draws them.
        seed: the number of the case: which values are read together is drawn apart, so that all else stays as it was.
    """
    pairs = random.Random(f"values of case {seed} that are read together")
    if pairs.random() < PAIRS:
        return _random_pair(problem, pairs)
    model, kind = problem.model, choose.random()
    a = model.architecture
    if kind < LENSES and a.d_out is not None and a.n_layers > 1:
        return model.cut(choose.randrange(1, a.n_layers))
    if kind > 1.0 - LENSES and a.d_out is not None:
        try:
            return _random_attributions(problem, choose)
        except ModelError:  # its parts do not add up to what its head reads
            pass
    hook = choose.choice(hooks_of(problem.model.architecture))
    rows = [[choose.gauss(0.0, 1.0) for _ in range(hook.width)] for _ in range(DIRECTIONS)]
    W = torch.tensor(rows, dtype=torch.float64)
    read = read_at(problem.model, hook.name, choose.randrange(problem.n_tokens), W)
    return read.with_head(W, W[:, 0]) if choose.random() < 0.5 else read


def _random_pair(problem: Problem, choose: random.Random) -> Transformer:
    """Random combinations of two values at random hooks and tokens."""
    hooks = [choose.choice(hooks_of(problem.model.architecture)) for _ in range(2)]
    first, second = sorted(hooks, key=lambda hook: -hook.layer)
    width = first.width + second.width
    W = torch.tensor([[choose.gauss(0.0, 1.0) for _ in range(width)] for _ in range(DIRECTIONS)])
    here, there = ((hook.name, choose.randrange(problem.n_tokens)) for hook in (first, second))
    return read_beside(problem.model, here, there, W.double())


def _random_attributions(problem: Problem, choose: random.Random) -> Transformer:
    """What a random part adds to random combinations of outputs, the last norm frozen at the centre."""
    model = problem.model
    part = choose.choice(places_of(model.architecture))
    prompt = Prompt(problem.region.center, ("",) * problem.n_tokens)
    rows = [
        torch.tensor([choose.gauss(0.0, 1.0) for _ in range(len(model.head[0]))]) for _ in range(DIRECTIONS)
    ]
    found = [attribution(model, part, row, prompt) for row in rows]
    return read_at(model, found[0][0], problem.n_tokens - 1, torch.stack([v for _, v in found]))


def try_forms(
    case: Case, engines: Sequence[Engine], budget: AttackBudget, report: SoundnessReport, kind: str = "forms"
) -> None:
    """Ask engines for many forms of a case's model and region; one attack is on everything that they prove.

    Args:
        case: a random model and region.
        engines: who is asked; those that refuse, or would take too long, are left out.
        budget: how hard what they prove is attacked.
        report: gets the counts and what was violated.
        kind: `forms` of scores, outputs and values inside the model, as the case has it; or `reads` of the last alone.
    """
    report.cases[kind] += 1
    problem, choose = case.problem, random.Random(case.seed)
    outputs = problem.model.architecture.d_out or 0
    if kind == "reads" or (case.about_output and choose.random() < READS):
        problem = replace(problem, model=random_readout(problem, choose, case.seed))
        outputs = problem.model.architecture.d_out or 0
        weighted = WEIGHTED if kind == "reads" else MOST_FORMS // 4
        functionals = [
            replace(f, name=f.name.replace("output", "readout"))
            for f in output_functionals(outputs, choose, weighted)
        ]
    elif case.about_output:
        functionals = output_functionals(outputs, choose)
    else:
        layer = choose.randrange(problem.model.architecture.n_layers)
        functionals = random_functionals(problem, layer, choose)
    if problem.region.constraints is not None:
        functionals = functionals[:MOST_PROJECTED]
    forms = forms_of(functionals, outputs)
    answers = {
        engine.name: engine.bound_forms(problem, forms)
        for engine in engines
        if affordable(engine, problem) and engine.refuses(problem, forms) is None
    }
    if not answers:
        return
    targets = Targets.of_forms(forms, problem.n_tokens)
    search = AttackSearch(
        Landscape.of(problem, targets.layers, targets.logits is not None, problem.model), targets
    )
    search.run(budget, case.seed, corners_of(list(answers.values())))
    alpha, _ = inside(problem.region, search.alpha)
    low, high = attained(problem, targets, alpha).split(forms.size)
    for name, bounds in answers.items():
        compare(case, name, functionals, bounds, low, -high, report)
    if problem.model.architecture.read_hook is not None and outputs > 1:
        asked = [engine for engine in engines if engine.name in answers]
        _try_standings(case, problem, asked, alpha, choose, report)


def _try_standings(
    case: Case,
    problem: Problem,
    engines: Sequence[Engine],
    alpha: Tensor,
    choose: random.Random,
    report: SoundnessReport,
) -> None:
    """Ask whether readouts are among the k largest; the points that make forms extreme must lie within the bounds."""
    outputs = problem.model.architecture.d_out or 0
    atoms = [
        Standing(i, tuple(j for j in range(outputs) if j != i), choose.randrange(1, outputs + 1))
        for i in range(outputs)
    ]
    sign = choose.choice((1.0, -1.0))
    functionals = [Functional(((sign, atom),), name="standing of a readout") for atom in atoms]
    with torch.no_grad():
        _, read = problem.values(problem.region.point(alpha), (), True)
    values = torch.stack([f.value({}, read) for f in functionals])
    for engine in engines:
        found = bound_functionals(engine, problem, functionals, widths=True)
        bounds = FormBounds(found.lower.to(values), found.upper.to(values))
        compare(case, engine.name, functionals, bounds, values.amin(1), values.amax(1), report)


def affordable(engine: Engine, problem: Problem) -> bool:
    """Say whether an engine is asked about an input of this size."""
    small = problem.region.center.numel() <= SMALL_INPUT
    return engine.name != "exact" and (small or engine.name not in WALKS)


def compare(
    case: Case,
    engine: str,
    functionals: Sequence[Functional],
    bounds: FormBounds,
    low: Tensor,
    high: Tensor,
    report: SoundnessReport,
) -> None:
    """Check that what was attained lies within the bounds, up to the rounding of the attained value itself.

    Args:
        case: the random model and region.
        engine: the name of whose bounds they are.
        functionals: what was bounded.
        bounds: the proved bounds.
        low: the least value of each that was attained.
        high: the largest one.
        report: gets the counts and what was violated.
    """
    known = bounds.lower.isfinite().int() + bounds.upper.isfinite().int()
    for functional, count in zip(functionals, known.tolist(), strict=True):
        report.attacked[(case.family, engine, functional.name)] += count
    slack = torch.minimum(low - bounds.lower, bounds.upper - high)
    allowed = 64 * 2.0**-53 * (1.0 + low.abs() + high.abs())
    wrong = ~(slack >= -allowed)
    for i in wrong.nonzero()[:, 0].tolist():
        what = (
            f"{functionals[i].name} {functionals[i].terms}: [{float(low[i])!r}, {float(high[i])!r}] is attained, "
            f"[{float(bounds.lower[i])!r}, {float(bounds.upper[i])!r}] was proved"
        )
        report.violations.append(Violation(case.seed, case.family, engine, what))
    spread = high - low
    if len(relative := (slack / spread)[(spread > allowed) & slack.isfinite()]):
        report.note_slack(engine, float(relative.min()))
