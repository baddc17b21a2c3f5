"""What the model says: is its answer the same on a whole region, and by how much does each candidate stay behind?

The claim is `argmax`: Logit(y) − Logit(c) > 0 for the clean answer y and every other class or token c, whatever the
point of the region. It is settled as `certify` settles any other claim. Of a vocabulary the nearest candidates are
bounded directly and all other tokens through a proved tail (`engines.vocabulary`): nothing is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import pyarrow as pa
import torch
from torch import Tensor

from prooflens.certify import Place, Question, ask, certify_question, parse_budget, source_of
from prooflens.engines import Guarantee
from prooflens.engines.attack import Budget, Witness
from prooflens.engines.base import Tail
from prooflens.engines.vocabulary import is_tail
from prooflens.frames import Subject
from prooflens.memory import parse_memory
from prooflens.models import Prompt, Transformer, load
from prooflens.outcomes import Outcome, Verdict
from prooflens.portfolio import ATTACK, Settings, stages_of
from prooflens.progress import Show, shown
from prooflens.queries import Argmax, Beats, Claim
from prooflens.queries.circuit import CANDIDATES
from prooflens.radius import LARGEST, SMALLEST, radius
from prooflens.results import Radii, Results


class OutputResults(Results):
    """The verdict about the model's answer, and one row per candidate: `lower` and `upper` enclose its distance.

    First the row of `argmax`, over all outputs; then `logit{y}>logit{c}` for the nearest candidates c. The columns
    `candidate` and `text` name the answer (in the first row) or the candidate.
    """

    title = "outputs"
    shown = ("candidate", "text", "query", "verdict", "clean", "lower", "upper", "attack", "engine", "reason")

    @classmethod
    def about(cls, whole: Outcome, candidates: Sequence[Outcome], subject: Subject, names: Names) -> Self:
        """The rows of an answer and of its candidates."""
        made = cls.of([whole, *candidates], subject)
        outputs = [winner_of(whole.claim), *(loser_of(outcome.claim) for outcome in candidates)]
        texts = [names(index) for index in outputs]
        made.table = made.table.append_column("candidate", pa.array(outputs, pa.int32())).append_column(
            "text", pa.array(texts, pa.string())
        )
        return made

    @property
    def whole(self) -> Results:
        """The row of the answer."""
        return self[0]

    @property
    def tail(self) -> Tail | None:
        """How the outputs without a row were decided: by which stage how many, how many are open; None without tail."""
        return self.outcomes[0].bounds.tail if self.outcomes else None

    @property
    def summary(self) -> dict[str, Any]:
        """The verdict about the answer, what the answer is, and how many tokens needed more than the first bound."""
        whole, tail = self.whole, self.tail
        counts = {"tail": tail.total, "refined": tail.refined, "open": tail.open} if tail is not None else {}
        return {
            "rows": len(self),
            **self.counts,
            "output": whole.verdict.value,
            "answer": whole.text,
            **counts,
        }


class Names:
    """Texts of a model's outputs: tokens of its vocabulary, or numbered classes."""

    def __init__(self, model: Transformer) -> None:
        architecture = model.architecture
        self.tokenizer = model.tokenizer if architecture.d_out == architecture.d_vocab else None

    def __call__(self, index: int) -> str:
        """The text of an output."""
        return f"class {index}" if self.tokenizer is None else self.tokenizer.token(index)


def output(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    *,
    layers: int | None = None,
    top: int | None = None,
    engine: str = "auto",
    memory: int | str | None = None,
    device: str | None = None,
    progress: Show = False,
    seed: int = 0,
    budget: Budget | str | None = None,
) -> OutputResults:
    """Whether the model's answer is the same on a whole region: `holds` is proved for all outputs and all points.

    The answer is the class of a classifier, or the token that a language model would say next, over its full
    vocabulary. `layers` cuts the model after so many blocks (final norm and head are applied there); `top` is the
    number of candidates with a row of their own. Verdicts, engines, budgets and witnesses are those of `certify`.
    """
    question, names = ask_output(model, prompt, region, layers=layers, top=top, device=device)
    settings = Settings(stages_of(engine), parse_budget(budget), seed, parse_memory(memory))
    with shown(progress) as tell:
        (whole,) = certify_question(question, settings, tell).outcomes
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
    """The claim about the answer, bound to a prompt; nothing is proved yet."""
    source = source or source_of(model)
    whole = load(model)
    held = whole if layers is None else whole.cut(layers)
    _ = held.head  # raises for a model that predicts nothing
    question = ask(held, prompt, region, queries=Argmax(top), device=device, source=source)
    return question, Names(held)


def output_radius(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    *,
    layers: int | None = None,
    top: int | None = None,
    tokens: Sequence[int] | None = None,
    engine: str = "auto",
    tolerance: float = 0.1,
    between: tuple[float, float] = (SMALLEST, LARGEST),
    memory: int | str | None = None,
    device: str | None = None,
    progress: Show = False,
    seed: int = 0,
    budget: Budget | str | None = None,
) -> Radii:
    """The largest ε at which the answer is proved and the smallest at which it breaks: certified ≤ true ≤ attack."""
    whole = load(model)
    held = whole if layers is None else whole.cut(layers)
    _ = held.head
    return radius(
        held,
        prompt,
        Argmax(top),
        tokens=tokens,
        engine=engine,
        tolerance=tolerance,
        between=between,
        memory=memory,
        device=device,
        progress=progress,
        seed=seed,
        budget=budget,
    )


def winner_of(claim: Claim) -> int:
    """The clean answer that an argmax claim is about; the only output of a model that has one."""
    return claim.functionals[0].logits[0] if claim.functionals else 0


def loser_of(claim: Claim) -> int:
    """The candidate of a margin."""
    return claim.functionals[0].logits[1]


def candidates(whole: Outcome, most: int) -> list[Outcome]:
    """The margins over the nearest candidates, each as an outcome of its own with the bounds of the whole claim."""
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
    if claim.tie is not None:
        verdict, reason = Verdict.UNKNOWN, claim.tie
    elif broken:
        verdict, reason = Verdict.FAILS, "broken by a point of the region"
    elif claim.decide(bounds.lower, bounds.upper) == "unknown":
        verdict, reason = Verdict.UNKNOWN, "neither proved nor broken"
    elif bounds.guarantee is Guarantee.PROVED:
        verdict, reason = Verdict.HOLDS, "proved on the whole region"
    else:
        verdict, reason = Verdict.ESTIMATED, f"{bounds.engine} only estimates: not a proof"
    witness = None
    if broken and whole.witness is not None:
        at = whole.witness.values[place : place + 1]
        witness = Witness(whole.witness.x, whole.witness.alpha, at)
    engine = ATTACK if verdict is Verdict.FAILS else bounds.engine
    reached = None if witness is None else float(witness.values[0])
    return Outcome(claim, verdict, bounds, witness, reason, engine, reached)


def _tie(claim: Claim, place: int) -> str | None:
    """A tie of the answer is one with this candidate if their clean logits are equal."""
    return claim.tie if float(claim.clean[place]) == 0.0 else None
