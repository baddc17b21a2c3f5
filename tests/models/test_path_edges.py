"""Edges that are cut or patched, against runs in which one receiver is given another stream by hand."""

from __future__ import annotations

import pytest
import torch

import prooflens as pl
from prooflens.errors import ModelError, QueryError
from prooflens.evaluation.soundness.cases import FAMILIES, NETWORKS
from prooflens.models import INPUT, OUTPUT
from prooflens.models.edges import edges_of
from prooflens.models.edits import value_on
from prooflens.models.parts import Edit
from prooflens.models.prompt import Prompt
from prooflens.models.reads import stream_name
from prooflens.models.sites import Mix, Scores
from prooflens.verdicts.circuit_files import outside_edges
from tests.models.test_edits import S, drawn

Values = dict[str, torch.Tensor]
Changes = dict[tuple[int, str, int], torch.Tensor]
"""What is added to the stream of a receiver (layer, channel, head)."""


def sent(model: pl.Transformer, values: Values, sender: str) -> torch.Tensor:
    if sender == "input":
        return values[INPUT]
    layer = int(sender[1:].split(".")[0])
    if ".n" in sender:
        n = int(sender.split(".n")[1])
        post = values[f"blocks.{layer}.mlp.hook_post"][:, n]
        return torch.outer(post, model.weights[f"blocks.{layer}.down.weight"][:, n])
    if ".h" not in sender:
        return values[f"blocks.{layer}.hook_{'attn' if sender[0] == 'a' else 'mlp'}_out"]
    head, c = int(sender.split(".h")[1]), model.architecture.head_dim
    return (
        values[f"blocks.{layer}.attn.hook_z"][:, head]
        @ model.weights[f"blocks.{layer}.o.weight"][:, head * c : (head + 1) * c].T
    )


def by_hand(
    model: pl.Transformer, x: torch.Tensor, cuts: list[tuple[str, tuple[int, str, int], torch.Tensor]]
) -> torch.Tensor:
    """Run all steps; a receiver computes what it reads again from the stream plus mask · (value − what was sent)."""
    program = model.program(len(x))
    made = {step.out for step in program.steps}
    values: Values = {INPUT: x}

    def again(name: str, layer: int, receiver: str, head: int, part: int) -> torch.Tensor:
        stream = stream_name(made, layer) if part == 1 else f"blocks.{layer}.hook_resid_mid"
        stream = stream if stream in values else stream_name(made, layer)
        other = dict(values)
        for sender, to, mask in cuts:
            if to == (layer, receiver, head):
                other[stream] = other[stream] - mask[:, None] * sent(model, values, sender)
        needed = program.slice([name]).steps
        start = [i for i, step in enumerate(needed) if step.out == stream]
        for step in needed[start[0] + 1 if start else 0 :]:
            other[step.out] = step(*(other[key] for key in step.inputs))
        return other[name]

    for step in program.steps:
        inputs = [values[name] for name in step.inputs]
        value = step(*inputs)
        parts = step.out.split(".")
        layer = int(parts[1]) if parts[0] == "blocks" else model.architecture.n_layers
        for _, (to, receiver, head), _ in cuts:
            if to != layer:
                continue
            if isinstance(step, Scores) and receiver in "qk":
                both = [
                    again(name, layer, c, head, 1)
                    if (layer, c, head) in {cut[1] for cut in cuts}
                    else values[name]
                    for name, c in zip(step.inputs, "qk", strict=True)
                ]
                value[head] = step(*both)[head]
            if isinstance(step, Mix) and receiver == "v":
                value[:, head] = step(inputs[0], again(step.inputs[1], layer, "v", head, 1))[:, head]
            if receiver == "m" and step.out in (
                f"blocks.{layer}.mlp.hook_pre",
                f"blocks.{layer}.mlp.hook_pre_linear",
            ):
                value = again(step.out, layer, "m", -1, 2)
            if receiver == "logits" and step.out == OUTPUT:
                value = again(OUTPUT, layer, "logits", -1, 1)
        values[step.out] = value
    return values[OUTPUT]


PRE = [
    family
    for family in [*FAMILIES, NETWORKS]
    if drawn(family)[0].architecture.norm_place in ("pre", "none")
    and not drawn(family)[0].architecture.head_positions
]


@pytest.mark.parametrize("family", PRE)
def test_a_receiver_reads_the_stream_without_its_sender(family: str) -> None:
    model, x, _ = drawn(family)
    a = model.architecture
    senders = ["input"] + (["a0", "a0.h0"] if a.has_attention else [])
    senders += ["m0", "m0.n0", f"m0.n{a.d_ff - 1}"] if a.has_network else []
    receivers = {"logits": (a.n_layers, "logits", -1)}
    if a.has_attention and a.qk_norm != "whole":
        receivers |= {f"a1.h{a.n_heads - 1}.{c}": (1, c, a.n_heads - 1) for c in "qkv"}
    receivers |= {"m1": (1, "m", -1)} if a.has_network else {}
    every, one = torch.ones(S).double(), torch.eye(S).double()[1]
    for sender in senders:
        for name, to in receivers.items():
            for at, mask in (("", every), ("@1", one)):
                made = pl.edit(model, f"{sender}->{name}{at}")
                expected = by_hand(model, x, [(sender, to, mask)])
                assert torch.allclose(made(x), expected, rtol=1e-10, atol=1e-10), (sender, name, at)
    assert len(receivers) >= 2


