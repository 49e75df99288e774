"""Learning rates: the grid grows towards the best, the choice is kept and used again."""

import dataclasses

import pytest
from tests.unit.study.making import make_study

from maclaurin import InputError, MaclaurinError
from maclaurin.study import Tasks, Tune
from maclaurin.study.design import TUNING_SEED
from maclaurin.study.plan_runs import resolved, waiting
from maclaurin.study.run_record import Trial
from maclaurin.study.tune import FILE, Search, TunedFile, known_rates, learning_rates, subject

RATES = Tune(rates=(1e-3, 2e-3, 4e-3))


def search(loss, tune=RATES):
    found = Search(tune)
    while trials := found.next_trials():
        for rate, seed in trials:
            value = loss(rate) if seed == TUNING_SEED else loss(rate, seed)
            status = "diverged" if value is None else "finished"
            found.add(Trial(rate=rate, seed=seed, value=value, status=status, key=f"{rate} {seed}"))
    return found


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (2e-3, [1e-3, 2e-3, 4e-3]),
        (16e-3, [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]),
        (0.5e-3, [0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3]),
    ],
)
def test_the_grid_is_extended_until_the_best_has_neighbours_on_both_sides(best, tried):
    found = search(lambda rate: abs(rate - best))
    assert found.best == best
    assert sorted(found.trials) == pytest.approx(tried)
    assert not found.is_on_edge


def test_a_rate_that_diverges_is_worst_and_all_diverging_look_below():
    found = search(lambda rate: None if rate > 1e-3 else rate)
    assert found.best < 1e-3
    nothing = search(lambda rate: None)
    assert min(nothing.trials) < 1e-4
    assert len(nothing.trials) == RATES.most


def test_a_search_without_an_end_stops_at_the_limit_and_says_so():
    found = search(lambda rate: -rate)
    assert len(found.trials) == RATES.most
    assert found.tuning("s").on_edge


def test_the_two_best_rates_are_confirmed_by_further_seeds():
    """With one seed 2e-3 looks best; over three seeds 4e-3 is, whose neighbour 8e-3 is tried then."""
    first = {1e-3: 3.0, 2e-3: 2.50, 4e-3: 2.51, 8e-3: 2.9}
    found = search(
        lambda rate, seed=None: first[rate] if seed is None else {2e-3: 2.7, 4e-3: 2.5, 8e-3: 2.9}[rate],
        dataclasses.replace(RATES, confirm=(7, 8)),
    )
    assert found.best == 4e-3
    assert {rate: len(trials) for rate, trials in found.trials.items()} == {
        1e-3: 1,
        2e-3: 3,
        4e-3: 3,
        8e-3: 1,
    }
    assert not found.is_on_edge


def test_a_seed_that_confirms_is_no_seed_of_the_result():
    with pytest.raises(InputError, match="tune has seed 7 twice"):
        Tune(rates=(1e-3, 2e-3), seeds=(7,), confirm=(7,))
    with pytest.raises(InputError, match="seed 1 for tuning and for its result"):
        make_study(seeds=(0, 1), tune=Tune(rates=(1e-3, 2e-3), confirm=(1,)))


def test_accuracies_are_chosen_upwards():
    found = search(
        lambda rate: 1 - abs(rate - 2e-3), dataclasses.replace(RATES, metric="validation_accuracy")
    )
    assert found.best == 2e-3


# ------------------------------------------------------------------------------------- a study

BEST = {"exp/sum": 2e-3, "exp/l2": 8e-3}


def make_run(experiment, cell, keys):
    return waiting(resolved({**experiment.settings(cell), **keys}))


class Trainer:
    """Gives each run a validation loss from a formula; remembers what was asked."""

    def __init__(self, metric="validation_loss"):
        self.asked, self._metric = [], metric

    def __call__(self, plan):
        self.asked += [record.run for record in plan.values()]
        return {r.key: self._result(r) for r in plan.values()}

    def _result(self, record):
        loss = abs(record.run.config["lr"] - BEST[record.run.attention[0]])
        done = dataclasses.replace(record, status="finished", metrics={self._metric: loss}, seconds=1.0)
        return dataclasses.replace(done, provenance={"content": "this text"})


@pytest.fixture
def study(tmp_path):
    folder = tmp_path / "studies" / "s"
    folder.mkdir(parents=True)
    (folder / "study.py").write_text("")
    return dataclasses.replace(make_study(seeds=(0, 1, 2), tune=RATES), file=folder / "study.py")


def rates(study):
    return {cell.name: cell.settings["lr"] for cell in study.experiments[0].cells}


