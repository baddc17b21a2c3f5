"""Models exported to ONNX: read back, they are the models that were exported; everything else is one line."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from typer.testing import CliRunner

import prooflens as pl
from prooflens.cli import app
from prooflens.errors import ModelError
from prooflens.models import Transformer
from prooflens.models.onnx.recognise import Recogniser
from prooflens.models.vision import embed_image
from tests.models.hf_families import COMMON, DECODERS, ENCODERS, IMAGE, decoder, encoder, randomised

onnx = pytest.importorskip("onnx", reason="onnx is not installed")

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])
QUICK = ("gpt2 without scale", "llama", "gemma2", "modernbert", "roberta classifier")
"""Families that are exported in more than one way."""


def _copied(graph: Any, kept: Any, source: Any, waits: Any) -> Any:
    """What `buffer.copy_(values)` writes into a graph: the values. Longrope's frequencies are replaced so."""
    return source


# torch's exporter knows no such operator.
torch.onnx.register_custom_op_symbolic("aten::copy", _copied, 13)  # type: ignore[attr-defined]


class Read(nn.Module):
    """A transformers model from ids and mask to its first output, as it is exported."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits, or the last stream."""
        caches = {"use_cache": False} if hasattr(self.inner.config, "use_cache") else {}
        found = self.inner(input_ids=ids, attention_mask=attention_mask, **caches)
        output: Tensor = found.logits if "logits" in found else found.last_hidden_state
        return output


def written(module: nn.Module, given: tuple[Tensor, ...], path: Path, opset: int = 17, **more: Any) -> Path:
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(module.eval(), given, path, dynamo=False, opset_version=opset, **more)
    return path


def exported(module: Any, path: Path, opset: int = 17, free: bool = True) -> Path:
    """A language model or encoder as a file, of any length or of six tokens."""
    names = ["input_ids", "attention_mask"]
    sizes = {"dynamic_axes": {name: {0: "batch", 1: "tokens"} for name in names}} if free else {}
    given = (IDS, torch.ones_like(IDS))
    return written(Read(module.float()), given, path, opset, input_names=names, **sizes)


def of(name: str) -> Any:
    return decoder(name) if name in DECODERS else encoder(name)


def assert_same(ours: Transformer, module: Any) -> None:
    """The same function as what our own reader of the module finds, and as the module itself."""
    expected = pl.load(module)
    if (
        expected.architecture.pooler and expected.architecture.d_out is None
    ):  # the graph ends with the last stream
        bare = replace(expected.architecture, pooler=False, pool="none")
        kept = {name: held for name, held in expected.weights.items() if not name.startswith("pooler")}
        expected = replace(expected, architecture=bare, weights=kept)
    for ids in (IDS[0], torch.arange(20, 29)):
        if len(ids) <= (ours.architecture.context or 0):
            wanted = expected(ids)
            assert torch.allclose(ours(ids), wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))
    with torch.no_grad():
        theirs = Read(module)(IDS, torch.ones_like(IDS))[0].double()
    assert torch.allclose(ours(IDS[0]), theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*DECODERS, *ENCODERS) if "ReLU²" not in name])
def test_every_family_comes_back(name: str, tmp_path: Path) -> None:
    module = of(name)
    model = pl.load(exported(module, tmp_path / "tiny.onnx"))
    assert model.name == "tiny"
    assert model.dtype == torch.float64
    assert_same(model, module)


def test_layers_that_scale_scores_differently(tmp_path: Path) -> None:
    """YaRN's factor stands in the tables of Gemma 3's global layers alone: to the graph it scales some layers."""
    module = of("gemma3_text yarn")
    model = pl.load(exported(module, tmp_path / "tiny.onnx"))
    assert model.architecture.attention_scale is None
    assert_same(model, module)


