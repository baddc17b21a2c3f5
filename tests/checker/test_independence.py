"""The checker trusts nothing of the engines: it imports none of them, and no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import prooflens

CHECKER = Path(prooflens.__file__).parent / "checker"
LIMIT = 1000

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "scipy", "jaxtyping", "einops"):
            raise ImportError(name)
        if name.startswith("prooflens.") and not name.startswith("prooflens.checker"):
            raise ImportError(name)

sys.meta_path.insert(0, Block())
import prooflens.checker
assert "torch" not in sys.modules
print(sorted(n for n in sys.modules if n.startswith("prooflens") and "checker" not in n))
"""


def test_it_imports_without_torch_and_without_the_rest_of_the_package() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['prooflens']"


def test_it_can_be_read_in_one_sitting() -> None:
    """Lines of code; docstrings, comments and blank lines do not count."""
    total = 0
    for path in CHECKER.glob("*.py"):
        source = path.read_text()
        quiet: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                quiet |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(source.splitlines(), 1)
        total += sum(
            1 for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in quiet
        )
    assert total < LIMIT, total
