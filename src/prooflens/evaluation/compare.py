"""Engines side by side on the same claims: what each decides, how tight it is, what it costs, and whether it is wrong.

Every engine bounds every functional of the claims. An attack then looks for the smallest and the largest value of each,
starting from the engines' own corners too. What it attains says how wide the truth is at least, and whether a bound was
crossed:

- **width**: mean width of an engine's bounds over the mean width that is attained; 1 is the best there can be;
- **crossed**: bounds beyond which a value was attained. Of a proved engine there must be none.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines import Bounds, Guarantee, engine_names, forms_of, get_engine
from prooflens.engines.attack import Attack, attack_claims
from prooflens.engines.bounds import FormBounds
from prooflens.engines.functionals import bound_claims, refusal
from prooflens.engines.protocol import EngineOptions
from prooflens.errors import EngineError, ProoflensError
from prooflens.evaluation.memory_meter import MemoryMeter
from prooflens.problem import Problem
from prooflens.progress import Progress, shown
from prooflens.queries import Claim
from prooflens.results.frame import Frame, Subject, query_name
from prooflens.results.tables import finite
from prooflens.verdicts.decide import decide
from prooflens.verdicts.evidence import ATTACK
from prooflens.verdicts.question import Question
from prooflens.verdicts.settings import Settings
from prooflens.verdicts.stages import default_budget, is_small, stages_of

FIXED = pa.schema(
    [
        ("engine", pa.string()),
        ("guarantee", pa.string()),
        ("holds", pa.int32()),
        ("estimated", pa.int32()),
        ("claims", pa.int32()),
        ("tightest", pa.int32()),
        ("gap", pa.float64()),
        ("width", pa.float64()),
        ("unbounded", pa.int32()),
        ("crossed", pa.int32()),
        ("ms", pa.float64()),
        ("mb", pa.float64()),
        ("reason", pa.string()),
    ]
)
"""`tightest`: of how many claims its lower bound is the best proved one. `gap`: median of attained minus lower. `mb`:
the most memory in use at once, beyond what was in use before."""

LARGE_PROBLEMS = ("interval", "layer0", "taylor", "crown")
"""Engines that are asked on problems of pretrained size unless others are named."""

SAMPLES = 256
"""Points of the region at which everything is evaluated, beside the attack's and the engines' corners."""

POINTS = 64
"""Points that go through the model at a time."""

SLACK = 1e-12
"""Attained values are floats themselves: a bound counts as crossed beyond this, relatively."""


class Comparison(Frame):
    """One row per engine; a column `holds: QUERY` with the share of its claims that the engine decides, per query."""

    title: ClassVar[str] = "engines"

    def __init__(self, table: pa.Table, subject: Subject | None = None) -> None:
        super().__init__(table, subject)
        rates = [name for name in table.column_names if name.startswith("holds: ")]
        shown = ("engine", "guarantee", *rates, "width", "gap", "tightest", "crossed", "ms", "mb", "reason")
        self.columns = shown

    @property
    def cells(self) -> list[list[Any]]:
        """The shown columns, row by row."""
        return [[row[name] for name in self.columns] for row in self.rows]

    def csv(self) -> str:
        """All columns as CSV."""
        out = io.StringIO()
        writer = csv.DictWriter(out, self.table.column_names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()

    def latex(self) -> str:
        """The shown columns as a LaTeX table; rates in per cent."""
        head = " & ".join(_latex(name) for name in self.columns)
        body = [
            " & ".join(_latex(_short(name, value)) for name, value in zip(self.columns, row, strict=True))
            for row in self.cells
        ]
        lines = [rf"\begin{{tabular}}{{ll{'r' * (len(self.columns) - 3)}l}}", r"\toprule", head + r" \\"]
        return "\n".join(
            [*lines, r"\midrule", *(row + r" \\" for row in body), r"\bottomrule", r"\end{tabular}", ""]
        )


def _short(name: str, value: object) -> str:
    if value is None:
        return "--"
    if isinstance(value, float):
        return f"{100 * value:.1f} %" if name.startswith("holds: ") else f"{value:.4g}"
    return str(value)


def _latex(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, f"\\{character}")
    return text.replace(">=", r"$\ge$").replace(">", "$>$").replace("<", "$<$").replace("≥", r"$\ge$")


@dataclass(eq=False)
class _Answer:
    """One engine's row so far, and its bounds of all functionals, if it gave any."""

    row: dict[str, Any]
    bounds: Bounds | None = None
    lows: Tensor | None = None
    """The lower bound of each claim's smallest functional."""


