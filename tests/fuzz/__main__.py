"""`python -m tests.fuzz TARGET --seconds N`: change inputs of one kind until the time is up.

With atheris installed (`pip install atheris`) changes follow the coverage of prooflens; otherwise, or with `--plain`,
they are those of `mutate`.
"""

import argparse
import importlib.util
import random
import sys
import tempfile
import time
from pathlib import Path

NAMES = (
    *(
        "query",
        "spec",
        "family",
        "circuit",
        "effect",
        "run_json",
        "effect_json",
        "certificate",
        "weights",
        "config",
    ),
    *("onnx", "counts"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    options = parser.parse_args()
    follow = importlib.util.find_spec("atheris") is not None and not options.plain
    with tempfile.TemporaryDirectory() as folder:
        (guided if follow else plain)(options.target, options.seconds, Path(folder))


def plain(target: str, seconds: int, folder: Path) -> None:
    from tests.fuzz.mutate import mutated
    from tests.fuzz.targets import CORPUS, survive

    files = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    start, tried, choose = time.perf_counter(), 0, random.Random(0)
    while time.perf_counter() - start < seconds:
        seed = choose.randrange(2**32)
        data = mutated(choose.choice(files), seed)
        try:
            survive(target, data, folder)
        except Exception:
            sys.stderr.write(f"seed {seed}: {data[:2000]!r}\n")
            raise
        tried += 1
    sys.stdout.write(f"{target}: {tried} inputs in {seconds} s, none escaped\n")


def guided(target: str, seconds: int, folder: Path) -> None:
    """New inputs that reach further are kept in a folder that goes away; the corpus is only read."""
    import atheris
    import torch  # noqa: F401  before the instrumentation: only prooflens is watched

    with atheris.instrument_imports(include=["prooflens"]):
        from tests.fuzz.targets import CORPUS, survive
    inside, found = folder / "inside", folder / "found"
    inside.mkdir()
    found.mkdir()

    def one(data: bytes) -> None:
        survive(target, data, inside)

    options = [f"-max_total_time={seconds}", "-timeout=10", "-verbosity=0", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(found), str(CORPUS / target)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
