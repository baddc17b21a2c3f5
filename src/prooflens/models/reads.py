"""Readouts: a model whose outputs are linear functions of one value inside another model, at one position.

    y = W h + b,     h the value of a hook (`blocks.8.hook_resid_post`, `blocks.8.mlp.hook_pre`, …) at a token,

is the output of the model that ends there. A probe, a neuron, a feature of a dictionary and a direction of the residual
stream are rows of W. Whatever can be asked of outputs can be asked of such a model: it has a name and a fingerprint of
its own, and every engine walks its program.

Two values may be read at once, y = W h + W' h' + b, each at its own hook and token (`read_beside`): the columns of W'
stand behind those of W. The program runs to the later hook, and W' h' is carried beside the stream from the earlier one
on, so that both are functions of the same factors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.program_blocks import Builder
from prooflens.models.sites import Add, Affine, AnyStep, Pool, Rotary
from prooflens.models.spread import STREAM

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer

READ = "read.weight"
"""The directions of a model that is a readout, one in each row."""


@dataclass(frozen=True)
class Hook:
    """A value that can be read.

    Attributes:
        name: TransformerLens' name.
        layer: the block that makes it.
        width: how many coordinates it has at a token.
        dims: over how many dimensions they are spread.
    """

    name: str
    layer: int
    width: int
    dims: int = 1

    @property
    def is_mixed(self) -> bool:
        """Whether it is made of other tokens' values and not yet added to the stream."""
        return self.name.endswith(("attn.hook_z", "hook_attn_out"))


def find_hook(architecture: Architecture, name: str) -> Hook:
    """Return what is known of a hook.

    Args:
        architecture: what the model looks like.
        name: TransformerLens' name of the value.

    Raises:
        ModelError: if there is no such value, or none that can be read as a vector per token.
    """
    match = re.fullmatch(r"blocks\.(\d{1,9})\.(.+)", name)
    if match is None:
        raise ModelError(f"{name!r} is no hook that can be read: write one as in 'blocks.1.hook_resid_post'")
    layer, rest = int(match[1]), match[2]
    if layer >= architecture.n_layers:
        raise ModelError(f"there is no {name!r}: layers are 0 … {architecture.n_layers - 1}")
    if rest in ("attn.hook_attn_scores", "attn.hook_pattern"):
        raise ModelError(f"{name!r} is attention: ask for it by heads, as in '{layer}.0:top1@-1'")
    widths = _widths(architecture, layer)
    if rest not in widths:
        raise ModelError(f"there is no {name!r}; a block of this model has {', '.join(sorted(widths))}")
    return Hook(name, layer, *widths[rest])


def hooks_of(architecture: Architecture) -> list[Hook]:
    """Return all values of a model that can be read, block by block."""
    return [
        Hook(f"blocks.{layer}.{rest}", layer, *shape)
        for layer in range(architecture.n_layers)
        for rest, shape in _widths(architecture, layer).items()
    ]


def _widths(architecture: Architecture, layer: int) -> dict[str, tuple[int, int]]:
    """The values of a block by the end of their names: coordinates per token, and dimensions."""
    a = architecture
    d, q, kv = (a.d_model, 1), (a.n_heads * a.head_dim, 2), (a.kv_heads * a.head_dim, 2)
    found = {"hook_resid_pre": d, "hook_resid_post": d}
    before = a.norm_place in ("pre", "sandwich")
    if a.has_attention:
        found |= {
            "attn.hook_q": q,
            "attn.hook_k": kv,
            "attn.hook_v": kv,
            "attn.hook_z": q,
            "hook_attn_out": d,
        }
        if a.is_rotary:
            found |= {"attn.hook_rot_q": q, "attn.hook_rot_k": kv}
        if not a.parallel and a.has_network:
            found["hook_resid_mid"] = d
        if (before and (layer > 0 or a.first_norm)) or a.norm_place == "post":
            found["ln1.hook_normalized"] = d
    if a.has_network:
        found |= {"mlp.hook_pre": (a.d_ff, 1), "mlp.hook_post": (a.d_ff, 1), "hook_mlp_out": d}
        if a.network_norm:
            found["mlp.hook_mid"] = (a.d_ff, 1)
        if a.gated:
            found["mlp.hook_pre_linear"] = (a.d_ff, 1)
        if before and not (a.parallel and a.shared_norm):
            found["ln2.hook_normalized"] = d
        if a.norm_place == "post":
            found["hook_normalized_resid_post"] = d
    return found


def stream_name(made: Collection[str], layer: int) -> str:
    """Return the name of the residual stream in front of a block, as the next one reads it.

    Args:
        made: the names of all values that a program makes.
        layer: the block; the number of blocks for what stands behind the last.
    """
    if layer == 0:
        return STREAM if STREAM in made else "blocks.0.hook_resid_pre"
    block = f"blocks.{layer - 1}"
    ends = [f"{block}.hook_normalized_resid_post", f"{block}.hook_resid_post", f"{block}.ln1.hook_normalized"]
    return next(end for end in ends if end in made)


