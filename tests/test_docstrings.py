"""Docstrings of public functions name every argument, in the packages that a user meets first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "prooflens"
PACKAGES = ("enumeration", "families", "queries", "regions", "report", "results", "verdicts")
MODULES = ("attribution", "dictionaries", "edits", "held_edits", "load", "parts", "prompt", "transformer")


def public_functions(
    node: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef]]:
    for one in node.body:
        if isinstance(one, ast.ClassDef) and not one.name.startswith("_"):
            yield from public_functions(one, f"{prefix}{one.name}.")
        elif isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
            yield f"{prefix}{one.name}", one


def unnamed(function: ast.FunctionDef) -> list[str]:
    """The arguments that have no line of their own in the docstring."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    names = [one.arg for one in every if one is not None and one.arg not in ("self", "cls")]
    said = ast.get_docstring(function) or ""
    return [
        name
        for name in names
        if not name.startswith("_") and not re.search(rf"^\s*{name}:", said, re.MULTILINE)
    ]


@pytest.mark.parametrize("folder", [*PACKAGES, "models"])
def test_every_argument_is_named(folder: str) -> None:
    paths = sorted((ROOT / folder).glob("*.py"))
    chosen = [path for path in paths if folder != "models" or path.stem in MODULES]
    wrong = [
        f"{path.relative_to(ROOT)}: {name} does not name {', '.join(missing)}"
        for path in chosen
        for name, function in public_functions(ast.parse(path.read_text(encoding="utf-8")))
        if (missing := unnamed(function))
    ]
    assert chosen
    assert wrong == []


def test_a_missing_argument_is_found() -> None:
    text = 'def f(a, b, *, c):\n    """Say.\n\n    Args:\n        a: one.\n        c: three.\n    """\n'
    ((_, function),) = public_functions(ast.parse(text))
    assert unnamed(function) == ["b"]
