"""An ONNX file as nodes that can be run one by one in float64: only operators that are known, of bounded size.

Inputs that are no data are set: the attention mask to ones, token types to 0, positions to 0, 1, 2, …; a past is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prooflens.errors import ModelError

Array = NDArray[Any]

LENGTH = 32
"""How many tokens a graph of any length is read at; the model's context is what was read."""
LARGEST = 2**27
"""How many numbers a value of the graph may have."""

_NAMES = """
Abs Add And BatchNormalization Cast CastLike Ceil Concat Constant ConstantOfShape Conv Cos CumSum Div Dropout Equal Erf
Exp Expand Flatten Floor Gather GatherElements GatherND Gelu Gemm Greater GreaterOrEqual Identity IsInf IsNaN
LayerNormalization Less LessOrEqual Log MatMul Max Min Mod Mul Neg Not Or Pad Pow RMSNormalization Range Reciprocal
ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu Reshape ScatterND Shape Sigmoid Sign Sin Size Slice Softmax
Split Sqrt Squeeze Sub Swish Tanh Tile Transpose Trilu Unsqueeze Where Xor
"""
OPERATORS = frozenset(_NAMES.split())
"""What may be run at all."""
FLOATS = (1, 10, 11, 16)
"""ONNX' numbers of the types of floats: what is cast between them stays float64."""
_BROADCAST = frozenset(
    ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Equal", "Greater", "Less", "And", "Or", "Xor")
)


class NodeError(ModelError):
    """A node that is not understood."""