def test_every_cell_gets_its_own_rate_from_runs_with_other_seeds(study, tmp_path):
    train = Trainer()
    tuned, tunings = learning_rates(study, tmp_path / "out", make_run, train)
    assert rates(tuned) == {"softmax": 2e-3, "norm": 8e-3}
    assert tuned.experiments[0].tune is None
    assert {run.seed for run in train.asked} == {TUNING_SEED}
    assert {run.config["test"] for run in train.asked} == {False}
    cell = tunings["text"].cells["norm"]
    assert [trial.rate for trial in cell.trials] == [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    assert tunings["text"].source == "this study"
    assert tunings["text"].data == ("this text",)
    kept = TunedFile.read(tmp_path / "out" / FILE)
    assert set(kept.runs) == {trial.key for c in tunings["text"].cells.values() for trial in c.trials}
    assert all(not record.curves for record in kept.runs.values())


def test_rates_that_were_tuned_before_are_used_again(study, tmp_path):
    out = tmp_path / "out"
    learning_rates(study, out, make_run, Trainer(), retune=True)
    assert (study.file.parent / FILE).is_file()
    assert not (out / FILE).exists()
    train = Trainer()
    tuned, tunings = learning_rates(study, out, make_run, train)
    assert train.asked == []
    assert rates(tuned) == {"softmax": 2e-3, "norm": 8e-3}
    assert tunings["text"].source.endswith("studies/s/tuned.json")
    learning_rates(study, out, make_run, train, retune=True)
    assert len(train.asked) == 8


def test_a_cell_that_changed_is_tuned_again_and_the_others_are_not(study, tmp_path):
    learning_rates(study, tmp_path / "out", make_run, Trainer(), retune=True)
    e = study.experiments[0]
    changed = dataclasses.replace(e.cells[1], settings={**e.cells[1].settings, "weight_decay": 0.0})
    longer = dataclasses.replace(e.cells[0], settings={**e.cells[0].settings, "steps": 7})
    edited = dataclasses.replace(study, experiments=(dataclasses.replace(e, cells=(longer, changed)),))
    assert list(known_rates(edited, tmp_path / "out").missing["text"]) == ["norm"]
    train = Trainer()
    _, tunings = learning_rates(edited, tmp_path / "out", make_run, train)
    assert {run.attention for run in train.asked} == {("exp/l2",)}
    assert "and this study" in tunings["text"].source


def test_an_experiment_with_another_metric_takes_the_same_rates(study, tmp_path):
    learning_rates(study, tmp_path / "out", make_run, Trainer(), retune=True)
    asked = dataclasses.replace(
        study.experiments[0], name="lines", metric="task:lines_32", tasks=Tasks(("lines_32",))
    )
    both = dataclasses.replace(study, experiments=(*study.experiments, asked))
    train = Trainer()
    tuned, tunings = learning_rates(both, tmp_path / "out", make_run, train)
    assert train.asked == []
    assert [cell.settings["lr"] for cell in tuned.experiments[1].cells] == [2e-3, 8e-3]
    assert tunings["lines"].cells == tunings["text"].cells


def test_a_tuning_run_without_the_metric_is_an_error(study, tmp_path):
    with pytest.raises(MaclaurinError, match="finished without validation_loss"):
        learning_rates(study, tmp_path / "out", make_run, Trainer(metric="loss"))


def test_a_tuning_run_that_crashed_stops_the_study_and_chooses_nothing(study, tmp_path):
    """A crash counted as a rate that diverged, and the choice was kept."""

    class Crashing(Trainer):
        def _result(self, record):
            done = super()._result(record)
            if record.run.config["lr"] == 2e-3 and record.run.attention == ("exp/sum",):
                return dataclasses.replace(done, status="crashed", message="error: no space left", metrics={})
            return done

    with pytest.raises(MaclaurinError, match=r"softmax, lr 0\.002 .* no space left .*--retry"):
        learning_rates(study, tmp_path / "out", make_run, Crashing())
    assert not (tmp_path / "out" / FILE).exists()


def test_nothing_to_tune_is_an_error_only_where_it_was_asked_for(tmp_path):
    plain = make_study()
    assert learning_rates(plain, tmp_path, make_run, Trainer()) == (plain, {})
    with pytest.raises(InputError, match="nothing to tune"):
        learning_rates(plain, tmp_path, make_run, Trainer(), retune=True)


def test_a_damaged_file_is_an_error(study, tmp_path):
    (study.file.parent / FILE).write_text("{}")
    with pytest.raises(InputError, match="is not a file of tuned learning rates"):
        learning_rates(study, tmp_path, make_run, Trainer())


def test_steps_and_seeds_are_no_part_of_what_a_rate_is_tuned_for(study):
    e = study.experiments[0]
    longer = dataclasses.replace(
        e.cells[0], settings={**e.cells[0].settings, "steps": 7, "lr": 3.0, "seed": 9}
    )
    assert subject(e, longer) == subject(e, e.cells[0]) != subject(e, e.cells[1])
