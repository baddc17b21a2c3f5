"""Families in real models: their tokenizers, their lists of names, and counts against runs of single prompts."""

import pytest
import torch

import prooflens as pl
from prooflens.models import Transformer

TEXT = "When{A} and{B} went to the{P},{B} gave a{O} to"


@pytest.mark.pretrained
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_templates_are_tokenised_as_their_texts(name: str, request: pytest.FixtureRequest) -> None:
    model: Transformer = request.getfixturevalue(name)
    family = pl.Template(TEXT, A=pl.NAMES, B=pl.NAMES, P=pl.PLACES, O=pl.OBJECTS, differ=[("A", "B")]).of(
        model
    )
    assert len(family.words["A"]) >= 90
    assert len(family.shapes) == 1
    for member in family.sample(50, seed=2):
        assert model.prompt(member.text).ids == member.ids
        tokens = [model.prompt(member.text).tokens[i].strip().lower() for i in family.shapes[0].roles["B"][1]]
        assert tokens == [member.fillers["B"].strip().lower()]


@pytest.mark.pretrained
def test_fillers_of_several_tokens_make_shapes(smollm2: Transformer) -> None:
    family = pl.Template("The {X} is {C}.", X=["car", "Eiffel tower"], C=pl.COLOURS).of(smollm2)
    assert sorted(family.lengths.values()) == [len(family.words["C"])] * 2
    assert all(smollm2.prompt(member.text).ids == member.ids for member in family)


@pytest.mark.pretrained
def test_a_duplicate_token_head_is_counted_as_single_runs_count_it(smollm2: Transformer) -> None:
    names = [" Mary", " John", " Kate"]
    template = pl.Template("When{A} and{B} met,{B} spoke", A=names, B=names, differ=[("A", "B")])
    row = pl.family(smollm2, template, "8.0:top1={B.1}@{B.2}", confirm=0.0)[0]
    held = 0
    for member in template.of(smollm2):
        (first,), (second,) = member.roles["B"]
        pattern = smollm2.pattern(torch.tensor(member.ids), 8)[0, second]
        held += int(pattern.argmax() == first)
    assert (row.held, row.asked) == (held, 6)
