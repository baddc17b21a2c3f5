"""Proofs at any depth: linear forms of scores and outputs on a whole region, in float64 with counted rounding.

Between its sites (norms, activations, products, softmax) a network is affine. Put a float stand-in, its tangent at
the centre, in the place of every site. Then a linear form f is affine in the factors α of the region, and with v_s
its covector at the output of site s,

    f(α) = f(0) + a·α + Σ_s v_s·r_s(u_s(α))        exactly,

r_s what the stand-in misses, u_s how far the site's input moves. Each r_s is bounded once, given a set that holds u_s:

| file | what is proved there |
|---|---|
| `shapes` | sums, images and products of ellipsoids; largest eigenvalues without an eigenvalue routine; rounding |
| `values` | a value is c + JNα + Σ_s J_s r_s: linear maps lose nothing, residual connections cancel what they cancel |
| `quadratics` | the ellipsoid of a quadratic map, and the quadratic form that a covector makes of it |
| `norms`, `networks`, `solu` | sites of one token: exact identities for r_s, and ellipsoids that hold it |
| `scores`, `caps`, `mixing`, `row` | the same of attention: products of queries and keys, caps, softmax |
| `pooling` | a mean of tokens that a pooler reads |
| `writing`, `sent`, `carried` | edits: what is held at tokens, what cut edges bring, what goes on beside the stream |
| `steps`, `attention`, `walk` | a network as chains of such sites, from the weights on |
| `beside` | what two networks share |
| `boxes`, `moving` | quadratic forms of the factors; what e brings to second order |
| `strands` | covectors of forms, from chain to chain |
| `reading` | a form: by ellipsoids, or with all second orders in one matrix |

Nothing is searched for and no file of the run is believed: the weights and the region are all that goes in. Assumed:
float64 rounds to nearest, a sum of n products errs by at most γ_n of its terms (no Strassen, nothing fused in lower
precision), and Arb is right. numpy's exp and log are believed to 2⁻³⁰ where a root of a power is taken back
(`shapes.meeting`) and nowhere else.
"""

from prooflens.checker.depth.reading import Form, output_floors, output_form, score_form
from prooflens.checker.depth.walk import Walk

__all__ = ["Form", "Walk", "output_floors", "output_form", "score_form"]
