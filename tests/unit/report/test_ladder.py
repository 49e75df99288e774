"""A ladder of sizes: lines with a known slope, ranks that swap, and what is said about them."""

import dataclasses
import json
import math

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats
from tests.unit.report.synthetic import experiment, study

from maclaurin.report import ladder_chart, write_report
from maclaurin.report.analysis import analyse
from maclaurin.report.effect_tables import ladder_slopes_table, ladder_tokens_table
from maclaurin.report.ladder import GROWS, SHRINKS, TURNS, UNDECIDED, Ladder
from maclaurin.report.outcome import Outcome
from maclaurin.report.sentences import ladder_findings, ladder_limits, tuning_finding
from maclaurin.report.training_tables import tuning_table
from maclaurin.study.run_record import CellTuning, Trial, Tuning, read_study, write_study

SIZES = {"small": 1e6, "middle": 4e6, "large": 16e6}  # two doublings from one to the next
NOISE = np.random.default_rng(0).normal(size=(3, 4, 8)) * 0.004


def rung(name, values, parameters, **options):
    """One experiment of a ladder; its runs have this number of parameters."""
    made, runs = experiment(values, name=name, **options)
    sized = tuple(
        (label, dataclasses.replace(run, metrics={**run.metrics, "parameters": parameters}))
        for label, run in runs
    )
    return made, sized


def values_at(place, gaps, seeds=4):
    """A baseline that falls with size, and cells at these gaps from it, with the seeds' noise."""
    base = [4.0 - 0.2 * place + 0.05 * seed for seed in range(seeds)]
    cells = {"base": base}
    for number, (name, gap) in enumerate(gaps.items()):
        cells[name] = [base[seed] + gap[place] + NOISE[place, seed, number] for seed in range(seeds)]
    return cells


def made(gaps, seeds=4, sizes=SIZES, **options):
    """A study with a ladder of these gaps: cell → gap at each size."""
    rungs = [
        rung(name, values_at(place, gaps, seeds), size, **options)
        for place, (name, size) in enumerate(sizes.items())
    ]
    return dataclasses.replace(study(*rungs), ladder=tuple(sizes))


def ladder(gaps, **options) -> Ladder:
    found = analyse([(made(gaps, **options), "")])[0].ladder
    assert found is not None
    return found


# -------------------------------------------------------------------------------------- the lines


def test_a_known_slope_is_found_within_its_interval():
    trend = ladder({"far": (0.1, 0.2, 0.3), "near": (0.1, 0.1, 0.1)}).trends["far"]
    low, high = trend.line.slope.bounds
    assert low < 0.05 < high  # 0.1 from one size to the next, which is two doublings
    assert high - low < 0.01
    assert trend.by_seed.value == pytest.approx(trend.line.slope.value)
    assert trend.direction == GROWS


def test_the_line_is_least_squares_over_all_seeds_with_errors_for_unequal_spreads():
    found = ladder({"far": (0.1, 0.25, 0.3)})
    gaps = [
        cell.values[seed] - base.values[seed]
        for cell, base in zip(found.runs("far"), found.runs("base"), strict=True)
        for seed in cell.values
    ]
    x = np.repeat(np.log2(list(SIZES.values())), 4)
    fit = sm.OLS(gaps, sm.add_constant(x)).fit(cov_type="HC3", use_t=True)
    line = found.trends["far"].line
    assert line.slope.value == pytest.approx(fit.params[1])
    assert line.slope.bounds == pytest.approx(tuple(fit.conf_int()[1]))
    assert found.trends["far"].p == pytest.approx(fit.pvalues[1])  # one cell: nothing to correct for
    band = fit.get_prediction([[1.0, x[0]]]).conf_int()[0]
    assert line.at([x[0]])[0][1:] == pytest.approx(tuple(band))


def test_slopes_are_corrected_for_the_number_of_cells():
    alone = ladder({"a": (0.1, 0.104, 0.109)}).trends["a"].p
    beside = ladder({"a": (0.1, 0.104, 0.109), "b": (0.1, 0.1, 0.1)}).trends["a"].p
    assert beside == pytest.approx(2 * alone)