def value_name(made: Collection[str], hook: Hook) -> str:
    """Return the name that a program gives to the value of a hook.

    Args:
        made: the names of all values that it makes.
        hook: the hook.
    """
    if f"{hook.name}_set" in made:
        return f"{hook.name}_set"
    if hook.name.endswith("hook_resid_pre"):
        return stream_name(made, hook.layer)
    if hook.name.endswith("hook_resid_post") and hook.name not in made:
        return stream_name(made, hook.layer + 1)
    return hook.name


def read_hooks(architecture: Architecture) -> list[Hook]:
    """Return the values that a readout reads, in the order of its columns: one or two.

    Args:
        architecture: that of a readout.
    """
    names = (architecture.read_hook, architecture.beside_hook)
    return [find_hook(architecture, name) for name in names if name is not None]


def append_read(builder: Builder, n_tokens: int) -> None:
    """Append the steps that read a hook: the affine map of every token, and the choice of one.

    What attention adds is read as the sum of it and of 0 times the stream, since tokens meet in a residual sum. A
    second readout begins where its value is made, so that few numbers are carried on from there.

    Args:
        builder: holds the steps of all blocks.
        n_tokens: how many tokens there are.
    """
    architecture, steps = builder.architecture, builder.steps
    assert architecture.read_position is not None
    places = [architecture.read_position]
    places += [] if architecture.beside_position is None else [architecture.beside_position]
    for place in places:
        if place >= n_tokens:
            raise ModelError(f"the model is read at position {place}, the input has {n_tokens} tokens")
    hook, *beside = read_hooks(architecture)
    made = {step.out for step in steps}
    weight, source, dims = builder.weights[READ], value_name(made, hook), hook.dims
    apart = len(set(places)) > 1
    if beside:
        there, other = value_name(made, beside[0]), weight[:, hook.width :]
        alone = (n_tokens, places[1]) if apart else None
        own = _read_steps("beside", there, (other, None, beside[0].dims), alone)
        after = next((i for i, step in enumerate(steps, 1) if step.out == there), 0)
        steps[after:after] = own
        weight = weight[:, : hook.width].contiguous()
    if hook.is_mixed:
        if dims > 1:
            same = torch.eye(hook.width, dtype=weight.dtype, device=weight.device)
            steps.append(Affine("read.z", (source,), same, None, dims, (hook.width,)))
            source, dims = "read.z", 1
        none = weight.new_zeros(hook.width, architecture.d_model)
        steps.append(Affine("read.nothing", (stream_name(made, hook.layer),), none, None, 1, (hook.width,)))
        steps.append(Add("read.added", ("read.nothing", source)))
        source = "read.added"
    here = (n_tokens, places[0]) if apart else None
    steps += _read_steps("read", source, (weight, builder.weights.get("read.bias"), dims), here)
    last = steps[-1].out
    if beside:
        steps.append(Add("read.both", (last, own[-1].out)))
        last = "read.both"
    chosen = weight.new_zeros(n_tokens)
    chosen[places] = 1.0
    steps.append(Pool("read", (last,), chosen))


def _read_steps(
    name: str, source: str, by: tuple[Tensor, Tensor | None, int], alone: tuple[int, int] | None
) -> list[AnyStep]:
    """Return the steps of an affine map of every token, 0 at all but one of so many if `alone` names it."""
    weight, bias, dims = by
    each = f"{name}.each"
    if alone is None:
        return [Affine(each, (source,), weight, bias, dims, (len(weight),))]
    n_tokens, position = alone
    here = weight.new_zeros(n_tokens, len(weight))
    here[position] = 1.0
    same = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
    return [
        Affine(each, (source,), weight, bias, dims, (1, len(weight))),
        Rotary(f"{name}.alone", (each,), here, torch.zeros_like(here)),
        Affine(f"{name}.here", (f"{name}.alone",), same, None, 2, (len(weight),)),
    ]


