"""The whole function of small attention-only models: accuracy over all inputs of a task.

One head per layer, no norms, no feed-forward network. With scores a_j(t_n, t_j) and what a token writes to the logits
through the head, L_j(t_j), the logits of one layer at the last token are

    D(t_n) + Σ_j e^{a_j} L_j(t_j) / Σ_j e^{a_j}.

- `enumeration`: every input, in float64, in a tree of prefixes. Times Σ_j e^{a_j} > 0 the logits of one layer are a sum
  of one vector per position, Σ_j e^{a_j} (L_j(t_j) + D(t_n)): one addition per input and output.
- `one_layer`: a proof without them. The sign of a margin of a cell of inputs is that of a fractional program, whose
  numerator is a sum of independent terms: its least value takes the least of every term.
- `two_layers`: a proof by cells of the induction task; scores there are mixtures of mixtures (`mixtures`).
"""

from prooflens.engines.attention_only.cells import bound_task
from prooflens.engines.attention_only.enumeration import Accuracy, enumerate_task

__all__ = ["Accuracy", "bound_task", "enumerate_task"]
