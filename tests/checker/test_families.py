"""Hugging Face folders of every family that the checker reads itself: fingerprint and values are the package's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flint import arb

import prooflens as pl
from prooflens.checker.families import own_powers
from prooflens.checker.network import Network
from tests.models.hf_families import (
    DECODERS,
    ENCODERS,
    IMAGE,
    OLD_SPELLING,
    decoder,
    encoder,
    randomised,
    spelled_as_before,
)


def torch_powers(theta: float, width: int) -> Any:
    return (theta ** (torch.arange(0, width, 2).float() / width)).numpy()


def assert_read(folder: Path, x: torch.Tensor) -> None:
    """The checker's network has the model's fingerprint and contains its scores and outputs."""
    model, net = pl.load(folder), Network.read(folder, powers=torch_powers)
    mine = model.architecture.to_dict()
    assert {name: value for name, value in net.arch.items() if value != mine.get(name, value)} == {}
    assert net.sha256 == model.sha256
    if x.dtype == torch.int64:
        x = model.embed(x)
    # Without the library's tables rotations are balls that later layers magnify; claims read logits before their cap.
    deep = not model.architecture.is_rotary
    (found,) = net.run([np.frompyfunc(arb, 1, 1)(x.numpy())], [0], output=deep)
    _, cache = model.uncapped.run_with_cache(x)
    wanted: dict[int | str, torch.Tensor] = {0: cache["blocks.0.attn.hook_attn_scores"]}
    if deep:
        wanted["logits"] = cache["output"] if model.architecture.pool != "none" else cache["output"][-1]
    for name, values in wanted.items():
        for ball, value in zip(found[name].ravel(), values.flatten().tolist(), strict=True):
            assert abs(ball - value).lower() <= 1e-12
            assert float(ball.rad()) <= 1e-3


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_families_of_texts(name: str, tmp_path: Path) -> None:
    module = decoder(name) if name in DECODERS else encoder(name)
    module.float().save_pretrained(tmp_path)
    assert_read(tmp_path, torch.tensor([3, 14, 15, 9]))


@pytest.mark.parametrize("name", OLD_SPELLING)
def test_configurations_of_before(name: str, tmp_path: Path) -> None:
    spelled_as_before(name, tmp_path)
    assert_read(tmp_path, torch.tensor([3, 14, 15, 9]))


@pytest.mark.parametrize("kind", ["ViTModel", "ViTForImageClassification", "Dinov2Model"])
def test_images(kind: str, tmp_path: Path) -> None:
    config: Any = transformers.ViTConfig(**IMAGE, intermediate_size=24, num_labels=3)
    config = transformers.Dinov2Config(**IMAGE, mlp_ratio=2) if "Dino" in kind else config
    randomised(getattr(transformers, kind)(config)).float().save_pretrained(tmp_path)
    assert_read(tmp_path, torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def test_other_families_are_named(tmp_path: Path) -> None:
    decoder("qwen3").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    held = json.loads(path.read_text())
    for fields in ({"model_type": "mamba"}, {"num_experts": 4}):
        path.write_text(json.dumps(held | fields))
        with pytest.raises(ValueError, match="not known to the checker"):
            Network.read(tmp_path)


def test_other_powers_are_refused(tmp_path: Path) -> None:
    decoder("gptj whole head").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="powers of RoPE's base"):
        Network.read(tmp_path, powers=lambda theta, width: torch_powers(theta * 1.001, width))


@pytest.mark.parametrize("width", [2, 64, 96, 128])
def test_own_powers_are_within_a_unit_of_torchs(width: int) -> None:
    theirs = torch_powers(10000.0, width)
    assert (np.abs(own_powers(10000.0, width) - theirs) <= 2.0**-23 * theirs).all()
