"""Engine `autolirpa`: the library auto_LiRPA on the same forms, where it is installed; its bounds are *estimated*.

The canonical program is written out as a torch module, forms included, in float64, and bounded backwards (CROWN).
`AutoLirpa(method=ALPHA)` is its α-CROWN: the bounds of hidden values are those of CROWN, and the slopes of the last
walk back are searched for, 100 steps or until all lower bounds are above 0 or the time ends. Hidden bounds with slopes
of their own would not fit: their slopes at the products of attention alone take tens of GiB on a vision transformer of
three layers, and the library's default, fewer rows where a ReLU's sign is known, fails on products.

What comes back is not a proof for us: auto_LiRPA does not account for rounding, and its softmax adds 1e-12 where a
proof may not. It is here so that a table can show it beside `crown`, which is the same method with a rounding
account.

auto_LiRPA is not a dependency: https://github.com/Verified-Intelligence/auto_LiRPA (0.7.1 was tried).
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineBase, EngineOptions, register, unknown_steps
from prooflens.engines.relaxations.interval_walk import form_program
from prooflens.models import INPUT, OUTPUT, scores_name
from prooflens.models.held import edit_tables
from prooflens.models.knockouts import knockouts_of
from prooflens.models.program import Program
from prooflens.models.sites import (
    ACTIVATIONS,
    Add,
    Affine,
    AnyStep,
    Elementwise,
    Mix,
    Norm,
    Pool,
    Product,
    Rotary,
    Scores,
    Shift,
    Softcap,
    Softmax,
    Solu,
)
from prooflens.problem import Problem
from prooflens.regions import Region

LIBRARY = "auto_LiRPA"
CROWN, ALPHA = "CROWN", "CROWN-Optimized"
"""The library's names of the methods that are asked for."""

SEARCH = {
    "iteration": 100,
    "lr_alpha": 0.1,
    "early_stop_patience": 100,
    "start_save_best": 0.0,
    "init_alpha": False,
}
"""How α-CROWN searches: the step that α,β-CROWN took in VNN-COMP 2023 for this benchmark, and more steps."""

DENSE = {"sparse_intermediate_bounds": False, "sparse_spec_alpha": False, "sparse_features_alpha": False}
"""Without shortcuts at ReLUs, which fail beside products of two moving values."""
UNSUPPORTED = {"gelu": "the erf form of GELU", "silu": "SiLU", "relu2": "ReLU²"}
"""Activations that auto_LiRPA 0.7.1 cannot relax."""


