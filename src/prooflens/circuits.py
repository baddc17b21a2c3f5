"""Circuits: several heads at once. Which of them is the weakest link, and does the whole hold?

A circuit is a conjunction of queries (`0.3:top1@-1 & 1.4:mass>=0.2@-1`), a weighted sum whose functionals are bounded
jointly over the factors that the heads share (`0.5 * 0.3:spec{1}>{2}@-1 + 2 * 1.4:mass>=0.2@-1 > 0`), or a list of
heads, all asked the same query: `["0.3", "a1.h4"]`, or the JSON that edge attribution patching writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from prooflens.certify import Place, ask, certify_question, parse_budget
from prooflens.documents import read_json as read_document
from prooflens.engines import Guarantee
from prooflens.engines.attack import Budget
from prooflens.errors import QueryError
from prooflens.memory import parse_memory
from prooflens.models import Prompt, Transformer
from prooflens.outcomes import STRENGTH, Outcome, Verdict
from prooflens.portfolio import Settings, stages_of
from prooflens.progress import Show, shown
from prooflens.queries import Circuit, Query, parse_query
from prooflens.queries.attention import RowQuery
from prooflens.results import Results

HEAD = re.compile(r"(?:a|A|L)?(\d{1,9})(?:\.h|\.|[hH])(\d{1,9})")
"""A head as tools write it: `a0.h11` (edge attribution patching), `A0.11`, `L0H11`, `0.11`."""

OTHER = re.compile(
    r"(?:m|MLP ?|mlp)\d+|input|embed|embeds|tok_embeds|pos_embeds|Resid (?:Start|End)|logits|output"
)
"""Nodes of such circuits that are no attention heads."""


class CircuitResults(Results):
    """The parts of a circuit, one row each, and last the circuit as a whole."""

    @property
    def whole(self) -> Results:
        """The row of the circuit itself."""
        return self._split(True)

    @property
    def parts(self) -> Results:
        """The rows of its parts."""
        return self._split(False)

    def _split(self, whole: bool) -> Results:
        names = self.table.column("circuit").to_pylist()
        kept = [i for i, name in enumerate(names) if (name is not None) is whole]
        outcomes = [self.outcomes[i] for i in kept] if self.outcomes else []
        return Results(self.table.take(pa.array(kept, pa.int64())), self.subject, outcomes)

    @property
    def verdict(self) -> Verdict:
        """The circuit's verdict; the parts of a weighted sum need not hold for it."""
        return (self.whole if len(self.whole) else self.parts).verdict

    @property
    def weakest_link(self) -> Results:
        """The part that is closest to failing."""
        return self.parts.weakest

    @property
    def summary(self) -> dict[str, Any]:
        """The verdict, the weakest link by name, and counts of the parts."""
        weak = self.weakest_link
        name = f"{weak.layer}.{weak.head}:{weak.query}@{weak.position}"
        return {"rows": len(self), "circuit": self.verdict.value, "weakest": name, **self.parts.counts}


def circuit(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    circuit: str | Query | Sequence[str] | Mapping[str, Any] | Path,
    *,
    query: str = "top1@-1",
    engine: str = "auto",
    memory: int | str | None = None,
    device: str | None = None,
    progress: Show = False,
    seed: int = 0,
    budget: Budget | str | None = None,
) -> CircuitResults:
    """A verdict for every part of a circuit and for the whole: `holds` is proved for all points of the region at once.

    `circuit` is a query with several parts, or heads (a list, a mapping or a JSON file of nodes) that are all asked
    `query`. A conjunction holds iff all its parts do; a weighted sum is bounded as one functional.
    """
    asked = as_circuit(circuit, query)
    question = ask(model, prompt, region, queries=[*asked.parts, asked], device=device)
    whole = question.claims[-1]
    if asked.weights is None:  # the parts say it all: nothing is bounded twice
        question = replace(question, claims=question.claims[:-1])
    settings = Settings(stages_of(engine), parse_budget(budget), seed, parse_memory(memory))
    with shown(progress) as tell:
        found = certify_question(question, settings, tell)
    outcomes = found.outcomes
    if asked.weights is None:
        outcomes = [*outcomes, _together(outcomes, whole)]
    return CircuitResults.of(outcomes, question.subject)


def _together(parts: Sequence[Outcome], whole: Any) -> Outcome:
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
    )


def as_circuit(given: str | Query | Sequence[str] | Mapping[str, Any] | Path, query: str) -> Circuit:
    """The circuit that a text, a query, a list of heads or a file of nodes means."""
    if isinstance(given, Circuit):
        return given
    if isinstance(given, Query):
        return Circuit((given,))
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".json")):
        return as_circuit(read_json(Path(given)), query)
    if isinstance(given, str) and all(HEAD.fullmatch(name.strip()) for name in given.split(",")):
        return as_circuit([name.strip() for name in given.split(",")], query)
    if isinstance(given, str):
        parsed = parse_query(given)
        return parsed if isinstance(parsed, Circuit) else Circuit((parsed,))
    asked = parse_query(query)
    if not isinstance(asked, RowQuery):
        raise QueryError(
            f"heads of a circuit are asked a query about one row, such as 'top1@-1', not {query!r}"
        )
    return Circuit(tuple(replace(asked, heads=f"{layer}.{head}") for layer, head in read_heads(given)))


def read_json(path: Path) -> Any:
    """The content of a circuit file."""
    try:
        return read_document(path)
    except (OSError, ValueError) as error:
        raise QueryError(f"{path} is not a readable circuit file: {error}") from error


def read_heads(circuit: Mapping[str, Any] | Sequence[Any]) -> list[tuple[int, int]]:
    """The attention heads of a circuit, in order, once.

    Read are lists of node names, mappings with `nodes` (name → true, or a mapping whose `in_graph` is not false) and,
    where no node is kept, with `edges` (`a0.h11->m3`); MLPs, embeddings and logits are passed over.
    """
    names: Iterable[str]
    if isinstance(circuit, Mapping):
        names = _kept(circuit.get("nodes", {} if "edges" in circuit else circuit))
        if not names:
            edges = _kept(circuit.get("edges", ()))
            names = [end for edge in edges for end in edge.split("->")]
    else:
        names = _kept(circuit)
    heads: dict[tuple[int, int], None] = {}
    for name in names:
        plain = re.sub(r"<.*>", "", name).strip()
        if match := HEAD.fullmatch(plain):
            heads[int(match[1]), int(match[2])] = None
        elif not OTHER.fullmatch(plain):
            raise QueryError(f"{name!r} is no node of a circuit; heads are written 'a0.h11' or '0.11'")
    if not heads:
        raise QueryError("the circuit has no attention heads; heads are written 'a0.h11' or '0.11'")
    return list(heads)


def _kept(nodes: Any) -> list[str]:
    """Names of the nodes or edges that are in the circuit."""
    if isinstance(nodes, Mapping):
        return [
            str(name)
            for name, value in nodes.items()
            if (value.get("in_graph", True) if isinstance(value, Mapping) else value) is not False
        ]
    if isinstance(nodes, str) or not isinstance(nodes, Sequence):
        raise QueryError(f"a circuit is a list or a mapping of nodes, not {type(nodes).__name__}")
    return [str(node.get("name", "") if isinstance(node, Mapping) else node) for node in nodes]
