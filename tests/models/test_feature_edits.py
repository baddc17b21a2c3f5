"""Features of dictionaries that are held, against runs in which the hook's value is set by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import prooflens as pl
from prooflens.checker import check
from prooflens.errors import ModelError
from prooflens.models.export import export
from prooflens.models.held import hooks_at
from prooflens.models.held_edits import feature
from prooflens.models.parts import Edit
from tests.checker.forging import TOY
from tests.conftest import Call
from tests.engines.test_edit_tables import CHEAP, dictionary, features_of
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader
from tests.models.test_edits import drawn, hooked


@pytest.mark.parametrize("family", ["gpt2", "encoder", "gemma2"])
@pytest.mark.parametrize("error", [True, False])
@pytest.mark.parametrize("value", [None, 0.7])
def test_a_feature_is_held_and_the_error_stays_or_goes(family: str, error: bool, value: float | None) -> None:
    model, x, generator = drawn(family)
    for hook in [name for name in hooks_at(model.architecture, 1) if not name.endswith("resid_pre")]:
        sae = dictionary(hook, model.architecture.d_model, generator)
        assert sae.decoder is not None
        for at, rows in (((), slice(None)), ((-1, 1), [-1, 1])):

            def change(
                h: torch.Tensor, rows: slice | list[int] = rows, sae: pl.Dictionary = sae
            ) -> torch.Tensor:
                f = torch.relu((h - sae.center) @ sae.weight.T + sae.bias)
                g = f.clone()
                g[:, 2] = value or 0.0
                assert sae.decoder is not None
                assert sae.decoder_bias is not None
                made = h + (g - f) @ sae.decoder.T if error else g @ sae.decoder.T + sae.decoder_bias
                h = h.clone()
                h[rows] = made[rows]
                return h

            made = pl.edit(model, feature(sae, 2, value, at, error))
            assert torch.allclose(made(x), hooked(model, x, hook, change), rtol=1e-10, atol=1e-10), hook


def jumping(
    model: pl.Transformer, hook: str, x: torch.Tensor, generator: torch.Generator, kind: str = "jumprelu"
) -> pl.Dictionary:
    """Six features with thresholds above, below and near what they read at the last token, one below 0, one 0."""
    sae = dictionary(hook, model.architecture.d_model, generator, kind)
    read = (model.run(x, hook)[hook][-1] - sae.center) @ sae.weight.T + sae.bias
    thresholds = (read + torch.tensor([0.3, -0.3, -0.3, 1e-6, 0.3, 0.0])).clamp(min=0.1)
    return replace(
        sae, threshold=thresholds * torch.tensor([1, 1, 1, 1, 1, 0]) - torch.tensor([0, 0, 0, 0, 9, 0])
    )


@pytest.mark.parametrize("family", ["gpt2", "encoder", "gemma2"])
@pytest.mark.parametrize("error", [True, False])
@pytest.mark.parametrize("kind", ["jumprelu", "batchtopk"])
def test_a_feature_that_jumps_is_what_saelens_computes(family: str, error: bool, kind: str) -> None:
    model, x, generator = drawn(family)
    for hook in [name for name in hooks_at(model.architecture, 1) if not name.endswith("resid_pre")]:
        sae = jumping(model, hook, x, generator, kind)
        for i, value in ((0, None), (1, None), (2, 0.7), (4, None), (5, 0.7)):

            def change(
                h: torch.Tensor, sae: pl.Dictionary = sae, i: int = i, value: float | None = value
            ) -> torch.Tensor:
                z = (h - sae.center) @ sae.weight.T + sae.bias
                f = torch.relu(z) * (z > sae.threshold)
                g = f.clone()
                g[:, i] = value or 0.0
                assert sae.decoder is not None
                assert sae.decoder_bias is not None
                return h + (g - f) @ sae.decoder.T if error else g @ sae.decoder.T + sae.decoder_bias

            made = pl.edit(model, feature(sae, i, value, (), error))
            assert torch.allclose(made(x), hooked(model, x, hook, change), rtol=1e-10, atol=1e-10)


def test_a_feature_at_its_threshold_is_off(toy: pl.Transformer) -> None:
    """Numbers that are exact in float64: at z = θ nothing is taken out, and beyond it all of z is."""
    d, hook, x = toy.architecture.d_model, "blocks.0.hook_resid_pre", torch.zeros(4, 8).double()
    for reads, there in ((0.5, False), (0.5 + 2.0**-40, True), (0.25, False)):
        x[:, 0] = reads
        sae = pl.Dictionary.of(hook, torch.eye(d), threshold=0.5, kind="jumprelu", decoder=torch.eye(d))
        value = pl.edit(toy, feature(sae, 0)).run(x, f"{hook}_set")[f"{hook}_set"]
        assert torch.equal(value, 0.0 * x if there else x)


def test_features_that_do_not_jump_are_the_models_they_were(toy: pl.Transformer, tmp_path: Path) -> None:
    hook, d = "blocks.0.hook_resid_post", toy.architecture.d_model
    one, other, low, far = (
        dictionary(hook, d, torch.Generator().manual_seed(1), kind, threshold)
        for kind, threshold in (("standard", 0.0), ("jumprelu", 0.0), ("batchtopk", -1.0), ("jumprelu", 0.5))
    )
    plain = pl.edit(toy, feature(one, 2))
    assert not [name for name in plain.weights if name.endswith(".jumps")]
    assert plain.sha256 == pl.edit(toy, feature(other, 2)).sha256 == pl.edit(toy, feature(low, 2)).sha256
    both = pl.edit(toy, [feature(one, 2), feature(far, 3)])
    assert both.weights["blocks.0.resid_post.features.jumps"].tolist() == [0.0, 0.5]
    again = pl.load(export(both, tmp_path / "both"))
    assert (again.sha256, torch.equal(again(toy.example()), both(toy.example()))) == (both.sha256, True)
    weights = dict(both.weights)
    weights["blocks.0.resid_post.features.jumps"] = torch.ones(3).double()
    with pytest.raises(ModelError, match="do not fit together"):
        pl.Transformer(toy.architecture, weights)


def test_members_of_families_are_counted_with_features_that_jump() -> None:
    model = reader("gpt2")
    family, hook = TEMPLATE.of(model), "blocks.0.hook_resid_post"
    ids = [torch.tensor(member.ids) for member in family]
    streams = [model.run(one, hook)[hook] for one in ids]
    sae = dictionary(hook, model.architecture.d_model, torch.Generator().manual_seed(2))
    reads = torch.stack([(h[-1] - sae.center) @ sae.weight[0] + sae.bias[0] for h in streams])
    bias = sae.bias - reads.min() + 0.5  # every member reads at least 0.5
    middle = (reads - reads.min() + 0.5).median()
    sae = replace(sae, bias=bias, threshold=middle.expand(6).clone() + 1e-9, kind="jumprelu")
    edited = feature(sae, 0, None, (-1,))
    found = pl.family_effects(model, [[edited]], TEMPLATE, "logit{A}-logit{B}", faithful=0.0)
    effects = []
    for member, one in zip(family, ids, strict=True):
        a, b = (member.ids[member.roles[slot][0][0]] for slot in "AB")
        gone = pl.edit(model, edited)(one)[-1]
        effects.append(float((model(one)[-1][a] - model(one)[-1][b]) - (gone[a] - gone[b])))
    still = sum(effect == 0.0 for effect in effects)
    assert 0 < still < family.size
    assert found.rows[0].faithful == still == int((reads - reads.min() + 0.5 <= sae.threshold[0]).sum())
    assert abs(found.rows[0].most[0] - max(effects)) < 1e-12


def test_the_command_line_holds_features_that_jump(tmp_path: Path, call: Call) -> None:
    (tmp_path / "sae").mkdir()
    hook, g = "blocks.1.hook_resid_pre", torch.Generator().manual_seed(4)
    W, b, D, c = (torch.randn(*size, generator=g).double() for size in ((8, 5), (5,), (5, 8), (8,)))
    tensors = {"W_enc": W, "b_enc": b, "W_dec": D, "b_dec": c, "threshold": torch.full((5,), 0.3).double()}
    save_file(tensors, tmp_path / "sae" / "sae_weights.safetensors")
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps({"architecture": "jumprelu", "hook_name": hook}))
    asked = (
        "effect",
        "toy",
        "--eps",
        "0.001",
        "--metric",
        "logit0-logit1",
        "--engine",
        "taylor",
        "--budget",
        "20/1/2",
        "--vector",
    )
    for part in ("feature SAE.2@-1", "decoded SAE.3"):
        out = str(tmp_path / part[:7])
        code, told, said = call(*asked, f"SAE={tmp_path / 'sae'}", "--without", part, "-o", out)
        assert (code, part.split()[0] in told) == (0, True), told + said
        assert check(Path(out), TOY).ok


def test_runs_about_features_are_checked(toy: pl.Transformer, tmp_path: Path) -> None:
    sae = dictionary("blocks.0.hook_resid_post", 8, torch.Generator().manual_seed(5))
    asked: list[list[str | Edit]] = [features_of(8), ["feature SAE.1=0.5@-1", "m1@2"], ["decoded SAE.2"]]
    for number, edits in enumerate(asked):
        found = pl.effect(
            toy,
            edits,
            toy.example(),
            pl.Ball(0.01),
            "logit0-logit1",
            faithful=0.0,
            vectors={"SAE": sae},
            **CHEAP,
        )
        found.save(tmp_path / f"{number}")
        report = check(tmp_path / f"{number}", TOY)
        assert report.ok, report
        assert report.counts["witness confirmed"] == 1
    assert "decoded feature 2 of blocks.0.hook_resid_post" in str(found)


def test_features_that_cannot_be_held_are_refused(toy: pl.Transformer) -> None:
    generator = torch.Generator().manual_seed(5)
    hook = "blocks.0.hook_resid_post"
    sae = dictionary(hook, 8, generator)
    with pytest.raises(
        ModelError, match=r"keeps the gate alone. Hold a direction of blocks.0.hook_resid_post"
    ):
        feature(dictionary(hook, 8, generator, "gated"), 0)
    with pytest.raises(ModelError, match=r"depends on all features at once.* Hold a direction"):
        feature(replace(sae, kind="topk", k=2), 0)
    with pytest.raises(ModelError, match="no decoder"):
        feature(pl.Dictionary.of(hook, sae.weight), 0)
    with pytest.raises(ModelError, match="no feature 9"):
        feature(sae, 9)
    with pytest.raises(ModelError, match="another model"):
        pl.edit(toy, feature(dictionary(hook, 5, generator), 0))
    with pytest.raises(ModelError, match="decoded already"):
        pl.edit(toy, [feature(sae, 0, error=False), feature(sae, 1, error=False)])
    for wrong in ("feature B.1", "feature SAE.1=x"):
        with pytest.raises(ModelError, match=r"no dictionary is called|is no number"):
            pl.effect(toy, wrong, toy.example(), pl.Ball(0.01), "logit0", vectors={"SAE": sae})