def test_a_cell_that_diverged_counts_in_the_correction_of_the_slopes():
    """Else a run that diverged would make the slopes of the other cells more certain."""
    gaps = {"a": (0.1, 0.104, 0.109), "wild": (0.1, 0.2, 0.3)}
    alone = ladder({"a": gaps["a"]}).trends["a"].p
    found = ladder(gaps, statuses={("wild", 0): "diverged"})
    assert found.trends["a"].p == pytest.approx(2 * alone)
    assert found.trends["wild"].p is None


@pytest.mark.parametrize(
    ("gap", "direction"),
    [
        ((0.3, 0.2, 0.1), SHRINKS),
        ((-0.3, -0.2, -0.1), SHRINKS),
        ((-0.1, -0.2, -0.3), GROWS),
        ((-0.1, 0.0, 0.1), TURNS),
        ((0.0, 0.1, 0.2), GROWS),
        ((0.1, 0.1, 0.1), UNDECIDED),
    ],
)
def test_the_direction_is_about_the_distance_to_the_baseline(gap, direction):
    assert ladder({"cell": gap}).trends["cell"].direction == direction


def test_what_a_seed_does_to_all_cells_alike_widens_no_interval():
    trend = ladder({"cell": (0.1, 0.2, 0.3)}).trends["cell"]
    low, high = trend.line.slope.bounds
    assert high - low < 0.01  # seeds of the baseline are 0.15 apart


def test_the_exponent_of_a_power_law_is_found():
    rungs = [
        rung(name, {"base": [5 * size**-0.07 * factor for factor in (0.999, 1.0, 1.001)]}, size)
        for name, size in SIZES.items()
    ]
    found = Ladder([Outcome(study(each), each[0]) for each in rungs])
    slope = found.powers["base"].slope
    assert slope.value == pytest.approx(-0.07)
    assert slope.bounds[0] < -0.07 < slope.bounds[1]


def test_rungs_are_ordered_by_size_whatever_the_declaration():
    whole = made({"cell": (0.1, 0.2, 0.3)})
    turned = dataclasses.replace(whole, ladder=tuple(reversed(whole.ladder)))
    assert [each.name for each in analyse([(turned, "")])[0].ladder.rungs] == list(SIZES)


def test_one_seed_gives_lines_and_no_conclusion():
    found = ladder({"cell": (0.1, 0.2, 0.3)}, seeds=1)
    trend = found.trends["cell"]
    assert trend.line.slope.value == pytest.approx(0.05, abs=0.01)
    assert (trend.p, trend.line.slope.bounds, trend.direction) == (None, None, UNDECIDED)
    assert math.isnan(trend.line.at([20.0])[0][1])
    assert ladder_chart.ladder(found).svg.startswith("<svg")


def test_a_run_that_diverged_leaves_its_cell_without_a_line():
    found = ladder({"wild": (0.1, 0.2, 0.3), "calm": (0.1, 0.2, 0.3)}, statuses={("wild", 0): "diverged"})
    assert found.trends["wild"].line is None
    assert found.trends["calm"].direction == GROWS
    assert "wild (no line)" in ladder_findings(found)[1]
    assert ladder_chart.ladder(found).pdf.startswith(b"%PDF")


def test_two_sizes_are_not_enough_for_a_line():
    two = {name: SIZES[name] for name in ("small", "large")}
    found = ladder({"cell": (0.1, 0.2)}, sizes=two)
    assert not found.has_lines
    assert found.trends["cell"].line is None
    assert ladder_findings(found) == ["The ladder has results of small and large; a line needs three sizes."]
    assert analyse([(made({"cell": (0.1,)}, sizes={"small": 1e6}), "")])[0].ladder.steps == ()


# -------------------------------------------------------------------------------------- the ranks


def test_a_swap_is_decided_where_both_orders_are():
    found = ladder({"a": (0.1, 0.1, 0.3), "b": (0.2, 0.2, 0.2), "c": (0.5, 0.5, 0.5)})
    same, other = found.steps
    assert (same.tau, same.pairs, same.sure, same.swaps) == (1.0, 6, 6, ())
    (swap,) = other.swaps
    assert (swap.before, swap.after, swap.is_decided) == ("a", "b", True)
    means = [[cell.spread.mean for cell in each.outcome.cells.values()] for each in found.rungs[1:]]
    assert other.tau == pytest.approx(stats.kendalltau(*means)[0])
    assert "Decided changes of place: b passes a (middle to large)." in ladder_findings(found)[2]


