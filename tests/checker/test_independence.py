"""The checker trusts nothing of the engines: it imports none of them, and no torch."""

import subprocess
import sys

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "scipy", "jaxtyping", "einops"):
            raise ImportError(name)
        allowed = ("prooflens.checker", "prooflens.notebook", "prooflens.version")
        if name.startswith("prooflens.") and not name.startswith(allowed):
            raise ImportError(name)

sys.meta_path.insert(0, Block())
import prooflens.checker
assert "torch" not in sys.modules
print(sorted(n for n in sys.modules if n.startswith("prooflens") and "checker" not in n))
"""


def test_it_imports_without_torch_and_without_the_rest_of_the_package() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['prooflens', 'prooflens.notebook', 'prooflens.version']"
