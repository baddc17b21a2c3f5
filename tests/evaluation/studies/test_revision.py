"""Which commit a result names."""

import shutil
import subprocess
from pathlib import Path

import pytest

from prooflens.evaluation.studies.revision import revision

WHO = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *WHO, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit_is_named_with_what_was_changed_since(tmp_path: Path) -> None:
    package, beside = tmp_path / "src" / "package", tmp_path / "notes.md"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    assert revision(package) == "", "it lies in a repository that does not hold it"
    git(tmp_path, "add", "src")
    git(tmp_path, "commit", "-qm", "One")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    beside.write_text("not the package")
    assert revision(package) == commit
    (package / "__init__.py").write_text("changed = True")
    assert revision(package) == f"{commit}+"
    git(tmp_path, "commit", "-qam", "Two")
    assert revision(package) not in ("", commit)
    (package / "new.py").write_text("")
    assert revision(package).endswith("+")


def test_no_repository_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert revision(tmp_path) == ""
    monkeypatch.setenv("PATH", "")
    assert revision() == "", "and no git neither"
