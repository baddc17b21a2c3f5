"""What an engine does on the paper's problems: certified claims, false ones, crossed bounds, widths and CPU seconds."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from prooflens import load
from prooflens.engines import Engine, FormBounds, Forms, forms_of, get_engine
from prooflens.engines.attack import Attack, AttackBudget
from prooflens.problem import Problem
from prooflens.queries import Claim
from prooflens.queries.attention import TopK
from prooflens.regions import Ball

SAMPLES = 5
BUDGET = AttackBudget(5_000, 10, 50)


@dataclass
class Asked:
    """Top-1 stability of all heads and positions of a layer, with what an attack reaches."""

    problem: Problem
    claims: list[Claim]
    forms: Forms
    attained: FormBounds | None = None

    @classmethod
    def of(cls, problem: Problem, layer: int, attack: bool = True, budget: AttackBudget = BUDGET) -> "Asked":
        claims = TopK(k=1).bind(problem.setting([layer]))
        forms = forms_of([f for claim in claims for f in claim.functionals])
        asked = cls(problem, claims, forms)
        if attack:
            starts = get_engine("cpz").bound_forms(problem, forms)
            asked.attained = Attack(budget=budget, starts=starts).bound_forms(problem, forms)
        return asked

    def holding(self, lower: Tensor) -> list[bool]:
        """Which claims have only positive lower bounds."""
        sizes = [len(claim.functionals) for claim in self.claims]
        return [bool((part > 0).all()) for part in lower.split(sizes)]


@dataclass
class Line:
    """What an engine did on a list of problems."""

    certified: int = 0
    total: int = 0
    false: int = 0
    crossed: int = 0
    forms: int = 0
    width: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> str:
        return f"{100.0 * self.certified / self.total:.1f}"


def measure(engine: Engine, asked: Iterable[Asked]) -> Line:
    """Rates, false certificates (an attack breaks them) and bounds that an attack crosses, over some problems."""
    line, count = Line(), 0
    for one in asked:
        start = time.process_time()
        bounds = engine.bound_forms(one.problem, one.forms)
        line.seconds += time.process_time() - start
        certified = one.holding(bounds.lower)
        line.certified += sum(certified)
        line.total += len(certified)
        line.width += float((bounds.upper - bounds.lower).mean())
        line.forms += one.forms.size
        count += 1
        if one.attained is not None:
            survived = one.holding(one.attained.lower)
            line.false += sum(c and not s for c, s in zip(certified, survived, strict=True))
            outside = (one.attained.lower < bounds.lower) | (one.attained.upper > bounds.upper)
            line.crossed += int(outside.sum())
    line.width, line.seconds = line.width / count, line.seconds / count
    return line


def attacked(asked: list[Asked]) -> Line:
    """What the attack leaves standing, as a line."""
    line = Line()
    for one in asked:
        assert one.attained is not None
        line.certified += sum(one.holding(one.attained.lower))
        line.total += len(one.claims)
        line.width += float((one.attained.upper - one.attained.lower).mean()) / len(asked)
    return line


def examples(name: str, eps: float, layer: int, attack: bool = True) -> list[Asked]:
    model = load(name)
    return [
        Asked.of(Problem(model, Ball(eps).around(model.example(i))), layer, attack) for i in range(SAMPLES)
    ]


def table(title: str, head: list[str], rows: Iterable[list[str]]) -> None:
    print(f"\n### {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
