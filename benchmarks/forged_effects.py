"""Forged runs about effects of edits against the checker: how many are caught, and is what it accepts true?

    PYTHONPATH=. python benchmarks/forged_effects.py --count 400 --json FILE          (from the root of the checkout)
    PYTHONPATH=. python benchmarks/forged_effects.py --edits tables --count 80          (parts at tokens, hidden keys)

As `forgeries.py`, for runs of `prooflens effect`: a range, a claim that a part is necessary, a claim that what
is left is faithful. A range that is accepted is *true* if the engines prove one inside it, and *false* if an attack
leaves it.
"""

import json
import random
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.checker.forging import edit, head

import prooflens as pl
from forgeries import (
    Forge,
    Honest,
    Row,
    Tensors,
    arguments,
    count,
    flipped,
    invent,
    larger,
    smaller,
    swapped,
    witnessed,
)

MODELS = ("toy", "toy-4layer")
PARTS = ("a0.h0", "a0.h1", "a1.h0", "m0", "m1", "m1.n3")
TABLES = ("a1.h0@1", "m0@-1", "a0.h1.k1", "a1.h0.q2.k1")
"""Edits that are tables of a model: parts held at tokens, and hidden keys."""
EPSILONS = (0.005, 0.02, 0.05)
METRIC = "logit0-logit1"


@dataclass(frozen=True, eq=False)
class HonestEffect(Honest):
    """An honest run about the effect of taking a part out."""

    part: str

    def verdict(self, row: Row, eps: float, weights: Path | None = None) -> str:
        """What the engines find when they are asked about a row at a radius."""
        model, query = pl.load(self.name), row["query"]
        part = query.rpartition("without ")[2]
        claims = {
            name: float(stated[1])
            for name, pattern in (("faithful", r"\|<=(\S+)"), ("necessary", r"\)>=(\S+)"))
            if (stated := re.search(pattern, query))
        }
        options: dict[str, Any] = {**claims, "budget": "500/4/40"}
        found = pl.effect(model, part, model.example(self.sample), pl.Ball(eps), METRIC, **options)
        if claims:
            return str(found.claims[0].verdict.value)
        if row["lower"] <= found.lower and found.upper <= row["upper"]:
            return "holds"
        reached = found.least.effect >= row["lower"] and found.most.effect <= row["upper"]
        return "unknown" if reached else "fails"


def make(name: str, sample: int, eps: float, part: str, folder: Path) -> HonestEffect:
    """An honest run: its claims are a little weaker than its range, or a little stronger."""
    run, choose = folder / f"{name}-{sample}-{eps}-{part}", random.Random(f"{name} {sample} {eps} {part}")
    model = pl.load(name)
    asked: Any = (model, part, model.example(sample), pl.Ball(eps), METRIC)
    low, high = pl.effect(*asked, budget="20/1/2").ends
    room = (high - low) * choose.choice((-0.2, 0.05, 0.5))
    pl.effect(*asked, necessary=low - room, faithful=max(0.0, high + room, room - low), budget="50/1/5").save(
        run
    )
    weights = Path(pl.__file__).parent / "models" / "embedded" / name
    return HonestEffect(name, sample, eps, run, weights, part)


