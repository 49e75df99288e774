"""A study on a file, trained in another folder as on a rented machine (benchmarks/remote_studies.py)."""

import shutil
import subprocess
import sys
from pathlib import Path

from maclaurin.study import run
from maclaurin.study.pool import Pool

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "remote_studies.py"

STUDY = """
from maclaurin.study import Experiment, Study, Tune, cells_of

study = Study("tiny", "Tiny", "Does it run there?", "seconds", (Experiment(
    name="text", title="Text", metric="loss",
    common={
        "size": "pico", "data": "text.txt", "tokenizer": "bytes", "steps": 2, "batch_size": 2, "length": 16,
        "eval_every": 0, "eval_rows": 4, "checkpoint_every": 0,
    },
    cells=cells_of({"softmax": "exp/sum", "norm": "exp/l2"}), seeds=(1,), baseline="softmax",
    tune=Tune(rates=(1e-3, 2e-3), most=2),
),))
"""


def test_a_study_on_a_file_is_carried_trained_there_and_its_records_are_made_here(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "studies" / "tiny").mkdir(parents=True)
    there.mkdir()
    (here / "studies" / "tiny" / "study.py").write_text(STUDY)
    (here / "text.txt").write_text("".join(f"line {n} of a text\n" for n in range(400)))

    def script(folder, *arguments):
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout

    assert "text.txt bytes" in script(here, "carry", str(there / "carry"), "tiny")
    (here / "text.txt").rename(here / "elsewhere.txt")
    shutil.copytree(here / "studies", there / "studies")
    told = script(there, "run", "tiny", "--carry", "carry", "--out", "out", "--workers", "2")
    assert "complete {'finished': 2}" in told
    (here / "elsewhere.txt").rename(here / "text.txt")
    assert "6 finished" in script(
        here, "merge", str(there / "out" / "studies.jsonl.xz"), "--pool", "runs/pool"
    )
    monkeypatch.chdir(here)
    ending = run("tiny", device="cpu", time=False)
    assert {record.status for _, record in ending.record.labelled()} == {"finished"}
    assert len(Pool(here / "runs" / "pool").entries()) == 6, "nothing was trained again"
