"""Read a transformer out of an ONNX graph, and refuse what is not one by naming the node.

1. `graph`: the file as nodes that can be run one by one in float64.
2. `interpret`, `nonlinear`, `forms`: every value as an affine form of a few anchors (projections, norms, scores, …), so
   that reshapes, splits, batch norms and rotations need no patterns of their own.
3. `recognise`, `attention`: blocks, in order, as an architecture and canonical weights.
4. `same_output`: the graph and the model are run on random inputs, and must agree. A wrong reading cannot pass.

Attention masks are taken as ones, token types as 0, positions as 0, 1, 2, …, and token ids that the graph compares with
(padding) as not there. A graph of any length is read at 32 tokens (or 16, or 8, where its tables or rotations change
there), which is then the model's context: what the mask of a longer text looks like was not seen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.architecture import Architecture
from prooflens.models.onnx.graph import LENGTH, Graph, NodeError, read_graph
from prooflens.models.onnx.interpret import Reader
from prooflens.models.onnx.recognise import Recogniser
from prooflens.models.transformer import Transformer
from prooflens.models.vision import embed_image

__all__ = ["NodeError", "convert", "same_output"]

PLAIN, TURNING = 1e-6, 3e-5
"""How far graph and model may be apart, of the largest output; tables of rotations are float32 in one of them."""


def convert(path: Path) -> tuple[Architecture, dict[str, Tensor]]:
    """Return the architecture and canonical weights of an .onnx file.

    Args:
        path: the file.

    Raises:
        ModelError: if onnx is not installed, the file is damaged, a node is not understood (the line names it), or the
            model that was read does not compute what the graph computes.
    """
    graph = read_graph(path)
    first: ModelError | None = None
    for n_tokens in (LENGTH, LENGTH // 2, LENGTH // 4) if graph.is_free else (LENGTH,):
        try:
            with np.errstate(all="ignore"):
                return _read(graph, n_tokens)
        except ModelError as error:
            first = first or error
        except (AssertionError, ValueError, TypeError, IndexError, KeyError, StopIteration) as error:
            first = first or ModelError(f"the parts of the graph do not fit together ({error})")
    raise ModelError(f"{path.name}: {first}") from first


def _read(graph: Graph, n_tokens: int) -> tuple[Architecture, dict[str, Tensor]]:
    """Read a graph at a number of tokens, where that is free, and run it at this and at smaller ones."""
    reader = Reader(graph, int(graph.shape_of_data(n_tokens)[-1]))
    architecture, weights = Recogniser(reader, reader.read()).run()
    model, longest = Transformer(architecture, weights), architecture.context or n_tokens
    lengths = {longest, *((longest // 2 + 1, longest // 2, longest // 4, 3) if graph.is_free else ())}
    apart = max(same_output(graph, model, length, reader.never) for length in lengths)
    if not apart <= (TURNING if architecture.is_rotary else PLAIN):
        raise ModelError(
            f"the model that was read from the graph does not compute what the graph computes (apart by {apart:.2g} of "
            "the largest output): the graph is of no kind that is understood"
        )
    return architecture, weights


def same_output(graph: Graph, model: Transformer, n_tokens: int, never: set[int]) -> float:
    """How far graph and model are apart on random inputs, of the largest output.

    Args:
        graph: the graph.
        model: the model that was read from it.
        n_tokens: how many tokens, where the graph reads texts.
        never: token ids that must not be there.
    """
    chosen = np.random.default_rng(n_tokens)
    name, _, is_text = graph.data
    worst = 0.0
    for _ in range(2):
        shape = graph.shape_of_data(n_tokens)
        if is_text:
            allowed = np.setdiff1d(np.arange(model.architecture.d_vocab or 1), list(never))
            given = chosen.choice(allowed, shape)
            ours = model(torch.from_numpy(given[0]))
        else:
            given = chosen.normal(size=shape)
            ours = model(embed_image(model, torch.from_numpy(given[0])))
        theirs = graph.run({name: given} | graph.set_inputs(shape[-1]))
        flat = np.asarray(theirs, dtype=np.float64).ravel()
        if flat.shape != ours.numpy().ravel().shape or not np.isfinite(flat).all():
            return float("inf")
        worst = max(worst, float(np.abs(flat - ours.numpy().ravel()).max() / (np.abs(flat).max() + 1e-30)))
    return worst