@dataclass(eq=False)
class _Bench:
    """The claims and what is common to all engines."""

    problem: Problem
    claims: list[Claim]
    settings: Settings
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = [query_name(claim.query) for claim in self.claims]
        self.functionals = [f for claim in self.claims for f in claim.functionals]

    def ask(self, name: str) -> _Answer:
        """One engine on all claims."""
        try:
            stages_of(name)
        except EngineError as error:
            return _Answer({"engine": name, "claims": len(self.claims), "reason": str(error)})
        engine, options = get_engine(name), EngineOptions(self.settings.memory)
        row: dict[str, Any] = {
            "engine": name,
            "guarantee": engine.guarantee.value,
            "claims": len(self.claims),
        }
        if reason := refusal(engine, self.problem, self.functionals, options):
            return _Answer(row | {"reason": reason})
        try:
            with MemoryMeter(self.problem.model.device) as peak:
                parts, together = bound_claims(engine, self.problem, self.claims, True, options)
        except (ProoflensError, MemoryError, torch.OutOfMemoryError) as error:
            return _Answer(row | {"reason": str(error) or "out of memory"})
        pairs = zip(self.claims, parts, strict=True)
        decided = [decide(claim, part) is not None for claim, part in pairs]
        row |= self.rates(decided)
        row["holds" if engine.guarantee is Guarantee.PROVED else "estimated"] = sum(decided)
        row |= {"ms": 1e3 * together.seconds, "mb": peak.bytes / 1e6}
        lows = torch.tensor([float(part.lower.min()) for part in parts], dtype=torch.float64)
        return _Answer(row, together, lows)

    def rates(self, decided: Sequence[bool]) -> dict[str, float]:
        """The share of claims that are decided, query by query."""
        found: dict[str, list[bool]] = {}
        for name, one in zip(self.names, decided, strict=True):
            found.setdefault(f"holds: {name}", []).append(one)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def attack(self, answers: Sequence[_Answer]) -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
        """The attack's row, the least value per claim, and the least and largest value of every functional."""
        start = time.perf_counter()
        budget = self.settings.budget or default_budget(self.problem)
        fast = not is_small(self.problem)
        known = [a.bounds for a in answers if a.bounds is not None]
        corners = [c for b in known for c in (b.lower_corner, b.upper_corner) if c is not None]
        region = self.problem.region
        factors = [c.to(region.center) for c in corners] + [region.sample(SAMPLES, self.settings.seed)[1]]
        with MemoryMeter(self.problem.model.device) as peak:
            result = attack_claims(self.problem, self.claims, budget, self.settings.seed, None, fast)
            factors.append(result.alpha)
            linear = [f for f in self.functionals if f.is_linear and (f.rows or f.logits)]
            if linear:
                forms = forms_of(linear, self.problem.model.architecture.d_out or 0)
                engine = Attack(budget=budget, seed=self.settings.seed, fast=fast, starts=self._starts(known))
                found = engine.bound_forms(self.problem, forms)
                factors += [c for c in (found.lower_corner, found.upper_corner) if c is not None]
            low, high = self._values(torch.cat(factors))
        least = torch.minimum(result.values.cpu(), self._smallest(low))
        row: dict[str, Any] = {
            "engine": ATTACK,
            "guarantee": Guarantee.ESTIMATED.value,
            "claims": len(self.claims),
            "width": 1.0,
            "ms": 1e3 * (time.perf_counter() - start),
            "mb": peak.bytes / 1e6,
            "reason": f"breaks {int((least <= 0).sum())} of {len(self.claims)}; the shares are what it leaves",
        }
        return row | self.rates((least > 0).tolist()), least, low, high

    def _starts(self, known: Sequence[Bounds]) -> FormBounds | None:
        """The corners of the tightest engine that has some, for the linear functionals."""
        usable = [b for b in known if b.lower_corner is not None and b.upper_corner is not None]
        if not usable:
            return None
        best = min(usable, key=lambda b: float((b.upper - b.lower).nan_to_num(torch.inf).median()))
        kept = torch.tensor([f.is_linear and bool(f.rows or f.logits) for f in self.functionals])
        assert best.lower_corner is not None
        assert best.upper_corner is not None
        return FormBounds(
            best.lower[kept], best.upper[kept], best.lower_corner[kept], best.upper_corner[kept]
        )

    def _values(self, alpha: Float[Tensor, "P p"]) -> tuple[Tensor, Tensor]:
        """The least and the largest value of every functional over points of the region."""
        problem = self.problem
        if problem.region.constraints is not None:
            alpha = problem.region.feasible(alpha)
        layers = sorted({row.layer for claim in self.claims for row in claim.rows})
        output = any(f.logits for f in self.functionals)
        low = torch.full((len(self.functionals),), torch.inf, dtype=torch.float64)
        high = -low
        for part in alpha.unique(dim=0).split(POINTS):
            with torch.no_grad():
                scores, logits = problem.values(problem.region.point(part), layers, output)
                found = torch.cat(
                    [
                        claim.values(
                            {row: scores[row.layer][:, row.head, row.position] for row in claim.rows}, logits
                        )
                        for claim in self.claims
                    ],
                    -1,
                ).cpu()
            low, high = torch.minimum(low, found.amin(0)), torch.maximum(high, found.amax(0))
        return low, high

    def _smallest(self, low: Tensor) -> Tensor:
        sizes = [len(claim.functionals) for claim in self.claims]
        return torch.stack([part.min() for part in low.split(sizes)]) if sizes else low


