"""Signs of neurons and of residual directions on balls: how many of those that the attack leaves are proved.

python benchmarks/sites.py [--only NAME …] [--device cuda] [--neurons 200] [--out benchmarks/measured/sites.jsonl]

Each question reads one hook at the last token, at neurons or directions drawn by a seed. A line has the claims, those
that fail (a point of the ball turns the sign), those proved, seconds, and the share proved of those that do not fail.
"""

import argparse
import random
import time
from pathlib import Path

import torch

import prooflens as pl
from measuring import Line, tell

MARY = "When Mary and John went to the store, John gave a drink to"
CAT = "the cat sat on the mat"
QUESTIONS: dict[str, tuple[str, str, str, float]] = {
    "minilm-neurons": ("minilm", CAT, "blocks.1.mlp.hook_pre", 1e-3),
    "minilm-stream": ("minilm", CAT, "blocks.1.hook_normalized_resid_post", 1e-3),
    "smollm2-8-neurons": ("smollm2", MARY, "blocks.8.mlp.hook_pre", 1e-4),
    "smollm2-8-stream": ("smollm2", MARY, "blocks.8.hook_resid_post", 1e-4),
    "smollm2-18-neurons": ("smollm2", MARY, "blocks.18.mlp.hook_pre", 2e-5),
    "smollm2-18-stream": ("smollm2", MARY, "blocks.18.hook_resid_post", 2e-5),
}
"""Model, text, hook and ε by name."""


def ask(name: str, count: int, device: str | None) -> Line:
    """Prove the signs of one question."""
    source, text, hook, eps = QUESTIONS[name]
    model = pl.load(source)
    prompt = model.prompt(text)
    width = model.architecture.d_ff if hook.endswith("hook_pre") else model.architecture.d_model
    if hook.endswith("hook_pre"):
        chosen: torch.Tensor | list[int] = sorted(random.Random(0).sample(range(width), count))
    else:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.nn.functional.normalize(
            torch.randn(count, width, generator=generator, dtype=torch.float64), dim=-1
        )
    read = pl.read_at(model, hook, len(prompt) - 1, chosen)
    queries = [f"logit{i}{'>' if value > 0 else '<'}0" for i, value in enumerate(read(prompt).tolist())]
    start = time.perf_counter()
    found = pl.certify(read, prompt, pl.Ball(eps), queries=queries, device=device, engine="taylor")
    counts = found.counts
    left = counts["holds"] + counts["unknown"]
    return {
        "question": name,
        "hook": hook,
        "eps": eps,
        "claims": len(queries),
        "fails": counts["fails"],
        "proved": counts["holds"],
        "share": round(counts["holds"] / max(1, left), 4),
        "seconds": round(time.perf_counter() - start, 2),
        "device": str(device or "cpu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--neurons", type=int, default=200, help="how many neurons or directions")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured/sites.jsonl"))
    options = parser.parse_args()
    for name in options.only:
        tell(ask(name, options.neurons, options.device), options.out)


if __name__ == "__main__":
    main()
