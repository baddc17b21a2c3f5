"""The tables of docs/paper-machinery.md: the paper's engines on its synthetic encoders and on the peer models.

OMP_NUM_THREADS=1 python benchmarks/paper_machinery.py [layer1 ablation generators multilayer columns remainder
    peers cost minilm] [--peers FOLDER] [--plot FILE]

Seconds are CPU seconds of this process, so that with one thread neighbours on the machine do not count.
Without names all tables but `minilm` (which needs the pretrained model) are made.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from paper_measuring import SAMPLES, Asked, attacked, examples, measure, table
from peer_models import peer_model
from prooflens import load
from prooflens.engines import Guarantee, forms_of, get_engine
from prooflens.engines.attack import Attack, AttackBudget
from prooflens.engines.jacobian import Jacobian, ProvedConnector, SampledConnector
from prooflens.engines.polyzono import VARIANTS, PolyZono
from prooflens.engines.relaxations.interval_walk import value_boxes
from prooflens.evaluation.studies.depth import SEQUENTIAL, remainders
from prooflens.models import Transformer
from prooflens.models.architecture import Architecture
from prooflens.models.weights import optional_shapes, required_shapes
from prooflens.problem import Problem
from prooflens.queries.attention import TopK
from prooflens.regions import Ball


def layer1() -> None:
    """Tab. `layer1_all`, Q1."""

    def rows() -> Iterable[list[str]]:
        for eps in (0.01, 0.02):
            asked = examples("toy", eps, 1)
            best = attacked(asked)
            yield [f"{eps}", "MC+PGD (not a proof)", best.rate, f"{best.width:.4f}", "", ""]
            for name in ("cpz", "jacobian-proved", "pz", "interval", "jacobian"):
                engine = get_engine(name)
                line = measure(engine, asked)
                label = f"`{name}`" + (" (estimated)" if engine.guarantee is Guarantee.ESTIMATED else "")
                yield [
                    f"{eps}",
                    label,
                    line.rate,
                    f"{line.width:.4f}",
                    str(line.crossed),
                    f"{line.seconds:.2f}",
                ]

    head = [
        "ε",
        "engine",
        "top-1, %",
        "mean margin width",
        "bounds crossed by the attack",
        "CPU s per sample",
    ]
    table("toy, layer 1, 5 samples, 40 queries", head, rows())


def ablation() -> None:
    """Tabs `main_app` and `ablation_app`: the mean width of the last norm's output."""
    model, radii = load("toy"), (0.01, 0.02, 0.05, 0.1)
    out = "blocks.1.hook_normalized_resid_post"

    def problems(eps: float) -> list[Problem]:
        return [Problem(model, Ball(eps).around(model.example(i))) for i in range(SAMPLES)]

    def width(engine: PolyZono | None, eps: float) -> float:
        found = []
        for problem in problems(eps):
            if engine is None:
                box = value_boxes(problem, [out])[out]
                found.append(float((box.upper - box.lower).mean()))
            else:
                found.append(engine.walk(problem, [out]).stages[-1].width)
        return sum(found) / SAMPLES

    def sampled(eps: float) -> float:
        spans = []
        for problem in problems(eps):
            values = model.run(problem.region.sample(20_000)[0], out)[out]
            spans.append(float((values.amax(0) - values.amin(0)).mean()))
        return sum(spans) / SAMPLES

    engines = {"interval": None} | {f"`{name}`": PolyZono(name, o) for name, o in VARIANTS.items()}
    rows = [[label, *(f"{width(engine, eps):.3g}" for eps in radii)] for label, engine in engines.items()]
    rows.append(["sampled (lower bound)", *(f"{sampled(eps):.3g}" for eps in radii)])
    table("toy, mean width after 2 layers, 5 samples", ["engine", *(f"ε={e}" for e in radii)], rows)


def generators() -> None:
    """Tab. `gi_count_app`."""
    model = load("toy")
    problem = Problem(model, Ball(0.05).around(model.example(0)))
    wanted = {
        "hook_resid_pre": "input",
        "hook_z": "attention",
        "ln1.hook_normalized": "norm 1",
        "hook_normalized_resid_post": "norm 2",
    }
    walks = [PolyZono(n, VARIANTS[n]).walk(problem, ["output"]) for n in ("pz", "cpz")]
    rows = []
    for pz, cpz in zip(*(walk.stages for walk in walks), strict=True):
        for end, label in wanted.items():
            if pz.name.endswith(end):
                layer = pz.name.split(".")[1]
                cells = [f"{s.dependent} | {s.independent} | {s.width:.3g}" for s in (pz, cpz)]
                rows.append([f"L{layer} {label}", *cells])
    head = ["stage", "`pz` dependent", "G_I", "width", "`cpz` dependent", "G_I", "width"]
    table("toy, ε = 0.05, example 0: generators before absorption", head, rows)


