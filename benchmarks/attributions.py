"""Direct logit attributions and logit lenses on balls: how many signs that the attack leaves are proved.

python benchmarks/attributions.py [--layers 1 …] [--eps 1e-5] [--device cuda] [--out FILE.jsonl]

SmolLM2 on the prompt of indirect object identification, all tokens moving. At each layer: the sign of what every head,
the attention and the network add to logit Mary − logit John, and which of the two logits the lens behind the layer has
above the other. A line has the claims, those that fail, those proved, and seconds.
"""

import argparse
import time
from pathlib import Path

import torch

import prooflens as pl
from measuring import Line, tell

MARY = "When Mary and John went to the store, John gave a drink to"


def ask(model: pl.Transformer, layer: int, kind: str, eps: float, device: str | None) -> Line:
    """Prove the signs of one layer."""
    prompt = model.prompt(MARY)
    a, b = ((model.prompt(name).ids or ())[-1] for name in (" Mary", " John"))
    with torch.no_grad():
        if kind == "lens":
            logits = model.cut(layer + 1)(prompt)[-1]
            winner, loser = (a, b) if logits[a] > logits[b] else (b, a)
            queries = [f"lens {layer} logit{winner}>logit{loser}"]
        else:
            heads = [f"a{layer}.h{head}" for head in range(model.architecture.n_heads)]
            queries = []
            for part in heads if kind == "heads" else [f"a{layer}", f"m{layer}"]:
                hook, v = pl.attribution(model, part, (a, b), prompt)
                value = float(v @ model.run(prompt, hook)[hook][-1].flatten())
                queries.append(f"dla {part} logit{a}-logit{b}{'>' if value > 0 else '<'}0")
    start = time.perf_counter()
    found = pl.certify(
        model, prompt, pl.Ball(eps), queries=queries, device=device, engine="taylor", budget="100/2/10"
    )
    return {
        "layer": layer,
        "kind": kind,
        "eps": eps,
        "claims": len(queries),
        "fails": found.counts["fails"],
        "proved": found.counts["holds"],
        "seconds": round(time.perf_counter() - start, 2),
        "device": str(device or "cpu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="*", type=int, default=[1])
    parser.add_argument("--eps", type=float, default=1e-5)
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/attributions.jsonl"))
    options = parser.parse_args()
    model = pl.load("smollm2")
    for layer in options.layers:
        for kind in ("heads", "parts", "lens"):
            tell(ask(model, layer, kind, options.eps, options.device), options.out)


if __name__ == "__main__":
    main()
