import dataclasses
from pathlib import Path

import pytest

import prooflens as pl
from prooflens.report import ReportData, collect

HOSTILE = ("</script><script>alert(1)</script>", "a\u202eb", "<b>", '"&\u2028')


@pytest.fixture(scope="session")
def data() -> ReportData:
    """A report with all five pictures, about layer 0 of the toy model."""
    model = pl.load("toy")
    prompt = model.example(1)
    results = [pl.certify(model, prompt, pl.Ball(eps), layer=0) for eps in (0.02, 0.05, 0.1)]
    radii = pl.radius(model, prompt, layer=0, tolerance=1.0, budget="layer0")
    tokens = pl.radius(model, prompt, layer=0, tolerance=1.0, per_token=True)
    whole = pl.circuit(model, prompt, pl.Ball(0.05), "0.0:top1@-1 & 0.1:top1@1")
    return collect(*results, radii, tokens, whole)


@pytest.fixture(scope="session")
def hostile(data: ReportData) -> ReportData:
    """The same, with tokens that try to leave their place."""
    strip = [dataclasses.replace(part, token=token) for part, token in zip(data.strip, HOSTILE, strict=True)]
    strip[0] = dataclasses.replace(strip[0], nearest=0.1, neighbour=HOSTILE[0])
    return dataclasses.replace(
        data,
        text="".join(HOSTILE),
        model="<i>toy</i>",
        tokens=HOSTILE,
        strip=tuple(strip),
        commands=(HOSTILE[0],),
    )


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "report.html"
