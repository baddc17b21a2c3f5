"""Every family against transformers' own forward pass, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from prooflens.errors import ModelError
from prooflens.models import INPUT, Transformer, load, pattern_name
from prooflens.models.program import blocks_to
from tests.families import FAMILIES, VOCABULARY, bert, llama

RELATIVE = 1e-9


@pytest.fixture
def _true_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' Llama drops to float32 inside RMSNorm and softmax whatever the model's precision; the same
    formulas in the model's own precision are what a float64 comparison needs."""

    def norm(self: Any, x: Tensor) -> Tensor:
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        normed: Tensor = self.weight * (x * root)
        return normed

    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim=None, dtype=None, **kw: softmax(x, dim=dim)
    )


def ids_of(n: int, seed: int = 1) -> Tensor:
    return torch.randint(4, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def relative_gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def output_of(module: Any, ids: Tensor, **options: Any) -> tuple[Any, Tensor]:
    with torch.no_grad():
        out = module(ids[None], output_attentions=True, **options)
    final = out.logits if hasattr(out, "logits") else out.pooler_output
    return out, final[0]


@pytest.mark.usefixtures("_true_double")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_tokens", [1, 7])
def test_patterns_and_output_equal_transformers(family: str, n_tokens: int) -> None:
    module = FAMILIES[family]()
    model = load(module)
    ids = ids_of(n_tokens)
    theirs, output = output_of(module, ids)
    ours, cache = model.run_with_cache(model.embed(ids))
    for layer in range(model.architecture.n_layers):
        assert relative_gap(cache[pattern_name(layer)], theirs.attentions[layer][0]) < RELATIVE
    assert relative_gap(ours, output) < RELATIVE


@pytest.mark.usefixtures("_true_double")
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_scores_equal_the_softmax_inputs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = FAMILIES[family]()
    model = load(module)
    ids = ids_of(6)
    seen: list[Tensor] = []
    softmax = torch.nn.functional.softmax

    def spy(x: Tensor, **options: Any) -> Tensor:
        seen.append(x)
        return softmax(x, dim=-1)

    monkeypatch.setattr(torch.nn.functional, "softmax", spy)
    output_of(module, ids)
    mask = model.mask(6)
    for layer, theirs in enumerate(seen):
        ours = model.scores(model.embed(ids), layer)
        assert relative_gap(ours[:, mask], theirs[0][:, mask]) < RELATIVE


@pytest.mark.usefixtures("_true_double")
def test_padding_is_what_an_attention_mask_does() -> None:
    module = bert()
    model = load(module)
    ids = ids_of(7)
    padding = torch.tensor([True, True, True, True, True, False, False])
    _, theirs = output_of(module, ids, attention_mask=padding[None].long())
    assert relative_gap(model(model.embed(ids), padding), theirs) < RELATIVE
    shorter = model(model.embed(ids[:5]))
    assert torch.allclose(model(model.embed(ids), padding), shorter, rtol=1e-12)


@pytest.mark.usefixtures("_true_double")
def test_tied_llama_uses_its_embedding_as_head() -> None:
    module = llama(tied=True)
    model = load(module)
    assert "head.weight" not in model.weights
    ids = ids_of(5)
    assert relative_gap(model(model.embed(ids)), output_of(module, ids)[1]) < RELATIVE


def test_bare_bert_ends_in_its_pooler() -> None:
    module = bert(heads=False)
    model = load(module)
    ids = ids_of(5)
    assert relative_gap(model(model.embed(ids)), output_of(module, ids)[1]) < RELATIVE


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_round_trip_is_the_same_model(family: str, tmp_path: Any) -> None:
    module = FAMILIES[family]()
    module.save_pretrained(tmp_path)
    assert load(tmp_path).sha256 == load(module).sha256


def every_family() -> dict[str, Transformer]:
    return {name: load(make()) for name, make in FAMILIES.items()} | {"toy": load("toy")}


@pytest.mark.parametrize("family", [*FAMILIES, "toy"])
def test_derivatives_agree_with_finite_differences(family: str) -> None:
    model = every_family()[family]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, model.architecture.d_model, generator=generator, dtype=torch.float64)
    direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    tangent = torch.func.jvp(model, (x,), (direction,))[1]
    step = 1e-5
    difference = (model(x + step * direction) - model(x - step * direction)) / (2 * step)
    assert torch.allclose(tangent, difference, rtol=1e-5, atol=1e-7)
    output, pull_back = torch.func.vjp(model, x)[:2]
    covector = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    (gradient,) = pull_back(covector)
    assert torch.allclose((gradient * direction).sum(), (covector * tangent).sum(), rtol=1e-10)


@pytest.mark.parametrize("family", [*FAMILIES, "toy"])
def test_batched_equals_looped_and_vmapped(family: str) -> None:
    model = every_family()[family]
    x = torch.randn(3, 2, 4, model.architecture.d_model, dtype=torch.float64)
    batched, cache = model.run_with_cache(x)
    for i in range(3):
        for j in range(2):
            single, single_cache = model.run_with_cache(x[i, j])
            assert torch.allclose(batched[i, j], single, rtol=1e-12, atol=1e-14)
            for name, value in single_cache.items():
                assert torch.allclose(cache[name][i, j], value, rtol=1e-12, atol=1e-14), name
    mapped = torch.func.vmap(torch.func.vmap(model))(x)
    assert torch.allclose(mapped, batched, rtol=1e-12, atol=1e-14)


def test_a_program_to_an_early_value_is_the_beginning_of_the_whole(toy: Transformer) -> None:
    assert toy.architecture.n_layers == 2
    x = toy.example().x
    _, cache = toy.run_with_cache(x)
    for name in cache:
        if name != "output":
            assert torch.equal(toy.run(x, name)[name], cache[name]), name
    with pytest.raises(ModelError, match="no value named"):
        toy.program(4, "blocks.0.nothing")
    with pytest.raises(ModelError, match="no value named"):
        toy.program(4, "blocks.7.hook_resid_pre")


@pytest.mark.parametrize(
    ("wanted", "blocks"),
    [
        (["blocks.0.attn.hook_q"], 1),
        (["blocks.0.attn.hook_q", "blocks.2.hook_resid_mid"], 3),
        (["blocks.3.attn.hook_attn_scores"], None),
        (["blocks.0.attn.hook_q", "output"], None),
        (["blocks.0"], None),
    ],
)
def test_no_block_is_built_that_nobody_wants(wanted: list[str], blocks: int | None) -> None:
    assert blocks_to(wanted, 4) == blocks


def test_program_stops_where_it_is_told(toy: Transformer) -> None:
    program = toy.program(4, "blocks.1.attn.hook_attn_scores")
    names = [step.out for step in program.steps]
    assert names[-1] == "blocks.1.attn.hook_attn_scores"
    assert "blocks.1.attn.hook_v" not in names
    assert "blocks.0.attn.hook_v" in names
    assert program.steps[0].inputs == (INPUT,)


def test_masked_weights_are_exactly_zero() -> None:
    model = load(FAMILIES["llama"]())
    pattern = model.pattern(torch.randn(5, 16, dtype=torch.float64), 1)
    assert bool((pattern[:, ~model.mask(5)] == 0).all())
    assert torch.allclose(pattern.sum(-1), torch.ones(4, 5, dtype=torch.float64), rtol=1e-14)
