"""What `output` returns: the verdict about the model's answer, and a row for each of the nearest candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import pyarrow as pa

from prooflens.engines.bounds import Tail
from prooflens.models import Transformer
from prooflens.queries import Claim
from prooflens.results.frame import Subject
from prooflens.results.outcome import Outcome
from prooflens.results.tables import Results


class OutputResults(Results):
    """The verdict about the model's answer, and one row per nearest candidate.

    The first row is `argmax`, about all outputs. The others are `logit{y}>logit{c}` for the nearest candidates c,
    where `lower` and `upper` enclose the margin between the two logits. The columns `candidate` and `text` name the
    answer (first row) or the candidate.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> out = pl.output(model, model.example(), pl.Ball(0.001), engine="taylor", budget="8/1/2")
        >>> out.whole.verdict, out.whole.text
        (<Verdict.HOLDS: 'holds'>, 'class 0')
        >>> [row.query for row in out]
        ['argmax', 'logit0>logit1']
    """

    title = "outputs"
    shown = (
        "candidate",
        "text",
        "query",
        "verdict",
        "clean",
        "lower",
        "upper",
        "attack",
        "unit",
        "engine",
        "reason",
    )

    @classmethod
    def about(cls, whole: Outcome, candidates: Sequence[Outcome], subject: Subject, names: Names) -> Self:
        """Make the rows of an answer and of its candidates.

        Args:
            whole: how the claim about the answer ended.
            candidates: how the claim about each candidate ended.
            subject: the model, the prompt and the region.
            names: the texts of the outputs.
        """
        made = cls.of([whole, *candidates], subject)
        outputs = [winner_of(whole.claim), *(loser_of(outcome.claim) for outcome in candidates)]
        texts = [names(index) for index in outputs]
        made.table = made.table.append_column("candidate", pa.array(outputs, pa.int32())).append_column(
            "text", pa.array(texts, pa.string())
        )
        return made

    @property
    def whole(self) -> Results:
        """The row about the answer."""
        return self[0]

    @property
    def tail(self) -> Tail | None:
        """How the outputs without a row were decided; None if there are none."""
        return self.outcomes[0].bounds.tail if self.outcomes else None

    @property
    def summary(self) -> dict[str, Any]:
        """The verdict about the answer, the answer itself, and how many tokens needed more than the first bound."""
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
        predicts = architecture.d_out == architecture.d_vocab and architecture.read_hook is None
        self.tokenizer = model.tokenizer if predicts else None
        self.outputs = model.outputs

    def __call__(self, index: int) -> str:
        """Return the text of an output."""
        if self.outputs is not None:
            return self.outputs[index]
        return f"class {index}" if self.tokenizer is None else self.tokenizer.token(index)


def winner_of(claim: Claim) -> int:
    """Return the clean answer that an argmax claim is about; 0 in a model with one output.

    Args:
        claim: an argmax claim.
    """
    return claim.functionals[0].logits[0] if claim.functionals else 0


def loser_of(claim: Claim) -> int:
    """Return the candidate of a claim about a margin between two logits.

    Args:
        claim: a claim about two outputs.
    """
    return claim.functionals[0].logits[1]
