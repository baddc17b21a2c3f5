"""An independent checker of run directories: numpy, python-flint, pyarrow and safetensors; nothing of the engines.

`check(run, weights)` recomputes every fingerprint, and says of every row one of six words:

- `re-proved`: an own proof of the verdict (`proofs`; layer 0: `first_layer`; others: `depth`; effects: `pair_proofs`);
- `witness confirmed`: the stored point is in the region, and the network in ball arithmetic breaks the claim there;
- `re-run`: of families of prompts and of vocabularies alone: members were run again, in float64, with the same result;
- `nothing claimed`: the verdict is `unknown`, and the stored bounds are not contradicted;
- `not checkable`: nothing is wrong, but the row's proof is not one that this checker can repeat;
- `WRONG`: a fingerprint, a bound, a verdict or a witness is contradicted.
"""

from prooflens.checker.findings import WORDS, CheckReport, Finding
from prooflens.checker.run import check

__all__ = ["WORDS", "CheckReport", "Finding", "check"]
