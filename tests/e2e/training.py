"""What the training tests share: small runs as a user types them."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

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
    command = [*(launcher or COMMAND), *arguments(out, *flags, **changed)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment(), check=False
    )
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def train_here(out, *flags, expect=0, **changed):
    """The same command in this process, which is quicker."""
    from maclaurin.cli.main import main

    told, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["maclaurin", "train", *arguments(out, *flags, **changed)]),
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert code == expect, told.getvalue() + errors.getvalue()
    return SimpleNamespace(stdout=told.getvalue(), stderr=errors.getvalue())


def torchrun(processes):
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "-m", "maclaurin", "train",
    ]  # fmt: skip


def weights(out):
    from safetensors.torch import load_file

    return load_file(Path(out) / "model" / "model.safetensors")


def records(out):
    from maclaurin.training.records import read_records

    return read_records(Path(out) / "records.jsonl")