def multilayer() -> None:
    """Tabs `multilayer` and `connector_ablation`."""
    names = ("pz", "cpz", "jacobian-proved", "jacobian")
    engines = [SEQUENTIAL, *(get_engine(name) for name in names)]

    def rows() -> Iterable[list[str]]:
        for eps in (0.005, 0.01):
            for layer in (1, 2, 3):
                asked = examples("toy-4layer", eps, layer)
                lines = [measure(engine, asked) for engine in engines]
                estimate = lines[-1]
                yield [
                    f"{eps}",
                    f"L{layer}",
                    *(line.rate for line in lines),
                    attacked(asked).rate,
                    f"{estimate.false} of {estimate.certified}",
                    f"{estimate.crossed} of {estimate.forms}",
                    f"{sum(line.crossed for line in lines[:-1])}",
                    " / ".join(f"{line.seconds:.1f}" for line in lines),
                ]

    head = ["ε", "layer", "`cpz`, paper's restrictions", *(f"`{name}`" for name in names), "MC+PGD"]
    head += [
        "false certificates of `jacobian`",
        "its bounds crossed",
        "proved bounds crossed",
        "CPU s per sample",
    ]
    table("toy-4layer, top-1 in %, 5 samples, 40 queries", head, rows())


def columns() -> None:
    """False certificates against K_J: the case built to break the estimate (soundness.md, row 1)."""

    def rows() -> Iterable[list[str]]:
        asked = examples("toy", 0.05, 1)
        for count in (1, 4, 16, 32):
            sampled = Jacobian("jacobian", Guarantee.ESTIMATED, SampledConnector(columns=count))
            proof = Jacobian("jacobian-proved", Guarantee.PROVED, ProvedConnector(columns=count))
            guess, proved = measure(sampled, asked), measure(proof, asked)
            yield [
                str(count),
                guess.rate,
                f"{guess.false} of {guess.certified}",
                f"{guess.crossed} of {guess.forms}",
                proved.rate,
                str(proved.crossed),
            ]
        yield ["MC+PGD", attacked(asked).rate, "", "", "", ""]

    head = ["K_J", "`jacobian`, %", "false", "bounds crossed", "`jacobian-proved`, %", "bounds crossed"]
    table("toy, layer 1, ε = 0.05: columns kept", head, rows())


def remainder() -> None:
    """Tab. `analytical_remainder`: largest remainder coordinate, in units of the value."""
    model = load("toy-4layer")

    def rows() -> Iterable[list[str]]:
        for layer in (1, 2, 3):
            for eps in (0.005, 0.01):
                problem = Problem(model, Ball(eps).around(model.example(0)))
                yield [str(layer), f"{eps}", *(f"{r:.2e}" for r in remainders(problem, layer))]

    head = ["layer", "ε", "1.5 V̂ (sampled)", "proved, all three", "proved, interval Jacobian alone"]
    table("toy-4layer, example 0: largest coordinate of the remainder", head, rows())


LIRPA = {
    ("peer-tiny", 0.01): ".0529 [8], .0450 [8]",
    ("peer-tiny", 0.02): ".143 [6], .102 [7]",
    ("peer-tiny", 0.05): "1.13 [0], .414 [0]",
    ("peer-d128", 0.002): ".0597 [15], –",
    ("peer-d128", 0.005): ".232 [11], –",
    ("peer-d128", 0.01): "1.31 [0], –",
}
"""Mean widths and certified counts of CROWN and α-CROWN (peers.md)."""


def peers(folder: Path) -> None:
    """Layer-1 margins beside auto_LiRPA."""

    def rows() -> Iterable[list[str]]:
        for (name, eps), others in LIRPA.items():
            model, x = peer_model(folder / name)
            asked = [Asked.of(Problem(model, Ball(eps).around(x)), 1, budget=AttackBudget(2_000, 2, 50))]
            best = attacked(asked)
            cells = [name, f"{eps}", f"{best.width:.4f} [{best.certified}]", others]
            for engine in ("cpz", "pz", *(["jacobian-proved"] if name == "peer-tiny" else [])):
                line = measure(get_engine(engine), asked)
                cells.append(f"{line.width:.4f} [{line.certified}], {line.seconds:.1f} s")
            yield cells + ["–"] * (7 - len(cells))

    head = ["model", "ε", "attack", "CROWN, α-CROWN", "`cpz`", "`pz`", "`jacobian-proved`"]
    table("Peers, layer 1: mean width of all margins [queries certified]", head, rows())


