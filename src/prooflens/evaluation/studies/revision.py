"""Which code made a result: the commit that it ran from, where the package lies in a repository of its own."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def revision(package: Path = PACKAGE) -> str:
    """The short commit, with a `+` where files of the package differ from it; empty where the package is in no commit.

    A package that only lies inside somebody's repository, such as in an environment there, is not part of it.
    """
    if not _git(package, "ls-files", "--", "__init__.py"):
        return ""
    commit = _git(package, "rev-parse", "--short", "HEAD")
    return f"{commit}+" if commit and _git(package, "status", "--porcelain", "--", ".") else commit


@cache
def sources(package: Path = PACKAGE) -> str:
    """A fingerprint of all modules of the package, in a commit or not."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _git(folder: Path, *arguments: str) -> str:
    """What git says of a folder; nothing where there is no git, or it refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
