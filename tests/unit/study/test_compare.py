"""Runs and studies beside each other, and what the pool holds."""

import json

import pytest
from tests.unit.study.making import make_record, study_record

from maclaurin import InputError
from maclaurin.study.compare import diff_studies, differing_keys, find_runs, pool_use, read_summary
from maclaurin.study.pool import Pool
from maclaurin.study.run_record import write_study

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
        "a": ("finished", 4), "lr-0.2": ("unfinished", 2), "k": ("diverged", 3),
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
    assert read_summary(tmp_path) is None


def test_two_studies_are_compared_cell_by_cell():
    before = study_record({"a": {s: make_record(seed=s, metrics={"loss": 1.0 + s}) for s in (0, 1)}})
    after = study_record(
        {
            "a": {0: make_record(seed=0, lr=0.5, metrics={"loss": 2.0})},
            "b": {0: make_record("crashed", seed=0, steps=3)},
        }
    )
    a, b = diff_studies(before, after)
    assert a.before == (1.5, pytest.approx(0.7071, abs=1e-4), 2)
    assert a.after == (2.0, None, 1)
    assert a.changed == ("lr: 0.001 → 0.5",)
    assert (b.before, b.after, b.changed) == (None, None, ())


def test_the_pool_knows_who_uses_what(tmp_path):
    pool = Pool(tmp_path / "pool")
    used, unused = make_record(seed=0), make_record(seed=1)
    for record in (used, unused):
        pool.entry(record.key).write(record)
    (pool.entry(used.key).path / "model").mkdir()
    (pool.entry(used.key).path / "model" / "weights").write_bytes(b"x" * 1000)
    write_study(study_record({"a": {0: used}}), tmp_path / "mini" / "records.json")
    found = {use.entry.path.name: use for use in pool_use(pool, tmp_path)}
    assert found[used.key].studies == ("mini",)
    assert found[used.key].model_bytes == 1000
    assert found[unused.key].studies == ()
    assert found[used.key].size > found[unused.key].size
