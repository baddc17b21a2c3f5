"""Polynomial zonotopes and constrained polynomial zonotopes (paper, Eq. `cpz`; Kochdumper & Althoff 2021, 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.errors import SetError
from prooflens.sets.arrays import is_rational, parse, zeros
from prooflens.sets.interval import Interval

_next_id = 1


def fresh_ids(count: int) -> tuple[int, ...]:
    """Return ids that no set of this process carries yet.

    Two sets that share an id share a factor, so ids must not repeat. Ids are unique within a process; sets that were
    made in different processes must be given ids by hand before they are merged.

    Args:
        count: how many ids to return.
    """
    global _next_id
    minted = tuple(range(_next_id, _next_id + count))
    _next_id += count
    return minted


@dataclass(frozen=True, eq=False, init=False)
class ConstrainedPolynomialZonotope:
    """{ c + Σ_i (∏_k α_k^{E_ki}) G_·i + GI β  |  Σ_j (∏_k α_k^{R_kj}) A_·j = b,  α ∈ [−1,1]ᵖ, β ∈ [−1,1]ᵐ } ∩ box.

    Arrays are float64 tensors, or object arrays of Fractions.

    Attributes:
        c: the centre, shape [n].
        G: dependent generators as columns, shape [n, h].
        E: their exponents, shape [p, h]; if left out, every generator has a factor of its own (a zonotope).
        GI: independent generators, shape [n, m].
        A: coefficients of the constraints, shape [q, r].
        b: right-hand sides of the constraints, shape [q].
        R: exponents of the constraints, shape [p, r].
        ids: one label per dependent factor. Factors with equal ids are the same variable in every set.
        box: side information, an enclosure that every hull is intersected with (`tighten_independent`); None for the
            whole space.

    Raises:
        SetError: if shapes do not fit together, or an entry is not finite.

    Example:
        >>> parabola = ConstrainedPolynomialZonotope([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [[1, 2]])  # (α, α²)
        >>> parabola
        ConstrainedPolynomialZonotope(dim=2, factors=1, dependent=2, independent=0, constraints=0)
    """

    c: Float[Tensor, " n"]
    G: Float[Tensor, "n h"]
    E: Int[Tensor, "p h"]
    GI: Float[Tensor, "n m"]
    A: Float[Tensor, "q r"]
    b: Float[Tensor, " q"]
    R: Int[Tensor, "p r"]
    ids: tuple[int, ...]
    box: Interval | None

    def __init__(
        self,
        c: Any,
        G: Any = None,
        E: Any = None,
        GI: Any = None,
        A: Any = None,
        b: Any = None,
        R: Any = None,
        ids: Any = None,
        box: Interval | None = None,
    ) -> None:
        centre = parse(c, "c")
        if len(centre.shape) != 1:
            raise SetError(f"c must be a vector, not of shape {tuple(centre.shape)}")
        n = int(centre.shape[0])
        generators = zeros((n, 0), centre) if G is None else parse(G, "G")
        independent = zeros((n, 0), centre) if GI is None else parse(GI, "GI")
        exponents = _identity_exponents(generators) if E is None else _parse_exponents(E, "E")
        p = int(exponents.shape[0])
        lhs = zeros((0, 0), centre) if A is None else parse(A, "A")
        rhs = zeros((len(lhs),), centre) if b is None else parse(b, "b")
        powers = torch.zeros((p, 0), dtype=torch.int64) if R is None else _parse_exponents(R, "R")
        labels = fresh_ids(p) if ids is None else _parse_ids(ids)
        _check_matrix(
            generators, (n, int(exponents.shape[1])), "G", "a row per coordinate, a column per column of E"
        )
        _check_matrix(independent, (n, None), "GI", "a row per coordinate of c")
        _check_matrix(
            lhs, (len(rhs), int(powers.shape[1])), "A", "a row per entry of b, a column per column of R"
        )
        if len(rhs.shape) != 1:
            raise SetError(f"b must be a vector, not of shape {tuple(rhs.shape)}")
        if powers.shape[0] != p:
            raise SetError(f"R has {powers.shape[0]} rows, but there are {p} factors (the rows of E)")
        if len(labels) != p:
            raise SetError(f"{len(labels)} ids for {p} factors")
        if box is not None and tuple(box.lower.shape) != (n,):
            raise SetError(f"the box has shape {tuple(box.lower.shape)}, but the set lies in dimension {n}")
        if len({is_rational(x) for x in (centre, generators, independent, lhs, rhs) if _entries(x)}) > 1:
            raise SetError("a set is either all float64 or all rational, not a mixture")
        _register(labels)
        for name, value in zip(
            ("c", "G", "E", "GI", "A", "b", "R", "ids", "box"),
            (centre, generators, exponents, independent, lhs, rhs, powers, labels, box),
            strict=True,
        ):
            object.__setattr__(self, name, value)

    @property
    def dim(self) -> int:
        """The dimension of the space, n."""
        return int(self.c.shape[0])

    @property
    def factors(self) -> int:
        """The number of dependent factors α, p."""
        return int(self.E.shape[0])

    @property
    def dependent(self) -> int:
        """The number of dependent generators, h: with `independent`, what the paper's tables count per stage."""
        return int(self.G.shape[1])

    @property
    def independent(self) -> int:
        """The number of independent generators, m (the paper's `G_I` count)."""
        return int(self.GI.shape[1])

    @property
    def constraints(self) -> int:
        """The number of equality constraints on the factors, q."""
        return int(self.A.shape[0])

    @property
    def order(self) -> float:
        """The zonotope order, (h + m)/n."""
        return (self.dependent + self.independent) / max(self.dim, 1)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(dim={self.dim}, factors={self.factors}, dependent={self.dependent}, "
            f"independent={self.independent}, constraints={self.constraints})"
        )


class PolynomialZonotope(ConstrainedPolynomialZonotope):
    """{ c + Σ_i (∏_k α_k^{E_ki}) G_·i + GI β | α ∈ [−1,1]ᵖ, β ∈ [−1,1]ᵐ }: no constraints, and no box.

    An operation on polynomial zonotopes alone gives a polynomial zonotope; with a constrained set among its arguments
    it gives a constrained set.

    Example:
        >>> PolynomialZonotope([0.0], [[1.0, 2.0]], [[1, 2]], GI=[[0.5]])  # α + 2α² + ½β
        PolynomialZonotope(dim=1, factors=1, dependent=2, independent=1, constraints=0)
    """

    def __init__(self, c: Any, G: Any = None, E: Any = None, GI: Any = None, ids: Any = None) -> None:
        super().__init__(c, G, E, GI, ids=ids)


def rebuild(
    parents: tuple[ConstrainedPolynomialZonotope, ...],
    c: Tensor,
    G: Tensor,
    E: Tensor,
    GI: Tensor,
    A: Tensor,
    b: Tensor,
    R: Tensor,
    ids: tuple[int, ...],
    box: Interval | None = None,
) -> ConstrainedPolynomialZonotope:
    """Make the result of an operation: a polynomial zonotope if every parent is one, else a constrained one.

    The other arguments are the fields of `ConstrainedPolynomialZonotope`.

    Args:
        parents: the sets that the operation was applied to.
        c: the centre.
        G: dependent generators.
        E: their exponents.
        GI: independent generators.
        A: coefficients of the constraints.
        b: right-hand sides of the constraints.
        R: exponents of the constraints.
        ids: one label per factor.
        box: side information; None for the whole space.
    """
    if all(isinstance(parent, PolynomialZonotope) for parent in parents):
        return PolynomialZonotope(c, G, E, GI, ids)
    return ConstrainedPolynomialZonotope(c, G, E, GI, A, b, R, ids, box)


def replaced(z: ConstrainedPolynomialZonotope, **changes: Any) -> ConstrainedPolynomialZonotope:
    """Return z with some fields changed; the new set is checked like any other."""
    fields = {name: getattr(z, name) for name in ("c", "G", "E", "GI", "A", "b", "R", "ids", "box")} | changes
    return rebuild((z,), **fields)


def _parse_exponents(value: Any, name: str) -> Tensor:
    tensor = torch.as_tensor(np.asarray(value) if not isinstance(value, Tensor) else value)
    if tensor.numel() == 0:
        tensor = tensor.to(torch.int64)
    if tensor.is_complex() or not bool((tensor == tensor.to(torch.int64)).all()):
        raise SetError(f"{name} must hold integers")
    if len(tensor.shape) != 2:
        raise SetError(f"{name} must be a matrix, a row per factor; it has shape {tuple(tensor.shape)}")
    if bool((tensor < 0).any()):
        raise SetError(f"{name} must not hold negative exponents")
    return tensor.to(torch.int64).cpu()


def _parse_ids(value: Any) -> tuple[int, ...]:
    try:
        labels = tuple(int(label) for label in value)
    except (TypeError, ValueError) as error:
        raise SetError(f"ids must be integers, one per factor: {error}") from error
    if len(set(labels)) != len(labels):
        raise SetError("ids must not repeat: one id is one factor")
    if any(label < 0 for label in labels):
        raise SetError("ids must not be negative")
    return labels


def _identity_exponents(generators: Tensor) -> Tensor:
    """Return the exponents of a zonotope: every generator has a factor of its own."""
    if len(generators.shape) != 2:
        raise SetError(f"G must be a matrix, not of shape {tuple(generators.shape)}")
    return torch.eye(int(generators.shape[1]), dtype=torch.int64)


def _check_matrix(value: Tensor, shape: tuple[int, int | None], name: str, rule: str) -> None:
    rows, columns = shape
    fits = len(value.shape) == 2 and value.shape[0] == rows and columns in (None, value.shape[1])
    if not fits:
        wanted = f"{rows} × {'any' if columns is None else columns}"
        raise SetError(f"{name} must be {wanted} ({rule}); it has shape {tuple(value.shape)}")


def _entries(value: Tensor) -> int:
    return int(np.prod(value.shape))


def _register(labels: tuple[int, ...]) -> None:
    global _next_id
    _next_id = max(_next_id, max(labels, default=0) + 1)
