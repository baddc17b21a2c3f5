"""TransformerLens models of both kinds: the real objects, and an edited one that must be refused."""

from typing import Any

import pytest
import torch

from prooflens.errors import ModelError
from prooflens.models import load
from prooflens.models.edits import edit
from prooflens.models.hook_edits import Hook, from_hooks
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


def test_hooks_are_read_as_edits() -> None:
    """The very functions that TransformerLens runs: a head without output at a token, a patch, a hidden key."""
    theirs, ids = hooked(use_attn_result=True), torch.tensor([3, 1, 4, 1, 5, 9])
    model = load(theirs)
    _, clean = theirs.run_with_cache(ids.flip(0)[None])  # type: ignore[attr-defined]

    def ablate(z: torch.Tensor, hook: Any) -> torch.Tensor:
        z[:, -1, 2] = 0.0
        return z

    def patch(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value[:, 3:5] = clean[hook.name][:, 3:5]
        return value

    def hide(scores: torch.Tensor, hook: Any) -> torch.Tensor:
        scores[:, 1, 4, 0] = -torch.inf
        return scores

    hooks: list[Hook] = [
        ("blocks.0.attn.hook_z", ablate),
        ("blocks.0.hook_mlp_out", patch),
        ("blocks.1.attn.hook_attn_scores", hide),
    ]
    with torch.no_grad():
        logits = theirs.run_with_hooks(ids[None], fwd_hooks=hooks)  # type: ignore[attr-defined]
    edited = edit(model, from_hooks(model, hooks, len(ids)))
    assert torch.allclose(edited(model.embed(ids)), logits[0].double(), rtol=1e-6, atol=1e-6)


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


REFUSED: dict[str, dict[str, object]] = {
    "act_fn = 'solu_ln'": {"act_fn": "solu_ln", "normalization_type": "RMS"},
    "gated_mlp": {"act_fn": "solu", "gated_mlp": True},
    "use_qk_norm": {"use_qk_norm": True},
    "final_rms": {"final_rms": True},
    "post_embedding_ln": {"post_embedding_ln": True},
    "clip_qkv": {"clip_qkv": 1.0},
    "alibi": {"positional_embedding_type": "alibi", "n_heads": 3},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_has_no_step_is_refused_by_the_name_of_its_field(named: str) -> None:
    with pytest.raises(ModelError, match=named):
        load(hooked(**REFUSED[named]))


ROTARY: dict[str, object] = {"positional_embedding_type": "rotary"}
KINDS: dict[str, dict[str, object]] = {
    "attention-only": {"attn_only": True, "d_mlp": None, "act_fn": None},
    "attention-only-folded": {"attn_only": True, "normalization_type": "LNPre"},
    "no-norm": {"normalization_type": None},
    "attention-only-no-norm": {"attn_only": True, "normalization_type": None},
    "layer": {},
    "rms": {"normalization_type": "RMS"},
    "rms-folded": {"normalization_type": "RMSPre"},
    "parallel": {"parallel_attn_mlp": True},
    "gated": {"gated_mlp": True, "act_fn": "silu", "n_key_value_heads": 2},
    "shortformer": {"positional_embedding_type": "shortformer", "n_key_value_heads": 2},
    "shortformer-attention-only": {"positional_embedding_type": "shortformer", "attn_only": True},
    "rotary": ROTARY,
    "partial-rotary": {**ROTARY, "d_head": 8, "rotary_dim": 4, "n_key_value_heads": 2},
    "neighbours": {**ROTARY, "rotary_adjacent_pairs": True, "parallel_attn_mlp": True},
    "partial-neighbours": {**ROTARY, "d_head": 8, "rotary_dim": 6, "rotary_adjacent_pairs": True},
    "partial-normed": {
        **ROTARY,
        "d_head": 8,
        "rotary_dim": 4,
        "use_qk_norm": True,
        "normalization_type": "RMS",
    },
    "slowed-rotary": {**ROTARY, "rotary_scaling_factor": 4.0},
    "window": {"use_local_attn": True, "window_size": 3, "attn_types": ["global", "local"]},
    "two-bases": {
        **ROTARY,
        "use_local_attn": True,
        "window_size": 2,
        "attn_types": ["local", "global"],
        "rotary_base_local": 100,
    },
    "both-ways": {"attention_dir": "bidirectional"},
    "not-scaled": {"use_attn_scale": False},
    "scaled": {"attn_scale": 3.0},
    "scaled-by-layer": {"scale_attn_by_inverse_layer_idx": True},
    "normed-queries": {"use_qk_norm": True, "normalization_type": "RMS"},
    "normed-queries-only": {"use_qk_norm": True, "normalization_type": None},
    "capped": {"attn_scores_soft_cap": 0.5, "output_logits_soft_cap": 2.0},
    "gemma-2-like": {"normalization_type": "RMS", "use_normalization_before_and_after": True},
    "olmo-2-like": {"normalization_type": "RMS", "original_architecture": "Olmo2ForCausalLM", **ROTARY},
    "bloom-like": {"positional_embedding_type": "alibi", "post_embedding_ln": True},
    "solu": {"act_fn": "solu"},
    "solu-normed": {"act_fn": "solu_ln"},
    "solu-normed-folded": {"act_fn": "solu_ln", "normalization_type": "LNPre"},
    "solu-normed-alone": {"act_fn": "solu_ln", "normalization_type": None, "parallel_attn_mlp": True},
    "other-vocabulary": {"d_vocab_out": 7},
}


def spread(model: Any) -> None:
    """Move every weight away from its start, so that no scale is 1 and no bias 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def tables_in_float32(model: Any) -> None:
    """Give TransformerLens the rotary tables that prooflens has, as transformers makes them: of float32."""
    cfg = model.cfg
    for block in model.blocks:
        attention, dim = block.attn, cfg.rotary_dim
        inverse = 1.0 / attention._rotary_base() ** (torch.arange(0, dim, 2).float() / dim)
        inverse = inverse / (cfg.rotary_scaling_factor if attention.attn_type == "global" else 1.0)
        angles = torch.outer(torch.arange(cfg.n_ctx).float(), inverse)
        angles = angles.repeat_interleave(2, -1) if cfg.rotary_adjacent_pairs else angles.repeat(1, 2)
        gap = (angles.cos() - attention.rotary_cos).abs().max()
        assert float(gap) < 1e-5
        attention.rotary_cos, attention.rotary_sin = angles.cos().double(), angles.sin().double()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_the_same(kind: str) -> None:
    theirs: Any = hooked(**KINDS[kind])
    spread(theirs)
    load(theirs)
    if theirs.cfg.positional_embedding_type == "rotary":
        tables_in_float32(theirs)
    model = load(theirs)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.no_grad():
        logits, cache = theirs.run_with_cache(ids[None])
    ours, values = model.run_with_cache(model.embed(ids))
    wanted = {
        f"blocks.{layer}.{name}"
        for layer in range(2)
        for name in (
            "attn.hook_pattern",
            "hook_resid_pre",
            "hook_resid_post",
            "hook_attn_out",
            "hook_mlp_out",
        )
    }
    assert torch.allclose(ours, logits[0], rtol=1e-9, atol=1e-9)
    assert torch.allclose(model.embed(ids), cache["blocks.0.hook_resid_pre"][0], rtol=1e-9, atol=1e-9)
    shared = wanted & set(values) & set(cache)
    assert {"blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern", "blocks.0.hook_resid_post"} <= shared
    if model.architecture.norm_place in ("sandwich", "output"):
        shared -= {
            name for name in shared if name.endswith("_out")
        }  # theirs is behind the norm, ours before it
    for name in shared:
        assert torch.allclose(values[name], cache[name][0], rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize(
    "changes",
    [
        {"use_NTK_by_parts_rope": True, "NTK_original_ctx_len": 64},
        {"use_yarn_rope": True, "yarn_factor": 4.0, "yarn_attention_factor": 1.2, "yarn_beta_fast": 2.0},
    ],
    ids=["llama3", "yarn"],
)
def test_scaled_rotary_positions(changes: dict[str, object]) -> None:
    theirs: Any = hooked(**ROTARY, **changes, d_head=8, yarn_original_max_position_embeddings=8)
    spread(theirs)
    model = load(theirs)
    plain: Any = hooked(**ROTARY, d_head=8)
    plain.load_state_dict(
        {**theirs.state_dict(), **{k: v for k, v in plain.state_dict().items() if "rotary" in k}}
    )
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.no_grad():
        expected, other = theirs(ids[None])[0], plain(ids[None])[0]
    assert torch.allclose(model(ids), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(other, expected, rtol=1e-3, atol=1e-3)


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
