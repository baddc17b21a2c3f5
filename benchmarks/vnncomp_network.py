"""The network of VNN-COMP 2023's ViT benchmark in prooflens' own layout: batch norms join the maps that follow them.

python benchmarks/vnncomp_network.py ibp_3_3_8.onnx FOLDER      (needs `pip install onnx`)

At inference a batch norm is y = s ⊙ x + t. Behind it stand only affine maps W y + b, which become
(W diag s) x + (W t + b).
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from prooflens.models import Architecture, Transformer
from prooflens.models.export import export

PARTS = {"q": "query", "k": "key", "v": "value"}
EPSILON = 1e-5


def read(path: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The named tensors of the graph, and its matrices in the order in which they are multiplied by."""
    onnx = import_module("onnx")
    numpy_helper = import_module("onnx.numpy_helper")
    graph = onnx.load(str(path)).graph
    held = {one.name: torch.tensor(numpy_helper.to_array(one)).double() for one in graph.initializer}
    used = [node.input[1] for node in graph.node if node.op_type == "MatMul" and node.input[1] in held]
    return held, [held[name].T for name in used]


def folded(held: dict[str, Tensor], norm: str, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """An affine map with the batch norm before it."""
    scale = held[f"{norm}.weight"] / (held[f"{norm}.running_var"] + EPSILON).sqrt()
    shift = held[f"{norm}.bias"] - held[f"{norm}.running_mean"] * scale
    return weight * scale, bias + weight @ shift


def convert(path: Path) -> Transformer:
    """The canonical transformer: three layers without norms, mean pooling, ten classes."""
    held, matrices = read(path)
    weights: dict[str, Tensor] = {}

    def put(name: str, weight: Tensor, bias: Tensor) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = weight.contiguous(), bias

    for layer in range(3):
        block, attend, feed = f"blocks.{layer}", f"1.{layer}.0.fn", f"1.{layer}.1.fn"
        own = dict(zip(("q", "k", "v", "o", "up", "down"), matrices[6 * layer : 6 * layer + 6], strict=True))
        for name, theirs in PARTS.items():
            put(
                f"{block}.{name}",
                *folded(held, f"{attend}.0.norm", own[name], held[f"{attend}.1.{theirs}.bias"]),
            )
        put(f"{block}.o", own["o"], held[f"{attend}.1.out.bias"])
        put(f"{block}.up", *folded(held, f"{feed}.0.norm", own["up"], held[f"{feed}.1.0.bias"]))
        put(f"{block}.down", own["down"], held[f"{feed}.1.3.bias"])
    put("head", *folded(held, "2.1", held["2.2.weight"], held["2.2.bias"]))
    put("embed.patches", held["0.projection.weight"].flatten(1), held["0.projection.bias"])
    weights["embed.front"], weights["embed.positions"] = held["0.cls_token"][None], held["0.positions"]
    architecture = Architecture(
        "vit", 3, 3, 48, 96, "relu", norm_place="none", pool="mean", d_out=10, patch=8, context=17
    )
    return Transformer(architecture, weights, name="vnncomp-vit")


if __name__ == "__main__":
    export(convert(Path(sys.argv[1])), sys.argv[2])
