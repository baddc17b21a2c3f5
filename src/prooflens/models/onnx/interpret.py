"""Walk a graph's nodes: constants are computed, other values become forms; what is not affine makes an anchor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from prooflens.models.onnx.forms import Anchor, Form, constant, joined, whole
from prooflens.models.onnx.graph import Array, Graph, apply, refuse
from prooflens.models.onnx.nonlinear import Maker

Value = Array | Form

_NAMES = "Reshape Transpose Unsqueeze Squeeze Flatten Slice Expand Identity Cast CastLike Dropout Split Tile"
LAYOUT = frozenset(_NAMES.split())
"""Operators that only move elements of their first input."""


class Reader(Maker):
    """Reads a graph at one number of tokens.

    Attributes:
        values: what every name stands for: an array, or a form.
        never: token ids that the graph compares with, as it does with a padding token; they are taken as not there.
    """

    def __init__(self, graph: Graph, n_tokens: int) -> None:
        super().__init__()
        self.graph = graph
        self.values: dict[str, Value] = {**graph.constants, **graph.set_inputs(n_tokens)}
        self.never: set[int] = set()
        name, _, is_text = graph.data
        shape = graph.shape_of_data(n_tokens)
        kind, width = ("ids", 1) if is_text else ("pixels", int(np.prod(shape)))
        self.data = Anchor(kind, None, width)
        self.values[name] = whole(self.data, np.arange(int(np.prod(shape))).reshape(shape))
        uses = [
            (x, node.op_type)
            for node in graph.nodes
            if node.op_type not in ("Shape", "Size")
            for x in node.input
        ]
        self.uses = Counter(x for x, _ in uses)
        self.read_whole = {
            x for x, kind in uses if kind in ("LayerNormalization", "RMSNormalization", "MatMul", "Gemm")
        }

    def read(self) -> Form:
        """The form of the output.

        Raises:
            NodeError: at the first node that is not understood.
        """
        for node in self.graph.nodes:
            for name in node.input:
                if name and name not in self.values:
                    raise refuse(node, f"its input {name!r} comes from nowhere")
            given = [self.values[name] if name else None for name in node.input]
            try:
                made = self.step(node, given)
            except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
                raise refuse(node, f"its inputs do not fit ({str(error).splitlines()[0]})") from error
            for name, value in zip(node.output, made, strict=False):
                self.values[name] = self._begun(node, name, value)
        found = self.values.get(self.graph.output)
        if not isinstance(found, Form):
            raise refuse(self.graph.nodes[-1], "the output does not depend on the input")
        return found

    def _begun(self, node: Any, name: str, value: Value) -> Value:
        """The value; where the embedding is complete, the input of the first block takes its place."""
        if self.input is not None or not isinstance(value, Form) or not value.terms:
            return value
        if any(anchor.kind not in ("tokens", "patches") for anchor in value.anchors) or len(value.shape) != 3:
            return value
        if self.uses[name] < 2 and name not in self.read_whole:
            return value
        if value.shape[-1] != value.terms[0].anchor.width:
            return value
        self.input = Anchor("input", node, value.shape[-1], sources=(value,))
        return whole(self.input, np.arange(value.constant.size).reshape(value.shape))

    def step(self, node: Any, given: list[Value | None]) -> tuple[Value, ...]:
        """What a node makes of its inputs."""
        kind = node.op_type
        if not any(isinstance(x, Form) for x in given):
            return apply(node, [None if isinstance(x, Form) else x for x in given])
        first = given[0]
        if kind in ("Shape", "Size", "IsNaN") and isinstance(first, Form):
            return apply(node, [first.constant])
        if kind in LAYOUT and isinstance(first, Form):
            return self._layout(node, first, given[1:])
        known: dict[str, Callable[..., Value]] = {
            "Concat": self._concat,
            "Where": self._where,
            "Gather": self._gather,
            "Equal": self._equal,
            "Add": self._add,
            "Sub": self._sub,
            "Neg": lambda node, x: x.times(np.array(-1.0)),
            "Mul": self._mul,
            "Div": self._div,
            "MatMul": self._matmul,
            "Gemm": self._gemm,
            "Conv": self.patches,
            "BatchNormalization": self._batch_norm,
            "LayerNormalization": self._layer_norm,
            "RMSNormalization": self._rms_norm,
            "ReduceMean": self._mean,
            "Softmax": self.softmax,
            "Pow": self._pow,
            "Gelu": self._gelu,
            "Relu": lambda node, x: self.act(node, "relu", x),
            "Tanh": lambda node, x: self.tanh(node, x),
            "Erf": lambda node, x: self.function(node, "erf", x),
            "Sigmoid": lambda node, x: self.function(node, "sigmoid", x),
            "Sqrt": lambda node, x: self.function(node, "root", x),
            "Reciprocal": lambda node, x: self.inverse(node, x),
        }
        if kind not in known:
            raise refuse(node, "it is no part of a transformer here")
        return (known[kind](node, *given),)

    def _layout(self, node: Any, form: Form, rest: list[Value | None]) -> tuple[Value, ...]:
        if node.op_type in ("Cast", "CastLike", "Identity", "Dropout"):
            return (form,)
        if any(isinstance(x, Form) for x in rest):
            raise refuse(node, "its shape depends on the data")
        others = [x for x in rest if not isinstance(x, Form)]
        return tuple(
            form.laid_out(lambda x, k=k: apply(node, [x, *others])[k])  # type: ignore[misc]
            for k in range(len(node.output))
        )

    def _concat(self, node: Any, *given: Value) -> Form:
        forms = [x if isinstance(x, Form) else constant(x) for x in given]
        return joined(forms, lambda parts: apply(node, list(parts))[0])

    def _where(self, node: Any, condition: Value, x: Value, y: Value) -> Form:
        if isinstance(condition, Form):
            raise refuse(node, "its condition depends on the data")
        forms = [v if isinstance(v, Form) else constant(v) for v in (x, y)]
        shape = np.broadcast_shapes(condition.shape, *(form.shape for form in forms))
        wide = [form.broadcast(shape) for form in forms]
        return joined(wide, lambda parts: np.where(condition, parts[0], parts[1]))

    def _gather(self, node: Any, table: Value, index: Value) -> Form:
        if isinstance(table, Form) and not isinstance(index, Form):
            return table.laid_out(lambda x: apply(node, [x, index])[0])
        if isinstance(table, Form) or not isinstance(index, Form) or index.anchors != {self.data}:
            raise refuse(node, "it is no table of embeddings of the token ids")
        if table.ndim != 2 or node.attribute("axis", 0) != 0 or not index.is_plain():
            raise refuse(node, "it is no table of embeddings of the token ids")
        anchor, tokens = Anchor("tokens", node, table.shape[1], weight=table), index.terms[0].index
        return whole(anchor, tokens[..., None] * table.shape[1] + np.arange(table.shape[1]))

    def _equal(self, node: Any, x: Value, y: Value) -> Array:
        form, other = (x, y) if isinstance(x, Form) else (y, x)
        ids = isinstance(form, Form) and form.anchors == {self.data} and self.data.kind == "ids"
        if not ids or isinstance(other, Form) or other.size != 1 or not isinstance(form, Form):
            raise refuse(node, "it compares what depends on the data")
        self.never.add(int(other.ravel()[0]))
        return np.zeros(np.broadcast_shapes(form.shape, other.shape), dtype=bool)

    def _add(self, node: Any, x: Value, y: Value) -> Form:
        if isinstance(x, Form) and isinstance(y, Form):
            return self.settled(x).plus(self.settled(y))
        form, other = (x, y) if isinstance(x, Form) else (y, x)
        assert isinstance(form, Form)
        return self.shifted(form, np.asarray(other, dtype=np.float64))

    def _sub(self, node: Any, x: Value, y: Value) -> Form:
        if isinstance(y, Form):
            negative = y.times(np.array(-1.0))
            return negative.plus(x if isinstance(x, Form) else constant(x))
        return self._add(node, x, -np.asarray(y, dtype=np.float64))

    def _mul(self, node: Any, x: Value, y: Value) -> Form:
        if isinstance(x, Form) and isinstance(y, Form):
            return self.product(node, x, y)
        form, other = (x, y) if isinstance(x, Form) else (y, x)
        assert isinstance(form, Form)
        return self.scaled(form, np.asarray(other, dtype=np.float64))

    def _div(self, node: Any, x: Value, y: Value) -> Form:
        if isinstance(y, Form):
            below = self.inverse(node, y)
            if isinstance(x, Form):
                return self.product(node, x, below)
            return below.times(np.asarray(x, dtype=np.float64))
        assert isinstance(x, Form)
        return self.scaled(x, 1.0 / np.asarray(y, dtype=np.float64))

    def _matmul(self, node: Any, x: Value, y: Value) -> Form:
        if isinstance(x, Form) and isinstance(y, Form):
            return self.mix(node, x, y) if self.is_pattern(x) else self.scores(node, x, y)
        if isinstance(x, Form) and not isinstance(y, Form) and y.ndim == 2:
            return self.linear(node, x, y)
        raise refuse(node, "it is no projection by a constant matrix")

    def _gemm(self, node: Any, x: Value, y: Value, z: Value | None = None) -> Form:
        if (
            not isinstance(x, Form)
            or isinstance(y, Form)
            or isinstance(z, Form)
            or node.attribute("transA", 0)
        ):
            raise refuse(node, "it is no projection by a constant matrix")
        weight = (y.T if node.attribute("transB", 0) else y) * float(node.attribute("alpha", 1.0))
        made = self.linear(node, x, weight)
        return made if z is None else self.shifted(made, z * float(node.attribute("beta", 1.0)))

    def _batch_norm(self, node: Any, x: Value, *given: Value) -> Form:
        parts = [part for part in given if not isinstance(part, Form)]
        if not isinstance(x, Form) or len(parts) != 4 or len(node.output) != 1:
            raise refuse(node, "it is no batch norm with given statistics")
        shape = (-1, *([1] * (len(x.shape) - 2)))
        scale, shift, mean, variance = (np.asarray(part, dtype=np.float64).reshape(shape) for part in parts)
        factor = scale / np.sqrt(variance + float(node.attribute("epsilon", 1e-5)))
        return x.times(factor).plus(constant(shift - mean * factor))

    def _layer_norm(self, node: Any, x: Value, scale: Value, shift: Value | None = None) -> Form:
        last = isinstance(x, Form) and node.attribute("axis", -1) in (-1, len(x.shape) - 1)
        if not isinstance(x, Form) or not last or isinstance(scale, Form) or isinstance(shift, Form):
            raise refuse(node, "it is no norm of each token")
        made = self.scaled(self.norm(node, "layer", x, float(node.attribute("epsilon", 1e-5))), scale)
        return made if shift is None else self.shifted(made, shift)

    def _rms_norm(self, node: Any, x: Value, scale: Value) -> Form:
        last = isinstance(x, Form) and node.attribute("axis", -1) in (-1, len(x.shape) - 1)
        if not isinstance(x, Form) or not last or isinstance(scale, Form):
            raise refuse(node, "it is no norm of each token")
        return self.scaled(self.norm(node, "rms", x, float(node.attribute("epsilon", 1e-5))), scale)

    def _mean(self, node: Any, x: Value, axes: Value | None = None) -> Form:
        assert isinstance(x, Form)
        chosen = node.attribute("axes") if axes is None else axes
        if chosen is None or isinstance(chosen, Form) or np.size(chosen) != 1:
            raise refuse(node, "it is no mean over one axis")
        axis = int(np.ravel(chosen)[0]) % len(x.shape)
        keep = bool(node.attribute("keepdims", 1))
        if axis == len(x.shape) - 1 and keep:
            return self.function(node, "mean", x, (*x.shape[:-1], 1))
        if axis == len(x.shape) - 2:
            return self.pooled(node, x, keep)
        raise refuse(node, "it is neither a mean of each token nor of all tokens")

    def _pow(self, node: Any, x: Value, power: Value) -> Form:
        if not isinstance(x, Form) or isinstance(power, Form) or power.size != 1:
            raise refuse(node, "its power is not constant")
        match float(power.ravel()[0]):
            case 2.0:
                return self.function(node, "square", x)
            case 3.0:
                return self.cube(node, x)
            case 0.5:
                return self.function(node, "root", x)
            case -0.5:
                return self.inverse(node, self.function(node, "root", x))
        raise refuse(
            node, f"the power {float(power.ravel()[0]):g} is no part of a norm or an activation here"
        )

    def _gelu(self, node: Any, x: Value) -> Form:
        words = {"none": "gelu", "tanh": "gelu_tanh"}
        assert isinstance(x, Form)
        return self.act(node, words[str(node.attribute("approximate", "none"))], x)

    def is_pattern(self, form: Form) -> bool:
        """Whether a form is attention's weights."""
        return {anchor.kind for anchor in form.anchors} == {"pattern"}
