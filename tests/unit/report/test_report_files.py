"""From records to files: what is read, what is written, and what is refused."""

import csv
import dataclasses
import html.parser
import json
import subprocess
import sys
from importlib import resources

import pytest
from tests.unit.report import synthetic

from maclaurin.errors import InputError
from maclaurin.report import cell_charts, curve_charts, learning_rate_chart, write_report
from maclaurin.report.analysis import analyse
from maclaurin.report.figure import INK, PALETTE, Sheet
from maclaurin.report.learning_rates import parabola_at
from maclaurin.report.order_charts import families
from maclaurin.report.page import breakable, embedded
from maclaurin.report.provenance_tables import mixtures
from maclaurin.report.sentences import rate_cautions, status_sentence, trouble, tuning_finding
from maclaurin.report.study_page import study_articles, study_page
from maclaurin.report.training_tables import settings_table, tuning_table
from maclaurin.report.write import read_studies, tables_md
from maclaurin.study import Behind
from maclaurin.study.run_record import CellTuning, Trial, write_study

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def realistic():
    return synthetic.realistic()


@pytest.fixture(scope="module")
def realistic_page(realistic):
    """Its page, which takes seconds."""
    return page_of(realistic)


def saved(study, folder):
    folder.mkdir(parents=True, exist_ok=True)
    write_study(study, folder / "records.json")
    return folder


def small(**options):
    return synthetic.study(synthetic.experiment({"a": [1.0, 1.1], "b": [2.0, 2.1]}), **options)


def analysis(study):
    return analyse([(study, "")])[0]


def page_of(*studies):
    return study_page(study_articles(analyse([(study, "") for study in studies])))


# --------------------------------------------------------------------------------------- reading


