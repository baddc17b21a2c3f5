"""How long a run takes to prove and how long to check, and what the checker says of its rows.

    python benchmarks/checking.py peer-tiny --eps 0.002
    python benchmarks/checking.py minilm --text "the movie was long but good" --layer 1 --eps 0.0005 0.001
    python benchmarks/checking.py smollm2 --text "…" --layer 1 --eps 0.0001 --positions -1 --json FILE
    python benchmarks/checking.py toy --radii 0.02 --layer 1 --run FOLDER
    python benchmarks/checking.py toy --eps 0.005 0.02 0.05 --effects a1.h0 a1.h0@1 a0.h1.k1
    python benchmarks/checking.py smollm2 --text "…" --depth 18 --eps 0.00002

One JSON line per ε. With `--radii` the largest radii that the engines just prove, to a share of themselves, are
searched for and checked; a run that is in `--run` already is checked alone, so that two versions of the checker can be
compared. With `--effects` the range of logit0 − logit1 without each part, its word and the checker's own range. With
`--depth` there is no run: the checker walks the network by itself, and one line per layer says of how many heads it
proves what the last position attends to most, on the ball around all tokens, and how much of the stream there is not
linear in the factors, as a share of what is; behind the last layer, how many tokens it proves less likely than the
most likely next one. Both programs run on the CPU, one after
the other: give both the same threads (OMP_NUM_THREADS).
A peer model is exported to prooflens' own layout first, which is what the checker reads. `random-FAMILY-SEED` is a
model of the soundness run (random-gemma2-3), on four random tokens.
"""

import argparse
import itertools
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from measuring import tell
from peer_models import PEERS, peer_model
from prooflens import Ball, Transformer, certify, effect, load, radius
from prooflens.checker import check
from prooflens.checker.depth import Walk, output_floors, output_form, score_form
from prooflens.checker.depth.room import within
from prooflens.checker.network import Network
from prooflens.cli.view import torch_powers, torch_tables
from prooflens.evaluation.soundness.cases import random_model
from prooflens.memory import parse_memory
from prooflens.models.cache import model_folder
from prooflens.models.export import export
from prooflens.models.prompt import Prompt


def find(
    name: str, text: str | None, peers: Path, scratch: Path
) -> tuple[Transformer, Prompt | Tensor, Path]:
    """A model, a prompt, and the folder that the checker reads."""
    if name.startswith("random-"):
        _, family, seed = name.split("-")
        model, generator = random_model(family, random.Random(seed), depth=3), torch.Generator()
        x = torch.randn(
            4, model.architecture.d_model, generator=generator.manual_seed(int(seed)), dtype=torch.float64
        )
        return model, x, export(model, scratch / name)
    if name.startswith("peer-"):
        model, x = peer_model(peers / name)
        return model, x, export(model, scratch / name)
    model = load(name)
    prompt = model.prompt(text) if text is not None else model.example(0)
    embedded = Path(__file__).parents[1] / "src" / "prooflens" / "models" / "embedded" / name
    return model, prompt, embedded if embedded.is_dir() else model_folder(name)


def measure_radii(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, object]:
    """Search radii and check them: how many of those that are proved are proved again.

    Args:
        args: the command line.
        options: what engines are told.
    """
    with tempfile.TemporaryDirectory() as place:
        model, prompt, folder = find(args.model, args.text, args.peers, Path(place))
        run, begun = args.run or Path(place, "run"), time.perf_counter()
        if not (run / "run.json").is_file():
            found = radius(
                model,
                prompt,
                args.query,
                layer=args.layer,
                positions=args.positions,
                tolerance=args.radii,
                between=(1e-5, 1.0),
                **options,
            )
            found.save(run)
        proving = time.perf_counter() - begun
        begun = time.perf_counter()
        report = check(run, folder, torch_tables, torch_powers)
        checking = time.perf_counter() - begun
    line = {"model": args.model, "layer": args.layer, "radii": args.radii, "query": args.query}
    line |= {"rows": len(report.findings), "checked": report.counts, "problems": report.problems}
    return line | {"proving_s": round(proving, 2), "checking_s": round(checking, 2)}


def measure_effect(args: argparse.Namespace, part: str, eps: float) -> dict[str, object]:
    """The range of the effect of taking a part out, what an attack attains, and what the checker says of it.

    Args:
        args: the command line.
        part: the part.
        eps: the radius of the ball.
    """
    with tempfile.TemporaryDirectory() as place:
        model, prompt, folder = find(args.model, args.text, args.peers, Path(place))
        found = effect(model, part, prompt, Ball(eps), "logit0-logit1")
        found.save(Path(place, "run"))
        said = check(Path(place, "run"), folder, torch_tables, torch_powers).findings[0]
    line = {"model": args.model, "effect": part, "eps": eps, "range": found.ends, "status": said.status}
    return line | {"attained": (found.least.effect, found.most.effect), "note": said.note}


