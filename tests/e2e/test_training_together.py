"""Several processes over gloo train the run that one process trains."""

import pytest

from tests.e2e.training import records, torchrun, train, weights


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    train(out, steps=8, eval_every=4)
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
    train(out, steps=8, eval_every=4, parallel=parallel, launcher=torchrun(2))
    assert_same_losses(out, alone)


def test_accumulated_parts_have_the_losses_of_the_whole_batch(tmp_path, alone):
    train(tmp_path / "run", steps=8, eval_every=4, accumulate=2)
    assert_same_losses(tmp_path / "run", alone)


def test_a_sharded_checkpoint_goes_on_in_one_process(tmp_path, alone):
    import shutil

    out = tmp_path / "run"
    train(out, steps=8, eval_every=4, parallel="fsdp", launcher=torchrun(2))
    shutil.rmtree(sorted(out.glob("checkpoints/step-*"))[-1])
    train(out, "--resume", steps=8, eval_every=4, parallel="fsdp")
    assert_same_losses(out, alone)
