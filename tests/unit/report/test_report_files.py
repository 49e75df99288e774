"""From records to files: what is read, what is written, and what is refused."""

import csv
import dataclasses
import html.parser
import json
import subprocess
import sys

import pytest
from tests.unit.report import synthetic

from maclaurin.errors import InputError
from maclaurin.report import write_report
from maclaurin.report.analysis import Analysis, families
from maclaurin.report.documents import tables_md
from maclaurin.report.html import embedded, tag
from maclaurin.report.page import page
from maclaurin.report.provenance import mixtures
from maclaurin.report.reading import read_studies
from maclaurin.report.sentences import findings, headline, status_sentence, trouble
from maclaurin.study.claim import Behind
from maclaurin.study.record import write_study


@pytest.fixture(scope="module")
def realistic():
    return synthetic.realistic()


def saved(study, folder):
    folder.mkdir(parents=True, exist_ok=True)
    write_study(study, folder / "records.json")
    return folder


def small(**options):
    return synthetic.study(synthetic.experiment({"a": [1.0, 1.1], "b": [2.0, 2.1]}), **options)


# --------------------------------------------------------------------------------------- reading


def test_bad_input_is_refused_in_one_message(tmp_path):
    with pytest.raises(InputError, match="there is no folder or file"):
        read_studies([tmp_path / "nothing"])
    with pytest.raises(InputError, match="holds no records"):
        read_studies([tmp_path])
    with pytest.raises(InputError, match="at least one study"):
        read_studies([])
    file = tmp_path / "records.json"
    for text, words in (
        ("{", "is not JSON"),
        ("[]", "schema None"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "name": "x"}', "do not have the expected form"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=words):
            read_studies([file])


def test_a_study_without_runs_is_refused_and_nothing_is_written(tmp_path):
    folder = saved(dataclasses.replace(small(), runs=()), tmp_path / "empty")
    with pytest.raises(InputError, match="nothing to report yet"):
        write_report([folder])
    assert [p.name for p in folder.iterdir()] == ["records.json"]


def test_parts_of_one_study_are_put_together(tmp_path):
    whole = small()
    halves = [
        dataclasses.replace(whole, runs=tuple(run for run in whole.runs if run.seed == seed))
        for seed in (0, 1)
    ]
    waiting = dataclasses.replace(whole.runs[1], status="waiting", test_loss=None)
    halves[0] = dataclasses.replace(halves[0], runs=(*halves[0].runs, waiting))
    (study,) = read_studies([saved(half, tmp_path / str(i)) for i, half in enumerate(halves)])
    assert len(study.runs) == 4
    assert all(run.status == "finished" for run in study.runs)
    other = dataclasses.replace(whole, scale=0.5)
    assert len(read_studies([saved(whole, tmp_path / "a"), saved(other, tmp_path / "b")])) == 2


# --------------------------------------------------------------------------------------- writing


def test_everything_is_written(realistic, tmp_path):
    folder = saved(realistic, tmp_path / "mini")
    written = write_report([folder])
    assert written.page == folder / "report" / "index.html"
    assert written.missing is None
    names = {
        p.relative_to(folder / "report").as_posix() for p in (folder / "report").rglob("*") if p.is_file()
    }
    assert {"index.html", "runs.csv", "summary.csv", "tables.md"} <= names
    for stem in ("series", "lm-parts", "lm-curves", "lm-orders", "lm-positions", "interactions-interactions"):
        assert {f"figures/mini-{stem}.svg", f"figures/mini-{stem}.pdf"} <= names
    assert list(folder.glob(".report-*")) == []
    assert written.page.stat().st_size < 600_000
    with (folder / "report" / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(realistic.runs)
    assert {row["status"] for row in rows} == {"finished", "diverged", "crashed", "waiting"}
    with (folder / "report" / "summary.csv").open() as file:
        by_cell = {(row["experiment"], row["cell"]): row for row in csv.DictReader(file)}
    assert by_cell["lm", "gate"]["seeds_diverged"] == "1"
    assert float(by_cell["lm", "elu"]["difference"]) == pytest.approx(0.517, abs=0.01)


def test_without_matplotlib_everything_else_is_written(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "maclaurin.report.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = saved(small(), tmp_path / "mini")
    written = write_report([folder / "records.json"], tmp_path / "deep" / "out")
    assert "pip install 'maclaurin[plot]'" in written.missing
    assert sorted(p.name for p in (tmp_path / "deep" / "out").iterdir()) == [
        "index.html",
        "runs.csv",
        "summary.csv",
        "tables.md",
    ]


def test_a_failure_leaves_the_old_report_alone(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "index.html").write_text("old")
    (out / "mine.txt").write_text("kept")
    monkeypatch.setattr("maclaurin.report.write.page", lambda _: 1 / 0)
    monkeypatch.setattr("maclaurin.report.figures.draw_all", lambda *_: None)
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

    EMPTY = ("meta", "br", "hr", "link", "wbr")

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


def test_the_page_is_whole_and_loads_nothing(realistic):
    found = Checker(page([Analysis(realistic)]))
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith("#") or "/" not in link for link in found.links)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)


def test_two_studies_stand_one_after_the_other(realistic):
    other = small(name="mini")
    text = page([Analysis(realistic), Analysis(other)])
    found = Checker(text)
    assert found.elements.count("article") == 2
    assert len(found.ids) == len(set(found.ids))


def test_names_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script><b onclick='x' \"&"
    record, runs = synthetic.experiment(
        {evil: [1.0, 1.1], "b": [2.0, 2.1]}, axes=(evil,), levels={evil: {evil: evil}}
    )
    runs = tuple(
        dataclasses.replace(run, message=evil, key=evil, test_curve=((1, 2.0, 0.1),)) for run in runs
    )
    claim = Behind(says=evil, source=evil, paper=evil, experiment="lm", cells=(evil, "b"))
    study = dataclasses.replace(
        synthetic.study((record, runs), claims=[claim]), title=evil, question=evil, name=evil
    )
    text = page([Analysis(study)])
    assert "alert(1)</script>" not in text
    assert "<b onclick" not in text
    assert Checker(text).elements.count("script") == 2 + text.count('class="chart-data"')


def test_numbers_that_are_none_are_null_and_text_cannot_end_the_data():
    text = embedded({"x": [float("nan"), float("inf"), 1.23456789], "y": "</script>"})
    inner = text.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert "<" not in inner
    assert json.loads(inner) == {"x": [None, None, 1.2346], "y": "</script>"}


def test_tags_escape_text_and_attributes():
    assert tag("p", "<&>", title='"', data_x=1, hidden=True, id=None) == (
        '<p title="&quot;" data-x="1" hidden>&lt;&amp;&gt;</p>'
    )


def test_sections_appear_only_where_there_is_something_to_say(realistic):
    full, bare = page([Analysis(realistic)]), page([Analysis(small())])
    for words in ("The form", "The orders", "The interactions", "Loss by position", "The claims"):
        assert f"<h2>{words}</h2>" in full
        assert f"<h2>{words}</h2>" not in bare
    for words in ("The parts", "The cost", "Provenance"):
        assert f"<h2>{words}</h2>" in bare


def test_a_study_that_has_only_begun_gives_a_page():
    study = synthetic.study(synthetic.experiment({"a": [None, None], "b": [None, None]}, axes=("k", "n")))
    text = page([Analysis(study)])
    assert "no run has finished yet" in text
    assert "0 of 4 runs finished; 4 not there yet" in text
    half = synthetic.study(synthetic.experiment({"a": [1.0, None], "b": [2.0, None]}))
    assert "one seed only" in page([Analysis(half)])
    lost = synthetic.study(synthetic.experiment({"a": [None, None], "b": [2.0, 2.1]}))
    assert "has no finished run yet" in page([Analysis(lost)])


# --------------------------------------------------------------------------------------- in words


def test_status_and_trouble(realistic):
    assert status_sentence(realistic) == "114 of 117 runs finished; 1 diverged, 1 crashed, 1 not there yet"
    assert trouble(realistic) == [
        "lm · gate · seed 1: diverged at step 184 of 400 (loss is nan after a gradient of size 4e+07)",
        "lm · cosine · seed 2: crashed at step 400 of 400 (out of memory)",
        "interactions · taylor 2 1/t out · seed 2: waiting",
    ]
    short = dataclasses.replace(small(), runs=small().runs[:3])
    assert trouble(short) == ["lm · b · seed 1: no record"]
    odd = dataclasses.replace(
        small(), runs=(dataclasses.replace(small().runs[0], test_loss=None), *small().runs[1:])
    )
    assert trouble(odd) == ["lm · a · seed 0: finished without test loss"]


def test_findings(realistic):
    analysis = Analysis(realistic)
    found = findings(analysis)
    assert found[0].startswith("The forms agree to 3.9e−15.")
    assert "rms is not distinguishable from it" in found[1]
    assert "are behind by 0.013 to 0.605" in found[1]
    assert "norm explains 80 % of the variance" in found[3]
    assert headline(realistic, analysis.judgements).endswith(
        "Of 8 claims: 5 agree, 1 disagrees, 1 not distinguishable at this budget, 1 not run."
    )


def test_markdown_tables_have_as_many_columns_as_their_heads(realistic):
    record, runs = synthetic.experiment({"a|b": [1.0, 1.1], "c": [2.0, 2.1]})
    for text in (tables_md([Analysis(realistic)]), tables_md([Analysis(synthetic.study((record, runs)))])):
        widths = []
        for line in text.splitlines():
            cells = line.replace("\\|", "").count("|")
            widths = [*widths, cells] if line.startswith("|") else []
            assert len(set(widths)) <= 1, line


def test_families_differ_in_order_only(realistic):
    groups = {f.name: [c.order for c in f.cells] for f in families(Analysis(realistic).outcomes["lm"])}
    assert groups["taylor(N)/sum"] == [2, 4, 8]
    assert families(Analysis(small()).outcomes["lm"]) == []


def test_runs_of_several_versions_of_the_code_are_said():
    runs = small().runs
    assert mixtures(runs) == []
    changed = dataclasses.replace(
        runs[0],
        provenance={**runs[0].provenance, "code": "other", "data": {"name": "stdlib", "fingerprint": "x"}},
    )
    assert mixtures((changed, *runs[1:])) == [
        "These runs come from 2 versions of the code.",
        "Not all runs with one seed saw the same state of stdlib.",
    ]
