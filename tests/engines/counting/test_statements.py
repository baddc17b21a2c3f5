"""Statements about every token against loops over the model itself."""

from __future__ import annotations

import pytest
import torch

from prooflens.engines.counting import FirstScores
from prooflens.engines.counting.statements import copies, prefers_duplicates
from prooflens.errors import ModelError, QueryError
from prooflens.models import Transformer
from tests.engines.counting.models import VOCABULARY, model_of


@pytest.mark.parametrize("kind", ["rotary", "learned", "bert", "alibi", "softcap"])
def test_duplicates_against_all_pairs(kind: str) -> None:
    model, n = model_of(kind, seed=11), 4
    found = prefers_duplicates(FirstScores(model, n), 1)
    for token, low, high in zip(found.tokens, found.lower, found.upper, strict=True):
        rows = torch.tensor([[other] * (n - 1) + [token] for other in range(VOCABULARY)])
        name = "blocks.0.attn.hook_attn_scores" + ("_uncapped" if kind == "softcap" else "")
        scores = model.run(model.embed(rows), name)[name][:, 1, n - 1, : n - 1]
        others = torch.cat((scores[:token], scores[token + 1 :]))
        margin = float(scores[token].min() - others.max())
        assert low <= margin <= high
        assert high - low < 1e-9
    assert len(found.holds) + len(found.fails) == VOCABULARY


def with_head(model: Transformer, seed: int) -> Transformer:
    from dataclasses import replace

    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64)
    o_bias = torch.randn(8, generator=generator, dtype=torch.float64)
    weights = {
        **model.weights,
        "head.weight": head,
        "blocks.0.v.bias": o_bias[: len(model.weights["blocks.0.v.weight"])],
    }
    return Transformer(replace(model.architecture, d_out=VOCABULARY), weights)


@pytest.mark.parametrize("kind", ["rotary", "learned", "whole norms"])
def test_copies_against_the_product_of_matrices(kind: str) -> None:
    model = with_head(model_of(kind, seed=12), 3)
    found = copies(FirstScores(model, 3), 1, position=2)
    values = model.run(torch.arange(VOCABULARY)[:, None].expand(-1, 3), "blocks.0.attn.hook_v")
    v = values["blocks.0.attn.hook_v"][:, 2, -1]
    logits = v @ model.weights["blocks.0.o.weight"][:, 4:].T @ model.head[0].T
    own = logits.diagonal()
    best = logits.masked_fill(torch.eye(VOCABULARY, dtype=torch.bool), -torch.inf).amax(-1)
    margin = (own - best).tolist()
    assert all(low <= m <= high for low, m, high in zip(found.lower, margin, found.upper, strict=True))
    assert found.holds == tuple(t for t, m in enumerate(margin) if m > 0)
    assert found.unknown == 0


def test_identical_tokens_are_unknown_or_refuted_never_proved() -> None:
    model = with_head(model_of("rotary", seed=13), 3)
    tokens = model.weights["embed.tokens"].clone()
    tokens[3] = tokens[5]
    twins = Transformer(model.architecture, {**model.weights, "embed.tokens": tokens})
    assert not {3, 5} & set(prefers_duplicates(FirstScores(twins, 3), 0).holds)


def test_refusals() -> None:
    scores = FirstScores(model_of("rotary"), 1)
    with pytest.raises(QueryError, match="at least 2"):
        prefers_duplicates(scores, 0)
    with pytest.raises(ModelError, match="does not predict tokens"):
        copies(scores, 0)