class Exported(nn.Module):
    """The forms as a function of the factors [1, p], or on balls of the input [1, S, d], in traceable operations."""

    def __init__(self, problem: Problem, program: Program, forms: Forms) -> None:
        super().__init__()
        self.problem, self.program = problem, program
        self.place = None if problem.region.radius is not None else placed(problem.region)
        heads, S = problem.model.architecture.n_heads, problem.n_tokens
        self.reads = {}
        for layer in forms.layers:
            here = forms.layer == layer
            weight = torch.zeros(forms.size, heads, S, S, dtype=torch.float64)
            place = tuple(t[here] for t in (forms.index, forms.head, forms.position, forms.key))
            weight.index_put_(place, forms.weight[here], accumulate=True)
            self.reads[scores_name(layer)] = weight.flatten(1).to(problem.region.center)
        if forms.logits is not None:
            self.reads[OUTPUT] = forms.logits.to(problem.region.center)

    def forward(self, x: Tensor) -> Tensor:
        """Return all forms, shape [1, F]."""
        if self.place is not None:
            x = self.place(x) + self.problem.region.center
        values = {INPUT: x}
        for step in self.program.steps:
            values[step.out] = apply(step, *(values[name] for name in step.inputs))
        parts = [
            nn.functional.linear(values[name].reshape(1, -1), weight) for name, weight in self.reads.items()
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class Dense(nn.Module):
    """Gα by a matrix of all generators."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.shape, self.matrix = region.center.shape, region.dense_generators().flatten(1).T

    def forward(self, x: Tensor) -> Tensor:
        """Return the move of all tokens, shape [1, S, d].

        Args:
            x: the factors, shape [1, p].
        """
        return nn.functional.linear(x, self.matrix).reshape(1, *self.shape)


class Patches(nn.Module):
    """Gα where the last n tokens move by one matrix each, times a size per factor: a box of pixels."""

    def __init__(self, matrix: Tensor, sizes: Tensor, still: int) -> None:
        super().__init__()
        self.matrix, self.sizes = matrix.T, sizes[None]
        self.still = matrix.new_zeros(1, still, matrix.shape[1]) if still else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the move of all tokens, shape [1, S, d].

        Args:
            x: the factors, shape [1, p].
        """
        moved = nn.functional.linear(x.reshape(1, *self.sizes.shape[1:]) * self.sizes, self.matrix)
        return torch.cat((self.still, moved), 1) if self.still is not None else moved


def placed(region: Region) -> nn.Module:
    """Return G as a map that the library walks back through at the least cost.

    Args:
        region: a region with generators.
    """
    runs = region.runs
    S = len(region.center)
    if runs is None or runs.tokens != tuple(range(S - len(runs.tokens), S)):
        return Dense(region)
    if len({block.shape for block in runs.blocks}) > 1:
        return Dense(region)
    blocks = torch.stack(runs.blocks)
    lengths = blocks.norm(dim=-1)
    sizes = lengths / lengths[0]
    if not torch.allclose(blocks, sizes[..., None] * blocks[0], rtol=1e-12, atol=0.0):
        return Dense(region)
    return Patches(blocks[0], sizes, S - len(runs.tokens))


def apply(step: AnyStep, *values: Tensor) -> Tensor:
    """Apply a step to tensors with one leading dimension, without einsum."""
    match step:
        case Affine():
            x = values[0].reshape(1, -1, step.weight.shape[1]) if step.in_dims > 1 else values[0]
            y = nn.functional.linear(x, step.weight, step.bias)
            return y.reshape(1, -1, *step.out_shape) if len(step.out_shape) > 1 else y
        case Norm():
            m = values[0] - values[0].mean(-1, keepdim=True) if step.centred else values[0]
            y = m / torch.sqrt((m * m).mean(-1, keepdim=True) + step.eps)
            y = y if step.weight is None else y * step.weight
            return y if step.bias is None else y + step.bias
        case Scores():
            a = torch.matmul(values[0].permute(0, 2, 1, 3), values[1].permute(0, 2, 3, 1)) * step.scale
            return a if step.bias is None else a + step.bias
        case Softmax():
            return torch.softmax(values[0], -1)
        case Mix():
            return torch.matmul(values[0], values[1].permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        case Elementwise():
            return ACTIVATIONS[step.function](values[0])
        case Pool():
            return (values[0] * step.weights[:, None]).sum(1)
        case Solu():
            return values[0] * torch.softmax(values[0], -1)
        case Add() | Product() | Rotary() | Shift() | Softcap():
            return step(*values)


@contextmanager
def _double() -> Iterator[None]:
    """Make float64 torch's default precision for a while: auto_LiRPA makes constants in the default precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@register("autolirpa")
@dataclass(frozen=True)
class AutoLirpa(EngineBase):
    """Bound the forms by auto_LiRPA's CROWN or α-CROWN, for comparison; the bounds are estimated, not proved.

    Attributes:
        name: the engine's name in the registry.
        guarantee: estimated, because auto_LiRPA does not account for rounding.
        method: auto_LiRPA's name of the method: `CROWN`, or `ALPHA`, which improves lower bounds only.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> score = Forms.of([(0, Row(0, 1, 3), 2, 1.0)], size=1)
        >>> AutoLirpa().refuses(problem, score)  # doctest: +SKIP
        'auto_LiRPA is not installed: pip install git+https://github.com/Verified-Intelligence/auto_LiRPA'
    """

    name: str = "autolirpa"
    guarantee: Guarantee = Guarantee.ESTIMATED
    method: str = CROWN

    def _limits(self, problem: Problem, forms: Forms, options: EngineOptions) -> str | None:
        """Refuse if the library is missing, or cannot do what the model does."""
        if importlib.util.find_spec(LIBRARY) is None:
            return "auto_LiRPA is not installed: pip install git+https://github.com/Verified-Intelligence/auto_LiRPA"
        architecture = problem.model.architecture
        if reason := unknown_steps(architecture, self.name):
            return reason
        if problem.model.device.type != "cpu":
            return "auto_LiRPA traces a model on the CPU and is asked there: model.to('cpu')"
        if problem.region.constraints is not None:
            return "auto_LiRPA is asked about regions without constraints only"
        if edit_tables(problem.model.weights) or architecture.free:
            return "models with parts held at tokens, or with frozen patterns, are not exported to auto_LiRPA"
        hidden = any(knockouts_of(problem.model.weights, layer) for layer in range(architecture.n_layers))
        if hidden or not bool(problem.mask.all()):
            return "auto_LiRPA's softmax takes no mask (causal or padded attention)"
        if architecture.is_rotary or architecture.kv_heads != architecture.n_heads:
            return "rotary positions and grouped heads are not exported to auto_LiRPA"
        deep = max(forms.layers, default=-1) > 0 or forms.logits is not None
        if deep and (lacking := UNSUPPORTED.get(architecture.activation)):
            return f"auto_LiRPA cannot relax {lacking}"
        return None

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Return the library's bounds as they come; ±∞ where it gives none."""
        library = importlib.import_module(LIBRARY)
        region = problem.region
        if region.radius is None:
            x = region.center.new_zeros(1, region.n_factors)
            radius = torch.ones_like(x)
        else:
            x, radius = region.center[None], region.radius[None]
        with _double(), torch.enable_grad():
            model = Exported(problem, form_program(problem, forms), forms)
            norm = library.PerturbationLpNorm(norm=float("inf"), x_L=x - radius, x_U=x + radius)
            box = (library.BoundedTensor(x, norm),)
            bounded = library.BoundedModule(model, torch.empty_like(x), device="cpu")
            with torch.no_grad():
                low, high = bounded.compute_bounds(x=box, method=CROWN)
            if self.method == ALPHA and not bool((low > 0.0).all()):
                hidden = {
                    node.name: (node.lower, node.upper)
                    for node in bounded.nodes()
                    if node.perturbed and node.name != bounded.final_name and torch.is_tensor(node.lower)
                }
                searched = self._search(library, model, box, hidden, options)
                low = torch.maximum(low, searched)
        low, high = low.detach()[0], high.detach()[0]
        return FormBounds(low.nan_to_num(-torch.inf, torch.inf), high.nan_to_num(torch.inf, torch.inf))

    def _search(
        self, library: Any, model: nn.Module, box: Any, hidden: Mapping[str, Any], options: EngineOptions
    ) -> Tensor:
        """Return lower bounds by α-CROWN on given bounds of hidden values; what is found by the deadline counts."""
        left = 1e9 if options.deadline is None else max(0.0, options.deadline - time.monotonic())
        search = {
            **SEARCH,
            "max_time": left,
            "stop_criterion_func": lambda low: low.amin(1, keepdim=True) > 0.0,
        }
        bounded = library.BoundedModule(
            model,
            torch.empty_like(box[0]),
            device="cpu",
            bound_opts={**DENSE, "optimize_bound_args": search},
        )
        bounded.init_alpha(box, bound_upper=False, interm_bounds=hidden)
        found = bounded.compute_bounds(x=box, method=ALPHA, bound_upper=False, interm_bounds=hidden)
        low: Tensor = found[0]
        return low
