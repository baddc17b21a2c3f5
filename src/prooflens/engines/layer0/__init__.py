r"""Engine `layer0`: attention scores of the first layer, nearly exactly (Theorem `thm:margin_sound`).

A linear form f of layer-0 scores is a function of the factors α with a Hessian that is bounded on the whole region:
∇²f(α) ⪯ diag(D) for all α. Expand around a corner s ∈ {−1, 1}ᵖ. With
β_k = 1 − s_k α_k ∈ [0, 2] and G_k = s_k ∂f/∂α_k(s),

    f(α) ≤ f(s) − Σ G_k β_k + ½ Σ D_k β_k²  ≤  f(s) + Σ_k max(0, 2(D_k − G_k)).

This holds for *every* corner. At the maximiser of f the sum vanishes but for the coordinates whose slope G_k is smaller
than D_k: the bound is what the corner attains, plus that little. (At the centre, s = 0, the same inequality is
the diagonal-shift bound |∇f|₁ + ½ΣD, which pays ½D_k for every coordinate.)

**D without a norm** (post-norm models: BERT, MPNet, the paper's encoder). f is quadratic. A score q_i·k_j has
the blocks M = Q̃ᵀK̃ of rank d_h; for i ≠ j,  [0 M; Mᵀ 0] ⪯ σ(M)·diag(τ on token i, 1/τ on token j)  for every τ > 0;
for i = j, ±(M + Mᵀ) ⪯ λ±. σ and λ± come from d_h × d_h problems that `sets.bilinear` verifies; no d × d matrix is
formed. With RoPE, M depends on the distance j − i, up to the rounding of the tables, which is added.

**D with a norm** (pre-norm models: GPT-2, Llama). Scores read z = γ⊙y + β, y = Px·n, n = (‖Px‖²/d + ε)^{-½}: one scalar
per token is all that is not linear. With F the form as a function of y and v = ∂F/∂y,

    ∇²f = Jᵀ∇²F J + Σ_k v_k ∇²y_k,   ‖J‖ ≤ n,   Σ_k v_k ∇²y_k ⪯ √2 max(1, 3εn²) n²‖Pv‖/√d,

the last from D²(v·y)[u,u] = −c(3εn² a² + b²) − 2g a(e·b)  in the split of u along and across m = Px, c = v∥‖m‖n³/d,
g = ‖v⊥‖‖m‖n³/d, ‖m‖n ≤ √d. n is bounded above over the region by ‖m‖ ≥ ‖m₀‖ − sup‖Gα‖, ‖Pv‖ by its value
at the corner plus σ times how far the other tokens' y can move.

**Norms of queries and keys** (Qwen 3, Gemma 3, OLMo 2) multiply scores by two positive scalars: `layer0.normed`.

**Shaped D.** A bound that ends on the wrong side of 0 although its corner does not is refined: the main term δ_iᵀMδ_j
is majorised by σ(X_i^{-½}MX_j^{-½})·(X_i, X_j) with X ≈ |∂f/∂x| at the corner, one d_h × d_h problem per entry. Then D
is small where the slope is small, which is where it costs. What J's rank-one part and the norm add stays uniform. On
small norm-free models the Hessian of the whole form is written out instead, which keeps what its entries share.

**Rounding.** f(s) and G are sums of products through a chain of at most N roundings, so they err by at most
γ_N times the same chain with absolute values (and (1+η)⁴ where η bounds the relative error of n): both are added.
"""

from prooflens.engines.layer0.engine import Layer0

__all__ = ["Layer0"]
