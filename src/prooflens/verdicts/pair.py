"""Two models on one region: a model, an edit of it, and a metric that is measured on both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prooflens.engines import Engine, FormBounds, forms_of
from prooflens.engines.attack import AttackBudget
from prooflens.engines.attack.effects import attack_effects, attack_metric
from prooflens.engines.distributions import (
    MOST_OUTPUTS,
    Distribution,
    bound_distribution,
    distribution_forms,
)
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import NO_OPTIONS, EngineOptions
from prooflens.engines.relational import bound_effects
from prooflens.errors import ModelError, QueryError
from prooflens.models import Prompt, Transformer, load
from prooflens.models.edits import bound_edits, edit
from prooflens.models.hook_edits import Hook
from prooflens.models.knockouts import check_tokens
from prooflens.models.parts import Edit
from prooflens.models.spread import RADII, beside, moved_tokens
from prooflens.problem import Problem
from prooflens.queries import Divergence, Functional, Probability, Query, SiteQuery, parse_metric
from prooflens.queries.effects import EffectQuery
from prooflens.queries.parse import metric_text
from prooflens.regions import Region
from prooflens.regions.product import times_box
from prooflens.results import Subject
from prooflens.results.effects import EffectPoint
from prooflens.results.frame import EditedModel
from prooflens.verdicts.question import Place, Question, as_prompt, as_region, ask, placed_in, source_of
from prooflens.verdicts.settings import checked_device
from prooflens.verdicts.sites import Vectors

SOFTMAX_ROUNDING = 2.0**-36
"""Far more than rounding changes a computed probability or divergence by, relative to 1 plus its size."""

Edits = Transformer | str | Edit | Hook | Sequence[str | Edit | Hook]
"""An edited model, or what `edit` takes."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A model and an edit of it on one region, and a metric as a form of both.

    Attributes:
        question: the metric, bound to the model.
        first: the whole model.
        second: the whole edited model.
        problem: the model with only the outputs that the metric reads.
        edited: the edited one, likewise.
        forms: the metric, as a form of those outputs; of a distribution, a form that reads them all.
        distribution: the metric, where it is a probability or a divergence; None for a sum of outputs.
        functional: the metric, of all outputs.
        metric: the metric in words.
        prompt: the prompt.
        region: the region as it was given; times a box, where parts are held at any value of a set.
        subject: what results are about.
        moved: the tokens at which each free coordinate of the edited model stands (`models.spread`).
    """

    question: Question
    first: Transformer
    second: Transformer
    problem: Problem
    edited: Problem
    forms: Forms
    distribution: Distribution | None
    functional: Functional
    metric: str
    prompt: Prompt
    region: Place
    subject: Subject
    moved: tuple[tuple[int, ...], ...] = ()

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
        likes: Sequence[Pair] = (),
        source: str | None = None,
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
            likes: the same question about other edits; a problem of theirs that is the same is shared.
            source: the folder of the weights; None for the one that the model's name says.
        """
        first = load(model) if device is None else load(model).to(checked_device(device))
        if first.architecture.free:
            raise ModelError(
                f"{first.name} is at any value of a set already: give all edits of the model at once"
            )
        held = as_prompt(first, prompt)
        second = (
            edited.to(first.device)
            if isinstance(edited, Transformer)
            else edit(first, bound_edits(first, edited, held, vectors))
        )
        moved = moved_tokens(second, len(held))
        first = beside(first, second)
        if moved:
            read = as_region(placed_in(region, first), held)
            region = times_box(read.to(dtype=first.dtype, device=first.device), moved, second.weights[RADII])
        if second.architecture != first.architecture:
            raise ModelError(f"{second.name} is no edit of {first.name}: their architectures differ")
        check_tokens(second.weights, second.architecture.n_layers, len(held))
        query = as_metric(metric, first, held)
        check_metric(first, query)
        source = source or source_of(model)
        asked = [
            ask(one, held, region, queries=[query], source=source, vectors=vectors) for one in (first, second)
        ]
        functionals = [f for claim in asked[0].claims for f in claim.functionals]
        if len(functionals) != 1:
            raise QueryError(f"{metric} reads {len(functionals)} values: an effect is measured on one")
        problem = asked[0].problem
        used, forms, distribution = _read(functionals[0], problem.model)
        narrow, other = (replace(problem, model=_narrowed(q.problem.model, used)) for q in asked)
        narrow = next((one.problem for one in likes if one.asks_alike(first, moved, narrow.region)), narrow)
        other = replace(other, region=narrow.region)
        text = metric_text(asked[0].claims[0].query)
        models = asked[0].problem.model, asked[1].problem.model
        named = EditedModel.of(*models, second.name, edit_text(first, second))
        subject = replace(asked[0].subject, edited=named)
        metric_of = forms, distribution, functionals[0], text
        return cls(asked[0], first, second, narrow, other, *metric_of, held, region, subject, moved)

    def asks_alike(self, first: Transformer, moved: tuple[tuple[int, ...], ...], region: Region) -> bool:
        """Return whether another edit of the model is asked about on the same set: the inputs, and all values of parts.

        Two edits may have as many free coordinates at the same tokens, and let them move differently far.

        Args:
            first: the model beside the other edit.
            moved: the tokens at which each free coordinate of the other edit stands.
            region: where the other one is asked about.
        """
        if self.moved != moved or self.first.architecture != first.architecture:
            return False
        own = self.problem.region
        parts = (own.center, region.center), (own.radius, region.radius), (own.generators, region.generators)
        return all(
            one is other or (one is not None and other is not None and torch.equal(one, other))
            for one, other in parts
        )

    def query(self, kind: str, threshold: float = 0.0) -> EffectQuery:
        """Return a claim about the effect, or the question for its range.

        Args:
            kind: `range`, `necessary`, `faithful` or `sufficient`.
            threshold: δ.
        """
        inside = self.question.problem.model.architecture.read_hook is not None
        return EffectQuery(kind, self.metric, edit_text(self.first, self.second), threshold, inside)

    def metrics(self, x: Tensor) -> tuple[float, float]:
        """Run a point through both models and measure.

        Args:
            x: the point, shape [S, d].
        """
        assert self.forms.logits is not None
        row = self.forms.logits[0].to(x)
        with torch.no_grad():
            runs = [asked.values(x[None], (), output=True)[1] for asked in (self.problem, self.edited)]
        one, other = (out[0].double() for out in runs if out is not None)
        if self.distribution is not None:
            found = self.distribution.metrics(one, other)
            return float(found[0]), float(found[1])
        return float((one * row).sum()), float((other * row).sum())

    def blur(self, effect: float) -> float:
        """Return by how much a point must miss a threshold to break a claim: what rounding of a softmax may hide.

        Bounds of a distribution may be narrower than float64 computes it: a probability near 1 has no more digits.

        Args:
            effect: the effect that was computed at the point.
        """
        return 0.0 if self.distribution is None else SOFTMAX_ROUNDING * (1.0 + abs(effect))

    def bounds(self, engine: Engine, options: EngineOptions) -> FormBounds:
        """Bound the effect over the region by an engine.

        Args:
            engine: who bounds linear forms.
            options: memory that may be used, and who is told of progress.
        """
        if self.distribution is not None:
            return bound_distribution(engine, self.problem, self.edited, self.distribution, options)
        return bound_effects(engine, self.problem, self.edited, self.forms, options)

    def attacked(
        self, budget: AttackBudget, seed: int, bounds: FormBounds, options: EngineOptions = NO_OPTIONS
    ) -> FormBounds:
        """Return the least and the greatest effect that points were found to have.

        Args:
            budget: how many samples, restarts and steps.
            seed: seed of the search.
            bounds: its corners are where the search also starts.
            options: the deadline; what is found by then is returned.
        """
        if self.distribution is not None:
            metrics = self.distribution.metrics
            return attack_metric(self.problem, self.edited, metrics, budget, seed, [bounds], options)
        return attack_effects(self.problem, self.edited, self.forms, budget, seed, [bounds], options)

    @property
    def first_layer(self) -> int:
        """The first layer whose weights the edit changes; the number of layers if it changes none of a layer."""
        one, other, layers = self.first.weights, self.second.weights, self.first.architecture.n_layers
        changed = [name for name in one.keys() | other.keys() if one.get(name) is not other.get(name)]
        found = (re.match(r"blocks\.(\d+)\.", name) for name in changed)
        return min((int(match[1]) for match in found if match is not None), default=layers)

    @property
    def clean(self) -> tuple[float, float]:
        """The metric at the region's reference."""
        return self.metrics(self.problem.region.reference)

    def point(self, alpha: Tensor | None) -> EffectPoint:
        """Run the point of some factors through both models.

        Args:
            alpha: factors, shape [n, p], of which the first are run; not None, though the type allows it.
        """
        assert alpha is not None
        x = self.problem.region.point(alpha[:1])[0]
        first, second = self.metrics(x)
        return EffectPoint(x, alpha[0], first - second)


