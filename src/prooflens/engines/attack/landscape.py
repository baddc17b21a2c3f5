"""What the search of `attack` evaluates: values of a model at points of a region, as functions of the factors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.attack.targets import Targets
from prooflens.models import INPUT, OUTPUT, Transformer, scores_name
from prooflens.models.program import Program
from prooflens.models.sites import Affine, AnyStep, Scores
from prooflens.problem import Problem
from prooflens.regions import Region

CHUNK_ELEMENTS = 2**24
"""How many numbers of the forward pass are held at a time (128 MiB in float64)."""


@dataclass(frozen=True, eq=False)
class Landscape:
    """The values that targets read, as functions of the factors, in one precision."""

    problem: Problem
    region: Region
    program: Program
    layers: tuple[int, ...]
    output: bool
    centers: Float[Tensor, "P S d"] | None = None
    """Of several prompts: their inputs, about which the region, whose own centre is 0, is put."""

    @classmethod
    def of(cls, problem: Problem, layers: tuple[int, ...], output: bool, model: Transformer) -> Landscape:
        """Cut the program at the deepest value that is needed.

        Args:
            problem: the model and the region.
            layers: the layers whose scores are read.
            output: whether the output is read.
            model: the problem's model, in the precision of the search.
        """
        wanted = [scores_name(problem.model.check_layer(layer)) for layer in layers]
        wanted += [OUTPUT] if output else []
        program = model.program(problem.n_tokens, wanted or INPUT, problem.padding)
        return cls(problem, problem.region.to(dtype=model.dtype), program, layers, output)

    def about(self, centers: Float[Tensor, "P S d"]) -> Landscape:
        """Return the landscape of several prompts of one length, in regions that are alike but for their centres."""
        region = replace(self.region, center=torch.zeros_like(self.region.center), anchor=None)
        return replace(self, region=region, centers=centers.to(self.region.center))

    def point(self, alpha: Float[Tensor, "T R p"], prompts: Int[Tensor, " N"]) -> Float[Tensor, "N R S d"]:
        """Return the points of factors, each row about its own prompt; one row of factors serves all prompts."""
        x = self.region.point(alpha)
        return x if self.centers is None else x + self.centers[prompts][:, None]

    def observe(
        self, x: Float[Tensor, "... S d"]
    ) -> tuple[dict[int, Float[Tensor, "... H S S"]], Float[Tensor, "... C"] | None]:
        """Return scores and outputs at points; differentiable."""
        names = {layer: scores_name(layer) for layer in self.layers}
        found = self.program.run(x, [*names.values(), *([OUTPUT] if self.output else [])])
        output = self.problem.read_output(found[OUTPUT]) if self.output else None
        return {layer: found[name] for layer, name in names.items()}, output

    def of_one_head(self, head: int) -> Landscape:
        """Return the landscape with only one head in the last layer: its query and key maps and position bias."""
        attention = scores_name(self.layers[-1]).rsplit(".", 1)[0]
        n_heads = self.problem.model.architecture.n_heads
        split = {f"{attention}.hook_{name}{end}" for name in "qk" for end in ("", "_normalized")}
        steps: list[AnyStep] = []
        for step in self.program.steps:
            if isinstance(step, Affine) and step.out in split:
                heads, width = step.out_shape
                first = head * heads // n_heads * width
                bias = None if step.bias is None else step.bias[first : first + width]
                step = replace(
                    step, weight=step.weight[first : first + width], bias=bias, out_shape=(1, width)
                )
            elif isinstance(step, Scores) and step.out.startswith(attention) and step.bias is not None:
                step = replace(step, bias=step.bias[head : head + 1])
            steps.append(step)
        return replace(self, program=replace(self.program, steps=tuple(steps)))

    @cached_property
    def capacity(self) -> int:
        """How many points fit into one chunk."""
        with torch.no_grad():
            values = self.program.run(self.region.center)
        return max(1, CHUNK_ELEMENTS // sum(value.numel() for value in values.values()))

    def descent(
        self, targets: Targets, alpha: Float[Tensor, "T R p"]
    ) -> tuple[Float[Tensor, "T R"], Float[Tensor, "T R p"]]:
        """Return values and gradients of every target at its own points."""
        alpha = alpha.detach().requires_grad_()
        with torch.enable_grad():
            values = targets.values(*self.observe(self.point(alpha, targets.prompt)))
            (gradient,) = torch.autograd.grad(values.sum(), alpha)
        return values.detach(), gradient if self._tangent is None else gradient @ self._tangent

    @cached_property
    def _tangent(self) -> Float[Tensor, "p p"] | None:
        """The projection onto the directions that keep the equality constraints."""
        if self.region.constraints is None:
            return None
        A = self.region.constraints.A_eq
        across: Tensor = torch.linalg.pinv(A) @ A
        return torch.eye(A.shape[1]).to(A) - across

    def direction(self, slope: Float[Tensor, "T R p"]) -> Float[Tensor, "T R p"]:
        """Return where a step of size 1 goes: to a corner of the box or, with constraints, along the slope itself."""
        if self._tangent is None:
            return slope.sign()
        return slope / slope.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(slope.dtype).tiny)

    def values(self, targets: Targets, alpha: Float[Tensor, "T R p"]) -> Float[Tensor, "T R"]:
        """Return the values of every target at its own points, or of all at the same factors: those of the one row."""
        rows, prompts = None, targets.prompt
        if len(alpha) == 1 and self.centers is not None:
            prompts, rows = prompts.unique(return_inverse=True)
        with torch.no_grad():
            return targets.values(*self.observe(self.point(alpha, prompts)), rows)
