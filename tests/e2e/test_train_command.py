"""`maclaurin train` and `sweep` as a user types them: what they print, write and refuse."""

import json
import os
import signal
import stat
import subprocess
import time

import pytest

from maclaurin import InputError, SpecError
from maclaurin.training import trainer
from maclaurin.training.config import config_from
from maclaurin.training.losses import NextToken
from maclaurin.training.trainer import Outcome
from tests.e2e import training
from tests.e2e.training import COMMAND, arguments, environment, records, start, train_here, wait_for


def test_dry_run_prints_the_plan_and_leaves_nothing(tmp_path):
    text = train_here(tmp_path / "run", "--dry-run").stdout
    for words in ("parameters", "tokens", "FLOP", "state", "GiB", "time        about"):
        assert words in text
    assert not (tmp_path / "run").exists()


def test_a_run_leaves_config_machine_records_and_summary(tmp_path):
    out = tmp_path / "run"
    result = train_here(out, attention="2mamba", steps=4)
    assert "test loss" in result.stdout
    assert json.loads((out / "config.json").read_text())["attention"] == ["2mamba"]
    facts = json.loads((out / "machine.json").read_text())
    assert facts["data"]["fingerprint"]
    assert facts["versions"]["torch"]
    assert [r["step"] for r in records(out) if r["kind"] == "train"] == [1, 2, 3, 4]
    assert json.loads((out / "summary.json").read_text())["tokens_per_second"] > 0


def test_unknown_options_and_values_are_errors(tmp_path):
    assert "there is no size" in train_here(tmp_path / "a", size="nanno", expect=2).stderr
    assert "Did you mean" in train_here(tmp_path / "b", attention="softmx", expect=2).stderr


def assert_one_error(result, *words):
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error:") == 1
    for word in words:
        assert word in result.stderr


def test_a_spec_with_a_typo_is_found_before_data_are_prepared(tmp_path, monkeypatch):
    def prepare(*arguments):
        raise AssertionError("the data came first")

    monkeypatch.setattr(trainer, "open_data", prepare)
    with pytest.raises(SpecError, match="summ"):
        trainer.train(config_from({"attention": "exp/summ"}), tmp_path / "run")


def test_settings_that_cannot_work_leave_no_folder(tmp_path):
    result = train_here(tmp_path / "run", kv_heads=3, expect=2)
    assert_one_error(result, "kv_heads=3", "use one of 1, 2, 4")
    assert not (tmp_path / "run").exists()
    train_here(tmp_path / "run", kv_heads=2, steps=2)  # the folder is free for settings that work


def test_a_failure_in_the_first_step_leaves_no_folder(tmp_path, monkeypatch):
    def fail(*arguments, **named):
        raise InputError("a spec that cannot be computed")

    monkeypatch.setattr(NextToken, "forward", fail)
    assert_one_error(train_here(tmp_path / "run", expect=2), "a spec that cannot be computed")
    assert not (tmp_path / "run").exists()


def test_an_output_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert_one_error(train_here(tmp_path / "file" / "run", expect=2), "cannot be saved", "--out")


def test_config_files_that_cannot_be_read_are_one_error(tmp_path):
    (tmp_path / "latin.toml").write_bytes('data = "caf\xe9"'.encode("latin-1"))
    (tmp_path / "bad.json").write_text("{")
    for name, words in (("", "is a folder"), ("latin.toml", "UTF-8"), ("bad.json", "not JSON")):
        result = train_here(tmp_path / "run", f"--config={tmp_path / name}", expect=2)
        assert_one_error(result, words)


def test_the_config_of_a_run_starts_the_same_run_again(tmp_path, monkeypatch):
    train_here(tmp_path / "first", steps=3)
    monkeypatch.setattr(training, "SMALL", {})
    train_here(tmp_path / "second", f"--config={tmp_path / 'first' / 'config.json'}")
    assert records(tmp_path / "second") == records(tmp_path / "first")


def test_the_final_evaluation_has_eval_rows_too(tmp_path):
    train_here(tmp_path / "run", steps=2, eval_rows=4)
    during, last, final = (r for r in records(tmp_path / "run") if r["kind"] != "train")
    assert during["tokens"] == last["tokens"] == final["tokens"]
    train_here(tmp_path / "all", steps=2, eval_rows=4, final_rows=0)
    (whole,) = (r for r in records(tmp_path / "all") if r["kind"] == "final")
    assert whole["tokens"] > final["tokens"]


