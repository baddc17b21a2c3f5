"""What a machine may lack: memory, disk space, the right to write, a GPU, a network; and a user who stops it."""

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.certificate.store import write_atomically
from prooflens.errors import EngineError, ModelError, PromptError, RunError
from prooflens.memory import KEPT, available, is_shortage, parse_memory, written
from prooflens.models.pull import pull
from prooflens.problem import Problem
from prooflens.verdicts.certify import certify
from prooflens.verdicts.chunks import chunks, halves, least_memory
from prooflens.verdicts.evidence import Evidence
from prooflens.verdicts.portfolio import gather_evidence
from prooflens.verdicts.settings import Settings

pytestmark = pytest.mark.slow

LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits are Linux'")
ROOT = os.geteuid() == 0


def prooflens(*words: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which may take so much private memory in all."""

    def bound() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "prooflens.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=bound,
        env=environment,
    )


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    *before, last = done.stderr.strip().splitlines()
    assert last.startswith("error: ")
    assert all("claims" in line for line in before), "what was selected, and nothing else"
    return last


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose claims take about 500 MB at once: 8 heads, 24 tokens of 192 numbers."""
    from safetensors.torch import save_file

    from prooflens.models import Architecture
    from prooflens.models.files import write_model
    from prooflens.models.train import initial_weights

    folder = tmp_path_factory.mktemp("models") / "wide"
    architecture = Architecture("encoder", 1, 8, 192, 64, "relu", pool="mean", d_out=2)
    generator = torch.Generator().manual_seed(0)
    write_model(folder, architecture, initial_weights(architecture, generator))
    save_file({"x": torch.randn(1, 24, 192, generator=generator)}, folder / "examples.safetensors")
    return folder


ASKED = ("--eps", "0.0001", "--engine", "layer0", "--budget", "0/0/0", "--json")


@LINUX
def test_a_cap_is_honoured_by_smaller_chunks(wide: Path) -> None:
    capped = prooflens("certify", str(wide), *ASKED, "--memory", "200MB")
    assert capped.returncode == 0, capped.stderr
    assert capped.stdout.count('"verdict": "holds"') == 8 * 24


@LINUX
def test_too_little_memory_is_one_line(wide: Path) -> None:
    words = one_error(prooflens("certify", str(wide), *ASKED, "--memory", "5MB"))
    assert "memory" in words
    words = one_error(prooflens("certify", str(wide), *ASKED, limit=300 * 2**20))
    assert "memory" in words


def test_the_estimate_comes_before_the_work(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pl.load(str(wide))
    problem = Problem(model, pl.Ball(0.001).around(model.example(0)))
    need = least_memory(problem)
    monkeypatch.setattr("prooflens.verdicts.chunks.available", lambda: need - 1)
    monkeypatch.setattr(
        "prooflens.verdicts.certify.gather_evidence", lambda *_: pytest.fail("work was begun")
    )
    with pytest.raises(EngineError, match=f"at least about {written(need)}"):
        certify(model, model.example(0), pl.Ball(0.001), "0.0")


def test_a_chunk_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = pl.load("toy"), []

    def scarce(problem: Problem, evidence: list[Evidence], settings: Settings) -> None:
        sizes.append(len(evidence))
        if len(evidence) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        gather_evidence(problem, evidence, settings)

    whole = certify(model, model.example(0), pl.Ball(0.01), "0")
    monkeypatch.setattr("prooflens.verdicts.certify.gather_evidence", scarce)
    parts = certify(model, model.example(0), pl.Ball(0.01), "0")
    assert max(sizes) > 2
    assert [row["verdict"] for row in parts.rows] == [row["verdict"] for row in whole.rows]
    with pytest.raises(EngineError, match="single claim"):
        halves([3], MemoryError())
    with pytest.raises(RuntimeError, match="another"):
        halves([3, 4], RuntimeError("another"))


FAULTS = """
import resource, sys, torch
from prooflens.memory import keep_freed
if sys.argv[1] == "keep":
    keep_freed()
held = torch.ones(1024, 1024, dtype=torch.float64)
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        (held + 1.0) * (held - 1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt") or (available() or 0) < 16 * KEPT,
    reason="needs glibc and 8 GiB",
)
def test_freed_matrices_are_used_again() -> None:
    faults = {}
    for way in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", FAULTS, way], capture_output=True, text=True, check=True)
        faults[way] = int(done.stdout)
    assert faults["keep"] <= 50
    assert faults["keep"] <= faults["leave"]


def test_chunks_shrink_with_memory() -> None:
    model = pl.load("toy")
    problem = Problem(model, pl.Ball(0.01).around(model.example(0)))
    claims = pl.queries.parse_query("top1").bind(problem.setting([0]), "0")
    assert sum(map(len, chunks(problem, claims, None))) == len(claims)
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert not is_shortage(RuntimeError("shapes do not match"))


@LINUX
def test_what_is_available_is_told() -> None:
    found = available()
    assert found is not None
    assert 2**20 < found < 2**50
    assert parse_memory("2GiB") == 2**31


@LINUX
@pytest.mark.parametrize("after", [0.3, 2.5, 4.0])
def test_ctrl_c_at_any_time(after: float, tmp_path: Path) -> None:
    words = (
        "certify",
        "toy-4layer",
        "--eps",
        "0.02",
        "--layer",
        "2",
        "--query",
        "top1",
        "--engine",
        "cpz",
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "prooflens.cli", *words, "-o", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    time.sleep(after)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert job.returncode in (0, 2, 3, 130, -signal.SIGINT), said
    if after > 2.0:
        assert "Traceback" not in said
    left = [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]
    assert left == []


@pytest.mark.skipif(ROOT, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    words = one_error(prooflens("certify", "toy", "--eps", "0.01", "-o", str(tmp_path / "run")))
    assert "cannot write" in words


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for command in (
        ("certify", "toy", "--eps", "0.01", "--heads", "0.0", "-o", str(tmp_path / "file" / "run")),
        ("report", str(tmp_path), "-o", str(tmp_path / "file" / "x.html")),
    ):
        one_error(prooflens(*command))


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only")])
def test_full_and_read_only_disks(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        path.write_text("half")
        raise OSError(number, os.strerror(number))

    with pytest.raises(RunError, match=words):
        write_atomically(tmp_path / "run.json", full)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "prooflens.cli", "doctor", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said() -> None:
    with pytest.raises(PromptError, match=r"device 'cuda' cannot be used"):
        certify("toy", pl.load("toy").example(0), pl.Ball(0.01), device="cuda")


def test_an_old_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(*_: object, **__: object) -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    model = pl.load("toy")
    prompt = model.example(0)
    monkeypatch.setattr(torch, "zeros", old)
    with pytest.raises(PromptError, match="driver on your system is too old"):
        certify(model, prompt, pl.Ball(0.01), device="cuda")


def test_no_hub_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PROOFLENS_CACHE", str(tmp_path))
    with pytest.raises(ModelError):
        pull("someone/some-model")


def test_an_error_nobody_foresaw_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prooflens import cli

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero\nmore")

    monkeypatch.setattr(cli, "app", broken)
    monkeypatch.delenv("PROOFLENS_DEBUG", raising=False)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    said = " ".join(capsys.readouterr().err.split())
    assert "ZeroDivisionError: division by zero" in said
    assert "PROOFLENS_DEBUG=1" in said
    monkeypatch.setenv("PROOFLENS_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main()
