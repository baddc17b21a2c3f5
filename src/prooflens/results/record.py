"""What a run keeps of results: columns of the rows, tensors of the evidence, the header. Read back by `store`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from prooflens.certificate.store import Array, RunWriter
from prooflens.queries import (
    Claim,
    Divergence,
    Functional,
    LargestLogit,
    LogSumExp,
    Probability,
    RowEntropy,
    Score,
    Standing,
)
from prooflens.regions import Region
from prooflens.results import Radii, Results
from prooflens.results.frame import EditedModel, Subject
from prooflens.results.outcome import Outcome
from prooflens.version import __version__


def save(results: Results, path: Path | str, configuration: Mapping[str, Any] | None = None) -> None:
    """Write results as a run directory of one part, as `certify -o RUN/` does.

    Args:
        results: what to write; it must have a subject.
        path: the directory; it must not hold a run yet.
        configuration: what was asked for, kept in `run.json`.
    """
    assert results.subject is not None
    writer = RunWriter.create(Path(path), header(results.subject, configuration or {}))
    append(writer, results)
    writer.finish(counts=results.counts, effort=results.effort)


def append(writer: RunWriter, results: Results) -> None:
    """Write results as the next part of a run.

    Args:
        writer: the run that is written.
        results: the rows, with bounds and witnesses.
    """
    claims = pa.array([describe(outcome.claim) for outcome in results.outcomes], pa.string())
    table = results.table.append_column("claim", claims)
    table = table.append_column("region_id", pa.repeat(pa.scalar(0, pa.int32()), table.num_rows))
    tensors: dict[str, Array] = {}
    if results.subject is not None and not writer.header["files"]:
        tensors |= region_tensors(results.subject.region, "region/0")
        tensors |= model_tensors(results.subject)
    for number, outcome in enumerate(results.outcomes, writer.rows):
        _evidence(outcome, f"row/{number}", tensors)
    writer.append(table, tensors)


def header(subject: Subject, configuration: Mapping[str, Any], kind: str = "verdicts") -> dict[str, Any]:
    """Return the contents of `run.json`: what was asked about which model, and with which versions.

    Args:
        subject: the model, the prompt and the region.
        configuration: what was asked for.
        kind: what the rows are, `verdicts` or `radii`.
    """
    named = {"name": subject.model, "sha256": subject.model_sha256, "source": subject.source}
    return run_header(kind, named, configuration) | {
        "layers": subject.layers,
        "text": subject.text,
        "tokens": list(subject.tokens),
        "region": {"label": subject.region.label, "eps": subject.eps},
        **_started(subject.region),
        **_read(subject),
        **_edited(subject),
    }


def run_header(kind: str, model: Mapping[str, Any], configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every `run.json` says, whatever its rows are about.

    Args:
        kind: what the rows are.
        model: name, fingerprint and source of the model.
        configuration: what was asked for.
    """
    return {
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "model": dict(model),
        "configuration": dict(configuration),
    }


def _read(subject: Subject) -> dict[str, Any]:
    """What `run.json` says of a model that ends at a hook; its directions are tensors."""
    held = subject.readout
    if held is None:
        return {}
    entry: dict[str, Any] = {"hook": held.hook, "position": held.position, "names": list(held.names or ())}
    if held.beside is not None:
        entry["beside"] = {"hook": held.beside[0], "position": held.beside[1]}
    return {"read": entry}


def _started(region: Region) -> dict[str, Any]:
    """What `run.json` says of a region inside a model: the block, and what the streams there were computed from."""
    if not region.starts:
        return {}
    points = []
    for factors, origin in region.starts:
        held = origin.steering
        points.append(
            {
                "factors": None if factors is None else factors.tolist(),
                "ids": None if origin.ids is None else list(origin.ids),
                "steering": None if held is None else {"c": held.c, "tokens": list(held.tokens)},
            }
        )
    return {"start": {"layer": region.starts[0].origin.layer, "points": points}}


def start_tensors(region: Region) -> dict[str, Array]:
    """Return the inputs that streams were computed from, where they have no token ids, and steering vectors.

    Args:
        region: the region of a run.
    """
    found: dict[str, Array] = {}
    for number, (_, origin) in enumerate(region.starts):
        if origin.ids is None:
            found[f"start/{number}/input"] = _array(origin.x.double())
        if origin.steering is not None:
            found[f"start/{number}/direction"] = _array(origin.steering.direction.double())
    return found


def _edited(subject: Subject) -> dict[str, Any]:
    """What `run.json` says of the other model of an effect; weights with other numbers are tensors."""
    return {} if subject.edited is None else {"edited": edited_entry(subject.edited)}


def edited_entry(edited: EditedModel) -> dict[str, Any]:
    """Return what `run.json` says of an edited model: how to make it from the model's weights.

    Args:
        edited: the edited model; its weights with other numbers are tensors of the run (`edited_tensors`).
    """
    changes = edited.changes
    return {
        "name": edited.name,
        "sha256": edited.sha256,
        "edit": edited.edit,
        "zeroed": {name: [list(ends) for ends in ranges] for name, ranges in changes.zeroed.items()},
        "replaced": sorted(changes.replaced),
        "removed": list(changes.removed),
    }


def edited_tensors(edited: EditedModel, name: str = "edited") -> dict[str, Array]:
    """Return the weights of an edited model that have other numbers, named `name`/….

    Args:
        edited: the edited model.
        name: what their names start with.
    """
    return {f"{name}/{weight}": _array(value) for weight, value in edited.changes.replaced.items()}


