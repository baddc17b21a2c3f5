"""Every family against transformers in float64: weights of attention, residual streams and output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import prooflens as pl
from prooflens.errors import ModelError
from prooflens.models import Transformer, load, pattern_name
from prooflens.models.huggingface import FAMILIES, convert
from tests.models.hf_families import (
    DECODERS,
    ENCODERS,
    OLD_SPELLING,
    VOCABULARY,
    decoder,
    encoder,
    spelled_as_before,
    true_double,
)

RELATIVE = 1e-9


def ids_of(n: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(1))


def gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def run(module: Any, ids: Tensor, **options: Any) -> Any:
    with torch.no_grad(), true_double():
        return module(ids[None], output_attentions=True, output_hidden_states=True, **options)


def assert_equal(model: Transformer, theirs: Any, output: Tensor, ids: Tensor) -> None:
    ours, cache = model.run_with_cache(ids)
    assert gap(ours, output) < RELATIVE
    for layer in range(model.architecture.n_layers):
        assert gap(cache[pattern_name(layer)], theirs.attentions[layer][0]) < RELATIVE
    if model.architecture.norm_place != "post":
        for layer in range(model.architecture.n_layers - 1):
            stream = cache[f"blocks.{layer}.hook_resid_post"]
            assert gap(stream, theirs.hidden_states[layer + 1][0]) < RELATIVE


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_equal_transformers(name: str) -> None:
    module, ids = decoder(name), ids_of(7)
    theirs = run(module, ids, use_cache=False)
    assert_equal(load(module), theirs, theirs.logits[0], ids)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_transformers(name: str) -> None:
    module, ids = encoder(name), ids_of(7)
    theirs = run(module, ids)
    names = ("logits", "pooler_output", "last_hidden_state")
    output = next(found for name in names if (found := getattr(theirs, name, None)) is not None)
    assert_equal(load(module), theirs, output[0], ids)


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2", "qwen3", "olmo2", "bloom", "gptj"])
def test_folders_are_read_as_modules_are(name: str, tmp_path: Path) -> None:
    module = decoder(name)
    module.save_pretrained(tmp_path)
    folder = load(tmp_path)
    assert folder.sha256 == load(module).sha256
    assert gap(folder(ids_of(5)), load(module)(ids_of(5))) < 1e-12


@pytest.mark.parametrize("name", OLD_SPELLING)
def test_configurations_of_before_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    spelled_as_before(name, tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").double()
    for part in read.modules():  # RoPE's constants stay float32
        for buffer, value in list(part.named_buffers(recurse=False)):
            if "inv_freq" in buffer:
                setattr(part, buffer, value.float())
    ids = ids_of(7)
    theirs = run(read.eval(), ids, use_cache=False)
    assert_equal(load(tmp_path), theirs, theirs.logits[0], ids)


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2", "mistral", "opt", "phi"])
def test_padded_tokens_take_no_part(name: str) -> None:
    module, ids = decoder(name), ids_of(6)
    real = torch.tensor([True] * 4 + [False] * 2)
    theirs = run(module, ids, attention_mask=real[None].long(), use_cache=False)
    model = load(module)
    ours = model(model.embed(ids), real)
    assert gap(ours[:4], theirs.logits[0, :4]) < RELATIVE


@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neo", "gemma", "gemma2", "qwen3", "olmo2", "phi"])
def test_one_token_and_the_trunk_alone(name: str) -> None:
    module = decoder(name)
    theirs = run(module, ids_of(1), use_cache=False)
    assert gap(load(module)(ids_of(1)), theirs.logits[0]) < RELATIVE
    trunk = load(module.base_model)
    assert trunk.architecture.d_out is None
    with torch.no_grad(), true_double():
        inner = module.base_model(ids_of(4)[None], use_cache=False).last_hidden_state[0]
    assert gap(trunk(ids_of(4)), inner) < RELATIVE


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type = 'spiral'"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm = True"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm = True"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm = True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("mistral", {"num_local_experts": 8}, "mixtures of experts"),
        ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim = 8"),
        ("deberta", {}, "'deberta' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    kind = family if family in FAMILIES else "llama"
    name = next(name for name, (own, _) in DECODERS.items() if own == kind)
    module = decoder(name)
    config = module.config.to_dict() | {"model_type": family} | changes
    with pytest.raises(ModelError, match=message) as error:
        convert(config, module.state_dict())
    assert "\n" not in str(error.value)


def test_windows_bind_claims() -> None:
    """A query asks only about keys that its layer looks at."""
    model = load(decoder("mistral"))
    results = pl.certify(
        model, model.embed(ids_of(6)), pl.Ball(1e-6), "0.1", positions=[-1], engine="interval"
    )
    (outcome,) = results.outcomes
    read = {atom.key for f in outcome.claim.functionals for _, atom in f.terms}  # type: ignore[union-attr]
    assert read == {3, 4, 5}
    assert bool((model.pattern(model.embed(ids_of(6)), 0)[:, 5, :3] == 0).all())


def test_logits_of_claims_are_those_before_the_cap() -> None:
    model = load(decoder("gemma2"))
    x = model.embed(ids_of(4))
    answer = pl.output(model, x, pl.Ball(1e-7), engine="interval")
    capped, plain = model(x)[-1], model.uncapped(x)[-1]
    assert int(capped.argmax()) == int(plain.argmax())
    first, second = plain.topk(2).values
    assert answer.rows[0]["clean"] == pytest.approx(float(first - second))