def random_encoder(d: int, heads: int, seed: int = 0) -> Transformer:
    """A 2-layer post-norm ReLU encoder with Gaussian weights of variance 1/fan-in."""
    architecture = Architecture("encoder", 2, heads, d, 2 * d, "relu", norm_eps=1e-5, pool="mean", d_out=2)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in (required_shapes(architecture) | optional_shapes(architecture)).items():
        if len(shape) == 2:
            draw = torch.randn(shape, generator=generator, dtype=torch.float64)
            weights[name] = draw / math.sqrt(shape[1])
        else:
            weights[name] = torch.full(
                shape, float(".norm" in name and name.endswith("weight")), dtype=torch.float64
            )
    return Transformer(architecture, weights, f"random-d{d}")


def cost(plot: Path | None) -> None:
    """Tab. `scalability`: time of `cpz` through layer 0 to all layer-1 margins."""
    settings = [(d, heads, 8) for d, heads in ((8, 2), (16, 2), (32, 4), (64, 4), (128, 4))]
    settings += [(32, 4, S) for S in (4, 16, 24)]
    paper = {8: "0.4", 16: "0.7", 32: "1.0", 64: "1.8", 128: "54"}
    rows, points = [], []
    for d, heads, S in settings:
        model = random_encoder(d, heads)
        x = torch.randn(S, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        asked = [Asked.of(Problem(model, Ball(0.002).around(x)), 1, attack=False)]
        line = measure(get_engine("cpz"), asked)
        points.append((d, S, line.seconds))
        shown = paper[d] if S == 8 else ""
        rows.append([str(d), str(S), str(line.forms), f"{line.seconds:.2f}", f"{line.width:.3f}", shown])
    head = ["d", "S", "margins", "CPU s", "mean width", "paper, s (ε = 0.01, output width)"]
    table("Cost of `cpz`, layer 1, random encoders, ε = 0.002, one core", head, rows)
    if plot is not None:
        draw_cost(points, plot)


def draw_cost(points: list[tuple[int, int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    by_d = [(d, s) for d, S, s in points if S == 8]
    by_S = sorted((S, s) for d, S, s in points if d == 32)
    paper = [(8, 0.4), (16, 0.7), (32, 1.0), (64, 1.8), (128, 54.0)]
    axes[0].loglog(*zip(*by_d, strict=True), "o-", base=2, label="cpz, all layer-1 margins")
    axes[0].loglog(*zip(*paper, strict=True), "s--", base=2, label="paper, Tab. scalability")
    axes[1].loglog(*zip(*by_S, strict=True), "o-", base=2)
    axes[0].set(xlabel="d (S = 8)", ylabel="CPU seconds per sample")
    axes[1].set(xlabel="S (d = 32)")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def minilm() -> None:
    """The estimate on a real model: layer 1 of MiniLM, K_J = 64."""
    model = load("minilm")

    def rows() -> Iterable[list[str]]:
        for text in ("good film",):
            for eps in (0.002, 0.02):
                problem = Problem(model, Ball(eps).around(model.prompt(text)))
                claims = TopK(k=1).bind(problem.setting([1]))
                forms = forms_of([f for claim in claims for f in claim.functionals])
                start = time.process_time()
                guess = get_engine("jacobian").bound_forms(problem, forms)
                seconds = time.process_time() - start
                found = Attack(budget=AttackBudget(500, 2, 30), starts=guess).bound_forms(problem, forms)
                asked = Asked(problem, claims, forms, found)
                certified, survived = asked.holding(guess.lower), asked.holding(found.lower)
                false = sum(c and not s for c, s in zip(certified, survived, strict=True))
                crossed = int(((found.lower < guess.lower) | (found.upper > guess.upper)).sum())
                yield [
                    f"“{text}” ({problem.n_tokens} tokens)",
                    f"{eps}",
                    f"{sum(certified)} of {len(claims)}",
                    str(sum(survived)),
                    str(false),
                    f"{crossed} of {forms.size}",
                    f"{seconds:.0f}",
                ]

    head = ["text", "ε", "certified by `jacobian`", "MC+PGD", "false", "bounds crossed", "CPU s"]
    table("minilm, layer 1, K_J = 64 (estimated)", head, rows())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*")
    parser.add_argument("--peers", type=Path, default=Path("..") / "shared" / "models")
    parser.add_argument("--plot", type=Path, default=None)
    chosen = parser.parse_args()
    makers: dict[str, Callable[[], None]] = {
        "layer1": layer1,
        "ablation": ablation,
        "generators": generators,
        "multilayer": multilayer,
        "columns": columns,
        "remainder": remainder,
        "peers": lambda: peers(chosen.peers),
        "cost": lambda: cost(chosen.plot),
        "minilm": minilm,
    }
    for name in chosen.tables or [name for name in makers if name != "minilm"]:
        with torch.no_grad():
            makers[name]()


if __name__ == "__main__":
    main()