def model_tensors(subject: Subject) -> dict[str, Array]:
    """Return what weights alone do not say of the models that a run is about.

    Args:
        subject: what a run is about.

    Returns:
        The directions and biases of a model that ends at a hook, named `read/…`, and the weights of an edited model
        that have other numbers, named `edited/…`.
    """
    found = start_tensors(subject.region)
    if subject.readout is not None:
        found["read/weight"] = _array(subject.readout.weight)
        if subject.readout.bias is not None:
            found["read/bias"] = _array(subject.readout.bias)
    if subject.edited is not None:
        found |= edited_tensors(subject.edited)
    return found


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    return {
        "prooflens": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def save_radii(radii: Radii, path: Path, configuration: Mapping[str, Any], complete: bool = True) -> None:
    """Write radii as a run directory: the rows, their claims, and the points that break them.

    Args:
        radii: the rows; they must have a subject.
        path: the directory; it must not hold a run yet.
        configuration: what was asked for, kept in `run.json`.
        complete: mark the run as complete.
    """
    assert radii.subject is not None
    writer = RunWriter.create(path, header(radii.subject, configuration, "radii"))
    table = radii.table
    tensors = region_tensors(radii.subject.region, "region/0") | model_tensors(radii.subject)
    if radii.evidence:
        claims = pa.array([describe(item.claim) for item in radii.evidence], pa.string())
        table = table.append_column("claim", claims)
    for number, item in enumerate(radii.evidence):
        if item.witness is not None:
            tensors[f"row/{number}/witness"] = _array(item.witness.x.double())
    writer.append(table, tensors)
    if complete:
        writer.finish(**({"effort": radii.effort} if radii.effort else {}))


def region_tensors(region: Region, name: str) -> dict[str, Array]:
    """Return centre, radii or generators, anchor and constraints of a region, named `name`/…, and its image.

    Args:
        region: the region.
        name: what the names of its tensors begin with.
    """
    held: dict[str, Tensor | None] = {
        "center": region.center,
        "radius": region.radius,
        "generators": region.generators,
        "anchor": region.anchor,
        **(vars(region.constraints) if region.constraints is not None else {}),
    }
    found = {f"{name}/{key}": _array(value) for key, value in held.items() if value is not None}
    if region.image is not None:  # for pictures only: no part of the set
        found["image"] = _array((region.image.detach().clamp(0.0, 1.0) * 255.0).round().to(torch.uint8))
    return found


def _evidence(outcome: Outcome, name: str, tensors: dict[str, Array]) -> None:
    bounds, witness = outcome.bounds, outcome.witness
    tensors[f"{name}/lower"] = _array(bounds.lower)
    tensors[f"{name}/upper"] = _array(bounds.upper)
    if bounds.lower_ledger is not None:
        for part, value in vars(bounds.lower_ledger).items():
            tensors[f"{name}/ledger/{part}"] = _array(value)
    elif bounds.lower_corner is not None:
        tensors[f"{name}/lower_corner"] = _array(bounds.lower_corner)
    if bounds.cover is not None:
        for part, value in vars(bounds.cover).items():
            tensors[f"{name}/cover/{part}"] = _array(value)
    if witness is not None:
        tensors[f"{name}/witness"] = _array(witness.x.double())
        tensors[f"{name}/witness_alpha"] = _array(witness.alpha.double())


def _array(tensor: Tensor) -> Array:
    found: Array = tensor.detach().cpu().numpy()
    return found


def describe(claim: Claim) -> str:
    """Describe a claim as JSON: its functionals, the sense wanted of each, its tie, its clean values.

    A reader can decide `holds` from it: there is no tie, and every functional has a lower bound > 0, ≥ 0 or, for a
    range, two finite bounds.

    Args:
        claim: what was claimed.
    """
    return json.dumps(
        {
            "functionals": [
                functional_of(condition.functional) | {"sense": condition.sense.value}
                for condition in claim.conditions
            ],
            "tie": claim.tie,
            "clean": claim.clean.tolist(),
        },
        ensure_ascii=False,
    )


@lru_cache(maxsize=65536)
def functional_of(functional: Functional) -> dict[str, Any]:
    """Describe a functional as JSON has it: name, constant and terms.

    Args:
        functional: a functional of a claim.
    """
    return {
        "name": functional.name,
        "constant": functional.constant,
        "terms": [_term(weight, atom) for weight, atom in functional.terms],
    }


def _term(weight: float, atom: Any) -> Sequence[Any]:
    """Return a term as a list: [weight, kind, layer, head, position, keys], or [weight, kind, outputs]."""
    if isinstance(atom, Score):
        return [weight, "score", atom.row.layer, atom.row.head, atom.row.position, atom.key]
    if isinstance(atom, LogSumExp | RowEntropy):
        kind = "logsumexp" if isinstance(atom, LogSumExp) else "entropy"
        return [weight, kind, atom.row.layer, atom.row.head, atom.row.position, list(atom.keys)]
    if isinstance(atom, LargestLogit):
        return [weight, "largest", list(atom.but)]
    if isinstance(atom, Standing):
        return [weight, "standing", atom.index, atom.k, list(atom.rivals)]
    if isinstance(atom, Probability):
        return [weight, "probability", atom.index, list(atom.among)]
    if isinstance(atom, Divergence):
        return [weight, "divergence", list(atom.first), list(atom.second)]
    return [weight, "logit", atom.index]
