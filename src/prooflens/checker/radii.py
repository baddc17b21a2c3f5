"""Judging radii: the claim is proved again on the ball of the certified radius, the breaking point run in balls."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from prooflens.checker.claims import Functional, value
from prooflens.checker.findings import CONFIRMED, NOT_CHECKABLE, NOTHING_CLAIMED, REPROVED, Finding, Row, need
from prooflens.checker.network import Balls, Network
from prooflens.checker.region import Region, balls
from prooflens.checker.rows import BATCH, RowChecker, least_of, reads

ROUNDING = Fraction(1, 2**50)
"""A breaking point is a rounded one: it may be further away by so much of its coordinates."""


def judge_radii(
    net: Network,
    tensors: dict[str, Any],
    rows: list[Row],
    names: list[str],
    tell: Callable[[str, float], None],
) -> dict[int, Finding]:
    """A finding per row; rows with one radius and one set of moving tokens share a proof.

    Args:
        net: the network.
        tensors: the ball of radius 1 around the prompt, and the breaking points.
        rows: the rows with their claims.
        names: the names of the directions that are read, if the network ends at a hook.
        tell: hears what is done and how much of it, and may raise `OutOfTimeError`.
    """
    unit = Region.of(tensors)
    sound = unit.radius is not None and unit.A_eq is None and np.isin(unit.radius, (0.0, 1.0)).all()
    need(sound and np.all(unit.radius == unit.radius[:, :1]), "the stored region is not a ball of radius 1")
    groups: dict[tuple[float | None, int | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["certified"], row["token"]), []).append(row)
    found: dict[int, Finding] = {}
    for (certified, token), group in groups.items():
        moved = unit.radius[:, 0] > 0
        if token is not None:
            need(0 <= token < len(moved) and moved[token], "a token moves that does not in the stored region")
            moved = np.arange(len(moved)) == token
        need(certified is None or 0 <= certified < np.inf, "a radius is no number")
        label = "ball" if token is None else f"ball on token {token}"
        need(all(row["region"] == label for row in group), "the rows name another region")
        checker = RadiusChecker(net, unit.center, moved, tensors, group, certified or 1.0, names)
        done = len(found) / len(rows)
        part = len(group) / len(rows)
        found |= checker.judge_all(lambda what, share, at=done, of=part: tell(what, at + of * share))  # type: ignore[misc]
    return found


class RadiusChecker(RowChecker):
    """The rows of one certified radius; nothing is proved where that is 0."""

    def __init__(
        self,
        net: Network,
        center: Any,
        moved: Any,
        tensors: dict[str, Any],
        rows: list[Row],
        eps: float,
        names: list[str],
    ) -> None:
        self.moved = moved
        named = f"ball ε={eps!r}" + ("" if moved.all() else f" on tokens {np.nonzero(moved)[0].tolist()}")
        ball = {
            "region/0/center": center,
            "region/0/radius": np.where(moved[:, None], eps, np.zeros_like(center)),
        }
        held = {name: tensor for name, tensor in tensors.items() if not name.startswith("region/")}
        super().__init__(net, held | ball, [row | {"region": named} for row in rows], eps, names)

    def _run_points(self) -> None:
        """The functionals at the breaking points."""
        points: dict[tuple[frozenset[int], bool], list[tuple[Row, Balls]]] = {}
        for row in self.rows:
            functionals = row["claim"]["functionals"]
            if (x := self.tensors.get(f"row/{row['row']}/witness")) is not None and functionals:
                need(x.shape == self.region.center.shape, "a breaking point has another shape than the input")
                points.setdefault(reads(functionals), []).append((row, balls(x)))
        for asked, listed in points.items():
            for start in range(0, len(listed), BATCH):
                batch = listed[start : start + BATCH]
                found = self.net.run([point for _, point in batch], *asked)
                for (row, _), values in zip(batch, found, strict=True):
                    self.values[row["row"], "witness"] = [
                        value(f, values) for f in row["claim"]["functionals"]
                    ]

    def _judge(self, row: Row) -> tuple[str, str]:
        functionals, certified, attack = row["claim"]["functionals"], row["certified"], row["attack"]
        clean = self._clean(row, functionals)
        need(
            row["clean"] in least_of(functionals, row["claim"]["clean"]),
            "column clean is not the claim's value",
        )
        unread = self._about(row, functionals)
        if unread.startswith("query"):
            return NOT_CHECKABLE, unread
        tie = row["claim"]["tie"]
        need(tie is None or not certified, "a tie is called proved")
        need(
            attack is None or certified is None or certified <= attack,
            "it is broken where it is called proved",
        )
        if attack == 0.0:
            broken = any(
                v < 0 or (f["sense"] == ">0" and v <= 0) for f, v in zip(functionals, clean, strict=True)
            )
            return (CONFIRMED, "the clean input breaks it") if broken else (NOT_CHECKABLE, "a value near 0")
        word, note = NOTHING_CLAIMED, tie or "no radius is proved"
        if attack is not None:
            word, note = self._broken(row, functionals)
        if certified is None:
            need(not any(f["terms"] for f in functionals), "a claim that reads the network has no radius")
            return REPROVED, "true by the mask"
        if certified > 0.0:
            open_ = np.full(len(functionals), np.inf)
            proved, own = self._prove(row | {"verdict": "holds"}, functionals, -open_, open_)
            word, note = proved, own if attack is None else f"{own}; at {attack:.6g}: {note}"
        return word, f"{note}; {unread}" if unread else note

    def _broken(self, row: Row, functionals: list[Functional]) -> tuple[str, str]:
        """The breaking point is as near as the row says, moves what may move, and breaks the claim."""
        values = self.values.get((row["row"], "witness"))
        need(values is not None, "a radius that is broken needs a point that breaks it")
        x, center = self.tensors[f"row/{row['row']}/witness"], self.region.center
        need(np.array_equal(x[~self.moved], center[~self.moved]), "the breaking point moves another token")
        most = Fraction(row["attack"])
        for a, b in zip(x[self.moved].ravel().tolist(), center[self.moved].ravel().tolist(), strict=True):
            far, spare = abs(Fraction(a) - Fraction(b)), ROUNDING * (abs(Fraction(a)) + abs(Fraction(b)))
            need(far <= most + spare, "the breaking point is further away than the row says")
        return self._breaks(functionals, values or [])

    def _ledger(self, row: Row, low: Any) -> str:
        """Radii keep no ledgers."""
        return ""