def test_positions_that_are_not_scored_have_no_loss(tmp_path):
    train_here(tmp_path / "run", steps=2)
    (final,) = (r for r in records(tmp_path / "run") if r["kind"] == "final")
    assert final["loss_by_position"][0] is None  # the first key is never asked for
    assert 0.0 not in final["loss_by_position"]


def test_the_saved_model_can_be_read_by_whom_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        train_here(tmp_path / "run", steps=1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run" / "model" / "model.safetensors").stat().st_mode) == 0o640


def test_a_run_stopped_by_ctrl_c_says_so_and_exits_with_130(tmp_path):
    out = tmp_path / "run"
    process = start(out, steps=5000, eval_every=0)
    assert wait_for(lambda: list(out.glob("checkpoints/step-*")), process)
    process.send_signal(signal.SIGINT)
    text = "".join(process.communicate(60))
    assert process.returncode == 130
    assert "stopping after this step" in text
    assert "resume the run to continue" in text


def test_ctrl_c_ends_a_sweep(tmp_path, monkeypatch):
    """And not only the run it is at."""
    stopped = Outcome(3, False, None, None, 0.0, signal.SIGINT)
    calls = []
    monkeypatch.setattr(trainer, "train", lambda *a, **k: calls.append(a) or stopped)
    train_here(tmp_path, verb="sweep", expect=130)
    assert len(calls) == 1


@pytest.mark.exhaustive  # inductor compiles for half a minute
def test_a_compiled_run_ends_when_it_is_done(tmp_path):
    """Nothing of it is alive any more a few seconds after its last line: no process, no worker."""
    out = tmp_path / "run"
    command = [
        *COMMAND,
        *arguments(out, "--compile", size="pico", steps=2, eval_every=0, attention="exp/sum"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    last = time.monotonic()
    assert "test loss" in line
    _, text = process.communicate(timeout=100)  # until every process that holds its output has ended
    assert process.returncode == 0
    assert time.monotonic() - last < 20
    assert "compiling the training step" in text
    assert "first step done after" in text
    assert json.loads((out / "summary.json").read_text())["compiled"]
    train_here(tmp_path / "eager", size="pico", steps=2, eval_every=0, attention="exp/sum")
    for one, other in zip(records(out), records(tmp_path / "eager"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_sweep_finds_the_best_rate_and_does_not_repeat_runs(tmp_path, monkeypatch):
    options = {
        **{name: training.SMALL[name] for name in ("data", "batch-size", "eval-rows", "device")},
        "rates": "1e-4,1e-2",
        "steps": "6",
    }
    monkeypatch.setattr(training, "SMALL", options)
    lines = train_here(tmp_path, verb="sweep").stdout.splitlines()
    assert ["0.01" in line for line in lines if "best" in line and "│" in line] == [True]
    assert any("at the edge of those that were tried: try 0.02 too" in line for line in lines)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("lr-*/summary.json")}
    train_here(tmp_path, verb="sweep")
    assert {file: file.stat().st_mtime_ns for file in before} == before
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["best"] == 0.01
    assert set(found["losses"]) == {"0.0001", "0.01"}


def test_runs_are_listed_within_80_columns_and_compared(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from maclaurin.cli.main import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, attention in (("softmax", "exp/sum"), ("norm", "exp/l2")):
        train_here(tmp_path / "runs" / name, attention=attention, steps=2)
    told = CliRunner().invoke(app, ["runs"], catch_exceptions=False).stdout
    assert max(map(len, told.splitlines())) <= 80
    for words in ("2 runs", "runs/norm", "exp/l2", "2/2", "finished", "validation"):
        assert words in told, told
    both = ["runs", "runs/softmax", "runs/norm", "--sort", "loss"]
    compared = CliRunner().invoke(app, both, catch_exceptions=False).stdout
    assert "settings that differ" in compared
    assert "attention" in compared
    with pytest.raises(InputError, match="--sort takes newest"):
        CliRunner().invoke(app, ["runs", "--sort", "size"], catch_exceptions=False)
