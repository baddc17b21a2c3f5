"""The soundness run: random models, regions and queries; then the attack tries to break every proved bound.

For every case and every proved engine of the registry:

1. a proved bound l ≤ f ≤ u of a functional becomes two claims, f − l ≥ 0 and u − f ≥ 0, and the attack tries to falsify
   them, starting at the engine's own corners too; a witness is a violation;
2. a claim that is proved to hold must survive an attack on itself;
3. proved bounds of different engines must have a common point (on small problems `exact` is one of them);
4. what is proved on a larger region must be proved on a smaller one;
5. bounds of hundreds of linear forms per model must enclose what one batched attack attains (`forms`);
6. the effect of a random edit on every form must enclose what an attack on the difference attains (`effects`);
7. a claim with a hidden counterexample that plain PGD misses (`planted_case`) may not be certified.
"""

from prooflens.evaluation.soundness.cases import FAMILIES, NETWORKS, SOLU, Case, random_case, random_model
from prooflens.evaluation.soundness.claims import try_case
from prooflens.evaluation.soundness.forms import try_forms
from prooflens.evaluation.soundness.record import SoundnessReport, Violation
from prooflens.evaluation.soundness.run import KINDS, OWN_MODELS, modest, run, try_planted

__all__ = [
    "FAMILIES",
    "KINDS",
    "NETWORKS",
    "OWN_MODELS",
    "SOLU",
    "Case",
    "SoundnessReport",
    "Violation",
    "modest",
    "random_case",
    "random_model",
    "run",
    "try_case",
    "try_forms",
    "try_planted",
]
