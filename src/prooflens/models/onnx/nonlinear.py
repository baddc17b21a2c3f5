"""What is not affine, and projections: each makes an anchor; norms and activations are put together from parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from prooflens.models.onnx.forms import Anchor, Floats, Form, Ints, Term, by_feature, rows, same, whole
from prooflens.models.onnx.graph import Array, refuse

CLOSE = 1e-6
"""How far a float32 constant of a formula (1/√2, 0.044715) may be from the number that it means, relatively."""


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * abs(b)


class Maker:
    """Makes anchors.

    Attributes:
        made: all anchors in their order.
        input: the anchor of the first block's input, once the embedding is complete.
    """

    def __init__(self) -> None:
        self.made: list[Anchor] = []
        self.input: Anchor | None = None
        self._cut: dict[tuple[int, bytes], Anchor] = {}

    def _keep(self, anchor: Anchor) -> Anchor:
        self.made.append(anchor)
        return anchor

    def function(self, node: Any, kind: str, form: Form, shape: tuple[int, ...] | None = None) -> Form:
        """Return a function of a form, element by element (or the mean of each row); the same one twice is one anchor.

        Args:
            node: the node of the graph.
            kind: the name of the function.
            form: what it reads.
            shape: the shape of what it makes; None for that of the form.
        """
        shape = form.shape if shape is None else shape
        index = np.arange(math.prod(shape)).reshape(shape)
        for anchor in self.made:
            if anchor.kind == kind and same(anchor.sources[0], form):
                return whole(anchor, index)
        return whole(self._keep(Anchor(kind, node, shape[-1], sources=(form,))), index)

    def inverse(self, node: Any, form: Form) -> Form:
        """1/√… where the form is a root."""
        term = form.only
        if term is None or term.anchor.kind != "root" or not form.is_plain():
            raise refuse(node, "it divides by what is no root of a mean")
        return self.function(node, "inverse", form)

    def linear(self, node: Any, form: Form, matrix: Array) -> Form:
        """x W of every token; what scales and shifts its columns joins the matrix."""
        read = rows(form)
        if read is None or any(anchor.kind in ("ids", "pixels") for anchor in read.anchors):
            raise refuse(node, "its rows are not the tokens of one value")
        width = next(iter(read.anchors)).width
        if len(set(read.features.tolist())) != len(read.features) or matrix.shape[0] != len(read.features):
            raise refuse(node, "its columns are not the features of one value")
        weight = np.zeros((matrix.shape[1], width))
        weight[:, read.features] = matrix.T * read.factor
        bias = matrix.T @ read.constant if read.constant.any() else None
        anchor = self._keep(
            Anchor("linear", node, matrix.shape[1], inputs=read.anchors, weight=weight, bias=bias)
        )
        index = read.tokens[:, None] * anchor.width + np.arange(anchor.width)
        return whole(anchor, index.reshape(*form.shape[:-1], anchor.width))

    def patches(self, node: Any, x: Array | Form, weight: Array | Form, bias: Array | None = None) -> Form:
        """The projection of an image's patches: a convolution whose steps are as wide as its kernel.

        Args:
            node: the convolution, for what is said of it.
            x: the image.
            weight: the kernels, shape [width, channels, side, side].
            bias: one number per kernel, or None.
        """
        plain = isinstance(x, Form) and {a.kind for a in x.anchors} == {"pixels"} and x.is_plain()
        if not isinstance(x, Form) or isinstance(weight, Form) or not plain or weight.ndim != 4:
            raise refuse(node, "it is no projection of patches")
        side = weight.shape[-1]
        steps = [int(v) for v in np.ravel(node.attribute("strides", [1, 1]))]
        pads = [int(v) for v in np.ravel(node.attribute("pads", [0]))]
        alike = weight.shape[2] == side and steps == [side, side] and not any(pads)
        plain_kernel = int(node.attribute("group", 1)) == 1
        if not alike or not plain_kernel or any(size % side for size in x.shape[2:]) or x.shape[0] != 1:
            raise refuse(node, "its patches are not square, side by side and without padding")
        high, wide, width = x.shape[2] // side, x.shape[3] // side, len(weight)
        anchor = Anchor("patches", node, width, weight=weight, bias=bias)
        index = np.arange(high * wide)[None] * width + np.arange(width)[:, None]
        return whole(anchor, index.reshape(1, width, high, wide))

    def norm(self, node: Any, word: str, form: Form, eps: float) -> Form:
        """A norm of each row: of a token, or of a head of one.

        Args:
            node: the node that ends the norm, for what is said of it.
            word: which norm it is, as an anchor's `word`.
            form: the rows.
            eps: what the norm adds to the mean square.
        """
        read = rows(form)
        whole_token = read is not None and np.array_equal(read.features, np.arange(len(read.features)))
        if read is not None and whole_token and len(read.features) == next(iter(read.anchors)).width:
            if not form.is_plain():
                raise refuse(node, "it norms a value that is scaled or shifted first")
            anchor = Anchor("norm", node, form.shape[-1], inputs=read.anchors, number=eps, word=word)
            return whole(self._keep(anchor), form.terms[0].index)
        term = form.only
        if term is None or not form.is_plain() or term.anchor.width % form.shape[-1]:
            raise refuse(node, "it norms neither tokens nor heads")
        anchor = Anchor(
            "norm", node, term.anchor.width, inputs=frozenset({term.anchor}), number=eps, word=f"head {word}"
        )
        return whole(self._keep(anchor), term.index)

    def _joined(self, form: Form, values: Floats) -> tuple[Term, Floats] | None:
        """The one projection or norm that a form is, and values by its features, if tokens do not differ."""
        term = form.only
        if term is None or term.anchor.kind not in ("linear", "norm") or not form.is_plain():
            return None
        if np.broadcast_shapes(form.shape, values.shape) != form.shape:
            return None
        if len(np.unique(term.index % term.anchor.width)) != term.anchor.width:
            return None
        found = by_feature(term, values)
        return None if found is None else (term, found)

    def scaled(self, form: Form, values: Array) -> Form:
        """A form times a constant; scales of a norm's or a projection's features become its own."""
        found = self._joined(form, values)
        if found is None or (found[0].anchor.kind == "linear" and len(set(found[1].tolist())) == 1):
            return form.times(values)
        term, factor = found
        old = term.anchor
        if old.kind == "norm":
            weight = factor if old.weight is None else old.weight * factor
        else:
            assert old.weight is not None
            weight = old.weight * factor[:, None]
        bias = None if old.bias is None else old.bias * factor
        return whole(self._keep(replace(old, weight=weight, bias=bias)), term.index)

    def shifted(self, form: Form, values: Array) -> Form:
        """A form plus a constant; shifts of a norm's or a projection's features become its own."""
        found = self._joined(form, values)
        if found is None:
            return form.plus(Form((), np.asarray(values, dtype=np.float64)))
        term, shift = found
        bias = shift if term.anchor.bias is None else term.anchor.bias + shift
        return whole(self._keep(replace(term.anchor, bias=bias)), term.index)

    def settled(self, form: Form) -> Form:
        """A projection times a number, with the number in its matrix: what is added to a stream."""
        factor, term = form.uniform(), form.only
        if (
            factor is None
            or factor == 1.0
            or term is None
            or term.anchor.kind != "linear"
            or len(form.shape) != 3
        ):
            return form
        old = term.anchor
        assert old.weight is not None
        bias = None if old.bias is None else old.bias * factor
        return whole(self._keep(replace(old, weight=old.weight * factor, bias=bias)), term.index)

    def narrowed(self, term: Term) -> tuple[Anchor, Ints]:
        """The part of a projection that a value reads, as a projection of its own (gate and up in one matrix)."""
        old, columns = term.anchor, term.index.shape[-1]
        index = term.index.reshape(-1, columns)
        features, tokens = index[0] % old.width, index[:, 0] // old.width
        if old.kind != "linear" or (columns == old.width and np.array_equal(features, np.arange(columns))):
            return old, term.index
        if not (index == tokens[:, None] * old.width + features).all():
            return old, term.index
        key = (id(old), features.tobytes())
        if key not in self._cut:
            assert old.weight is not None
            bias = None if old.bias is None else old.bias[features]
            self._cut[key] = self._keep(replace(old, width=columns, weight=old.weight[features], bias=bias))
        return self._cut[key], (tokens[:, None] * columns + np.arange(columns)).reshape(term.index.shape)

    def act(self, node: Any, word: str, form: Form) -> Form:
        """An activation of a projection."""
        term = form.only
        if term is None or term.anchor.kind != "linear" or not form.is_plain():
            raise refuse(node, f"its {word} is not of a projection")
        source, index = self.narrowed(term)
        anchor = Anchor("act", node, source.width, inputs=frozenset({source}), word=word)
        return whole(self._keep(anchor), index)

    def tanh(self, node: Any, form: Form) -> Form:
        """tanh: of a projection an activation, else a part of a cap or of GELU."""
        term = form.only
        plain = term is not None and term.anchor.kind == "linear" and form.is_plain()
        return self.act(node, "tanh", form) if plain else self.function(node, "tanh", form)

    def cube(self, node: Any, form: Form) -> Form:
        """x³ of one term."""
        factor, term = form.uniform(), form.only
        if factor is None or term is None:
            raise refuse(node, "it is no part of an activation here")
        made = self.function(node, "cube", whole(term.anchor, term.index))
        return made.times(np.array(factor**3))

    def product(self, node: Any, x: Form, y: Form) -> Form:
        """A product of two values: a norm, an activation, or a gated network."""
        for a, b in ((x, y), (y, x)):
            made = self._with_function(node, a, b)
            if made is not None:
                return made
        if same(x, y):
            return self.function(node, "square", x)
        left, right = x.uniform(), y.uniform()
        if left is not None and right is not None and x.only is not None and _reads(y, x.only):
            return self.function(node, "square", whole(x.only.anchor, x.only.index)).times(
                np.array(left * right)
            )
        for a, b in ((x, y), (y, x)):
            gate, up = a.only, b.only
            if gate is None or up is None or not (a.is_plain() and b.is_plain()):
                continue
            if gate.anchor.kind == "act" and up.anchor.kind == "linear":
                linear, index = self.narrowed(up)
                if np.array_equal(index, gate.index) and linear.width == gate.anchor.width:
                    sources = (a, whole(linear, index))
                    anchor = Anchor("product", node, linear.width, sources, frozenset({gate.anchor, linear}))
                    return whole(self._keep(anchor), index)
        raise refuse(node, "the product of two values is no norm, activation or gate that is known here")

    def _with_function(self, node: Any, x: Form, y: Form) -> Form | None:
        """x times a function of x: a norm, GELU, SiLU, or x·x²."""
        part = y.only
        if part is None or not part.factor.size:
            return None
        if part.anchor.kind == "inverse" and y.is_plain():
            return self._normed(node, x, part.anchor)
        factor, shift = float(part.factor.flat[0]), float(y.constant.flat[0])
        if not ((part.factor == factor).all() and (y.constant == shift).all()):
            return None
        own, scale = x.only, x.uniform()
        if own is None or scale is None or not part.anchor.sources:
            return None
        plain, inner = whole(own.anchor, own.index), part.anchor.sources[0]
        if part.anchor.kind == "square" and inner.uniform() is not None and _reads(inner, own):
            ratio = inner.uniform() or 0.0
            cubed = self.cube(node, plain).times(np.array(scale * factor * ratio**2))
            return cubed.plus(plain.times(np.array(scale * shift))) if shift else cubed
        word = _activation(part.anchor, own, factor, shift)
        if word is None:
            return None
        times = scale * factor * (1.0 if word == "silu" else 2.0)
        made = self.act(node, word, plain)
        return made if times == 1.0 else made.times(np.array(times))

    def _normed(self, node: Any, x: Form, inverse: Anchor) -> Form:
        """x/√(mean(x²) + ε), with or without the mean taken off before."""
        inner = inverse.sources[0].terms[0].anchor.sources[0]  # what stands under the root
        mean, eps = inner.only, inner.constant
        if (
            mean is None
            or mean.anchor.kind != "mean"
            or not (mean.factor == 1.0).all()
            or not (eps == eps.flat[0]).all()
        ):
            raise refuse(node, "it divides by what is no root of a mean")
        squares = mean.anchor.sources[0].only
        if squares is None or squares.anchor.kind != "square" or not same(squares.anchor.sources[0], x):
            raise refuse(node, "it divides a value by the root of another's mean square")
        means = [t for t in x.terms if t.anchor.kind == "mean"]
        if not means:
            return self.norm(node, "rms", x, float(eps.flat[0]))
        base = Form(tuple(t for t in x.terms if t.anchor.kind != "mean"), x.constant)
        centred = len(means) == 1 and (means[0].factor == -1.0).all()
        if not centred or not same(means[0].anchor.sources[0], base):
            raise refuse(node, "it takes off the mean of another value")
        return self.norm(node, "layer", base, float(eps.flat[0]))

    def pooled(self, node: Any, form: Form, keep: bool) -> Form:
        """The mean over all tokens."""
        read = rows(form)
        if read is None or not np.array_equal(read.features, np.arange(form.shape[-1])):
            raise refuse(node, "it is no mean over the tokens of one value")
        if sorted(read.tokens.tolist()) != list(range(len(read.tokens))) or not form.is_plain():
            raise refuse(node, "it is no mean over all tokens of one value")
        anchor = self._keep(Anchor("pool", node, form.shape[-1], inputs=read.anchors))
        shape = (*form.shape[:-2], *([1] if keep else []), form.shape[-1])
        return whole(anchor, np.arange(form.shape[-1]).reshape(shape))

    def scores(self, node: Any, x: Form, y: Form) -> Form:
        """Products of queries and keys, [1, H, S, d_h] and [1, H, d_h, S]."""
        known = {"linear", "norm"}
        if len(x.anchors) != 1 or len(y.anchors) != 1 or len(x.shape) < 3 or len(x.shape) != len(y.shape):
            raise refuse(node, "its factors are not queries and keys of heads")
        if not {next(iter(x.anchors)).kind, next(iter(y.anchors)).kind} <= known:
            raise refuse(node, "its factors are not projections")
        heads = math.prod(x.shape[:-2])
        n, columns, width = x.shape[-2], x.shape[-1], y.shape[-1]
        q = x.laid_out(lambda v: v.reshape(heads, n, columns))
        k = y.laid_out(lambda v: np.broadcast_to(v, (*x.shape[:-2], columns, width)).swapaxes(-1, -2))
        k = k.laid_out(lambda v: v.reshape(heads, width, columns))
        anchor = self._keep(Anchor("scores", node, width, sources=(q, k)))
        return whole(anchor, np.arange(heads * n * width).reshape(*x.shape[:-2], n, width))

    def softmax(self, node: Any, form: Form) -> Form:
        """Attention's weights."""
        kinds = {anchor.kind for anchor in form.anchors}
        if not kinds <= {"scores", "tanh"} or len(form.terms) != 1:
            raise refuse(node, "it is not of attention scores")
        if node.attribute("axis", -1) not in (-1, len(form.shape) - 1):
            raise refuse(node, "it is not over the keys")
        n, width = form.shape[-2:]
        held = form.laid_out(lambda v: v.reshape(-1, n, width))
        anchor = self._keep(Anchor("pattern", node, width, sources=(held,)))
        return whole(anchor, np.arange(form.constant.size).reshape(form.shape))

    def mix(self, node: Any, pattern: Form, values: Form) -> Form:
        """Σ_j s_hij v_hj: [1, H, S, d_h], whose features are head after head."""
        if len(values.terms) != 1 or not pattern.is_plain() or next(iter(values.anchors)).kind != "linear":
            raise refuse(node, "it mixes what are no values of heads")
        heads, n, columns = math.prod(values.shape[:-2]), pattern.shape[-2], values.shape[-1]
        held = values.laid_out(lambda v: v.reshape(heads, values.shape[-2], columns))
        anchor = self._keep(Anchor("mix", node, heads * columns, sources=(pattern, held)))
        index = (np.arange(n)[:, None] * heads * columns + np.arange(columns))[None]
        return whole(
            anchor,
            (index + np.arange(heads)[:, None, None] * columns).reshape(*values.shape[:-2], n, columns),
        )


