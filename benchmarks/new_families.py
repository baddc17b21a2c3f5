"""How tight bounds are on families that came later: the table of docs/baselines.md.

OMP_NUM_THREADS=1 python benchmarks/new_families.py [gemma2 gpt_neox] [--seeds 3] [--tokens 6] [-o FILE]

Random models of transformers with d = 64, two layers and 4 heads: one like Gemma 2 (norms on both sides of every part,
capped scores, a window, GeGLU, shared heads) and one like Pythia (attention and network side by side, a part of each
head turns). Matrices are normal with variance 1/fan-in, so that no layer is nearly linear. All margins a_j − a_j* of
the last token's queries in layer 1, on random tokens, every token within ε. A ratio is the mean width of an engine's
bounds over the mean width that an attack attains, which starts from the corners of `taylor` too. A bound that the
attack leaves is an error.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from measuring import Line, known, tell, told
from prooflens import Ball, load
from prooflens.engines import FormBounds, Forms, forms_of, get_engine
from prooflens.engines.attack import Attack, AttackBudget
from prooflens.engines.protocol import Stopwatch
from prooflens.models import Transformer
from prooflens.problem import Problem
from prooflens.queries.attention import TopK

COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
SIZES: dict[str, dict[str, object]] = {
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 256,
        "query_pre_attn_scalar": 16,
        "sliding_window": 4,
    },
    "gpt_neox": {"intermediate_size": 256, "rotary_pct": 0.25},
}
RADII = {
    "gemma2": (0.002, 0.004, 0.006, 0.01),
    "gpt_neox": (0.0005, 0.001, 0.0015, 0.002),
}
ENGINES = ("taylor", "crown", "interval")
BUDGET = AttackBudget(500, 4, 40)
LAYER = 1


def random_model(family: str, seed: int) -> Transformer:
    """A random model of a family of transformers: matrices of variance 1/fan-in, norms near those of a fresh model."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **COMMON, **SIZES[family])
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn_like(weight)
            weight.copy_(noise * weight.shape[-1] ** -0.5 if weight.dim() == 2 else weight + 0.1 * noise)
    return load(module)


def question(family: str, seed: int, tokens: int, eps: float) -> tuple[Problem, Forms]:
    """Margins of layer 1 at the last token, around an input of random tokens."""
    model = random_model(family, seed)
    ids = torch.randint(0, 100, (tokens,), generator=torch.Generator().manual_seed(seed))
    problem = Problem(model, Ball(eps).around(model.embed(ids)))
    claims = [
        claim for claim in TopK(k=1).bind(problem.setting([LAYER])) if claim.rows[0].position == tokens - 1
    ]
    return problem, forms_of([f for claim in claims for f in claim.functionals])


def width(bounds: FormBounds) -> float:
    """The mean width of bounds."""
    return float((bounds.upper - bounds.lower).mean())


def measure(family: str, seed: int, tokens: int, eps: float) -> Line:
    """Bound and attack the margins of one model at one radius."""
    problem, forms = question(family, seed, tokens, eps)
    line: Line = {"family": family, "seed": seed, "tokens": tokens, "eps": eps, "forms": forms.size}
    found = {}
    for name in ENGINES:
        watch = Stopwatch(problem.model.device)
        found[name] = get_engine(name).bound_forms(problem, forms)
        line[f"{name} s"] = round(watch.seconds(), 2)
    attained = Attack(budget=BUDGET, seed=seed, starts=found["taylor"]).bound_forms(problem, forms)
    line["attack width"] = width(attained)
    for name, bounds in found.items():
        room = 1e-11 * (1.0 + attained.lower.abs())
        if bool(((attained.lower < bounds.lower - room) | (attained.upper > bounds.upper + room)).any()):
            raise AssertionError(f"{name} is left by the attack: {line}")
        line[f"{name} ratio"] = width(bounds) / width(attained)
    return line


def table(lines: list[Line]) -> str:
    """The ratios as a table, one row per family and radius, the least and the largest of all seeds."""
    rows = [
        "| model | ε | models | attack's width | `taylor` | `crown` | `interval` |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, eps in sorted({(str(line["family"]), float(str(line["eps"]))) for line in lines}):
        some = [line for line in lines if line["family"] == family and line["eps"] == eps]
        cells = []
        for name in ("attack width", *(f"{engine} ratio" for engine in ENGINES)):
            values = [float(str(line[name])) for line in some]
            cells.append(f"{min(values):.3g} to {max(values):.3g}")
        rows.append(f"| {family} | {eps:g} | {len(some)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Measure what is not in the file yet, and print the table of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", default=list(SIZES), help="gemma2, gpt_neox")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--eps", type=float, nargs="*", help="radii, in place of the family's own")
    parser.add_argument("-o", "--out", type=Path, help="keep results as JSON lines here, and go on from them")
    options = parser.parse_args()
    lines = told(options.out)
    for family in options.families:
        for eps in options.eps or RADII[family]:
            for seed in range(options.seeds):
                if known(lines, family=family, seed=seed, tokens=options.tokens, eps=eps):
                    continue
                lines.append(measure(family, seed, options.tokens, eps))
                tell(lines[-1], options.out)
    print(table(lines))


if __name__ == "__main__":
    main()
