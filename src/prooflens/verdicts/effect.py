"""The effect of an edit over a region: does a part matter everywhere, does the rest not, is the answer the same?

With m a difference of logits, a logit, or a readout, M a model and M′ an edit of it (`models.edits`):

| claim | for all x of the region |
|---|---|
| necessary | m(M(x)) − m(M′(x)) ≥ δ |
| faithful | abs(m(M(x)) − m(M′(x))) ≤ δ |
| sufficient | the answer of M′(x) is that of M(x) |

Bounds are joint where the engine has joint ones (`engines.relational`). `fails` comes with a point, run through both
models.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from prooflens.engines import FormBounds, Guarantee, forms_of, get_engine
from prooflens.engines.attack import AttackBudget
from prooflens.engines.attack.effects import attack_effects
from prooflens.engines.chebyshev import MOST_FACTORS
from prooflens.engines.forms import Forms
from prooflens.engines.relational import bound_effects
from prooflens.errors import EngineError, ModelError, QueryError
from prooflens.models import Prompt, Transformer, load
from prooflens.models.edits import Edit, edit
from prooflens.problem import Problem
from prooflens.progress import shown
from prooflens.queries import Argmax, Query, SiteQuery, parse_metric
from prooflens.queries.parse import metric_text
from prooflens.results import Verdict
from prooflens.results.effects import Effect, EffectClaim, EffectPoint
from prooflens.verdicts.certify import decide_question
from prooflens.verdicts.question import Place, Question, as_prompt, ask, source_of
from prooflens.verdicts.settings import Options, Settings, checked_device
from prooflens.verdicts.sites import Vectors

EFFORT = AttackBudget(256, 4, 20)
"""How hard the difference is attacked where no budget is given."""

OTHERS = ("taylor", "crown", "interval")
"""Who is asked, in this order, where a region has many factors, until one knows bounds."""

Edits = Transformer | str | Edit | Sequence[str | Edit]
"""An edited model, or what `edit` takes."""


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
            `"neuron 5.12@-1"`, `"read(blocks.8.hook_resid_post@-1,DIR)"`, `"feature SAE.512@-1"`.
        necessary: claim that the effect is at least this everywhere.
        faithful: claim that the effect is at most this everywhere, on both sides.
        sufficient: claim that both models give the same answer everywhere.
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
    begin, settings = time.perf_counter(), Settings.of(**options)
    check_thresholds(necessary, faithful)
    pair = Pair.of(model, edited, prompt, region, metric, settings.device, vectors)
    with shown(settings.progress) as tell:
        told = replace(settings, progress=tell)
        bounds, engine, refused = _bounds(pair, told)
        reached = attack_effects(
            pair.problem, pair.edited, pair.forms, settings.budget or EFFORT, settings.seed, bounds
        )
        least, most = (pair.point(side) for side in (reached.lower_corner, reached.upper_corner))
        lower, upper = float(bounds.lower[0]), float(bounds.upper[0])
        why = f"{engine} proves [{lower:.6g}, {upper:.6g}]{refused}"
        claims = list(_range_claims(lower, upper, least, most, necessary, faithful, why))
        if sufficient:
            claims.append(_same_answer(pair, [least, most], told))
    other = pair.second
    return Effect(
        pair.question.subject,
        other.name,
        other.sha256,
        pair.metric,
        pair.clean,
        lower,
        upper,
        least,
        most,
        engine,
        time.perf_counter() - begin,
        claims,
    )


@dataclass(frozen=True, eq=False)
class Pair:
    """A model and an edit of it on one region, and a metric as a form of both.

    Attributes:
        question: the metric, bound to the model.
        first: the whole model.
        second: the whole edited model.
        problem: the model with only the outputs that the metric reads.
        edited: the edited one, likewise.
        forms: the metric.
        metric: the metric in words.
        prompt: the prompt.
        region: the region as it was given.
    """

    question: Question
    first: Transformer
    second: Transformer
    problem: Problem
    edited: Problem
    forms: Forms
    metric: str
    prompt: Prompt
    region: Place

    @classmethod
    def of(
        cls,
        model: Transformer | str,
        edited: Edits,
        prompt: Prompt | str | Tensor,
        region: Place,
        metric: str | Query,
        device: str | None,
        vectors: Vectors | None,
    ) -> Pair:
        """Bind a metric to a prompt in both models; nothing is bounded yet.

        Args:
            model: the model, or what `load` takes.
            edited: the edited model, or its edits.
            prompt: a text, a prompt of the model, or an input.
            region: where the effect is asked about.
            metric: what is measured.
            device: where to run; None for where the model is.
            vectors: the directions and dictionaries that the metric names.
        """
        first = load(model) if device is None else load(model).to(checked_device(device))
        second = edited.to(first.device) if isinstance(edited, Transformer) else edit(first, edited)
        if second.architecture != first.architecture:
            raise ModelError(f"{second.name} is no edit of {first.name}: their architectures differ")
        held = as_prompt(first, prompt)
        query = as_metric(metric, first, held)
        check_metric(first, query)
        source = source_of(model)
        asked = [
            ask(one, held, region, queries=[query], source=source, vectors=vectors) for one in (first, second)
        ]
        functionals = [f for claim in asked[0].claims for f in claim.functionals]
        if len(functionals) != 1:
            raise QueryError(f"{metric} reads {len(functionals)} values: an effect is measured on one")
        problem = asked[0].problem
        forms = forms_of(functionals, problem.model.architecture.d_out or 0)
        assert forms.logits is not None
        used = (forms.logits != 0).any(0).nonzero()[:, 0]
        narrow, other = (replace(problem, model=_narrowed(q.problem.model, used)) for q in asked)
        other = replace(other, region=narrow.region)
        forms = replace(forms, logits=forms.logits[:, used])
        return cls(asked[0], first, second, narrow, other, forms, metric_text(query), held, region)

    def metrics(self, x: Tensor) -> tuple[float, float]:
        """Run a point through both models and measure."""
        assert self.forms.logits is not None
        row = self.forms.logits[0].to(x)
        with torch.no_grad():
            outputs = [asked.values(x[None], (), output=True)[1] for asked in (self.problem, self.edited)]
        first, second = (float((out[0] * row).sum()) for out in outputs if out is not None)
        return first, second

    @property
    def clean(self) -> tuple[float, float]:
        """The metric at the region's reference."""
        return self.metrics(self.problem.region.reference)

    def point(self, alpha: Tensor | None) -> EffectPoint:
        """Run the point of some factors through both models."""
        assert alpha is not None
        x = self.problem.region.point(alpha[:1])[0]
        first, second = self.metrics(x)
        return EffectPoint(x, first - second)


