"""Several processes over gloo train the run that one process trains."""

import subprocess

import pytest

from tests.e2e.training import (
    arguments,
    environment,
    records,
    torchrun,
    train,
    train_here,
    train_together,
    weights,
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    train_here(out, steps=8, eval_every=4)
    return out


def losses(out):
    return [(r["kind"], r["step"], r["loss"]) for r in records(out)]


def assert_same_losses(out, other):
    found, expected = losses(out), losses(other)
    assert [r[:2] for r in found] == [r[:2] for r in expected]
    for (_, step, a), (_, _, b) in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=2e-4), f"step {step}"
    for name, tensor in weights(other).items():
        assert weights(out)[name].shape == tensor.shape
        assert (weights(out)[name] - tensor).norm() <= 1e-2 * tensor.norm() + 1e-3, name


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(tmp_path, alone, parallel):
    out = tmp_path / "run"
    train_together(out, 2, steps=8, eval_every=4, parallel=parallel)
    assert_same_losses(out, alone)


@pytest.mark.exhaustive
def test_torchrun_starts_processes_that_have_the_losses_of_one(tmp_path, alone):
    out = tmp_path / "run"
    train(out, steps=8, eval_every=4, parallel="ddp", launcher=torchrun(2))
    assert_same_losses(out, alone)


def test_accumulated_parts_have_the_losses_of_the_whole_batch(tmp_path, alone):
    train_here(tmp_path / "run", steps=8, eval_every=4, accumulate=2)
    assert_same_losses(tmp_path / "run", alone)


@pytest.mark.exhaustive
def test_a_sharded_checkpoint_goes_on_in_one_process(tmp_path, alone):
    import shutil

    out = tmp_path / "run"
    train(out, steps=8, eval_every=4, parallel="fsdp", launcher=torchrun(2))
    shutil.rmtree(sorted(out.glob("checkpoints/step-*"))[-1])
    train_here(out, "--resume", steps=8, eval_every=4, parallel="fsdp")
    assert_same_losses(out, alone)


def run_patched(tmp_path, patch, *options):
    """The train command in two processes, each after `patch`."""
    script = tmp_path / "patched.py"
    script.write_text(
        f"import sys\n{patch}\n"
        "from maclaurin.cli.main import main\n"
        "sys.argv[:] = ['maclaurin', 'train', *sys.argv[1:]]\n"
        "main()\n"
    )
    launcher = [*torchrun(2)[:-3], str(script), *options]
    return subprocess.run(
        launcher, capture_output=True, text=True, timeout=280, env=environment(), check=False
    )


COUNT_REDUCTIONS = """
import atexit, os, pathlib
import torch.distributed as dist
calls = []
def counted(real):
    def call(*arguments, **named):
        calls.append(real.__name__)
        return real(*arguments, **named)
    return call
for name in [name for name in dir(dist) if name.startswith("reduce_scatter")]:  # it differs by version
    setattr(dist, name, counted(getattr(dist, name)))
atexit.register(lambda: pathlib.Path(FOLDER, "calls-" + os.environ["RANK"]).write_text("\\n".join(calls)))
"""


@pytest.mark.exhaustive  # four processes that start torch
def test_sharded_gradients_are_reduced_once_per_step(tmp_path):
    """However many parts a batch is accumulated over."""
    found = []
    for parts in (1, 2):
        folder = tmp_path / str(parts)
        folder.mkdir()
        options = arguments(folder / "run", steps=2, eval_every=0, parallel="fsdp", accumulate=parts)
        result = run_patched(folder, f"FOLDER = {str(folder)!r}\n{COUNT_REDUCTIONS}", *options)
        assert result.returncode == 0, result.stderr
        found.append((folder / "calls-0").read_text().splitlines())
    assert found[0]
    assert found[1] == found[0]


SLOW_DATA = """
import datetime, importlib, time
import torch.distributed as dist
from torch.distributed import distributed_c10d
join_group = dist.init_process_group
def impatient(*arguments, **named):
    return join_group(*arguments, **{**named, "timeout": datetime.timedelta(seconds=4)})
dist.init_process_group = impatient
import maclaurin.data.data_config as data
open_quickly = data.open_source
def open_slowly(config, *, progress=True):
    if progress:  # the first process
        time.sleep(10)
    return open_quickly(config, progress=progress)
data.open_source = open_slowly
"""


@pytest.mark.exhaustive
def test_processes_wait_as_long_as_the_data_take(tmp_path):
    """Longer than the timeout of collective calls, here four seconds."""
    result = run_patched(tmp_path, SLOW_DATA, *arguments(tmp_path / "run", steps=1))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "summary.json").exists()