class Scaled(nn.Module):
    """Two attentions without norms whose scores have scales of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(60, 8)
        self.maps: Any = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, scale in enumerate((0.3, 0.7)):
            q, k, v = (
                m(x).unflatten(-1, (2, 4)).transpose(1, 2) for m in self.maps[4 * layer : 4 * layer + 3]
            )
            weights = torch.softmax(q @ k.transpose(-1, -2) * scale, -1)
            x = x + self.maps[4 * layer + 3]((weights @ v).transpose(1, 2).flatten(-2))
        out: Tensor = self.head(x)
        return out


def test_scales_of_plain_layers_join_the_queries(tmp_path: Path) -> None:
    module = Scaled().double()
    model = pl.load(written(module, (IDS,), tmp_path / "scaled.onnx", input_names=["input_ids"]))
    with torch.no_grad():
        wanted = module(IDS)[0]
    assert torch.allclose(model(IDS[0]), wanted, rtol=1e-9, atol=1e-9)
    bias = module.maps[4].bias.detach() * (0.7 * 4**0.5)
    assert torch.allclose(model.weights["blocks.1.q.bias"], bias)


@pytest.mark.parametrize("name", QUICK)
def test_other_operators_for_the_same(name: str, tmp_path: Path) -> None:
    """Before opset 17 norms are written out; without free sizes shapes are constants."""
    module = of(name)
    model = pl.load(exported(module, tmp_path / "tiny.onnx", opset=14, free=False))
    assert model.architecture.context == 6
    assert_same(model, module)


def test_a_fused_attention_comes_apart(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("bert", **COMMON)
    module = randomised(transformers.AutoModel.from_config(config, attn_implementation="sdpa"))
    assert_same(pl.load(exported(module, tmp_path / "tiny.onnx", opset=14)), module)


def test_a_long_table_of_positions(tmp_path: Path) -> None:
    """More positions than are read: the model's context is what was read."""
    config = transformers.AutoConfig.for_model("bert", **(COMMON | {"max_position_embeddings": 200}))
    module = randomised(transformers.AutoModel.from_config(config, attn_implementation="eager"))
    model = pl.load(exported(module, tmp_path / "tiny.onnx"))
    assert model.architecture.context == 32
    assert_same(model, module)


class BatchNormed(nn.Module):
    """A vision transformer as VNN-COMP has it: batch norms, ReLU, mean pooling, a head behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.front, self.positions = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(5, 8))
        self.maps = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8) for _ in range(3)])
        for norm in self.norms:
            norm.running_mean, norm.running_var = torch.randn(8), torch.rand(8) + 0.5
            norm.weight, norm.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits."""
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.front.expand(len(x), 1, 8), x), 1) + self.positions
        y = self.norms[0](x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (one(y).reshape(len(x), 5, 2, 4).transpose(1, 2) for one in self.maps[:3])
        z = torch.softmax(q @ k.transpose(2, 3) * 0.5, -1) @ v
        x = x + self.maps[3](z.transpose(1, 2).reshape(len(x), 5, 8))
        x = x + self.down(torch.relu(self.up(self.norms[1](x.transpose(1, 2)).transpose(1, 2))))
        logits: Tensor = self.head(self.norms[2](x.mean(1)))
        return logits


@pytest.mark.parametrize("opset", [11, 17])
def test_images_and_batch_norms(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, image = BatchNormed().eval(), torch.randn(1, 3, 8, 8)
    model = pl.load(written(module, (image,), tmp_path / "vit.onnx", opset))
    assert (model.architecture.pool, model.architecture.norm_place, model.architecture.patch) == (
        "mean",
        "none",
        4,
    )
    with torch.no_grad():
        expected = module.double()(image.double())[0]
    assert torch.allclose(model(embed_image(model, image[0].double())), expected, rtol=1e-9, atol=1e-9)


def test_a_vision_transformer_of_transformers(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**IMAGE, intermediate_size=24, num_labels=3, attn_implementation="eager")
    module = randomised(transformers.ViTForImageClassification(config)).float()

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, pixels: Tensor) -> Tensor:
            logits: Tensor = self.inner(pixels).logits
            return logits

    image = torch.randn(1, 3, 8, 8)
    model, expected = pl.load(written(Logits(), (image,), tmp_path / "vit.onnx")), pl.load(module)
    ours, theirs = (one(embed_image(one, image[0].double())) for one in (model, expected))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_graph_that_changes_with_length_is_read_up_to_there(tmp_path: Path) -> None:
    model = pl.load(exported(decoder("phi3 longrope"), tmp_path / "tiny.onnx"))
    assert model.architecture.context == 16


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return exported(decoder("gpt2 without scale"), tmp_path / "tiny.onnx")


def test_a_certificate_of_such_a_model(tiny: Path) -> None:
    model = pl.load(tiny)
    found = pl.certify(model, model.prompt([3, 4, 5]), pl.Ball(1e-6), "0.0", positions=[-1])
    assert found["0.0"].verdict == "holds"


def test_the_command_line_reads_such_a_file(tiny: Path) -> None:
    found = CliRunner().invoke(app, ["show", str(tiny)])
    assert found.exit_code == 0
    assert "onnx: 2 layers, 2 heads" in found.output


@pytest.mark.parametrize("keep", [0, 7, 300, -50])
def test_truncated_files_are_one_line(tiny: Path, keep: int) -> None:
    tiny.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(ModelError) as caught:
        pl.load(tiny)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no\.onnx is missing"):
        pl.load(tmp_path / "no.onnx")


def test_without_onnx_the_extra_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModelError, match=r'pip install "prooflens\[onnx\]"'):
        pl.load(tiny)


