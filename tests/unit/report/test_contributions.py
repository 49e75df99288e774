"""What parts bring and which need each other, from the runs of an experiment."""

import dataclasses

import numpy as np
import pytest
from scipy import stats
from tests.unit.report.synthetic import experiment, study

from maclaurin.report import effect_charts, write_report
from maclaurin.report.analysis import analyse
from maclaurin.report.contributions import Contributions, contributions, correct_over_page
from maclaurin.report.outcome import Outcome
from maclaurin.report.sentences import diverged_sentence, interaction_sentences, waterfall_finding
from maclaurin.report.study_page import study_articles
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


def record(values=None, **statuses):
    made, runs = experiment(values or VALUES, **statuses)
    return dataclasses.replace(made, waterfalls=(WAY,)), runs


def found(values=None, **statuses) -> Contributions:
    """The waterfall of a page with nothing else."""
    made, runs = record(values, **statuses)
    way = Contributions(Outcome(study((made, runs)), made), WAY)
    correct_over_page([way])
    return way


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


NO_SEED_2 = [2.8, 3.01, None, 2.89]


def test_a_run_that_diverged_takes_p_from_what_needs_its_cell():
    """It was left out like a missing run, so that fewer seeds decided what more had not."""
    way = found({**VALUES, "row sum": NO_SEED_2}, statuses={("row sum", 2): "diverged"})
    assert way.diverged == {"row sum": (2,)}
    assert way.incomplete == {}
    assert all(part.p is None and part.size.bounds is None and not part.supported for part in way.parts)
    assert way.gap.n == 4, "the gap does not need the cell"
    assert way.gap.bounds is not None
    assert interaction_sentences(way) == []
    assert "row sum (seed 2) diverged" in diverged_sentence(way)


def test_what_does_not_need_the_diverged_cell_keeps_all_its_seeds():
    chain = waterfall(
        "Step by step",
        ("a", "b"),
        lambda on: {(): "none", ("a",): "order 2", ("a", "b"): "row sum"}.get(tuple(sorted(on))),
    )
    made, runs = experiment({**VALUES, "row sum": NO_SEED_2}, statuses={("row sum", 2): "diverged"})
    way = Contributions(Outcome(study((made, runs)), made), chain)
    correct_over_page([way])
    first, second = way.parts
    assert (first.size.n, first.size.is_tested) == (4, True)
    assert (second.size.n, second.p) == (3, None)
    assert first.p == pytest.approx(2 * stats.ttest_rel(VALUES["order 2"], VALUES["none"]).pvalue)


def test_a_cell_that_diverged_with_every_seed_is_named():
    statuses = {("row sum", seed): "diverged" for seed in range(4)}
    made, runs = record({**VALUES, "row sum": [None] * 4}, statuses=statuses)
    (way,) = contributions(Outcome(study((made, runs)), made))
    assert way.parts == ()
    assert "row sum (seed 0, 1, 2 and 3) diverged" in waterfall_finding(way)
    page = "".join(str(article) for article in study_articles(analyse([(study((made, runs)), "")])))
    assert "no seed finished in every cell" in page


def test_a_part_that_changes_nothing_alone_has_a_contribution_of_zero_there():
    names = {"": "none", "a": "none", "b": "order 2", "a b": "row sum"}
    way = Contributions(found().outcome, waterfall("x", ("a", "b"), lambda on: names[" ".join(sorted(on))]))
    (pair,) = way.interactions
    assert [effect.pair.first for effect in way.interactions] == ["a"]
    assert pair.interaction_contrast.n == 4


def test_every_contribution_of_a_page_counts_in_the_correction():
    """All waterfalls, experiments and metrics of all studies of the page; those without a test too."""
    one, other = record(), record({**VALUES, "row sum": NO_SEED_2}, statuses={("row sum", 2): "diverged"})
    renamed = dataclasses.replace(other[0], name="second")
    analyses = analyse([(study(one), ""), (study((renamed, other[1]), name="b"), "")])
    ways = [way for a in analyses for found in a.waterfalls.values() for way in found]
    alone = [stats.ttest_1samp(by_seed(name), 0).pvalue for name in ("order 2", "row sum")]
    assert [way.tested_parts for way in ways] == [4, 4]
    assert sorted(part.p for part in ways[0].parts) == pytest.approx(sorted([4 * min(alone), 3 * max(alone)]))
    assert [part.p for part in ways[1].parts] == [None, None]
    page = "".join(str(article) for article in study_articles(analyses))
    assert "corrected for all 4 contributions on this page" in page


def by_seed(part):
    """The contribution of a part, from the formula of two parts."""
    cells = {name: np.array(row) for name, row in VALUES.items()}
    rest = "row sum" if part == "order 2" else "order 2"
    return (cells[part] - cells["none"] + cells["order 2 + row sum"] - cells[rest]) / 2


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
    rows = next(iter(effect_charts.waterfall(found()).spec["datasets"].values()))
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
