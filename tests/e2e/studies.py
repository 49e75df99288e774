"""What the tests of studies share: tiny studies as files, and the command as a user types it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from maclaurin.study.run_record import read_study
from tests.e2e import command

#: a run of a second or two: data made on the fly, rows of 24 tokens
COMMON = {
    "size": "nano",
    "data": "mqar:pairs=3,vocab=32,length=24",
    "steps": 20,
    "batch_size": 4,
    "warmup": 4,
    "eval_every": 10,
    "eval_rows": 8,
    "checkpoint_every": 5,
    "log_every": 1,
    "device": "cpu",
}


def write_study(folder, name, cells, *, seeds=(0,), baseline=None, place=None, head="", more="", **common):
    """studies/NAME/study.py with one experiment; cells: name → settings."""
    file = Path(folder) / "studies" / (place or name.replace("-", "_")) / "study.py"
    file.parent.mkdir(parents=True)
    listed = ", ".join(f"Cell({cell!r}, {settings!r})" for cell, settings in cells.items())
    file.write_text(
        "from maclaurin.study import Behind, Cell, Experiment, Study, Tune\n"
        f"{head}"
        f"cells = ({listed},)\n"
        f"common = { ({**COMMON, **common})!r}\n"
        "recall = Experiment('recall', 'Recall', 'accuracy', common, cells, "
        f"{tuple(seeds)!r}, {baseline or next(iter(cells))!r})\n"
        f"study = Study({name!r}, 'Title of {name}', 'What is seen in {name}?', 'seconds', (recall,){more})\n"
    )
    return file


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "160"}


def start(folder, *arguments):
    return command.start("study", *arguments, cwd=folder, env=environment())


def study(folder, *arguments, expect=0):
    process = start(folder, *arguments)
    return finish(process, expect)


def finish(process, expect=0, seconds=200):
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise
    assert process.returncode == expect, out + err
    return out + err


def wait_for(condition, process, seconds=240):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        assert process.poll() is None, "the study ended too early: " + "".join(process.communicate())
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"nothing happened in {seconds} s: " + "".join(process.communicate()))


def runs(folder, name):
    """Label → record."""
    return dict(read_study(Path(folder) / "runs" / name).labelled())


def by_cell(folder, name):
    """Cell → record of its first seed."""
    return {label.cell: record for label, record in reversed(runs(folder, name).items())}


def stamps(folder):
    """The results in the pool and when they were written."""
    files = (Path(folder) / "runs" / "pool").glob("*/record.json")
    return {file.parent.name: file.stat().st_mtime_ns for file in files}


def steps_trained(folder, key):
    file = Path(folder) / "runs" / "pool" / key / "records.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "train"]
