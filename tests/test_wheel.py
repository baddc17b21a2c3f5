"""The wheel alone: it has all of the package, and asks for nothing that only some people need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

EXTRAS = (
    *(
        "gguf",
        "huggingface_hub",
        "matplotlib",
        "onnx",
        "plotly",
        "ray",
        "submitit",
        "tokenizers",
        "transformer_lens",
    ),
    "transformers",
)
"""What optional parts import; none of it is needed for what a wheel alone can do."""

ALONE = f"""
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import prooflens as pl
assert "torch" not in sys.modules, "the import alone must be quick"
model = pl.load("toy")
res = pl.certify(model, model.example(), pl.Ball(0.02), "0", positions=[-1], budget="8/1/2")
assert res.counts["holds"] == 2, res
pl.report(res, path="toy.html")
from prooflens.cli import main
for arguments in (["certify", "toy", "--eps", "0.02", "--heads", "0.1", "-o", "RUN"], ["check", "RUN"]):
    sys.argv = ["prooflens", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert stop.code in (0, None, 3), arguments
try:
    pl.load("no-such-org/no-such-model")
except pl.errors.ModelError as error:
    assert len(str(error).splitlines()) == 1
print(pl.__file__)
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that `python -m build` puts into a wheel."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_it_certifies_checks_and_reports_without_any_extra(unpacked: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(unpacked), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == str(unpacked / "prooflens" / "__init__.py")
    assert "re-proved" in ran.stdout
    assert (tmp_path / "toy.html").is_file()


def test_it_has_every_file_and_asks_for_little(unpacked: Path) -> None:
    source = ROOT / "src" / "prooflens"
    wanted = {
        path.relative_to(source)
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so")
    }
    inside = unpacked / "prooflens"
    assert wanted <= {path.relative_to(inside) for path in inside.rglob("*")}
    (metadata,) = unpacked.glob("prooflens-*.dist-info/METADATA")
    needed = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", metadata.read_text(), re.MULTILINE)
    assert "torch" in needed
    assert not {name.replace("-", "_").lower() for name in needed} & set(EXTRAS)
