"""Engine `attack`: the other side of every proof, MC + PGD as the paper runs it (Tab. `mc_budgets`).

Its bounds are *attained* values: `lower` is the smallest value found and `upper` the largest, so that for every form

    proved lower ≤ true minimum ≤ attack lower ≤ attack upper ≤ true maximum ≤ proved upper,

and a proved bound that an attack crosses is wrong. Every reported value belongs to a float64 point that lies in the
region and was run through the model in float64, whatever precision the search had. The search is `attack.search`.
"""

from prooflens.engines.attack.cases import AttackCase, AttackResult, Witness, attack_cases, attained
from prooflens.engines.attack.engine import BUDGETS, Attack, attack_claims, attack_cost, break_claims
from prooflens.engines.attack.search import AttackBudget

__all__ = [
    "BUDGETS",
    "Attack",
    "AttackBudget",
    "AttackCase",
    "AttackResult",
    "Witness",
    "attack_cases",
    "attack_claims",
    "attack_cost",
    "attained",
    "break_claims",
]
