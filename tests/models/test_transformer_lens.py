"""TransformerLens models of both kinds: the real objects, and an edited one that must be refused."""

import pytest
import torch

from prooflens.errors import ModelError
from prooflens.models import load
from tests.families import gpt2, llama

tl = pytest.importorskip("transformer_lens", reason="TransformerLens is not installed")
sources = pytest.importorskip("transformer_lens.model_bridge.sources")


def hooked(**changes: object) -> object:
    base = {
        "n_layers": 2,
        "d_model": 16,
        "n_ctx": 12,
        "d_head": 4,
        "n_heads": 4,
        "d_mlp": 32,
        "act_fn": "gelu_new",
        "d_vocab": 50,
        "normalization_type": "LN",
        "device": "cpu",
        "dtype": torch.float64,
        "seed": 1,
    }
    return tl.HookedTransformer(tl.HookedTransformerConfig(**(base | changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization_type": "LNPre"},
        {
            "normalization_type": "RMS",
            "positional_embedding_type": "rotary",
            "rotary_dim": 4,
            "gated_mlp": True,
            "act_fn": "silu",
            "n_key_value_heads": 2,
        },
    ],
    ids=["gpt2-like", "folded", "llama-like"],
)
def test_hooked_transformer(changes: dict[str, object]) -> None:
    theirs = hooked(**changes)
    model = load(theirs)
    ids = torch.tensor([3, 1, 4, 1, 5, 9])
    with torch.no_grad():
        logits, cache = theirs.run_with_cache(ids[None])  # type: ignore[attr-defined]
    ours, values = model.run_with_cache(model.embed(ids))
    assert torch.allclose(ours, logits[0].double(), rtol=1e-6, atol=1e-6)
    shared = set(values) & set(cache)
    assert {"blocks.0.attn.hook_pattern", "blocks.1.mlp.hook_pre", "blocks.1.hook_resid_post"} <= shared
    for name in shared - {f"blocks.{layer}.attn.hook_attn_scores" for layer in range(2)}:
        assert torch.allclose(values[name], cache[name][0].double(), rtol=1e-5, atol=1e-6), name
    assert ("folded" in model.processing) == (changes.get("normalization_type") == "LNPre")


@pytest.mark.parametrize("make", [gpt2, llama])
def test_bridge(make: object) -> None:
    module = make().float()  # type: ignore[operator]
    expected = load(module).sha256
    bridge = sources.build_bridge_from_module(
        module, type(module).__name__, tokenizer=None, hf_config=module.config
    )
    assert load(bridge).sha256 == expected


def gpt2_bridge() -> object:
    module = gpt2().float()
    return sources.build_bridge_from_module(
        module, "GPT2LMHeadModel", tokenizer=None, hf_config=module.config
    )


def test_an_edit_of_a_bridge_is_seen() -> None:
    bridge = gpt2_bridge()
    before = load(bridge).sha256
    with torch.no_grad():
        bridge.blocks[0].attn.q.weight.mul_(1.5)  # type: ignore[attr-defined]
    assert load(bridge).sha256 != before


def test_a_processed_bridge_is_refused() -> None:
    bridge = gpt2_bridge()
    bridge.enable_compatibility_mode()  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="processed or edited"):
        load(bridge)


def test_unsupported_switches_are_refused() -> None:
    with pytest.raises(ModelError, match="parallel_attn_mlp"):
        load(hooked(parallel_attn_mlp=True))


def test_texts_are_read_as_transformer_lens_reads_them() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(("<s>", "<unk>", "the", "cat", "sat"))}
    reader = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    reader.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs = hooked()
    theirs.tokenizer = PreTrainedTokenizerFast(  # type: ignore[attr-defined]
        tokenizer_object=reader, bos_token="<s>", unk_token="<unk>", pad_token="<s>"
    )
    for prepend in (True, False):
        theirs.cfg.default_prepend_bos = prepend  # type: ignore[attr-defined]
        theirs.cfg.tokenizer_prepends_bos = False  # type: ignore[attr-defined]
        expected = theirs.to_tokens("the cat sat")[0].tolist()  # type: ignore[attr-defined]
        prompt = load(theirs).prompt("the cat sat")
        assert list(prompt.ids or ()) == expected
        assert prompt.tokens[-3:] == ("the", "cat", "sat")
    given = load(hooked(), tokenizer=reader).prompt("cat sat")
    assert given.ids == (3, 4)
    assert given.tokens == ("cat", "sat")
