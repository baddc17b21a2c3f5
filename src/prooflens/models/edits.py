"""Edits: a model in which a part is taken out, or held at a constant. It is a model of its own.

| place | what | where it is in the weights |
|---|---|---|
| `a9.h6` | z of head 6 of layer 9, `blocks.9.attn.hook_z` | its columns of W_O |
| `a9` | what the attention of layer 9 writes, `blocks.9.hook_attn_out` | W_O and its bias |
| `m3` | what the network of layer 3 writes, `blocks.3.hook_mlp_out` | `down` and its bias |
| `m3.n12` | neuron 12 of it, `blocks.3.mlp.hook_post` | a column of `down` |
| `a9.h6.k3`, `a9.h6.q5.k3` | a key that others, or token 5, may not attend to | a mask (`models.knockouts`) |

Each but the last is read by one linear map, so an edit changes weights and no step: zero takes columns out, a constant
c takes them out and adds W c to the bias. The constant is one for all positions; a value of its own at every position
is no change of weights, and is not an edit here. The edited model has a name and a fingerprint, and every engine walks
it. W c is rounded once, in float64: what is proved is proved of the model with that bias.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.knockouts import find_knockout, with_knockouts

if TYPE_CHECKING:
    from prooflens.models.architecture import Architecture
    from prooflens.models.prompt import Prompt
    from prooflens.models.transformer import Transformer

PLACE = re.compile(r"a(?P<a>\d{1,6})(?:\.h(?P<h>\d{1,9}))?|m(?P<m>\d{1,6})(?:\.n(?P<n>\d{1,9}))?")


@dataclass(frozen=True)
class Place:
    """A part of a model that can be edited.

    Attributes:
        name: as circuit tools write it: `a9.h6`, `a9`, `m3`, `m3.n12`.
        layer: its block.
        hook: TransformerLens' name of its value.
        reader: the linear map that reads it, or writes it where it is a whole block's output.
        columns: the map's columns that read it; None for a whole block's output.
    """

    name: str
    layer: int
    hook: str
    reader: str
    columns: range | None = None

    @property
    def block(self) -> str:
        """The whole block's output that it is a part of."""
        return self.name.split(".")[0]

    def read(self, value: Float[Tensor, "... n"]) -> Float[Tensor, "... w"]:
        """Return its own coordinates of the hook's value, heads side by side."""
        return value if self.columns is None else value[..., self.columns.start : self.columns.stop]


def find_place(architecture: Architecture, name: str) -> Place:
    """Return what is known of a part.

    Args:
        architecture: what the model looks like.
        name: `a9.h6`, `a9`, `m3` or `m3.n12`.

    Raises:
        ModelError: if there is no such part.
    """
    match = PLACE.fullmatch(name)
    if match is None:
        raise ModelError(
            f"{name!r} is no part of a model: write a head as a9.h6, an attention as a9, a network as m3, "
            "a neuron as m3.n12, a hidden key as a9.h6.k3"
        )
    attends = match["a"] is not None
    layer = int(match["a"] if attends else match["m"])
    if layer >= architecture.n_layers:
        raise ModelError(f"there is no {name!r}: layers are 0 … {architecture.n_layers - 1}")
    if not (architecture.has_attention if attends else architecture.has_network):
        raise ModelError(f"there is no {name!r}: blocks have no {'attention' if attends else 'network'}")
    block, index = f"blocks.{layer}", match["h"] if attends else match["n"]
    reader = f"{block}.{'o' if attends else 'down'}"
    if index is None:
        return Place(name, layer, f"{block}.hook_{'attn' if attends else 'mlp'}_out", reader)
    count, width = (architecture.n_heads, architecture.head_dim) if attends else (architecture.d_ff, 1)
    if int(index) >= count:
        raise ModelError(f"there is no {name!r}: {'heads' if attends else 'neurons'} are 0 … {count - 1}")
    hook = f"{block}.{'attn.hook_z' if attends else 'mlp.hook_post'}"
    return Place(name, layer, hook, reader, range(int(index) * width, (int(index) + 1) * width))


