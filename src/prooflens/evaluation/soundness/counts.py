"""Counts over vocabularies against every prompt: small random models of every family, random slots."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import torch
from torch import Tensor

from prooflens.engines.counting import Counts, FirstScores, Slots, count_most_attended
from prooflens.evaluation.soundness.cases import FAMILIES, random_model
from prooflens.evaluation.soundness.record import SoundnessReport, Violation
from prooflens.models import Transformer, scores_name

TOKENS = 5
"""The vocabulary of these models: all prompts of four tokens are run."""

TIE = 1e-9
"""Scores that differ by less, relative to the largest, may count either way."""


def try_counts(seed: int, report: SoundnessReport) -> None:
    """Count by sorting and by pieces; no count may exclude what running every prompt finds.

    Args:
        seed: the number of the case.
        report: where it is noted.
    """
    choose = random.Random(f"counts of case {seed}")
    family = FAMILIES[seed % len(FAMILIES)]
    model = with_vocabulary(random_model(family, choose), choose)
    length = choose.randint(1, 4)
    same = [tuple(choose.sample(range(length), 2))] if length > 1 and choose.random() < 0.4 else []
    choices = {choose.randrange(length): choose.sample(range(TOKENS), 3)} if choose.random() < 0.4 else {}
    slots = Slots.of(length, TOKENS, same, choices)
    scores = FirstScores(model, length)
    head, position = choose.randrange(scores.n_heads), choose.randrange(length)
    report.cases["counts"] += 1
    prompts = _prompts(slots)
    name = scores_name(0)
    with torch.no_grad():
        found = model.run(model.embed(prompts), name)[name][:, head, position]
    for pieces in (None, choose.choice((8, 512))):
        counts = count_most_attended(scores, slots, head, position, pieces=pieces)
        report.attacked[family, "counting", "top1" if pieces is None else "top1, pieces"] += len(counts.keys)
        for what in wrong_counts(counts, prompts[:, position], found):
            report.violations.append(Violation(seed, family, "counting", what))


def with_vocabulary(model: Transformer, choose: random.Random) -> Transformer:
    """Return the model with tokens to read, and learned positions half of the time.

    Args:
        model: a model without a vocabulary.
        choose: the source of chance.
    """
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    width = model.architecture.d_model
    context = model.architecture.context or 4
    shapes = {"embed.tokens": (TOKENS, width)}
    if choose.random() < 0.5:
        shapes["embed.positions"] = (context, width)
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    architecture = replace(model.architecture, d_vocab=TOKENS, context=context, position_offset=0)
    return Transformer(architecture, {**model.weights, **drawn}, name=model.name)


def wrong_counts(counts: Counts, tokens: Tensor, found: Tensor) -> list[str]:
    """Say which counts exclude what was found.

    Args:
        counts: what was counted.
        tokens: the query token of every prompt.
        found: the scores of every prompt at the query position.
    """
    scores = found[:, list(counts.keys)]
    tie = TIE * (1.0 + float(scores.abs().max()))
    wrong = []
    for column, key in enumerate(counts.keys):
        others = scores.clone()
        others[:, column] = -torch.inf
        gap = scores[:, column] - others.amax(-1)
        for token, low, high in zip(counts.tokens, counts.lower, counts.upper, strict=True):
            there = gap[tokens == token]
            sure, most = int((there > tie).sum()), int((there >= -tie).sum())
            if low[column] > most or high[column] < sure:
                wrong.append(
                    f"key {key} of token {token}: counted {low[column]} to {high[column]}, found {sure} to {most}"
                )
    return wrong


def _prompts(slots: Slots) -> Tensor:
    """Every prompt, as token ids."""
    lists = [range(slots.vocabulary) if slot.tokens is None else slot.tokens for slot in slots.slots]
    order = [
        next(i for i, slot in enumerate(slots.slots) if p in slot.positions) for p in range(slots.length)
    ]
    return torch.tensor([[choice[i] for i in order] for choice in itertools.product(*lists)])