def _narrowed(model: Transformer, used: Tensor) -> Transformer:
    """The model with some of its outputs: rows of its head, as they are."""
    weight, bias = model.head
    used = used.to(weight.device)
    return model.with_head(weight[used], bias[used])


def as_metric(metric: str | Query, model: Transformer, prompt: Prompt) -> Query:
    """Return what is measured; outputs in braces that are no slot of the prompt are tokens by their texts.

    Args:
        metric: a metric in its short form.
        model: its tokenizer knows the tokens.
        prompt: its roles are the slots.
    """
    if not isinstance(metric, str):
        return metric

    def index(match: re.Match[str]) -> str:
        text, reader = match[1], model.tokenizer
        if text.split(".")[0].strip() in prompt.roles or reader is None:
            return match[0]
        found = [i for i in reader.encode(text) if reader.token(i) == text]
        if len(found) != 1:
            raise QueryError(f"{{{text}}} is neither a slot of the prompt nor one token of {model.name}")
        return f"logit{found[0]}"

    return parse_metric(re.sub(r"logit\{([^{}]*)\}", index, metric), prompt.roles)


def check_metric(model: Transformer, metric: Query) -> None:
    """Raise a `QueryError` where a metric would be measured on logits that the model caps afterwards.

    The order of logits is the same before and after a cap, and their differences are not.

    Args:
        model: the model that is edited.
        metric: what is measured.
    """
    if model.architecture.logit_cap and not isinstance(metric, SiteQuery):
        raise QueryError(
            f"logits of {model.name} go through a cap, which changes their differences: measure a readout, "
            "as in 'read(blocks.1.hook_resid_post@-1,DIR)'"
        )


