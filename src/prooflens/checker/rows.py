"""Judging the rows of a run one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
from flint import arb

from prooflens.checker.claims import OUTPUTS, Functional, keys_of, value
from prooflens.checker.edited import RADII, moved_by
from prooflens.checker.findings import (
    CONFIRMED,
    NOT_CHECKABLE,
    NOTHING_CLAIMED,
    REPROVED,
    WRONG,
    Finding,
    Row,
    WrongError,
    need,
)
from prooflens.checker.network import Balls, Network
from prooflens.checker.pieces import MOST_FACTORS, Pieces
from prooflens.checker.proofs import OutOfTimeError, Prover, Range
from prooflens.checker.query_reader import QueryReader
from prooflens.checker.region import Region

WORTH = {(v, g) for v in ("fails", "unknown") for g in ("proved", "estimated", "none")}
WORTH |= {("holds", "proved"), ("estimated", "estimated"), ("fails", "witness")}
"""Verdicts, and what a row with each may rest on; older runs have no `witness` and say what the bounds are worth."""
PROVED = ("proved", "witness")
"""The words beside which bounds are proved ones."""
BATCH = 8
"""Points that go through the network together."""


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
    prover_kind: type[Prover] = Prover

    def __init__(
        self, net: Network, tensors: dict[str, Any], rows: list[Row], eps: float | None, names: list[str]
    ) -> None:
        self.net, self.tensors = net, tensors
        self.rows = [row | {"claim": json.loads(row["claim"])} for row in rows]
        self.region = Region.of(tensors)
        need(len(self.region.center) == len(rows[0]["tokens"]), "the centre is not of the stated tokens")
        self.inputs = self.region.inputs(net.arch["d_model"], *self._values(len(self.region.center)))
        need(self.inputs.eps == eps, "run.json states another ε")
        self.values: dict[tuple[int, str], list[arb]] = {}
        functionals = [f for row in self.rows for f in row["claim"]["functionals"]]
        self.clean = net.run([self.region.reference], *reads(functionals))[0]
        self.asked = self.reader(net, rows[0]["tokens"], self.clean, names)

    def _values(self, n: int) -> tuple[list[list[int]], Any]:
        """Where free coordinates of the network are read, and how far they move: at which values parts are held."""
        return moved_by(self.net.weights, n), self.net.weights.get(RADII, np.zeros(0))

    def judge_all(self, tell: Callable[[str, float], None]) -> dict[int, Finding]:
        """A finding per row; `tell` hears what is done and how much of it, and may raise `OutOfTimeError`."""
        self._run_points()
        found, share = dict[int, Finding](), 0.0
        told = lambda what: tell(what, share)  # noqa: E731
        self.prover = self.prover_kind(self.net, self.region, told)
        self.pieces = Pieces(self.net, self.region, told, self.prover_kind)
        for number, row in enumerate(self.rows):
            share = number / len(self.rows)
            found[row["row"]] = Finding(row["row"], *self._word(row))
        return found

    def _word(self, row: Row) -> tuple[str, str]:
        try:
            return self._judge(row)
        except WrongError as error:
            return WRONG, str(error)
        except OutOfTimeError:
            return NOT_CHECKABLE, "the time that the check may take is over"
        except MemoryError:
            self.prover.give_up(
                "there is not enough memory for them: give more, or check on a larger machine"
            )
            return NOT_CHECKABLE, f"nothing contradicts it; {self.prover.refusal}"

    def _run_points(self) -> None:
        """The functionals at witnesses, and at the corner of the weakest functional where that may refute a bound."""
        jobs: dict[tuple[frozenset[int], bool], list[tuple[Row, str, Balls]]] = {}
        for row in self.rows:
            functionals = row["claim"]["functionals"]
            layers, output = reads(functionals)
            for kind in ("witness_alpha", "ledger/corner", "lower_corner"):
                alpha = self.tensors.get(f"row/{row['row']}/{kind}")
                # Margins at layer 0 get corners of the checker's own.
                own = layers != {0} or all(t[1] == "score" for f in functionals for t in f["terms"])
                if alpha is not None and functionals and not (kind == "lower_corner" and own):
                    alpha = alpha if alpha.ndim == 1 else alpha[self._weakest(row)]
                    listed = jobs.setdefault((layers, output), [])
                    listed.append((row, kind, self.region.point(alpha)))
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
        clean = self._clean(row, functionals)
        unread = self._about(row, functionals)
        known = [self.values.get((row["row"], k)) for k in ("witness_alpha", "ledger/corner", "lower_corner")]
        # Under constraints neither the centre nor a corner need be in the region: they refute nothing there.
        free = self.region.A_eq is None and row["guarantee"] in PROVED
        for values in [clean, *known] if free else []:
            for f, a, b, v in zip(functionals, low.tolist(), high.tolist(), values or clean, strict=True):
                need(not (v < a or v > b), f"{f['name']} is {float(v):.6g} somewhere, outside its bounds")
        if unread.startswith("query"):
            return NOT_CHECKABLE, unread
        if row["verdict"] == "fails":
            word, note = self._witness(row, functionals)
        elif row["guarantee"] != "proved" or row["verdict"] == "estimated":
            open_ = row["verdict"] == "unknown"
            word, note = (
                (NOTHING_CLAIMED, "the verdict is unknown") if open_ else (NOT_CHECKABLE, "an estimate")
            )
        else:
            word, note = self._prove(row, functionals, low, high)
        return word, f"{note}; {unread}" if unread else note

    def _clean(self, row: Row, functionals: list[Functional]) -> list[arb]:
        """The functionals at the clean input; the stored values must be these."""
        clean = [value(f, self.clean) for f in functionals]
        for v, stored in zip(clean, row["claim"]["clean"], strict=True):
            need(not abs(v - stored) > 1e-6 * (1 + abs(stored)), "the clean values are not the network's")
        return clean

    def _about(self, row: Row, functionals: list[Functional]) -> str:
        """The claim is that of the query and the region the one that is named; else why that cannot be told."""
        label, times, count = row["region"].rpartition(" × [−1, 1]^")
        free = self.region.center.shape[1] - self.inputs.center.shape[1]
        need((count == str(free)) if free else not times, "the region states another box of values")
        named = self.inputs.is_named(label if free else row["region"])
        need(named is not False, "the stored region is not the one that is named")
        place = tuple(row[column] for column in ("layer", "head", "position"))
        try:
            wrong = self.asked.differs(row["query"], place, functionals)
            need(not wrong, wrong)
        except ValueError as error:
            return f"query: {error}"
        except (LookupError, TypeError, AttributeError) as error:
            raise WrongError(f"the claim is not what its query asks for: {error}") from error
        free = ["the region is the stored one: its name is free text"] if not named else []
        if re.search(r"\b(read\(|feature )", row["query"]):
            free.append("the direction is the stored one: its name is free text")
        if re.search(r"\bdla ", row["query"]) and not re.search(r"[<>]=?-?0\.0\b", row["query"]):
            free.append("the scale of the frozen norm is the stored one")
        return "; ".join(free)

    def _consistent(self, row: Row, functionals: list[Functional], low: Any, high: Any) -> None:
        """The table, the tensors, the claim and the verdict must say the same."""
        fit = len(low) == len(high) == len(functionals) and np.all(low <= high)
        need(fit, "the bounds do not fit the claim")
        for column, bound in (("lower", low), ("upper", high)):
            need(
                row[column] in least_of(functionals, bound.tolist()),
                f"column {column} is not the stored bound",
            )
        need(row["eps"] == self.inputs.eps, "the region does not have the stated ε")
        place = [row[column] for column in ("layer", "head", "position")]
        same = place == [None] * 3 or all(term[2:5] == place for f in functionals for term in f["terms"])
        need(same, "the claim is about another row of attention")
        worth = row["verdict"], row["guarantee"]
        need(worth in WORTH, "an estimate or an unknown word is called a verdict")
        least = least_of(functionals, row["claim"]["clean"])
        need(row["clean"] in least, "column clean is not the claim's value")
        first = keys_of(functionals[0]["terms"][0]) if row["top"] is not None else [None]
        need(first == [row["top"]], "column top is not the claim's key")
        if row.get("candidate") is not None:
            side = functionals[0]["terms"][0 if row["query"] == "argmax" else 1]
            need(side[1:] == ["logit", row["candidate"]], "column candidate is not the claim's output")
        holds = row["claim"]["tie"] is None and all(map(_met, functionals, low, high))
        says = {"holds": holds, "unknown": not holds}.get(row["verdict"], True)
        need(says, f"the verdict {row['verdict']!r} does not follow from the stored bounds")
        if row["attack"] is not None and row["guarantee"] in PROVED and len(low):
            # An attack's value is a plain float64 evaluation: this asks for consistency and proves nothing.
            need(row["attack"] >= low.min() - 1e-9, "the attack reached a value below the lower bound")

    def _witness(self, row: Row, functionals: list[Functional]) -> tuple[str, str]:
        name = f"row/{row['row']}"
        values = self.values.get((row["row"], "witness_alpha"))
        need(values is not None, "a failing claim needs a witness")
        alpha, x = self.tensors[f"{name}/witness_alpha"], self.tensors[f"{name}/witness"]
        need(np.all(np.abs(alpha) <= 1.0), "the witness lies outside the region")
        if not self.region.meets(alpha):
            return NOT_CHECKABLE, "the witness's factors break the constraints: others may give it"
        for a, b in zip(self.region.point(alpha).ravel(), x.ravel().tolist(), strict=True):
            need(abs(a - b) < 1e-9 * (1 + abs(b)), "the stored witness is not the point of its factors")
        return self._breaks(functionals, values or [])

    def _breaks(self, functionals: list[Functional], values: list[arb]) -> tuple[str, str]:
        """Whether values of the functionals break the claim of the row that was read last.

        A stored threshold may be stricter than the query's: a witness has to break the query itself.
        """
        moves = self.asked.moves or [arb(0)] * len(functionals)
        found = [(f, v - over) for f, v, over in zip(functionals, values, moves, strict=True)]
        for f, v in found:
            if (f["sense"] == ">0" and v <= 0) or (f["sense"] == ">=0" and v < 0):
                return CONFIRMED, f"{f['name']} is {float(v):.6g}, claimed {f['sense']}"
        met = all(v > 0 or (f["sense"] == ">=0" and v >= 0) for f, v in found)
        need(not met, "the witness does not break the claim")
        return NOT_CHECKABLE, "the ball around the witness's value contains 0"

    def _prove(self, row: Row, functionals: list[Functional], low: Any, high: Any) -> tuple[str, str]:
        """Own bounds of every functional: they must not contradict the stored ones, and may prove the verdict."""
        note = self._ledger(row, low) or self._cover(row, low)
        if row["verdict"] != "holds":
            # Nothing is claimed. At layer 0, where a look costs little, the bounds must be true all the same.
            if reads(functionals) == (frozenset({0}), False):
                for f, a, b in zip(functionals, low, high, strict=True):
                    self._agrees(f, a, b, self.prover.bounds(f, tight=False))
            return NOTHING_CLAIMED, "the verdict is unknown"
        proved, weakest, ranged = list[bool](), np.inf, ""
        for f, a, b in zip(functionals, low, high, strict=True):
            try:
                own = self._own(f, a, b)
            except (ValueError, ArithmeticError) as error:  # a proof that fails contradicts nothing
                return NOT_CHECKABLE, f"the checker's proof failed: {str(error) or type(error).__name__}"
            proved.append(_shows(f, a, b, own))
            weakest = min(weakest, own.low)
            if f["sense"] == "range" and np.isfinite([own.low, own.high]).all():
                ranged = f"own range {_told(own)}"
        if all(proved):
            own_bound = ranged or f"own bound {weakest:.6g}"
            return REPROVED, own_bound if functionals else "true by the mask"
        weaker = (
            "the checker's bounds are weaker"
            if weakest > -np.inf
            else self.prover.refusal or "nothing is known"
        )
        return NOT_CHECKABLE, note or (f"{ranged}: the stored one is not around it" if ranged else weaker)

    def _own(self, f: Functional, a: float, b: float) -> Range:
        """The checker's bounds, the tight ones where the others do not show what is claimed."""
        own = self.prover.bounds(f, tight=False)
        self._agrees(f, a, b, own)
        if not _shows(f, a, b, own):
            own = self.prover.bounds(f, tight=True)
            self._agrees(f, a, b, own)
        few = 0 < self.region.n_factors <= MOST_FACTORS and not self.prover.refusal
        if few and not _shows(f, a, b, own):
            found, _ = self.pieces.bounds(f, lambda on_piece: _shows(f, a, b, on_piece))
            own = found if _shows(f, a, b, found) else own
        return own

    def _agrees(self, f: Functional, a: float, b: float, own: Range) -> None:
        ball = self.region.radius is not None and self.region.A_eq is None
        wrong = (ball and own.reached < a) or own.high < a or own.low > b
        need(not wrong, f"the bounds of {f['name']} are contradicted")

    def _cover(self, row: Row, low: Any) -> str:
        """Of a region that was cut: the boxes cover [−1, 1]^k, and no bound on one of them is below the row's."""
        name = f"row/{row['row']}/cover"
        if f"{name}/low" not in self.tensors:
            return ""
        first, last, lower = (self.tensors[f"{name}/{part}"] for part in ("low", "high", "lower"))
        factors = self.region.n_factors
        fit = first.shape == last.shape == (len(lower), factors) and lower.shape[1] == len(low)
        need(fit, "the pieces do not fit the region and the claim")
        need(covers(first, last), "the pieces do not cover the region")
        need(np.all(lower >= low[None]), "a piece has a lower bound below the row's")
        return f"{len(lower)} pieces cover the region; their proofs are not repeated"

    def _ledger(self, row: Row, low: Any) -> str:
        """Of a ledger: f ≥ value − Σ penalty, penalties ≥ 0, and the value bounds f at its corner from below."""
        name, k = f"row/{row['row']}/ledger", self._weakest(row) if len(low) else 0
        if f"{name}/corner" not in self.tensors:
            return ""
        parts = ("corner", "value", "penalty")
        corner, at_corner, penalty = (self.tensors[f"{name}/{part}"] for part in parts)
        need(np.all(np.abs(corner) <= 1.0), "the ledger's corner lies outside the region")
        need(np.all(penalty >= 0.0), "a penalty of the ledger is negative")
        sums = zip(low.tolist(), at_corner.tolist(), penalty.tolist(), strict=True)
        need(all(_adds_up(*each) for each in sums), "the ledger does not add up")
        there = self.values[row["row"], "ledger/corner"][k]
        need(not there < float(at_corner[k]), "the ledger's value is too high")
        if not float(there.rad()) < 1e-6:
            return "sum confirmed; the network's value at the corner is not known well enough"
        return "sum and corner value confirmed; curvature not re-proved"


