"""kill -9, SIGTERM, damage, divergence, a full disk, changed data: no work is lost and no number changes."""

import json
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch

from maclaurin.training.config import TrainConfig
from maclaurin.training.optimizer_step import learning_rate
from tests.e2e import training
from tests.e2e.training import records, start, train_here, wait_for, weights

KILLS = 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train_here(out)
    return out


def assert_same_run(out, whole):
    assert records(out) == records(whole)
    expected = weights(whole)
    found = weights(out)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def is_writing(out):
    return any(out.glob("checkpoints/.step-*.part/*"))


def test_killed_at_random_moments_it_ends_bit_for_bit_the_same(tmp_path, whole):
    out = tmp_path / "run"
    dice = random.Random(0)
    kills = during_write = 0
    while kills < KILLS:
        process = start(out, *(["--resume"] if (out / "config.json").exists() else []))
        before = set((out / "checkpoints").glob("step-*")) if out.exists() else set()
        if kills % 2 == 0:  # in the middle of writing a checkpoint
            if wait_for(lambda: is_writing(out), process):
                during_write += 1
        else:  # at any moment after the run got further than last time
            wait_for(lambda: set((out / "checkpoints").glob("step-*")) - before, process)  # noqa: B023
            time.sleep(dice.uniform(0, 0.1))
        if process.poll() is not None:
            break
        process.kill()
        process.wait(60)
        kills += 1
    assert kills == KILLS, "the run ended before it was killed often enough"
    assert during_write >= 2
    train_here(out, "--resume")
    assert_same_run(out, whole)


def test_sigterm_saves_a_checkpoint(tmp_path, whole):
    out = tmp_path / "run"
    process = start(out)
    assert wait_for(lambda: list(out.glob("checkpoints/step-*")), process)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not (out / "model").exists()
    train_here(out, "--resume")
    assert_same_run(out, whole)


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(tmp_path, whole, damage):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    last = sorted(out.glob("checkpoints/step-*"))[-1]
    file = last / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    shutil.rmtree(out / "model")
    with pytest.warns(UserWarning, match=f"step {int(last.name[5:])} is damaged"):
        train_here(out, "--resume")
    assert_same_run(out, whole)


def test_a_finished_run_resumed_is_finished(tmp_path, whole, monkeypatch, recwarn):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    before = (out / "summary.json").read_text()
    monkeypatch.setattr(training, "SMALL", {})  # settings come from the folder
    assert "test loss" in train_here(out, "--resume").stdout
    assert not [w for w in recwarn if "torch" in str(w.message)]
    assert (out / "summary.json").read_text() == before
    assert_same_run(out, whole)


def test_a_finished_run_can_be_extended(tmp_path, whole):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    result = train_here(out, "--resume", steps=36)
    assert "extended from 30 to 36 steps" in result.stderr
    lines = [r for r in records(out) if r["kind"] == "train"]
    assert [r["step"] for r in lines] == list(range(1, 37))
    assert [r for r in records(out) if r["step"] <= 30] == [r for r in records(whole) if r["step"] <= 30]
    as_long = TrainConfig(steps=36, warmup=4)  # from there on, the rate of a run that was meant to be as long
    assert [r["lr"] for r in lines[30:]] == [learning_rate(as_long, step) for step in range(30, 36)]
    assert json.loads((out / "config.json").read_text())["steps"] == 36
    assert json.loads((out / "machine.json").read_text())["extended"] == [{"at": 30, "from": 30, "to": 36}]
    assert json.loads((out / "summary.json").read_text())["step"] == 36
    assert "steps: 36 → 30" in train_here(out, "--resume", steps=30, expect=2).stderr


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    out = tmp_path / "run"
    first = start(out, steps=5000, eval_every=0)
    try:
        assert wait_for(lambda: list(out.glob("checkpoints/step-*")), first)
        result = train_here(out, "--resume", steps=5000, eval_every=0, expect=2)
        assert "another process is training" in result.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.wait(60)


def test_a_loss_that_explodes_names_step_gradients_and_checkpoint(tmp_path):
    result = train_here(tmp_path / "run", lr=0.3, warmup=6, clip=0, largest_loss=4, expect=2)
    assert re.search(r"step \d+: the loss is .*, above largest_loss=4", result.stderr)
    last = int(re.search(r"last good checkpoint is .*step-(\d+)", result.stderr)[1])
    assert last <= max(r["step"] for r in records(tmp_path / "run"))
    norms = [float(x) for x in re.findall(r"\|gradient\| (\S+)", result.stderr)]
    assert len(norms) == 12
    assert norms == sorted(norms, reverse=True)
    assert "Traceback" not in result.stderr


def test_other_settings_or_other_data_cannot_go_on(tmp_path, whole):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    assert "lr: 0.001 → 0.002" in train_here(out, "--resume", lr=0.002, expect=2).stderr
    facts = json.loads((out / "machine.json").read_text())
    facts["data"]["fingerprint"] = "0" * 64
    (out / "machine.json").write_text(json.dumps(facts))
    assert "the data have changed" in train_here(out, "--resume", expect=2).stderr


def test_a_folder_with_a_run_is_not_overwritten(whole):
    before = records(whole)
    assert "--resume" in train_here(whole, expect=2).stderr
    assert records(whole) == before


def test_there_must_be_something_to_resume(tmp_path):
    assert "no run to resume" in train_here(tmp_path / "nothing", "--resume", expect=2).stderr


def test_a_full_disk_says_so_and_keeps_the_last_checkpoint(tmp_path):
    """On a file system of its own that is too small for the second checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=False)
    if mount.returncode:
        pytest.skip("mounting a small file system needs privileges this user does not have")
    try:
        result = train_here(disk / "run", keep=9, expect=2)
        assert "the disk is full" in result.stderr
        assert "is complete" in result.stderr
        assert list((disk / "run" / "checkpoints").glob("step-*"))
        assert not list((disk / "run" / "checkpoints").glob(".*part"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
