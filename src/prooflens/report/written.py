"""Pages and pictures as files."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from prooflens.errors import RunError
from prooflens.report.svg import Drawing

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MOST_FIGURES = 12
"""How many pictures of each kind are written as files."""


def write_page(path: Path, text: str) -> None:
    """Write a text file, its folder too; an error names the file.

    Args:
        path: the file.
        text: what it holds.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def slug(text: str) -> str:
    """A text as part of a file's name.

    Args:
        text: any text.
    """
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text)


def write_drawings(named: Iterable[tuple[str, Drawing]], folder: Path) -> list[Path]:
    """Pictures as files: SVG always, PNG where a chromium is installed.

    Args:
        named: names and pictures.
        folder: where the files go.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    written, counts = [], Counter[str]()
    for name, drawing in named:
        counts[name.partition("-")[0]] += 1
        if counts[name.partition("-")[0]] > MOST_FIGURES:
            continue
        path = folder / f"{name}.svg"
        write_page(path, drawing.svg(alone=True))
        written.append(path)
        if browser is not None and (made := _png(browser, path, drawing)):
            written.append(made)
    return written


def _png(browser: str, path: Path, drawing: Drawing) -> Path | None:
    target = path.with_suffix(".png").resolve()
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-device-scale-factor=2",
    ]
    size = f"--window-size={drawing.width:.0f},{drawing.height:.0f}"
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *options, f"--user-data-dir={profile}", size, f"--screenshot={target}"]
        subprocess.run([*command, path.resolve().as_uri()], capture_output=True, timeout=60, check=False)
    return target if target.is_file() else None
