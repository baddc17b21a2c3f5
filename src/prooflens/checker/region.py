"""The stored region {c + Gα}: its points, the box around it, and whether it is the set that its name says.

A forger who writes fresh hashes can store a smaller set under a ball's or a hull's name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flint import arb, ctx

from prooflens.checker.network import Array, Balls

balls = np.frompyfunc(arb, 1, 1)


@dataclass(frozen=True, eq=False)
class Region:
    """Centre, radii or generators, the factors of the clean input, and the constraints on factors if there are any."""

    center: Array
    radius: Any = None
    generators: Any = None
    A_eq: Any = None
    b_eq: Any = None
    A_ub: Any = None
    b_ub: Any = None
    anchor: Any = None

    @classmethod
    def of(cls, tensors: dict[str, Any]) -> Region:
        """The region of a run."""
        return cls(**{name[9:]: t for name, t in tensors.items() if name.startswith("region/0/")})

    def __post_init__(self) -> None:
        parts = {part is None for part in (self.A_eq, self.b_eq, self.A_ub, self.b_ub)}
        sound = len(parts) == 1 and (self.radius is None) != (self.generators is None)
        if not sound or not np.isfinite(self.half_widths).all() or np.any(self.half_widths < 0):
            raise ValueError("the stored region is damaged")
        if self.anchor is not None and (np.any(np.abs(self.anchor) > 1.0) or not self.meets(self.anchor)):
            raise ValueError("the clean input is not in the stored region")

    @property
    def reference(self) -> Balls:
        """The clean input: the centre, or the point of the anchor."""
        return np.asarray(balls(self.center)) if self.anchor is None else self.point(self.anchor)

    @property
    def eps(self) -> float | None:
        """The largest radius of a ball."""
        return None if self.radius is None else float(self.radius.max())

    def inputs(self, d: int, moved: Sequence[Sequence[int]], radii: Array) -> Region:
        """X, of a region X times the box of free coordinates, which stand behind the first d of each token.

        A coordinate that nothing reads may be anything.

        Args:
            d: how many coordinates the inputs have.
            moved: the tokens at which each free coordinate is read.
            radii: how far each of them moves.

        Raises:
            ValueError: if the region is not such a product.
        """
        read = [number for number, tokens in enumerate(moved) if tokens]
        if self.center.shape[1] == d and not read:
            return self
        wanted = np.zeros((len(read), len(self.center), len(moved)))
        for row, number in enumerate(read):
            wanted[row, list(moved[number]), number] = radii[number]
        right = self.center.shape[1] == d + len(moved) and not self.center[:, d:][:, read].any()
        if self.radius is not None:
            alone = self.A_eq is None and self.anchor is None and all(len(tokens) < 2 for tokens in moved)
            same = right and np.array_equal(self.radius[:, d:][:, read], wanted.sum(0)[:, read])
            if not (alone and same):
                raise ValueError("the region is not all inputs times all values that parts may have")
            return replace(self, center=self.center[:, :d], radius=self.radius[:, :d])
        G = np.asarray(self.generators)
        free = right and ~G[:, :, :d].any((1, 2)) & G[:, :, d:].any((1, 2))
        own = G[free][:, :, d:] if right else G
        boxes = [own[own[:, :, number].any(1)] for number in read] if right else []
        same = right and not G[~free][:, :, d:][:, :, read].any()
        same = same and all(
            len(box) == 1 and np.array_equal(box[0][:, read], want[:, read])
            for box, want in zip(boxes, wanted, strict=True)
        )
        bound = [A for A in (self.A_eq, self.A_ub) if A is not None]
        same = same and not any(A[:, free].any() for A in bound)
        if not same or (self.anchor is not None and self.anchor[free].any()):
            raise ValueError("the region is not all inputs times all values that parts may have")
        cut = {name: getattr(self, name)[:, ~free] for name in ("A_eq", "A_ub") if self.A_eq is not None}
        anchor = None if self.anchor is None else self.anchor[~free]
        return replace(self, center=self.center[:, :d], generators=G[~free][:, :, :d], anchor=anchor, **cut)

    @property
    def half_widths(self) -> Array:
        """Half the width of the box around the region, rounded up."""
        if self.radius is not None:
            return np.asarray(self.radius)
        sums = np.abs(self.generators).sum(0)
        return np.asarray(sums * (1.0 + (len(self.generators) + 2) * 2.0**-52))

    @property
    def n_factors(self) -> int:
        """How many factors there are."""
        return int((self.radius > 0).sum()) if self.generators is None else len(self.generators)

    @property
    def factors(self) -> Array:
        """G as a map from factors to the input [S, d, p]; a point gets one factor that does nothing."""
        if self.n_factors == 0:
            return np.zeros((*self.center.shape, 1))
        if self.generators is not None:
            return np.ascontiguousarray(np.moveaxis(self.generators, 0, -1), dtype=np.float64)
        made = np.zeros((*self.center.shape, self.n_factors))
        made[(*np.nonzero(self.radius > 0), np.arange(self.n_factors))] = self.radius[self.radius > 0]
        return made

    def point(self, alpha: Array) -> Balls:
        """c + Gα, with so many bits that deep networks do not magnify its rounding."""
        with ctx.workprec(2048):
            if self.radius is None:
                return np.asarray(balls(self.center) + np.tensordot(balls(alpha), balls(self.generators), 1))
            move = np.zeros(self.center.shape, dtype=object)
            move[self.radius > 0] = balls(alpha) * self.radius[self.radius > 0]
            return np.asarray(balls(self.center) + move)

    def meets(self, alpha: Array) -> bool:
        """Whether factors meet the constraints, up to the tolerance of the search."""
        if self.A_eq is None:
            return True
        over, off = self.A_ub @ alpha - self.b_ub, self.A_eq @ alpha - self.b_eq
        return bool(np.all(over <= 1e-8) and np.all(np.abs(off) <= 1e-8))

    def is_named(self, label: str) -> bool | None:
        """Whether it is the ball or the hull that the label names; None where that is free text."""
        if match := re.fullmatch(r"(convex )?hull of (\d+) texts", label):
            return self._is_hull(int(match[2]), convex=bool(match[1]))
        if match := re.fullmatch(r"hull of (\d+) prompts", label):
            return self._is_simplex(int(match[1]))
        if label.startswith("segment to "):
            return None if self._is_simplex(2) else False
        match = re.fullmatch(r"ball ε=(.+?)(?: on tokens (\[.*\]))?", label)
        if match is None:
            return None
        try:
            eps, moved = (ast.literal_eval(part) for part in match.groups("..."))
        except (ValueError, SyntaxError):
            return None
        if isinstance(eps, dict):
            moved, eps = list(eps), list(eps.values())
        wanted = np.zeros((len(self.center), 1))
        try:
            wanted[moved, 0] = eps
        except (ValueError, IndexError):  # more or other tokens than there are
            return False
        # Labels have six digits; the exact radius is the column's.
        radius = self._axes()
        if radius is None or self.A_eq is not None or np.any(radius != radius[:, :1]):
            return False
        return bool(np.all(np.abs(radius - wanted) <= 1e-5 * wanted))

    def _axes(self) -> Array | None:
        """Radii, also of generators that move a coordinate each; None of others."""
        if self.radius is not None:
            return np.asarray(self.radius)
        moves = self.generators != 0.0
        alone = moves.sum((1, 2)) == 1
        if not alone.all() or moves.sum(0).max(initial=0) > 1:
            return None
        return np.asarray(np.abs(self.generators).sum(0))

    def _is_hull(self, size: int, convex: bool) -> bool:
        """As many texts, of which the centre is the mean; if convex, α ≥ 0 and Σα = 1."""
        if self.generators is None or len(self.generators) != size or (self.A_eq is not None) != convex:
            return False
        scale = np.abs(self.generators).max() + np.abs(self.center).max()
        if np.abs(self.generators.sum(0)).max() > 1e-9 * scale:
            return False
        wanted = np.ones((1, size)), np.ones(1), -np.eye(size), np.zeros(size)
        held = (self.A_eq, self.b_eq, self.A_ub, self.b_ub)
        return not convex or all(np.array_equal(a, b) for a, b in zip(held, wanted, strict=True))

    def _is_simplex(self, size: int) -> bool:
        """A factor for each prompt but the first, where the anchor is; Σα ≤ 2 − p if there is more than one."""
        p = size - 1
        if self.generators is None or len(self.generators) != p or self.anchor is None:
            return False
        if not np.array_equal(self.anchor, -np.ones(p)):
            return False
        if p == 1:
            return self.A_eq is None
        wanted = np.ones((1, p)), np.array([2.0 - p])
        held = self.A_ub, self.b_ub
        same = self.A_eq is not None and len(self.A_eq) == 0
        return same and all(np.array_equal(a, b) for a, b in zip(held, wanted, strict=True))
