"""Training runs below a folder."""

import json

import pytest
from tests.unit.study.making import make_record

from maclaurin import InputError
from maclaurin.cli.runs import runs
from maclaurin.files import locked
from maclaurin.study.pool import Pool
from maclaurin.training.run_folder import differing_keys, find_runs, summary_of

CONFIG = {"attention": ["exp/sum"], "size": "nano", "steps": 4, "lr": 0.1, "data": "stdlib"}


def training_run(folder, *, finished=True, **changes):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "machine.json").write_text(json.dumps({"commit": "abc", "data": {"name": "stdlib"}}))
    lines = [{"kind": "train", "step": i + 1, "loss": 3.0 - i} for i in range(4 if finished else 2)]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    if finished:
        summary = {
            "step": 4,
            "test_loss": 1.5,
            "validation_loss": 1.4,
            "parameters": 10,
            "peak_gpu_bytes": None,
        }
        (folder / "summary.json").write_text(json.dumps(summary))


def test_runs_of_train_and_of_the_pool_are_found(tmp_path):
    training_run(tmp_path / "runs" / "a")
    training_run(tmp_path / "runs" / "sweep" / "lr-0.2", finished=False, lr=0.2)
    entry = Pool(tmp_path / "runs" / "pool").entry("k")
    training_run(entry.path)
    entry.write(make_record("diverged", step=3, metrics={"loss": 9.0}))
    (tmp_path / "runs" / "model").mkdir()
    (tmp_path / "runs" / "model" / "config.json").write_text('{"hidden_size": 4}')
    found = {run.path.name: run for run in find_runs([tmp_path / "runs"])}
    assert {name: (run.status, run.step) for name, run in found.items()} == {
        "a": ("finished", 4), "lr-0.2": ("stopped", 2), "k": ("diverged", 3),
    }  # fmt: skip
    assert found["a"].numbers["loss"] == 1.5
    assert found["a"].numbers["validation_loss"] == 1.4
    assert found["lr-0.2"].numbers == {"train_loss": 2.0}
    assert differing_keys([found["a"], found["lr-0.2"]]) == ["lr"]


def test_a_folder_without_runs_is_one_clear_error(tmp_path):
    with pytest.raises(InputError, match="holds no training run"):
        find_runs([tmp_path])
    with pytest.raises(InputError, match="no folder"):
        find_runs([tmp_path / "nothing"])
    assert summary_of(tmp_path) is None


def test_a_pipe_gets_a_table_without_broken_words(tmp_path, monkeypatch, capsys):
    training_run(tmp_path / "runs" / "sweep" / "lr-0.2", data="mqar:pairs=4,vocab=64,length=64")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    runs()
    text = capsys.readouterr().out
    assert text.splitlines()[0].strip() == "1 run"
    for words in ("runs/sweep/lr-0.2", "mqar:pairs=4,vocab=64,length=64", "validation loss", "parameters"):
        assert words in text


def test_a_run_that_is_being_trained_is_running(tmp_path):
    training_run(tmp_path / "a", finished=False)
    assert summary_of(tmp_path / "a").status == "stopped"
    with locked(tmp_path / "a" / ".lock"):
        assert summary_of(tmp_path / "a").status == "running"