def places_of(architecture: Architecture, neurons: bool = False) -> list[str]:
    """Return the names of all heads and networks of a model, layer by layer.

    Args:
        architecture: what the model looks like.
        neurons: name every neuron in place of whole networks.
    """
    found = []
    for layer in range(architecture.n_layers):
        if architecture.has_attention:
            found += [f"a{layer}.h{head}" for head in range(architecture.n_heads)]
        if architecture.has_network and neurons:
            found += [f"m{layer}.n{neuron}" for neuron in range(architecture.d_ff)]
        elif architecture.has_network:
            found.append(f"m{layer}")
    return found


@dataclass(frozen=True, eq=False)
class Edit:
    """One part, held at zero or at a constant.

    Attributes:
        place: `a9.h6`, `a9`, `m3` or `m3.n12`; or a key that is knocked out, `a9.h6.k3` or `a9.h6.q5.k3`.
        value: the constant, as many numbers as the part has; None for zero. Of an edit along a direction: one number,
            the part's coordinate along it.
        source: where the value comes from, for the model's name.
        direction: hold only the part's coordinate along this vector of the stream, shape [d]; None for all of it. For
            `a9` and `m3`, which write into the stream.

    Example:
        >>> str(Edit("a9.h6")), str(Edit("m3", torch.ones(4), "the mean of 2 prompts"))
        ('without a9.h6', 'with m3 at the mean of 2 prompts')
    """

    place: str
    value: Float[Tensor, " n"] | None = None
    source: str = "a constant"
    direction: Float[Tensor, " d"] | None = None

    def __str__(self) -> str:
        part = self.place if self.direction is None else f"a direction of {self.place}"
        return f"without {part}" if self.value is None else f"with {part} at {self.source}"


def mean_of(
    model: Transformer, place: str, prompts: Sequence[Prompt | str], position: int | None = None
) -> Edit:
    """Return the edit that holds a part at its mean over prompts (mean ablation).

    Args:
        model: the model.
        place: the part.
        prompts: texts or prompts of the model; they need not have the same length.
        position: the token at which the value is read, negative from the end; None for the mean over all tokens.
    """
    if not prompts:
        raise ModelError("a mean is over at least one prompt: none is given")
    kept = find_place(model.architecture, place)
    with torch.no_grad():
        rows = [_values(model, kept, prompt, position) for prompt in prompts]
    at = "" if position is None else f" at {position}"
    return Edit(place, torch.cat(rows).mean(0), f"its mean over {len(prompts)} prompts{at}")


def value_on(model: Transformer, place: str, prompt: Prompt | str, position: int) -> Edit:
    """Return the edit that holds a part at its value at one token of another prompt (a patch).

    Args:
        model: the model.
        place: the part.
        prompt: a text or a prompt of the model.
        position: the token whose value it gets, at every position; negative from the end.
    """
    kept = find_place(model.architecture, place)
    with torch.no_grad():
        (value,) = _values(model, kept, prompt, position)
    where = repr(prompt) if isinstance(prompt, str) else "another prompt"
    return Edit(place, value, f"its value at {position} of {where}")


def _values(
    model: Transformer, place: Place, prompt: Prompt | str, position: int | None
) -> Float[Tensor, "S n"]:
    held = model.prompt(prompt) if isinstance(prompt, str) else prompt
    found = model.run(held, place.hook)[place.hook]
    value = place.read(found.reshape(len(found), -1))
    if position is None:
        return value
    if not -len(value) <= position < len(value):
        raise ModelError(f"there is no position {position}: the prompt has {len(value)} tokens")
    return value[[position]]


