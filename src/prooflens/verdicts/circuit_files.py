"""Circuits as people write them: queries, lists of heads, and the JSON of edge attribution patching."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prooflens import json_files
from prooflens.errors import QueryError
from prooflens.models import Architecture
from prooflens.models.edges import CHANNELS, edges_of
from prooflens.models.edits import places_of
from prooflens.queries import Circuit, Query, parse_query
from prooflens.queries.attention import RowQuery

HEAD = re.compile(r"(?:a|A|L)?(\d{1,9})(?:\.h|\.|[hH])(\d{1,9})")
"""A head as tools write it: `a0.h11` (edge attribution patching), `A0.11`, `L0H11`, `0.11`."""

NETWORK = re.compile(r"(?:m|MLP ?|mlp)(\d+)")
"""A network as tools write it: `m3`, `MLP 3`."""

OTHER = re.compile(
    r"(?:m|MLP ?|mlp)\d+|input|embed|embeds|tok_embeds|pos_embeds|Resid (?:Start|End)|logits|output"
)
"""Nodes of such circuits that are no attention heads."""


def as_circuit(
    given: str | Query | Sequence[str] | Mapping[str, Any] | Path, query: str, slots: Collection[str] = ()
) -> Circuit:
    """The circuit that a text, a query, a list of heads or a file of nodes means.

    Args:
        given: any of these.
        query: what the heads of a list are asked.
        slots: the slots of the template that the prompt is a member of.
    """
    if isinstance(given, Circuit):
        return given
    if isinstance(given, Query):
        return Circuit((given,))
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".json")):
        return as_circuit(read_json(Path(given)), query, slots)
    if isinstance(given, str) and all(HEAD.fullmatch(name.strip()) for name in given.split(",")):
        return as_circuit([name.strip() for name in given.split(",")], query, slots)
    if isinstance(given, str):
        parsed = parse_query(given, slots)
        return parsed if isinstance(parsed, Circuit) else Circuit((parsed,))
    asked = parse_query(query, slots)
    if not isinstance(asked, RowQuery):
        raise QueryError(
            f"heads of a circuit are asked a query about one row, such as 'top1@-1', not {query!r}"
        )
    return Circuit(tuple(replace(asked, heads=f"{layer}.{head}") for layer, head in read_heads(given)))


def read_json(path: Path) -> Any:
    """The content of a circuit file.

    Args:
        path: the file.
    """
    try:
        return json_files.read_json(path)
    except (OSError, ValueError) as error:
        raise QueryError(f"{path} is not a readable circuit file: {error}") from error


def read_heads(circuit: Mapping[str, Any] | Sequence[Any]) -> list[tuple[int, int]]:
    """The attention heads of a circuit, in order, once.

    Read are lists of node names, mappings with `nodes` (name → true, or a mapping whose `in_graph` is not false) and,
    where no node is kept, with `edges` (`a0.h11->m3`); MLPs, embeddings and logits are passed over.

    Args:
        circuit: what a circuit file holds: nodes by name, or a list of them.
    """
    heads: dict[tuple[int, int], None] = {}
    for name in read_nodes(circuit):
        if match := HEAD.fullmatch(name):
            heads[int(match[1]), int(match[2])] = None
    if not heads:
        raise QueryError("the circuit has no attention heads; heads are written 'a0.h11' or '0.11'")
    return list(heads)


def read_nodes(circuit: Mapping[str, Any] | Sequence[Any]) -> list[str]:
    """The names of a circuit's nodes, as its file writes them; a `QueryError` for what is none.

    Args:
        circuit: what a circuit file holds: nodes by name, or a list of them.
    """
    names: Iterable[str]
    if isinstance(circuit, Mapping):
        names = _kept(circuit.get("nodes", {} if "edges" in circuit else circuit))
        if not names:
            edges = _kept(circuit.get("edges", ()))
            names = [end for edge in edges for end in edge.split("->")]
    else:
        names = _kept(circuit)
    found = [re.sub(r"<.*>", "", name).strip() for name in names]
    for name in found:
        if not (HEAD.fullmatch(name) or OTHER.fullmatch(name)):
            raise QueryError(f"{name!r} is no node of a circuit; heads are written 'a0.h11' or '0.11'")
    return found


def outside(circuit: Mapping[str, Any] | Sequence[Any], architecture: Architecture) -> list[str]:
    """The heads and networks of a model that are not in a circuit: what `edit` takes out to keep the circuit alone.

    Nodes are kept or taken out whole: of a circuit of edges the ends are kept, whatever they read.

    Args:
        circuit: nodes or edges, as `read_heads` reads them.
        architecture: what the model looks like.

    Raises:
        QueryError: if nothing is left outside.

    Example:
        >>> import prooflens as pl
        >>> outside(["a0.h1", "m1"], pl.load("toy").architecture)
        ['a0.h0', 'm0', 'a1.h0', 'a1.h1']
    """
    kept = set()
    for name in read_nodes(circuit):
        if match := HEAD.fullmatch(name):
            kept.add(f"a{int(match[1])}.h{int(match[2])}")
        elif match := NETWORK.fullmatch(name):
            kept.add(f"m{int(match[1])}")
    parts = places_of(architecture)
    if unknown := sorted(kept - set(parts)):
        raise QueryError(f"the circuit has {unknown[0]}, which this model does not have")
    if not (left := [name for name in parts if name not in kept]):
        raise QueryError("the circuit is the whole model: there is nothing to take out")
    return left


def outside_edges(circuit: Mapping[str, Any] | Sequence[Any], architecture: Architecture) -> list[str]:
    """The edges of a model that are not in a circuit: what `edit` cuts to keep the circuit's edges alone.

    Args:
        circuit: a mapping with `edges`, or a list of them, as edge attribution patching writes it: `a0.h11->a1.h2<q>`,
            `input->m0`, `m3->logits`. An edge to a head without a letter is all three of its.
        architecture: what the model looks like.

    Raises:
        QueryError: if it has no edges, one that the model does not have, or all of them.
    """
    given = circuit.get("edges") if isinstance(circuit, Mapping) else circuit
    if not given:
        raise QueryError("the circuit has no edges: write them as in 'a0.h11->a1.h2<q>', or keep its nodes")
    parts, kept = edges_of(architecture), set[str]()
    for name in _kept(given):
        plain = re.sub(r"<([qkv])>", r".\1", name.replace(" ", ""))
        own = [plain] if plain in parts else [f"{plain}.{channel}" for channel in CHANNELS]
        if not set(own) <= set(parts):
            raise QueryError(f"the circuit has {name!r}, which is no edge of this model")
        kept |= set(own)
    if not (left := [name for name in parts if name not in kept]):
        raise QueryError("the circuit has every edge of the model: there is nothing to cut")
    return left


def _kept(nodes: Any) -> list[str]:
    """Names of the nodes or edges that are in the circuit."""
    if isinstance(nodes, Mapping):
        return [
            str(name)
            for name, value in nodes.items()
            if (value.get("in_graph", True) if isinstance(value, Mapping) else value) is not False
        ]
    if isinstance(nodes, str) or not isinstance(nodes, Sequence):
        raise QueryError(f"a circuit is a list or a mapping of nodes, not {type(nodes).__name__}")
    return [str(node.get("name", "") if isinstance(node, Mapping) else node) for node in nodes]
