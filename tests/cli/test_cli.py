"""The command line's contract: fast help, JSON documents, doctor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import prooflens
import prooflens as pl
import prooflens.cli
from tests.conftest import Call


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prooflens.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys, prooflens.cli\n"
        "from typer.testing import CliRunner\n"
        "out = CliRunner().invoke(prooflens.cli.app, ['--help'])\n"
        "assert out.exit_code == 0, out.output\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(("policy", "spins"), [(None, prooflens.cli.SPINS), ("ACTIVE", None)])
def test_threads_that_wait_do_not_keep_cores_from_others(
    policy: str | None, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["prooflens", "--version"])
    monkeypatch.setattr(os, "environ", {} if policy is None else {"OMP_WAIT_POLICY": policy})
    with pytest.raises(SystemExit):
        prooflens.cli.main()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_version() -> None:
    assert run("--version").stdout.strip() == f"prooflens {prooflens.__version__}"


@pytest.mark.slow
def test_doctor_as_json() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert set(found) == {"versions", "devices", "memory", "models", "missing"}
    assert found["versions"]["prooflens"] == prooflens.__version__


@pytest.mark.slow
def test_show_prints_the_fingerprint() -> None:
    done = run("show", "toy", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["sha256"] == prooflens.load("toy").sha256


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = prooflens.nothing


def test_a_model_is_exported_for_the_checker(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("export", "toy", "-o", str(tmp_path / "toy"), "--json")
    assert code == 0
    assert json.loads(out)["sha256"] == pl.load(tmp_path / "toy").sha256 == pl.load("toy").sha256
    call("certify", "toy", "--eps", "0.02", "--layer", "0", "-o", str(tmp_path / "run"))
    code, out, _ = call("check", str(tmp_path / "run"), "--weights", str(tmp_path / "toy"), "--json")
    assert code == 0
    assert json.loads(out)["summary"]["re-proved"] > 0
