"""A family of prompts over workers: the same counts as in one process, whoever does the work."""

from pathlib import Path

import pytest

import prooflens as pl
from prooflens.certificate import read_run
from prooflens.errors import RunError
from prooflens.models.files import write_model
from prooflens.progress import silent
from prooflens.sweep import families, slurm
from prooflens.sweep.executors import Crew, Executor
from prooflens.sweep.families import Asked, spread
from tests.enumeration.words import reader

FAMILY = pl.Swaps(
    [0, 1, 7, 2, 8], {1: list(range(1, 7)), 3: list(range(1, 7)), 4: pl.ALL}, differ=[("at1", "at3")]
)
CLAIMS = ["1.0:spec{at1}>{at3}@-1", "logit{at1}>logit{at3}"]


def asked(folder: Path) -> Asked:
    model = reader()
    write_model(folder / "model", model.architecture, dict(model.weights))
    return Asked(str(folder / "model"), FAMILY, CLAIMS, folder / "run", {"confirm": 0.0, "nearest": 3})


def assert_whole(folder: Path, found: pl.FamilyResults) -> None:
    whole = pl.family(str(folder / "model"), FAMILY, CLAIMS, confirm=0.0)
    assert [(row.held, row.asked, row.word) for row in found] == [
        (row.held, row.asked, row.word) for row in whole
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["model", "run"]
    assert read_run(folder / "run").info["complete"]


def test_local_workers_count_the_whole(tmp_path: Path) -> None:
    assert_whole(tmp_path, spread(asked(tmp_path), Crew(workers=1), silent))


@pytest.fixture
def _two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part takes a process, which takes seconds to start."""
    monkeypatch.setattr(families, "SHARES", 2)
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("_two_parts")
def test_slurm_jobs_count_the_whole(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    assert_whole(tmp_path, spread(asked(tmp_path), Crew(Executor.SLURM, 1, 1, "local"), silent))


@pytest.mark.slow
@pytest.mark.usefixtures("_two_parts")
def test_ray_counts_the_whole(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert_whole(tmp_path, spread(asked(tmp_path), Crew(Executor.RAY, 1, 1), silent))


def test_a_part_that_fails_is_told(tmp_path: Path) -> None:
    wrong = asked(tmp_path)
    with pytest.raises(RunError, match=r"part \d of 4 failed: .*no slot"):
        spread(Asked(wrong.model, FAMILY, ["logit{C}>logit{at1}"], wrong.out, {}), Crew(workers=1), silent)
