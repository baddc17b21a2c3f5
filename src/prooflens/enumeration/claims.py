"""What a query says of every member of a shape: functionals of scores, the same for all, and outputs by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.enumeration.distributions import LOGITS, MemberDistribution
from prooflens.enumeration.inside import Elsewhere, check_elsewhere
from prooflens.errors import QueryError
from prooflens.families import Member, Shape
from prooflens.models import Prompt, Transformer
from prooflens.models.knockouts import check_rows
from prooflens.models.tree import Reading
from prooflens.queries import (
    Argmax,
    AttributionQuery,
    Beats,
    Circuit,
    Condition,
    DistributionQuery,
    Entropy,
    InsideQuery,
    Lens,
    Mass,
    Query,
    Ranking,
    Role,
    Row,
    RowQuery,
    Sense,
    Setting,
    SiteQuery,
    TopK,
    parse_heads,
    resolve,
)
from prooflens.queries.roles import output_of
from prooflens.verdicts.sites import Crossed, Readouts, Vectors, crossed, readouts


@dataclass(frozen=True)
class OutputMargin:
    """Logit(winner) − Logit(loser), or over all other outputs; an output is an index, or the token at a position.

    Attributes:
        winner: an index, or a position.
        loser: likewise; None for the largest of all others.
        by_token: for winner and loser, whether the number is a position.
    """

    winner: int
    loser: int | None
    by_token: tuple[bool, bool]

    def outputs(self, ids: Int[Tensor, "B S"]) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"] | None]:
        """The indices of both outputs for every member.

        Args:
            ids: the tokens of the members, shape [B, S].
        """

        def found(number: int, by_token: bool) -> Tensor:
            return ids[:, number] if by_token else ids.new_full((len(ids),), number)

        loser = None if self.loser is None else found(self.loser, self.by_token[1])
        return found(self.winner, self.by_token[0]), loser


@dataclass(frozen=True, eq=False)
class ShapeClaim:
    """A query, compiled for the members of one shape.

    Attributes:
        conditions: functionals of rows of scores, and the sign wanted of each.
        outputs: margins of outputs, all wanted positive.
        rows: the rows of attention that are read.
        readouts: readouts of values inside the model.
        elsewhere: margins of outputs that are read from another vector: attributions and lenses.
        crossed: comparisons of readouts at different hooks or tokens.
        distribution: the metric of an effect, where it is one of a distribution.
    """

    conditions: tuple[Condition, ...]
    outputs: tuple[OutputMargin, ...]
    rows: tuple[Row, ...] = field(default=())
    readouts: tuple[Readouts, ...] = field(default=())
    elsewhere: tuple[tuple[Elsewhere, OutputMargin], ...] = field(default=())
    crossed: tuple[Crossed, ...] = field(default=())
    distribution: MemberDistribution | None = None

    @property
    def reads(self) -> list[Readouts]:
        """All readouts, those of comparisons included."""
        return [*self.readouts, *(side for pair in self.crossed for side in pair.sides)]

    @property
    def sites(self) -> list[tuple[str, int]]:
        """The hooks and tokens whose values are read."""
        found = [(read.hook, read.position) for read in self.reads]
        return found + [(place.hook, place.position) for place, _ in self.elsewhere]

    def judge(
        self, reading: Reading, model: Transformer, ids: Int[Tensor, "B S"]
    ) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
        """Return the margin of every member, the smallest of its functionals, and whether it satisfies the claim.

        Args:
            reading: what the model made of the members.
            model: the model.
            ids: their tokens.
        """
        scores = {row: reading.scores[row.layer, row.position][:, row.head] for row in self.rows}
        values, met = [], []
        for condition in self.conditions:
            value = condition.functional.value(scores or {Row(0, 0, 0): ids.double()})
            values.append(value)
            met.append(condition.sense.met(value, value))
        for margin in self.outputs:
            assert reading.hidden is not None
            value = _output_margin(*model.head, reading.hidden, *margin.outputs(ids))
            values.append(value)
            met.append(Sense.POSITIVE.met(value, value))
        weight, bias = model.head if self.elsewhere else (None, None)
        for place, margin in self.elsewhere:
            assert weight is not None
            assert bias is not None
            vector = place.vector(model, reading.values[place.hook, place.position])
            value = place.sign * _output_margin(weight, place.bias(bias), vector, *margin.outputs(ids))
            values.append(value)
            met.append(place.sense.met(value, value))
        for pair in self.crossed:
            both = torch.cat([_outputs(reading, side) for side in pair.sides], -1)
            value = pair.condition.functional.value({}, both)
            values.append(value)
            met.append(pair.condition.sense.met(value, value))
        for read in self.readouts:
            outputs = _outputs(reading, read)
            for _, condition in read.wanted:
                value = condition.functional.value({}, outputs)
                values.append(value)
                met.append(condition.sense.met(value, value))
        if not values:  # every key that takes part is named: true by the mask alone
            sure = torch.full((len(ids),), torch.inf, dtype=torch.float64, device=ids.device)
            return sure, torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        return torch.stack(values, -1).amin(-1), torch.stack(met, -1).all(-1)


def _outputs(reading: Reading, read: Readouts) -> Float[Tensor, "B F"]:
    h = reading.values[read.hook, read.position]
    return torch.nn.functional.linear(h, read.weight.to(h), read.bias.to(h))


def compile_claim(
    query: Query,
    shape: Shape,
    model: Transformer,
    token: Sequence[str] | None,
    vectors: Vectors | None = None,
) -> ShapeClaim:
    """Compile a query for the members of a shape.

    Args:
        query: what is claimed; its tokens are indices, roles, or texts outside the slots.
        shape: the members.
        model: the model.
        token: the texts of the fixed tokens; None if there are none.
        vectors: the directions and dictionaries that readouts name.

    Raises:
        QueryError: if the query depends on a clean input, has no sign, or names what is not there.
    """
    if isinstance(query, DistributionQuery):
        return ShapeClaim((), (), distribution=_distribution(query, shape, model))
    setting = _setting(query, shape.n_tokens, model, token)
    empty = torch.zeros(shape.n_tokens, model.architecture.d_model, dtype=torch.float64)
    place = Prompt(empty, tuple(token or ("",) * shape.n_tokens), roles=shape.roles)
    read: list[Readouts] = []
    conditions: list[Condition] = []
    outputs: list[OutputMargin] = []
    rows: list[Row] = []
    elsewhere: list[tuple[Elsewhere, OutputMargin]] = []
    pairs: list[Crossed] = []
    for found in resolve(query, shape.roles, shape.n_tokens):
        for part in parts_of(found):
            if isinstance(part, Argmax | Beats):
                outputs.append(_output(part, shape, model))
                continue
            if isinstance(part, AttributionQuery | Lens):
                asked = part.query if isinstance(part, Lens) else Beats(part.winner, part.loser)
                assert isinstance(asked, Argmax | Beats)
                elsewhere.append((Elsewhere.of(part, model, shape.n_tokens), _output(asked, shape, model)))
                continue
            if (pair := crossed(model, place, part, vectors)) is not None:
                pairs.append(pair)
                continue
            if isinstance(part, SiteQuery):
                read += readouts(model, place, part, vectors)
                continue
            for claim in part.bind(setting):
                conditions += claim.conditions
                rows += claim.rows
    if not any((conditions, outputs, rows, read, elsewhere, pairs)):
        raise QueryError(f"{query} reads no row of attention in prompts of {shape.n_tokens} tokens")
    kept = tuple(dict.fromkeys(rows))
    return ShapeClaim(tuple(conditions), tuple(outputs), kept, tuple(read), tuple(elsewhere), tuple(pairs))


def member_conditions(query: Query, member: Member, model: Transformer) -> list[Condition]:
    """Return everything that a query says of one member, outputs by their indices, but for values inside the model.

    Args:
        query: what is claimed.
        member: the member.
        model: the model.
    """
    parts = [part for part in _resolved(query, member) if not isinstance(part, InsideQuery)]
    return _conditions(query, parts, len(member.ids), model)


def member_lenses(query: Query, member: Member, model: Transformer) -> list[tuple[int, list[Condition]]]:
    """Return the blocks behind which a query looks through the head at one member, and what it says of the outputs.

    Args:
        query: what is claimed.
        member: the member.
        model: the model.
    """
    lenses = [part for part in _resolved(query, member) if isinstance(part, Lens)]
    return [(lens.layer, _conditions(query, [lens.query], len(member.ids), model)) for lens in lenses]


def _resolved(query: Query, member: Member) -> list[Query]:
    found = resolve(query, member.roles, len(member.ids), member.ids)
    return [part for one in found for part in parts_of(one)]


def _conditions(query: Query, parts: Sequence[Query], size: int, model: Transformer) -> list[Condition]:
    setting = _setting(query, size, model, None)
    if model.architecture.d_out is not None:
        setting = replace(setting, logits=torch.zeros(model.architecture.d_out, dtype=torch.float64))
    return [condition for asked in parts for claim in asked.bind(setting) for condition in claim.conditions]


def member_readouts(
    query: Query, member: Member, model: Transformer, vectors: Vectors | None
) -> tuple[list[Readouts], list[Crossed]]:
    """Return what a query reads inside the model at one member.

    Args:
        query: what is claimed.
        member: the member.
        model: the model.
        vectors: directions and dictionaries by name.

    Returns:
        The readouts, and the comparisons of two at different hooks or tokens.
    """
    reads, pairs = list[Readouts](), list[Crossed]()
    for part in parts_of(query):
        if isinstance(part, SiteQuery):
            prompt = replace(model.prompt(list(member.ids)), roles=member.roles)
            pair = crossed(model, prompt, part, vectors)
            if pair is None:
                reads += readouts(model, prompt, part, vectors)
            else:
                pairs.append(pair)
    return reads, pairs


def parts_of(query: Query) -> tuple[Query, ...]:
    """The parts of a conjunction; of a weighted sum, and of everything else, it itself.

    Args:
        query: any query.
    """
    return query.parts if isinstance(query, Circuit) and query.weights is None else (query,)


def check_query(query: Query) -> None:
    """Raise a `QueryError` unless a query says of every prompt by itself whether it holds.

    Args:
        query: what is asked of a family.
    """
    parts = query.parts if isinstance(query, Circuit) else (query,)
    for part in parts:
        if isinstance(part, RowQuery) and part.heads is None:
            raise QueryError(f"{part} names no head: write it as in '18.6:{part}'")
        if isinstance(part, Ranking) or (isinstance(part, TopK | Mass) and part.tokens is None):
            raise QueryError(
                f"{part} compares with a clean prompt, and a family has none: name the key, as in 'top1={{A}}' or "
                "'mass>=0.5@{A}'"
            )
        check_elsewhere(part)
        if isinstance(part, SiteQuery) and part.comparison is None:
            raise QueryError(f"{part} has no sign: give a threshold, as in 'neuron 5.12>0@-1'")
        if isinstance(part, Argmax) and part.answer is None:
            raise QueryError("argmax compares with a clean prompt, and a family has none: write 'argmax={A}'")
        if isinstance(part, Entropy) and part.lower is None and part.upper is None:
            raise QueryError("entropy alone has no sign: give a threshold, as in 'entropy<=1.5'")


def _setting(query: Query, size: int, model: Transformer, token: Sequence[str] | None) -> Setting:
    """What queries are bound to: masks and names; the scores are zeros, since no claim depends on them."""
    architecture = model.architecture
    parts = query.parts if isinstance(query, Circuit) else (query,)
    heads = [part.heads for part in parts if isinstance(part, RowQuery) and part.heads is not None]
    named = (parse_heads(text, architecture.n_layers, architecture.n_heads) for text in heads)
    layers = sorted({layer for found in named for layer, _ in found})
    check_rows(model.weights, layers)
    zeros = torch.zeros(architecture.n_heads, size, size, dtype=torch.float64)
    windows = {layer: model.mask(size, layer=layer).cpu() for layer in layers if architecture.is_local(layer)}
    texts = None if token is None else tuple(token)
    return Setting(
        dict.fromkeys(layers, zeros),
        model.mask(size).cpu(),
        architecture.n_layers,
        architecture.n_heads,
        texts,
        None,
        windows,
    )


def _output(query: Argmax | Beats, shape: Shape, model: Transformer) -> OutputMargin:
    model.check_head()
    if isinstance(query, Argmax):
        assert query.answer is not None
        number, by_token = _named(query.answer, shape, model)
        return OutputMargin(number, None, (by_token, False))
    winner, loser = _named(query.winner, shape, model), _named(query.loser, shape, model)
    return OutputMargin(winner[0], loser[0], (winner[1], loser[1]))


def _distribution(query: DistributionQuery, shape: Shape, model: Transformer) -> MemberDistribution:
    model.check_head()
    index = None if query.index is None else _named(query.index, shape, model)
    among = None if query.among is None else tuple(_named(output, shape, model) for output in query.among)
    return MemberDistribution(index, among)


def _named(output: int | Role, shape: Shape, model: Transformer) -> tuple[int, bool]:
    """An output by index, or the position whose token it is."""
    size = model.architecture.d_out or 0
    if isinstance(output, int):
        if output >= size:
            raise QueryError(f"there is no output {output}: the model has {size}")
        return output, False
    if size != model.architecture.d_vocab:
        raise QueryError(
            f"{model.name} predicts classes, not tokens: name outputs by index, as in 'logit3>logit5'"
        )
    places = output_of(output, shape.roles)
    columns = [_column(shape, output.name, place) for place in places]
    if any(not np.array_equal(column, columns[0]) for column in columns[1:]):
        raise QueryError(
            f"slot {output} has other tokens at other places: say which, as in {{{output.name}.1}}"
        )
    return places[0], True


def _column(shape: Shape, slot: str, place: int) -> np.ndarray:
    """The tokens of a slot's fillers at one of its positions."""
    for (start, stop), tokens in zip(shape.places[slot], shape.tokens[slot], strict=True):
        if start <= place < stop:
            return tokens[:, place - start]
    raise AssertionError("a position of the slot is in one of its spans")


def _output_margin(
    weight: Float[Tensor, "C d"],
    bias: Float[Tensor, " C"],
    hidden: Float[Tensor, "B d"],
    winner: Int[Tensor, " B"],
    loser: Int[Tensor, " B"] | None,
) -> Float[Tensor, " B"]:
    if loser is not None:
        return _logit(weight, bias, hidden, winner) - _logit(weight, bias, hidden, loser)
    found = []
    for rows in torch.arange(len(hidden), device=hidden.device).split(max(1, LOGITS // len(weight))):
        logits = torch.nn.functional.linear(hidden[rows], weight, bias)
        own = logits.gather(1, winner[rows, None])[:, 0]
        rest = logits.scatter(1, winner[rows, None], -torch.inf).amax(-1)
        found.append(own - rest)
    return torch.cat(found)


def _logit(weight: Tensor, bias: Tensor, hidden: Tensor, index: Tensor) -> Tensor:
    return (weight[index] * hidden).sum(-1) + bias[index]
