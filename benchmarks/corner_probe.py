"""How tight could a proof at depth be? The curvature of real score margins, and what a corner expansion would cost.

python benchmarks/corner_probe.py [--model minilm] [--layer 1] [--text "…"] [--rows 0.3,5.1,7.6] [--eps 0.001 0.002]

`layer0` bounds a form by f(s) + Σ max(0, 2(D_k − G_k)): its value at a corner s, plus what the curvature D may add
where the slope G is smaller. At depth the same inequality needs D with ∇²f ⪯ diag(D) on the whole region. This script
proves nothing: it *estimates* the largest eigenvalue λ of ∇²f at the centre, at the corner and at a random corner by
power iteration, and prints the slack, relative to the linear term, that uniform curvatures D = λ, 3λ, 10λ would leave.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from prooflens import Transformer, load

Scalar = Callable[[Tensor], Tensor]


def top_eigenvalue(f: Scalar, at: Tensor, generator: torch.Generator, steps: int = 25) -> float:
    """Power iteration on Hessian-vector products, shifted so that the largest (not the most negative) wins."""

    def product(v: Tensor) -> Tensor:
        found: Tensor = torch.func.jvp(torch.func.grad(f), (at,), (v,))[1]
        return found

    size = 0.0
    for shift in (0.0, 1.0):
        v = torch.randn(at.shape, generator=generator, dtype=at.dtype)
        v = v / v.norm()
        value = 0.0
        for _ in range(steps):
            w = product(v) + shift * size * v
            value = float(v @ w) - shift * size
            v = w / w.norm()
        if shift == 0.0:
            size = abs(value)
    return value


def margin_of(
    model: Transformer, x: Tensor, eps: float, row: tuple[int, int, int], keys: tuple[int, int]
) -> Scalar:
    """a_loser − a_winner as a function of the factors of a ball."""
    layer, head, position = row
    winner, loser = keys

    def margin(alpha: Tensor) -> Tensor:
        scores = model.scores(x + eps * alpha.reshape(x.shape), layer)[head, position]
        return scores[loser] - scores[winner]

    return margin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--text", default="the movie was long but very good")
    parser.add_argument("--rows", default="0.3,5.1,7.6", help="head.position, comma separated")
    parser.add_argument("--eps", type=float, nargs="+", default=[0.001, 0.002, 0.005])
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    model = load(options.model)
    x = model.prompt(options.text).x
    clean = model.scores(x, options.layer)
    print(
        f"{'row':8} {'eps':>7} {'margin':>8} {'linear':>8} {'λ/mean slope':>22} {'slack at λ':>10} {'3λ':>8} {'10λ':>8}"
    )
    for row in options.rows.split(","):
        head, position = (int(part) for part in row.split("."))
        visible = clean[head, position].masked_fill(~model.mask(len(x))[position], -torch.inf)
        winner, loser = visible.topk(2).indices.tolist()
        for eps in options.eps:
            margin = margin_of(model, x, eps, (options.layer, head, position), (winner, loser))
            zero = torch.zeros(x.numel(), dtype=torch.float64)
            slope = torch.func.grad(margin)(zero)
            corner = torch.sign(slope)
            for _ in range(2):
                corner = torch.sign(torch.func.grad(margin)(corner))
            G = corner * torch.func.grad(margin)(corner)
            random = torch.sign(torch.randn(zero.shape, generator=generator, dtype=torch.float64))
            values = [top_eigenvalue(margin, at, generator) for at in (zero, corner, random)]
            linear, mean = float(slope.abs().sum()), float(slope.abs().mean())
            slack = [float((2 * (k * max(values) - G)).clamp(min=0).sum()) / linear for k in (1, 3, 10)]
            shown = " ".join(f"{value / mean:6.3f}" for value in values)
            print(
                f"{options.layer}.{head}@{position:<3} {eps:7g} {float(margin(zero)):8.3f} {linear:8.4f} {shown:>22} "
                f"{slack[0]:10.2%} {slack[1]:8.2%} {slack[2]:8.1%}"
            )


if __name__ == "__main__":
    main()