def compare(question: Question, engines: Sequence[str] | None, settings: Settings) -> Comparison:
    """Ask every engine about every claim, then attack what they said.

    Args:
        question: the claims.
        engines: names of engines; None for all that fit the size of the problem.
        settings: memory of the engines, budget and seed of the attack, and who is told of progress.

    Returns:
        One row per engine and one for the attack. An engine that there is not, or that refuses, is a row with the
        reason.

    Raises:
        EngineError: if there is none of the named engines.
    """
    with shown(settings.progress) as tell:
        return _compare(question, engines, settings, tell)


def _compare(
    question: Question, engines: Sequence[str] | None, settings: Settings, tell: Progress
) -> Comparison:
    problem = question.problem
    claims = [c for c in question.claims if c.tie is None and c.clean_holds and c.functionals]
    names = list(engines or (n for n in engine_names() if is_small(problem) or n in LARGE_PROBLEMS))
    names = [name for name in dict.fromkeys(names) if name != ATTACK]
    if names and not set(names) & set(engine_names()):
        stages_of(names[0])
    bench = _Bench(problem, claims, settings)
    answers = []
    for number, name in enumerate(names):
        tell(name, number / (len(names) + 1))
        answers.append(bench.ask(name))
    row: dict[str, Any] = {"engine": ATTACK, "guarantee": Guarantee.ESTIMATED.value, "claims": 0}
    if claims:
        tell(ATTACK, len(names) / (len(names) + 1))
        row, least, low, high = bench.attack(answers)
        _judge(answers, least, low, high)
    columns = [*FIXED, *(pa.field(f"holds: {name}", pa.float64()) for name in dict.fromkeys(bench.names))]
    rows = [*(answer.row for answer in answers), row]
    return Comparison(pa.Table.from_pylist(rows, pa.schema(columns)), question.subject)


def _judge(answers: Sequence[_Answer], least: Tensor, low: Tensor, high: Tensor) -> None:
    """Widths, gaps and crossed bounds against what was attained; who is tightest among the proved."""
    proved = [a.lows for a in answers if a.lows is not None and a.row["guarantee"] == Guarantee.PROVED.value]
    best = torch.stack(proved).amax(0) if proved else None
    for answer in answers:
        bounds, lows, row = answer.bounds, answer.lows, answer.row
        if bounds is None or lows is None:
            continue
        lower, upper = bounds.lower.cpu(), bounds.upper.cpu()
        known = lower.isfinite() & upper.isfinite()
        row["unbounded"] = int((~known).sum())
        attained = float((high - low).mean())
        row["width"] = finite(float((upper - lower).mean()) / attained) if attained > 0 else None
        slack = SLACK * (1.0 + low.abs() + high.abs())
        row["crossed"] = int((low < lower - slack).sum() + (high > upper + slack).sum())
        gaps = (least - lows)[least.isfinite() & lows.isfinite()]
        row["gap"] = finite(float(gaps.median())) if len(gaps) else None
        if best is not None and row["guarantee"] == Guarantee.PROVED.value:
            row["tightest"] = int(((lows >= best) & lows.isfinite()).sum())