def edit_text(model: Transformer, edited: Transformer) -> str:
    """Return what was done to a model, in words.

    Args:
        model: the model.
        edited: the edited one.
    """
    return edited.name.removeprefix(model.name).strip() or "edited"


def _read(metric: Functional, model: Transformer) -> tuple[Tensor, Forms, Distribution | None]:
    """The outputs that a metric reads, the metric as a form of these, and as a distribution if it is one."""
    outputs = model.architecture.d_out or 0
    (_, atom), *_ = metric.terms
    if not isinstance(atom, Probability | Divergence):
        forms = forms_of([metric], outputs)
        assert forms.logits is not None
        used = (forms.logits != 0).any(0).nonzero()[:, 0]
        return used, replace(forms, logits=forms.logits[:, used]), None
    among = atom.among if isinstance(atom, Probability) else atom.first
    if len(among) > MOST_OUTPUTS:
        raise QueryError(
            f"{metric.name} is over {len(among)} outputs, and a region is bounded over at most {MOST_OUTPUTS}: name "
            "those that matter, as in prob(3|3,5)"
        )
    target = among.index(atom.index) if isinstance(atom, Probability) else None
    return torch.tensor(among), distribution_forms(len(among)), Distribution(len(among), target)


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
        return str(found[0])

    named = r"(?<=logit)\{([^{}]*)\}" if "logit" in metric else r"\{([^{}]*)\}"
    is_site = re.match(r"\s*(?:logit|prob|kl)", metric) is None
    return parse_metric(metric if is_site else re.sub(named, index, metric), prompt.roles)


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
