"""What parts bring and which need each other, from the runs of an experiment."""

import dataclasses

import numpy as np
import pytest
from scipy import stats
from tests.unit.report.synthetic import experiment, study

from maclaurin.report import study_charts as charts
from maclaurin.report import write_report
from maclaurin.report.analysis import analyse
from maclaurin.report.contributions import Contributions, contributions
from maclaurin.report.outcome import Outcome
from maclaurin.report.sentences import interaction_sentences, waterfall_finding
from maclaurin.study import waterfall
from maclaurin.study.run_record import read_study, write_study

WAY = waterfall("From none to both", ("order 2", "row sum"), lambda on: " + ".join(sorted(on)) or "none")
#: each part alone helps a little, both together much
VALUES = {
    "none": [3.0, 3.2, 2.9, 3.1],
    "order 2": [2.91, 3.1, 2.8, 3.02],
    "row sum": [2.8, 3.01, 2.7, 2.89],
    "order 2 + row sum": [2.41, 2.6, 2.29, 2.5],
}


def record(values=None):
    made, runs = experiment(values or VALUES)
    return dataclasses.replace(made, waterfalls=(WAY,)), runs


def found(values=None) -> Contributions:
    made, runs = record(values)
    return Contributions(Outcome(study((made, runs)), made), WAY)


def test_a_contribution_is_taken_seed_by_seed_with_students_interval():
    cells = {name: np.array(row) for name, row in VALUES.items()}
    first = cells["order 2"] - cells["none"]
    last = cells["order 2 + row sum"] - cells["row sum"]
    by_seed = (first + last) / 2
    part = found().parts[0]
    expected = stats.t.interval(0.95, 3, by_seed.mean(), stats.sem(by_seed))
    assert part.size.value == pytest.approx(by_seed.mean())
    assert part.size.bounds == pytest.approx(expected)


def test_the_parts_add_up_to_the_gap():
    way = found()
    assert sum(part.size.value for part in way.parts) == pytest.approx(way.gap.value)
    assert way.gap.value == pytest.approx(-0.6)


def test_what_a_seed_does_to_all_cells_alike_widens_no_interval():
    shifted = {name: [v + 10.0 * s for s, v in enumerate(row)] for name, row in VALUES.items()}
    for one, other in zip(found().parts, found(shifted).parts, strict=True):
        assert one.size.bounds == pytest.approx(other.size.bounds, abs=1e-6)


def test_parts_that_need_each_other_are_named_with_their_numbers():
    (effect,) = found().interactions
    assert effect.alone.value == pytest.approx(-0.2, abs=0.01)
    assert effect.beside.value == pytest.approx(-0.508, abs=0.01)
    (sentence,) = interaction_sentences(found())
    assert sentence.startswith(
        "Order 2 and row sum help each other: row sum contributes −0.200 without order 2"
    )


def test_parts_that_replace_each_other_are_named_so():
    values = {**VALUES, "order 2 + row sum": [2.79, 3.0, 2.69, 2.89]}
    (sentence,) = interaction_sentences(found(values))
    assert "stand in for each other" in sentence


def test_without_a_sure_interaction_the_page_says_so():
    values = {**VALUES, "order 2 + row sum": [2.6, 2.95, 2.65, 2.79]}
    assert interaction_sentences(found(values)) == [
        "Whether any two parts need or replace each other is undecided: no interaction is significant."
    ]


def test_a_seed_without_all_cells_is_left_out_and_named():
    values = {**VALUES, "row sum": [2.8, 3.01, None, 2.89]}
    way = found(values)
    assert way.seeds == (0, 1, 3)
    assert way.incomplete == {2: ["row sum"]}
    assert way.gap.n == 3


def test_one_seed_concludes_nothing():
    way = found({name: row[:1] for name, row in VALUES.items()})
    assert all(part.p is None and not part.supported for part in way.parts)
    assert interaction_sentences(way) == []
    assert "nothing can be concluded" in waterfall_finding(way)


def test_nothing_finished_draws_nothing():
    made, runs = record({name: [None] for name in VALUES})
    assert contributions(Outcome(study((made, runs)), made)) == []


def test_the_finding_names_the_ends_and_the_sure_parts():
    text = waterfall_finding(found())
    assert "from 3.050 (none) to 2.450 (order 2 + row sum) in test loss, −0.600" in text
    assert "of which row sum −0.354 and order 2 −0.246 (averaged over 2 orders of adding them)." in text


def test_bars_follow_each_other_from_the_first_cell_to_the_last():
    rows = next(iter(charts.waterfall(found()).spec["datasets"].values()))
    assert [row["name"] for row in rows] == ["order 2", "row sum"]
    assert rows[0]["from"] == pytest.approx(3.05, abs=1e-4)
    assert rows[0]["to"] == rows[1]["from"]
    assert rows[1]["to"] == pytest.approx(2.45, abs=1e-4)


@pytest.mark.slow
def test_page_tables_and_figures_show_it_from_a_file_of_records(tmp_path):
    made, runs = record()
    write_study(study((made, runs)), tmp_path / "records.json")
    assert read_study(tmp_path).experiments[0].waterfalls == (WAY,)
    report = write_report([tmp_path], tmp_path / "report", pdf=True)
    page = report.page.read_text()
    assert "The gap, explained" in page
    assert "help each other" in page
    tables = (tmp_path / "report" / "tables.md").read_text()
    assert "### From none to both" in tables
    assert {file.suffix for file in (tmp_path / "report" / "figures").glob("*from-none-to-both*")} == {
        ".svg",
        ".pdf",
    }
    assert any("From none to both" in line for line in analyse([(read_study(tmp_path), "")])[0].findings)
