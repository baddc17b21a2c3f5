"""`python -m tests.fuzz TARGET --seconds N`: change inputs of one kind until the time is up.

With atheris installed (`pip install atheris`) changes are guided by coverage; otherwise they are those of `mutate`.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import CORPUS, TARGETS, survive


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (guided if not options.plain and _has_atheris() else plain)(
            options.target, options.seconds, Path(folder)
        )


def plain(target: str, seconds: int, folder: Path) -> None:
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
    import atheris

    atheris.instrument_all()

    def one(data: bytes) -> None:
        survive(target, data, folder)

    arguments = [sys.argv[0], f"-max_total_time={seconds}", "-timeout=10", str(CORPUS / target)]
    atheris.Setup([*arguments[:1], "-atheris_runs=0", *arguments[1:]] if seconds <= 0 else arguments, one)
    atheris.Fuzz()


def _has_atheris() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    main()