def test_bad_input_is_refused_in_one_message(tmp_path):
    with pytest.raises(InputError, match="there is no folder or file"):
        read_studies([tmp_path / "nothing"])
    with pytest.raises(InputError, match="holds no records"):
        read_studies([tmp_path])
    with pytest.raises(InputError, match="at least one study"):
        read_studies([])
    (tmp_path / "records.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        read_studies([tmp_path])


def test_a_study_without_runs_is_refused_and_nothing_is_written(tmp_path):
    folder = saved(dataclasses.replace(small(), runs={}), tmp_path / "empty")
    with pytest.raises(InputError, match="nothing to report yet"):
        write_report([folder])
    assert [p.name for p in folder.iterdir()] == ["records.json"]


def test_parts_of_one_study_are_put_together(tmp_path):
    whole = small()
    halves = []
    for seed in (0, 1):
        e = whole.experiments[0]
        cells = tuple(
            dataclasses.replace(c, runs={s: k for s, k in c.runs.items() if s == seed}) for c in e.cells
        )
        keys = {key for cell in cells for key in cell.runs.values()}
        halves.append(
            dataclasses.replace(
                whole,
                experiments=(dataclasses.replace(e, cells=cells, seeds=(seed,)),),
                runs={key: record for key, record in whole.runs.items() if key in keys},
            )
        )
    paths = [saved(half, tmp_path / str(i)) for i, half in enumerate(halves)]
    ((_, study),) = read_studies(paths)
    assert len(list(study.labelled())) == 4
    assert study.experiments[0].seeds == (0, 1)
    other = dataclasses.replace(whole, scale=0.5)
    assert len(read_studies([saved(whole, tmp_path / "a"), saved(other, tmp_path / "b")])) == 2


STUDY = """
from maclaurin.study import Behind, Experiment, Study, cells_of
e = Experiment("lm", "LM", "loss", {}, cells_of({"a": "exp/sum", "b": "exp/l2"}), (0, 1, 2), "a")
study = Study("NAME", "T", "Q", "B", (e,), (Behind(says="SAYS", experiment="lm", cells=("CELLS")),))
"""


def test_claims_edited_afterwards_are_judged_again_from_the_records(tmp_path, monkeypatch):
    values = {"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.201]}
    old = Behind(says="as it was run", experiment="lm", cells=("a", "b"))
    folder = saved(synthetic.study(synthetic.experiment(values), claims=[old]), tmp_path / "mini")
    monkeypatch.setattr("maclaurin.report.write.figure_files", lambda *_, **__: {})
    assert "1 agrees" in write_report([folder]).findings[0]
    definition = STUDY.replace("NAME", "mini").replace("SAYS", "turned around").replace('"CELLS"', '"b", "a"')
    (folder / "study.py").write_text(definition)
    written = write_report([folder])
    assert "1 disagrees" in written.findings[0]
    text = written.page.read_text()
    assert "turned around" in text
    assert "as it was run" not in text
    for other in (definition.replace('"mini"', '"another"'), "study = 1\n"):
        (folder / "study.py").write_text(other)
        assert "as it was run" in write_report([folder]).page.read_text()


# --------------------------------------------------------------------------------------- writing


def test_everything_is_written(realistic, tmp_path):
    folder = saved(realistic, tmp_path / "mini")
    written = write_report([folder])
    assert written.page == folder / "report" / "index.html"
    names = {
        p.relative_to(folder / "report").as_posix() for p in (folder / "report").rglob("*") if p.is_file()
    }
    assert {"index.html", "runs.csv", "summary.csv", "tables.md"} <= names
    for stem in (
        "series", "lm-parts", "lm-curves", "lm-compute", "lm-orders", "lm-positions", "lm-learning-rates",
        "interactions-interactions",
    ):  # fmt: skip
        assert {f"figures/mini-{stem}.svg", f"figures/mini-{stem}.pdf"} <= names
    assert list(folder.glob(".report-*")) == []
    assert written.page.stat().st_size < 1_600_000
    with (folder / "report" / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(list(realistic.labelled()))
    assert {row["status"] for row in rows} == {"finished", "diverged", "crashed", "waiting"}
    with (folder / "report" / "summary.csv").open() as file:
        by_cell = {(row["experiment"], row["cell"]): row for row in csv.DictReader(file)}
    assert by_cell["lm", "gate"]["seeds_diverged"] == "1"
    assert float(by_cell["lm", "elu"]["difference"]) == pytest.approx(0.517, abs=0.01)


def test_figures_of_an_older_report_are_removed_and_other_files_are_kept(tmp_path):
    folder = saved(small(), tmp_path / "mini")
    figures = folder / "report" / "figures"
    figures.mkdir(parents=True)
    for name in ("mini-gone.svg", "mini-gone.pdf", "mine.txt"):
        (figures / name).write_text("old")
    write_report([folder], pdf=False)
    names = {file.name for file in figures.iterdir()}
    assert "mini-lm-parts.svg" in names
    assert {name for name in names if "gone" in name} == set()
    assert "mine.txt" in names


def test_without_the_extra_records_are_readable_and_a_report_says_what_is_missing(tmp_path):
    """As on a machine without scipy: in a process of its own, where it cannot be imported."""
    saved(small(), tmp_path / "mini")
    code = (
        "import sys\n"
        "for name in ('scipy', 'statsmodels', 'altair', 'vl_convert', 'jinja2'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "import maclaurin.report.formatting, maclaurin.report.figure\n"
        "from maclaurin.study.run_record import read_study\n"
        "print(len(read_study(Path('mini')).runs))\n"
        "from maclaurin.errors import MaclaurinError\n"
        "try:\n"
        "    from maclaurin.report import write_report\n"
        "except MaclaurinError as problem: print(problem)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("4\n")
    assert "pip install 'maclaurin[report]'" in result.stdout


def test_a_failure_leaves_the_old_report_alone(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "index.html").write_text("old")
    (out / "mine.txt").write_text("kept")
    monkeypatch.setattr("maclaurin.report.write.study_page", lambda _: 1 / 0)
    monkeypatch.setattr("maclaurin.report.write.figure_files", lambda *_, **__: {})
    with pytest.raises(ZeroDivisionError):
        write_report([saved(small(), tmp_path / "mini")], out)
    assert sorted(p.name for p in out.iterdir()) == ["index.html", "mine.txt"]
    assert (out / "index.html").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mini", "out"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        write_report([saved(small(), tmp_path / "mini")], tmp_path / "out")


def test_a_report_needs_no_torch(tmp_path):
    saved(small(), tmp_path / "mini")
    code = "import sys; from pathlib import Path; from maclaurin.report import write_report;"
    code += "write_report([Path('mini')]); print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


# -------------------------------------------------------------------------------------- the page


class Checker(html.parser.HTMLParser):
    """Every element is closed, every id is there once, nothing is loaded."""

    EMPTY = ("meta", "br", "hr", "link", "wbr", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.elements = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        given = dict(attributes)
        self.elements.append(name)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[key] for key in ("href", "src") if key in given]
        if name not in self.EMPTY:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name


def test_the_page_is_whole_and_loads_nothing(realistic_page):
    found = Checker(realistic_page)
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith(("#", "figures/")) or "/" not in link for link in found.links)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)


def test_two_studies_stand_one_after_the_other():
    found = Checker(page_of(small(name="mini"), small(name="mini")))
    assert found.elements.count("article") == 2
    assert len(found.ids) == len(set(found.ids))


def test_names_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script><b onclick='x' \"&"
    record, runs = synthetic.experiment(
        {evil: [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.2]},
        axes=(evil,),
        levels={evil: {evil: evil}, "b": {evil: "x"}},
    )
    runs = tuple(
        (label, dataclasses.replace(run, message=evil, curves={"loss": ((1, 2.0), (2, 1.0))}))
        for label, run in runs
    )
    claim = Behind(says=evil, source=evil, note=evil, experiment="lm", cells=(evil, "b"))
    study = dataclasses.replace(
        synthetic.study((record, runs), claims=[claim]), title=evil, question=evil, name=evil
    )
    text = page_of(study)
    assert "alert(1)</script>" not in text
    assert "<b onclick" not in text
    assert Checker(text).elements.count("script") == 4 + text.count('class="spec"')


def test_text_cannot_end_the_data_of_a_chart():
    inner = embedded({"x": [None, 1.2346], "y": "</script>"})
    assert "<" not in inner
    assert json.loads(inner) == {"x": [None, 1.2346], "y": "</script>"}
    assert breakable("a/<b>") == "a<wbr>/&lt;b&gt;"


def test_a_script_that_would_end_its_element_is_refused(monkeypatch):
    monkeypatch.setattr("maclaurin.report.page.vega_script", lambda: "x = '</script>'")
    with pytest.raises(ValueError, match="end tag of its own element"):
        page_of(small())


def test_the_page_has_the_colours_of_the_files():
    css = resources.files("maclaurin.report").joinpath("assets", "page.css").read_text("utf-8")
    names = {"ink": INK, **{f"c{place}": colour for place, colour in enumerate(PALETTE)}}
    light, printed = css.partition("@media (prefers")[0], css.partition("@media print")[2]
    assert all(f"--{name}: {colour};" in light for name, colour in names.items())
    assert all(f"--{name}: {colour};" in printed for name, colour in names.items() if name != "ink")


def test_sections_appear_only_where_there_is_something_to_say(realistic_page):
    full, bare = realistic_page, page_of(small())
    for words in (
        "The form", "The orders", "The interactions", "Loss by position", "The claims", "The learning rates",
    ):  # fmt: skip
        assert f"<h2>{words}</h2>" in full
        assert f"<h2>{words}</h2>" not in bare
    for words in ("The parts", "What was trained", "The cost", "Provenance"):
        assert f"<h2>{words}</h2>" in bare


def test_experiments_with_the_same_runs_have_one_section_about_them():
    once = small()
    (experiment,) = once.experiments
    again = dataclasses.replace(experiment, name="again", title="Another metric", metric="accuracy")
    twice = dataclasses.replace(once, experiments=(experiment, again))
    assert status_sentence(twice) == status_sentence(once)
    assert tables_md([analysis(twice)]).count("### Settings") == 1
    (article,) = study_articles([analysis(twice)])
    blocks = {section.title: section.blocks for section in article.sections}
    (alone,) = study_articles([analysis(once)])
    assert len(blocks["What was trained"]) == sum(
        len(s.blocks) for s in alone.sections if s.title == "What was trained"
    )


def test_a_study_that_has_only_begun_gives_a_page():
    study = synthetic.study(synthetic.experiment({"a": [None, None], "b": [None, None]}, axes=("k", "n")))
    text = page_of(study)
    assert "no run has finished yet" in text
    assert "0 of 4 runs finished; 4 without a result yet" in text
    half = synthetic.study(synthetic.experiment({"a": [1.0, None], "b": [2.0, None]}))
    assert "one seed only" in page_of(half)
    lost = synthetic.study(synthetic.experiment({"a": [None, None], "b": [2.0, 2.1]}))
    assert "has no finished run yet" in page_of(lost)


# --------------------------------------------------------------------------------------- in words


def test_status_and_trouble(realistic):
    assert (
        status_sentence(realistic)
        == "114 of 117 runs finished; 1 diverged, 1 crashed, 1 without a result yet"
    )
    assert trouble(realistic) == [
        "lm · gate · seed 1: diverged at step 184 of 400 (loss is nan after a gradient of size 4e+07)",
        "lm · cosine · seed 2: crashed at step 400 of 400 (out of memory)",
        "interactions · taylor 2 1/t out · seed 2: waiting",
    ]
    e = small().experiments[0]
    lost = dataclasses.replace(e.cells[1], runs={0: e.cells[1].runs[0]})
    short = dataclasses.replace(small(), experiments=(dataclasses.replace(e, cells=(e.cells[0], lost)),))
    assert trouble(short) == ["lm · b · seed 1: no record"]
    key = e.cells[0].runs[0]
    odd = dataclasses.replace(
        small(), runs={**small().runs, key: dataclasses.replace(small().runs[key], metrics={"accuracy": 0.5})}
    )
    assert trouble(odd) == ["lm · a · seed 0: finished without test loss"]


def test_the_line_of_a_crash_that_says_most_is_shown():
    made, runs = synthetic.experiment({"a": [1.0, 1.1], "b": [2.0, None]}, statuses={("b", 1): "crashed"})
    message = "the process ended with exit code 2\nerror: there is no key 'x'\n    cosh\n    ^"
    runs = tuple(
        (label, dataclasses.replace(r, message=message if r.status == "crashed" else None))
        for label, r in runs
    )
    assert "(there is no key 'x')" in trouble(synthetic.study((made, runs)))[0]


def test_findings(realistic):
    found = analysis(realistic)
    assert found.findings[0].startswith("The forms agree to 3.9e−15.")
    assert "taylor 8 is undecided" in found.findings[1]
    assert "are behind by 0.007 to 0.618" in found.findings[1]
    assert not any("learning rate" in sentence for sentence in found.findings), "they have a section"
    assert "norm explains 81 % of the variance" in found.findings[3]
    assert found.headline.endswith("Of 8 claims: 4 agree, 1 disagrees, 2 undecided, 1 not run.")


def test_published_numbers_stand_in_our_unit_and_margins_have_their_reason(realistic_page):
    assert "softmax 2.573, norm 2.573 nats per token, published as ln CE 0.945, 0.945" in realistic_page
    assert "± 0.05: nobody would notice" in realistic_page


def test_settings_that_differ_and_tokens_stand_in_a_table(realistic):
    table = settings_table(analysis(realistic).outcomes["lm"])
    assert [column.title for column in table.columns] == [
        "cell", "attention", "note", "parameters", "training tokens", "training FLOPs",
    ]  # fmt: skip
    assert str(table.rows[0][4]) == "819k"


def test_learning_rates_come_with_the_width_of_their_good_range(realistic):
    table = tuning_table(analysis(realistic).outcomes["lm"])
    softmax = {column.title: str(entry) for column, entry in zip(table.columns, table.rows[0], strict=True)}
    assert softmax["learning rate"] == "0.004"
    assert softmax["tried"] == "5 rates"
    assert softmax["good range"] == "0.0028 – 0.0057", "0.1 · log₂² is 0.025 at a factor of √2"
    assert softmax["half a step off"] == "0.025"
    assert str(table.rows[1][3]) != "–", "a rate that diverged further away does not matter"
    assert tuning_table(analysis(small()).outcomes["lm"]) is None


def test_the_chosen_factor_of_the_output_projection_and_its_gain_are_shown(realistic):
    def trial(rate, factor, value):
        return Trial(
            rate=rate, factor=factor, seed=1000, value=value, status="finished", key=f"{rate} {factor}"
        )

    trials = (
        trial(1e-3, 0.5, 2.4), trial(2e-3, 0.25, 2.3), trial(2e-3, 0.5, 2.0), trial(2e-3, 1.0, 2.2),
        trial(4e-3, 0.5, None), trial(4e-3, 1.0, 2.1), trial(8e-3, 1.0, 2.5),
    )  # fmt: skip
    both = CellTuning(rate=2e-3, factor=0.5, trials=trials, subject="x")

    def with_factor(e):
        cells = {} if e.tuning is None else {**e.tuning.cells, "softmax": both}
        return (
            e
            if e.tuning is None
            else dataclasses.replace(e, tuning=dataclasses.replace(e.tuning, cells=cells))
        )

    record = dataclasses.replace(realistic, experiments=tuple(map(with_factor, realistic.experiments)))
    outcome = analysis(record).outcomes["lm"]
    table = tuning_table(outcome)
    named = dict(zip([column.title for column in table.columns], map(str, table.rows[0]), strict=True))
    assert named["cell"] == "softmax"
    assert (named["learning rate"], named["output factor"]) == ("0.002", "0.5")
    assert named["gain over factor 1"] == "0.100", "to 2.1 at another rate"
    assert named["tried"] == "7 settings"
    assert "chosen too, as a factor of it (0.5 for all)" in tuning_finding(outcome)
    assert learning_rate_chart.learning_rates(outcome) is not None


def test_the_page_says_where_rates_were_chosen_on_other_data(realistic):
    """Seeds only order the data differently. Nothing is said of records without a digest."""
    known = {
        key: dataclasses.replace(record, provenance={**record.provenance, "content": "this text"})
        for key, record in realistic.runs.items()
    }
    assert all(record.content == "" for record in realistic.runs.values())
    cases = (
        (known, "this text", False),
        (known, "another text", True),
        (realistic.runs, "another text", False),
    )
    for runs, chosen_on, differs in cases:
        experiments = tuple(
            dataclasses.replace(
                e, tuning=None if e.tuning is None else dataclasses.replace(e.tuning, data=(chosen_on,))
            )
            for e in realistic.experiments
        )
        found = tuning_finding(
            analysis(dataclasses.replace(realistic, experiments=experiments, runs=runs)).outcomes["lm"]
        )
        assert ("chosen on other data than these runs read" in found) == differs


def test_a_good_range_is_that_of_the_parabola_through_the_best_rate_and_its_neighbours():
    """Straight lines between the rates made it too narrow."""
    found = parabola_at({1.0: 2.5, 2.0: 2.0, 4.0: 2.5}, 2.0, 1.0)
    assert found.good_range == (pytest.approx(2 ** (1 - 0.2)), pytest.approx(2 ** (1 + 0.2)))
    assert found.half_step == pytest.approx(0.125)
    turned = parabola_at({1.0: -2.5, 2.0: -2.0, 4.0: -2.5}, 2.0, -1.0)
    assert turned.good_range == pytest.approx(found.good_range)
    aside = parabola_at({1.0: 2.2, 2.0: 2.0, 4.0: 2.6}, 2.0, 1.0)
    assert aside.centre == pytest.approx(0.75)
    wide = parabola_at({1.0: 2.001, 2.0: 2.0, 4.0: 2.001}, 2.0, 1.0)
    assert (wide.is_wide, wide.good_range) == (True, (pytest.approx(1.0), pytest.approx(4.0)))


@pytest.mark.parametrize(
    "values",
    [{1.0: 2.1, 2.0: 2.0}, {1.0: 2.1, 2.0: 2.0, 4.0: float("inf")}, {1.0: 2.0, 2.0: 2.0, 4.0: 2.0}, {}],
)
def test_without_two_neighbours_no_good_range_is_known(values):
    assert parabola_at(values, 2.0, 1.0) is None


def test_the_page_says_what_a_wrong_rate_may_cost_and_at_how_many_steps_rates_were_tuned(realistic):
    found = analysis(realistic).outcomes["lm"]
    assert "tuned at" not in str(tuning_table(found).rows)
    assert "costs 0.025 to 0.025 in validation loss" in rate_cautions(found)[0]
    shorter = {
        key: dataclasses.replace(
            record, run=dataclasses.replace(record.run, config={**record.run.config, "steps": 160})
        )
        for key, record in realistic.runs.items()
    }
    found = analysis(dataclasses.replace(realistic, runs=shorter)).outcomes["lm"]
    assert tuning_table(found).rows[0][1].aside == "tuned at 400 steps"
    assert "Some rates were tuned at 400 steps" in tuning_finding(found)


def test_the_page_names_seeds_that_were_added_later():
    study = small()
    (e,) = study.experiments
    later = dataclasses.replace(study, experiments=(dataclasses.replace(e, added_seeds=(1, 2)),))
    page = "".join(str(article) for article in study_articles([analysis(later)]))
    assert "Seeds 1 and 2 were added later: if seeds were added until a p was small" in page
    assert "added later" not in "".join(str(article) for article in study_articles([analysis(study)]))


def test_loss_by_position_has_gaps_where_nothing_is_scored(realistic):
    figure = curve_charts.positions(analysis(realistic).outcomes["lm"])
    rows = [row for rows in figure.spec["datasets"].values() for row in rows]
    assert {row["x"] for row in rows if row["y"] is None} == {8.0 * i + 1 for i in range(0, 32, 4)}
    assert 0 not in {row["y"] for row in rows}


def test_one_cell_far_off_does_not_squash_the_figure():
    values = {f"c{i}": [2.0 + 0.01 * i, 2.01 + 0.01 * i, 2.02 + 0.01 * i] for i in range(6)}
    values["wild"] = [40.0, 2.0, 90.0]  # its two far seeds are drawn at the edge
    figure = cell_charts.cells(analysis(synthetic.study(synthetic.experiment(values))).outcomes["lm"])
    means, differences = (
        panel["layer"][1]["encoding"]["x"]["scale"]["domain"] for panel in figure.spec["hconcat"]
    )
    assert differences[1] - differences[0] < 0.5
    assert means[1] - means[0] < 0.5
    (wild,) = (row for row in figure.spec["datasets"]["data-3"] if row["name"] == "wild")
    assert wild["outside"]
    assert wild["cut_high"] is not None


def test_bars_without_length_are_left_out():
    """vl-convert ends the process with a panic where a PDF has one."""
    one = synthetic.experiment({"a": [1.0], "b": [2.0]})
    equal = synthetic.experiment({"a": [1.0, 1.0], "b": [2.0, 2.0]}, name="equal")
    found = analysis(synthetic.study(one, equal))
    for outcome in found.outcomes.values():
        assert cell_charts.cells(outcome).pdf.startswith(b"%PDF")


def test_every_figure_is_drawn_as_svg_without_the_pointers_marks(realistic):
    outcome = analysis(realistic).outcomes["lm"]
    figure = curve_charts.curves(outcome)
    assert figure.svg.startswith("<svg")
    assert len(json.dumps(figure.paper_spec)) < len(json.dumps(figure.spec))
    assert cell_charts.across([outcome]) is None


def test_a_figure_is_the_same_file_whatever_was_drawn_before(realistic):
    outcome = analysis(realistic).outcomes["lm"]
    first = curve_charts.curves(outcome).svg
    assert "clip1" in first
    assert curve_charts.curves(outcome).svg == first


def test_the_same_cells_over_three_experiments_are_drawn_together():
    made = [
        synthetic.experiment({"a": [0.5, 0.6], "b": [0.7, 0.8]}, name=f"r{i}", metric="accuracy")
        for i in range(3)
    ]
    found = analysis(synthetic.study(*made))
    assert cell_charts.across(list(found.outcomes.values())) is not None


def test_markdown_tables_have_as_many_columns_as_their_heads(realistic):
    odd = synthetic.study(synthetic.experiment({"a|b": [1.0, 1.1], "c": [2.0, 2.1]}))
    for text in (tables_md([analysis(realistic)]), tables_md([analysis(odd)])):
        widths = []
        for line in text.splitlines():
            cells = line.replace("\\|", "").count("|")
            widths = [*widths, cells] if line.startswith("|") else []
            assert len(set(widths)) <= 1, line


def test_families_differ_in_order_only(realistic):
    groups = {f.name: [c.order for c in f.cells] for f in families(analysis(realistic).outcomes["lm"])}
    assert groups["taylor(N)/sum"] == [2, 4, 8]
    assert families(analysis(small()).outcomes["lm"]) == []


def test_runs_of_several_versions_are_reported():
    outcome = analysis(small()).outcomes["lm"]
    assert mixtures(outcome) == []
    study = small()
    key = study.experiments[0].cells[0].runs[0]
    record = study.runs[key]
    changed = dataclasses.replace(record, run=dataclasses.replace(record.run, torch="2.11", data="other"))
    mixed = dataclasses.replace(study, runs={**study.runs, key: changed})
    assert mixtures(analysis(mixed).outcomes["lm"]) == [
        "These runs come from 2 versions of torch or of our numerics.",
        "Runs with the same seed did not all see the same version of stdlib.",
    ]


def test_a_chart_can_show_a_state_of_more_bytes_than_any_integer_holds():
    sheet = Sheet()
    chart = sheet.add([{"bytes": 5535961986109847638996908864144, "loss": 2.5}]).mark_point()
    figure = sheet.figure(chart.encode(x="bytes:Q", y="loss:Q"))
    assert figure.svg.startswith("<svg")
    assert figure.spec["datasets"]["data-0"] == [{"bytes": 5.536e30, "loss": 2.5}]
