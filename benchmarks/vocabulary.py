"""Heads of layer 0 over every prompt there is, and small models over all inputs of their task: shares, seconds, memory.

python benchmarks/vocabulary.py [MODEL] [--length 6 14] [--tokens 512] [--pieces 16384] [--device cuda] [-o FILE]
python benchmarks/vocabulary.py FOLDER --task max-of-4 [-o FILE]

A row per length is what `profile` counted for the heads together; the vectors of the vocabulary are a part of it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import prooflens as pl
from measuring import Line, Meter, tell
from prooflens.errors import QueryError
from prooflens.memory import keep_freed
from prooflens.models import Transformer
from prooflens.results.vocabulary import Profiles


def row_of(found: Profiles, model: Transformer, meter: Meter, spent: float, pieces: int | None) -> Line:
    """What one call of `profile` found, as a line."""
    counts = [count for profile in found for count in profile.top]
    return {
        "model": found.model,
        "length": found.length,
        "heads": len(found),
        "query tokens": len(found[0].tokens),
        "prompts": float(counts[0].prompts),
        "pieces": pieces,
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "seconds": round(meter.seconds, 1),
        "cpu seconds": round(spent, 1),
        "GiB": round(meter.gib, 2),
        "exact counts": sum(count.exact for count in counts),
        "counts": len(counts),
        "widest": max(float(count.shares[1] - count.shares[0]) for count in counts),
        "share by key": {
            profile.head: [round(float(count.shares[0]), 6) for count in profile.top] for profile in found
        },
    }


def small_models(model: str, task: str, out: Path | None) -> None:
    """Accuracy over all inputs of a task, by enumeration and by proof."""
    held = pl.load(model)
    for proof in (False, True):
        before = time.process_time()
        try:
            found = pl.accuracy(held, task, proof)
        except QueryError as error:
            print(error)
            continue
        line: Line = {
            "task": found.task,
            "word": found.word,
            "right": found.right,
            "most": found.most,
            "inputs": found.inputs,
            "cells": found.cells,
            "smallest margin": found.nearest,
            "threads": torch.get_num_threads(),
            "seconds": round(found.seconds, 1),
            "processor seconds": round(time.process_time() - before, 1),
        }
        tell(line, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--length", type=int, nargs="+", default=[6])
    parser.add_argument("--heads", help="as in 0.3,0.8; all by default")
    parser.add_argument("--tokens", type=int, help="so many query tokens, drawn at random; all by default")
    parser.add_argument("--pieces", type=int, help="cut scores into pieces instead of sorting")
    parser.add_argument("--task", help="the accuracy of a small model on a task, in place of profiles")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    keep_freed()
    if given.task is not None:
        small_models(given.model, given.task, given.out)
        return
    model = pl.load(given.model).to(given.device)
    for length in given.length:
        before = time.process_time()
        with Meter(model.device) as meter:
            found = pl.profile(model, given.heads, length=length, tokens=given.tokens, pieces=given.pieces)
        tell(row_of(found, model, meter, time.process_time() - before, given.pieces), given.out)


if __name__ == "__main__":
    main()
