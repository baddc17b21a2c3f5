"""The prefix tree against the plain run, for every causal family and any set of prompts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prooflens.models import OUTPUT, Transformer, load, scores_name
from prooflens.models.tree import Runner, row_bytes, segments
from tests.families import bert, gpt2
from tests.models.hf_families import DECODERS, VOCABULARY, decoder


def prompts(seed: int = 0) -> Tensor:
    """Rows in order that share beginnings of every length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 6, (24, 7), generator=generator)
    ids[:, 5:] = torch.randint(3, VOCABULARY, (24, 2), generator=generator)
    found: Tensor = torch.unique(ids, dim=0)
    return found


def plain(model: Transformer, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    values = model.headless.run(model.embed(ids), [scores_name(layer), OUTPUT])
    return values[scores_name(layer)], values[OUTPUT]


def assert_same(model: Transformer, ids: Tensor) -> None:
    """Scores at three positions of the last layer, and the vector that the head reads, to 1e-12 of their size."""
    last, size = model.architecture.n_layers - 1, ids.shape[1]
    scores, hidden = plain(model, ids, last)
    found = Runner.of(model, size, [(last, 1), (last, size - 2), (last, size - 1)], output=True)(ids)
    for (_, at), row in found.scores.items():
        theirs = scores[:, :, at, : at + 1]
        assert (row[..., : at + 1] - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    assert found.hidden is not None
    assert (found.hidden - hidden).abs().max() <= 1e-12 * hidden.abs().max()


@pytest.mark.parametrize("name", DECODERS)
def test_the_tree_equals_the_list_in_every_causal_family(name: str) -> None:
    model = load(decoder(name))
    assert Runner.of(model, 7, [(0, 6)], output=True).as_tree
    assert_same(model, prompts())


GPT2 = load(gpt2())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 2)] * 5), min_size=1, max_size=12))
def test_any_rows_run_as_a_tree(rows: list[tuple[int, ...]]) -> None:
    """Unsorted and equal rows only make the tree larger."""
    assert_same(GPT2, torch.tensor(rows))


def test_every_prefix_runs_once() -> None:
    ids = prompts()
    tree = segments(ids)
    assert [part.start for part in tree[1:]] == [part.stop for part in tree[:-1]]
    for part in tree:
        for position in range(part.start, part.stop):
            assert len(part.rows) == len(torch.unique(ids[:, : position + 1], dim=0))
        assert torch.equal(ids[part.rows][part.node_of][:, : part.stop], ids[:, : part.stop])


def test_a_bidirectional_model_runs_as_a_list() -> None:
    model, ids = load(bert(heads=False)), prompts()
    runner = Runner.of(model, 7, [(1, 2)], output=False)
    assert not runner.as_tree
    assert torch.equal(runner(ids).scores[1, 2], plain(model, ids, 1)[0][:, :, 2])


def test_nothing_deeper_than_asked_is_run() -> None:
    runner = Runner.of(GPT2, 7, [(0, 3)], output=False)
    assert not any(step.out.startswith("blocks.1.") for step in runner.program.steps)
    assert row_bytes(GPT2, 7, 1) < row_bytes(GPT2, 7, 2)
