"""Objects that hold a transformers module: nnsight's and sentence-transformers', by their shape."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from prooflens.errors import ModelError
from prooflens.models import load
from tests.families import bert, gpt2


class Words:
    """A tokenizer of three words."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return "x" * ids[0]


class First(nn.Module):
    """What sentence-transformers calls Transformer."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.auto_model = inner
        self.tokenizer = Words()


class Pooling(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def get_pooling_mode_str(self) -> str:
        return self.mode


class OldPooling(nn.Module):
    pooling_mode_mean_tokens = True
    pooling_mode_cls_token = False


class Normalize(nn.Module):
    pass


class Dense(nn.Module):
    pass


def test_nnsight_gives_up_its_module_and_tokenizer() -> None:
    module = gpt2()
    model = load(SimpleNamespace(_model=module, tokenizer=Words()))
    assert model.sha256 == load(module).sha256
    assert model.prompt("one three").ids == (3, 5)


def test_nnsight_without_weights_is_refused() -> None:
    with pytest.raises(ModelError, match="load the weights first"):
        load(SimpleNamespace(_model=gpt2().to("meta"), tokenizer=None))


@pytest.mark.parametrize(
    ("pooling", "pool"), [(Pooling("mean"), "mean"), (Pooling("cls"), "first"), (OldPooling(), "mean")]
)
def test_sentence_encoder(pooling: nn.Module, pool: str) -> None:
    inner = bert(heads=False)
    model = load(nn.Sequential(First(inner), pooling, Normalize()))
    ids = torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        states = inner(input_ids=ids[None]).last_hidden_state[0]
    expected = states.mean(0) if pool == "mean" else states[0]
    assert model.architecture.pool == pool
    assert torch.allclose(model(ids), expected, rtol=1e-9, atol=1e-9)
    assert model.prompt("one three").ids == (3, 5)


def test_what_sentence_transformers_does_besides_is_refused() -> None:
    with pytest.raises(ModelError, match="pooling_mode = 'max'"):
        load(nn.Sequential(First(bert(heads=False)), Pooling("max")))
    with pytest.raises(ModelError, match="Dense"):
        load(nn.Sequential(First(bert(heads=False)), Pooling("mean"), Dense()))
    with pytest.raises(ModelError, match="pooled"):
        load(nn.Sequential(First(gpt2()), Pooling("mean")))


def test_other_sequences_of_modules_are_refused() -> None:
    with pytest.raises(ModelError, match="cannot load a Sequential"):
        load(nn.Sequential(nn.Linear(2, 2)))
