"""`maclaurin train` and `sweep` as a user types them, beside what survives and what runs together."""

import json
import subprocess
import sys

from tests.e2e.training import environment, records, train


def test_dry_run_prints_the_plan_and_leaves_nothing(tmp_path):
    text = train(tmp_path / "run", "--dry-run").stdout
    for words in ("parameters", "tokens", "FLOP", "state", "GiB", "seconds"):
        assert words in text
    assert not (tmp_path / "run").exists()


def test_a_run_leaves_config_machine_records_and_summary(tmp_path):
    out = tmp_path / "run"
    result = train(out, attention="2mamba", steps=4)
    assert "test loss" in result.stdout
    assert json.loads((out / "config.json").read_text())["attention"] == ["2mamba"]
    facts = json.loads((out / "machine.json").read_text())
    assert facts["data"]["fingerprint"]
    assert facts["versions"]["torch"]
    assert [r["step"] for r in records(out) if r["kind"] == "train"] == [1, 2, 3, 4]
    assert json.loads((out / "summary.json").read_text())["tokens_per_second"] > 0


def test_unknown_options_and_values_are_told(tmp_path):
    assert "there is no size" in train(tmp_path / "a", size="nanno", expect=2).stderr
    assert "Did you mean" in train(tmp_path / "b", attention="softmx", expect=2).stderr


def test_a_sweep_finds_the_best_rate_and_does_not_repeat_runs(tmp_path):
    command = [
        sys.executable, "-m", "maclaurin", "sweep", "--rates=1e-4,1e-2", "--steps=6", "--batch-size=4",
        "--data=mqar:pairs=3,vocab=32,length=24", f"--out={tmp_path}", "--device=cpu",
    ]  # fmt: skip
    for _ in range(2):
        result = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["best"] == 0.01
    assert set(found["losses"]) == {"0.0001", "0.01"}