def test_a_swap_within_the_noise_is_undecided():
    one, other = [1.0, 1.2, 1.1], [1.01, 1.19, 1.12]
    rungs = [
        rung(name, {"base": [2.0, 2.1, 2.2], "a": first, "b": second}, size)
        for (name, size), (first, second) in zip(
            SIZES.items(), ((one, other), (one, other), (other, one)), strict=True
        )
    ]
    whole = dataclasses.replace(study(*rungs), ladder=tuple(SIZES))
    found = analyse([(whole, "")])[0].ladder
    (swap,) = found.steps[1].swaps
    assert (swap.before, swap.after, swap.is_decided) == ("a", "b", False)
    words = "No change of place is decided; pairs whose means change places: b passes a (middle to large)."
    assert words in ladder_findings(found)[2]


def test_a_better_accuracy_is_ahead():
    rungs = [
        rung(name, {"base": [0.5, 0.51], "cell": [good, good + 0.01]}, size, metric="accuracy")
        for (name, size), good in zip(SIZES.items(), (0.6, 0.4, 0.4), strict=True)
    ]
    whole = dataclasses.replace(study(*rungs), ladder=tuple(SIZES))
    (swap,) = analyse([(whole, "")])[0].ladder.steps[0].swaps
    assert (swap.before, swap.after) == ("cell", "base")


# ---------------------------------------------------------------------------- sentences and files


def test_findings_say_what_is_decided_and_what_is_not():
    found = ladder({"far": (0.1, 0.2, 0.3), "near": (0.1, 0.1, 0.1)})
    sizes, gaps, ranks = ladder_findings(found)
    assert sizes.startswith("Over 1M, 4M and 16M parameters (819k tokens each), test loss goes from 4.075 to")
    assert "grows for far (+0.05" in gaps
    assert "it is undecided for near (" in gaps
    assert "Kendall's tau is" in ranks
    limits = ladder_limits(found)
    assert "Three points do not show whether a line bends" in limits
    assert "fewer tokens per parameter (0.82 → 0.2 → 0.051)" in limits


def test_the_table_has_a_row_per_cell_and_a_verdict():
    table = ladder_slopes_table(ladder({"far": (0.1, 0.2, 0.3), "near": (0.1, 0.1, 0.1)}))
    assert [(row[0].text, row[4].text) for row in table.rows] == [("far", GROWS), ("near", UNDECIDED)]


@pytest.mark.slow
def test_page_tables_and_one_figure_show_it_from_a_file_of_records(tmp_path):
    write_study(made({"far": (0.1, 0.2, 0.3), "near": (0.1, 0.1, 0.1)}), tmp_path / "records.json")
    assert read_study(tmp_path).ladder == tuple(SIZES)
    report = write_report([tmp_path], tmp_path / "report", pdf=True)
    page = report.page.read_text()
    assert "<h2>The ladder</h2>" in page
    assert "The same cells over all experiments" not in page
    assert "## The ladder" in (tmp_path / "report" / "tables.md").read_text()
    assert sorted(file.name for file in (tmp_path / "report" / "figures").glob("*ladder*")) == [
        "mini-ladder.pdf",
        "mini-ladder.svg",
    ]


def test_differences_during_training_are_paired_by_seed_and_evaluation():
    whole = made({"far": (0.1, 0.2, 0.3)})
    curved = {
        key: dataclasses.replace(
            run, curves={"validation_loss": ((200, run.metrics["loss"] + 1.0), (400, run.metrics["loss"]))}
        )
        for key, run in whole.runs.items()
    }
    found = analyse([(dataclasses.replace(whole, runs=curved), "")])[0].ladder
    during = found.during(found.rungs[0], "far")
    assert list(during) == [409_600, 819_200]  # half of the tokens, and all
    assert during[409_600].value == pytest.approx(found.rungs[0].outcome.differences["far"].value)
    table = ladder_tokens_table(found)
    assert [row[1].text for row in table.rows] == list(SIZES)
    assert ladder_tokens_table(ladder({"far": (0.1, 0.2, 0.3)})) is None


