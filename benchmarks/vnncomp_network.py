"""The network of VNN-COMP 2023's ViT benchmark in prooflens' own layout: batch norms join the maps that follow them.

python benchmarks/vnncomp_network.py ibp_3_3_8.onnx FOLDER      (needs `pip install "prooflens[onnx]"`)

The reader of ONNX graphs (docs/models.md) does it all: at inference a batch norm is y = s ⊙ x + t, and behind it stand
only affine maps W y + b, which become (W diag s) x + (W t + b).
"""

from __future__ import annotations

import sys

import prooflens as pl
from prooflens.models.export import export

if __name__ == "__main__":
    export(pl.load(sys.argv[1]), sys.argv[2])
