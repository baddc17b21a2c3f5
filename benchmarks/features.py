"""Features of a dictionary on a prompt: which stay active, which stay off, on a ball and on the way to another prompt.

python benchmarks/features.py SAE_FOLDER [--device cuda] [--off 1000] [--out benchmarks/measured/features.jsonl]

The dictionary is one that `prooflens train sae` wrote. A line has how many features are asked, how many are proved, how
many a point of the region breaks, seconds, and of those that break on the way the share of it at which they do.
"""

import argparse
import random
import time
from pathlib import Path

import torch

import prooflens as pl
from measuring import Line, tell
from prooflens.results import Results

MARY = "When Mary and John went to the store, John gave a drink to"
WAYS = {
    "Mary to Alice": "When Alice and John went to the store, John gave a drink to",
    "drink to book": "When Mary and John went to the store, John gave a book to",
}


def line_of(what: str, region: str, found: Results, seconds: float) -> Line:
    """One line of what was proved."""
    return {
        "what": what,
        "region": region,
        "features": len(found),
        "proved": found.counts["holds"],
        "broken": found.counts["fails"],
        "open": found.counts["unknown"],
        "seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--eps", type=float, default=1e-4)
    parser.add_argument("--off", type=int, default=1000, help="how many inactive features are asked about")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--time", default="240s")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/features.jsonl"))
    options = parser.parse_args()
    model, sae = pl.load(options.model), pl.Dictionary.load(options.folder)
    prompt = model.prompt(MARY)
    with torch.no_grad():
        h = model.run(prompt, sae.hook)[sae.hook][-1]
    active = sae.active(h)
    on = active.nonzero()[:, 0].tolist()
    off = random.Random(0).sample((~active).nonzero()[:, 0].tolist(), options.off)
    asked = {
        "active": [f"feature S.{i} active@-1" for i in on],
        "off": [f"feature S.{i} off@-1" for i in off],
    }
    regions = {f"ball {options.eps:g}": pl.Ball(options.eps)} | {
        name: pl.Segment(MARY, text) for name, text in WAYS.items()
    }
    for region, place in regions.items():
        for what, queries in asked.items():
            start = time.perf_counter()
            found = pl.certify(
                model,
                MARY,
                place,
                queries=queries,
                vectors={"S": sae},
                device=options.device,
                time=options.time,
            )
            tell(line_of(what, region, found, time.perf_counter() - start), options.out)


if __name__ == "__main__":
    main()
