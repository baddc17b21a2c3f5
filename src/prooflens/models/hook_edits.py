"""Hooks as TransformerLens users write them, read as edits: `("blocks.9.attn.hook_z", function)`.

A hook is a function of a value that sets some of it to constants and leaves the rest as it is. Which numbers those are
is seen by calling it on random values, twice: a number that comes back as it went in is kept, one that is the same
whatever went in is a constant, and anything else is no edit of one input and refused. Claims are about the `Edit`s that
come of it, which are printed, and not about the function: what it does to values that were not tried, nobody knows.

| hook | shape of the value | what it becomes |
|---|---|---|
| `blocks.9.attn.hook_z`, `hook_result` | [batch, token, head, n] | `a9.h6@3`, `a9.h6.result@3` |
| `blocks.9.hook_attn_out`, `hook_mlp_out` | [batch, token, d] | `a9@3`, `m9@3` |
| `blocks.9.mlp.hook_post` | [batch, token, neuron] | `m9.n12@3` |
| `blocks.9.attn.hook_attn_scores` | [batch, head, query, key] | `a9.h6.q5.k3` where −∞ is written |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.parts import Edit

if TYPE_CHECKING:
    from prooflens.models.transformer import Transformer

Hook = tuple[str, Callable[..., Tensor | None]]
"""The name of a value, and a function (value, hook) that returns the value to go on with, or changes it in place."""

NAME = re.compile(
    r"blocks\.(?P<layer>\d{1,6})\.(?P<site>attn\.hook_z|attn\.hook_result|hook_attn_out|hook_mlp_out|mlp\.hook_post"
    r"|attn\.hook_attn_scores)"
)
PARTS = {
    "attn.hook_z": "a{}.h{}",
    "attn.hook_result": "a{}.h{}.result",
    "hook_attn_out": "a{}",
    "hook_mlp_out": "m{}",
    "mlp.hook_post": "m{}.n{}",
}
"""The names of parts, by layer and number."""
TRIED = 3
"""How many random values a function is given at a time, and it is called twice."""

HIDDEN = -1e30
"""Scores at most this low are read as −∞: libraries write the least number of float32 or bfloat16."""


@dataclass(frozen=True)
class HookPoint:
    """What a function is told of the hook, as TransformerLens tells it.

    Attributes:
        name: the hook's name.
    """

    name: str

    def layer(self) -> int:
        """Return the number of the block."""
        return int(self.name.split(".")[1])


def is_hook(edit: object) -> TypeGuard[Hook]:
    """Say whether an edit is given as a hook's name and a function.

    Args:
        edit: what is given.
    """
    return isinstance(edit, tuple) and len(edit) == 2 and isinstance(edit[0], str) and callable(edit[1])


def as_list(edits: str | Edit | Hook | Sequence[str | Edit | Hook]) -> list[str | Edit | Hook]:
    """Return edits as a list, also where one is given alone.

    Args:
        edits: one edit, or several.
    """
    if isinstance(edits, str | Edit) or is_hook(edits):
        return [edits]
    several: Sequence[str | Edit | Hook] = edits  # type: ignore[assignment]  # a hook is a pair, and a pair a sequence
    return list(several)


def without_hooks(edits: str | Edit | Hook | Sequence[str | Edit | Hook]) -> list[str | Edit]:
    """Return edits as a list.

    Args:
        edits: one edit, or several.

    Raises:
        ModelError: if one is a hook, which needs to know how many tokens there are.
    """
    found = list[str | Edit]()
    for one in as_list(edits):
        if isinstance(one, tuple):
            raise ModelError(
                f"the function at {one[0]} is about prompts of one length: "
                "give models.hook_edits.from_hooks(model, hook, n_tokens)"
            )
        found.append(one)
    return found


def from_hooks(model: Transformer, hooks: Hook | Sequence[Hook], n_tokens: int) -> list[Edit]:
    """Return the edits that hooks make.

    Args:
        model: the model.
        hooks: pairs of a hook's name and a function, as `run_with_hooks(fwd_hooks=…)` of TransformerLens takes them.
        n_tokens: how many tokens the prompt has.

    Returns:
        What the functions set to constants, part by part.

    Raises:
        ModelError: if a value has no edits, or a function does something else than set parts to constants.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> def without_head_0(z, hook):
        ...     z[:, -1, 0] = 0.0
        ...     return z
        >>> [str(edit) for edit in from_hooks(model, ("blocks.1.attn.hook_z", without_head_0), 4)]
        ['without a1.h0@3']
    """
    listed: Sequence[Hook] = [hooks] if is_hook(hooks) else hooks  # type: ignore[assignment]
    return [one for name, function in listed for one in _read(model, name, function, n_tokens)]


def _read(
    model: Transformer, name: str, function: Callable[..., Tensor | None], n_tokens: int
) -> Iterator[Edit]:
    match, a = NAME.fullmatch(name), model.architecture
    if match is None:
        raise ModelError(
            f"{name!r} is no hook with edits: give pairs like ('blocks.9.attn.hook_z', function), of hook_z, "
            "hook_result, hook_attn_out, hook_mlp_out, mlp.hook_post or hook_attn_scores"
        )
    layer, site = int(match["layer"]), match["site"]
    model.check_layer(layer)
    shapes = {
        "attn.hook_z": (n_tokens, a.n_heads, a.head_dim),
        "attn.hook_result": (n_tokens, a.n_heads, a.d_model),
        "hook_attn_out": (n_tokens, 1, a.d_model),
        "hook_mlp_out": (n_tokens, 1, a.d_model),
        "mlp.hook_post": (n_tokens, a.d_ff, 1),
        "attn.hook_attn_scores": (a.n_heads, n_tokens, n_tokens),
    }
    shape = shapes[site]
    flat = (n_tokens, shape[1] * shape[2]) if len(site.split(".")) == 1 or "post" in site else shape
    kept, values = (x.reshape(shape) for x in _tried(function, name, flat, model))
    if bool(kept.all()):
        raise ModelError(
            f"the function at {name} changes nothing of {TRIED} random values: it may need the values of a run, or "
            "average over a batch; hold the part at a constant (models.edits.mean_of, value_on)"
        )
    if site == "attn.hook_attn_scores":
        yield from _keys(name, layer, kept, values)
        return
    normed = a.norm_place in ("sandwich", "output") and site in ("hook_attn_out", "hook_mlp_out")
    if normed and (a.norm_kind == "layer" or bool(values[~kept].any())):
        raise ModelError(
            f"{name} is in TransformerLens what is added to the stream, here what a norm reads before that: only 0, "
            "where that norm adds no bias, is an edit of both"
        )
    for part in range(shape[1]):
        yield from _held(name, PARTS[site].format(layer, part), kept[:, part], values[:, part])


def _held(name: str, part: str, kept: Bool[Tensor, "S n"], values: Float[Tensor, "S n"]) -> Iterator[Edit]:
    """The edit of one part; none if all of it is kept."""
    tokens = (~kept).any(1).nonzero()[:, 0].tolist()
    if not tokens:
        return
    if bool(kept[tokens].any()):
        raise ModelError(
            f"the function at {name} sets a part of {part} alone: an edit holds all numbers of it"
        )
    at = "" if len(tokens) == len(kept) else "".join(f"@{token}" for token in tokens)
    rows = values[tokens]
    if not bool(rows.any()):
        yield Edit(part + at)
    elif bool((rows == rows[0]).all()):
        yield Edit(part + at, rows[0], f"what the hook {name} sets")
    else:
        yield Edit(part + at, rows, f"what the hook {name} sets")


def _keys(
    name: str, layer: int, kept: Bool[Tensor, "H S S"], values: Float[Tensor, "H S S"]
) -> Iterator[Edit]:
    """The keys that are hidden; what a causal mask hides already is hidden again."""
    if bool((values[~kept] > HIDDEN).any()):
        raise ModelError(
            f"the function at {name} sets scores to numbers: only −∞, which hides a key, is an edit"
        )
    for head, query, key in (~kept).nonzero().tolist():
        yield Edit(f"a{layer}.h{head}.q{query}.k{key}")


def _tried(
    function: Callable[..., Tensor | None], name: str, shape: tuple[int, ...], model: Transformer
) -> tuple[Tensor, Tensor]:
    """Call a function on random values; return what it keeps, and what it sets the rest to."""
    generator = torch.Generator().manual_seed(0)
    like = next(iter(model.weights.values()))
    came: list[Tensor] = []
    kept: Tensor | None = None
    for scale in (1.0, 10.0):
        given = (scale * torch.randn(TRIED, *shape, generator=generator, dtype=torch.float64)).to(like)
        value = given.clone()
        try:
            made = function(value, hook=HookPoint(name))
        except Exception as error:
            raise ModelError(
                f"the function at {name} failed on a value of shape {list(value.shape)}: "
                f"{str(error).strip() or type(error).__name__}"
            ) from error
        made = value if made is None else made
        if not isinstance(made, Tensor) or made.shape != given.shape:
            raise ModelError(f"the function at {name} must return a value of shape {list(given.shape)}")
        if bool(made.isnan().any()):
            raise ModelError(f"the function at {name} sets NaN: an edit sets parts to numbers")
        came.append(made.detach().to(like))
        same = (came[-1] == given).all(0)
        kept = same if kept is None else kept & same
    assert kept is not None
    whole = torch.cat(came)
    constant = (whole == whole[0]).all(0)
    if not bool((kept | constant).all()):
        raise ModelError(
            f"the function at {name} computes something of what it reads: an edit sets parts to constants, "
            "whatever the input is"
        )
    return kept & ~constant, whole[0]
