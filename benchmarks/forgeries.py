"""Forged runs against the checker: how many are caught, and is what it accepts true?

    python -m benchmarks.forgeries --count 1000 --json FILE          (from the root of the checkout)

An honest run about an embedded model is copied, one thing in it is changed with care (all hashes are fresh, and tables,
tensors and header agree with each other), and the changed row is checked. A forgery is *caught* if the row, or the run,
is WRONG, or if the row is not accepted. What is accepted has a proof or a witness of the checker's own; it is compared
with what the engines find when they are asked the forged question honestly, attack included. *False* counts rows that
are accepted although an attack breaks them, or a witness that the model does not confirm: there must be none.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tests.checker.forging import edit, head, rows_of

import prooflens as pl
from prooflens.checker import check
from prooflens.checker.network import Network

MODELS = ("toy", "toy-induction")
EPSILONS = (0.02, 0.05, 0.1)
ACCEPTED = ("re-proved", "witness confirmed")
QUERIES = ("top1", "mass>=0.3")

Row = dict[str, Any]
Tensors = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Honest:
    """An honest run, its model and its folder of weights."""

    name: str
    sample: int
    eps: float
    run: Path
    weights: Path

    def verdict(self, row: Row, eps: float, weights: Path | None = None) -> str:
        """What the engines find when they are asked about a row at a radius, of this model or of other weights."""
        x = pl.load(self.name).example(self.sample)
        model, prompt = (self.name, x) if weights is None else (str(weights), x.x)
        found = pl.certify(
            model,
            prompt,
            pl.Ball(eps),
            (row["layer"], row["head"]),
            queries=[row["query"]],
            positions=[row["position"]],
        )
        return str(found.rows[0]["verdict"])


def make(name: str, sample: int, eps: float, folder: Path) -> Honest:
    """An honest run."""
    run = folder / f"{name}-{sample}-{eps}"
    model = pl.load(name)
    pl.certify(model, model.example(sample), pl.Ball(eps), queries=list(QUERIES)).save(run)
    weights = Path(pl.__file__).parent / "models" / "embedded" / name
    return Honest(name, sample, eps, run, weights)


def invent(row: Row, tensors: Tensors, value: float) -> None:
    """Make a row say that it holds, with lower bounds just above 0 and no witness."""
    i = row["row"]
    tensors[f"row/{i}/lower"] = np.minimum(
        np.full_like(tensors[f"row/{i}/lower"], value), tensors[f"row/{i}/upper"]
    )
    clean = np.array(json.loads(row["claim"])["clean"])
    tensors[f"row/{i}/lower"] = np.minimum(tensors[f"row/{i}/lower"], clean)
    low = float(tensors[f"row/{i}/lower"].min())
    row |= {"verdict": "holds", "guarantee": "proved", "lower": low, "attack": None, "engine": "taylor"}
    for key in [key for key in tensors if key.startswith((f"row/{i}/witness", f"row/{i}/ledger"))]:
        del tensors[key]


Forge = Callable[[Honest, Path, Path, random.Random], tuple[int, float]]
"""Changes a copy of a run and of its weights; says which row it is about, and at which radius."""


def _some(rows: list[Row], choose: random.Random, *verdicts: str) -> Row:
    return choose.choice([row for row in rows if row["verdict"] in verdicts] or rows)


def flipped(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """A row that fails, or is open, holds."""

    def change(rows: list[Row], tensors: Tensors) -> int:
        row = _some(rows, choose, "fails", "unknown")
        invent(row, tensors, 10.0 ** choose.uniform(-9, -3))
        return int(row["row"])

    return edit(run, change), honest.eps


def larger(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """The same verdicts on a larger ball, everywhere."""
    eps = honest.eps * choose.choice((1.02, 1.5, 3.0, 10.0))

    def change(rows: list[Row], tensors: Tensors) -> int:
        tensors["region/0/radius"] = np.where(tensors["region/0/radius"] > 0, eps, 0.0)
        for row in rows:
            row |= {"eps": eps, "region": f"ball ε={eps:g}", "attack": None}
            if row["verdict"] == "fails":
                invent(row, tensors, 1e-6)
        return int(_some(rows, choose, "holds")["row"])

    row = edit(run, change)
    head(run, region={"label": f"ball ε={eps:g}", "eps": eps})
    return row, eps


def smaller(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """A smaller set under the same name."""

    def change(rows: list[Row], tensors: Tensors) -> int:
        radius = tensors["region/0/radius"]
        flat = radius.reshape(-1)
        flat[choose.randrange(flat.size)] *= choose.choice((0.0, 0.5, 0.999))
        return int(_some(rows, choose, "holds")["row"])

    return edit(run, change), honest.eps


def swapped(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """A row with the claim and the bounds of another one."""

    def change(rows: list[Row], tensors: Tensors) -> int:
        row, other = _some(rows, choose, "fails", "unknown"), _some(rows, choose, "holds")
        held = ("claim", "lower", "upper", "clean", "verdict", "guarantee", "engine", "attack", "top")
        row |= {name: other[name] for name in held}
        for side in ("lower", "upper"):
            tensors[f"row/{row['row']}/{side}"] = tensors[f"row/{other['row']}/{side}"].copy()
        return int(row["row"])

    return edit(run, change), honest.eps


def raised(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """A proved margin that is larger than the proof says, but below the clean one."""

    def change(rows: list[Row], tensors: Tensors) -> int:
        row = _some(rows, choose, "holds")
        low, clean = tensors[f"row/{row['row']}/lower"], np.array(json.loads(row["claim"])["clean"])
        low += choose.uniform(0.05, 0.95) * (clean - low)
        row["lower"] = float(low.min())
        return int(row["row"])

    return edit(run, change), honest.eps


def weaker(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """A row without the functional that fails."""

    def change(rows: list[Row], tensors: Tensors) -> int:
        row = _some([r for r in rows if r["query"] != "mass>=0.3"], choose, "fails", "unknown")
        claim, i = json.loads(row["claim"]), row["row"]
        worst = int(np.argmin(tensors[f"row/{i}/lower"]))
        if len(claim["functionals"]) > 1:
            del claim["functionals"][worst], claim["clean"][worst]
            for side in ("lower", "upper"):
                tensors[f"row/{i}/{side}"] = np.delete(tensors[f"row/{i}/{side}"], worst)
        row |= {"claim": json.dumps(claim), "clean": min(claim["clean"])}
        row["upper"] = float(tensors[f"row/{i}/upper"].min())
        invent(row, tensors, 1e-6)
        return int(i)

    return edit(run, change), honest.eps


def witnessed(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """A row that holds fails, with a witness from elsewhere or one outside the ball."""

    def change(rows: list[Row], tensors: Tensors) -> int:
        row, i = (found := _some(rows, choose, "holds")), found["row"]
        center, radius = tensors["region/0/center"], tensors["region/0/radius"]
        far = choose.choice((1.0, 1.0, 1.3, 4.0))
        alpha = far * np.random.default_rng(choose.randrange(2**32)).choice(
            [-1.0, 1.0], int((radius > 0).sum())
        )
        move = np.zeros_like(center)
        move[radius > 0] = alpha * radius[radius > 0]
        tensors |= {f"row/{i}/witness_alpha": alpha, f"row/{i}/witness": center + move}
        row |= {"verdict": "fails", "guarantee": "witness"}
        return int(i)

    return edit(run, change), honest.eps


def reweighted(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """Other weights, and a run that states their fingerprint."""
    path = next(weights.glob("model*.safetensors"))
    state = load_file(path)
    name = choose.choice(
        [key for key in state if key.endswith("weight") and state[key].ndim == 2 and "blocks" in key]
    )
    noise = np.random.default_rng(choose.randrange(2**32)).standard_normal(state[name].shape)
    state[name] = state[name] + choose.choice((1e-6, 0.03, 0.3)) * noise * np.abs(state[name]).mean()
    save_file(state, path)
    digest = Network.read(weights).sha256

    def change(rows: list[Row], tensors: Tensors) -> int:
        for row in rows:
            row["model_sha256"] = digest
        return int(_some(rows, choose, "holds")["row"])

    row = edit(run, change)
    head(run, model={"sha256": digest})
    return row, honest.eps


FORGERIES: tuple[Forge, ...] = (flipped, larger, smaller, swapped, raised, weaker, witnessed, reweighted)


def judge(honest: Honest, forge: Forge, choose: random.Random, folder: Path) -> tuple[str, str]:
    """Forge one run: `caught`, `true` (accepted, and so it is), `open` (accepted, engines do not tell) or `false`."""
    run, weights = folder / "run", folder / "weights"
    for path, source in ((run, honest.run), (weights, honest.weights)):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path)
    number, eps = forge(honest, run, weights, choose)
    report = check(run, weights, only={number})
    if report.problems or report.findings[0].status not in ACCEPTED:
        return "caught", (report.problems or [report.findings[0].status])[0]
    row = rows_of(run)[number]
    truth = honest.verdict(row, eps, weights if forge is reweighted else None)
    if truth == "unknown":
        return "open", report.findings[0].note
    return ("true" if truth == row["verdict"] else "false"), report.findings[0].note


def arguments(text: str | None, kinds: Sequence[str] = ()) -> argparse.Namespace:
    """What the command line asks for; `text` says what is forged, and `kinds` what can be chosen among."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if kinds:
        parser.add_argument("--edits", choices=kinds, default=kinds[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def count(
    args: argparse.Namespace, honest: Sequence[Honest], forgeries: Sequence[Forge], folder: Path
) -> None:
    """Forge some of the honest runs again and again, in a folder, and tell how that ended."""
    counts, begun = dict[str, Counter[str]](), time.perf_counter()
    false = []
    for number in range(args.count):
        choose = random.Random(f"{args.seed} {number}")
        forge, chosen = forgeries[number % len(forgeries)], choose.choice(honest)
        word, note = judge(chosen, forge, choose, folder)
        counts.setdefault(forge.__name__, Counter())[word] += 1
        if word == "false":
            false.append((forge.__name__, number, chosen.name, chosen.eps, note))
    line = {"forgeries": args.count, "seed": args.seed, "seconds": round(time.perf_counter() - begun, 1)}
    total = sum(counts.values(), Counter[str]())
    line |= {"total": dict(total), **{name: dict(found) for name, found in counts.items()}, "false": false}
    text = json.dumps(line, ensure_ascii=False)
    print(text, flush=True)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Forge, and count."""
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        honest = [make(name, sample, eps, folder) for name in MODELS for sample in (0, 1) for eps in EPSILONS]
        count(args, honest, FORGERIES, folder)


if __name__ == "__main__":
    main()
