"""The speed of cells: which are measured, when it is cheap, and what is recorded."""

import pytest
from tests.unit.study.making import make_record, make_run

from maclaurin import InputError
from maclaurin.study.plan_runs import resolved, waiting
from maclaurin.study.run_record import Label
from maclaurin.study.timing import is_cheap, measure_one, require_local, subject_of, to_measure


def test_what_changes_no_step_is_not_measured_twice():
    one = subject_of(make_run())
    assert subject_of(make_run(seed=1, lr=0.5, steps=7, trackers=["wandb"])) == one
    assert subject_of(make_run(attention=["exp/l2"])) != one
    assert subject_of(make_run(batch_size=4)) != one
    assert subject_of(make_run(torch="2.14")) != one


def test_each_config_with_a_finished_run_is_measured_once():
    runs = [
        make_record(seed=0, seconds=10.0),
        make_record(seed=1, seconds=10.0),
        make_record("crashed", attention=["exp/l2"]),
    ]
    plan = {Label("e", "c", place): record for place, record in enumerate(runs)}
    found = to_measure(plan, {record.key: record for record in runs}, known=())
    assert found == {subject_of(runs[0].run): runs[0]}
    assert to_measure(plan, {record.key: record for record in runs}, known=found) == {}


def test_speeds_are_measured_without_asking_only_if_that_is_a_small_share():
    run = make_record(seconds=20.0, steps=200)
    assert not is_cheap([run], [run], workers=1)
    assert is_cheap([run], [run] * 10, workers=1)
    assert not is_cheap([run], [run] * 10, workers=8)


def test_a_measurement_is_a_speed_with_its_machine(tmp_path):
    keys = {"data": "mqar:pairs=2,vocab=16,length=12", "size": "pico", "batch_size": 2, "device": "cpu"}
    found = measure_one("s", waiting(resolved({**keys, "trackers": ("wandb",)})).run.config)
    assert found.tokens_per_second > 0
    assert found.subject == "s"
    assert found.machine["threads"] >= 1


@pytest.mark.parametrize(("executor", "torchrun"), [("slurm", None), ("local", "--nproc-per-node 2")])
def test_only_this_machine_can_be_timed(executor, torchrun):
    require_local(executor=executor, torchrun=torchrun, wanted=None)
    with pytest.raises(InputError, match="--time measures on this machine"):
        require_local(executor=executor, torchrun=torchrun, wanted=True)