def measure_depth(args: argparse.Namespace, eps: float) -> Iterator[dict[str, object]]:
    """Yield what the checker proves without a run: for every layer down to `--depth`, top-1 of the last position.

    Args:
        args: the command line.
        eps: the radius of the ball around all tokens.
    """
    with tempfile.TemporaryDirectory() as place:
        model, prompt, folder = find(args.model, args.text, args.peers, Path(place))
        net = Network.read(folder, torch_tables, torch_powers)
    center = model.input(prompt).double().numpy()
    S, d = center.shape
    walk = Walk(net, center, eps * np.eye(S * d).reshape(S, d, S * d))
    begun, cpu = time.perf_counter(), time.process_time()
    for number in range(args.depth + 1):
        layer = walk.layer(number)
        scores, beyond = layer.scores.center[:, -1], layer.stream.epsilon[-1] / layer.stream.tau[-1]
        proved = []
        for head, row in enumerate(scores):
            top = int(row.argmax())
            others = (j for j in range(S) if j != top)
            margins = ([(1.0, head, S - 1, top), (-1.0, head, S - 1, j)] for j in others)
            if all(score_form(walk, number, terms).bounds()[0] > 0.0 for terms in margins):
                proved.append(head)
        line: dict[str, object] = {"model": args.model, "alone": "top1@-1", "layer": number, "eps": eps}
        line |= {"proved": proved, "of": len(scores), "beyond_linear": float(f"{beyond:.3g}")}
        line |= {"seconds": round(time.perf_counter() - begun, 1)}
        line |= {"processor_s": round(time.process_time() - cpu, 1)}
        yield line | {"gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)}
    if args.depth == net.arch["n_layers"] - 1:
        end = walk.end()
        W, bias = end.head
        logits = sum((share * (W @ c) for share, c in zip(end.shares, end.value.c, strict=True)), bias)
        top = int(logits.argmax())
        rivals = [token for token in range(len(W)) if token != top]
        floors = output_floors(walk, {top: 1.0}, -1.0, rivals)
        for place in np.flatnonzero(floors <= 0.0)[:1000]:
            floors[place] = output_form(walk, {top: 1.0, rivals[place]: -1.0}).bounds()[0]
        line = {"model": args.model, "alone": "next token", "token": top, "eps": eps, "of": len(rivals)}
        line |= {"less_likely": int((floors > 0.0).sum()), "least": float(f"{floors.min():.4g}")}
        line |= {"second": float(np.sort(logits)[-2]), "first": float(logits[top])}
        line |= {"seconds": round(time.perf_counter() - begun, 1)}
        yield line | {"processor_s": round(time.process_time() - cpu, 1)}


def main() -> None:
    """Prove and check, ε by ε."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--eps", type=float, nargs="+", default=[])
    asked.add_argument("--radii", type=float, help="check the largest radii, searched to this share")
    parser.add_argument("--run", type=Path, help="where the run of --radii is kept, or is already")
    parser.add_argument("--effects", nargs="+", default=[], help="parts that are taken out")
    parser.add_argument("--depth", type=int, help="walk by the checker alone down to this layer")
    parser.add_argument("--text")
    parser.add_argument("--layer", type=int)
    parser.add_argument("--positions", type=int, nargs="+")
    parser.add_argument("--query", nargs="+", default=["top1"])
    parser.add_argument("--engine", default=None)
    parser.add_argument(
        "--memory", default=None, help="for the engines, or with --depth for the checker: 8GB"
    )
    parser.add_argument(
        "--time", default=None, help="time for the engines, as `prooflens certify --time` takes it"
    )
    parser.add_argument("--peers", type=Path, default=PEERS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options: dict[str, Any] = {
        name: value for name in ("engine", "memory", "time") if (value := getattr(args, name)) is not None
    }
    if args.radii is not None:
        tell(measure_radii(args, options), args.json)
    for part, eps in itertools.product(args.effects, args.eps):
        tell(measure_effect(args, part, eps), args.json)
    with within(parse_memory(args.memory)):
        for eps in args.eps if args.depth is not None else []:
            for line in measure_depth(args, eps):
                tell(line, args.json)
    for eps in [] if args.effects or args.depth is not None else args.eps:
        with tempfile.TemporaryDirectory() as place:
            model, prompt, folder = find(args.model, args.text, args.peers, Path(place))
            begun = time.perf_counter()
            found = certify(
                model,
                prompt,
                Ball(eps),
                layer=args.layer,
                queries=args.query,
                positions=args.positions,
                **options,
            )
            proving = time.perf_counter() - begun
            run = Path(place, "run")
            found.save(run)
            begun = time.perf_counter()
            report = check(run, folder, torch_tables, torch_powers)
            checking = time.perf_counter() - begun
            size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        deep = Counter(
            finding.status
            for row, finding in zip(found.rows, report.findings, strict=True)
            if row["layer"] and row["verdict"] == "holds"
        )
        line = {
            "model": args.model,
            "layer": args.layer,
            "eps": eps,
            "query": args.query,
            "rows": len(found.rows),
        }
        line |= {"verdicts": found.counts, "checked": report.counts, "held_beyond_layer_0": dict(deep)}
        line |= {"proving_s": round(proving, 2), "checking_s": round(checking, 2), "run_bytes": size}
        notes = Counter(f.note for f in report.findings if f.status in ("not checkable", "WRONG"))
        tell(line | {"problems": report.problems, "notes": dict(notes.most_common(3))}, args.json)


if __name__ == "__main__":
    main()
