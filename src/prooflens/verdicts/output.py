"""What the model says: is its answer the same on a whole region, and by how much does each candidate stay behind?

The claim is `argmax`: Logit(y) − Logit(c) > 0 for the clean answer y and every other class or token c, whatever the
point of the region. It is decided as `certify` decides any other claim. Of a vocabulary the nearest candidates are
bounded directly and all other tokens through a proved tail (`engines.vocabulary`): nothing is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from prooflens.engines.attack import Witness
from prooflens.engines.rivals import is_tail
from prooflens.models import Prompt, Transformer, load
from prooflens.queries import Argmax, Beats, Claim
from prooflens.queries.circuit import CANDIDATES
from prooflens.queries.rows import Token
from prooflens.results import Outcome, Radii, Verdict
from prooflens.results.asked import explanation
from prooflens.results.outputs import Names, OutputResults
from prooflens.verdicts.certify import decide_question
from prooflens.verdicts.decide import reason_of, verdict_of
from prooflens.verdicts.deployed import Precision
from prooflens.verdicts.evidence import ATTACK
from prooflens.verdicts.question import Place, Question, ask, source_of
from prooflens.verdicts.radius import LARGEST, SMALLEST, radius
from prooflens.verdicts.settings import Options, Settings


def output(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    *,
    layers: int | None = None,
    top: int | None = None,
    deployed: str | None = None,
    **options: Unpack[Options],
) -> OutputResults:
    """Say whether the model's answer is the same on a whole region: `holds` is proved for all outputs and all points.

    The answer is the class of a classifier, or the token that a language model would say next, over its full
    vocabulary.

    Args:
        model: a model with a head, or what `load` takes.
        prompt: a text, `model.prompt(text)`, or an input of shape [S, d].
        region: the inputs on which the answer is to be the same.
        layers: cut the model after so many blocks; final norm and head are applied there.
        top: how many candidates get a row of their own.
        deployed: `"bfloat16"` or `"float32"`: also measure, as `certify` does, how far the margin of the answer moves
            in that precision. That is measured, not proved.
        options: engine, memory, time, device, progress, seed and budget: see `Options`.

    Returns:
        The row of the answer, then one row per candidate with proved bounds of its distance.

    Raises:
        ProoflensError: where an argument is not what it should be, or the model predicts nothing.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> res = pl.output(model, model.example(), pl.Ball(0.01))
        >>> res.whole.verdict
        <Verdict.HOLDS: 'holds'>
    """
    settings = Settings.of(**options)
    question, names = ask_output(model, prompt, region, layers=layers, top=top, device=settings.device)
    precision = Precision.of(question, deployed)
    (whole,) = decide_question(question, settings, precision=precision).outcomes
    return OutputResults.about(whole, candidates(whole, top or CANDIDATES), question.subject, names)


def ask_output(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    *,
    layers: int | None = None,
    top: int | None = None,
    device: str | None = None,
    source: str | None = None,
) -> tuple[Question, Names]:
    """Bind the claim about the answer to a prompt; nothing is proved yet.

    Args:
        model: a model with a head, or what `load` takes.
        prompt: a text, a prompt of the model, or an input of shape [S, d].
        region: where the claim is to hold.
        layers: cut the model after so many blocks.
        top: how many candidates get a condition of their own.
        device: where to run; None for where the model is.
        source: the folder of the model's weights, where the model does not say itself.

    Returns:
        The question, and the texts of the model's outputs.
    """
    held = with_head(model, layers)
    question = ask(
        held, prompt, region, queries=Argmax(top), device=device, source=source or source_of(model)
    )
    return question, Names(held)


def output_radius(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    *,
    layers: int | None = None,
    top: int | None = None,
    tokens: Sequence[Token] | None = None,
    tolerance: float = 0.1,
    between: tuple[float, float] = (SMALLEST, LARGEST),
    nearest: bool | None = None,
    **options: Unpack[Options],
) -> Radii:
    """Return the largest ε at which the answer is proved and the smallest at which it breaks.

    Args:
        model: a model with a head, or what `load` takes.
        prompt: a text, `model.prompt(text)`, or an input of shape [S, d].
        layers: cut the model after so many blocks.
        top: how many candidates are bounded one by one.
        tokens: the tokens that move; None for all.
        tolerance: radii lie on a grid with steps of a factor 1 + tolerance.
        between: the ends of the grid.
        nearest: whether to measure the radius by the distance to the nearest other token, as in `radius`.
        options: engine, memory, time, device, progress, seed and budget: see `Options`.

    Returns:
        A table of one row: certified ≤ true ≤ attack.

    Raises:
        ProoflensError: where an argument is not what it should be, or the model predicts nothing.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> rad = pl.output_radius(model, model.example(), tolerance=0.5)
        >>> 0 < rad.certified <= rad.attack
        True
    """
    held = with_head(model, layers)
    return radius(
        held,
        prompt,
        Argmax(top),
        tokens=tokens,
        tolerance=tolerance,
        between=between,
        nearest=nearest,
        **options,
    )


def with_head(model: Transformer | str, layers: int | None) -> Transformer:
    """The model, cut after so many blocks if asked; an error for a model that predicts nothing.

    Args:
        model: a model, or what `load` takes.
        layers: how many blocks to keep; None for all.
    """
    whole = load(model)
    held = whole if layers is None else whole.cut(layers)
    _ = held.head  # raises for a model without one
    return held


def candidates(whole: Outcome, most: int) -> list[Outcome]:
    """The margins over the nearest candidates, each as an outcome of its own with the bounds of the whole claim.

    Args:
        whole: how the claim about the answer ended.
        most: how many candidates are returned.
    """
    places = [i for i, functional in enumerate(whole.claim.functionals) if not is_tail(functional)]
    return [_candidate(whole, i) for i in places[:most]]


def _candidate(whole: Outcome, place: int) -> Outcome:
    condition = whole.claim.conditions[place]
    winner, loser = condition.functional.logits
    bounds = whole.bounds.select(torch.tensor([place]))
    claim = Claim(
        Beats(winner, loser), (), (condition,), whole.claim.clean[place : place + 1], _tie(whole.claim, place)
    )
    broken = whole.witness is not None and bool(condition.broken(whole.witness.values[place]))
    verdict = verdict_of(claim, broken, bounds)
    reason = reason_of(claim, verdict, [bounds.engine], open_=explanation(whole.asked))
    witness = None
    if broken and whole.witness is not None:
        at = whole.witness.values[place : place + 1]
        witness = Witness(whole.witness.x, whole.witness.alpha, at)
    engine = ATTACK if verdict is Verdict.FAILS else bounds.engine
    reached = None if witness is None else float(witness.values[0])
    return Outcome(claim, verdict, bounds, witness, reason, engine, reached, asked=whole.asked)


def _tie(claim: Claim, place: int) -> str | None:
    """A tie of the answer is one with this candidate if their clean logits are equal."""
    return claim.tie if float(claim.clean[place]) == 0.0 else None
