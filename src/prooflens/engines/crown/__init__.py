r"""Engine `crown`: linear bounds taken back from a form of scores or outputs to the input (CROWN, Zhang et al. 2018).

f ≤ ⟨A, y⟩ + c at the last value y. Step by step from there to the input x, each step's output is replaced by linear
functions of its inputs that are above it where A is positive and below it where A is negative (`crown.steps`,
`crown.softmax`, `crown.norm`; the lines themselves in `crown.lines`). At the input, with x = x₀ + Gα, α ∈ [−1, 1]^p,

    f ≤ ⟨A, x₀⟩ + ‖GᵀA‖₁ + c + γ_N s,

s the absolute-value chain of everything that was computed: the bound is *proved*. −f gives the other side.

The lines of a step hold on a box of its inputs. These boxes come from the same method, first to last: queries, keys and
values, score differences, gates, pre-activations, and a norm's centred input and variance are forms of their own,
bounded like any other and intersected with interval arithmetic on the boxes before. Constraints of a region are
ignored.

Complexity: a form costs one pass back; all coordinates of all such values are forms, O(S d L) of them, each O(L S d²).
Forms go back in batches that fit a budget of memory.
"""

from prooflens.engines.crown.alpha import AlphaCrown
from prooflens.engines.crown.branch import BetaCrown
from prooflens.engines.crown.engine import Crown, crown_work

__all__ = ["AlphaCrown", "BetaCrown", "Crown", "crown_work"]
