"""What it gains at depth that the checker keeps remainders of earlier roots apart (`checker/depth/origins.py`).

    python benchmarks/checker_origins.py toy-4layer --eps 0.01 --layer 3
    python benchmarks/checker_origins.py minilm --text "the movie was long but good" --eps 0.0005 --layer 3

One JSON line: for every layer from the first on, the size of e in front of it (the root of the traces of its tokens'
ellipsoids) without keeping them apart, as a multiple of that with; and the seconds of both walks.
"""

import argparse
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

from checking import find
from measuring import tell
from peer_models import PEERS
from prooflens.checker.depth import Walk, values
from prooflens.checker.network import Network
from prooflens.cli.view import torch_powers, torch_tables
from prooflens.models.prompt import Prompt


def walked(net: Network, center: np.ndarray, eps: float, layers: int) -> tuple[np.ndarray, float]:
    """The size of e in front of each layer on a ball, and the seconds of the walk.

    Args:
        net: the network.
        center: the input.
        eps: the radius.
        layers: the last layer.
    """
    begun, p = time.perf_counter(), center.size
    walk, found = Walk(net, center, eps * np.eye(p).reshape(*center.shape, p)), []
    with np.errstate(all="ignore"):
        for layer in range(1, layers + 1):
            shapes = walk.layer(layer).chain.shapes["root"]
            found.append(float(np.sqrt(np.trace(shapes, axis1=1, axis2=2).sum())))
    return np.array(found), time.perf_counter() - begun


def main() -> None:
    """Walk twice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--eps", type=float, required=True)
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--text")
    parser.add_argument("--peers", type=Path, default=PEERS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        _, prompt, folder = find(args.model, args.text, args.peers, Path(place))
        center = (prompt.x if isinstance(prompt, Prompt) else prompt).numpy().astype(np.float64)
        net = Network.read(folder, torch_tables, torch_powers)
        apart, with_s = walked(net, center, args.eps, args.layer)
        with mock.patch.object(values, "kept_apart", return_value=[]):
            together, without_s = walked(net, center, args.eps, args.layer)
    line = {"model": args.model, "eps": args.eps, "together_over_apart": (together / apart).round(3).tolist()}
    tell(line | {"apart_s": round(with_s, 2), "together_s": round(without_s, 2)}, args.json)


if __name__ == "__main__":
    main()
