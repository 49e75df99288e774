"""What the training tests share: small runs as a user types them."""

import contextlib
import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from tests.e2e import command

COMMAND = [sys.executable, "-m", "maclaurin", "train"]
#: a second of training after the imports: data made on the fly, rows of 24 tokens
SMALL = {
    "attention": "exp/l2",
    "size": "nano",
    "data": "mqar:pairs=3,vocab=32,length=24",
    "steps": "30",
    "batch-size": "4",
    "warmup": "4",
    "eval-every": "8",
    "eval-rows": "8",
    "checkpoint-every": "2",
    "log-every": "1",
    "device": "cpu",
}


def arguments(out, *flags, **changed):
    options = {**SMALL, **{k.replace("_", "-"): str(v) for k, v in changed.items()}, "out": str(out)}
    return [*(f"--{k}={v}" for k, v in options.items()), *flags]


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **more}


def train(out, *flags, expect=0, launcher=None, **changed):
    words = [*(launcher or COMMAND), *arguments(out, *flags, **changed)]
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=280, env=environment(), check=False
    )
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def train_here(out, *flags, expect=0, verb="train", **changed):
    """The same command in this process, which is quicker."""
    from maclaurin.cli.main import main

    told, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["maclaurin", verb, *arguments(out, *flags, **changed)]),
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert code == expect, told.getvalue() + errors.getvalue()
    return SimpleNamespace(stdout=told.getvalue(), stderr=errors.getvalue())


def start(out, *flags, **changed):
    """The same command in a process of its own, to be stopped or killed."""
    return command.start("train", *arguments(out, *flags, **changed), env=environment())


def wait_for(condition, process, seconds=120):
    """Whether the condition came true before the process ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.001)
    return False


def train_together(out, processes, **changed):
    """The command in several processes that find each other as under torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
    started = []
    for rank in range(processes):
        place = {**world, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
        env = environment(**{name: str(value) for name, value in place.items()})
        started.append(command.start("train", *arguments(out, **changed), env=env))
    for process in started:
        text = process.communicate(280)
        assert process.returncode == 0, text


def torchrun(processes):
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "-m", "maclaurin", "train",
    ]  # fmt: skip


def weights(out):
    from safetensors.torch import load_file

    return load_file(Path(out) / "model" / "model.safetensors")


def records(out):
    from maclaurin.training.run_folder import read_records

    return read_records(Path(out) / "records.jsonl")
