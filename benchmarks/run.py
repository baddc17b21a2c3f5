"""Tightness, time and memory of every engine, as one JSON file and one page.

python benchmarks/run.py [-o build/bench] [--device cuda] [--models toy minilm smollm2] [--check BASELINE]

Every question is one call of `prooflens.evaluation.compare`: all engines on the same claims, then an attack on what
they said.

- **proved / left**: claims proved over claims that the attack leaves standing; 1 is the best there can be;
- **width**: mean width of the bounds over the width attained by the attack; 1 is the best there can be;
- **× crown**, **× Jacobian**: seconds over those of `crown`, and of one full Jacobian of the layer's scores by reverse
  mode; **× paper**: over the paper's own seconds (Tab. `timing`, one core, its 2-layer encoder), where it has any;
- **GEMM share**: multiplications in matrix products per second, over what a large float64 product reaches here.

With `--check` the run fails if an engine is more than 10 % looser than the baseline says, takes half as much memory
again, or if sharing saves less than it did (`benchmarks/ratios.py`). Seconds themselves are not checked.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ratios
from prooflens import Ball, load
from prooflens.engines import get_engine
from prooflens.engines.functionals import bound_claims
from prooflens.engines.protocol import Stopwatch
from prooflens.errors import ProoflensError
from prooflens.evaluation.compare import compare
from prooflens.models import scores_name
from prooflens.verdicts.question import Question, ask
from prooflens.verdicts.settings import Settings, checked_device, parse_budget
from texts import IOI, MOVIE

ALLOWED = 0.10
"""How much looser an engine may be than the baseline, relatively."""

HEAVIER = 1.5
"""By which factor an engine's memory may exceed the baseline's."""

LEAST_MB = 50.0
"""Smaller amounts of memory are not compared: they are the allocator's."""

SLOWER = 1.25
"""By which factor a ratio of seconds may exceed the baseline's."""

MOST_PROFILED = 60.0
"""Engines that take more seconds are not run a second time to be taken apart."""

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")

GEMM_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 8192)}
"""On a shared machine a short product is the one that is not interrupted."""

PAPER = {
    ("toy", 0): {"cpz": 0.5, "pz": 0.5, "crown": 0.5, "interval": 0.3, "attack": 2.0},
    ("toy", 1): {"cpz": 195.0, "pz": 195.0, "crown": 6.0, "interval": 2.0, "attack": 9.0},
}
"""Seconds per sample of Tab. `timing` at ε = 0.02."""

SMALL = ("interval", "crown", "alpha-crown", "zonotope", "cpz", "jacobian-proved", "taylor", "layer0")


@dataclass(frozen=True)
class Asked:
    """One question."""

    model: str
    layer: int
    eps: float
    engines: tuple[str, ...]
    text: str | None = None
    positions: tuple[int, ...] | None = None
    budget: str | None = None

    def question(self, device: str) -> Question:
        model = load(self.model)
        prompt = model.example(0) if self.text is None else model.prompt(self.text)
        queries = ["top1", "mass>=0.2"]
        positions = None if self.positions is None else list(self.positions)
        return ask(
            model,
            prompt,
            Ball(self.eps),
            layer=self.layer,
            queries=queries,
            positions=positions,
            device=device,
        )


QUESTIONS = (
    Asked("toy", 0, 0.02, SMALL),
    Asked("toy", 1, 0.02, SMALL),
    Asked("minilm", 0, 0.01, ("interval", "layer0", "crown", "taylor"), MOVIE, (0,), "64/2/16"),
    Asked("minilm", 1, 0.0003, ("interval", "taylor"), MOVIE, (0,), "32/1/8"),
    Asked("smollm2", 0, 0.001, ("interval", "layer0"), IOI[0], (-1,), "32/1/8"),
)


def gemm_rate(device: torch.device) -> float:
    """Multiplications per second of a float64 product: the best of twenty at the best of some sizes."""
    best = 0.0
    for n in GEMM_SIZES.get(device.type, (256,)):
        A = torch.randn(n, n, dtype=torch.float64, device=device)
        for _ in range(20):
            watch = Stopwatch(device)
            A @ A
            best = max(best, n**3 / watch.seconds())
    return best


