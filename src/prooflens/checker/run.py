"""Reading a run directory, and judging its rows one by one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from flint import arb
from safetensors import SafetensorError
from safetensors.numpy import load_file

from prooflens.checker.claims import OUTPUTS, Functional, bounds, keys_of, value
from prooflens.checker.families import Powers
from prooflens.checker.first_layer import FirstLayer
from prooflens.checker.network import Balls, Network, Tables
from prooflens.checker.prompts import FamilyChecker
from prooflens.checker.query_reader import QueryReader
from prooflens.checker.region import Region

WORDS = ("re-proved", "witness confirmed", "not checkable", "WRONG")
RERUN = "re-run"
"""A fifth word, of families of prompts alone: a member was run again, in float64, by the checker's own code."""
WORTH = {(v, g) for v in ("fails", "unknown") for g in ("proved", "estimated", "none")}
WORTH |= {("holds", "proved"), ("estimated", "estimated"), ("fails", "witness")}
"""Verdicts, and what a row with each may rest on; older runs have no `witness` and say what the bounds are worth."""
PROVED = ("proved", "witness")
"""The words beside which bounds are proved ones."""
SCHEMA = 1
"""The format of run directories that is read."""
BATCH = 8
"""Points that go through the network together."""

Row = dict[str, Any]


class WrongError(Exception):
    """What contradicts the run."""


DAMAGE = (WrongError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
          pa.ArrowException, SafetensorError)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One of the four words about a row, and why."""

    row: int
    status: str
    note: str


@dataclass(frozen=True)
class CheckReport:
    """What was found: problems of the run as a whole, and a finding per row."""

    problems: list[str]
    findings: list[Finding]

    @property
    def counts(self) -> dict[str, int]:
        """How many rows got each word."""
        found = Counter(finding.status for finding in self.findings)
        words = WORDS if not found[RERUN] else (*WORDS[:2], RERUN, *WORDS[2:])
        return {word: found[word] for word in words}

    @property
    def ok(self) -> bool:
        """Whether nothing is WRONG."""
        return not self.problems and not self.counts["WRONG"]


def check(
    run: Path, weights: Path, tables: Tables | None = None, powers: Powers | None = None
) -> CheckReport:
    """Check every row of a run directory against the weights, by code that shares nothing with the engines.

    Args:
        run: the run directory that `certify(…, out=run)` or `Results.save` wrote.
        weights: the folder of the model's weights.
        tables: RoPE's float32 constants as the library that ran the model makes them; they are compared with the
            checker's own. Without them claims beyond layer 0 of a Llama model are mostly `not checkable`.
        powers: the powers of RoPE's base, likewise. Where only a part of each head turns, or turns more slowly, they
            are a part of the fingerprint, and libraries differ in their last place.

    Returns:
        Problems of the run as a whole, and one of four words per row: `re-proved`, `witness confirmed`, `not
            checkable` or `WRONG`. A damaged run is reported as WRONG, not raised.

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
    from prooflens.checker.effects import FamilyEffectChecker, judge_effects

    try:
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
        _need(isinstance(info, dict), "run.json must hold one JSON object")
        _need(info["schema"] == SCHEMA, f"the run has another format than {SCHEMA}")
        for name, digest in info["files"].items():
            _need((run / name).resolve().is_relative_to(run.resolve()), f"{name} is outside the run")
            _need(hashlib.sha256((run / name).read_bytes()).hexdigest() == digest, f"{name} was changed")
        parts = [pq.read_table(run / name) for name in info["files"] if name.startswith("rows/")]
        rows: list[Row] = pa.concat_tables(parts).to_pylist() if parts else []
        tensors: dict[str, Any] = {}
        for name in info["files"]:
            tensors |= load_file(run / name) if name.startswith("tensors/") else {}
        whole, layers = Network.read(weights, tables, powers), info.get("layers")
        read = info.get("read")
        if layers is not None and layers != whole.arch["n_layers"] and read is None:
            told = info["model"]["name"].endswith(f", first {layers} layers")
            _need(told and 0 < layers < whole.arch["n_layers"], "the model was cut and does not say so")
        net = whole.cut(layers)
        if read is not None:
            told = info["model"]["name"].endswith(f", read at {read['hook']}@{read['position']}")
            block = read["hook"].startswith(f"blocks.{layers - 1}.")
            _need(told and block, "the model ends at another hook than it says")
            held = tensors["read/weight"], tensors.get("read/bias")
            net = net.read_at(read["hook"], read["position"], *held)
        stated = {info["model"]["sha256"], *(row["model_sha256"] for row in rows)}
        _need({net.sha256} == stated, "the weights do not have the fingerprint that the run states")
        _need([row["row"] for row in rows] == list(range(info["rows"])), "rows are missing or misnumbered")
        kinds = {"family": FamilyChecker, "family effects": FamilyEffectChecker}
        if (counted := kinds.get(info["kind"])) is not None:
            judged = counted(net, info, tensors, rows).judge_all()
            return CheckReport([], [Finding(row["row"], *judged[row["row"]]) for row in rows])
        claimed = [row for row in rows if row.get("claim")]
        named = [info["model"]["name"], info["tokens"], info["region"]["label"], 0]
        columns = ("model", "tokens", "region", "region_id")
        same = all([row[name] for name in columns] == named for row in claimed)
        _need(same, "run.json and the rows name another model, prompt or region")
        counts, summary = Counter(row.get("verdict") for row in rows), info.get("counts") or {}
        same = all(counts[verdict] == n for verdict, n in summary.items())
        _need(same or not info["complete"], "run.json counts other verdicts")
        names = [] if read is None else list(read["names"])
        if info.get("edited") is not None:
            return CheckReport([], judge_effects(net, info, tensors, claimed, names))
        found = RowChecker(net, tensors, claimed, info["region"]["eps"], names).judge_all() if claimed else {}
        return CheckReport([], [found.get(row["row"]) or _without_claim(row) for row in rows])
    except DAMAGE as error:
        return CheckReport([f"WRONG: {error or type(error).__name__}"], [])


