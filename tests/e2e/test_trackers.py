"""Trackers get what records.jsonl gets, also over a resume."""

import json
import struct

import pytest

from tests.e2e.training import records, start, train_here


def log_entries(log: bytes, block: int = 32768) -> list[bytes]:
    """Entries of W&B's offline file: LevelDB's log format, blocks of (checksum, size, type) chunks."""
    entries, place, parts = [], 7, b""
    while place + 7 <= len(log):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, size, kind = struct.unpack_from("<IHB", log, place)
        parts += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last chunk of several
            entries.append(parts)
            parts = b""
    return entries


def test_tensorboard_holds_every_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    train_here(out, trackers="tensorboard", steps=6, checkpoint_every=2)
    (out / "checkpoints" / "step-00000006").rename(tmp_path / "lost")
    train_here(out, "--resume", trackers="tensorboard", steps=6, checkpoint_every=2)
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    known = {r["step"]: r["loss"] for r in records(out) if r["kind"] == "train"}
    found = {event.step: event.value for event in events.Scalars("train/loss")}
    assert len(events.Scalars("train/loss")) == len(known) == 6
    assert found == pytest.approx(known, rel=1e-6)
    assert events.Scalars("validation/loss")[-1].step == 6


def test_wandb_gets_config_and_losses(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "run"
    process = start(out, trackers="wandb", steps=3)
    text = process.communicate(280)
    assert process.returncode == 0, text
    (file,) = out.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stem == "run-" + (out / "wandb_id.txt").read_text()
    losses, attention = {}, None
    for data in log_entries(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        for item in record.run.config.update:
            attention = json.loads(item.value_json) if item.key == "attention" else attention
        logged = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        if "train/loss" in logged:
            losses[logged["_step"]] = logged["train/loss"]
    assert wandb.__version__
    assert attention == ["exp/l2"]
    assert losses == {r["step"]: r["loss"] for r in records(out) if r["kind"] == "train"}


def test_a_tracker_that_is_unknown_leaves_no_folder_behind(tmp_path):
    assert "trackers are tensorboard" in train_here(tmp_path / "c", trackers="paper", expect=2).stderr
    assert not (tmp_path / "c").exists()