def test_older_records_have_no_ladder(tmp_path):
    file = tmp_path / "records.json"
    write_study(made({"cell": (0.1, 0.2, 0.3)}), file)
    data = json.loads(file.read_text())
    del data["ladder"]
    file.write_text(json.dumps(data))
    assert read_study(file).ladder == ()
    assert analyse([(read_study(file), "")])[0].ladder is None


# ------------------------------------------------------------------------------ rates from a rule


def trial(rate, value):
    return Trial(rate=rate, seed=0, value=value, status="finished", key=f"{rate}", seconds=30.0)


def test_rates_from_a_rule_are_called_so_and_tested_by_what_was_tried():
    record, runs = experiment({"a": [1.0, 1.1], "b": [2.0, 2.1], "c": [3.0, 3.1]})
    cells = {
        "a": CellTuning(rate=1e-3, trials=(trial(5e-4, 2.0), trial(1e-3, 1.9), trial(2e-3, 2.0)), subject=""),
        "b": CellTuning(rate=1e-3, trials=(trial(5e-4, 1.8), trial(1e-3, 1.9)), subject=""),
        "c": CellTuning(rate=5e-4, trials=(), subject=""),
    }
    tuning = Tuning(metric="validation_loss", source="this study", cells=cells, rule="half of another")
    record = dataclasses.replace(record, tuning=tuning)
    outcome = Outcome(study((record, runs)), record)
    assert tuning_finding(outcome) == (
        "lm: learning rates (0.0005 to 0.001) come from a rule: half of another. Of the 2 cells with other "
        "rates tried (1 seed), a is best at the rule's rate; b is better at 0.0005 by 0.100."
    )
    rows = {row[0].text: [str(entry) for entry in row] for row in tuning_table(outcome).rows}
    assert rows["b"][1] == "0.001 by the rule; 0.0005 is better here"
    assert rows["c"][1:] == ["0.0005", "–", "–", "–", "–", "0 rates", "–"]


def test_a_test_of_a_rule_that_diverged_is_the_worst_for_accuracies_too():
    """Its infinite value was the best accuracy of all, and a gain of infinity stood on the page."""
    record, runs = experiment({"a": [0.5, 0.6], "b": [0.4, 0.5]}, metric="accuracy")
    diverged = dataclasses.replace(trial(2e-3, None), status="diverged")
    cells = {
        "a": CellTuning(rate=1e-3, trials=(trial(5e-4, 0.5), trial(1e-3, 0.6), diverged), subject=""),
        "b": CellTuning(rate=2e-3, trials=(trial(1e-3, 0.6), diverged), subject=""),
    }
    tuning = Tuning(metric="validation_accuracy", source="this study", cells=cells, rule="half of another")
    outcome = Outcome(study((record, runs)), dataclasses.replace(record, tuning=tuning))
    assert tuning_finding(outcome).endswith(
        "a is best at the rule's rate; b is better at 0.001, as a run diverged at the rule's rate."
    )
    rows = {row[0].text: str(row[1]) for row in tuning_table(outcome).rows}
    assert rows["a"] == "0.001"
    assert rows["b"] == "0.002 by the rule; 0.001 is better here"


def test_a_rate_that_was_halved_because_a_run_diverged_is_called_so():
    record, runs = experiment({"a": [1.0, 1.1], "b": [2.0, 2.1]})
    cells = {
        "a": CellTuning(rate=1e-3, trials=(), subject=""),
        "b": CellTuning(rate=25e-5, trials=(), subject="", diverged=(1e-3, 5e-4)),
    }
    tuning = Tuning(metric="validation_loss", source="this study", cells=cells, rule="half of another")
    outcome = Outcome(study((record, runs)), dataclasses.replace(record, tuning=tuning))
    assert "Final runs diverged at that rate, so that it was halved: b (0.00025)." in tuning_finding(outcome)
    rows = {row[0].text: str(row[1]) for row in tuning_table(outcome).rows}
    assert rows["b"] == "0.00025 a final run diverged at 0.001 and 0.0005"
