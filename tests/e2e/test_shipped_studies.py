"""The studies of this repository: each can be planned, the big one starts, the default one ends in a page."""

from pathlib import Path

import pytest

from maclaurin import resolve
from maclaurin.study.find import known_studies, load_study
from maclaurin.study.run_record import read_study
from maclaurin.training.config import config_from
from tests.e2e import command
from tests.e2e.training import environment

NEEDED = {
    "mini", "scale", "gap", "orders", "parts", "interactions", "recall", "paper", "paper-h200", "parts-h200",
    "ladder", "ladder-h200", "equal-cost",
}  # fmt: skip
#: experiments whose runs cost too much for more; their titles say so
ONE_SEED = {"275m"}
ROOT = Path(__file__).parents[2]


def maclaurin(*arguments, cwd):
    result = command.run(*arguments, cwd=cwd, env=environment(COLUMNS="160"))
    return result.stdout + result.stderr


def test_all_that_are_needed_are_there():
    assert set(known_studies()) >= NEEDED


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_every_run_of_every_study_is_a_valid_one(name):
    study = load_study(name)
    assert (ROOT / "studies" / name.replace("-", "_") / "README.md").is_file()
    for experiment in study.experiments:
        assert len(experiment.seeds) >= (1 if experiment.name in ONE_SEED else 3)
        for cell, seed in experiment.points():
            config = config_from({**experiment.settings(cell), "seed": seed})
            for text in config.attention:
                resolve(text)


@pytest.mark.exhaustive
def test_the_papers_settings_are_planned_and_start(tmp_path):
    plan = maclaurin("study", "paper", "--dry-run", cwd=tmp_path)
    assert "275,293,184" in plan
    assert "2,084,170,752" in plan
    maclaurin("study", "paper", "--smoke", "--out=paper", "--only", "norm", cwd=tmp_path)
    records = read_study(tmp_path / "paper" / "smoke")
    assert {run.status for run in records.runs.values()} == {"finished"}
    assert len(list(records.labelled())) > 10


def test_the_default_study_ends_in_a_page(tmp_path):
    maclaurin("study", "mini", "--budget=0.005x", "--out=mini", "--only", "order 8", cwd=tmp_path)
    page = (tmp_path / "mini" / "report" / "index.html").read_text()
    for words in ("Which parts of softmax attention matter?", "The parts", "Provenance", "taylor(8)/sum"):
        assert words in page
