"""The tensors that a model holds: canonical names, shapes, and the checks before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.edges import FINAL, ROWS, check_edges
from prooflens.models.frozen import check_frozen
from prooflens.models.held import check_held, held_shapes
from prooflens.models.knockouts import check_table, table_name
from prooflens.models.reads import READ, read_hooks
from prooflens.models.spread import ENDS, RADII

Shape = tuple[int, ...]


def required_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return names and shapes of the weight matrices that every model of this architecture has."""
    a = architecture
    q_width, kv_width = a.n_heads * a.head_dim, a.kv_heads * a.head_dim
    shapes: dict[str, Shape] = {}
    for layer in range(a.n_layers):
        block = f"blocks.{layer}"
        if a.has_attention:
            shapes[f"{block}.q.weight"] = (q_width, a.d_model)
            shapes[f"{block}.k.weight"] = shapes[f"{block}.v.weight"] = (kv_width, a.d_model)
            shapes[f"{block}.o.weight"] = (a.d_model, q_width)
        if a.has_attention and a.head_positions and a.context is not None:
            shapes[f"{block}.q.positions"] = (a.context, q_width)
            shapes[f"{block}.k.positions"] = (a.context, kv_width)
        if a.has_network:
            shapes[f"{block}.up.weight"] = (a.d_ff, a.d_model)
            shapes[f"{block}.down.weight"] = (a.d_model, a.d_ff)
        if a.has_network and a.gated:
            shapes[f"{block}.gate.weight"] = (a.d_ff, a.d_model)
    if a.d_vocab is not None:
        shapes["embed.tokens"] = (a.d_vocab, a.d_embed or a.d_model)
    if a.d_embed is not None:
        shapes["embed.project.weight"] = (a.d_model, a.d_embed)
    if a.patch is not None:
        shapes["embed.patches.weight"] = (a.d_model, a.channels * a.patch**2)
    if a.rope_given:
        shapes["rope.frequencies"] = (a.head_dim // 2,)
    if a.rope_local:
        shapes["rope.local_frequencies"] = (a.head_dim // 2,)
    if a.relative_buckets is not None:
        shapes["relative_bias"] = (a.relative_buckets, a.n_heads)
    if a.pooler:
        shapes["pooler.weight"] = (a.d_model, a.d_model)
    if a.read_hook is not None and a.d_out is not None:
        shapes[READ] = (a.d_out, sum(hook.width for hook in read_hooks(a)))
    return shapes


def optional_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return names and shapes of what else a model may hold: biases, norms' scales, positions, an untied head."""
    a = architecture
    shapes: dict[str, Shape] = {
        name.removesuffix("weight") + "bias": (shape[0],)
        for name, shape in required_shapes(a).items()
        if name.endswith(".weight")
    }
    width = a.d_embed or a.d_model
    norms = {f"blocks.{layer}.{name}": a.d_model for layer in range(a.n_layers) for name in a.norms}
    if a.qk_norm != "none":
        for name, heads in (("q_norm", a.n_heads), ("k_norm", a.kv_heads)):
            size = a.head_dim if a.qk_norm == "head" else heads * a.head_dim
            norms |= {f"blocks.{layer}.{name}": size for layer in range(a.n_layers)}
    if a.has_network and a.network_norm:
        norms |= {f"blocks.{layer}.network_norm": a.d_ff for layer in range(a.n_layers)}
    if a.has_final_norm:
        norms["final_norm"] = a.d_model
    if a.d_vocab is not None:
        norms["embed.norm"] = width
        shapes["embed.types"] = (2, width)
    if a.patch is not None:
        shapes["embed.front"] = (1, a.d_model)
    if (a.d_vocab is not None or a.patch is not None) and a.context is not None:
        shapes["embed.positions"] = (a.context + a.position_offset, width)
    for norm, size in norms.items():
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (size,)
    if a.d_out is not None and a.read_hook is None:
        shapes["head.weight"], shapes["head.bias"] = (a.d_out, a.d_model), (a.d_out,)
    return shapes


def check_weights(architecture: Architecture, weights: Mapping[str, Tensor]) -> None:
    """Raise a `ModelError` if a tensor is missing, unknown, of a wrong shape, or not finite."""
    required = required_shapes(architecture)
    shapes = optional_shapes(architecture) | required
    if missing := sorted(set(required) - set(weights)):
        raise ModelError(f"the weights lack {missing[0]!r} ({len(missing)} tensors missing)")
    if architecture.d_out is not None and not {"head.weight", "embed.tokens", READ} & set(weights):
        raise ModelError("the weights lack 'head.weight', and there is no embedding to tie the head to")
    tables = {table_name(layer) for layer in range(architecture.n_layers) if architecture.has_attention}
    loose = held_shapes(architecture) | ({RADII: (architecture.free,)} if architecture.free else {})
    if architecture.has_attention:
        loose |= {f"blocks.{i}.frozen.heads": (None,) for i in range(architecture.n_layers)}
        loose |= {f"blocks.{i}.frozen.scores": (None, None, None) for i in range(architecture.n_layers)}
    for stem in (*(f"blocks.{i}" for i in range(architecture.n_layers)), FINAL):
        loose |= {f"{stem}{ROWS}": (None, 6), f"{stem}.edges.values": (None, architecture.d_model)}
    if unknown := sorted(set(weights) - set(shapes) - tables - set(loose)):
        raise ModelError(f"the weights hold {unknown[0]!r}, which this architecture does not use")
    for name, tensor in weights.items():
        if name in tables:
            check_table(name, tensor, architecture.n_heads)
            continue
        if name in loose:
            _check_loose(name, tensor, loose[name])
        elif tuple(tensor.shape) != shapes[name] and not (
            name == "embed.types" and tensor.shape[1:] == shapes[name][1:]
        ):
            raise ModelError(f"{name} has shape {list(tensor.shape)}, expected {list(shapes[name])}")
        if tensor.numel() and not all(map(torch.isfinite, tensor.aminmax())):  # one pass; NaN is both ends
            bad = int((~torch.isfinite(tensor)).sum())
            raise ModelError(f"{name} holds {bad} values that are NaN or infinite: the weights are broken")
    if any(name.endswith(ENDS) for name in weights) and RADII not in weights:
        raise ModelError(
            f"the weights lack {RADII!r}: how far the values of held parts may be from one another"
        )
    for stem in sorted({name.rpartition(".")[0] for name in loose if name in weights}):
        if stem.endswith(".frozen"):
            check_frozen(weights, int(stem.split(".")[1]), architecture.n_heads)
        elif stem.endswith(".edges"):
            check_edges(architecture, weights, stem.removesuffix(".edges"))
        elif stem != "free":
            check_held(weights, stem)


def _check_loose(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise a `ModelError` unless a table has its dimensions, where None stands for any number."""
    right = tensor.ndim == len(shape) and all(
        n in (m, None) for m, n in zip(tensor.shape, shape, strict=True)
    )
    if not right:
        raise ModelError(f"{name} has shape {list(tensor.shape)}, which does not fit this architecture")
