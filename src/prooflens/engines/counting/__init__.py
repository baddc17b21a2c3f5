"""Exact counts at layer 0 over whole vocabularies: on how many of the Vⁿ prompts of n tokens is key j attended most?

Before the first attention a token knows only itself and its place, so a score a_ij is a function of (t_i, i, t_j, j).
Prompts are *slots*: every position holds a token of its own list, and positions of one slot hold the same token. For a
query token t_i the scores of the other slots are then independent, and

    #{t : key j on top at i} = Σ_{t_i} Σ_{t_j} Π_{k ≠ i, j} #{t_k : a_ik(t_i, t_k) < a_ij(t_i, t_j)} · [a_ii < a_ij].

All scores of a query token are sorted once, those of all positions together; going up the sorted list, every factor of
the product is a running count. That is O(nV log(nV)) per query token for Vⁿ⁻¹ prompts.

Rounding: every computed score is within E of the real one (`scores`, E per query token). Scores that are further apart
than 2E have the order of the real ones. The sorted list is cut wherever neighbours are further apart than that; inside
a piece the order is open. With C_k(b) the number of scores of slot k before the cut b, and w_j(b) the scores of key j
in the piece between the cuts b and b + 1,

    Σ_b w_j(b) Π_{k ≠ j} C_k(b)  ≤  #{key j is attended most}  ≤  Σ_b w_j(b) Π_{k ≠ j} C_k(b + 1).

The sums are exact integers (`integers`). Both sides hold for cuts anywhere: `pieces` says how fine they are.

- `slots`: which tokens stand where. `scores`: queries and keys of the vocabulary with their rounding.
- `ordering`: sort, cut, count. `differences`: the fast way for rows with little doubt.
- `integers`: sums of products without overflow.
- `counter`: one head and one query position, tile by tile. `pieces`: the same without sorting.
- `masses`: softmax weights. `statements`: what weights alone say. `enclosures`: rounding of vectors.
"""

from prooflens.engines.counting.counter import Counts, count_most_attended
from prooflens.engines.counting.scores import FirstScores
from prooflens.engines.counting.slots import Slots

__all__ = ["Counts", "FirstScores", "Slots", "count_most_attended"]
