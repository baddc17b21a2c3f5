"""Somani's two tasks of syntax, with softmax and LayerNorm kept: the four properties of a circuit, proved or witnessed.

python benchmarks/syntax_tasks.py [--folder FOLDER] [-o FILE.jsonl]

The model is `quotes-and-brackets` (`prooflens train quotes-and-brackets`, which runs here where FOLDER holds none): two
layers, two heads, d = 16, d_ff = 64, 32 tokens. For each task a circuit of edges is found greedily: an edge goes if no
decision on the 128 inputs changes, until none can go. Then, of the circuit (the model with all other edges cut):

| property | how |
|---|---|
| equivalence | its decision is the program's on all 128 inputs: proved on the balls of radius 0.01 around each, last line |
| necessity | without each edge an input has the other decision, and both decisions are proved on balls of radius 10⁻⁹ |
| invariance | all 64 inputs with one opening mark have one decision: from equivalence; and every point between a content token and any other, one position at a time, proved on 96 segments |
| robustness | no decision changes on balls of ε around the final residual of the last token (theirs), and around *all six* embeddings (through softmax and every norm), for each of the 128 inputs |

A decision is which of the two closing marks has the larger logit.
"""  # noqa: E501

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import prooflens as pl
from measuring import Line, Meter, tell
from prooflens.models import Transformer
from prooflens.models.edges import edges_of
from prooflens.models.prompt import Prompt
from prooflens.models.syntax import CONTENT, NAME, SYNTAX, SyntaxTask
from prooflens.models.train import train
from prooflens.regions import Ball, Segment

POINT = 1e-9
"""The radius of a ball that stands for one input: what is proved there is proved over the reals."""

RESIDUAL = (0.01, 0.1)
"""Radii around the final residual; Somani's is the first."""


def margins(model: Transformer, task: SyntaxTask, ids: Tensor) -> Tensor:
    """The first closing mark's logit minus the second's."""
    first, second = task.answers
    with torch.no_grad():
        found = model(ids)
    return found[:, first] - found[:, second]


def circuit_of(model: Transformer, task: SyntaxTask) -> tuple[list[str], list[str]]:
    """The edges that are left when edges go as long as no decision changes, and those that went."""
    ids, _ = task.domain()
    right = margins(model, task, ids) > 0
    gone: list[str] = []
    sizes = {
        edge: float((margins(pl.edit(model, edge), task, ids) - margins(model, task, ids)).abs().max())
        for edge in edges_of(model.architecture)
    }
    left, moved = sorted(sizes, key=sizes.__getitem__), True
    while moved:
        moved = False
        for edge in list(left):
            if torch.equal(margins(pl.edit(model, [*gone, edge]), task, ids) > 0, right):
                gone.append(edge)
                left.remove(edge)
                moved = True
    return left, gone


def proved(model: Transformer, task: SyntaxTask, prompt: Prompt, region: Ball | Segment, first: bool) -> str:
    """The verdict on a decision: that the first closing mark beats the second, or the second the first."""
    one, other = task.answers if first else task.answers[::-1]
    found = pl.certify(model, prompt, region, queries=f"logit{one}>logit{other}", engine="taylor")
    return str(found[0].verdict.value)


def counted(verdicts: list[str]) -> str:
    """How many hold, of all."""
    return f"{verdicts.count('holds')} of {len(verdicts)}"


def final_stream(model: Transformer, prompt: Prompt) -> Tensor:
    """What the final norm of a circuit reads."""
    steps = model.program(len(prompt)).steps
    name = next(step.inputs[0] for step in steps if step.out == "ln_final.hook_normalized")
    with torch.no_grad():
        return model.run(prompt, name)[name]


def readout(model: Transformer) -> Transformer:
    """The final norm and the head alone: the last block of a model without parts, which passes its input on."""
    tail, _ = pl.start_at(pl.edit(model, ["a1", "m1"]), 1)
    return tail


def judge(model: Transformer, name: str, task: SyntaxTask) -> Line:
    """All four properties of one task."""
    ids, answers = task.domain()
    prompts = [model.prompt(row.tolist()) for row in ids]
    firsts = [bool(answer == task.answers[0]) for answer in answers]
    line: Line = {"work": "syntax", "task": name, "inputs": len(ids)}
    with Meter(model.device) as meter:
        kept, gone = circuit_of(model, task)
        circuit = pl.edit(model, gone)
    line |= {
        "edges": len(kept) + len(gone),
        "circuit": kept,
        "seconds of the search": round(meter.seconds, 1),
    }
    every = list(zip(prompts, firsts, strict=True))
    with Meter(model.device) as meter:
        needed = []
        for edge in kept:
            without = pl.edit(model, [*gone, edge])
            flipped = (margins(without, task, ids) > 0) != torch.tensor(firsts)
            at = int(flipped.nonzero()[0, 0])
            both = [proved(circuit, task, prompts[at], Ball(POINT), firsts[at])]
            both.append(proved(without, task, prompts[at], Ball(POINT), not firsts[at]))
            needed.append("holds" if both == ["holds"] * 2 else "unknown")
    line |= {"necessity": counted(needed), "seconds of necessity": round(meter.seconds, 1)}
    with Meter(model.device) as meter:
        ways = []
        for prompt, first, row in zip(prompts, firsts, ids.tolist(), strict=True):
            for place, token in itertools.product((2, 4, 5), CONTENT):
                if token > row[place]:
                    other = model.prompt([*row[:place], token, *row[place + 1 :]])
                    ways.append(proved(circuit, task, prompt, Segment(prompt, other), first))
            if len(ways) >= 96:  # a quarter of the ways of this task
                break
    line |= {"invariance on segments": counted(ways), "seconds of invariance": round(meter.seconds, 1)}
    tail = readout(model)
    for eps in RESIDUAL:
        with Meter(model.device) as meter:
            words = [
                proved(
                    tail, task, Prompt(final_stream(circuit, prompt), prompt.tokens), Ball(eps, [5]), first
                )
                for prompt, first in every
            ]
        line |= {f"final residual, {eps}": counted(words), f"seconds at {eps}": round(meter.seconds, 1)}
    for told, one, radii in (("circuit", circuit, (0.01, 0.05)), ("model", model, (0.01, 0.02))):
        for eps in radii:
            with Meter(model.device) as meter:
                words = [proved(one, task, prompt, Ball(eps), first) for prompt, first in every]
            line |= {f"all embeddings of the {told}, {eps}": counted(words)}
            line |= {f"seconds of the {told} at {eps}": round(meter.seconds, 1)}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="the trained model (default: trained anew)")
    parser.add_argument("--tasks", nargs="*", choices=SYNTAX, default=list(SYNTAX))
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made) / NAME
        with Meter(torch.device("cpu")) as meter:
            accuracy = None if given.folder else train(NAME, target=folder).accuracy
        model = pl.load(str(folder))
        weights = sum(tensor.numel() for tensor in model.weights.values())
        line = {"work": "syntax", "model": NAME, "weights": weights, "accuracy": accuracy}
        tell(line | {"seconds of training": round(meter.seconds, 1), "sha256": model.sha256}, given.out)
        for name in given.tasks:
            tell(judge(model, name, SYNTAX[name]), given.out)


if __name__ == "__main__":
    main()
