"""Attention over the image: from results in memory and from a run, with the image inside the page."""

import base64
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import prooflens as pl
from prooflens.checker import check
from prooflens.models.export import export
from prooflens.report import collect, render
from prooflens.report.images import data_uri, image_attention, image_map
from prooflens.report.source import read_source
from prooflens.results import Results
from tests.models.hf_families import IMAGE, randomised


@pytest.fixture(scope="module")
def model() -> pl.Transformer:
    config = transformers.ViTConfig(**IMAGE, intermediate_size=24, num_labels=3)
    return pl.load(randomised(transformers.ViTForImageClassification(config)))


@pytest.fixture(scope="module")
def results(model: pl.Transformer) -> Results:
    image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))
    region = pl.Pixels(image, 1e-4).of(model)
    return pl.certify(model, region.center, region, layer=0, positions=[0, 2])


def test_the_picture_is_a_png_of_the_image() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    content = base64.b64decode(data_uri(image).removeprefix("data:image/png;base64,"))
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (4, 2)
    start = content.index(b"IDAT") + 4
    size = struct.unpack(">I", content[start - 8 : start - 4])[0]
    lines = np.frombuffer(zlib.decompress(content[start : start + size]), dtype=np.uint8).reshape(2, 13)
    assert np.array_equal(lines[:, 1:].reshape(2, 4, 3), np.moveaxis(image, 0, -1))


def test_patches_are_as_bright_as_their_weights(model: pl.Transformer, results: Results) -> None:
    data = collect(results)
    assert len(data.images) == 4 * 2
    first = data.images[0]
    assert (first.front, first.grid, first.row.position) == (1, (2, 2), 0)
    assert results.subject is not None
    pattern = model.pattern(results.subject.region.center, 0)[first.head, 0]
    assert [cell.clean for cell in first.row.cells] == pytest.approx(pattern.tolist(), abs=1e-9)
    svg = image_map(first).svg()
    assert svg.count("fill-opacity") == 4
    assert "fill-opacity:0.000" in svg
    assert f"clean {pattern[1].item():.3g}" in svg
    assert all(cell.low is not None and cell.low <= cell.clean for cell in first.row.cells)


def test_a_run_keeps_the_image_and_the_checker_does_not_mind(
    model: pl.Transformer, results: Results, tmp_path: Path
) -> None:
    results.save(tmp_path / "run")
    kept, fresh = collect(tmp_path / "run"), collect(results)
    assert [i.picture for i in kept.images] == [i.picture for i in fresh.images]
    assert "Attention over the image" in render(kept)
    found = check(tmp_path / "run", export(model, tmp_path / "weights"))
    assert found.ok
    assert len(found.findings) == len(results)


def test_regions_without_an_image_have_no_picture(model: pl.Transformer, results: Results) -> None:
    assert results.subject is not None
    plain = replace(results.subject.region, image=None)
    assert not collect(pl.certify(model, plain.center, plain, "0.0", positions=[0])).images


def test_the_image_follows_the_region(results: Results) -> None:
    assert results.subject is not None
    region = results.subject.region
    assert region.scaled(0.5).image is region.image
    assert region.to(dtype=torch.float32).image is region.image


def test_an_image_that_is_none_is_left_out(results: Results) -> None:
    """A damaged run may say anything: odd types, no colours, and sides that nobody wants to divide."""
    source = read_source(results)
    for wrong in (np.zeros((3, 8, 8)), np.zeros((0, 2**30, 2**30), np.uint8), np.zeros((3, 7, 8), np.uint8)):
        assert image_attention([replace(source, pixels=wrong)]) == ()
