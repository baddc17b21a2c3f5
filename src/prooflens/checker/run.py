"""Reading a run directory: its files, its fingerprints, and what it says of itself; rows are judged in `rows`."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file

from prooflens.checker.depth.room import within
from prooflens.checker.effects import EffectChecker, FamilyEffectChecker, pair_of
from prooflens.checker.families import Powers
from prooflens.checker.findings import NOT_CHECKABLE, WRONG, CheckReport, Finding, Row, WrongError, need
from prooflens.checker.network import Network, Tables
from prooflens.checker.prompts import FamilyChecker
from prooflens.checker.proofs import OutOfTimeError
from prooflens.checker.radii import judge_radii
from prooflens.checker.region import Region
from prooflens.checker.rows import RowChecker
from prooflens.checker.starts import confirm, tail_of
from prooflens.checker.vocabulary import VocabularyChecker

SCHEMA = 1
"""The format of run directories that is read."""

DAMAGE = (WrongError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
          pa.ArrowException, SafetensorError)  # fmt: skip


def check(
    run: Path,
    weights: Path,
    tables: Tables | None = None,
    powers: Powers | None = None,
    only: Container[int] | None = None,
    seconds: float = math.inf,
    tell: Callable[[str, float], None] = lambda stage, share: None,
    memory: int | None = None,
) -> CheckReport:
    """Check every row of a run directory against the weights, by code that shares nothing with the engines.

    Args:
        run: the run directory that `certify(…, out=run)` or `Results.save` wrote.
        weights: the folder of the model's weights.
        tables: RoPE's float32 constants as the library that ran the model makes them; they are compared with the
            checker's own. Without them claims beyond layer 0 of a Llama model are mostly `not checkable`.
        powers: the powers of RoPE's base, likewise. Where only a part of each head turns, or turns more slowly, they
            are a part of the fingerprint, and libraries differ in their last place.
        only: the numbers of the rows to judge; None for all. Files and fingerprints are checked all the same.
        seconds: no proof is begun after so many; rows without one are `not checkable`, and say so.
        tell: called with what is being done, and the share of rows that are judged.
        memory: bytes by which proofs of depth decide how much they hold; None for what is free. With less they keep
            fewer layers and add up earlier remainders, so that less may be re-proved.

    Returns:
        Problems of the run as a whole, and one word per row: `re-proved`, `witness confirmed`, `nothing claimed`,
            `not checkable` or `WRONG`, and of families of prompts and vocabularies `re-run`. A damaged run is reported
            as WRONG, not raised.

    Example:
        >>> import prooflens as pl, tempfile
        >>> from importlib import resources
        >>> model = pl.load("toy")
        >>> res = pl.certify(model, model.example(), pl.Ball(0.02), "0.1", positions=[-1])
        >>> weights = Path(str(resources.files("prooflens.models"))) / "embedded" / "toy"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     res.save(f"{folder}/run")
        ...     check(Path(folder, "run"), weights).counts["re-proved"]
        1
    """
    begun = time.monotonic()

    def tell_in_time(stage: str, share: float) -> None:
        tell(stage, share)
        if time.monotonic() - begun > seconds:
            raise OutOfTimeError

    with within(memory):
        try:
            return _judged(run, weights, tables, powers, only, tell_in_time)
        except DAMAGE as error:
            return CheckReport([f"WRONG: {str(error) or type(error).__name__}"], [])


def _judged(
    run: Path,
    weights: Path,
    tables: Tables | None,
    powers: Powers | None,
    only: Container[int] | None,
    tell: Callable[[str, float], None],
) -> CheckReport:
    """Read a run and judge its rows; what is damaged raises one of `DAMAGE`."""
    info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    need(isinstance(info, dict), "run.json must hold one JSON object")
    need(info["schema"] == SCHEMA, f"the run has another format than {SCHEMA}")
    for name, digest in info["files"].items():
        need((run / name).resolve().is_relative_to(run.resolve()), f"{name} is outside the run")
        need((run / name).is_file(), f"{name} is missing")
        need(hashlib.sha256((run / name).read_bytes()).hexdigest() == digest, f"{name} was changed")
    parts = [pq.read_table(run / name) for name in info["files"] if name.startswith("rows/")]
    rows: list[Row] = pa.concat_tables(parts).to_pylist() if parts else []
    tensors: dict[str, Any] = {}
    for name in info["files"]:
        tensors |= load_file(run / name) if name.startswith("tensors/") else {}
    whole, layers = Network.read(weights, tables, powers), info.get("layers")
    read, start = info.get("read"), info.get("start")
    full = whole
    if start is not None:
        told = f", from layer {start['layer']}" in info["model"]["name"]
        need(told, "the model starts at another block than it says")
        whole = tail_of(whole, start["layer"])
    if layers is not None and layers != whole.arch["n_layers"] and read is None:
        told = info["model"]["name"].endswith(f", first {layers} layers")
        need(told and 0 < layers < whole.arch["n_layers"], "the model was cut and does not say so")
    net = whole.cut(layers)
    if read is not None:
        other = read.get("beside")
        beside = None if other is None else (other["hook"], other["position"])
        also = "" if beside is None else f" and {beside[0]}@{beside[1]}"
        told = info["model"]["name"].endswith(f", read at {read['hook']}@{read['position']}{also}")
        block = read["hook"].startswith(f"blocks.{layers - 1}.")
        need(told and block, "the model ends at another hook than it says")
        held = tensors["read/weight"], tensors.get("read/bias")
        net = net.read_at(read["hook"], read["position"], *held, beside)
    stated = {info["model"]["sha256"], *(row["model_sha256"] for row in rows)}
    need({net.sha256} == stated, "the weights do not have the fingerprint that the run states")
    numbers = [row["row"] for row in rows]
    need(numbers == list(range(info["rows"])), "rows are missing or numbered wrongly")
    if (counted := _COUNTED.get(info["kind"])) is not None:
        words = counted(net, info, tensors, rows).judge_all()
        return CheckReport([], [Finding(row["row"], *words[row["row"]]) for row in rows])
    claimed = [row for row in rows if row.get("claim")]
    chosen = [row for row in rows if only is None or row["row"] in only]
    named = {"model": info["model"]["name"], "tokens": info["tokens"]}
    if info["kind"] != "radii":  # whose rows are about balls of other sizes
        named |= {"region": info["region"]["label"], "region_id": 0}
    same = all(row[name] == stated for row in claimed for name, stated in named.items())
    need(same, "run.json and the rows name another model, prompt or region")
    counts, summary = Counter(row.get("verdict") for row in rows), info.get("counts") or {}
    same = all(counts[verdict] == n for verdict, n in summary.items())
    need(same or not info["complete"], "run.json counts other verdicts")
    names = [] if read is None else list(read["names"])
    found: dict[int, Finding] = {}
    judged = [row for row in chosen if row.get("claim")]
    where = "" if start is None or not judged else confirm(full, start, tensors, Region.of(tensors))
    if judged and info["kind"] == "radii":
        found = judge_radii(net, tensors, judged, names, tell)
    elif judged:
        pair: Any = net if info.get("edited") is None else pair_of(net, info, tensors)
        kind = RowChecker if pair is net else EffectChecker
        found = kind(pair, tensors, judged, info["region"]["eps"], names).judge_all(tell)
    if where:
        found = {n: replace(finding, note=f"{finding.note}; {where}") for n, finding in found.items()}
    return CheckReport([], [found.get(row["row"]) or _without_claim(row) for row in chosen])


_COUNTED: dict[str, Any] = {
    "family": FamilyChecker,
    "family effects": FamilyEffectChecker,
    "vocabulary": VocabularyChecker,
}
"""Who judges rows that count prompts, by the kind of run."""


def _without_claim(row: Row) -> Finding:
    if "verdict" in row:
        return Finding(row["row"], WRONG, "a verdict without the claim that it is about")
    return Finding(row["row"], NOT_CHECKABLE, "no claim is stored: a radius of an older run, or of a sweep")
