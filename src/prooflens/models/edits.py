"""Edits: a model in which a part is taken out, or held at a constant. It is a model of its own.

| place | what | where it is in the weights |
|---|---|---|
| `a9.h6` | z of head 6 of layer 9, `blocks.9.attn.hook_z` | its columns of W_O |
| `a9.h6.result` | what this head writes, W_O z, `blocks.9.attn.hook_result` | its columns of W_O, and the bias |
| `a9` | what the attention of layer 9 writes, `blocks.9.hook_attn_out` | W_O and its bias |
| `m3` | what the network of layer 3 writes, `blocks.3.hook_mlp_out` | `down` and its bias |
| `m3.n12` | neuron 12 of it, `blocks.3.mlp.hook_post` | a column of `down` |
| `a9.h6.k3`, `a9.h6.q5.k3` | a key that others, or token 5, may not attend to | a mask (`models.knockouts`) |
| `a9.h6@-1`, `m3@2@5` | any of these parts at some tokens only | tables (`models.held`) |
| `blocks.5.hook_resid_pre` | a direction of the stream, or of what a block writes | tables (`models.held`) |
| `a9.h6->a10.h2.q` | the output of head 9.6 as one later part reads it | tables (`models.edges`) |
| `a9.h6.pattern` | the pattern of a head, frozen at a prompt | its scores (`models.frozen`) |
| any part with a `spread` | any value of a set | tables (`models.spread`) |

Each of the first four is read by one linear map, so an edit of all tokens changes weights and no step: zero takes
columns out, a constant c takes them out and adds W c to the bias. W c is rounded once, in float64: what is proved is
proved of the model with that bias. At some tokens a part is held by steps of its own. The edited model has a name and a
fingerprint, and every engine walks it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.dictionaries import Dictionary
from prooflens.models.edges import HEAD, NEURON, check_senders, find_edge, put_edge
from prooflens.models.frozen import find_frozen, put_frozen, scores_hook
from prooflens.models.held import hooks_at
from prooflens.models.held_edits import check_once, feature, hold_direction, hold_feature, hold_part, rows_of
from prooflens.models.hook_edits import Hook, as_list, from_hooks, without_hooks
from prooflens.models.knockouts import find_knockout, with_knockouts
from prooflens.models.parts import ANY, Edit, Place, split_tokens
from prooflens.models.spread import STREAM, check_spread, last_block, spreads_of
from prooflens.models.weight_edits import apply_edit

if TYPE_CHECKING:
    from prooflens.models.architecture import Architecture
    from prooflens.models.prompt import Prompt
    from prooflens.models.transformer import Transformer

PLACE = re.compile(
    r"a(?P<a>\d{1,6})(?:\.h(?P<h>\d{1,9})(?P<r>\.result)?)?|m(?P<m>\d{1,6})(?:\.n(?P<n>\d{1,9}))?"
)


def find_place(architecture: Architecture, name: str) -> Place:
    """Return what is known of a part.

    Args:
        architecture: what the model looks like.
        name: `a9.h6`, `a9.h6.result`, `a9`, `m3` or `m3.n12`.

    Raises:
        ModelError: if there is no such part.
    """
    match = PLACE.fullmatch(name)
    if match is None:
        raise ModelError(
            f"{name!r} is no part of a model: write a head as a9.h6, an attention as a9, a network as m3, "
            "a neuron as m3.n12, a hidden key as a9.h6.k3, an edge as a9.h6->a10.h2.q; tokens as a9.h6@-1"
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
    columns = range(int(index) * width, (int(index) + 1) * width)
    return Place(name, layer, hook, reader, columns, written=match["r"] is not None)


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
    kept = find_place(model.architecture, split_tokens(place)[0])
    with torch.no_grad():
        rows = [_values(model, kept, prompt, position) for prompt in prompts]
    at = "" if position is None else f" at {position}"
    return Edit(place, torch.cat(rows).mean(0), f"its mean over {len(prompts)} prompts{at}")


def value_on(model: Transformer, place: str, prompt: Prompt | str, position: int | None = None) -> Edit:
    """Return the edit that holds a part at its value on another prompt (a patch).

    Args:
        model: the model.
        place: the part; with tokens, as in `a9.h6@-1`, it is held there alone.
        prompt: a text or a prompt of the model.
        position: the token whose value it gets, everywhere; negative from the end. None: every token gets the value
            that the same token of the prompt has, and a part without tokens is held at all of the prompt's.
    """
    part, tokens = split_tokens(place)
    kept = _sender_of(model.architecture, part) or find_place(model.architecture, part)
    where = repr(prompt) if isinstance(prompt, str) else "another prompt"
    with torch.no_grad():
        if position is not None:
            (value,) = _values(model, kept, prompt, position)
            return Edit(place, value, f"its value at {position} of {where}")
        every = [_values(model, kept, prompt, token) for token in tokens] or [
            _values(model, kept, prompt, None)
        ]
    return Edit(place, torch.cat(every), f"its value on {where}")


def between(model: Transformer, place: str, first: Prompt | str, other: Prompt | str) -> Edit:
    """Return the edit that holds a part at any value between those that it has on two prompts, ends included.

    The part's value is c + β g with any β between −1 and 1, the same for all its tokens; c is the middle of both values
    and g half their difference, each rounded once.

    Args:
        model: the model.
        place: the part; with tokens, as in `a9.h6@-1`, it is held there alone, without them at all of the prompts'.
        first: a text or a prompt of the model.
        other: another one, as long where the part is held at all tokens.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> pl.edit(model, between(model, "a1.h0@-1", model.example(1), model.example(2))).architecture.free
        1
    """
    ends = [value_on(model, place, prompt) for prompt in (first, other)]
    values = [one.value for one in ends if one.value is not None]
    if values[0].shape != values[1].shape:
        raise ModelError(
            f"{place} has values at {len(values[0])} and at {len(values[1])} tokens: name tokens"
        )
    center, half = (values[0] + values[1]) / 2, (values[1] - values[0]) / 2
    sides = [repr(prompt) if isinstance(prompt, str) else "a prompt" for prompt in (first, other)]
    return Edit(place, center, f"{ANY} between those on {' and '.join(sides)}", spread=half[None])


def _sender_of(architecture: Architecture, name: str) -> Place | None:
    """The part that sends over an edge; None if a name is none of an edge."""
    if find_edge(architecture, name) is None:
        return None
    sender = name.split("->")[0]
    return (
        Place(sender, -1, STREAM if architecture.free else "blocks.0.hook_resid_pre", None)
        if sender == "input"
        else find_place(architecture, sender)
    )


def _values(
    model: Transformer, place: Place, prompt: Prompt | str, position: int | None
) -> Float[Tensor, "S n"]:
    held = model.prompt(prompt) if isinstance(prompt, str) else prompt
    found = model.run(held, place.hook)[place.hook]
    value = place.read(found.reshape(len(found), -1))
    if place.written:
        value = value @ place.read(model.weights[f"{place.reader}.weight"]).T
    if position is None:
        return value
    if not -len(value) <= position < len(value):
        raise ModelError(f"there is no position {position}: the prompt has {len(value)} tokens")
    return value[[position]]


def edit(model: Transformer, edits: str | Edit | Hook | Sequence[str | Edit | Hook]) -> Transformer:
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
    made = [Edit(one) if isinstance(one, str) else one for one in without_hooks(edits)]
    if not made:
        raise ModelError("nothing is edited: give at least one part, as in 'a9.h6'")
    for one in made:
        check_spread(model.architecture, one)
    hidden = {one.place: find_knockout(model.architecture, one.place) for one in made}
    knockouts = [found for found in hidden.values() if found is not None]
    if len(knockouts) + sum(hidden[one.place] is None for one in made) < len(made):
        raise ModelError("a key is knocked out twice: name it once")
    held = [one for one in made if hidden[one.place] is None]
    if any(one.value is not None or one.direction is not None for one in made if one not in held):
        raise ModelError("a key is knocked out and has no value: give its name alone, as in 'a9.h6.k3'")
    weights = with_knockouts(model.weights, knockouts)
    others = [one for one in held if _freeze(model.architecture, weights, one) or _cut(model, weights, one)]
    held = [one for one in held if one not in others]
    places = [_place_of(model.architecture, one) for one in held]
    check_once(weights, held, places)
    spreads, free = spreads_of(model, weights, held, places)
    for one, place, spread in zip(held, places, spreads, strict=True):
        somewhere = bool(one.tokens) or spread is not None
        if one.feature is not None:
            hold_feature(weights, one, place)
        elif place.reader is None or (one.direction is not None and somewhere):
            hold_direction(weights, one, place, spread)
        elif somewhere:
            hold_part(weights, one, place, spread)
        else:
            apply_edit(weights, one, place)
    check_senders(weights)
    architecture = replace(model.architecture, free=free, free_until=last_block(weights))
    return replace(model, architecture=architecture, weights=weights, name=f"{model.name} {_described(made)}")


def freeze(model: Transformer, place: str, prompt: Prompt | str) -> Edit:
    """Return the edit that freezes the attention pattern of a head at a prompt: the head is then linear in its values.

    Args:
        model: the model.
        place: the head, `a9.h6`, or a layer, `a9`, for all its heads.
        prompt: a text or a prompt of the model; inputs of the edited model have as many tokens.

    Example:
        >>> import prooflens as pl
        >>> model = pl.load("toy")
        >>> pl.edit(model, freeze(model, "a1.h0", model.example(1))).name
        'toy with a1.h0.pattern at another prompt'
    """
    name = f"{place.removesuffix('.pattern')}.pattern"
    found = find_frozen(model.architecture, name)
    if found is None:
        raise ModelError(f"{place!r} has no pattern: write a head as a9.h6, all heads of a layer as a9")
    hook = scores_hook(model.architecture, found[0])
    with torch.no_grad():
        scores = model.run(prompt, hook)[hook][list(found[1])]
    where = repr(prompt) if isinstance(prompt, str) else "another prompt"
    return Edit(name, scores, where)


FEATURE = re.compile(
    r"(?P<kind>feature|decoded) (?P<name>[^.=@]+)\.(?P<i>\d{1,9})(?:=(?P<c>[^@]+))?(?P<at>@.*)?"
)
"""A feature by the name of its dictionary: `feature SAE.512@-1`, `feature SAE.512=2.5`, `decoded SAE.512`."""


def bound_edits(
    model: Transformer,
    edits: str | Edit | Hook | Sequence[str | Edit | Hook],
    prompt: Prompt,
    vectors: Mapping[str, object] | None = None,
) -> list[str | Edit]:
    """Return edits in which patterns and features that are given by their names are those of a prompt and dictionaries,
    and hooks are what they do to values of its length.

    Args:
        model: the model.
        edits: what `edit` takes, patterns that are frozen at the prompt (`a9.h6.pattern`), and features, held with the
            error term (`feature SAE.512@-1`, `feature SAE.512=2.5`) or without it (`decoded SAE.512`); hooks as
            TransformerLens takes them, `("blocks.9.attn.hook_z", function)` (`models.hook_edits`).
        prompt: the prompt that patterns are taken from.
        vectors: dictionaries by name.
    """
    found = list[str | Edit]()
    for one in as_list(edits):
        if isinstance(one, tuple):
            found += from_hooks(model, one, len(prompt))
            continue
        match = FEATURE.fullmatch(one) if isinstance(one, str) else None
        if isinstance(one, str) and find_frozen(model.architecture, one):
            found.append(replace(freeze(model, one, prompt), source="the prompt"))
        elif match is not None:
            if match["name"] not in (vectors or {}):
                raise ModelError(
                    f"no dictionary is called {match['name']!r}: give it as a vector, --vector SAE=FOLDER"
                )
            held = Dictionary.adopt((vectors or {})[match["name"]])
            held.check(model)
            tokens = split_tokens(f"feature{match['at'] or ''}")[1]
            found.append(
                feature(held, int(match["i"]), _number(match["c"]), tokens, match["kind"] == "feature")
            )
        else:
            found.append(one)
    return found


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise ModelError(f"{text!r} is no number: write a feature as in 'feature SAE.512=2.5@-1'") from None


def _freeze(architecture: Architecture, weights: dict[str, Tensor], one: Edit) -> bool:
    """Freeze a pattern, if that is what an edit does."""
    found = find_frozen(architecture, one.place)
    if found is None:
        return False
    if one.value is None or one.direction is not None:
        raise ModelError(f"{one.place} is frozen at a prompt: give models.edits.freeze(model, part, prompt)")
    scores = torch.as_tensor(one.value)
    scores = scores[None] if scores.ndim == 2 else scores
    if len(scores) != len(found[1]):
        raise ModelError(f"{one.place} needs scores of {len(found[1])} heads, got shape {list(scores.shape)}")
    put_frozen(weights, *found, scores)
    return True


def _cut(model: Transformer, weights: dict[str, Tensor], one: Edit) -> bool:
    """Cut an edge, or put a constant in its sender's place, if that is what an edit does."""
    edge = find_edge(model.architecture, split_tokens(one.place)[0])
    if edge is None:
        return False
    if one.direction is not None:
        raise ModelError(f"{one.place}: an edge has no direction")
    values = None
    if one.value is not None:
        kind, layer, _ = edge.sender
        sender = _sender_of(model.architecture, split_tokens(one.place)[0])
        writes = None
        if kind in (HEAD, NEURON) and sender is not None and sender.columns is not None:
            some = slice(sender.columns.start, sender.columns.stop)
            writes = model.weights[f"{sender.reader}.weight"][:, some]
        width = model.architecture.d_model if writes is None else writes.shape[1]
        values = rows_of(one, width, _first(model.weights), Place(one.place, layer, "", None))
        values = values if writes is None else values @ writes.T
    put_edge(weights, edge, one.tokens, values)
    return True


