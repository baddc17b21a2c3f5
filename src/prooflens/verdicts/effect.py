"""The effect of an edit over a region: does a part matter everywhere, does the rest not, is the answer the same?

With m a difference of logits, a logit, a probability, or a readout, M a model and M′ an edit of it (`models.edits`):

| claim | for all x of the region |
|---|---|
| necessary | m(M(x)) − m(M′(x)) ≥ δ |
| faithful | abs(m(M(x)) − m(M′(x))) ≤ δ |
| sufficient | the answer of M′(x) is that of M(x) |
| patched | m(M′(x)) has the sign of m(M(x′)), x′ another prompt whose values are patched in (`patched`) |

Bounds are joint where the engine has joint ones (`engines.relational`). `fails` comes with a point, run through both
models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from prooflens.engines import Bounds, FormBounds, Guarantee, get_engine
from prooflens.engines.attack import AttackBudget, Witness
from prooflens.engines.chebyshev import MOST_FACTORS
from prooflens.engines.protocol import OutOfTimeError
from prooflens.errors import EngineError
from prooflens.models import Prompt, Transformer, load
from prooflens.problem import Problem
from prooflens.progress import shown
from prooflens.queries import Argmax, Query
from prooflens.queries.effects import EffectQuery
from prooflens.results import Outcome, Verdict
from prooflens.results.effects import Effect, EffectPoint
from prooflens.verdicts.certify import decide_question
from prooflens.verdicts.decide import verdict_of
from prooflens.verdicts.pair import Edits, Pair
from prooflens.verdicts.patched import decide_patched, patches, side_of
from prooflens.verdicts.question import Place, as_prompt, ask, source_of
from prooflens.verdicts.settings import Options, Settings, checked_device
from prooflens.verdicts.sites import Vectors
from prooflens.verdicts.stages import is_small

EFFORT = AttackBudget(256, 4, 20)
"""How hard the difference is attacked where no budget is given."""

PROVING = 0.9
"""Which share of the time engines have; the rest is left for the attack."""

MOST_WITH_VALUES = 3
"""Where parts are at any value of a set, `chebyshev` is asked on regions of at most so many factors, if not by name."""

LAST = "interval"
"""Who is asked even where the time has ended, on large models alone: it takes no longer than a few runs of one."""

OTHERS = ("taylor", "crown", LAST)
"""Who is asked, in this order, where a region has many factors, until one knows bounds."""


def effect(
    model: Transformer | str,
    edited: Edits,
    prompt: Prompt | str | Tensor,
    region: Place,
    metric: str | Query,
    *,
    necessary: float | None = None,
    faithful: float | None = None,
    sufficient: bool = False,
    patched: Prompt | str | Tensor | None = None,
    vectors: Vectors | None = None,
    **options: Unpack[Options],
) -> Effect:
    """Bound the effect of an edit on a metric over a whole region, m(M(x)) − m(M′(x)), and decide claims about it.

    Args:
        model: a model M, or what `load` takes.
        edited: M′: an edited model (`pl.edit`), or the parts to take out, as in `"a9.h6"`.
        prompt: a text, a prompt of the model, or an input of shape [S, d].
        region: where the effect is bounded: a ball, a segment, a hull, a span.
        metric: `"logit3-logit5"`, `"logit{A}-logit{B}"` by slots of a template or by tokens' texts, `"logit3"`,
            `"prob(3|3,5)"`, a probability among some outputs (`"prob(3)"`: among all), `"kl(3,5)"`, the divergence
            KL(M ‖ M′) of the distributions on these outputs, which is the effect itself; `"neuron 5.12@-1"`,
            `"read(blocks.8.hook_resid_post@-1,DIR)"`, `"feature SAE.512@-1"`.
        necessary: claim that the effect is at least this everywhere.
        faithful: claim that the effect is at most this everywhere, on both sides.
        sufficient: claim that both models give the same answer everywhere.
        patched: another prompt, as long as this one: parts that are given by their names are held at their values on
            it (not at zero), and the claim is that the edited model's metric has the sign of the model's there.
        vectors: the directions and dictionaries that the metric names.
        options: engine, memory, time, device, progress, seed and budget: see `Options`.

    Returns:
        Proved bounds of the effect, the least and the largest that was attained, and a verdict for every claim.

    Raises:
        ProoflensError: where an argument is not what it should be; the message says what to do.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> found = pl.effect(model, "a1.h0", model.example(), pl.Ball(0.01), "logit0-logit1", faithful=1.0)
        >>> found.lower <= found.least.effect <= found.most.effect <= found.upper
        True
        >>> found.claims[0].verdict
        <Verdict.HOLDS: 'holds'>
    """
    (found,) = effects(
        model,
        [edited],
        prompt,
        region,
        metric,
        necessary=necessary,
        faithful=faithful,
        sufficient=sufficient,
        patched=patched,
        vectors=vectors,
        **options,
    )
    return found


def effects(
    model: Transformer | str,
    edits: Sequence[Edits],
    prompt: Prompt | str | Tensor,
    region: Place,
    metric: str | Query,
    *,
    necessary: float | None = None,
    faithful: float | None = None,
    sufficient: bool = False,
    patched: Prompt | str | Tensor | None = None,
    vectors: Vectors | None = None,
    found: Callable[[int, Effect], None] = lambda number, effect: None,
    **options: Unpack[Options],
) -> list[Effect]:
    """Bound the effects of several edits, each by itself, on one metric over one region; decide claims about each.

    What is proved is what `effect` proves of each of them. The model's own bounds are computed once where the engine
    can share them, and an edit of a late layer costs the layers from there on.

    Args:
        model: a model M, or what `load` takes.
        edits: for each effect an edited model (`pl.edit`), or the parts to take out, as in `"a9.h6"`.
        prompt: a text, a prompt of the model, or an input of shape [S, d].
        region: where effects are bounded: a ball, a segment, a hull, a span.
        metric: as in `effect`.
        necessary: claim of each effect that it is at least this everywhere.
        faithful: claim of each effect that it is at most this everywhere, on both sides.
        sufficient: claim that each edited model gives the model's answer everywhere.
        patched: another prompt on whose values named parts are held, as in `effect`.
        vectors: the directions and dictionaries that the metric names.
        found: called with the number of an edit and its effect as soon as that is known.
        options: engine, memory, time (of all effects together), device, progress, seed and budget: see `Options`.

    Returns:
        An `Effect` for each edit, in the order of `edits`.

    Raises:
        ProoflensError: where an argument is not what it should be; the message says what to do.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> both = pl.effects(model, ["a1.h0", "a1.h1"], model.example(), pl.Ball(0.01), "logit0-logit1")
        >>> [one.lower < one.upper for one in both]
        [True, True]
    """
    settings = Settings.of(**options)
    if settings.time is not None:
        settings = settings.until(time.monotonic() + settings.time, settings.time)
    check_thresholds(necessary, faithful)
    held = load(model) if settings.device is None else load(model).to(checked_device(settings.device))
    other = None if patched is None else as_prompt(held, patched)
    if patched is not None and other is not None:
        to = patched if isinstance(patched, str) else other
        edits = [patches(held, edited, to) for edited in edits]
    pairs: list[Pair] = []
    asked, source = (prompt, region, metric, settings.device, vectors), source_of(model)
    for edited in edits:
        pairs.append(Pair.of(held, edited, *asked, likes=pairs, source=source))
    wanted = {"range": 0.0, "necessary": necessary, "faithful": faithful}
    claims = {kind: delta for kind, delta in wanted.items() if delta is not None}
    known: dict[int, Effect] = {}
    with shown(settings.progress) as tell:
        told = replace(settings, progress=tell)
        # The walk for the earliest edit serves all others.
        for number in sorted(range(len(pairs)), key=lambda i: pairs[i].first_layer):
            known[number] = _effect(pairs[number], claims, sufficient, other, told, vectors)
            found(number, known[number])
    return [known[number] for number in range(len(pairs))]


def _effect(
    pair: Pair,
    claims: Mapping[str, float],
    sufficient: bool,
    other: Prompt | None,
    settings: Settings,
    vectors: Vectors | None,
) -> Effect:
    """Bound the effect of one edit, attack it, and decide claims about it."""
    begin = time.perf_counter()
    side = None if other is None else side_of(pair, other)
    left = settings.left
    proving = (
        settings if left is None else settings.until(time.monotonic() + PROVING * left, settings.allotted)
    )
    bounds, engine, refused = _bounds(pair, proving)
    settings.options.progress("attack", PROVING)
    reached = pair.attacked(settings.budget or EFFORT, settings.seed, bounds, settings.options)
    least, most = (pair.point(end) for end in (reached.lower_corner, reached.upper_corner))
    lower, upper, spent = float(bounds.lower[0]), float(bounds.upper[0]), time.perf_counter() - begin
    proved = Proved(lower, upper, engine, refused, spent)
    queries = [pair.query(kind, delta) for kind, delta in claims.items()]
    outcomes = [_decided(pair, query, proved, (least, most)) for query in queries]
    if sufficient:
        outcomes.append(_same_answer(pair, [least, most], settings))
    if side is not None:
        outcomes.append(decide_patched(pair, side, settings, vectors))
    ends = lower, upper, least, most, engine, time.perf_counter() - begin
    return Effect(pair.subject, pair.metric, pair.clean, *ends, outcomes)


def broken_at_reference(pair: Pair, faithful: float) -> Effect | None:
    """Return the effect with the prompt itself as witness, where that breaks the claim; nothing is bounded.

    Args:
        pair: the model, the edited one and the metric.
        faithful: δ of the claim that the effect stays within ±δ.

    Returns:
        The effect, its ends infinite; None where the prompt is no point of the region, or does not break the claim.
    """
    region, (first, second) = pair.problem.region, pair.clean
    if not region.holds_reference or not abs(first - second) > faithful + pair.blur(first - second):
        return None
    point = EffectPoint(region.reference, region.anchor_factors, first - second)
    nothing = Proved(-math.inf, math.inf, "clean", "", 0.0)
    outcomes = [
        _decided(pair, pair.query(kind, delta), nothing, [point])
        for kind, delta in (("range", 0.0), ("faithful", faithful))
    ]
    ends = nothing.lower, nothing.upper, point, point, nothing.engine, nothing.seconds
    return Effect(pair.subject, pair.metric, pair.clean, *ends, outcomes)


def check_thresholds(necessary: float | None, faithful: float | None) -> None:
    """Raise a `QueryError` unless thresholds are finite numbers, and that of `faithful` not below 0.

    Args:
        necessary: the size that an effect should have at least; None if that was not asked.
        faithful: the size that it should have at most; likewise.
    """
    for kind, delta in (("necessary", necessary), ("faithful", faithful)):
        if delta is not None:
            EffectQuery(kind, "", "", delta)


def _bounds(pair: Pair, settings: Settings) -> tuple[FormBounds, str, str]:
    """Bounds of the first engine that knows any, its name, and who refused."""
    names = settings.engines
    if settings.planned:
        few = pair.problem.region.n_factors <= (MOST_WITH_VALUES if pair.moved else MOST_FACTORS)
        names = ("chebyshev", *OTHERS) if few else OTHERS
    refused, found = [], None
    for name in names:
        engine = get_engine(name)
        if engine.guarantee is not Guarantee.PROVED:
            raise EngineError(f"{name} only estimates: ask an engine that proves, or none")
        if settings.options.late and name not in (names[0], LAST) and not is_small(pair.problem):
            refused.append(f"{name} was not asked: the time had ended, a longer one asks it")
            continue
        if reason := engine.refuses(pair.problem, pair.forms, settings.options):
            refused.append(reason)
            continue
        try:
            found = pair.bounds(engine, settings.options)
        except OutOfTimeError as error:
            refused.append(f"{name}: {error}")
            continue
        if bool(found.lower.isfinite().all() & found.upper.isfinite().all()):
            return found, name, "".join(f"; {reason}" for reason in refused)
    why = "".join(f"; {reason}" for reason in refused)
    if found is None:
        raise EngineError(f"no engine bounds this effect{why}")
    return found, names[-1], why


@dataclass(frozen=True)
class Proved:
    """Proved ends of an effect, whose they are, who refused, and the time that they took."""

    lower: float
    upper: float
    engine: str
    refused: str
    seconds: float


def _decided(pair: Pair, query: EffectQuery, proved: Proved, points: Sequence[EffectPoint]) -> Outcome:
    """What bounds and attained effects say of a claim about the size of an effect."""
    first, second = pair.clean
    outputs = pair.question.problem.model.architecture.d_out or 0
    claim = query.claim(pair.functional, outputs, first - second)
    found = Bounds(*query.bounds(proved.lower, proved.upper), Guarantee.PROVED, proved.engine, proved.seconds)
    values = query.values([point.effect for point in points])
    worst = int(values.amin(-1).argmin())
    missed = values[worst] + pair.blur(points[worst].effect)
    broken = query.kind != "range" and claim.broken_by(missed)
    verdict = verdict_of(claim, broken, found)
    why = f"{proved.engine} proves [{proved.lower:.6g}, {proved.upper:.6g}]{proved.refused}"
    point = points[worst]
    reasons = {
        Verdict.HOLDS: why,
        Verdict.FAILS: f"a point has {point.effect:.6g}",
        Verdict.UNKNOWN: f"{why}, and no point breaks it",
    }
    return Outcome(
        claim,
        verdict,
        found,
        Witness(point.x, point.alpha, values[worst]) if verdict is Verdict.FAILS else None,
        reasons[verdict],
        "attack" if verdict is Verdict.FAILS else proved.engine,
        None if query.kind == "range" else float(values[worst].min()),
        proved.seconds,
    )


def _same_answer(pair: Pair, points: Sequence[EffectPoint], settings: Settings) -> Outcome:
    """Both answers are proved to be the clean one everywhere, or a point has two, or it is not known."""
    begin, query = time.perf_counter(), pair.query("sufficient")
    region, models = pair.problem.region, (pair.first, pair.second)
    whole = [Problem(model, region) for model in models]
    winner = _answer(whole[0], region.reference)
    outcomes = []
    for model in models:
        question = ask(model, pair.prompt, pair.region, queries=Argmax(answer=winner))
        outcomes += decide_question(question, settings).outcomes
    seen = [outcome.witness for outcome in outcomes if outcome.witness is not None]
    nothing = torch.zeros(0, dtype=torch.float64)
    claim = query.claim(pair.functional, 0, 0.0)

    def ended(verdict: Verdict, reason: str, engine: str, witness: Witness | None = None) -> Outcome:
        """The outcome of this verdict for this reason: by which engine, and the witness that breaks it if one does."""
        known = Bounds(nothing, nothing, Guarantee.PROVED, engine, 0.0)
        return Outcome(claim, verdict, known, witness, reason, engine, None, time.perf_counter() - begin)

    if all(outcome.verdict is Verdict.HOLDS for outcome in outcomes):
        engine = "+".join(dict.fromkeys(outcome.engine for outcome in outcomes))
        return ended(Verdict.HOLDS, f"both answers are proved to be output {winner}", engine)
    places = [(point.x, point.alpha) for point in points] + [(one.x, one.alpha) for one in seen]
    if region.holds_reference:
        places.insert(0, (region.reference, region.anchor_factors))
    for x, alpha in places:
        first, second = (_answer(problem, x) for problem in whole)
        if first is not None and second is not None and first != second:
            said = f"a point has answers {first} and {second}"
            return ended(Verdict.FAILS, said, "attack", Witness(x, alpha, nothing))
    left = " and ".join(
        f"{model.name}: {outcome.verdict.value}" for model, outcome in zip(models, outcomes, strict=True)
    )
    said = f"that the answer is always output {winner}: {left}"
    return ended(Verdict.UNKNOWN, said, outcomes[-1].engine)


def _answer(problem: Problem, x: Tensor) -> int | None:
    """The largest output at a point; None for a tie."""
    with torch.no_grad():
        _, output = problem.values(x[None], (), output=True)
    assert output is not None
    (first, second), places = output[0].topk(2)
    return int(places[0]) if bool(first > second) else None
