"""Real pretrained weights against transformers in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BertModel

from prooflens.models import Transformer, pattern_name
from prooflens.models.cache import model_folder

pytestmark = pytest.mark.pretrained

PROMPTS = [
    "When Mary and John went to the store, John gave a drink to",
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a little girl who",
    "2 + 2 =",
    "The opposite of hot is",
    "Alice told Bob that Alice would",
    "one two three four one two three",
    "Water boils at a temperature of",
    "She opened the door and",
]


def test_minilm_patterns_equal_transformers(minilm: Transformer) -> None:
    module = BertModel.from_pretrained(model_folder("minilm"), attn_implementation="eager").eval()
    for text in ("The cat sat on the mat.", "a gripping movie with a twist nobody saw coming"):
        prompt = minilm.prompt(text)
        with torch.no_grad():
            theirs = module(torch.tensor([prompt.ids]), output_attentions=True)
        output, cache = minilm.run_with_cache(prompt.x)
        for layer in range(6):
            gap = (cache[pattern_name(layer)] - theirs.attentions[layer][0].double()).abs().max()
            assert float(gap) < 1e-5
        assert float((output - theirs.last_hidden_state[0].double().mean(0)).abs().max()) < 1e-5


@pytest.mark.slow
def test_smollm2_logits_equal_transformers(smollm2: Transformer) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_folder("smollm2"), dtype=torch.float32).eval()
    for text in PROMPTS:
        prompt = smollm2.prompt(text)
        with torch.no_grad():
            theirs = module(torch.tensor([prompt.ids])).logits[0].double()
            ours = smollm2(prompt.x)
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_smollm2_knows_who_gets_the_drink(smollm2: Transformer) -> None:
    prompt = smollm2.prompt(PROMPTS[0])
    assert len(prompt) == 14
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.token(int(smollm2(prompt.x)[-1].argmax())) == " Mary"


def test_smollm2_induction_head(smollm2: Transformer) -> None:
    """Head 18.6 looks one token past the previous occurrence, on repeated random tokens."""
    ids = torch.randint(1000, 20000, (12,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pattern = smollm2.pattern(smollm2.embed(torch.cat((ids, ids))), 18)[6]
    second = torch.arange(12, 24)
    assert float(pattern[second, second - 11].mean()) > 0.5


def test_real_weights_travel_through_a_folder(minilm: Transformer) -> None:
    assert minilm.architecture.norm_eps == 1e-12
    assert minilm.architecture.pool == "mean"
    assert minilm.n_parameters == 22_565_376
