"""Features of dictionaries that are held, against runs in which the hook's value is set by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.errors import ModelError
from prooflens.models.held import hooks_at
from prooflens.models.held_edits import feature
from prooflens.models.parts import Edit
from tests.checker.forging import TOY
from tests.engines.test_edit_tables import CHEAP, dictionary, features_of
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
    with pytest.raises(ModelError, match="jump"):
        feature(dictionary(hook, 8, generator, "jumprelu"), 0)
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