def read_at(
    model: Transformer,
    hook: str,
    position: int,
    directions: Float[Tensor, "F n"] | Sequence[int],
    bias: Float[Tensor, " F"] | None = None,
    names: Sequence[str] | None = None,
) -> Transformer:
    """Return the model that ends at a hook: its outputs are linear readouts of the value there, at one token.

    Args:
        model: the model to read.
        hook: the name of the value, as `run_with_cache` has it.
        position: the token, counted from 0.
        directions: one row for each output, shape [F, n]; or the numbers of coordinates to read (neurons).
        bias: added to the outputs, shape [F]; None for 0.
        names: what results call the outputs; None for `logit0`, `logit1`, ….

    Raises:
        ModelError: if there is no such hook, or the directions do not fit it.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> neurons = pl.read_at(model, "blocks.0.mlp.hook_pre", position=3, directions=[0, 5])
        >>> _, cache = model.run_with_cache(model.example())
        >>> bool(torch.allclose(neurons(model.example()), cache["blocks.0.mlp.hook_pre"][3, [0, 5]]))
        True
    """
    at = find_hook(model.architecture, hook)
    weight = _directions(directions, at, model)
    if position < 0:
        raise ModelError(f"positions of a readout count from 0, got {position}")
    if bias is not None and tuple(bias.shape) != (len(weight),):
        raise ModelError(f"{len(weight)} directions need as many biases, got {list(bias.shape)}")
    if names is not None and len(names) != len(weight):
        raise ModelError(f"{len(weight)} directions need as many names, got {len(names)}")
    edges = tuple(name for name in model.weights if name.startswith("final_norm.edges."))
    inner = {name: tensor for name, tensor in model.weights.items() if name not in edges}
    cut = (replace(model, weights=inner) if edges else model).cut(at.layer + 1)
    gone = ("head.", "pooler.", "final_norm.", "read.")
    weights = {name: tensor for name, tensor in cut.weights.items() if not name.startswith(gone)}
    weights[READ] = weight
    if bias is not None:
        weights["read.bias"] = bias.to(weight)
    architecture = replace(
        cut.architecture,
        d_out=len(weight),
        pool="first",
        pooler=False,
        logit_cap=None,
        read_hook=hook,
        read_position=position,
        beside_hook=None,
        beside_position=None,
    )
    return replace(
        cut,
        architecture=architecture,
        weights=weights,
        name=f"{model.name}, read at {hook}@{position}",
        outputs=None if names is None else tuple(names),
    )


def read_beside(
    model: Transformer,
    first: tuple[str, int],
    second: tuple[str, int],
    directions: Float[Tensor, "F n"],
    bias: Float[Tensor, " F"] | None = None,
    names: Sequence[str] | None = None,
) -> Transformer:
    """Return the model whose outputs are linear readouts of two values together, each at its own hook and token.

    Args:
        model: the model to read.
        first: the hook of the one value, and its token counted from 0.
        second: those of the other; its block is the same or an earlier one.
        directions: one row for each output, the columns of the second value behind those of the first, shape [F, n].
        bias: added to the outputs, shape [F]; None for 0.
        names: what results call the outputs; None for `logit0`, `logit1`, ….

    Raises:
        ModelError: if there is no such hook, the second is of a later block, or the directions do not fit.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> places = ("blocks.1.hook_resid_post", 3), ("blocks.0.hook_resid_post", 1)
        >>> both = read_beside(model, *places, torch.ones(1, 2 * model.architecture.d_model))
        >>> _, cache = model.run_with_cache(model.example())
        >>> bool(torch.allclose(both(model.example())[0], sum(cache[hook][t].sum() for hook, t in places)))
        True
    """
    one, other = (find_hook(model.architecture, hook) for hook, _ in (first, second))
    if other.layer > one.layer:
        raise ModelError(f"{other.name} is of a later block than {one.name}: name the later one first")
    if directions.ndim != 2 or directions.shape[1] != one.width + other.width:
        raise ModelError(
            f"directions at {one.name} and {other.name} have shape [F, {one.width} + {other.width}], "
            f"got {list(directions.shape)}"
        )
    if second[1] < 0:
        raise ModelError(f"positions of a readout count from 0, got {second[1]}")
    ends = read_at(model, *first, directions[:, : one.width], bias, names)
    architecture = replace(ends.architecture, beside_hook=second[0], beside_position=second[1])
    weights = {**ends.weights, READ: directions.to(device=model.device, dtype=model.dtype).contiguous()}
    name = f"{ends.name} and {second[0]}@{second[1]}"
    return replace(ends, architecture=architecture, weights=weights, name=name)


def read_by(
    model: Transformer, weight: Float[Tensor, "F n"], bias: Float[Tensor, " F"] | None
) -> Transformer:
    """Return a readout with other directions at the same hook and token.

    Args:
        model: a readout.
        weight: its directions, shape [F, n].
        bias: shape [F]; None for 0.
    """
    kept = {name: tensor for name, tensor in model.weights.items() if name != "read.bias"}
    weights = {**kept, READ: weight} | ({} if bias is None else {"read.bias": bias})
    return replace(
        model, architecture=replace(model.architecture, d_out=len(weight)), weights=weights, outputs=None
    )


def _directions(directions: Tensor | Sequence[int], hook: Hook, model: Transformer) -> Float[Tensor, "F n"]:
    """The rows of W as a tensor of the model's precision."""
    if isinstance(directions, Tensor):
        if directions.ndim != 2 or directions.shape[1] != hook.width or not len(directions):
            raise ModelError(
                f"directions at {hook.name} have shape [F, {hook.width}], got {list(directions.shape)}"
            )
        return directions.to(device=model.device, dtype=model.dtype)
    chosen = list(directions)
    if not chosen or not all(type(i) is int and 0 <= i < hook.width for i in chosen):
        raise ModelError(f"coordinates of {hook.name} are 0 … {hook.width - 1}, got {chosen}")
    weight = torch.zeros(len(chosen), hook.width, dtype=model.dtype, device=model.device)
    weight[range(len(chosen)), chosen] = 1.0
    return weight
