"""Run studies where the command line's libraries are missing: the same results, written to the same files.

PYTHONPATH=src python benchmarks/study.py NAME... -o FOLDER [--model carry/mpnet] [--layer 2] [--engine taylor]
    [--samples 20] [--device cuda] [--jobs 8] [--seed 0] [--quick]

It needs torch, einops, jaxtyping, pyarrow, safetensors and scipy. FOLDER/data/NAME.json is what `prooflens reproduce
NAME -o FOLDER` writes; `prooflens reproduce --pages FOLDER` makes pages of it.

A probe that fails keeps its answers in FOLDER/answers, and the same command goes on from there. With several jobs each
has its share of the device's memory.
"""

import argparse
import sys
import time
from pathlib import Path

from prooflens.evaluation.studies import StudySettings, get_study
from prooflens.evaluation.studies.render import markdown, save


class Told:
    """Progress on stderr, every few seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self.start = self.last = time.perf_counter()
        self.every = every

    def __call__(self, stage: str, share: float) -> None:
        now = time.perf_counter()
        if now - self.last >= self.every:
            self.last = now
            print(f"{now - self.start:6.0f} s  {100 * share:3.0f} %  {stage}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    for name in ("model", "engine", "device"):
        parser.add_argument(f"--{name}")
    for name in ("layer", "samples"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of studies that can use several")
    given = vars(parser.parse_args())
    names, out = given.pop("names"), given.pop("out")
    settings = StudySettings(**given, tell=Told(), kept=out)
    for one in map(get_study, names):
        result = one(settings)
        save(result, out)
        print(markdown(result), flush=True)


if __name__ == "__main__":
    main()