def _without_claim(row: Row) -> Finding:
    if "verdict" in row:
        return Finding(row["row"], "WRONG", "a verdict without the claim that it is about")
    return Finding(row["row"], "not checkable", "no claim is stored: `certify -o` at its radius writes one")


def _need(condition: object, otherwise: str) -> None:
    if not condition:
        raise WrongError(otherwise)


def covers(low: Any, high: Any) -> bool:
    """Whether boxes in [−1, 1]^k cover it: they do not overlap, and their volumes, exact fractions, add up to it."""
    if not (np.all(low >= -1.0) and np.all(high <= 1.0) and np.all(low < high)):
        return False
    for i in range(len(low)):
        apart = (low[i + 1 :] >= high[i]) | (high[i + 1 :] <= low[i])
        if not np.all(apart.any(-1)):
            return False
    volume = Fraction(0)
    for a, b in zip(low.tolist(), high.tolist(), strict=True):
        sides = [Fraction(y) - Fraction(x) for x, y in zip(a, b, strict=True)]
        volume += prod(sides, start=Fraction(1))
    return volume == Fraction(2) ** int(low.shape[1])


class RowChecker:
    """The rows of one run that hold claims; all of them are about one prompt and one region."""

    reader: type[QueryReader] = QueryReader

    def __init__(
        self, net: Network, tensors: dict[str, Any], rows: list[Row], eps: float | None, names: list[str]
    ) -> None:
        self.net, self.tensors = net, tensors
        self.rows = [row | {"claim": json.loads(row["claim"])} for row in rows]
        self.region = Region.of(tensors)
        _need(len(self.region.center) == len(rows[0]["tokens"]), "the centre is not of the stated tokens")
        _need(self.region.eps == eps, "run.json states another ε")
        self.values: dict[tuple[int, str], list[arb]] = {}
        functionals = [f for row in self.rows for f in row["claim"]["functionals"]]
        self.clean = net.run([self.region.reference], *_reads(functionals))[0]
        self.asked = self.reader(net, rows[0]["tokens"], self.clean, names)

    @cached_property
    def first(self) -> FirstLayer:
        """Layer 0 on the region, or on the box around it."""
        return FirstLayer(self.net, self.region.center, self.region.half_widths)

    def judge_all(self) -> dict[int, Finding]:
        """A finding per row."""
        self._run_points()
        return {row["row"]: Finding(row["row"], *self._word(row)) for row in self.rows}

    def _word(self, row: Row) -> tuple[str, str]:
        try:
            return self._judge(row)
        except WrongError as error:
            return "WRONG", str(error)

    def _run_points(self) -> None:
        """The functionals at witnesses, and at the corner of the weakest functional where that may refute a bound."""
        jobs: dict[tuple[frozenset[int], bool], list[tuple[Row, str, Balls]]] = {}
        for row in self.rows:
            functionals = row["claim"]["functionals"]
            layers, output = _reads(functionals)
            for kind in ("witness_alpha", "ledger/corner", "lower_corner"):
                alpha = self.tensors.get(f"row/{row['row']}/{kind}")
                # Margins at layer 0 get corners of the checker's own.
                own = layers != {0} or all(t[1] == "score" for f in functionals for t in f["terms"])
                if alpha is not None and functionals and not (kind == "lower_corner" and own):
                    alpha = alpha if alpha.ndim == 1 else alpha[self._weakest(row)]
                    jobs.setdefault((layers, output), []).append((row, kind, self.region.point(alpha)))
        for (layers, output), listed in jobs.items():
            for start in range(0, len(listed), BATCH):
                batch = listed[start : start + BATCH]
                found = self.net.run([point for *_, point in batch], layers, output)
                for (row, kind, _), values in zip(batch, found, strict=True):
                    self.values[row["row"], kind] = [value(f, values) for f in row["claim"]["functionals"]]

    def _weakest(self, row: Row) -> int:
        return int(np.argmin(self.tensors[f"row/{row['row']}/lower"]))

    def _judge(self, row: Row) -> tuple[str, str]:
        functionals = row["claim"]["functionals"]
        low, high = (self.tensors[f"row/{row['row']}/{side}"] for side in ("lower", "upper"))
        self._consistent(row, functionals, low, high)
        clean = [value(f, self.clean) for f in functionals]
        for v, stored in zip(clean, row["claim"]["clean"], strict=True):
            _need(not abs(v - stored) > 1e-6 * (1 + abs(stored)), "the clean values are not the network's")
        unread = self._about(row, functionals)
        known = [self.values.get((row["row"], k)) for k in ("witness_alpha", "ledger/corner", "lower_corner")]
        # Under constraints neither the centre nor a corner need be in the region: they refute nothing there.
        free = self.region.A_eq is None and row["guarantee"] in PROVED
        for values in [clean, *known] if free else []:
            for f, a, b, v in zip(functionals, low.tolist(), high.tolist(), values or clean, strict=True):
                _need(not (v < a or v > b), f"{f['name']} is {float(v):.6g} somewhere, outside its bounds")
        if unread.startswith("query"):
            return "not checkable", unread
        if row["verdict"] == "fails":
            word, note = self._witness(row, functionals)
        elif row["guarantee"] != "proved" or row["verdict"] == "estimated":
            note = "nothing is claimed" if row["verdict"] == "unknown" else "an estimate"
            word = "not checkable"
        else:
            word, note = self._prove(row, functionals, low, high)
        return word, f"{note}; {unread}" if unread else note

    def _about(self, row: Row, functionals: list[Functional]) -> str:
        """The claim is that of the query and the region the one that is named; else why that cannot be told."""
        named = self.region.is_named(row["region"])
        _need(named is not False, "the stored region is not the one that is named")
        place = tuple(row[column] for column in ("layer", "head", "position"))
        try:
            _need(not (wrong := self.asked.differs(row["query"], place, functionals)), wrong)
        except ValueError as error:
            return f"query: {error}"
        except (LookupError, TypeError, AttributeError) as error:
            raise WrongError(f"the claim is not what its query asks for: {error}") from error
        return "" if named else "the region is the stored one: its name is free text"

    def _consistent(self, row: Row, functionals: list[Functional], low: Any, high: Any) -> None:
        """The table, the tensors, the claim and the verdict must say the same."""
        fit = len(low) == len(high) == len(functionals) and np.all(low <= high)
        _need(fit, "the bounds do not fit the claim")
        for column, bound in (("lower", low), ("upper", high)):
            stated = row[column] in _least(functionals, bound.tolist())
            _need(stated, f"column {column} is not the stored bound")
        _need(row["eps"] == self.region.eps, "the region does not have the stated ε")
        place = [row[column] for column in ("layer", "head", "position")]
        same = place == [None] * 3 or all(term[2:5] == place for f in functionals for term in f["terms"])
        _need(same, "the claim is about another row of attention")
        worth = row["verdict"], row["guarantee"]
        _need(worth in WORTH, "an estimate or an unknown word is called a verdict")
        least = _least(functionals, row["claim"]["clean"])
        _need(row["clean"] in least, "column clean is not the claim's value")
        first = keys_of(functionals[0]["terms"][0]) if row["top"] is not None else [None]
        _need(first == [row["top"]], "column top is not the claim's key")
        if row.get("candidate") is not None:
            side = functionals[0]["terms"][0 if row["query"] == "argmax" else 1]
            _need(side[1:] == ["logit", row["candidate"]], "column candidate is not the claim's output")
        holds = row["claim"]["tie"] is None and all(map(_met, functionals, low, high))
        says = {"holds": holds, "unknown": not holds}.get(row["verdict"], True)
        _need(says, f"the verdict {row['verdict']!r} does not follow from the stored bounds")
        if row["attack"] is not None and row["guarantee"] in PROVED and len(low):
            # An attack's value is a plain float64 evaluation: this asks for consistency and proves nothing.
            _need(row["attack"] >= low.min() - 1e-9, "the attack reached a value below the lower bound")

    def _witness(self, row: Row, functionals: list[Functional]) -> tuple[str, str]:
        name = f"row/{row['row']}"
        values = self.values.get((row["row"], "witness_alpha"))
        _need(values is not None, "a failing claim needs a witness")
        alpha, x = self.tensors[f"{name}/witness_alpha"], self.tensors[f"{name}/witness"]
        _need(np.all(np.abs(alpha) <= 1.0), "the witness lies outside the region")
        if not self.region.meets(alpha):
            return "not checkable", "the witness's factors break the constraints: others may give it"
        for a, b in zip(self.region.point(alpha).ravel(), x.ravel().tolist(), strict=True):
            _need(abs(a - b) < 1e-9 * (1 + abs(b)), "the stored witness is not the point of its factors")
        found = list(zip(functionals, values or (), strict=True))
        for f, v in found:
            if (f["sense"] == ">0" and v <= 0) or (f["sense"] == ">=0" and v < 0):
                return "witness confirmed", f"{f['name']} is {float(v):.6g}, claimed {f['sense']}"
        met = all(v > 0 or (f["sense"] == ">=0" and v >= 0) for f, v in found)
        _need(not met, "the witness does not break the claim")
        return "not checkable", "the ball around the witness's value contains 0"

    def _prove(self, row: Row, functionals: list[Functional], low: Any, high: Any) -> tuple[str, str]:
        note, proved, weakest = self._ledger(row, low) or self._cover(row, low), list[bool](), np.inf
        ball = self.region.radius is not None and self.region.A_eq is None
        for f, a, b in zip(functionals, low, high, strict=True):
            least, most, reached = bounds(f, self.first) if self.first.knows else (-np.inf, np.inf, np.inf)
            wrong = (ball and reached < a) or most < a or least > b
            _need(not wrong, f"the bounds of {f['name']} are contradicted")
            proved.append(least >= a and most <= b if f["sense"] == "range" else _met(f, least, most))
            weakest = min(weakest, least)
        if row["verdict"] != "holds":
            return "not checkable", "unknown: nothing is claimed"
        if all(proved):
            return "re-proved", f"own bound {weakest:.6g}" if functionals else "true by the mask"
        weaker = "the checker's bounds are weaker" if weakest > -np.inf else "beyond layer 0"
        return "not checkable", note or weaker

    def _cover(self, row: Row, low: Any) -> str:
        """Of a region that was cut: the boxes cover [−1, 1]^k, and no bound on one of them is below the row's."""
        name = f"row/{row['row']}/cover"
        if f"{name}/low" not in self.tensors:
            return ""
        first, last, lower = (self.tensors[f"{name}/{part}"] for part in ("low", "high", "lower"))
        held = self.region.generators
        factors = int((self.region.radius > 0).sum()) if held is None else len(held)
        fit = first.shape == last.shape == (len(lower), factors) and lower.shape[1] == len(low)
        _need(fit, "the pieces do not fit the region and the claim")
        _need(covers(first, last), "the pieces do not cover the region")
        _need(np.all(lower >= low[None]), "a piece has a lower bound below the row's")
        return f"{len(lower)} pieces cover the region; their proofs are not repeated"

    def _ledger(self, row: Row, low: Any) -> str:
        """Of a ledger: f ≥ value − Σ penalty, penalties ≥ 0, and the value bounds f at its corner from below."""
        name, k = f"row/{row['row']}/ledger", self._weakest(row) if len(low) else 0
        if f"{name}/corner" not in self.tensors:
            return ""
        parts = ("corner", "value", "penalty")
        corner, at_corner, penalty = (self.tensors[f"{name}/{part}"] for part in parts)
        _need(np.all(np.abs(corner) <= 1.0), "the ledger's corner lies outside the region")
        _need(np.all(penalty >= 0.0), "a penalty of the ledger is negative")
        sums = zip(low.tolist(), at_corner.tolist(), penalty.tolist(), strict=True)
        _need(all(_adds_up(*each) for each in sums), "the ledger does not add up")
        there = self.values[row["row"], "ledger/corner"][k]
        _need(not there < float(at_corner[k]), "the ledger's value is too high")
        if not float(there.rad()) < 1e-6:
            return "sum confirmed; the network's value at the corner is not known well enough"
        return "sum and corner value confirmed; curvature not re-proved"