def edit(model: Transformer, edits: str | Edit | Sequence[str | Edit]) -> Transformer:
    """Return the model with parts held at constants: a model of its own, with other weights and the same steps.

    Args:
        model: the model.
        edits: parts to take out by name (`"a9.h6"`), keys to knock out (`"a9.h6.k3"`), or `Edit`s; one, or several.

    Returns:
        The edited model; its name says what was done, and its fingerprint covers the weights.

    Raises:
        ModelError: if there is no such part, a value does not fit, or a part is edited twice.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> edited = pl.edit(model, "a1.h0")
        >>> edited.name, edited.sha256 != model.sha256
        ('toy without a1.h0', True)
    """
    listed = [edits] if isinstance(edits, str | Edit) else list(edits)
    made = [Edit(one) if isinstance(one, str) else one for one in listed]
    if not made:
        raise ModelError("nothing is edited: give at least one part, as in 'a9.h6'")
    hidden = {one.place: find_knockout(model.architecture, one.place) for one in made}
    knockouts = [found for found in hidden.values() if found is not None]
    if len(knockouts) + sum(hidden[one.place] is None for one in made) < len(made):
        raise ModelError("a key is knocked out twice: name it once")
    held = [one for one in made if hidden[one.place] is None]
    if any(one.value is not None or one.direction is not None for one in made if one not in held):
        raise ModelError("a key is knocked out and has no value: give its name alone, as in 'a9.h6.k3'")
    places = [find_place(model.architecture, one.place) for one in held]
    names = [place.name for place in places]
    for place in places:
        if names.count(place.name) > 1 or (place.columns is not None and place.block in names):
            raise ModelError(f"{place.name} is edited twice: give one edit of it")
    weights = with_knockouts(model.weights, knockouts)
    for one, place in zip(held, places, strict=True):
        _apply(weights, one, place)
    return replace(model, weights=weights, name=f"{model.name} {_described(made)}")


def _apply(weights: dict[str, Tensor], one: Edit, place: Place) -> None:
    """Change the map that reads a part, or that writes it."""
    weight, bias = weights[f"{place.reader}.weight"].clone(), weights.get(f"{place.reader}.bias")
    if one.direction is not None:
        added = _without_direction(weight, bias, one, place)
    elif place.columns is None:
        added = None if one.value is None else _fitting(one.value, len(weight), weight, place)
        weight.zero_()
    else:
        chosen = slice(place.columns.start, place.columns.stop)
        added = bias
        if one.value is not None:
            moved = weight[:, chosen] @ _fitting(one.value, len(place.columns), weight, place)
            added = moved if bias is None else bias + moved
        weight[:, chosen] = 0.0
    weights[f"{place.reader}.weight"] = weight
    weights.pop(f"{place.reader}.bias", None)
    if added is not None:
        weights[f"{place.reader}.bias"] = added


def _without_direction(weight: Tensor, bias: Tensor | None, one: Edit, place: Place) -> Tensor | None:
    """Take a direction out of what a block writes, and put its constant there; the new bias."""
    assert one.direction is not None
    if place.columns is not None:
        raise ModelError(f"{place.name} writes no stream of its own: give a direction of {place.block}")
    v = _fitting(one.direction, len(weight), weight, place)
    if not bool((size := v.norm()) > 0.0):
        raise ModelError("a direction is not zero")
    v = v / size
    weight -= torch.outer(v, v @ weight)
    added = None if bias is None else bias - v * (v @ bias)
    if one.value is None:
        return added
    moved: Tensor = v * _fitting(one.value, 1, weight, place)
    return moved if added is None else added + moved


def _fitting(value: Tensor, size: int, like: Tensor, place: Place) -> Tensor:
    given = torch.as_tensor(value).to(like)
    if tuple(given.shape) != (size,) or not bool(given.isfinite().all()):
        raise ModelError(
            f"an edit of {place.name} needs {size} finite numbers, got shape {list(given.shape)}"
        )
    return given


def _described(edits: Sequence[Edit]) -> str:
    """The edits in words, those that take parts out together."""
    texts = [str(one) for one in edits]
    out = [text.removeprefix("without ") for text in texts if text.startswith("without ")]
    held = [text for text in texts if not text.startswith("without ")]
    shown = f"without {', '.join(out[:SHOWN])}" + (f" and {len(out) - SHOWN} more" if out[SHOWN:] else "")
    return ", ".join(([shown] if out else []) + held)


SHOWN = 6
"""How many parts that are taken out a model's name lists."""
