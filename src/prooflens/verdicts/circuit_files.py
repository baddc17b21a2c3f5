"""Circuits as people write them: queries, lists of heads, and the JSON of edge attribution patching."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prooflens import json_files
from prooflens.errors import QueryError
from prooflens.queries import Circuit, Query, parse_query
from prooflens.queries.attention import RowQuery

HEAD = re.compile(r"(?:a|A|L)?(\d{1,9})(?:\.h|\.|[hH])(\d{1,9})")
"""A head as tools write it: `a0.h11` (edge attribution patching), `A0.11`, `L0H11`, `0.11`."""

OTHER = re.compile(
    r"(?:m|MLP ?|mlp)\d+|input|embed|embeds|tok_embeds|pos_embeds|Resid (?:Start|End)|logits|output"
)
"""Nodes of such circuits that are no attention heads."""


def as_circuit(given: str | Query | Sequence[str] | Mapping[str, Any] | Path, query: str) -> Circuit:
    """The circuit that a text, a query, a list of heads or a file of nodes means."""
    if isinstance(given, Circuit):
        return given
    if isinstance(given, Query):
        return Circuit((given,))
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".json")):
        return as_circuit(read_json(Path(given)), query)
    if isinstance(given, str) and all(HEAD.fullmatch(name.strip()) for name in given.split(",")):
        return as_circuit([name.strip() for name in given.split(",")], query)
    if isinstance(given, str):
        parsed = parse_query(given)
        return parsed if isinstance(parsed, Circuit) else Circuit((parsed,))
    asked = parse_query(query)
    if not isinstance(asked, RowQuery):
        raise QueryError(
            f"heads of a circuit are asked a query about one row, such as 'top1@-1', not {query!r}"
        )
    return Circuit(tuple(replace(asked, heads=f"{layer}.{head}") for layer, head in read_heads(given)))


def read_json(path: Path) -> Any:
    """The content of a circuit file."""
    try:
        return json_files.read_json(path)
    except (OSError, ValueError) as error:
        raise QueryError(f"{path} is not a readable circuit file: {error}") from error


def read_heads(circuit: Mapping[str, Any] | Sequence[Any]) -> list[tuple[int, int]]:
    """The attention heads of a circuit, in order, once.

    Read are lists of node names, mappings with `nodes` (name → true, or a mapping whose `in_graph` is not false) and,
    where no node is kept, with `edges` (`a0.h11->m3`); MLPs, embeddings and logits are passed over.
    """
    names: Iterable[str]
    if isinstance(circuit, Mapping):
        names = _kept(circuit.get("nodes", {} if "edges" in circuit else circuit))
        if not names:
            edges = _kept(circuit.get("edges", ()))
            names = [end for edge in edges for end in edge.split("->")]
    else:
        names = _kept(circuit)
    heads: dict[tuple[int, int], None] = {}
    for name in names:
        plain = re.sub(r"<.*>", "", name).strip()
        if match := HEAD.fullmatch(plain):
            heads[int(match[1]), int(match[2])] = None
        elif not OTHER.fullmatch(plain):
            raise QueryError(f"{name!r} is no node of a circuit; heads are written 'a0.h11' or '0.11'")
    if not heads:
        raise QueryError("the circuit has no attention heads; heads are written 'a0.h11' or '0.11'")
    return list(heads)


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
