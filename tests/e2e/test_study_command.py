"""`maclaurin study` as a user types it: results of all kinds, interruptions, sharing, planning."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from maclaurin import MaclaurinError
from maclaurin.cli.main import app
from maclaurin.study.pool import Pool
from maclaurin.study.run_record import read_study
from tests.e2e.studies import (
    COMMON,
    by_cell,
    environment,
    finish,
    runs,
    stamps,
    start,
    steps_trained,
    study,
    wait_for,
    write_study,
)

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


def test_finished_runs_say_everything_a_report_needs(done):
    folder, told = done
    found = by_cell(folder, "tiny")
    for cell in ("softmax", "norm"):
        run = found[cell]
        assert run.status == "finished"
        assert (run.step, run.run.steps, run.run.seed) == (20, 20, 0)
        assert 0 <= run.value("accuracy") <= 1
        assert run.value("loss") > 0  # over the whole test set, unlike the curve
        held_out = run.curves.get("validation_accuracy") or run.curves["accuracy"]
        assert [step for step, _ in held_out] == [10, 20]
        assert [step for step, _ in run.curves["train_loss"]] == list(range(1, 21))
        assert run.loss_by_position[0][0] == 0
        assert run.value("parameters") > 100_000
        assert run.value("tokens_per_second") > 0
        assert run.seconds > 0
        assert run.order is None
        assert run.provenance["data"].startswith("mqar")
        assert run.provenance["runs_at_once"] == 2
        assert {"commit", "machine", "versions", "date"} <= set(run.provenance)
        assert not (folder / "runs" / "pool" / run.key / "checkpoints").exists()
        assert not (folder / "runs" / "pool" / run.key / "model").exists()
    assert "4/4" in told


def test_divergence_and_crash_are_results_and_told(done):
    folder, told = done
    found = by_cell(folder, "tiny")
    assert found["explodes"].status == "diverged"
    assert found["explodes"].message.startswith("step ")
    assert 0 < found["explodes"].step <= 20
    assert found["impossible"].status == "crashed"
    assert "3" in found["impossible"].message
    assert "diverged: recall, explodes, seed 0" in told
    assert "crashed: recall, impossible, seed 0" in told
    assert "exit code" not in told, "the error itself is shown"
    assert "2 finished, 1 diverged, 1 crashed" in told


def test_the_forms_were_measured_beside_the_runs(done):
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
    assert mine == theirs
    told = study(folder, "tiny", "--no-report", "--retry", expect=1)
    after = stamps(folder)
    again = {key for key in before if before[key] != after[key]}
    assert again == {by_cell(folder, "tiny")["explodes"].key}
    assert by_cell(folder, "tiny")["impossible"].key not in after, "wrong input is not kept in the pool"


def test_interrupted_and_killed_it_goes_on_and_repeats_nothing(tmp_path):
    cells = {"short": {**SOFTMAX, "steps": 5}, "long": SOFTMAX, "longer": NORM}
    write_study(tmp_path, "cut-off", cells, **LONG)
    arguments = ("cut_off", "--workers", "2", "--no-report")
    pool = tmp_path / "runs" / "pool"

    process = start(tmp_path, *arguments)
    with_checkpoints = lambda: (  # noqa: E731
        Pool(pool).entry(folder.parent.parent.name) for folder in pool.glob("*/checkpoints/step-*")
    )
    in_the_middle = lambda: any(  # noqa: E731
        entry.record() is None and entry.is_busy() for entry in with_checkpoints()
    )
    wait_for(lambda: stamps(tmp_path) and in_the_middle(), process)
    process.send_signal(signal.SIGINT)
    told = finish(process, expect=130)
    assert "Continue with: maclaurin study cut_off --workers 2 --no-report" in told
    finished = stamps(tmp_path)
    states = {cell: run.status for cell, run in by_cell(tmp_path, "cut-off").items()}
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
    found = by_cell(tmp_path, "cut-off")
    assert {run.status for run in found.values()} == {"finished"}
    assert stamps(tmp_path).items() >= finished.items()
    for cell, steps in (("short", 5), ("long", 200), ("longer", 200)):
        assert steps_trained(tmp_path, found[cell].key) == list(range(1, steps + 1))


def test_under_a_limit_of_time_it_saves_what_it_has_and_goes_on_later(tmp_path):
    write_study(tmp_path, "limited", {"long": SOFTMAX}, **LONG)
    told = study(tmp_path, "limited", "--workers", "1", "--no-report", "--minutes", "0.03", expect=130)
    assert "Continue with: maclaurin study limited --workers 1 --no-report --minutes 0.03" in told
    assert by_cell(tmp_path, "limited")["long"].status in ("waiting", "stopped")
    study(tmp_path, "limited", "--workers", "1", "--no-report")
    assert by_cell(tmp_path, "limited")["long"].status == "finished"


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_a_smoke_run_of_a_big_study_under_torchrun(tmp_path):
    cells = {"softmax": {"attention": "exp/sum"}}
    big = {"size": "small", "data": "fineweb", "tokenizer": "hf:some/tokenizer", "precision": "bf16"}
    write_study(tmp_path, "big", cells, **big, length=1024, accumulate=2, batch_size=36)
    study(tmp_path, "big", "--smoke", "--torchrun", "--standalone --nproc-per-node 2")
    (run,) = runs(tmp_path, "big/smoke").values()
    assert (run.status, run.run.steps, run.run.config["size"]) == ("finished", 5, "nano")
    assert run.provenance["data"].startswith("hf:")
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
    assert job["record"]["run"]["config"]["attention"] == ["exp/sum"]
    assert job["record"]["run"]["data"] == ""


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
        (["plan", "--only", "plan"], "goes before --only"),
        (["plan", "--executor", "cloud"], "local, ray or slurm"),
        (["plan", "--executor", "slurm", "--torchrun", "--nproc-per-node 2"], "cannot be combined with"),
        (["plan", "--device", "tpu"], "cpu or cuda"),
        (["plan", "--executor", "ray", "--torchrun", "--nproc-per-node 2"], "cannot be combined with"),
        (["wrong"], "no key 'learning_rate'"),
        (["broken"], "NameError"),
        (["empty"], "study = Study"),
    ],
)
def test_a_wrong_word_is_one_clear_error_before_anything_is_trained(command, tmp_path, arguments, words):
    write_study(tmp_path, "plan", {"softmax": SOFTMAX})
    write_study(tmp_path, "wrong", {"softmax": {**SOFTMAX, "learning_rate": 1.0}})
    write_study(tmp_path, "broken", {"softmax": SOFTMAX}).write_text("study = Studdy()\n")
    write_study(tmp_path, "empty", {"softmax": SOFTMAX}).write_text("study = 3\n")
    with pytest.raises(MaclaurinError, match=words):
        command(*arguments, "--dry-run")


def test_a_folder_that_cannot_be_written_is_one_error_before_anything_is_trained(command, tmp_path):
    write_study(tmp_path, "plan", {"softmax": SOFTMAX})
    (tmp_path / "file").touch()
    with pytest.raises(MaclaurinError, match="`out`: file/x cannot be written"):
        command("plan", "--out", "file/x")


def test_only_takes_all_words_up_to_the_next_option(command, tmp_path):
    """`--only a b` chose a, and took b for the name of the study."""
    cells = {"softmax": SOFTMAX, "norm": NORM, "second": {"attention": "taylor(2)/sum"}}
    write_study(tmp_path, "mini", cells)
    for arguments in (
        ["--only", "norm", "second", "--dry-run"],
        ["mini", "--only", "norm", "second", "--dry-run"],
    ):
        text = command(*arguments)
        assert "Title of mini: 3 runs" in text
    assert "Title of mini: 2 runs" in command("mini", "--dry-run", "--only", "norm")


def test_a_plan_counts_the_runs_that_choose_learning_rates(command, tmp_path):
    write_study(tmp_path, "plan", {"softmax": SOFTMAX, "norm": NORM}).write_text(
        "from maclaurin.study import Experiment, Study, Tune, cells_of\n"
        "cells = cells_of({'softmax': 'exp/sum', 'norm': 'exp/l2'})\n"
        "tune = Tune(rates=(1e-3, 2e-3))\n"
        "e = Experiment('e', 'E', 'loss', {'device': 'cpu'}, cells, (0,), 'softmax', tune=tune)\n"
        "study = Study('plan', 'T', 'Q', 'B', (e,))\n"
    )
    assert "before that, at least 4 runs to choose learning rates" in command("plan", "--dry-run")


# ------------------------------------------------------------------- folders, seeds, parts of one's own


def test_parts_of_a_study_copies_and_more_seeds(done):
    """One study in many ways, with what the pool has: nothing but the new seeds is trained."""
    folder, _ = done
    write_study(folder, "whole", {"softmax": SOFTMAX, "norm": NORM})
    study(folder, "whole", "--no-report", "--time")
    cells = read_study(folder / "runs" / "whole").experiments[0].cells
    assert all(cell.speed.tokens_per_second > 0 for cell in cells)
    study(folder, "whole", "--no-report")
    assert read_study(folder / "runs" / "whole").experiments[0].cells == cells, "speeds stay"
    before = (folder / "runs" / "whole" / "records.json").read_bytes()

    study(folder, "whole", "--no-report", "--only", "norm")
    assert (folder / "runs" / "whole" / "records.json").read_bytes() == before
    assert set(by_cell(folder, "whole-norm")) == {"softmax", "norm"}
    cells = {"softmax": SOFTMAX, "norm": NORM, "third": {"attention": "taylor(2)/sum"}}

    write_study(folder, "whole", cells, place="copied")
    told = study(folder, "studies/copied", "--no-report", expect=2)
    assert "give it another name=" in told
    assert (folder / "runs" / "whole" / "records.json").read_bytes() == before

    assert "2 runs, 2 done" in study(folder, "whole", "--dry-run")
    told = study(folder, "whole", "--no-report", "--seeds", "2", "--workers", "2")
    assert told.count("reused:") == 2
    assert {label.seed for label in runs(folder, "whole")} == {0, 1}
    study(folder, "whole", "--no-report")
    assert {label.seed for label in runs(folder, "whole")} == {0, 1}, "added seeds stay"

    told = study(folder, "diff", "runs/tiny", "runs/whole")
    assert "softmax" in told
    told = study(folder, "clean", "--unused", "--yes")
    assert "there is nothing to delete" in told


OWN = """
import math
from dataclasses import dataclass
from typing import ClassVar
from maclaurin.spec import Polynomial, register, whole

