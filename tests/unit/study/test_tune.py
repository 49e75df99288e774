"""Learning rates: the grid grows towards the best, the choice is kept and used again."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.study.making import make_study

from maclaurin import InputError, MaclaurinError
from maclaurin.study import Tasks, Tune
from maclaurin.study.choose_rates import learning_rates
from maclaurin.study.design import TUNING_SEED
from maclaurin.study.plan_runs import resolved, waiting
from maclaurin.study.run_record import Trial
from maclaurin.study.runner import prepare
from maclaurin.study.tune import FACTOR, RATE, TRADED, Search
from maclaurin.study.tuned_rates import FILE, TunedFile, known_rates, subject

RATES = Tune(rates=(1e-3, 2e-3, 4e-3))


def search(loss, tune=RATES):
    found = Search(tune)
    while trials := found.next_trials():
        for point, seed in trials:
            given = point if tune.factors else point[:1]
            value = loss(*given) if seed == TUNING_SEED else loss(*given, seed)
            status = "diverged" if value is None else "finished"
            key = f"{point} {seed}"
            found.add(
                Trial(rate=point.rate, factor=point.factor, seed=seed, value=value, status=status, key=key)
            )
    return found


def rates_tried(found, factor=1.0):
    return sorted(point.rate for point in found.trials if point.factor == factor)


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
    assert found.best == (best, 1.0)
    assert rates_tried(found) == pytest.approx(tried)
    assert found.tuning("s").factor is None
    assert not found.is_on_edge


def test_a_rate_that_diverges_is_worst_and_all_diverging_look_below():
    found = search(lambda rate: None if rate > 1e-3 else rate)
    assert found.best.rate < 1e-3
    nothing = search(lambda rate: None)
    assert min(rates_tried(nothing)) < 1e-4
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
    assert found.best.rate == 4e-3
    assert {point.rate: len(trials) for point, trials in found.trials.items()} == {
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
    assert found.best.rate == 2e-3


# ---------------------------------------------------------------- the rate of the output projection

BOTH = dataclasses.replace(RATES, factors=(0.25, 0.5, 1.0))


def bowl(rate, factor, best_rate, best_factor, coupling=0.0):
    x, y = math.log2(rate / best_rate), math.log2(factor / best_factor)
    return 3.0 + x * x + y * y + coupling * x * y


def test_the_factor_is_searched_at_the_best_rate_and_then_the_rate_again():
    found = search(lambda rate, factor: bowl(rate, factor, 2e-3, 0.125), BOTH)
    assert found.best == (2e-3, 0.125)
    assert rates_tried(found) == [1e-3, 2e-3, 4e-3]
    assert rates_tried(found, 0.25) == [1e-3, 2e-3]
    assert rates_tried(found, 0.125) == [1e-3, 2e-3, 4e-3]
    assert rates_tried(found, 0.0625) == [2e-3, 4e-3]
    assert (found.tuning("s").rate, found.tuning("s").factor) == (2e-3, 0.125)
    assert found.tuning("s").settings == {"lr": 2e-3, "output_lr": 0.125}
    assert not found.is_on_edge


def test_a_factor_of_one_costs_one_grid_and_two_more():
    found = search(lambda rate, factor: bowl(rate, factor, 2e-3, 1.0), BOTH)
    assert found.best == (2e-3, 1.0)
    # rates; factors 1/4, 1/2 and, beyond the edge, 2; rates with the same rate of the output projections
    assert len(found.trials) == 3 + 3 + 2


def test_the_rate_rises_where_the_output_projections_keep_theirs():
    """Here losses jump where the output projections learn faster than 2e-3, as in the study `scale`."""

    def loss(rate, factor):
        too_fast = max(0.0, math.log2(rate * factor / 2e-3))
        return abs(math.log2(rate / 8e-3)) + 4.0 * too_fast**2 - 0.01 * math.log2(factor)

    assert search(loss, dataclasses.replace(BOTH, rates=(4e-3, 8e-3))).best == (8e-3, 0.25)


@given(
    rate=st.integers(-3, 6), factor=st.integers(-6, 3), coupling=st.floats(-1.5, 1.5),
    first=st.integers(-1, 2), most=st.integers(9, 14),
)  # fmt: skip
def test_a_smooth_minimum_is_found_whatever_its_place(rate, factor, coupling, first, most):
    """And in the end each neighbour of the best was tried and is not better."""
    grid = tuple(1e-3 * 2.0**n for n in range(first, first + 2))
    tune = Tune(rates=grid, factors=(0.25, 0.5, 1.0), most=most)

    def loss(at_rate, at_factor):
        return bowl(at_rate, at_factor, 1e-3 * 2.0**rate, 2.0**factor, coupling)

    found = search(loss, tune)
    best = found.best
    assert len(found.trials) <= 4 * most
    if found.is_on_edge:
        return  # a limit was reached, which the record says
    for direction in (RATE, FACTOR, TRADED):
        for step in (-1, 1):
            assert found.sort_value(best.moved(direction, step)) >= found.sort_value(best)
    if abs(coupling) < 0.5:
        assert math.log2(best.rate / 1e-3) == pytest.approx(rate, abs=1e-3)
        assert math.log2(best.factor) == pytest.approx(factor, abs=1e-3)


@given(st.dictionaries(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), st.floats(0, 9) | st.none()))
def test_any_search_ends_and_tries_nothing_twice(values):
    def loss(rate, factor, seed=None):
        return values.get((round(math.log2(rate / 1e-3)), round(math.log2(factor))), 5.0)

    found = search(loss, dataclasses.replace(BOTH, confirm=(1001,)))
    for trials in found.trials.values():
        assert len({trial.seed for trial in trials}) == len(trials)
    assert found.sort_value(found.best) == min(map(found.sort_value, found.trials))


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ((1.0,), "at least two factors"),
        ((0.25, 0.5), "must contain 1"),
        ((0.1, 1.0), "in factors of two"),
        ((0.0, 1.0), "positive numbers"),
        (tuple(2.0**n for n in range(-9, 1)), "most=9 allows fewer"),
    ],
)
def test_a_grid_of_factors_that_cannot_work_is_one_clear_error(factors, message):
    with pytest.raises(InputError, match=message):
        Tune(rates=(1e-3, 2e-3), factors=factors)


def test_a_cell_that_sets_the_factor_cannot_have_it_tuned():
    with pytest.raises(
        InputError, match="tunes the factor of the output projection, but common sets output_lr"
    ):
        dataclasses.replace(
            make_study().experiments[0], common={"device": "cpu", "output_lr": 0.5}, tune=BOTH
        )


# ------------------------------------------------------------------------------------- a study

BEST = {"exp/sum": 2e-3, "exp/l2": 8e-3}
BEST_FACTOR = {"exp/sum": 0.25, "exp/l2": 1.0}


#: times the best rate of size nano
RATE_AT = {"nano": 1.0, "pico": 2.0, "micro": 0.5, "mini": 0.5}


def make_run(experiment, cell, keys):
    return waiting(resolved({**experiment.settings(cell), **keys}))


class Trainer:
    """Gives each run a validation loss from a formula; remembers what was asked."""

    def __init__(self, metric="validation_loss"):
        self.asked, self._metric = [], metric

    def __call__(self, next_runs):
        results = {}
        while plan := next_runs(results):
            self.asked += [record.run for record in plan.values()]
            results |= {r.key: self._result(r) for r in plan.values()}
        return results

    @property
    def trials(self):
        """The runs that choose a rate, which leave the test data alone."""
        return [run for run in self.asked if not run.config["test"]]

    def _result(self, record):
        config = record.run.config
        best = BEST[record.run.attention[0]] * RATE_AT[config["size"]]
        loss = bowl(config["lr"], config["output_lr"], best, BEST_FACTOR[record.run.attention[0]])
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
    assert {run.seed for run in train.trials} == {TUNING_SEED}
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
    assert len(train.trials) == 8


def test_the_final_runs_of_a_cell_begin_while_others_are_still_searched(study, tmp_path):
    train = Trainer()
    tuned, _ = learning_rates(study, tmp_path / "out", make_run, train)
    first_final = next(i for i, run in enumerate(train.asked) if run.config["test"])
    last_trial = max(i for i, run in enumerate(train.asked) if not run.config["test"])
    assert first_final < last_trial
    e = tuned.experiments[0]
    finals = {make_run(e, cell, {"seed": seed}).key for cell in e.cells for seed in e.seeds}
    assert {run.key for run in train.asked if run.config["test"]} == finals


def test_the_factor_is_chosen_stored_and_set_with_the_rate(study, tmp_path):
    e = dataclasses.replace(study.experiments[0], tune=BOTH)
    both = dataclasses.replace(study, experiments=(e,))
    learning_rates(study, tmp_path / "out", make_run, Trainer(), retune=True)
    assert set(known_rates(both, tmp_path / "out").missing["text"]) == {"softmax", "norm"}, "rates alone"
    train = Trainer()
    tuned, tunings = learning_rates(both, tmp_path / "out", make_run, train, retune=True)
    chosen = {c.name: (c.settings["lr"], c.settings["output_lr"]) for c in tuned.experiments[0].cells}
    assert chosen == {"softmax": (2e-3, 0.25), "norm": (8e-3, 1.0)}
    assert {trial.factor for trial in tunings["text"].cells["softmax"].trials} == {0.125, 0.25, 0.5, 1.0}
    again = Trainer()
    learning_rates(both, tmp_path / "out", make_run, again)
    assert again.asked == []
    assert known_rates(study, tmp_path / "out").missing, "rates for other factors are not rates for one"


def test_a_dry_run_counts_the_runs_at_the_rates_that_are_known(study, tmp_path):
    """It planned every tuned cell at the first rate of the grid, so that no finished run was found."""
    learning_rates(study, tmp_path / "out", make_run, Trainer(), retune=True)
    e = study.experiments[0]
    other = dataclasses.replace(e.cells[1], name="other", settings={"attention": ("exp/rms",)})
    more = dataclasses.replace(study, experiments=(dataclasses.replace(e, cells=(*e.cells, other)),))
    planned = prepare(more, out=tmp_path / "out")
    lr = {label.cell: record.run.config["lr"] for label, record in planned.plan.items()}
    assert lr == {"softmax": 2e-3, "norm": 8e-3, "other": RATES.rates[0]}
    assert planned.tuning_runs == 3


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