def _adds_up(bound: float, value: float, penalties: list[float]) -> bool:
    """bound ≤ value − Σ penalties, exactly; a bound of −∞ says nothing."""
    if bound == -np.inf:
        return True
    known = np.isfinite([bound, value, *penalties]).all()
    return bool(known and Fraction(bound) <= Fraction(value) - sum(map(Fraction, penalties)))


def least_of(functionals: list[Functional], values: list[float]) -> tuple[float | None, float | None]:
    """The smallest of some values as a column has it: without what the mask decides, or (in older runs) with it."""
    read = [v for f, v in zip(functionals, values, strict=True) if f["terms"]]
    low, every = min(read, default=np.inf), min(values, default=np.inf)
    return (float(low) if np.isfinite(low) else None, float(every) if np.isfinite(every) else None)


def _met(functional: Functional, low: float, high: float) -> bool:
    """Whether bounds show what the functional's sense asks for."""
    if functional["sense"] == "range":
        return bool(np.isfinite(low) and np.isfinite(high))
    return bool(low > 0 if functional["sense"] == ">0" else low >= 0)


def _shows(functional: Functional, low: float, high: float, own: Range) -> bool:
    """Whether own bounds show what is claimed; of a range, that it lies in the stored one."""
    if functional["sense"] == "range":
        return bool(own.low >= low and own.high <= high)
    return _met(functional, own.low, own.high)


def _told(own: Range) -> str:
    """A range in eight digits, rounded outward."""
    low, high = (
        Context(prec=8, rounding=toward).create_decimal(Decimal(end))
        for end, toward in ((own.low, ROUND_FLOOR), (own.high, ROUND_CEILING))
    )
    return f"{low} to {high}"


def reads(functionals: list[Functional]) -> tuple[frozenset[int], bool]:
    """Which layers' scores functionals read, and whether they read the output."""
    terms = [term for f in functionals for term in f["terms"]]
    return frozenset(t[2] for t in terms if t[1] not in OUTPUTS), any(t[1] in OUTPUTS for t in terms)
