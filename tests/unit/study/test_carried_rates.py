"""Learning rates that follow from those of other sizes, and the runs that test the rule."""

import dataclasses

import pytest
from tests.unit.study.making import make_study
from tests.unit.study.test_tune import Trainer, make_run

from maclaurin import InputError
from maclaurin.study import Carried, Tasks, Tune
from maclaurin.study.carried_rates import rule_for
from maclaurin.study.choose_rates import learning_rates, provisional
from maclaurin.study.design import TUNING_SEED
from maclaurin.study.run_record import CellTuning, Tuning
from maclaurin.study.runner import prepare
from maclaurin.study.tuned_rates import FILE, TunedFile, known_rates, missing_tests

#: widths 64, 128 and 256: the best rates halve from each to the next
SIZES = {"small": "pico", "middle": "nano", "large": "micro"}
RATES = Tune(rates=(1e-3, 2e-3, 4e-3))
RULE = Carried(("small", "middle"))


def ladder(folder, tune=RATES, carried=RULE, **changes):
    """The same cells at three sizes: two with a search, the last with rates of the rule."""
    one = make_study(seeds=(1, 2, 3)).experiments[0]
    experiments = tuple(
        dataclasses.replace(
            one,
            name=name,
            common={"device": "cpu", "size": size},
            tune=carried if name == "large" else tune,
        )
        for name, size in SIZES.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.py").write_text("")
    made = dataclasses.replace(make_study(), experiments=experiments, file=folder / "study.py")
    return dataclasses.replace(made, **changes)


def rates_at(study, name):
    found = next(e for e in study.experiments if e.name == name)
    return {cell.name: (cell.settings["lr"], cell.settings.get("output_lr")) for cell in found.cells}


def test_the_rate_of_a_larger_size_follows_from_two_smaller_ones_and_is_tested(tmp_path):
    train = Trainer()
    tuned, tunings = learning_rates(ladder(tmp_path / "s"), tmp_path / "out", make_run, train)
    assert rates_at(tuned, "small") == {"softmax": (4e-3, None), "norm": (16e-3, None)}
    assert rates_at(tuned, "middle") == {"softmax": (2e-3, None), "norm": (8e-3, None)}
    assert rates_at(tuned, "large") == {"softmax": (1e-3, None), "norm": (4e-3, None)}
    tuning = tunings["large"]
    assert tuning.rule.startswith("half the rate tuned in middle (rate ∝ width^−p with p = 1, ")
    assert "p suits most cells between small and middle" in tuning.rule
    tried = {(trial.rate, trial.seed) for trial in tuning.cells["norm"].trials}
    assert tried == {(2e-3, TUNING_SEED), (4e-3, TUNING_SEED), (8e-3, TUNING_SEED)}
    assert {run.config["test"] for run in train.asked if run.seed == TUNING_SEED} == {False}


def test_a_test_of_the_rule_is_stored_and_used_again(tmp_path):
    study, out = ladder(tmp_path / "s"), tmp_path / "out"
    assert set(missing_tests(study, out)) == {"large"}
    learning_rates(study, out, make_run, Trainer())
    assert missing_tests(study, out) == {}
    again = Trainer()
    _, tunings = learning_rates(study, out, make_run, again)
    assert again.asked == []
    assert len(tunings["large"].cells["norm"].trials) == 3
    kept = TunedFile.read(out / FILE)
    assert {t.key for t in kept.experiments["large"].cells["norm"].trials} <= set(kept.runs)


def test_a_rule_is_no_search_for_an_experiment_that_searches(tmp_path):
    """Else a search at the large size would take the rate of the rule for its result."""
    study, out = ladder(tmp_path / "s"), tmp_path / "out"
    learning_rates(study, out, make_run, Trainer())
    searching = ladder(tmp_path / "s", carried=RATES)
    assert list(known_rates(searching, out).missing) == ["large"]


def test_the_factor_of_the_output_projections_is_carried_as_it_is(tmp_path):
    both = dataclasses.replace(RATES, factors=(0.25, 0.5, 1.0))
    study = ladder(tmp_path / "s", both, Carried(("middle",), exponent=1))
    tuned, tunings = learning_rates(study, tmp_path / "out", make_run, Trainer())
    assert rates_at(tuned, "middle") == {"softmax": (2e-3, 0.25), "norm": (8e-3, 1.0)}
    assert rates_at(tuned, "large") == {"softmax": (1e-3, 0.25), "norm": (4e-3, 1.0)}
    assert "p was given" in tunings["large"].rule
    assert {trial.factor for trial in tunings["large"].cells["softmax"].trials} == {0.25}


def test_without_tests_nothing_is_trained_for_the_rule(tmp_path):
    train = Trainer()
    study = ladder(tmp_path / "s", carried=Carried(("small", "middle"), tests=()))
    _, tunings = learning_rates(study, tmp_path / "out", make_run, train)
    assert {run.config["size"] for run in train.trials} == {"pico", "nano"}
    assert tunings["large"].cells["norm"].trials == ()


def test_a_plan_has_a_rate_for_every_size_before_anything_is_tuned(tmp_path):
    study = ladder(tmp_path / "s")
    assert rates_at(provisional(study, {}), "large")["norm"] == (1e-3, None)
    prepared = prepare(study, out=tmp_path / "out")
    assert prepared.tuning_runs == 2 * 3 + 2 * 3 + 2 * 3


class Diverging(Trainer):
    """Final runs of the norm at the large size diverge above a rate."""

    def __init__(self, largest):
        super().__init__()
        self._largest = largest

    def _result(self, record):
        done, config = super()._result(record), record.run.config
        if config["test"] and config["size"] == "micro" and config["lr"] > self._largest:
            return dataclasses.replace(done, status="diverged", metrics={})
        return done


def test_a_rate_at_which_a_final_run_diverges_is_halved_and_known_later(tmp_path):
    study = ladder(tmp_path / "s", carried=dataclasses.replace(RULE, tests=(), halvings=2))
    tuned, tunings = learning_rates(study, tmp_path / "out", make_run, Diverging(1.5e-3))
    assert rates_at(tuned, "large") == {"softmax": (1e-3, None), "norm": (1e-3, None)}
    assert tunings["large"].cells["norm"].diverged == (4e-3, 2e-3)
    assert tunings["large"].cells["softmax"].diverged == ()
    again = Diverging(1.5e-3)
    tuned, _ = learning_rates(study, tmp_path / "out", make_run, again)
    assert rates_at(tuned, "large")["norm"] == (1e-3, None)
    assert {run.config["lr"] for run in again.asked} == {1e-3}, "the rates that diverged are not tried again"


def test_a_rate_is_halved_no_more_often_than_allowed(tmp_path):
    study = ladder(tmp_path / "s", carried=dataclasses.replace(RULE, halvings=1))
    tuned, tunings = learning_rates(study, tmp_path / "out", make_run, Diverging(1e-4))
    assert rates_at(tuned, "large") == {"softmax": (5e-4, None), "norm": (2e-3, None)}
    assert {trial.rate for trial in tunings["large"].cells["norm"].trials} == {2e-3, 4e-3, 8e-3}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Carried(()), "tuple of names"),
        (lambda: Carried("17m"), "tuple of names"),
        (lambda: Carried(("17m",)), "rates of 17m alone do not say how they change with the width"),
        (lambda: Carried(("a", "b"), exponent=float("nan")), "a finite number such as 1, got nan"),
        (lambda: Carried(("a", "b"), tests=(0.5, 2.0)), "with 1 among them"),
        (lambda: Carried(("a", "b"), tests=(1.0, 1.0)), "different positive factors"),
        (lambda: Carried(("a", "b"), tests=(1.0, float("inf"))), "different positive factors"),
        (lambda: Carried(("a", "b"), halvings=-1), "halvings is 0 or a count such as 2, got -1"),
        (lambda: Carried(("a", "b"), seeds=(7, 7)), "the test of carried rates has seed 7 twice"),
    ],
)
def test_a_rule_that_cannot_work_is_one_clear_error(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_the_rule_needs_searched_experiments_with_the_same_cells(tmp_path):
    with pytest.raises(InputError, match="takes its learning rates from 'tiny', which is no experiment"):
        ladder(tmp_path / "s", carried=Carried(("tiny", "middle")))
    with pytest.raises(InputError, match="takes its learning rates from 'large', which is no experiment"):
        ladder(tmp_path / "s", carried=Carried(("small", "large")))
    study = ladder(tmp_path / "s")
    large = study.experiments[2]
    other = dataclasses.replace(large.cells[1], settings={"attention": ("exp/rms",)})
    changed = dataclasses.replace(large, cells=(large.cells[0], other))
    with pytest.raises(InputError, match="no cell 'norm' with the same attention"):
        dataclasses.replace(study, experiments=(*study.experiments[:2], changed))


def test_final_seeds_are_none_of_the_test(tmp_path):
    study = ladder(tmp_path / "s")
    with pytest.raises(InputError, match=r"uses seed 1 for tuning and for its result"):
        dataclasses.replace(study.experiments[2], tune=Carried(("small", "middle"), seeds=(1,)))


def test_tasks_need_the_models_of_final_runs(tmp_path):
    large = ladder(tmp_path / "s", carried=dataclasses.replace(RULE, halvings=1)).experiments[2]
    with pytest.raises(InputError, match="tasks, which need the models of its final runs, and halvings=1"):
        dataclasses.replace(large, tasks=Tasks(("lines_32",)))


def test_two_sizes_of_one_width_say_nothing_about_the_width(tmp_path):
    study = ladder(tmp_path / "s")
    small = dataclasses.replace(study.experiments[0], common={"device": "cpu", "size": "nano"})
    same = dataclasses.replace(study, experiments=(small, *study.experiments[1:]))
    with pytest.raises(InputError, match="two models of width 128 do not say"):
        prepare(same, out=tmp_path / "out")


def test_cells_of_two_widths_are_an_error_before_anything_is_trained(tmp_path):
    """It was one only after both smaller sizes had been searched."""
    study = ladder(tmp_path / "s")
    large = study.experiments[2]
    wider = dataclasses.replace(large.cells[1], settings={**large.cells[1].settings, "size": "mini"})
    mixed = dataclasses.replace(large, cells=(large.cells[0], wider))
    with pytest.raises(InputError, match="experiment 'large' has models of widths 256, 384"):
        prepare(dataclasses.replace(study, experiments=(*study.experiments[:2], mixed)), out=tmp_path / "out")


def test_a_larger_size_with_fewer_cells_follows_the_same_rule(tmp_path):
    """Else `--only`, or a largest size that only some cells are trained at, would change its rates."""
    rates = {
        "small": {"softmax": 4e-3, "norm": 4e-3, "gate": 4e-3},
        "middle": {"softmax": 4e-3, "norm": 2e-3},
    }
    tunings = {
        name: Tuning(
            metric="validation_loss",
            source="",
            cells={cell: CellTuning(rate=rate, trials=(), subject="") for cell, rate in of.items()},
        )
        for name, of in rates.items()
    }
    study = ladder(tmp_path / "s")
    large = study.experiments[2]
    for cells in (large.cells, large.cells[:1], large.cells[1:]):
        fewer = dataclasses.replace(large, cells=cells, baseline=cells[0].name)
        rule = rule_for(study, fewer, RULE, tunings)
        assert rule.exponent == 0, "the lower of 0 and 1"