def narrowed(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """A range that is narrower than the proof says, with the clean effect inside."""

    def change(rows: list[Row], tensors: Tensors) -> int:
        clean, share = json.loads(rows[0]["claim"])["clean"][0], choose.choice((1e-6, 0.01, 0.3, 0.9))
        for side in choose.choice((("lower",), ("upper",), ("lower", "upper"))):
            bound = tensors[f"row/0/{side}"]
            tensors[f"row/0/{side}"] = bound + share * (clean - bound)
            rows[0][side] = float(tensors[f"row/0/{side}"][0])
        return 0

    return edit(run, change), honest.eps


def tightened(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """A claim with a stronger threshold, in its words and in its functionals, that is said to hold."""

    def change(rows: list[Row], tensors: Tensors) -> int:
        row = choose.choice(rows[1:])
        claim, share = json.loads(row["claim"]), choose.choice((0.01, 0.2, 0.5, 0.99))
        # Every clean value stays positive, so that nothing but a proof tells.
        cut = share * max(0.0, min(claim["clean"]))
        words = r"(\|<=|\)>=)(\S+)"
        stated = float(re.search(words, row["query"])[2])  # type: ignore[index]
        delta = stated - cut if "|<=" in row["query"] else stated + cut
        row["query"] = re.sub(words, lambda match: f"{match[1]}{delta!r}", row["query"])
        for functional in claim["functionals"]:
            functional["constant"] = delta if "|<=" in row["query"] else 0.0 - delta
        claim["clean"] = [value - cut for value in claim["clean"]]
        for side in ("lower", "upper"):
            tensors[f"row/{row['row']}/{side}"] = tensors[f"row/{row['row']}/{side}"] - cut
        row |= {"claim": json.dumps(claim), "clean": min(claim["clean"])}
        row["upper"] = float(tensors[f"row/{row['row']}/upper"].min())
        invent(row, tensors, 1e-6)
        return int(row["row"])

    return edit(run, change), honest.eps


def other_part(honest: Honest, run: Path, weights: Path, choose: random.Random) -> tuple[int, float]:
    """The bounds of one part under the name, the columns and the fingerprint of another."""
    part = choose.choice([part for part in PARTS if part != getattr(honest, "part", None)])
    model = pl.load(honest.name)
    made = pl.edit(model, part)
    clean = pl.effect(
        model, part, model.example(honest.sample), pl.Ball(1e-9), METRIC, engine="interval"
    ).clean
    info, moved = json.loads((run / "run.json").read_text()), np.subtract(*clean)
    words = f"without {part}"

    def change(rows: list[Row], tensors: Tensors) -> int:
        for row in rows:
            claim = json.loads(row["claim"])
            before = claim["clean"][0] - claim["functionals"][0]["constant"]
            signs = [1.0, -1.0][: len(claim["clean"])]
            claim["clean"] = [
                value + sign * (moved - before) for value, sign in zip(claim["clean"], signs, strict=True)
            ]
            for side in ("lower", "upper"):
                name = f"row/{row['row']}/{side}"
                tensors[name] = tensors[name] + np.array(signs) * (moved - before)
                row[side] = float(tensors[name].min())
            row |= {"claim": json.dumps(claim), "clean": min(claim["clean"]), "attack": None}
            row["query"] = row["query"].replace(info["edited"]["edit"], words)
            if row["row"]:
                invent(row, tensors, 1e-6)
        return int(choose.choice(rows)["row"])

    row = edit(run, change)
    weight = "o" if part.startswith("a") else "down"
    layer, width = part[1], made.architecture.d_model // made.architecture.n_heads
    index = int(part[4:]) if "." in part else None
    step = width if weight == "o" else 1
    name = f"blocks.{layer}.{weight}.weight"
    whole = [0, model.weights[name].shape[1]]
    columns = whole if index is None else [index * step, (index + 1) * step]
    gone = [f"blocks.{layer}.{weight}.bias"] if index is None else []
    stated = {"edit": words, "name": f"{honest.name} {words}", "sha256": made.sha256, "replaced": []}
    head(run, edited=stated)
    info = json.loads((run / "run.json").read_text())
    info["edited"] |= {"zeroed": {name: [columns]}, "removed": gone}
    (run / "run.json").write_text(json.dumps(info))
    return row, honest.eps


FORGERIES: tuple[Forge, ...] = (flipped, larger, smaller, swapped, witnessed, narrowed, tightened, other_part)


def main() -> None:
    """Forge, and count."""
    args = arguments(__doc__, ("parts", "tables"))
    parts, models = (PARTS, MODELS) if args.edits == "parts" else (TABLES, MODELS[:1])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        honest = [make(name, 0, eps, part, folder) for name in models for eps in EPSILONS for part in parts]
        count(args, honest, FORGERIES, folder)


if __name__ == "__main__":
    main()