def jacobian_seconds(question: Question, layer: int) -> float:
    """One full Jacobian of the layer's scores with respect to the input, rows in batches of 64."""
    problem = question.problem
    x = problem.region.center.clone().requires_grad_()
    watch = Stopwatch(problem.model.device)
    scores = problem.model.run(x, [scores_name(layer)], problem.padding)[scores_name(layer)].flatten()
    for rows in torch.arange(len(scores), device=x.device).split(64):
        seeds = torch.nn.functional.one_hot(rows, len(scores)).to(scores)
        torch.autograd.grad(scores, x, seeds, retain_graph=True, is_grads_batched=True)
    return watch.seconds()


class Tally(TorchDispatchMode):
    """Seconds per operation of torch, and multiplications in matrix products."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.gemm = device, 0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch = Stopwatch(self.device)
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.seconds[name] += watch.seconds()
        if name in PRODUCTS:
            self.gemm += result.numel() * args[-1].shape[-2]
        return result


def costs(question: Question, engine: str) -> dict[str, Any]:
    """Multiplications in matrix products, and the three operations that take the most time, with their shares."""
    problem, claims = question.problem, [c for c in question.claims if c.functionals and c.tie is None]
    watch = Stopwatch(problem.model.device)
    with Tally(problem.model.device) as tally:
        bound_claims(get_engine(engine), problem, claims)
    whole = watch.seconds()
    longest = sorted(tally.seconds.items(), key=lambda item: item[1], reverse=True)[:3]
    return {"gemm": tally.gemm, "top": [[name, seconds / whole] for name, seconds in longest]}


def measure(asked: Asked, device: str, peak: float) -> list[dict[str, Any]]:
    """A row per engine."""
    question = asked.question(device)
    found = compare(question, asked.engines, Settings(budget=parse_budget(asked.budget))).rows
    jacobian = jacobian_seconds(question, asked.layer)
    crown = next((row["ms"] for row in found if row["engine"] == "crown" and row["ms"]), None)
    left = next(row for row in found if row["engine"] == "attack")
    shares = [name for name in left if name.startswith("holds: ")]
    rows = []
    for row in found:
        seconds = None if row["ms"] is None else row["ms"] / 1e3
        paper = PAPER.get((asked.model, asked.layer), {}).get(row["engine"])
        made: dict[str, Any] = {
            "model": asked.model,
            "layer": asked.layer,
            "eps": asked.eps,
            "engine": row["engine"],
            "guarantee": row["guarantee"],
            "width": row["width"],
            "seconds": seconds,
            "mb": row["mb"],
            "crossed": row["crossed"],
            "reason": row["reason"],
        }
        if seconds is not None and row["engine"] != "attack":
            proved, standing = (sum(r[name] or 0.0 for name in shares) for r in (row, left))
            made["proved_over_left"] = proved / standing if standing else None
            if seconds < MOST_PROFILED:
                made |= costs(question, row["engine"])
                made["gemm_share"] = made["gemm"] / seconds / peak
        if seconds is not None:
            made["times_crown"] = None if crown is None else 1e3 * seconds / crown
            made["times_jacobian"] = seconds / jacobian
            made["times_paper"] = None if paper is None else seconds / paper
        rows.append(made)
    return rows


def loosened(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """Engines that are looser than the baseline by more than is allowed, or that answer no longer."""
    key = ("model", "layer", "eps", "engine")
    known = {tuple(row[name] for name in key): row for row in baseline}
    said = []
    for row in rows:
        place = tuple(row[name] for name in key)
        before = known.get(place)
        if before is None or row["engine"] == "attack":
            continue
        name = f"{row['engine']} on {row['model']}, layer {row['layer']}, ε = {row['eps']:g}"
        if before["width"] is not None and (
            row["width"] is None or row["width"] > (1.0 + ALLOWED) * before["width"]
        ):
            said.append(f"{name}: width {row['width']}, was {before['width']}")
        rate, was = row.get("proved_over_left"), before.get("proved_over_left")
        if was is not None and (rate is None or rate < (1.0 - ALLOWED) * was):
            said.append(f"{name}: proved / left {rate}, was {was}")
    return said


def heavier(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """Engines that take more memory than the baseline says by more than is allowed."""
    key = ("model", "layer", "eps", "engine")
    known = {tuple(row[name] for name in key): row.get("mb") for row in baseline}
    said = []
    for row in rows:
        before, now = known.get(tuple(row[name] for name in key)), row.get("mb")
        if before is None or now is None or row["engine"] == "attack":
            continue
        if now > HEAVIER * max(before, LEAST_MB):
            name = f"{row['engine']} on {row['model']}, layer {row['layer']}, ε = {row['eps']:g}"
            said.append(f"{name}: {now:.0f} MB, was {before:.0f}")
    return said


def dearer(ratios: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """Ratios of seconds that exceed the baseline's by more than is allowed: what was won is lost."""
    known = {(row["ratio"], row["model"]): row["value"] for row in baseline}
    return [
        f"{row['ratio']} on {row['model']}: ratio {row['value']:.2f}, was {before:.2f}"
        for row in ratios
        if (before := known.get((row["ratio"], row["model"]))) is not None and row["value"] > SLOWER * before
    ]