def check_thresholds(necessary: float | None, faithful: float | None) -> None:
    """Raise a `QueryError` unless thresholds are finite numbers, and that of `faithful` not below 0."""
    for name, value in (("necessary", necessary), ("faithful", faithful)):
        if value is not None and not math.isfinite(value):
            raise QueryError(f"{name} takes a finite number, got {value}")
    if faithful is not None and faithful < 0.0:
        raise QueryError(f"an effect within {faithful} is none: give faithful a number of at least 0")


def _bounds(pair: Pair, settings: Settings) -> tuple[FormBounds, str, str]:
    """Bounds of the first engine that knows any, its name, and who refused."""
    names = settings.engines
    if settings.planned:
        few = pair.problem.region.n_factors <= MOST_FACTORS
        names = ("chebyshev", *OTHERS) if few else OTHERS
    refused, found = [], None
    for name in names:
        engine = get_engine(name)
        if engine.guarantee is not Guarantee.PROVED:
            raise EngineError(f"{name} only estimates: ask an engine that proves, or none")
        if reason := engine.refuses(pair.problem, pair.forms, settings.options):
            refused.append(reason)
            continue
        found = bound_effects(engine, pair.problem, pair.edited, pair.forms, settings.options)
        if bool(found.lower.isfinite().all() & found.upper.isfinite().all()):
            return found, name, ""
    why = "".join(f"; {reason}" for reason in refused)
    if found is None:
        raise EngineError(f"no engine bounds this effect{why}")
    return found, names[-1], why


def _range_claims(
    lower: float,
    upper: float,
    least: EffectPoint,
    most: EffectPoint,
    necessary: float | None,
    faithful: float | None,
    why: str,
) -> Iterator[EffectClaim]:
    """What bounds and attained effects say of the two claims about the size of an effect."""
    if necessary is not None:
        broken = least if least.effect < necessary else None
        yield _decided(f"necessary: effect >= {necessary:g}", lower >= necessary, broken, why)
    if faithful is not None:
        broken = max((least, most), key=lambda point: abs(point.effect))
        broken = broken if abs(broken.effect) > faithful else None
        met = lower >= -faithful and upper <= faithful
        yield _decided(f"faithful: |effect| <= {faithful:g}", met, broken, why)


def _decided(claim: str, met: bool, broken: EffectPoint | None, why: str) -> EffectClaim:
    if met:
        return EffectClaim(claim, Verdict.HOLDS, why)
    if broken is not None:
        return EffectClaim(claim, Verdict.FAILS, f"a point has {broken.effect:.6g}", broken)
    return EffectClaim(claim, Verdict.UNKNOWN, f"{why}, and no point breaks it")


def _same_answer(pair: Pair, points: Sequence[EffectPoint], settings: Settings) -> EffectClaim:
    """Both answers are proved to be the clean one everywhere, or a point has two, or it is not known."""
    claim = "sufficient: the same answer"
    region, models = pair.problem.region, (pair.first, pair.second)
    whole = [Problem(model, region) for model in models]
    winner = _answer(whole[0], region.reference)
    outcomes = []
    for model in models:
        question = ask(model, pair.prompt, pair.region, queries=Argmax(answer=winner))
        outcomes += decide_question(question, settings).outcomes
    if all(outcome.verdict is Verdict.HOLDS for outcome in outcomes):
        return EffectClaim(claim, Verdict.HOLDS, f"both answers are proved to be output {winner}")
    seen = [outcome.witness.x for outcome in outcomes if outcome.witness is not None]
    for x in [region.reference, *(point.x for point in points), *seen]:
        first, second = (_answer(problem, x) for problem in whole)
        if first is not None and second is not None and first != second:
            one, other = pair.metrics(x)
            return EffectClaim(
                claim, Verdict.FAILS, f"a point has answers {first} and {second}", EffectPoint(x, one - other)
            )
    left = " and ".join(
        f"{model.name}: {outcome.verdict.value}" for model, outcome in zip(models, outcomes, strict=True)
    )
    return EffectClaim(claim, Verdict.UNKNOWN, f"that the answer is always output {winner}: {left}")


def _answer(problem: Problem, x: Tensor) -> int | None:
    """The largest output at a point; None for a tie."""
    with torch.no_grad():
        _, output = problem.values(x[None], (), output=True)
    assert output is not None
    (first, second), places = output[0].topk(2)
    return int(places[0]) if bool(first > second) else None
