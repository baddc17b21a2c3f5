"""What other work on the machine costs a command: seconds on idle cores and beside programs that never rest.

    python benchmarks/busy.py certify minilm --text "the cat" --heads 0,3 --eps 1e-4
    python benchmarks/busy.py --beside 2 --tries 3 certify toy --eps 0.02

The command runs as a user runs it, in a process of its own, with threads that wait as GNU OpenMP lets them by default
(`GOMP_SPINCOUNT=300000`), and as the command line does (`prooflens.cli.SPINS`). One row of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

from prooflens.cli import SPINS

DEFAULT = "300000"
"""What GNU OpenMP does where nobody says otherwise."""


def seconds(command: list[str], spins: str) -> tuple[float, float]:
    """Seconds of wall and of processor that a command takes.

    Args:
        command: the words behind `prooflens`.
        spins: how often waiting threads look for work.
    """
    before, start = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "prooflens.cli", *command],
        env=os.environ | {"GOMP_SPINCOUNT": spins},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, used


def main() -> None:
    """Run the command with and without other work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=int, default=os.cpu_count(), help="programs that never rest")
    parser.add_argument("--tries", type=int, default=3, help="the median of so many runs is told")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    for beside in (0, args.beside):
        with ExitStack() as stack:
            for _ in range(beside):
                other = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                stack.callback(other.kill)
            for spins in (DEFAULT, SPINS):
                found = [seconds(args.command, spins) for _ in range(args.tries)]
                wall, used = (round(statistics.median(each), 1) for each in zip(*found, strict=True))
                line = {"beside": beside, "spins": int(spins), "wall_s": wall, "processor_s": used}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
