"""The house has one direction: every folder imports from folders to its left, and from nowhere else.

The tables are the rule; docs/architecture.md explains them. Imports inside functions and for type checkers
count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import prooflens

ROOT = Path(prooflens.__file__).parent

FOUNDATION = {"durations", "errors", "json_files", "memory", "progress", "statistics", "version"}
"""Small modules without a subject of their own; they import each other at most."""

FOLDERS: Mapping[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "json_files": set(),
    "notebook": set(),
    "durations": {"errors"},
    "progress": {"durations"},
    "memory": {"errors"},
    "statistics": {"errors"},
    "numerics": {"errors"},
    "sets": {"errors", "numerics"},
    "models": {"errors", "json_files"},
    "regions": {"errors", "models"},
    "families": {"errors", "json_files", "models"},
    "queries": {"errors", "numerics"},
    "problem": {"models", "queries", "regions"},
    "engines": {"errors", "progress", "numerics", "sets", "models", "regions", "queries", "problem"},
    "certificate": {"errors", "json_files"},
    "checker": set(),
    "results": {"durations", "errors", "notebook", "version", "models", "regions", "families"}
    | {"queries", "engines", "certificate"},
    "verdicts": FOUNDATION | {"models", "regions", "queries", "problem", "engines", "results"},
    "enumeration": FOUNDATION
    | {"models", "families", "queries", "certificate", "checker", "results", "verdicts"},
    "sweep": FOUNDATION
    | {"models", "regions", "families", "queries", "certificate", "results", "verdicts", "enumeration"},
    "report": FOUNDATION | {"models", "certificate", "results", "verdicts", "sweep"},
    "evaluation": FOUNDATION
    | {"models", "regions", "queries", "problem", "engines", "checker", "results", "verdicts", "report"},
    "demo": {"models", "regions", "checker", "results", "verdicts", "report"},
    "doctor": {"version", "models"},
    "cli": FOUNDATION
    | {"models", "regions", "families", "queries", "certificate", "checker", "results", "verdicts"}
    | {"enumeration", "sweep", "report", "evaluation", "demo", "doctor"},
    "__main__": {"cli"},
}
"""Left to right: a folder (or a module beside them) and what it may import."""

SHARED = {
    "bounds",
    "costs",
    "forms",
    "protocol",
    "relaxations",
    "tensor_sets",
    "first_layer",
    "hidden",
    "rivals",
    "vocabulary",
}
"""What engines share: none of it belongs to one engine."""

ENGINES: Mapping[str, set[str]] = {
    "bounds": set(),
    "forms": set(),
    "costs": set(),
    "protocol": {"bounds", "forms"},
    "relational": {"bounds", "forms", "protocol"},
    "relaxations": {"forms"},
    "distributions": {"bounds", "forms", "protocol", "relational", "relaxations"},
    "tensor_sets": {"bounds", "forms", "relaxations"},
    "first_layer": {"forms", "protocol"},
    "hidden": {"bounds", "forms", "protocol", "relaxations"},
    "rivals": {"bounds", "forms", "protocol"},
    "vocabulary": {"bounds", "protocol", "relaxations", "hidden", "rivals"},
    "standings": {"bounds"},
    "functionals": {"bounds", "forms", "protocol", "standings", "vocabulary"},
    "counting": set(),
    "attention_only": set(),
    "interval": SHARED,
    "layer0": SHARED,
    "crown": SHARED,
    "polyzono": SHARED,
    "zonotope": SHARED,
    "jacobian": SHARED,
    "taylor": SHARED,
    "chebyshev": SHARED,
    "autolirpa": SHARED,
    "attack": SHARED,
    "exact": SHARED | {"attack", "layer0"},
}
"""The same inside `engines`. `exact` is built from two other engines: it branches, they bound and attack."""


def imported(path: Path) -> Iterator[str]:
    """Every module of the package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "prooflens")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            if node.module in ("prooflens", "prooflens.engines"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif (node.module or "").startswith("prooflens."):
                yield str(node.module)


def place(module: str, depth: int) -> str:
    """The folder of a module, so many levels below the package: `prooflens.models.load` is in `models`."""
    parts = module.split(".")
    return parts[depth] if depth < len(parts) else ""


def edges(top: Path, depth: int) -> Iterator[tuple[str, str, Path]]:
    """(folder, folder that it imports, file) below `top`."""
    names = {entry.stem for entry in top.iterdir() if entry.suffix in ("", ".py")}
    prefix = ".".join(["prooflens", *top.relative_to(ROOT).parts])
    for path in sorted(top.rglob("*.py")):
        own = path.relative_to(top).parts[0].removesuffix(".py")
        for module in imported(path):
            other = place(module, depth)
            if module.startswith(f"{prefix}.") and other in names and own not in ("__init__", other):
                yield own, other, path


@pytest.mark.parametrize(("top", "depth", "table"), [(ROOT, 1, FOLDERS), (ROOT / "engines", 2, ENGINES)])
def test_imports_go_left(top: Path, depth: int, table: Mapping[str, set[str]]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}, which {own} may not"
        for own, other, path in edges(top, depth)
        if other not in table[own]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("top", "table"), [(ROOT, FOLDERS), (ROOT / "engines", ENGINES)])
def test_the_table_names_every_folder_once_and_has_a_direction(
    top: Path, table: Mapping[str, set[str]]
) -> None:
    there = {
        entry.stem for entry in top.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()
    }
    assert set(table) == there - {"__init__"}
    order = list(table)
    for own, allowed in table.items():
        assert all(order.index(other) < order.index(own) for other in allowed), own


@pytest.mark.parametrize(("top", "depth", "table"), [(ROOT, 1, FOLDERS), (ROOT / "engines", 2, ENGINES)])
def test_the_table_allows_nothing_that_nobody_uses(
    top: Path, depth: int, table: Mapping[str, set[str]]
) -> None:
    used = {(own, other) for own, other, _ in edges(top, depth)}
    grouped = FOUNDATION | SHARED
    unused = {
        (own, other)
        for own, allowed in table.items()
        for other in allowed - grouped
        if (own, other) not in used
    }
    assert not unused


def test_a_backward_import_is_seen(tmp_path: Path) -> None:
    """The test itself: imports inside functions, and of modules through their package, are seen."""
    path = tmp_path / "module.py"
    path.write_text(
        "def f():\n    from prooflens.verdicts.certify import certify\n    import prooflens.cli\n"
    )
    assert list(imported(path)) == ["prooflens.verdicts.certify", "prooflens.cli"]
    path.write_text("from prooflens.engines import crown, Bounds\n")
    assert list(imported(path)) == ["prooflens.engines.crown", "prooflens.engines.Bounds"]
