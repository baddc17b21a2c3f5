"""What strangers may hand us, each as a function of bytes: it returns, or raises an error that a user can act on.

Everything is read as the commands read it. While a target runs, an audit hook watches: no file is written outside its
folder, no process is started, nothing is unpickled, and no module is imported from the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

import prooflens as pl
from prooflens.certificate import read_run
from prooflens.checker import check
from prooflens.checker.vocabulary import recount
from prooflens.errors import ProoflensError, RunError
from prooflens.evaluation.soundness.cases import random_model
from prooflens.families.read import read_family
from prooflens.models import Prompt
from prooflens.models.load import load_folder
from prooflens.models.spread import moved_tokens
from prooflens.problem import Problem
from prooflens.queries import InsideQuery, parse_metric, parse_query, resolve
from prooflens.report import collect, render
from prooflens.sweep.spec import read_spec
from prooflens.verdicts.circuit_files import as_circuit
from prooflens.verdicts.sites import inside_claims

CORPUS = Path(__file__).parent / "corpus"
TOY = Path(pl.__file__).parent / "models" / "embedded" / "toy"

ROLES = {"A": ((1,),), "B": ((2,), (3,))}
"""Slots of a template, and where they stand."""

WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.link", "os.truncate")
FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "pickle.find_class",
    "ctypes.dlopen",
    "socket.connect",
)


class EscapeError(AssertionError):
    """A file did something that files must not do."""


class _Watch:
    """The one audit hook of the process; it looks only while a folder is set."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in FORBIDDEN:
            self.seen.append(f"{event}{args!r}")
        elif event in WATCHED and isinstance(args[0], str | bytes | os.PathLike):
            writes = event != "open" or (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR))
            where = Path(os.fsdecode(args[0])).absolute()
            if writes and not where.is_relative_to(self.folder) and "__pycache__" not in where.parts:
                self.seen.append(f"{event} {where}")
        elif event == "import" and args[1] and Path(str(args[1])).absolute().is_relative_to(self.folder):
            self.seen.append(f"import {args[1]}")


@cache
def _watch() -> _Watch:
    return _Watch()


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Nothing leaves the folder."""
    watch = _watch()
    watch.folder, watch.seen = folder.absolute(), []
    try:
        yield
    finally:
        watch.folder = None
    if watch.seen:
        raise EscapeError("; ".join(watch.seen))


@cache
def _problem() -> Problem:
    model = pl.load("toy")
    return Problem(model, pl.Ball(0.01).around(model.example(0)))


@cache
def _setting() -> Any:
    return _problem().setting([0, 1])


def query(data: bytes, folder: Path) -> None:
    """A query string, parsed, its roles looked up, and bound."""
    asked = parse_query(data.decode("utf-8", "replace"), ROLES)
    problem = _problem()
    prompt = Prompt(problem.region.center, ("",) * 4, (3, 5, 7, 5), roles=ROLES)
    if isinstance(asked, InsideQuery):
        inside_claims(problem.model, prompt, problem.region, [asked], {"DIR": torch.ones(8).double()})
        return
    for found in resolve(asked, ROLES, 4, prompt.ids):
        found.bind(_setting(), "0")


def spec(data: bytes, folder: Path) -> None:
    """A sweep's specification."""
    (folder / "spec.yaml").write_bytes(data)
    read_spec(folder / "spec.yaml")


def family(data: bytes, folder: Path) -> None:
    """A family of prompts and its claims."""
    (folder / "family.yaml").write_bytes(data)
    made, queries = read_family(folder / "family.yaml")
    for text in queries:
        parse_query(text, getattr(made, "slots", ()))


def circuit(data: bytes, folder: Path) -> None:
    """A circuit file."""
    (folder / "circuit.json").write_bytes(data)
    as_circuit(folder / "circuit.json", "top1@-1").bind(_setting())


def effect(data: bytes, folder: Path) -> None:
    """What an effect is measured on, in a second line the parts that are taken out, and how far from 0 they may be."""
    metric, parts, spread, *_ = [*data.decode("utf-8", "replace").split("\n"), "", "", ""]
    parse_metric(metric, ROLES)
    model = _adding() if "->" in parts else _problem().model
    try:
        by = float(spread) if spread else None
    except ValueError:
        by = None
    edited = pl.edit(model, [pl.Edit(part, spread=by) for part in parts.split(",")])
    moved_tokens(edited, 4)


@cache
def _adding() -> pl.Transformer:
    """A model whose parts add up in the stream, so that there are edges."""
    return random_model("gpt2", random.Random(0), 2)


def run_json(data: bytes, folder: Path) -> None:
    """The header of a run directory: read, reported, checked."""
    _headed(data, folder, "run")


def effect_json(data: bytes, folder: Path) -> None:
    """The header of a run about the effect of an edit, likewise."""
    _headed(data, folder, "effect-run")


def _headed(data: bytes, folder: Path, name: str) -> None:
    for part in ("rows", "tensors"):
        shutil.copytree(CORPUS / name / part, folder / part, dirs_exist_ok=True)
    (folder / "run.json").write_bytes(data)
    check(folder, TOY)
    run = read_run(folder)
    render(collect(folder))
    assert run.table.num_rows == run.info["rows"]


def certificate(data: bytes, folder: Path) -> None:
    """The tensors of a run directory, with the hash that a forger would write."""
    import hashlib

    info = json.loads((CORPUS / "run" / "run.json").read_text())
    for part in ("rows", "tensors"):
        shutil.copytree(CORPUS / "run" / part, folder / part, dirs_exist_ok=True)
    name = next(name for name in info["files"] if name.startswith("tensors/"))
    (folder / name).write_bytes(data)
    info["files"][name] = hashlib.sha256(data).hexdigest()
    (folder / "run.json").write_text(json.dumps(info))
    check(folder, TOY)
    render(collect(folder))


def weights(data: bytes, folder: Path) -> None:
    """A safetensors file of a model."""
    shutil.copy(TOY / "config.json", folder)
    (folder / "model.safetensors").write_bytes(data)
    load_folder(folder, "untrusted")


def config(data: bytes, folder: Path) -> None:
    """The configuration of a model, which is evaluated if it fits the weights."""
    shutil.copy(TOY / "model.safetensors", folder)
    (folder / "config.json").write_bytes(data)
    model = load_folder(folder, "untrusted")
    x = torch.linspace(-1.0, 1.0, 3 * model.architecture.d_model, dtype=torch.float64)
    model.run(x.reshape(3, -1), ["output"])


def counts(data: bytes, folder: Path) -> None:
    """The file of `vocabulary -o`, counted again."""
    (folder / "counts.json").write_bytes(data)
    found = recount(folder / "counts.json", CORPUS / "tokens")
    if not found.ok:
        raise RunError("; ".join([*found.problems, *(row.detail for row in found.findings)]))


def onnx(data: bytes, folder: Path) -> None:
    """An ONNX graph of a model."""
    (folder / "model.onnx").write_bytes(data)
    pl.load(folder / "model.onnx")


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "query": query,
    "spec": spec,
    "family": family,
    "circuit": circuit,
    "effect": effect,
    "run_json": run_json,
    "effect_json": effect_json,
    "certificate": certificate,
    "weights": weights,
    "config": config,
    "onnx": onnx,
    "counts": counts,
}


def survive(name: str, data: bytes, folder: Path) -> str | None:
    """Run a target; what a user would read, or None if the input was fine. Anything else is raised."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    try:
        with watched(folder):
            TARGETS[name](data, folder)
    except ProoflensError as error:
        message = str(error)
        assert message, "an error says something"
        return message
    return None
