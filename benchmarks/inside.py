"""Regions inside a model: balls around the stream of a layer, steering, and ways between two prompts' activations.

python benchmarks/inside.py [--device cuda] [--out benchmarks/measured/inside.jsonl]

The claim is that head 18.6 of SmolLM2 attends most, at the last token, to the token that it attends to on the prompt. A
radius is a share of the root mean square of each token's own coordinates.
"""

import argparse
import time
from pathlib import Path

import torch

import prooflens as pl
from measuring import Line, tell

MARY = "When Mary and John went to the store, John gave a drink to"
ALICE = "When Alice and John went to the store, John gave a drink to"
LAYER, HEAD = 18, 6
SHARES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)


def radius(model: pl.Transformer, start: int, device: str | None) -> Line:
    """The largest share of the stream's size at which the claim is proved, from a layer on, on a grid."""
    tail, stream = pl.start_at(model, start, MARY)
    assert stream is not None
    size = stream.x.square().mean(-1).sqrt()
    best, broken, begun = 0.0, None, time.perf_counter()
    for share in SHARES:
        ball = pl.Ball({t: share * float(size[t]) for t in range(len(stream))})
        found = pl.certify(
            tail, stream, ball, f"{LAYER - start}.{HEAD}", positions=[-1], device=device, engine="taylor"
        )
        if found.verdict.value == "fails":
            broken = share
        if found.verdict.value != "holds":
            break
        best = share
    return {
        "work": "ball",
        "from layer": start,
        "proved share": best,
        "broken share": broken,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def steering(model: pl.Transformer, start: int, c: tuple[float, float], device: str | None) -> Line:
    """Steer the last token from one prompt's stream along its difference to another's."""
    streams = [pl.start_at(model, start, text)[1] for text in (MARY, ALICE)]
    assert streams[0] is not None
    assert streams[1] is not None
    v = (streams[1].x - streams[0].x)[-1]
    begun = time.perf_counter()
    (found,) = pl.steer(model, MARY, start, v, c, f"{LAYER - start}.{HEAD}:top1@-1", device=device)
    return {
        "work": "steer",
        "from layer": start,
        "c": list(c),
        "proved up to": found.proved,
        "breaks at": found.breaks,
        "pieces": len(found.pieces),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def plateau(model: pl.Transformer, start: int, device: str | None) -> Line:
    """The way between two prompts' streams at a layer."""
    tail, a = pl.start_at(model, start, MARY)
    _, b = pl.start_at(model, start, ALICE)
    assert a is not None
    assert b is not None
    begun = time.perf_counter()
    (found,) = pl.way(tail, a, b, f"{LAYER - start}.{HEAD}:top1@-1", device=device)
    return {
        "work": "plateau",
        "from layer": start,
        "proved up to": found.proved,
        "breaks at": found.breaks,
        "pieces": len(found.pieces),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/inside.jsonl"))
    options = parser.parse_args()
    model = pl.load(options.model)
    with torch.no_grad():
        for start in (17, 8):
            tell(plateau(model, start, options.device), options.out)
            tell(steering(model, start, (0.0, 8.0), options.device), options.out)
        for start in (17, 8, 0):
            tell(radius(model, start, options.device), options.out)


if __name__ == "__main__":
    main()
