"""Values of a graph as sparse affine forms of a few *anchors*: so reshapes, slices and sums are seen through.

Every element of a value is c + Σ factor · (an element of an anchor). A layout operator moves index, factor and constant
alike, so how heads are cut out of a projection, or pairs turned, need not be matched: it is read off the indices.
Element e of an anchor of width w is feature e mod w of token e div w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Anchor:
    """A value that others are written in.

    Attributes:
        kind: `ids`, `pixels`, `tokens`, `patches`, `input`, `linear`, `norm`, `scores`, `pattern`, `mix`, `act`,
            `product`, `mean`, or a plain function on the way to one of these.
        node: the node that made it.
        width: features per token.
        sources: the forms that it reads.
        inputs: the anchors whose sum it reads, where that is a plain sum.
        weight: a matrix [o, i], a table, or a norm's scale.
        bias: what is added.
        number: ε of a norm.
        word: the function of an activation, `layer` or `rms` of a norm, with `head` in front for one of each head.
    """

    kind: str
    node: object
    width: int
    sources: tuple[Form, ...] = ()
    inputs: frozenset[Anchor] = frozenset()
    weight: Floats | None = None
    bias: Floats | None = None
    number: float = 0.0
    word: str = ""


@dataclass(frozen=True, eq=False)
class Term:
    """An anchor's elements, each times a factor."""

    anchor: Anchor
    index: Ints
    factor: Floats


@dataclass(frozen=True, eq=False)
class Form:
    """A sum of terms and a constant, all of one shape."""

    terms: tuple[Term, ...]
    constant: Floats = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.constant.shape

    @property
    def only(self) -> Term | None:
        """The one term, if there is just one."""
        return self.terms[0] if len(self.terms) == 1 else None

    @property
    def anchors(self) -> set[Anchor]:
        """What it is written in."""
        return {term.anchor for term in self.terms}

    def laid_out(self, move: Callable[[NDArray[np.generic]], NDArray[np.generic]]) -> Form:
        """The form after an operator that only moves elements."""
        terms = tuple(
            Term(t.anchor, move(t.index).astype(np.int64), move(t.factor).astype(np.float64))
            for t in self.terms
        )
        return Form(terms, move(self.constant).astype(np.float64))

    def times(self, other: Floats) -> Form:
        """The form times a constant."""
        shape = np.broadcast_shapes(self.shape, other.shape)
        wide = self.broadcast(shape)
        terms = tuple(Term(t.anchor, t.index, t.factor * other) for t in wide.terms)
        return Form(terms, np.where(wide.constant == 0.0, 0.0, wide.constant * other))

    def broadcast(self, shape: tuple[int, ...]) -> Form:
        """The form in a larger shape."""
        return self if shape == self.shape else self.laid_out(lambda x: np.broadcast_to(x, shape))

    def plus(self, other: Form) -> Form:
        """The sum; terms of one anchor and the same elements are joined."""
        shape = np.broadcast_shapes(self.shape, other.shape)
        terms = list(self.broadcast(shape).terms)
        for term in other.broadcast(shape).terms:
            at = next((i for i, t in enumerate(terms) if _alike(t, term)), None)
            if at is None:
                terms.append(term)
            else:
                terms[at] = Term(term.anchor, term.index, terms[at].factor + term.factor)
        kept = tuple(term for term in terms if term.factor.any())
        return Form(kept, self.broadcast(shape).constant + other.broadcast(shape).constant)

    def is_plain(self) -> bool:
        """Whether it is a sum of anchors, each element once: factors 1, constant 0."""
        return (
            bool(self.terms) and not self.constant.any() and all((t.factor == 1.0).all() for t in self.terms)
        )

    def uniform(self) -> float | None:
        """The one factor of the one term, if it has one and the constant is 0."""
        term = self.only
        if term is None or self.constant.any() or not term.factor.size:
            return None
        first = float(term.factor.flat[0])
        return first if bool((term.factor == first).all()) else None


def _alike(a: Term, b: Term) -> bool:
    return a.anchor is b.anchor and np.array_equal(a.index, b.index)


def constant(values: NDArray[np.generic]) -> Form:
    """A constant as a form."""
    return Form((), np.asarray(values).astype(np.float64))


def whole(anchor: Anchor, index: NDArray[np.generic]) -> Form:
    """An anchor itself, in the layout of a value."""
    held = np.asarray(index).astype(np.int64)
    return Form((Term(anchor, held, np.ones(held.shape)),), np.zeros(held.shape))


def same(a: Form, b: Form) -> bool:
    """Whether two forms are equal, term by term."""
    if a is b:
        return True
    if a.shape != b.shape or len(a.terms) != len(b.terms) or not np.array_equal(a.constant, b.constant):
        return False
    return all(any(_alike(t, u) and np.array_equal(t.factor, u.factor) for u in b.terms) for t in a.terms)


def joined(
    forms: Sequence[Form], join: Callable[[Sequence[NDArray[np.generic]]], NDArray[np.generic]]
) -> Form:
    """Several forms under an operator that puts them together (Concat, Where): terms are paired by anchor."""
    slots: list[tuple[Anchor, int]] = []
    for form in forms:
        count: dict[Anchor, int] = {}
        for term in form.terms:
            slot = (term.anchor, count.setdefault(term.anchor, 0))
            count[term.anchor] += 1
            if slot not in slots:
                slots.append(slot)
    terms = []
    for anchor, number in slots:
        index, factor = [], []
        for form in forms:
            own = [term for term in form.terms if term.anchor is anchor]
            there = number < len(own)
            index.append(own[number].index if there else np.zeros(form.shape, dtype=np.int64))
            factor.append(own[number].factor if there else np.zeros(form.shape))
        terms.append(Term(anchor, join(index).astype(np.int64), join(factor).astype(np.float64)))
    return Form(tuple(terms), join([form.constant for form in forms]).astype(np.float64))


def by_feature(term: Term, values: Floats) -> Floats | None:
    """Values [shape of the term] as one number per feature of the anchor, or None if tokens differ."""
    wide = np.broadcast_to(values, term.index.shape)
    features = term.index % term.anchor.width
    held = np.zeros(term.anchor.width)
    held[features.ravel()] = wide.ravel()
    return held if bool((held[features] == wide).all()) else None


@dataclass(frozen=True, eq=False)
class Rows:
    """A value read row by row: the token of each row, and for each column its feature, its factor and a constant."""

    anchors: frozenset[Anchor]
    tokens: Ints
    features: Ints
    factor: Floats
    constant: Floats


def rows(form: Form) -> Rows | None:
    """The rows of a value, if each is one token of all anchors and all are read alike; None otherwise."""
    if not form.terms or len({term.anchor.width for term in form.terms}) != 1:
        return None
    columns, width = form.shape[-1], form.terms[0].anchor.width
    first = form.terms[0].index.reshape(-1, columns)
    tokens, features = first[:, 0] // width, first[0] % width
    factor = form.terms[0].factor.reshape(-1, columns)[0]
    shift = form.constant.reshape(-1, columns)[0]
    for term in form.terms:
        index = term.index.reshape(-1, columns)
        if not (index == tokens[:, None] * width + features).all():
            return None
        if not (term.factor.reshape(-1, columns) == factor).all():
            return None
    if not (form.constant.reshape(-1, columns) == shift).all():
        return None
    return Rows(frozenset(form.anchors), tokens, features, factor, shift)
