"""Pictures of two-dimensional sets and their enclosures. Needs matplotlib (`pip install prooflens[viz]`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from prooflens.errors import SetError
from prooflens.sets.arrays import as_float
from prooflens.sets.constrained import ConstrainedPolynomialZonotope
from prooflens.sets.enclose import zonotope_enclosure
from prooflens.sets.factors import sample
from prooflens.sets.interval import Interval
from prooflens.sets.linear import affine_map
from prooflens.sets.search import constrained_enclosure
from prooflens.sets.zonotope import Zonotope

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(
    z: ConstrainedPolynomialZonotope,
    *,
    dims: tuple[int, int] = (0, 1),
    points: int = 20_000,
    enclosures: bool = True,
    seed: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw points of the set in two of its coordinates, with its zonotope and interval enclosures as outlines.

    The points come from sampled feasible factors, so they lie in the set and show it from inside; the outlines are
    proved to contain it.

    Args:
        z: the set.
        dims: the two coordinates to draw.
        points: how many points to draw.
        enclosures: whether to draw the outlines.
        seed: seed of the sample.
        ax: matplotlib axes to draw on; None for a new figure.

    Returns:
        The axes.

    Raises:
        SetError: if the set does not have these coordinates, or matplotlib is missing.
    """
    if z.dim <= max(dims) or min(dims) < 0 or dims[0] == dims[1]:
        raise SetError(f"cannot draw coordinates {dims} of a set of dimension {z.dim}")
    axes = _new_axes() if ax is None else ax
    M = torch.zeros((2, z.dim), dtype=torch.float64)
    M[0, dims[0]] = M[1, dims[1]] = 1.0
    flat = affine_map(
        ConstrainedPolynomialZonotope(
            as_float(z.c), as_float(z.G), z.E, as_float(z.GI), as_float(z.A), as_float(z.b), z.R, z.ids, z.box
        ),
        M,
    )
    cloud = sample(flat, points, torch.Generator().manual_seed(seed)).numpy()
    axes.scatter(
        cloud[:, 0], cloud[:, 1], s=2, linewidths=0, alpha=0.5, color="#4477aa", label="points of the set"
    )
    if enclosures:
        for corners, name, colour in (
            (zonotope_outline(zonotope_enclosure(flat)), "zonotope", "#ee6677"),
            (box_outline(constrained_enclosure(flat)), "interval", "#228833"),
        ):
            closed = np.concatenate([corners, corners[:1]])
            axes.plot(closed[:, 0], closed[:, 1], color=colour, linewidth=1.2, label=f"{name} enclosure")
    axes.set_xlabel(f"x{dims[0]}")
    axes.set_ylabel(f"x{dims[1]}")
    axes.legend(frameon=False, fontsize="small")
    return axes


def zonotope_outline(zonotope: Zonotope) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the corners of a two-dimensional zonotope in order, from its generators sorted by angle.

    Example:
        >>> zonotope_outline(Zonotope([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]])).tolist()
        [[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]
    """
    if zonotope.dim != 2:
        raise SetError(f"an outline needs two dimensions, not {zonotope.dim}")
    c, G = as_float(zonotope.c).numpy(), as_float(zonotope.G).numpy()
    upward = np.where((G[1] < 0) | ((G[1] == 0) & (G[0] < 0)), -G, G)
    steps = upward[:, np.argsort(np.arctan2(upward[1], upward[0]))]
    start = c - steps.sum(axis=1)
    half = start[:, None] + 2.0 * np.cumsum(np.concatenate([np.zeros((2, 1)), steps], axis=1), axis=1)
    return np.concatenate([half.T, 2.0 * c - half.T[1:-1]])


def box_outline(box: Interval) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the four corners of a two-dimensional box, in order."""
    (left, low), (right, high) = as_float(box.lower).tolist(), as_float(box.upper).tolist()
    return np.array([[left, low], [right, low], [right, high], [left, high]])


def _new_axes() -> Axes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetError("pictures need matplotlib: pip install prooflens[viz]") from error
    # A figure of its own, not pyplot's: nothing global, and no window system is asked for.
    return Figure(figsize=(5.0, 4.0), layout="constrained").subplots()
