"""What is asked: a model, a prompt, a region and queries, bound together into claims. Nothing is proved here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prooflens.errors import EngineError, ModelError, PromptError, QueryError, RegionError
from prooflens.models import EMBEDDED, Prompt, Transformer, load
from prooflens.models.cache import model_folder
from prooflens.models.nearest import yardstick
from prooflens.models.vision import embed_image
from prooflens.problem import Problem
from prooflens.queries import (
    Argmax,
    Beats,
    Circuit,
    Claim,
    DistributionQuery,
    OutputLevel,
    Query,
    parse_heads,
    parse_query,
    resolve,
)
from prooflens.queries.attention import RowQuery
from prooflens.queries.rows import Token, find_token
from prooflens.regions import Ball, Hull, Paraphrases, Pixels, Region, Segment, Span, Steer, listed
from prooflens.results import Subject
from prooflens.verdicts.lenses import check_cap
from prooflens.verdicts.settings import checked_device
from prooflens.verdicts.sites import Vectors, are_inside, inside_claims

Heads = str | tuple[int, int] | Sequence[str | tuple[int, int]] | None
"""`"2.4"`, `"0-2"`, a pair (layer, head), a list of such; None for all."""

Place = Ball | Region | Paraphrases | Pixels | Segment | Hull | Span | Steer
"""Where a claim is to hold."""


LARGEST_EPS = 1e30
"""The largest ε: the attack runs in float32, and squares of values must stay finite in float64."""


@dataclass(frozen=True, eq=False)
class Question:
    """A problem and the claims about it, with the names that results carry."""

    problem: Problem
    claims: list[Claim]
    subject: Subject
    prompt: Prompt

    def eps_in_words(self, nearest: bool | None = None) -> str | None:
        """Say what the radius of a ball is worth, in tokens; None for other regions.

        Args:
            nearest: whether to look for the nearest other tokens; None for where it takes a second or two.
        """
        radius = self.problem.region.radius
        if radius is None:
            return None
        moving = [t for t, row in enumerate(radius) if bool((row > 0).any())]
        measured = yardstick(self.problem.model, self.prompt, nearest)
        return measured.words(float(radius.max()), moving) or None


def ask(
    model: Transformer | str,
    prompt: Prompt | str | Tensor,
    region: Place,
    heads: Heads = None,
    *,
    layer: int | None = None,
    queries: str | Query | Sequence[str | Query] = ("top1",),
    positions: Sequence[Token] | None = None,
    device: str | None = None,
    source: str | None = None,
    vectors: Vectors | None = None,
) -> Question:
    """Bind queries to a prompt in a model.

    Args:
        model: a model, or what `load` takes.
        prompt: a text, a prompt of the model, or an input of shape [S, d].
        region: where the claims are to hold.
        heads: whom queries without heads of their own are asked; None for all.
        layer: all heads of this layer, in place of `heads`.
        queries: queries, or their short forms.
        positions: where queries without positions of their own are asked; None for all.
        device: where to run; None for where the model is.
        source: the folder of the model's weights, where the model does not say itself.
        vectors: the directions and dictionaries that queries name.

    Returns:
        The claims, with the problem that engines are asked about.

    Raises:
        ProoflensError: where one of them is not what it should be; the message says what to do.

    Example:
        >>> import prooflens as pl
        >>> question = ask("toy", pl.load("toy").example(), pl.Ball(0.01), "0.1", positions=[-1])
        >>> [str(claim) for claim in question.claims]
        ['top1@-1 on 0.1@3']
    """
    source = source or (source_of(model) if isinstance(model, str | Transformer) else None)
    model = load(model) if device is None else load(model).to(checked_device(device))
    if model.dtype != torch.float64:
        raise EngineError(f"proofs need a float64 model, {model.name} is {model.dtype}: do not convert it")
    prompt = as_prompt(model, prompt)
    place = as_region(placed_in(region, model), prompt)
    place = place.to(dtype=model.dtype)  # from a coarser precision, without rounding
    if model.architecture.free > place.free:
        raise ModelError(
            f"{model.name}: parts are held at any value of a set, which is asked about by pl.effect or prooflens effect"
        )
    placed = [_placed(query, positions) for query in as_queries(queries, prompt.roles)]
    if are_inside(placed, heads, layer, positions):
        model, problem, claims = inside_claims(model, prompt, place.to(device=model.device), placed, vectors)
        return Question(problem, claims, Subject.of(model, prompt, place, source), prompt)
    problem = Problem(model, place.to(device=model.device))
    wanted = [found for query in placed for found in resolve(query, prompt.roles, len(prompt), prompt.ids)]
    chosen = head_text(heads, layer)
    _check_places(wanted, chosen, positions, problem.n_tokens)
    about = Argmax | Beats | OutputLevel | DistributionQuery
    output = any(isinstance(part, about) for query in wanted for part in _parts(query))
    if output:
        check_cap(model, wanted)
        model.check_head()
    setting = problem.setting(_layers(model, wanted, chosen), output, prompt.tokens)
    claims = [claim for query in wanted for claim in query.bind(setting, chosen)]
    return Question(problem, claims, Subject.of(model, prompt, place, source), prompt)


def placed_in(region: Place, model: Transformer) -> Place:
    """Return a region whose texts are prompts of a model.

    Args:
        region: where claims are to hold.
        model: the model.
    """
    return region.of(model) if isinstance(region, Paraphrases | Pixels | Segment | Hull | Span) else region


def _check_places(
    queries: Sequence[Query], heads: str | None, positions: Sequence[Token] | None, size: int
) -> None:
    """Refuse queries whose own heads or positions would win over the given ones, and counts beyond the prompt."""
    for part in (part for query in queries for part in _parts(query) if isinstance(part, RowQuery)):
        if heads is not None and part.heads is not None:
            raise QueryError(f"{part} names its own heads, and heads {heads!r} are given as well: give one")
        placed = positions is not None and tuple(listed(positions)) != part.positions
        if placed and part.positions is not None:
            raise QueryError(f"{part} names its own position, and positions are given as well: give one")
        if getattr(part, "k", 1) > size:
            raise QueryError(f"{part} asks for more tokens than the prompt has ({size})")


def _layers(model: Transformer, queries: Sequence[Query], chosen: str | None) -> list[int]:
    """The layers whose scores the queries read; `chosen` are the heads of queries that name none."""
    architecture = model.architecture
    named = [text for query in queries for text in _heads_named(query)]
    texts = {chosen or "all" if text is None else text for text in named}
    heads = [
        head for text in texts for head in parse_heads(text, architecture.n_layers, architecture.n_heads)
    ]
    return sorted({layer for layer, _ in heads})


def source_of(model: Transformer | str) -> str | None:
    """The folder of a model's weights: the given one, or the cache's; None for embedded and converted models.

    Args:
        model: a model, or what `load` takes.
    """
    name = model if isinstance(model, str) else model.name
    if name in EMBEDDED:
        return None
    for folder in (Path(name).expanduser(), model_folder(name)):
        if (folder / "config.json").is_file():
            return str(folder.resolve())
    return None


def as_prompt(model: Transformer, prompt: Prompt | str | Tensor) -> Prompt:
    """A prompt of the model, on its device, from a text, a prompt or an input of shape [S, d].

    Args:
        model: the model.
        prompt: any of these.
    """
    if isinstance(prompt, str):
        prompt = model.prompt(prompt)
    if isinstance(prompt, Tensor):
        if model.architecture.patch is not None and prompt.ndim == 3:  # normalised pixels [C, H, W]
            prompt = embed_image(model, prompt)
        model.check_input(prompt)
        prompt = Prompt(prompt, tuple(f"x{i}" for i in range(len(prompt))))
    if isinstance(prompt, np.ndarray):
        raise PromptError(
            f"the input is a numpy array of {prompt.dtype}: give a float64 tensor, torch.from_numpy(x).double()"
        )
    if not isinstance(prompt, Prompt):
        raise PromptError(
            f"a {type(prompt).__name__} is no prompt: give a text, model.prompt(text), or a tensor of shape [S, d]"
        )
    return replace(prompt, x=prompt.x.to(model.device))


def as_region(place: Place, prompt: Prompt) -> Region:
    """The region that a ball around the prompt, a hull of paraphrases, or a region is.

    Args:
        place: any of these.
        prompt: the prompt that a ball stands around.
    """
    if isinstance(place, Ball):
        ball = _indexed(place, prompt).around(prompt)
        if (largest := float(ball.half_widths().max())) > LARGEST_EPS:
            raise RegionError(f"ε = {largest:g} is too large: give one of at most {LARGEST_EPS:g}")
        return ball
    region = place.region() if isinstance(place, Paraphrases | Segment | Hull | Span | Steer) else place
    if not isinstance(region, Region):
        raise RegionError(f"{place!r} is no region: give one, such as pl.Ball(0.01)")
    if len(region.center) != len(prompt):
        raise RegionError(f"the region has {len(region.center)} tokens, the prompt {len(prompt)}")
    if isinstance(place, Segment | Hull | Span | Steer):
        first = _stream(place) if isinstance(place, Steer) else region.reference
        away = (first - prompt.x.to(first)).abs().amax()
        if float(away) > 1e-9 * (1.0 + float(prompt.x.abs().amax())):
            raise RegionError(f"the {region.label} starts at another prompt: give the first prompt to both")
    return region


def _stream(place: Steer) -> Tensor:
    """The stream that is steered."""
    return place.prompt.x if isinstance(place.prompt, Prompt) else place.prompt


def _indexed(ball: Ball, prompt: Prompt) -> Ball:
    """The ball with tokens that are named by their texts as indices."""

    def places(token: Token) -> list[int]:
        return find_token(token, len(prompt), prompt.tokens) if isinstance(token, str) else [token]

    if isinstance(ball.eps, Mapping):
        pairs = [(i, eps) for token, eps in ball.eps.items() for i in places(token)]
        if len(dict(pairs)) < len(pairs):
            raise RegionError(f"a token has two radii in {ball}: give it one")
        return replace(ball, eps=dict(pairs))
    if ball.tokens is None:
        return ball
    return replace(ball, tokens=[i for token in listed(ball.tokens) for i in places(token)])


def as_queries(queries: str | Query | Sequence[str | Query], slots: Collection[str] = ()) -> list[Query]:
    """Queries from their short forms; `slots` are the words that are roles.

    Args:
        queries: one query or several, as objects or short forms.
        slots: the slots of the template that the prompts are members of.
    """
    given = listed(queries)
    if not given:
        raise QueryError("no query is asked: give at least one, such as 'top1'")
    if wrong := [query for query in given if not isinstance(query, str | Query)]:
        raise QueryError(f"{wrong[0]!r} is no query: give one, such as 'top1'")
    return [parse_query(query, slots) if isinstance(query, str) else query for query in given]


def head_text(heads: Heads, layer: int | None) -> str | None:
    """Heads as one text.

    Args:
        heads: heads as people write them.
        layer: a layer, for all of its heads.
    """
    if layer is not None and heads is not None:
        raise QueryError("give a layer or heads, not both")
    if layer is not None:
        if not isinstance(layer, int):
            raise QueryError(
                f"layer is one number, not {layer!r}: several layers are heads='0,1' or heads='0-2'"
            )
        return str(layer)
    if isinstance(heads, tuple) and all(type(part) is int for part in heads):
        return _head_name(heads)
    return None if heads is None else ",".join(map(_head_name, listed(heads)))


def _head_name(head: object) -> str:
    """`"2.4"` as it is, (2, 4) as `2.4`; a number could be a layer or a head, and 1.10 would read as 1.1."""
    if isinstance(head, tuple):
        return ".".join(map(str, head))
    if not isinstance(head, str):
        raise QueryError(f"{head!r} does not name a head: write '1.10' or (1, 10), and '1' for a whole layer")
    return head


def _parts(query: Query) -> tuple[Query, ...]:
    return query.parts if isinstance(query, Circuit) else (query,)


def _heads_named(query: Query) -> list[str | None]:
    """The heads that the parts of a query name; None where a part leaves them open."""
    return [part.heads for part in _parts(query) if isinstance(part, RowQuery)]


def _placed(query: Query, positions: Sequence[Token] | None) -> Query:
    """The query asked at these positions, unless it names its own."""
    if positions is None:
        return query
    if isinstance(query, Circuit):
        return replace(query, parts=tuple(_placed(part, positions) for part in query.parts))
    if isinstance(query, RowQuery) and query.positions is None:
        return replace(query, positions=tuple(listed(positions)))
    return query