def _reads(form: Form, term: Term) -> bool:
    """Whether a form's one term is of the same elements."""
    only = form.only
    return only is not None and only.anchor is term.anchor and np.array_equal(only.index, term.index)


def _activation(function: Anchor, own: Term, factor: float, shift: float) -> str | None:
    """Which activation x·(factor·function + shift) is, up to a number; None if none."""
    inner = function.sources[0]
    ratio = inner.uniform()
    if function.kind == "sigmoid":
        return "silu" if ratio == 1.0 and shift == 0.0 and _reads(inner, own) else None
    if factor != shift:
        return None
    if function.kind == "erf":
        return "gelu" if ratio is not None and _close(ratio, 0.5**0.5) and _reads(inner, own) else None
    if function.kind != "tanh" or len(inner.terms) != 2 or inner.constant.any():
        return None
    cubes = [t for t in inner.terms if t.anchor.kind == "cube"]
    plain = [t for t in inner.terms if t.anchor.kind != "cube"]
    if len(cubes) != 1 or not _reads(Form((plain[0],), inner.constant), own):
        return None
    if not _reads(cubes[0].anchor.sources[0], own):
        return None
    first, third = float(plain[0].factor.flat[0]), float(cubes[0].factor.flat[0])
    root = math.sqrt(2.0 / math.pi)
    return "gelu_tanh" if _close(first, root) and _close(third, 0.044715 * root) else None