def _first(weights: Mapping[str, Tensor]) -> Tensor:
    return weights["blocks.0.q.weight" if "blocks.0.q.weight" in weights else "blocks.0.up.weight"]


def _place_of(architecture: Architecture, one: Edit) -> Place:
    """The part that an edit holds: one that a map reads, or a value of which a direction is held."""
    part, _ = split_tokens(one.place)
    match = re.fullmatch(r"blocks\.(\d{1,6})\.hook_\w+", part)
    if match is None:
        return find_place(architecture, part)
    if one.direction is None and one.feature is None:
        raise ModelError(f"{part} is a value: give a direction of it, or a part as in 'a9.h6'")
    if part not in (known := hooks_at(architecture, min(int(match[1]), architecture.n_layers - 1))):
        raise ModelError(f"no direction of {part} can be held: a block has {', '.join(known)}")
    name = part if one.feature is None else f"feature {one.feature.index} of {part}"
    return Place(name, int(match[1]), part, None)


def _described(edits: Sequence[Edit]) -> str:
    """The edits in words, those that take parts out together."""
    texts = [str(one) for one in edits]
    out = [text.removeprefix("without ") for text in texts if text.startswith("without ")]
    held = [text for text in texts if not text.startswith("without ")]
    shown = f"without {', '.join(out[:SHOWN])}" + (f" and {len(out) - SHOWN} more" if out[SHOWN:] else "")
    return ", ".join(([shown] if out else []) + held)


SHOWN = 6
"""How many parts that are taken out a model's name lists."""