@register
@dataclass(frozen=True, slots=True)
class MyCosh(Polynomial):
    notation: ClassVar[str] = "mycosh"
    order: int = whole(at_least=0)

    @property
    def series(self):
        return tuple((n % 2 == 0) / math.factorial(n) for n in range(self.order + 1))
"""


@pytest.mark.parametrize("where", ["study", "file", "command"])
def test_parts_of_ones_own_reach_the_workers(tmp_path, where):
    cells = {"softmax": SOFTMAX, "cosh": {"attention": "mycosh(4)/sum"}}
    own = {"study": {"head": OWN}, "file": {"more": ", imports=('parts.py',)"}, "command": {}}[where]
    file = write_study(tmp_path, "own", cells, steps=3, **own)
    if where != "study":
        (file.parent / "parts.py").write_text(OWN)
    given = ["--import", str(file.parent / "parts.py")] if where == "command" else []
    study(tmp_path, "own", "--no-report", "--workers", "2", *given)
    found = by_cell(tmp_path, "own")
    assert {cell: run.status for cell, run in found.items()} == {"softmax": "finished", "cosh": "finished"}
    assert found["softmax"].run.parts is None
    assert found["cosh"].run.parts is not None


def test_a_study_is_a_python_call(tmp_path):
    """From a script without a __main__ guard, as people write them."""
    script = tmp_path / "script.py"
    script.write_text(
        "import maclaurin\n"
        "from maclaurin.study import Experiment, Study, cells_of\n"
        f"common = { ({**COMMON, 'steps': 2})!r}\n"
        "e = Experiment('e', 'E', 'accuracy', common, cells_of({'a': 'exp/sum'}), (0,), 'a')\n"
        "ending = maclaurin.study.run(Study('call', 'T', 'Q', 'B', (e,)), workers=1)\n"
        "print('ended with', [record.status for _, record in ending.record.labelled()], ending.out)\n"
    )
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.stdout.splitlines() == ["ended with ['finished'] runs/call"], result.stdout + result.stderr


ASKING = """
import dataclasses
from maclaurin.study import Behind, Experiment, Study, Tasks, cells_of, waterfall