HEAD = (
    "model", "layer", "ε", "engine", "proved / left", "width", "s", "MB", "× crown", "× Jacobian", "× paper",
    "GEMM share", "top costs",
)  # fmt: skip


def page(document: dict[str, Any]) -> str:
    """The rows as Markdown."""
    facts = document["machine"]
    lines = [
        "# Benchmark",
        "",
        f"    {document['command']}",
        "",
        f"{facts['date']}, {facts['device']}, {facts['threads']} thread(s), torch {facts['torch']}. A float64 product "
        f"reaches {document['gemm_rate'] / 1e9:.1f} · 10⁹ multiplications per second. What the columns mean stands at "
        "the top of `benchmarks/run.py`; *top costs* are operations of torch and their share of the engine's time.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
    ]
    for row in document["rows"]:
        top = ", ".join(f"`{name}` {100 * share:.0f} %" for name, share in row.get("top", ()))
        share = row.get("gemm_share")
        cells = [
            row["model"],
            row["layer"],
            f"{row['eps']:g}",
            f"`{row['engine']}`",
            *(
                _cell(row.get(name))
                for name in (
                    "proved_over_left",
                    "width",
                    "seconds",
                    "mb",
                    "times_crown",
                    "times_jacobian",
                    "times_paper",
                )
            ),
            "–" if share is None else f"{100 * share:.1f} %",
            top or row["reason"] or "–",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for row in document.get("ratios", ()):
        lines += [
            "",
            f"{row['ratio']} ({row['model']}): {row['value']:.2f} of the processor seconds without sharing.",
        ]
    return "\n".join(lines) + "\n"


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--check", type=Path, help="a baseline to compare with")
    options = parser.parse_args()
    device = torch.device(checked_device(options.device))
    peak = gemm_rate(device)
    rows: list[dict[str, Any]] = []
    for asked in QUESTIONS:
        if options.models and asked.model not in options.models:
            continue
        start = time.perf_counter()
        try:
            rows += measure(asked, options.device, peak)
        except ProoflensError as error:
            print(f"{asked.model} is left out: {error}", file=sys.stderr)
            continue
        print(f"{asked.model}, layer {asked.layer}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    shares = ratios.measured(options.models)
    name = platform.processor() or platform.machine()
    document = {
        "command": " ".join(["python", "benchmarks/run.py", *sys.argv[1:]]),
        "machine": {
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "gemm_rate": peak,
        "questions": [asdict(asked) for asked in QUESTIONS],
        "rows": rows,
        "ratios": shares,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (options.out / "bench.md").write_text(page(document), encoding="utf-8")
    print(f"written to {options.out / 'bench.json'} and {options.out / 'bench.md'}")
    if any(row["crossed"] for row in rows if row["guarantee"] == "proved"):
        sys.exit("a proved bound was crossed: this is a defect of the highest class")
    if options.check is not None:
        baseline = json.loads(options.check.read_text(encoding="utf-8"))
        said = loosened(rows, baseline["rows"]) + heavier(rows, baseline["rows"])
        said += dearer(shares, baseline["ratios"])
        if said:
            sys.exit("worse than the baseline:\n" + "\n".join(said))
        print(
            f"no engine is more than {100 * ALLOWED:.0f} % looser than {options.check}, nor heavier or dearer"
        )


if __name__ == "__main__":
    main()