def test_several_edges_add_up_and_the_whole_head_is_three() -> None:
    model, x, _ = drawn("llama")
    every = torch.ones(S).double()
    cuts = [(s, (1, c, 0), every) for s in ("a0.h0", "m0") for c in "qkv"]
    made = pl.edit(model, ["a0.h0->a1.h0", "m0->a1.h0"])
    assert torch.allclose(made(x), by_hand(model, x, cuts), rtol=1e-10, atol=1e-10)
    assert made.sha256 == pl.edit(model, ["m0->a1.h0", "a0.h0->a1.h0"]).sha256
    assert made.name == "random llama without a0.h0->a1.h0, m0->a1.h0"
    assert pl.edit(model, "a0.h0->a1.h0<q>").sha256 == pl.edit(model, "a0.h0->a1.h0.q").sha256


def test_all_edges_of_a_part_cut_are_the_part_taken_out() -> None:
    model, x, _ = drawn("gpt2")
    cut = pl.edit(model, ["a0.h0->m0", "a0.h0->a1", "a0.h0->m1", "a0.h0->logits"])
    assert torch.allclose(cut(x), pl.edit(model, "a0.h0")(x), rtol=1e-11, atol=1e-11)
    patch = Edit("a0.h0->logits", torch.ones(model.architecture.head_dim).double())
    held = pl.edit(model, ["a0.h0->m0", "a0.h0->a1", "a0.h0->m1", patch])
    assert not torch.allclose(held(x), cut(x))


def test_a_circuit_of_edges_keeps_these_alone() -> None:
    model, x, _ = drawn("gpt2")
    a = model.architecture
    every = edges_of(a)
    kept = ["input->a1.h0<q>", "a0.h0->a1.h0", "m0->logits", "input->logits"]
    left = outside_edges({"edges": {name: {"in_graph": True} for name in kept}, "nodes": {}}, a)
    assert set(left) == set(every) - {
        "input->a1.h0.q",
        "a0.h0->a1.h0.q",
        "a0.h0->a1.h0.k",
        "a0.h0->a1.h0.v",
        "m0->logits",
        "input->logits",
    }
    out = [name for name in every if name.endswith("->logits")]
    alone = pl.edit(model, [name for name in out if name != "m0->logits"])
    assert not torch.allclose(alone(x), model(x))
    assert torch.allclose(
        pl.edit(model, every)(x), pl.edit(model, [*out, *every[:3]])(x), rtol=1e-10, atol=1e-10
    )
    for wrong in (["a0.h0->a9.h0"], every, {"nodes": ["m0"]}):
        with pytest.raises(QueryError, match="edge"):
            outside_edges(wrong, a)


def test_a_patched_edge_has_the_senders_value_on_another_prompt() -> None:
    model, x, generator = drawn("gpt2")
    prompt = Prompt(torch.randn(x.shape, generator=generator).double(), tuple("abcd"))
    every = [f"a0.h0->{to}" for to in ("m0", "a1", "m1", "logits")]
    cut = pl.edit(model, [value_on(model, name, prompt) for name in every])
    held = pl.edit(model, value_on(model, "a0.h0", prompt))
    assert torch.allclose(cut(x), held(x), rtol=1e-11, atol=1e-11)
    every = [f"m0.n2->{to}" for to in ("a1", "m1", "logits")]
    cut = pl.edit(model, [value_on(model, name, prompt) for name in every])
    held = pl.edit(model, value_on(model, "m0.n2", prompt))
    assert torch.allclose(cut(x), held(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        (["a1.h0->a0.h0"], "comes behind"),
        (["m0->a0.h0"], "comes behind"),
        (["a0.h0->a9.h0"], "there is no"),
        (["a0.h0->a1.n0"], "is no edge"),
        (["a0.h0->m1", "a0.h0->m1@2"], "twice"),
        (["a0.h0->m1", "a0.h1@2"], "give one of these"),
        (["m0.n1->m1", "m0.n2@2"], "give one of these"),
        (["m0.n99999->m1"], "neurons 0 …"),
        ([Edit("a0.h0->m1", direction=torch.ones(8))], "no direction"),
    ],
)
def test_wrong_edges_are_refused_in_one_line(edits: list[str | Edit], says: str) -> None:
    model, _, _ = drawn("gpt2")
    with pytest.raises(ModelError, match=says) as raised:
        pl.edit(model, edits)
    assert "\n" not in str(raised.value)
    with pytest.raises(ModelError, match="do not add up"):
        pl.edit(pl.load("toy"), "a0.h0->m1")