cells = {(): "linear", ("order 2",): "second", ("all orders", "order 2"): "softmax"}
way = waterfall("To softmax", ("order 2", "all orders"), lambda on: cells.get(tuple(sorted(on))))
text = Experiment(
    name="text",
    title="Text",
    metric="loss",
    common={"size": "pico", "data": "stdlib", "tokenizer": "bytes", "limit_documents": 60, "length": 192,
            "test_fraction": 0.2, "steps": 4, "batch_size": 2, "eval_rows": 4, "device": "cpu"},
    cells=cells_of({"softmax": "exp/sum", "linear": "taylor(1,about=mean)/sum", "second": "taylor(2)/sum"}),
    seeds=(0, 1),
    baseline="softmax",
    waterfalls=(way,),
    tasks=Tasks(("lines_32", "TASK"), items=2),
)
lines = dataclasses.replace(text, name="lines", title="Ends of lines", metric="task:lines_32:log_odds")
claim = Behind(says="Order 1 reads less.", experiment="lines", cells=("softmax", "linear"))
study = Study("asking", "Asking", "What is read?", "seconds", (text, lines), (claim,))
"""


@pytest.mark.exhaustive  # its steps are tested one by one in tests/unit/study
def test_trained_models_are_asked_tasks_from_training_to_page(tmp_path):
    file = tmp_path / "studies" / "asking" / "study.py"
    file.parent.mkdir(parents=True)
    file.write_text(ASKING.replace("TASK", "recall_64"))
    told = study(tmp_path, "asking", expect=2)
    assert "the task recall_64 has texts of up to" in told
    assert stamps(tmp_path) == {}, "nothing was trained"
    file.write_text(ASKING.replace("TASK", "induction_8"))
    planned = study(tmp_path, "asking", "--dry-run")
    assert "Asking: 6 runs, 0 done" in planned
    assert "lines_32: 2 items, seed 0" in planned
    told = study(tmp_path, "asking", "--workers", "2")
    found = runs(tmp_path, "asking")
    assert len(found) == 12
    assert len({record.key for record in found.values()}) == 6, "both experiments have the same runs"
    for record in found.values():
        facts = record.provenance["tasks"]["lines_32"]
        assert (facts["items"], facts["questions"], facts["chance"], facts["cut"]) == (2, 8, 0.25, 0)
        assert {"loss", "task:lines_32", "task:lines_32:log_odds", "task:induction_8"} <= set(record.metrics)
    page = (tmp_path / "runs" / "asking" / "report" / "index.html").read_text()
    assert page.count("log-odds of the right answer in lines_32") > 2
    tables = (tmp_path / "runs" / "asking" / "report" / "tables.md").read_text()
    assert "To softmax" in tables.partition("## Ends of lines")[2]
    before = stamps(tmp_path)
    assert "running" not in study(tmp_path, "asking", "--no-report")
    assert stamps(tmp_path) == before
