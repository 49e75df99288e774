"""`maclaurin study` as a user types it: results of all kinds, interruptions, sharing, planning."""

import json
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from maclaurin import MaclaurinError
from maclaurin.cli.main import app
from maclaurin.study.pool import Pool
from tests.e2e.studies import finish, runs, stamps, start, steps_trained, study, wait_for, write_study

SOFTMAX, NORM = {"attention": "exp/sum"}, {"attention": "exp/l2"}
LONG = {"steps": 200, "checkpoint_every": 20, "eval_every": 0}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study with a result of every kind."""
    folder = tmp_path_factory.mktemp("done")
    cells = {
        "softmax": SOFTMAX,
        "norm": NORM,
        "explodes": {"attention": "exp/l2", "lr": 1e6, "warmup": 0, "clip": None, "largest_loss": 8.0},
        "impossible": {"attention": "exp/sum", "kv_heads": 3},
    }
    write_study(folder, "tiny", cells)
    told = study(folder, "tiny", "--workers", "2", "--no-report", expect=1)
    return folder, told


def by_cell(folder, name):
    return {run.cell: run for run in runs(folder, name)}


def test_finished_runs_say_everything_a_report_needs(done):
    folder, told = done
    found = by_cell(folder, "tiny")
    for cell in ("softmax", "norm"):
        run = found[cell]
        assert run.status == "finished"
        assert (run.step, run.steps, run.seed) == (20, 20, 0)
        assert 0 <= run.accuracy <= 1
        assert run.test_loss > 0  # over the whole test set, unlike the curve
        assert [step for step, *_ in run.test_curve] == [10, 20]
        assert [step for step, _ in run.train_curve] == list(range(1, 21))
        assert all(loss > 0 for _, loss in run.loss_by_position)  # only where an answer is scored
        assert run.parameters > 100_000
        assert run.tokens_per_second > 0
        assert run.seconds > 0
        assert run.order is None
        assert run.provenance["data"]["name"].startswith("mqar")
        assert {"commit", "code", "machine", "versions", "date"} <= set(run.provenance)
        assert not (folder / "runs" / "pool" / run.key / "checkpoints").exists()
        assert not (folder / "runs" / "pool" / run.key / "model").exists()
    assert "4/4" in told


def test_divergence_and_crash_are_results_and_told(done):
    folder, told = done
    found = by_cell(folder, "tiny")
    assert found["explodes"].status == "diverged"
    assert "is not finite" in found["explodes"].message
    assert 0 < found["explodes"].step <= 20
    assert found["impossible"].status == "crashed"
    assert "3" in found["impossible"].message
    assert "diverged: recall, explodes, seed 0" in told
    assert "crashed: recall, impossible, seed 0" in told
    assert "2 finished, 1 diverged, 1 crashed" in told


def test_the_forms_were_measured_beside_the_runs(done):
    from maclaurin.study.record import read_study

    forms = read_study(done[0] / "runs" / "tiny").forms
    assert max(row["error"] for row in forms.agreement) < 1e-10
    assert forms.series[-1]["error"] < 1e-4 < forms.series[0]["error"]


def test_another_study_shares_the_run_and_has_its_page_and_retry_repeats_only_failures(done):
    folder, _ = done
    before = stamps(folder)
    write_study(folder, "other", {"the baseline": {"attention": "softmax"}, "norm": NORM})
    told = study(folder, "other")
    assert told.count("reused:") == 2
    assert (folder / "runs" / "other" / "report" / "index.html").exists()
    assert "running" not in told
    assert stamps(folder) == before
    mine, theirs = by_cell(folder, "other")["the baseline"], by_cell(folder, "tiny")["softmax"]
    assert (mine.key, mine.test_loss) == (theirs.key, theirs.test_loss)
    told = study(folder, "tiny", "--no-report", "--retry", expect=1)
    after = stamps(folder)
    again = {key for key in before if before[key] != after[key]}
    assert again == {by_cell(folder, "tiny")[cell].key for cell in ("explodes", "impossible")}


def test_interrupted_and_killed_it_goes_on_and_repeats_nothing(tmp_path):
    cells = {"short": {**SOFTMAX, "steps": 5}, "long": SOFTMAX, "longer": NORM}
    write_study(tmp_path, "cut-off", cells, **LONG)
    arguments = ("cut_off", "--workers", "2", "--no-report")
    pool = tmp_path / "runs" / "pool"

    process = start(tmp_path, *arguments)
    wait_for(lambda: stamps(tmp_path) and list(pool.glob("*/checkpoints/step-*")), process)
    process.send_signal(signal.SIGINT)
    told = finish(process, expect=130)
    assert "Go on with: maclaurin study cut_off --workers 2 --no-report" in told
    finished = stamps(tmp_path)
    states = {run.cell: run.status for run in runs(tmp_path, "cut-off")}
    assert states["short"] == "finished"
    assert "stopped" in states.values()

    process = start(tmp_path, *arguments)
    wait_for(lambda: any(Pool(pool).entry(path.name).is_busy() for path in pool.iterdir()), process)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    end = time.monotonic() + 30
    while any(Pool(pool).entry(path.name).is_busy() for path in pool.iterdir()):
        assert time.monotonic() < end, "a run outlives its study"
        time.sleep(0.1)

    study(tmp_path, *arguments)
    found = {run.cell: run for run in runs(tmp_path, "cut-off")}
    assert {run.status for run in found.values()} == {"finished"}
    assert stamps(tmp_path).items() >= finished.items()
    for cell, steps in (("short", 5), ("long", 200), ("longer", 200)):
        assert steps_trained(tmp_path, found[cell].key) == list(range(1, steps + 1))


def test_two_studies_at_once_train_a_shared_run_once(tmp_path):
    write_study(tmp_path, "one", {"softmax": SOFTMAX}, **LONG)
    write_study(tmp_path, "two", {"softmax": SOFTMAX}, **LONG)
    both = [start(tmp_path, name, "--no-report") for name in ("one", "two")]
    told = [finish(process) for process in both]
    assert len(stamps(tmp_path)) == 1
    (key,) = stamps(tmp_path)
    assert steps_trained(tmp_path, key) == list(range(1, 201))
    assert (tmp_path / "runs" / "pool" / key / "log.txt").read_text().count("step 200:") == 1
    assert all("1 finished" in text for text in told)


def test_a_smoke_run_of_a_big_study_under_torchrun(tmp_path):
    cells = {"softmax": {"attention": "exp/sum"}}
    big = {"size": "small", "data": "fineweb", "tokenizer": "hf:some/tokenizer", "precision": "bf16"}
    write_study(tmp_path, "big", cells, **big, length=1024, accumulate=2, batch_size=36)
    study(tmp_path, "big", "--smoke", "--torchrun", "--standalone --nproc-per-node 2")
    (run,) = runs(tmp_path, "big/smoke")
    assert (run.status, run.steps, run.config["size"]) == ("finished", 5, "nano")
    assert run.provenance["data"]["name"].startswith("hf:")
    assert not (tmp_path / "runs" / "pool").exists()


# -------------------------------------------------------------------------- without training anything


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments):
        result = CliRunner().invoke(app, ["study", *arguments], catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    return run


def test_a_study_is_planned_without_its_data(command, tmp_path):
    cells = {"softmax": SOFTMAX, "second order": {"attention": "taylor(2)/sum"}}
    write_study(
        tmp_path, "plan", cells, seeds=(0, 1), data="fineweb", tokenizer="bpe:4096", length=512, device="cuda"
    )
    told = command("plan", "--dry-run", "--budget", "0.5x")
    assert "4 runs" in told
    assert "20,480" in told  # 10 steps of 4 rows of 512
    assert "grows" in told
    assert not (tmp_path / "runs").exists()


def test_the_command_lines_for_torchrun_are_printed_with_their_jobs(command, tmp_path):
    write_study(tmp_path, "plan", {"softmax": SOFTMAX})
    told = command("plan", "--dry-run", "--torchrun", "--nproc-per-node 8")
    (line,) = (line for line in told.splitlines() if "torch.distributed.run" in line)
    assert "--nproc-per-node 8 -m maclaurin.study.worker" in line
    job = json.loads(Path(line.split()[-1]).read_text())
    assert job["config"]["attention"] == ["exp/sum"]
    assert job["key"] is None


def test_studies_are_listed_with_their_question(command, tmp_path):
    write_study(tmp_path, "plan", {"softmax": SOFTMAX})
    told = command("--list")
    assert "plan" in told
    assert "What is seen in plan?" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plam"], "Did you mean plan"),
        (["plan", "--only", "sofmax"], "Did you mean softmax"),
        (["plan", "--budget", "half"], "0.5x"),
        (["plan", "another"], "--only"),
        (["plan", "--executor", "slurm"], "local or ray"),
        (["plan", "--device", "tpu"], "cpu or cuda"),
        (["plan", "--executor", "ray", "--torchrun", "--nproc-per-node 2"], "does not go with"),
        (["wrong"], "no key 'learning_rate'"),
        (["broken"], "NameError"),
        (["empty"], "study = Study"),
    ],
)
def test_a_wrong_word_is_one_clear_error(command, tmp_path, arguments, words):
    write_study(tmp_path, "plan", {"softmax": SOFTMAX})
    write_study(tmp_path, "wrong", {"softmax": {**SOFTMAX, "learning_rate": 1.0}})
    write_study(tmp_path, "broken", {"softmax": SOFTMAX}).write_text("study = Studdy()\n")
    write_study(tmp_path, "empty", {"softmax": SOFTMAX}).write_text("study = 3\n")
    with pytest.raises(MaclaurinError, match=words):
        command(*arguments, "--dry-run")
