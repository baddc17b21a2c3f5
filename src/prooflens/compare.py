"""Engines side by side on the same claims: how many each decides, how tight its bounds are, how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch

from prooflens.certify import Question
from prooflens.engines import Guarantee, engine_names, get_engine
from prooflens.engines.attack import attack_claims
from prooflens.engines.functionals import bound_claims, refusal
from prooflens.portfolio import ATTACK, Settings, default_budget, is_small, stages_of
from prooflens.progress import Progress
from prooflens.queries import Claim
from prooflens.results import Frame, finite

COLUMNS = pa.schema(
    [
        ("engine", pa.string()),
        ("guarantee", pa.string()),
        ("holds", pa.int32()),
        ("estimated", pa.int32()),
        ("claims", pa.int32()),
        ("tightest", pa.int32()),
        ("gap", pa.float64()),
        ("ms", pa.float64()),
        ("reason", pa.string()),
    ]
)
"""`tightest`: of how many claims its lower bound is the best proved one. `gap`: median of attained minus lower."""

LARGE_PROBLEMS = ("interval", "layer0", "taylor", "crown")
"""Engines that are asked on problems of pretrained size unless others are named."""


class Comparison(Frame):
    """One row per engine."""

    shown = ("engine", "guarantee", "holds", "estimated", "tightest", "gap", "ms", "reason")


def compare(
    question: Question, engines: Sequence[str] | None, settings: Settings, tell: Progress
) -> Comparison:
    """Ask every engine about every claim; the attack says what is attained, for the gap."""
    problem = question.problem
    claims = [c for c in question.claims if c.tie is None and c.clean_holds and c.functionals]
    names = (
        list(engines) if engines else [n for n in engine_names() if is_small(problem) or n in LARGE_PROBLEMS]
    )
    names = [name for name in names if name != ATTACK]
    for name in names:
        stages_of(name)  # an unknown one is an error before anything is computed
    tell(ATTACK, 0.0)
    start = time.perf_counter()
    budget = settings.budget or default_budget(problem)
    attained = attack_claims(problem, claims, budget, settings.seed, fast=not is_small(problem)).values.cpu()
    spent = time.perf_counter() - start
    lowers: dict[str, torch.Tensor] = {}
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        tell(name, (number + 1) / (len(names) + 1))
        row, lower = _ask(question, claims, settings, name)
        rows.append(row)
        if lower is not None:
            lowers[name] = lower
    proved = [lower for name, lower in lowers.items() if get_engine(name).guarantee is Guarantee.PROVED]
    best = torch.stack(proved).amax(0) if proved else torch.full((len(claims),), torch.inf)
    for row in rows:
        lower = lowers.get(row["engine"])
        if lower is not None and len(claims):
            gaps = (attained - lower)[attained.isfinite() & lower.isfinite()]
            row["gap"] = finite(float(gaps.median())) if len(gaps) else None
            if row["guarantee"] == Guarantee.PROVED.value:
                row["tightest"] = int(((lower >= best) & lower.isfinite()).sum())
    broken = int((attained <= 0).sum())
    reason = f"breaks {broken} of {len(claims)}"
    other = {
        "engine": ATTACK,
        "guarantee": "estimated",
        "claims": len(claims),
        "ms": 1e3 * spent,
        "reason": reason,
    }
    return Comparison(pa.Table.from_pylist([*rows, other], COLUMNS), question.subject)


def _ask(
    question: Question, claims: Sequence[Claim], settings: Settings, name: str
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """One engine on all claims: its row, and the lower bound of each claim's smallest functional."""
    engine = settings.engine(name)
    row: dict[str, Any] = {"engine": name, "guarantee": engine.guarantee.value, "claims": len(claims)}
    functionals = [f for claim in claims for f in claim.functionals]
    if reason := refusal(engine, question.problem, functionals):
        return row | {"reason": reason}, None
    parts, together = bound_claims(engine, question.problem, claims)
    pairs = list(zip(claims, parts, strict=True))
    decided = sum(claim.decide(part.lower, part.upper) == "holds" for claim, part in pairs)
    row["holds" if engine.guarantee is Guarantee.PROVED else "estimated"] = decided
    row["ms"] = 1e3 * together.seconds
    return row, torch.tensor([float(part.lower.min()) for part in parts], dtype=torch.float64)
