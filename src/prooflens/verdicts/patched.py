"""Patching: parts get the values that they have on another prompt; does the metric take that prompt's side?

With M′ the patched model, x′ the other prompt and m a difference of logits, a logit or a readout, the claim is

    m(M′(x)) has the sign of m(M(x′)), for all x of the region.

It is a claim about M′ alone, which the portfolio decides like any other.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from prooflens.engines.attack import Witness
from prooflens.errors import QueryError
from prooflens.models import Prompt, Transformer
from prooflens.models.edits import value_on
from prooflens.models.hook_edits import as_list
from prooflens.queries import Beats, OutputLevel, Query, SiteQuery
from prooflens.results import Outcome
from prooflens.verdicts.certify import decide_question
from prooflens.verdicts.pair import Edits, Pair
from prooflens.verdicts.question import ask
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.sites import Vectors


def patches(model: Transformer, edits: Edits, other: Prompt | str) -> Edits:
    """Return edits in which every part that is given by its name alone has its value on another prompt.

    Args:
        model: the model.
        edits: what `edit` takes, or a model that is edited already, which comes back as it is.
        other: the other prompt, or its text, which the model's name then has; it must have a token for every token that
            is held.
    """
    if isinstance(edits, Transformer):
        return edits
    return [value_on(model, one, other) if isinstance(one, str) else one for one in as_list(edits)]


def side_of(pair: Pair, other: Prompt) -> float:
    """Return the side of the metric on another prompt in the whole model: 1.0 above 0, −1.0 below.

    Args:
        pair: the model, the edited one and the metric.
        other: the other prompt.

    Raises:
        QueryError: if the metric has no side, or is 0 there.
    """
    if pair.distribution is not None:
        raise QueryError(f"{pair.metric} has no side: patched is about a difference of logits, or a readout")
    if len(other) != len(pair.prompt):
        raise QueryError(
            f"the other prompt has {len(other)} tokens and the prompt {len(pair.prompt)}: give one as long"
        )
    value, _ = pair.metrics(pair.first.input(other).to(pair.problem.region.center))
    if value == 0.0:
        raise QueryError(f"{pair.metric} is 0 on the other prompt: there is no side to take")
    return 1.0 if value > 0.0 else -1.0


def _sided(query: Query, side: float) -> Query:
    """The claim that a metric is on one side of 0."""
    if isinstance(query, Beats):
        return query if side > 0.0 else Beats(query.loser, query.winner)
    assert isinstance(query, OutputLevel | SiteQuery)
    return replace(query, comparison=">" if side > 0.0 else "<", threshold=0.0)


def decide_patched(pair: Pair, side: float, settings: Settings, vectors: Vectors | None) -> Outcome:
    """Decide whether the edited model's metric is on one side of 0 everywhere.

    Args:
        pair: the model, the patched one and the metric.
        side: 1.0 for above 0, −1.0 for below.
        settings: how hard to try.
        vectors: the directions and dictionaries that the metric names.
    """
    query = _sided(pair.question.claims[0].query, side)
    question = ask(pair.second, pair.prompt, pair.region, queries=[query], vectors=vectors)
    (outcome,) = decide_question(question, settings).outcomes
    outputs = pair.question.problem.model.architecture.d_out or 0
    claim = pair.query("patched", side).claim(pair.functional, outputs, pair.clean[1])
    witness = outcome.witness
    if witness is not None:
        value = torch.tensor([side * pair.metrics(witness.x)[1]], dtype=torch.float64)
        witness = Witness(witness.x, witness.alpha, value)
    bounds = replace(outcome.bounds, lower_ledger=None, upper_ledger=None, cover=None, tail=None)
    return replace(outcome, claim=claim, bounds=bounds, witness=witness)