def changed(path: Path, kind: str, to: str, number: int = 0) -> None:
    """The file with another operator in one of its nodes."""
    file = onnx.load(str(path))
    chosen = [node for node in file.graph.node if node.op_type == kind][number]
    chosen.op_type, chosen.name = to, "the one"
    onnx.save(file, str(path))


@pytest.mark.parametrize(
    ("kind", "to"), [("Softmax", "LogSoftmax"), ("Tanh", "Sin"), ("Softmax", "Relu"), ("Tanh", "Erf")]
)
def test_what_is_not_understood_names_the_node(tiny: Path, kind: str, to: str) -> None:
    changed(tiny, kind, to)
    with pytest.raises(ModelError, match=r"node '.+' \(\w+\) is not understood") as caught:
        pl.load(tiny)
    assert "\n" not in str(caught.value)


def test_an_operator_that_is_not_known_is_named(tiny: Path) -> None:
    changed(tiny, "Softmax", "LogSoftmax")
    with pytest.raises(ModelError, match=r"node 'the one' \(LogSoftmax\) is not understood"):
        pl.load(tiny)


@pytest.mark.parametrize("wrong", ["scale", "rows", "mask", "eps"])
def test_a_wrong_reading_does_not_pass(tiny: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is run: whatever the recogniser gets wrong is seen there."""
    run = Recogniser.run

    def mistaken(self: Recogniser) -> Any:
        architecture, weights = run(self)
        match wrong:
            case "scale":
                architecture = replace(architecture, attention_scale=0.9)
            case "rows":
                weights["blocks.1.q.weight"] = weights["blocks.1.q.weight"].flip(0)
            case "mask":
                architecture = replace(architecture, causal=False)
            case "eps":
                architecture = replace(architecture, norm_eps=1e-3)
        return architecture, weights

    monkeypatch.setattr(Recogniser, "run", mistaken)
    with pytest.raises(ModelError, match="does not compute what the graph computes"):
        pl.load(tiny)


def test_a_tokenizer_beside_the_file_reads_texts(tiny: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"cat": 3, "sat": 4, "?": 0}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tiny.parent / "tokenizer.json"))
    assert pl.load(tiny).prompt("cat sat").ids == (3, 4)


def test_too_large_a_value_is_refused_before_it_is_made(tmp_path: Path) -> None:
    helper = onnx.helper
    given = helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, [1, 4])
    made = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    size = helper.make_tensor("size", onnx.TensorProto.INT64, [2], [2**20, 2**20])
    node = helper.make_node("ConstantOfShape", ["size"], ["y"], name="bomb")
    graph = helper.make_graph([node], "g", [given], [made], [size])
    onnx.save(helper.make_model(graph), str(tmp_path / "bomb.onnx"))
    with pytest.raises(ModelError, match=r"'bomb'.*more than"):
        pl.load(tmp_path / "bomb.onnx")
