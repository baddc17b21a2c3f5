"""Prompts of one length, decided side by side.

Engines prove about one prompt at a time; where each of them would be attacked, they wait for each other, and one search
goes over all of them (`engines.attack.cases`). That is done where all claims read layer 0: further down the walk of an
engine takes nearly all of the time, and more memory than there is for several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prooflens.progress import Progress
from prooflens.results import Results
from prooflens.verdicts.chunks import chunks, numbers_at_a_time
from prooflens.verdicts.deployed import Precision
from prooflens.verdicts.evidence import Evidence
from prooflens.verdicts.forecast import deadline_of, depth_of, form_count
from prooflens.verdicts.portfolio import AttackOrder, carry_out_together, evidence_steps
from prooflens.verdicts.question import Question
from prooflens.verdicts.settings import Settings

MOST_PROMPTS = 16
"""How many prompts are decided side by side; what each holds until the end is memory."""


def groups_of(questions: Sequence[Question], settings: Settings) -> list[list[int]]:
    """Return which questions are decided side by side, by numbers: of one length, and as many as fit into memory.

    Args:
        questions: about prompts of one model.
        settings: the memory that may be used.
    """
    groups: list[list[int]] = []
    room: dict[int, tuple[list[int], int]] = {}
    for number, question in enumerate(questions):
        length = question.problem.n_tokens
        if not _can_wait(question, settings):
            groups.append([number])
            continue
        group, left = room.get(length, ([], 0))
        needed = _numbers(question)
        if needed > left or len(group) == MOST_PROMPTS:
            group, left = [], numbers_at_a_time(question.problem, settings.memory)
            groups.append(group)
        group.append(number)
        room[length] = group, left - needed
    return groups


def _numbers(question: Question) -> int:
    """Functionals times factors."""
    functionals = [f for claim in question.claims for f in claim.functionals]
    return form_count(question.problem, functionals) * question.problem.region.n_factors


def _can_wait(question: Question, settings: Settings) -> bool:
    """Whether a question can be decided beside others: a ball, and scores of layer 0 that fit into one chunk."""
    problem, claims = question.problem, question.claims
    ball = problem.region.radius is not None and problem.region.constraints is None
    shallow = all(
        depth_of(problem, claim) == 0 and not any(f.logits for f in claim.functionals) for claim in claims
    )
    return ball and bool(claims) and shallow and len(list(chunks(problem, claims, settings.memory))) == 1


@dataclass(eq=False)
class SideBySide:
    """Questions about prompts of one length, and what is known of their claims.

    Attributes:
        questions: the claims.
        settings: how they are decided; every prompt has the time that it has alone.
        precisions: of each question, what measures its margins in a precision that the model is deployed in.
        evidence: what is known of every claim of each question.
    """

    questions: Sequence[Question]
    settings: Settings
    precisions: Sequence[Precision | None]
    evidence: list[list[Evidence]] = field(init=False)

    def __post_init__(self) -> None:
        self.evidence = [
            [Evidence.about(claim, question.problem.region.holds_reference) for claim in question.claims]
            for question in self.questions
        ]

    def run(self, tell: Progress) -> None:
        """Ask engines about one question after another, and attack all of them together.

        Args:
            tell: told of how much of all questions is done.
        """
        shares = [0.0] * len(self.questions)

        def told_of(number: int) -> Progress:
            def note(stage: str, share: float) -> None:
                shares[number] = max(shares[number], share)
                tell(stage, sum(shares) / len(shares))

            return note

        steps, orders = [], list[AttackOrder | None]()
        for number, (question, evidence) in enumerate(zip(self.questions, self.evidence, strict=True)):
            timed = deadline_of(self.settings, question.problem, question.claims)
            allowed = replace(timed, progress=told_of(number))
            steps.append(evidence_steps(question.problem, evidence, allowed))
            orders.append(next(steps[-1], None))
        while waiting := [order for order in orders if order is not None]:
            carry_out_together(waiting)
            orders = [
                None if order is None else next(step, None) for step, order in zip(steps, orders, strict=True)
            ]

    def results(self, decided: bool = False) -> list[Results]:
        """Return what the claims of each question came to.

        Args:
            decided: only those that are decided: the work did not come to its end.
        """
        found = []
        for question, evidence, precision in zip(self.questions, self.evidence, self.precisions, strict=True):
            kept = [item for item in evidence if item.decided or not decided]
            outcomes = [item.outcome(question.problem) for item in kept]
            measured = outcomes if precision is None or decided else precision.measured(outcomes)
            found.append(Results.of(measured, question.subject))
        return found
