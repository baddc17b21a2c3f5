"""Families of prompts: exact counts over an IOI template, the prefix tree against the list, a whole vocabulary.

python benchmarks/families.py [WORK …] [--device cuda] [--names 92] [-o benchmarks/measured/families.jsonl]

| work | what |
|---|---|
| ioi | two different of `--names` names × 8 places × 8 objects: heads 8.0, 8.1 and 18.6, and the answer |
| list | the first `--members` of the same, as a prefix tree and as a list of prompts, seconds of each |
| part | 5,000 members of it, all claims |
| vocabulary | all fillers of the first name, every layer |
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

import prooflens as pl
from measuring import Line, Meter, tell
from prooflens.families import Family
from prooflens.models import Transformer
from prooflens.models.tree import Runner

TEXT = "When{A} and{B} went to the{P},{B} gave a{O} to"
PROMPT = "When Mary and John went to the store, John gave a drink to"
CLAIMS = (
    "8.0:top1={B.1}@{B.2}",
    "8.1:top1={B.1}@{B.2}",
    "8.0:mass>=0.5@{B.1}@{B.2}",
    "8.1:mass>=0.5@{B.1}@{B.2}",
    "18.6:top1={A}@-1",
    "18.6:top1={0}@-1",
    "18.6:spec{A}>{B}@-1",
    "logit{A}>logit{B}",
    "argmax={A}",
)
DEEP = ("8.0:top1={3}@9", "8.1:top1={3}@9", "18.6:top1={at1}@-1", "29.0:top1={0}@-1", "logit{at1}>logit{at3}")
WORK = ("ioi", "list", "part", "vocabulary")


def ioi(model: Transformer, names: int, places: int = 8, objects: int = 8) -> Family:
    """The template with the first names, places and objects that are single tokens."""
    single = pl.Template(TEXT, A=pl.NAMES, B=pl.NAMES, P=pl.PLACES, O=pl.OBJECTS).of(model)
    words = {slot: [str(word) for word in held] for slot, held in single.words.items()}
    return pl.Template(
        TEXT,
        A=words["A"][:names],
        B=words["B"][:names],
        P=words["P"][:places],
        O=words["O"][:objects],
        differ=[("A", "B")],
    ).of(model)


def counted(
    model: Transformer, family: Family, claims: tuple[str, ...], work: str, batch: int | None
) -> Line:
    """Enumerate a family and say what was found."""
    with Meter(model.device) as meter:
        found = pl.family(model, family, claims, batch=batch, confirm=0.0, keep=100, progress=True)
    return {
        "work": work,
        "model": model.name,
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "members": family.size,
        "seconds": round(meter.seconds, 2),
        "a second": round(family.size / meter.seconds),
        "gib": round(meter.gib, 2),
        "claims": {
            row.query: {"held": row.held, "least": row.least, "nearest to zero": row.smallest}
            for row in found
        },
        "failures": {row.query: [judged.text for judged in row.failures[:5]] for row in found},
        "names": {
            row.query: _hardest(found, row.query) for row in found if "A" in family.slots and row.failed
        },
    }


def _hardest(found: pl.FamilyResults, query: str) -> dict[str, list[list[object]]]:
    """The five fillers of each name with the smallest shares."""
    hardest = {}
    for slot in ("A", "B"):
        shares = found.shares(query, slot)
        order = sorted(shares, key=lambda name: shares[name][0] / max(1, shares[name][1]))
        hardest[slot] = [[name, *shares[name]] for name in order[:5]]
    return hardest


def tree_against_list(model: Transformer, family: Family, members: int, batch: int) -> Line:
    """The same members as a prefix tree and as a list of prompts: seconds of each, and their largest difference."""
    shape = family.shapes[0]
    digits, count = [], 0
    for _, block in shape.blocks(0, batch):
        digits.append(block)
        count += len(block)
        if count >= members:
            break
    rows = [(8, 9), (18, shape.n_tokens - 1)]
    seconds, hidden = {}, {}
    for name, as_tree in (("tree", True), ("list", False)):
        runner = Runner.of(model, shape.n_tokens, rows, output=True, as_tree=as_tree)
        runner(torch.as_tensor(shape.ids_of(digits[0][:8])).to(model.device))  # the first run makes tables
        _wait(model)
        begin = time.perf_counter()
        parts = []
        for block in digits:
            reading = runner(torch.as_tensor(shape.ids_of(block)).to(model.device))
            assert reading.hidden is not None
            parts.append(reading.hidden.cpu().numpy())
        _wait(model)
        seconds[name], hidden[name] = time.perf_counter() - begin, np.concatenate(parts)
    gap = np.abs(hidden["tree"] - hidden["list"]).max() / np.abs(hidden["list"]).max()
    return {
        "work": "list",
        "model": model.name,
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "members": count,
        "batch": batch,
        "tree seconds": round(seconds["tree"], 2),
        "list seconds": round(seconds["list"], 2),
        "times": round(seconds["list"] / seconds["tree"], 2),
        "relative difference": float(gap),
    }


def _wait(model: Transformer) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", nargs="*", choices=[*WORK, []], default=list(WORK))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--names", type=int, default=92)
    parser.add_argument("--members", type=int, default=32768, help="members of the comparison with the list")
    parser.add_argument("--batch", type=int, help="members of one batch (default: as many as fit)")
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    model = pl.load(given.model).to(given.device)
    for work in given.work or WORK:
        if work == "ioi":
            tell(counted(model, ioi(model, given.names), CLAIMS, work, given.batch), given.out)
        elif work == "list":
            family = ioi(model, given.names)
            tell(tree_against_list(model, family, given.members, given.batch or 4096), given.out)
        elif work == "part":
            family = ioi(model, 9, 8, 9)  # 9 · 8 · 8 · 9 = 5,184 members
            tell(counted(model, family, CLAIMS, work, given.batch), given.out)
        else:
            family = pl.Swaps(PROMPT, {1: pl.ALL}).of(model)
            john = f"logit{family.shapes[0].ids[3]}"
            claims = tuple(text.replace("logit{at3}", john) for text in DEEP)
            tell(counted(model, family, claims, work, given.batch), given.out)


if __name__ == "__main__":
    main()
