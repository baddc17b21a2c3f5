"""GGUF files: a tiny one that the gguf package writes, with and without a tokenizer."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import prooflens as pl
from prooflens.errors import PromptError

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

TOKENS = ["<s>", "</s>", "Ġ", "c", "a", "t", "s", "ca", "cat", "Ġs", "Ġsa", "Ġsat"]
MERGES = ["c a", "ca t", "Ġ s", "Ġs a", "Ġsa t"]
D, D_FF, CONTEXT = 8, 16, 32


def write(path: Path, with_tokenizer: bool) -> dict[str, Any]:
    """A Llama of one block; returns its tensors by their names in the file."""
    generator = numpy.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(D)
    writer.add_block_count(1)
    writer.add_feed_forward_length(D_FF)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(D // 2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    if with_tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), D),
        "output.weight": (len(TOKENS), D),
        "output_norm.weight": (D,),
        "blk.0.attn_norm.weight": (D,),
        "blk.0.ffn_norm.weight": (D,),
        "blk.0.ffn_gate.weight": (D_FF, D),
        "blk.0.ffn_up.weight": (D_FF, D),
        "blk.0.ffn_down.weight": (D, D_FF),
    } | {f"blk.0.attn_{name}.weight": (D, D) for name in ("q", "k", "v", "output")}
    tensors = {name: generator.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_file_brings_its_own_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tensors = write(path, with_tokenizer=True)
    (tmp_path / "tokenizer.json").write_text("{}")  # another model's, or a broken one: not the file's own
    model = pl.load(path)
    assert model.name == "tiny"
    assert torch.equal(model.weights["embed.tokens"].float(), torch.from_numpy(tensors["token_embd.weight"]))
    prompt = model.prompt("cat sat")
    assert prompt.ids is not None
    assert prompt.ids[-2:] == (TOKENS.index("cat"), TOKENS.index("Ġsat"))
    assert prompt.tokens[-2:] == ("cat", " sat")
    assert model(prompt).shape == (len(prompt), len(TOKENS))


def test_a_file_without_a_tokenizer_is_a_model_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, with_tokenizer=False)
    model = pl.load(path)
    assert model.tokenizer is None
    assert model(torch.tensor([3, 4, 5])).shape == (3, len(TOKENS))
    with pytest.raises(PromptError, match="no tokenizer"):
        model.prompt("cat")