def _adds_up(bound: float, value: float, penalties: list[float]) -> bool:
    """bound ≤ value − Σ penalties, exactly; a bound of −∞ says nothing."""
    if bound == -np.inf:
        return True
    known = np.isfinite([bound, value, *penalties]).all()
    return bool(known and Fraction(bound) <= Fraction(value) - sum(map(Fraction, penalties)))


def _least(functionals: list[Functional], values: list[float]) -> tuple[float | None, float | None]:
    """The smallest of some values as a column has it: without what the mask decides, or (in older runs) with it."""
    read = [v for f, v in zip(functionals, values, strict=True) if f["terms"]]
    low, every = min(read, default=np.inf), min(values, default=np.inf)
    return (float(low) if np.isfinite(low) else None, float(every) if np.isfinite(every) else None)


def _met(functional: Functional, low: float, high: float) -> bool:
    """Whether bounds show what the functional's sense asks for."""
    if functional["sense"] == "range":
        return bool(np.isfinite(low) and np.isfinite(high))
    return bool(low > 0 if functional["sense"] == ">0" else low >= 0)


def _reads(functionals: list[Functional]) -> tuple[frozenset[int], bool]:
    """Which layers' scores functionals read, and whether they read the output."""
    terms = [term for f in functionals for term in f["terms"]]
    return frozenset(t[2] for t in terms if t[1] not in OUTPUTS), any(t[1] in OUTPUTS for t in terms)
