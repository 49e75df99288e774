"""One run of a study in this process: its record, and what it does with what it finds in the pool."""

import dataclasses
import json
import subprocess
import sys

import pytest

from maclaurin.models import SIZES, Size
from maclaurin.study.design import Cell, Experiment, Study
from maclaurin.study.plan import plan_runs
from maclaurin.study.pool import Pool
from maclaurin.study.prepare import make_job, make_tasks
from maclaurin.study.worker import work

COMMON = {
    "size": "tiny", "data": "mqar:pairs=2,vocab=16,length=12", "steps": 4, "batch_size": 2, "warmup": 0,
    "eval_every": 2, "eval_rows": 4, "checkpoint_every": 2, "log_every": 1, "device": "cpu",
}  # fmt: skip


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", Size("tiny", 16, 24, 2, 1, 12))
    return Pool(tmp_path / "pool")


def tasks(pool, *, keep_models=False, **settings):
    cell = Cell("softmax", {"attention": "exp/sum", **settings})
    study = Study(
        "s", "S", "?", "none", (Experiment("e", "E", "accuracy", COMMON, (cell,), (0,), "softmax"),)
    )
    runs = plan_runs(study)
    lock = pool.root.parent / "lock"
    made = make_tasks(study, runs, pool, study_lock=lock, threads=1, keep_models=keep_models)
    return runs[0], made[0]


def test_a_run_leaves_its_record_and_no_weights(pool):
    _, task = tasks(pool)
    record = work(task.job)
    entry = pool.entry(task.key)
    assert entry.record() == record
    assert (record.status, record.step, record.key) == ("finished", 4, task.key)
    assert [step for step, *_ in record.test_curve] == [2, 4]
    assert [position for position, _ in record.loss_by_position] == [4, 6, 8, 10]  # where an answer is scored
    assert json.loads(entry.progress.read_text())["step"] == 4
    assert not (entry.path / "checkpoints").exists()
    assert work(dataclasses.replace(task.job, cell="another")) == record  # not trained again


def test_models_are_kept_where_asked_for(pool):
    _, task = tasks(pool, keep_models=True)
    work(task.job)
    assert (pool.entry(task.key).path / "model" / "model.safetensors").exists()


def test_a_run_killed_before_its_record_is_not_trained_again(pool):
    _, task = tasks(pool)
    record = work(task.job)
    entry = pool.entry(task.key)
    entry.record_file.unlink()
    before = (entry.path / "records.jsonl").stat().st_mtime_ns
    again = work(task.job)
    assert (entry.path / "records.jsonl").stat().st_mtime_ns == before
    assert again.test_curve == record.test_curve
    assert again.parameters == record.parameters


def test_divergence_is_a_record_with_the_curve_so_far(pool):
    _, task = tasks(pool, lr=1e5, largest_loss=4.0, clip=None)
    record = work(task.job)
    assert record.status == "diverged"
    assert "is not finite" in record.message
    assert len(record.train_curve) == record.step - 1
    assert record.parameters > 0
    assert record.test_loss is None


def test_a_job_without_a_key_finds_the_place_a_study_looks_at(pool):
    run, task = tasks(pool)
    job = make_job(run, pool)
    assert job.key is None
    assert work(job).key == task.key
    assert pool.entry(task.key).record().status == "finished"


def test_a_job_travels_in_a_file(pool, tmp_path):
    _, task = tasks(pool)
    task.job.write(tmp_path / "job.json")
    assert type(task.job).read(tmp_path / "job.json") == task.job


def test_loading_the_worker_leaves_cuda_alone():
    """Processes are forked from one that has loaded it, and CUDA does not survive a fork."""
    code = (
        "import torch\n"
        "def refuse(*_): raise SystemExit('CUDA was asked for')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse\n"
        "import maclaurin.study.worker, maclaurin.cli.main\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