def refuse(node: Any, why: str) -> NodeError:
    """The one line about a node: its name, its operator, and why."""
    name = node.name or (node.output[0] if node.output else "")
    return NodeError(f"node {name!r} ({node.op_type}) is not understood: {why}")


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph, ready to run.

    Attributes:
        nodes: the nodes in their order, as onnx.reference runs them.
        constants: initialisers by name; floats are float64.
        data: name, shape (None for a free size) and whether it is whole numbers, of the input that is data.
        others: the same of inputs that are set.
        output: the name of the output that is read.
    """

    nodes: Sequence[Any]
    constants: Mapping[str, Array]
    data: tuple[str, tuple[int | None, ...], bool]
    others: tuple[tuple[str, tuple[int | None, ...], bool], ...]
    output: str

    @property
    def is_free(self) -> bool:
        """Whether texts of any length are read."""
        _, shape, whole = self.data
        return whole and shape[-1] is None

    def shape_of_data(self, n_tokens: int) -> tuple[int, ...]:
        """The shape of the data for a batch of one and a number of tokens, where that is free."""
        name, shape, whole = self.data
        if whole:
            return (1, n_tokens if shape[-1] is None else shape[-1])
        sizes = (1, *shape[1:])
        if len(sizes) != 4 or any(size is None for size in sizes):
            raise ModelError(
                f"the shape of the input {name!r} is not fixed: export the graph for one size of image"
            )
        return tuple(int(size or 0) for size in sizes)

    def set_inputs(self, n_tokens: int) -> dict[str, Array]:
        """The inputs that are no data.

        Args:
            n_tokens: how many tokens the data has.
        """
        found: dict[str, Array] = {}
        for name, shape, whole in self.others:
            if "mask" in name and len(shape) == 2:
                found[name] = np.ones((1, n_tokens), dtype=np.int64 if whole else np.float64)
            elif "type" in name and whole:
                found[name] = np.zeros((1, n_tokens), dtype=np.int64)
            elif "position" in name and whole:
                found[name] = np.arange(n_tokens)[None]
            elif "past" in name and len(shape) == 4:
                sizes = (1, shape[1] or 1, 0, shape[3] or 1)
                found[name] = np.zeros(sizes)
            else:
                raise ModelError(f"the input {name!r} of the graph is not understood")
        return found

    def run(self, values: dict[str, Array]) -> Array:
        """The output, every float in float64.

        Args:
            values: the inputs by name; changed in place.
        """
        values |= self.constants
        for node in self.nodes:
            given = [values[name] if name else None for name in node.input]
            for name, value in zip(node.output, apply(node, given), strict=False):
                values[name] = value
        return values[self.output]


def apply(node: Any, given: Sequence[Array | None]) -> tuple[Array, ...]:
    """Run one node on arrays; floats become and stay float64.

    Args:
        node: a node of a `Graph`.
        given: its inputs.

    Raises:
        NodeError: for an unknown operator, too large a result, or inputs that do not fit.
    """
    kind = node.op_type
    if kind not in OPERATORS:
        raise refuse(node, "the operator is not known here")
    try:
        if _size(node, [np.asarray(x) for x in given if x is not None]) > LARGEST:
            raise refuse(node, f"its result has more than {LARGEST} numbers")
        with np.errstate(all="ignore"):
            results = node.run(*given)
    except NodeError:
        raise
    except Exception as error:  # onnx.reference raises errors of many types
        first = str(error).strip().splitlines()
        raise refuse(node, f"it does not run ({first[0] if first else type(error).__name__})") from error
    return tuple(_double(np.asarray(result)) for result in results)


def _double(x: Array) -> Array:
    with np.errstate(all="ignore"):
        return x.astype(np.float64) if x.dtype.kind == "f" and x.dtype != np.float64 else x


def _size(node: Any, given: list[Array]) -> float:
    """About how many numbers a node makes; at least so many where a file could ask for too much."""
    kind, first = node.op_type, given[0] if given else np.zeros(0)
    other = given[1] if len(given) > 1 else np.zeros(0)
    together = math.prod(np.broadcast_shapes(first.shape, other.shape)) if kind in _BROADCAST else 0
    size: Any = together
    match kind:
        case "ConstantOfShape":
            size = math.prod(max(0, int(v)) for v in first.ravel())
        case "Expand" | "Tile":
            size = first.size * math.prod(max(1, abs(int(v))) for v in other.ravel())
        case "Pad":
            size = math.prod(size + int(np.abs(other).sum()) for size in first.shape)
        case "Range" if len(given) == 3 and all(x.size == 1 for x in given):
            start, stop, step = (float(x.ravel()[0]) for x in given)
            size = abs(stop - start) / abs(step) if step else math.inf
        case "Gather" if first.ndim:
            size = other.size * first.size / max(1, first.shape[int(node.attribute("axis", 0)) % first.ndim])
        case "MatMul" | "Gemm" if first.ndim and other.ndim:
            size = first.size / max(1, first.shape[-1]) * max(other.shape[-2:])
        case "Conv" if first.ndim > 1 and other.ndim:
            size = first.size / max(1, first.shape[1]) * other.shape[0]
    return float(size)


def read_graph(path: Path) -> Graph:
    """Read a file.

    Args:
        path: an .onnx file.

    Raises:
        ModelError: if onnx is not installed, or the file is damaged or no graph of the known kind.
    """
    try:
        import onnx
        from onnx import numpy_helper
        from onnx.reference import ReferenceEvaluator
    except ImportError as error:
        raise ModelError('ONNX files need onnx: pip install "prooflens[onnx]"') from error
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    try:
        file = onnx.load(str(path))
        constants = {str(one.name): _double(numpy_helper.to_array(one)) for one in file.graph.initializer}
        unknown = next((node for node in file.graph.node if node.op_type not in OPERATORS), None)
    except Exception as error:  # protobuf and onnx raise errors of many types
        first = str(error).strip().splitlines()
        raise ModelError(
            f"{path} is truncated or not an ONNX file: {first[0] if first else type(error).__name__}"
        ) from error
    if unknown is not None:
        raise refuse(unknown, "the operator is not known here")
    inputs = [_described(one) for one in file.graph.input if str(one.name) not in constants]
    data = _data_input(inputs, path)
    if not file.graph.output:
        raise ModelError(f"{path} has no output")
    names = [str(one.name) for one in file.graph.output]
    output = next((name for name in ("logits", "last_hidden_state") if name in names), names[0])
    del file.graph.initializer[:]  # they are held above: the evaluator needs the nodes alone
    try:
        nodes = ReferenceEvaluator(file).rt_nodes_
    except Exception as error:
        first = str(error).strip().splitlines()
        raise ModelError(
            f"{path} cannot be run by onnx: {first[0] if first else type(error).__name__}"
        ) from error
    runners = [_Runner(one, each) for one, each in zip(file.graph.node, nodes, strict=True)]
    return Graph(runners, constants, data, tuple(each for each in inputs if each is not data), output)


@dataclass(frozen=True, eq=False)
class _Runner:
    """A node and its implementation; what casts between floats leaves them in float64."""

    proto: Any
    implementation: Any

    @property
    def name(self) -> str:
        return str(self.proto.name)

    @property
    def op_type(self) -> str:
        return str(self.proto.op_type)

    @property
    def input(self) -> Sequence[str]:
        return [str(name) for name in self.proto.input]

    @property
    def output(self) -> Sequence[str]:
        return [str(name) for name in self.proto.output]

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute, or the operator's default."""
        found = getattr(self.implementation, name, None)
        return default if found is None else found

    def run(self, *given: Array | None) -> tuple[Array, ...]:
        """The results, from arrays."""
        first = np.asarray(given[0]) if given else np.zeros(0)
        match self.op_type:
            case "Dropout":
                return (first,)
            case "Cast" if first.dtype == np.float64 and int(self.attribute("to", 0)) in FLOATS:
                return (first,)
            case "GatherElements":  # onnx.reference fails for more than 64 elements
                return (np.take_along_axis(first, np.asarray(given[1]), int(self.attribute("axis", 0))),)
            case "BatchNormalization":  # onnx.reference trains in the older versions of this operator
                return (self._batch_norm(*(np.asarray(part) for part in given)),)
        return tuple(self.implementation.run(*given))

    def _batch_norm(self, x: Array, scale: Array, shift: Array, mean: Array, variance: Array) -> Array:
        shape = (-1, *([1] * (x.ndim - 2)))
        root = np.sqrt(variance + float(self.attribute("epsilon", 1e-5)))
        return np.asarray((x - mean.reshape(shape)) * (scale / root).reshape(shape) + shift.reshape(shape))


def _described(one: Any) -> tuple[str, tuple[int | None, ...], bool]:
    kind = one.type.tensor_type
    sizes = tuple(
        d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in kind.shape.dim
    )
    return str(one.name), sizes, kind.elem_type in (6, 7)


def _data_input(
    inputs: list[tuple[str, tuple[int | None, ...], bool]], path: Path
) -> tuple[str, tuple[int | None, ...], bool]:
    """The input that is data: token ids [1, S], or pixels [1, C, H, W]."""
    words = ("mask", "type", "position", "past")
    found = [one for one in inputs if not any(word in one[0] for word in words)]
    if len(found) != 1:
        names = ", ".join(repr(one[0]) for one in found) or "none"
        raise ModelError(f"{path} must have one input of token ids or pixels, found {names}")
    name, shape, whole = found[0]
    if (whole and len(shape) != 2) or (not whole and len(shape) != 4):
        raise ModelError(
            f"the input {name!r} of {path} is neither token ids [batch, tokens] nor pixels [batch, C, H, W]"
        )
    if math.prod(size or 1 for size in shape) > LARGEST // 64:
        raise ModelError(f"the input {name!r} of {path} is too large")
    return found[0]
