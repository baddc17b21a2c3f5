"""Claims about neurons, directions and features: verdicts against the cache, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import prooflens as pl
from prooflens.errors import ModelError, ProoflensError, QueryError
from prooflens.queries import parse_query

HOOK = "blocks.1.hook_resid_post"


@pytest.fixture
def sae(toy: pl.Transformer) -> pl.Dictionary:
    generator = torch.Generator().manual_seed(0)
    d = toy.architecture.d_model
    W, b, c = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((12, d), (12,), (d,)))
    return pl.Dictionary.of(HOOK, W, b, 0.1 * c, threshold=0.2, kind="jumprelu")


@pytest.mark.parametrize(
    "text",
    [
        "neuron 5.1234>0.0@-1",
        "neuron 5.1234@3",
        "logit3>=0.5",
        "logit3",
        "feature SAE.512 active@-1",
        "feature SAE.512 off@-1",
        "feature SAE.512>0.25@-1",
        "read(blocks.8.hook_resid_post@-1,DIR)>=0.5",
        'read(blocks.8.hook_resid_post@" Mary",DIR)',
    ],
)
def test_short_forms_are_read_back(text: str) -> None:
    assert str(parse_query(text)) == text
    assert parse_query(str(parse_query(text))) == parse_query(text)


def test_neurons_hold_fail_and_have_ranges(toy: pl.Transformer) -> None:
    x = toy.example()
    _, cache = toy.run_with_cache(x)
    pre = cache["blocks.1.mlp.hook_pre"][3]
    for n in range(6):
        value = float(pre[n])
        res = pl.certify(
            toy,
            x,
            pl.Ball(1e-4),
            queries=[f"neuron 1.{n}>0@-1", f"neuron 1.{n}<=0@-1", f"neuron 1.{n}@-1"],
            engine="taylor",
        )
        words = [row.verdict.value for row in res]
        assert words == (["holds", "fails", "holds"] if value > 0 else ["fails", "holds", "holds"])
        assert res.table["lower"][2].as_py() <= value <= res.table["upper"][2].as_py()


def test_features_are_active_where_the_dictionary_says_so(toy: pl.Transformer, sae: pl.Dictionary) -> None:
    x = toy.example()
    _, cache = toy.run_with_cache(x)
    active = sae.active(cache[HOOK][3])
    queries = [f"feature S.{i} {'active' if on else 'off'}@-1" for i, on in enumerate(active)]
    res = pl.certify(toy, x, pl.Ball(1e-6), queries=queries, vectors={"S": sae})
    assert res.counts["holds"] == len(queries)
    turned = [f"feature S.{i} {'off' if on else 'active'}@-1" for i, on in enumerate(active)]
    assert pl.certify(toy, x, pl.Ball(1e-6), queries=turned, vectors={"S": sae}).counts["fails"] == len(
        turned
    )


def test_several_hooks_come_in_one_table_but_not_in_one_run(toy: pl.Transformer, tmp_path: Path) -> None:
    queries = ["neuron 0.1@0", "neuron 1.1@0", "neuron 1.1@3"]
    res = pl.certify(toy, toy.example(), pl.Ball(1e-4), queries=queries)
    assert res.table["query"].to_pylist() == queries
    assert len(set(res.table["model"].to_pylist())) == 3
    with pytest.raises(QueryError, match="one hook and one token"):
        pl.certify(toy, toy.example(), pl.Ball(1e-4), queries=queries, out=tmp_path / "run")
    with pytest.raises(QueryError, match="by_subject"):
        res[:2].save(tmp_path / "run")
    pl.report(res.by_subject[0], path=tmp_path / "report.html")
    assert "weakest: neuron" in repr(res)


def test_radius_and_ways_of_a_readout(toy: pl.Transformer) -> None:
    read = pl.read_at(toy, HOOK, 3, [0], names=["first"])
    sign = ">" if float(read(toy.example())[0]) > 0 else "<"
    rad = pl.radius(read, toy.example(), f"logit0{sign}0", tolerance=1.0, budget="20/1/5")
    assert 0.0 < rad.certified <= rad.attack


def test_saelens_folders(toy: pl.Transformer, sae: pl.Dictionary, tmp_path: Path) -> None:
    tensors = {
        "W_enc": sae.weight.T.contiguous(),
        "b_enc": sae.bias,
        "b_dec": sae.center,
        "threshold": sae.threshold,
    }
    config = {"architecture": "jumprelu", "hook_name": HOOK, "normalize_activations": "none"}
    save_file(tensors, tmp_path / "sae_weights.safetensors")
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    read = pl.Dictionary.load(tmp_path)
    h = torch.randn(5, toy.architecture.d_model, dtype=torch.float64)
    assert torch.equal(read.active(h), sae.active(h))
    for change, word in (
        ({"architecture": "topk"}, "has no k"),
        ({"architecture": "topk", "k": 2, "rescale_acts_by_decoder_norm": True}, "fold_W_dec_norm"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations"),
        ({"hook_name": None}, "hook_name"),
        ({"architecture": "crosscoder"}, "crosscoder"),
    ):
        (tmp_path / "cfg.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=word):
            pl.Dictionary.load(tmp_path)
    (tmp_path / "sae_weights.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match="no dictionary"):
        pl.Dictionary.load(tmp_path)


def test_gated_dictionaries_are_active_by_their_gate(toy: pl.Transformer, sae: pl.Dictionary) -> None:
    state = {
        "W_enc": sae.weight.T,
        "b_gate": sae.bias,
        "b_dec": sae.center,
        "b_mag": sae.bias,
        "r_mag": sae.bias,
    }
    gated = pl.Dictionary.from_state({"architecture": "gated", "metadata": {"hook_name": HOOK}}, state)
    h = torch.randn(5, toy.architecture.d_model, dtype=torch.float64)
    assert torch.equal(gated.active(h), (h - sae.center) @ sae.weight.T + sae.bias > 0)


@pytest.mark.parametrize(
    "query",
    [
        "neuron 9.0>0@-1",
        "neuron 0.100000>0@-1",
        "feature S.1 active@-1",
        "feature T.99 active@-1",
        "read(blocks.0.hook_resid_post@-1,W)>0",
        "read(blocks.0.attn.hook_pattern@-1,V)>0",
        "read(blocks.0.hook_resid_post@9,V)>0",
        "read(blocks.0.hook_resid_post@-1,N)>0",
        "neuron 0.1>1e999@-1",
    ],
)
def test_wrong_sites_are_one_line(toy: pl.Transformer, sae: pl.Dictionary, query: str) -> None:
    d = toy.architecture.d_model
    vectors = {
        "T": sae,
        "V": torch.ones(d).double(),
        "W": torch.ones(d + 1).double(),
        "N": torch.full((d,), torch.nan),
    }
    with pytest.raises(ProoflensError) as error:
        pl.certify(toy, toy.example(), pl.Ball(0.01), queries=query, vectors=vectors)
    assert "\n" not in str(error.value)


def test_sites_and_attention_are_asked_apart(toy: pl.Transformer) -> None:
    with pytest.raises(QueryError, match="apart"):
        pl.certify(toy, toy.example(), pl.Ball(0.01), queries=["top1", "neuron 0.1>0"])
    with pytest.raises(ProoflensError, match="alone"):
        pl.certify(toy, toy.example(), pl.Ball(0.01), queries="0.1:top1@-1 & neuron 0.1>0@-1")


@pytest.mark.parametrize("given", [{"heads": "0.1"}, {"layer": 0}, {"positions": [2]}])
@pytest.mark.parametrize("queries", [["neuron 0.1>0@-1"], ["neuron 0.1>0@-1", "neuron 1.1>0@-1"]])
def test_places_beside_sites_are_refused(
    toy: pl.Transformer, given: dict[str, object], queries: list[str]
) -> None:
    """A site names its own place: what would be ignored is refused, in one proof and in several."""
    with pytest.raises(QueryError, match="names its own layer and position"):
        pl.certify(toy, toy.example(), pl.Ball(0.01), queries=queries, **given)  # type: ignore[arg-type]


def test_radius_and_plan_take_vectors(toy: pl.Transformer) -> None:
    v = torch.linspace(-1.0, 1.0, toy.architecture.d_model, dtype=torch.float64)
    x, name = toy.example(), "read(blocks.1.hook_resid_post@3,v)"
    sign = ">" if float(toy.run_with_cache(x)[1][HOOK][3] @ v) > 0 else "<"
    rad = pl.radius(toy, x, f"{name}{sign}0", vectors={"v": v}, tolerance=1.0, budget="20/1/5")
    assert 0.0 < rad.certified <= rad.attack
    found = pl.plan(toy, x, pl.Ball(0.01), queries=name, vectors={"v": v})
    assert "taylor" in [stage.engine for stage in found.stages]
    for call in (pl.plan, pl.certify):
        with pytest.raises(QueryError, match="no direction or dictionary"):
            call(toy, x, pl.Ball(0.01), queries=name)
    with pytest.raises(QueryError, match="ask for each apart"):
        pl.radius(toy, x, ["neuron 0.1>0@0", "neuron 1.1>0@0"])


def test_a_dictionary_of_another_model_is_refused(toy: pl.Transformer) -> None:
    other = pl.Dictionary.of(HOOK, torch.ones(2, toy.architecture.d_model + 1).double())
    with pytest.raises(ModelError, match="another model"):
        pl.certify(toy, toy.example(), pl.Ball(0.01), queries="feature S.0 active@-1", vectors={"S": other})


def test_tails_say_what_the_whole_model_says(toy: pl.Transformer) -> None:
    x = toy.example()
    for layer in range(toy.architecture.n_layers):
        tail, stream = pl.start_at(toy, layer, x)
        assert stream is not None
        assert torch.allclose(tail(stream), toy(x), rtol=1e-12, atol=1e-12)
        assert torch.allclose(tail.pattern(stream, 0), toy.pattern(x, layer))
        assert tail.name == f"{toy.name}, from layer {layer}"
        assert layer == 0 or tail.sha256 != toy.sha256
    with pytest.raises(ModelError):
        pl.start_at(toy, 9)


def test_steering_is_proved_up_to_where_it_breaks(toy: pl.Transformer) -> None:
    x, v = toy.example(), torch.linspace(-1.0, 1.0, toy.architecture.d_model, dtype=torch.float64)
    tail, stream = pl.start_at(toy, 1, x)
    assert stream is not None
    for found in pl.steer(toy, x, 1, v, (0.0, 3.0), "0:top1@-1"):
        head = found.claim.rows[0].head
        clean = int(tail.pattern(stream, 0)[head, -1].argmax())
        for share in torch.linspace(0.0, 1.0, 31).tolist():
            moved = stream.x.clone()
            moved[-1] += 3.0 * share * v
            same = int(tail.pattern(moved, 0)[head, -1].argmax()) == clean
            assert same or share >= found.proved
    for bad in (v[:-1], v * torch.nan):
        with pytest.raises(ProoflensError):
            pl.steer(toy, x, 1, bad)
    with pytest.raises(ProoflensError, match="smaller"):
        pl.steer(toy, x, 1, v, (2.0, 1.0))
