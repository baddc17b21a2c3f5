"""Circuits: several heads at once. Which of them is the weakest link, and does the whole hold?

A circuit is a conjunction of queries (`0.3:top1@-1 & 1.4:mass>=0.2@-1`), a weighted sum whose functionals are bounded
jointly over the factors that the heads share (`0.5 * 0.3:spec{1}>{2}@-1 + 2 * 1.4:mass>=0.2@-1 > 0`), or a list of
heads, all asked the same query: `["0.3", "a1.h4"]`, or the JSON that edge attribution patching writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from prooflens.engines import Guarantee
from prooflens.errors import QueryError
from prooflens.models import Prompt, Transformer, load
from prooflens.queries import Circuit, Claim, InsideQuery, Query
from prooflens.results import Outcome, Subject, Verdict
from prooflens.results.circuits import CircuitResults
from prooflens.results.deployed import largest_of
from prooflens.results.outcome import STRENGTH
from prooflens.verdicts.certify import decide_question
from prooflens.verdicts.circuit_files import as_circuit
from prooflens.verdicts.deployed import Precision
from prooflens.verdicts.question import Place, as_prompt, ask, source_of
from prooflens.verdicts.settings import Options, Settings
from prooflens.verdicts.sites import Vectors, by_place


def circuit(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    circuit: str | Query | Sequence[str] | Mapping[str, Any] | Path,
    *,
    query: str = "top1@-1",
    vectors: Vectors | None = None,
    deployed: str | None = None,
    **options: Unpack[Options],
) -> CircuitResults:
    """Return a verdict for every part of a circuit and for the whole: `holds` is proved for all points at once.

    A conjunction holds iff all its parts do; a weighted sum is bounded as one functional. Parts of a conjunction may be
    about values inside the model (`0.3:top1@-1 & neuron 1.5>0@-1`): each is proved of the model that ends there.

    Args:
        model: a model, or what `load` takes.
        prompt: a text, `model.prompt(text)`, or an input of shape [S, d].
        region: the inputs on which the circuit is to hold.
        circuit: a query with several parts, or heads (a list, a mapping or a JSON file of nodes).
        query: what the heads of a list are asked.
        vectors: the directions and dictionaries that parts about values inside the model name.
        deployed: `"bfloat16"` or `"float32"`: also measure, as `certify` does, how far each margin moves in that
            precision; of a conjunction the largest of its parts. That is measured, not proved.
        options: engine, memory, time, device, progress, seed and budget: see `Options`.

    Returns:
        One row per part, and last the circuit itself.

    Raises:
        ProoflensError: where an argument is not what it should be, or a file is no circuit.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> res = pl.circuit(model, model.example(), pl.Ball(0.01), "0.0:top1@-1 & 0.1:top1@-1")
        >>> res.verdict, res.weakest_link.head
        (<Verdict.HOLDS: 'holds'>, 0)
    """
    settings = Settings.of(**options)
    asked = as_circuit(circuit, query, prompt.roles if isinstance(prompt, Prompt) else ())
    if any(isinstance(part, InsideQuery) for part in asked.parts):
        return _with_inside(model, prompt, region, asked, vectors, settings, deployed)
    question = ask(model, prompt, region, queries=[*asked.parts, asked], device=settings.device)
    whole = question.claims[-1]
    if asked.weights is None:  # the parts say it all: nothing is bounded twice
        question = replace(question, claims=question.claims[:-1])
    precision = Precision.of(question, deployed)
    outcomes = decide_question(question, settings, precision=precision).outcomes
    if asked.weights is None:
        outcomes = [*outcomes, _together(outcomes, whole)]
    return CircuitResults.of(outcomes, question.subject)


def _with_inside(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    asked: Circuit,
    vectors: Vectors | None,
    settings: Settings,
    deployed: str | None,
) -> CircuitResults:
    """A conjunction with parts inside the model: each place is a question of its own, about the same region."""
    if asked.weights is not None:
        raise QueryError(
            "a weighted sum bounds rows of attention together; values inside the model are joined to them by &"
        )
    held = load(model)
    given = as_prompt(held, prompt)
    inside = [part for part in asked.parts if isinstance(part, InsideQuery)]
    others = [part for part in asked.parts if not isinstance(part, InsideQuery)]
    tables = []
    groups: list[Sequence[Query]] = [*([others] if others else []), *by_place(held, given, inside, vectors)]
    for group in groups:
        question = ask(
            held,
            given,
            region,
            queries=group,
            device=settings.device,
            source=source_of(model),
            vectors=vectors,
        )
        found = decide_question(question, settings, precision=Precision.of(question, deployed))
        tables.append(CircuitResults.of(found.outcomes, question.subject))
    outcomes = [outcome for table in tables for outcome in table.outcomes]
    claims = [outcome.claim for outcome in outcomes]
    whole = Claim(
        asked,
        tuple(dict.fromkeys(row for claim in claims for row in claim.rows)),
        tuple(condition for claim in claims for condition in claim.conditions),
        torch.cat([claim.clean.cpu() for claim in claims]),
        next((claim.tie for claim in claims if claim.tie is not None), None),
    )
    place = question.problem.region
    last = CircuitResults.of([_together(outcomes, whole)], Subject.of(held, given, place, source_of(model)))
    joined = CircuitResults.joined([*tables, last])
    joined.by_subject = tuple(tables)
    return joined


def _together(parts: Sequence[Outcome], whole: Claim) -> Outcome:
    """The conjunction from its parts: bounds side by side, the weakest verdict, the first witness."""
    verdict = min((part.verdict for part in parts), key=STRENGTH.index)
    if whole.tie is not None and verdict is not Verdict.FAILS:
        verdict = Verdict.UNKNOWN
    guarantees = {part.bounds.guarantee for part in parts}
    bounds = replace(
        parts[0].bounds,
        lower=torch.cat([part.bounds.lower for part in parts]),
        upper=torch.cat([part.bounds.upper for part in parts]),
        guarantee=Guarantee.PROVED if guarantees == {Guarantee.PROVED} else Guarantee.ESTIMATED,
        lower_corner=None,
        lower_ledger=None,
    )
    attacks = [part.attack for part in parts if part.attack is not None]
    decisive = [part for part in parts if part.verdict is verdict] or list(parts)
    return Outcome(
        whole,
        verdict,
        bounds,
        next((part.witness for part in parts if part.witness is not None), None),
        f"{decisive[0].claim}: {decisive[0].reason}" if verdict is not Verdict.HOLDS else decisive[0].reason,
        "+".join(dict.fromkeys(part.engine for part in decisive)),
        min(attacks) if attacks else None,
        sum(part.seconds for part in parts),
        tuple(item for part in parts for item in part.asked),
        largest_of([part.deployed for part in parts if part.deployed is not None]),
    )
