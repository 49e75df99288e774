"""What a study.py may say, and the one clear error with its line where it says something else."""

import dataclasses

import pytest

from maclaurin import InputError
from maclaurin.study import (
    Alike,
    Behind,
    Experiment,
    Metric,
    Ordered,
    Published,
    Study,
    Tasks,
    Tune,
    cells_of,
    grid,
)
from maclaurin.study.design import TUNING_SEED
from maclaurin.study.find import find_study, known_studies, load_study, source_file, source_name
from maclaurin.study.plan_runs import plan_study, select

CELLS = cells_of({"a": "exp/sum", "b": "exp/l2"})


def experiment(**changes):
    values = {
        "name": "e", "title": "E", "metric": "loss", "common": {}, "cells": CELLS, "seeds": (0, 1, 2),
        "baseline": "a",
    }  # fmt: skip
    return Experiment(**{**values, **changes})


def rungs(*ladder, **changes):
    """A study with the experiments e, f and g, of which g differs, and this ladder."""
    made = (experiment(), experiment(name="f"), experiment(name="g", **changes))
    return Study("s", "S", "?", "b", made, ladder=ladder)


WORDS = {"says": "so", "experiment": "e", "cells": ("a", "b")}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: experiment(metric="acuracy"), "is not recorded by any run.*Did you mean accuracy"),
        (lambda: experiment(seeds=()), r"seeds=\(\), so there is nothing to train"),
        (lambda: experiment(seeds=(0, 0)), "seed 0 twice"),
        (lambda: experiment(baseline="c"), "not one of its cells"),
        (lambda: experiment(cells=(*CELLS, CELLS[0])), "two cells called a"),
        (lambda: experiment(equal="size"), "steps, flops or state"),
        (
            lambda: experiment(
                cells=(*cells_of({"a": "exp/sum"}, data="x"), *cells_of({"b": "exp/sum"}, data="y"))
            ),
            r"cells with different data \(x, y\).*one experiment of each",
        ),
        (lambda: Tune(rates=(1e-3,)), "with one rate there is nothing to choose"),
        (lambda: Tune(rates=(1e-3, 3e-3)), "factors of two"),
        (lambda: Tune(rates=(1e-3, 2e-3, 4e-3), most=2), "fewer learning rates than the grid"),
        (lambda: Tune(rates=(1e-3, 2e-3), metric="los"), "Did you mean loss"),
        (
            lambda: experiment(tune=Tune(rates=(1e-3, 2e-3)), seeds=(0, TUNING_SEED)),
            f"seed {TUNING_SEED} for tuning and for its result",
        ),
        (lambda: experiment(tune=Tune(rates=(1e-3, 2e-3)), common={"lr": 1.0}), "common sets lr"),
        (lambda: experiment(metric="task:lines_32"), r"tasks are none: add tasks=Tasks\(\('lines_32',\)\)"),
        (
            lambda: experiment(metric="task:lines_32:log_ods", tasks=Tasks(("lines_32",))),
            "not a number of a task.*Did you mean log_odds",
        ),
        (lambda: Tasks(()), "a tuple of names"),
        (lambda: Tasks("lines_32"), "a tuple of names"),
        (lambda: Tasks(("cloze", "cloze")), "one task twice"),
        (lambda: Tasks(("cloze",), items=0), "at least one item"),
        (lambda: Tune(rates=(1e-3, 2e-3), metric="task:cloze"), "chosen on validation data"),
        (lambda: Tune(rates=(1e-3, 2e-3), metric="loss"), "Use validation_loss"),
        (lambda: Alike(**WORDS, within=0, because="x"), "no finite number of runs can show"),
        (lambda: Alike(**WORDS, within=0.1, because=" "), "needs a reason"),
        (lambda: Behind(**{**WORDS, "cells": ("a",)}), "at least two cells"),
        (lambda: Ordered(**{**WORDS, "cells": ("a", "a")}), "names a cell twice"),
        (lambda: Published(where="x", unit="ln", values={}), "Did you mean ln CE"),
        (lambda: Study("s", "S", "?", "b", ()), "has no experiment"),
        (
            lambda: Study("s", "S", "?", "b", (experiment(),), (Behind(**{**WORDS, "experiment": "f"}),)),
            "about experiment 'f'",
        ),
        (
            lambda: Study("s", "S", "?", "b", (experiment(),), (Behind(**{**WORDS, "cells": ("a", "c")}),)),
            "has no such cell",
        ),
        (lambda: rungs("e", "f", "h"), "names h, but the study has no such experiment; it has e, f, g"),
        (lambda: rungs("e", "f"), "needs 3 different experiments or more, got e, f"),
        (lambda: rungs("e", "f", "f"), "needs 3 different experiments or more"),
        (lambda: rungs("e", "f", "g", metric="accuracy"), "joins 'e' and 'g', which differ in their metric"),
        (
            lambda: rungs("e", "f", "g", cells=cells_of({"a": "exp/sum", "b": "exp/rms"})),
            "differ in their cells: experiments of a ladder compare the same cells on the same metric",
        ),
        (lambda: rungs("e", "f", "g", cells=CELLS[:1]), "differ in their cells"),
        (lambda: rungs("e", "f", "g", baseline="b"), "differ in their baseline"),
        (lambda: Study("s", "S", "?", "b", (experiment(),), ladder="e"), "a tuple of names"),
    ],
)
def test_invalid_designs_are_one_clear_error(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize(
    ("metric", "title", "higher", "scale"),
    [
        ("task:lines_32", "accuracy in lines_32", True, "logit"),
        ("task:lines_32:log_odds", "log-odds of the right answer in lines_32", True, "linear"),
        ("task:perplexity:bits_per_byte", "bits per byte in perplexity", False, "linear"),
    ],
)
def test_a_task_is_a_metric(metric, title, higher, scale):
    found = experiment(metric=metric, tasks=Tasks(("lines_32", "perplexity"))).measure
    assert (found.name, found.title, found.higher_is_better, found.scale) == (metric, title, higher, scale)


def test_experiments_that_differ_in_their_metric_alone_share_their_runs():
    first = experiment(tasks=Tasks(("lines_32",)))
    second = dataclasses.replace(first, name="f", metric="task:lines_32")
    assert Study("s", "S", "?", "b", (first, second)).run_count == 6
    other = dataclasses.replace(second, tasks=Tasks(("lines_32",), items=7))
    assert Study("s", "S", "?", "b", (first, other)).run_count == 12


def test_a_part_of_a_study_keeps_its_ladder_if_all_sizes_are_left():
    study = rungs("e", "f", "g")
    assert select(study, ["b"]).ladder == ("e", "f", "g")
    alone = experiment(name="h", cells=cells_of({"c": "exp/rms", "d": "exp/len"}), baseline="c")
    wider = dataclasses.replace(study, experiments=(*study.experiments, alone))
    assert select(wider, ["d"]).ladder == ()


def test_a_claim_of_ones_own_needs_no_paper():
    claim = Behind(**WORDS)
    assert (claim.source, claim.published, claim.note) == ("", (), "")


def test_published_numbers_are_converted_to_our_unit():
    published = Published(where="x", unit="ln CE", values={"softmax": 0.945})
    assert published.converted == {"softmax": pytest.approx(2.5728, abs=1e-4)}
    assert Published(where="x", unit="bits", values={"a": 1.0}).converted["a"] == pytest.approx(
        0.6931, abs=1e-4
    )
    assert Published(where="x", unit="percent", values={"a": 50}).converted["a"] == 0.5


def test_a_grid_has_a_cell_for_every_combination_that_is_kept():
    axes = {"kernel": {"exp": "exp", "two": "taylor(2)"}, "norm": {"sum": "/sum", "l2": "/l2"}}
    cells = grid(
        axes, lambda p: p["kernel"] + p["norm"], keep=lambda at: at["norm"] == "l2" or at["kernel"] == "exp"
    )
    assert [cell.name for cell in cells] == ["exp sum", "exp l2", "two l2"]
    assert cells[-1].settings == {"attention": ("taylor(2)/l2",)}


# ------------------------------------------------------------------------------------- files

HEAD = "from maclaurin.study import Behind, Experiment, Study, cells_of\n"
GOOD = HEAD + "e = Experiment('e', 'E', 'loss', {}, cells_of({'a': 'exp/sum'}), (0,), 'a')\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(text, name="mine"):
        file = tmp_path / "studies" / name / "study.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return make


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            HEAD + "\n\ne = Experiment('e', 'E', 'acuracy', {}, cells_of({'a': 'exp/sum'}), (0,), 'a')\n",
            "line 4: metric=",
        ),
        (HEAD + "e = Studdy()\n", "line 2: NameError"),
        (HEAD + "e = (\n", "line 2: SyntaxError"),
        (HEAD + "raise SystemExit(3)\n", "line 2: SystemExit"),
        ("study = 3\n", "study = Study"),
        (GOOD + "study = Study('s', 'S', '?', 'b', (e,), imports=('missing.py',))\n", "no such file"),
    ],
)
def test_an_error_in_study_py_has_its_line(write, text, words):
    write(text)
    with pytest.raises(InputError, match=words):
        load_study("mine")


def test_a_config_that_cannot_be_names_the_line_of_its_cell(write):
    cells = "cells = (\n  *cells_of({'a': 'exp/sum'}),\n  *cells_of({'b': 'exp/l2'}, learning_rate=1.0),\n)\n"
    body = "e = Experiment('e', 'E', 'loss', {'device': 'cpu'}, cells, (0,), 'a')\n"
    file = write(HEAD + cells + body + "study = Study('s', 'S', '?', 'b', (e,))\n")
    with pytest.raises(InputError, match=rf"{file.name}, line 4: experiment 'e', cell 'b': .*learning_rate"):
        plan_study(load_study("mine"))


def test_files_beside_a_study_and_above_it_can_be_imported(write, tmp_path):
    (tmp_path / "studies" / "one").mkdir(parents=True)
    for folder, value in (("one", 1), ("two", 2)):
        write(
            GOOD + "from nearby import NAME\nfrom shared import T\nstudy = Study(NAME, T, '?', 'b', (e,))\n",
            folder,
        )
        (tmp_path / "studies" / folder / "nearby.py").write_text(f"NAME = 'study-{value}'\n")
    (tmp_path / "studies" / "shared.py").write_text("T = 'title'\n")
    assert [load_study(name).name for name in ("one", "two", "one")] == ["study-1", "study-2", "study-1"]


def test_dashes_and_underscores_are_the_same_and_paths_work(write):
    file = write(GOOD + "study = Study('my-own-h200', 'T', 'Q', 'B', (e,))\n", "my_own_h200")
    for name in ("my-own-h200", "my_own_h200", "studies/my_own_h200", str(file)):
        assert find_study(name).resolve() == file
    assert load_study("my-own-h200").name == "my-own-h200"
    assert "my-own-h200" in known_studies()
    with pytest.raises(InputError, match="Did you mean my-own-h200"):
        find_study("my_own_h20")


def test_the_file_of_a_study_is_remembered_without_the_machine(write, tmp_path, monkeypatch):
    file = write(GOOD + "study = Study('s', 'T', 'Q', 'B', (e,))\n")
    assert source_name(file) == "studies/mine/study.py"
    assert source_file("studies/mine/study.py").resolve() == file
    packaged = find_study("mini")
    assert source_name(packaged) == "maclaurin:mini/study.py"
    assert source_file("maclaurin:mini/study.py").resolve() == packaged.resolve()
    assert source_file("studies/gone/study.py") is None
    assert source_name(None) == ""


def test_an_own_metric_is_a_number_that_runs_record():
    """It failed only after all tuning runs had been trained."""
    with pytest.raises(InputError, match=r"metric='nonsense' is not recorded by any run; metrics are loss"):
        Experiment("e", "E", Metric("nonsense", "Nonsense"), {}, cells_of({"a": "exp/sum"}), (0,), "a")
    own = Metric("validation_scored_tokens", "Tokens scored")
    assert Experiment("e", "E", own, {}, cells_of({"a": "exp/sum"}), (0,), "a").measure is own


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Metric("accuracy", "Accuracy", True, "Logit"),
            r"linear, log, logit, got 'Logit'.*Did you mean logit",
        ),
        (lambda: Metric("loss", " "), "metric 'loss' needs a title"),
        (lambda: with_metric(Metric("loss", "Loss", scale="logit")), "scale='logit' is for shares between 0"),
        (
            lambda: with_metric(Metric("accuracy", "Accuracy", True, "log")),
            "scale='log' is for numbers above 0",
        ),
        (lambda: with_metric(Metric("task:lines_32:log_odds", "Log-odds", True, "log")), "can be 0 or less"),
    ],
)
def test_an_own_metric_has_a_scale_that_its_numbers_have_a_place_on(make, message):
    """An unknown scale was taken for linear, and a logarithm of a negative number ended the report."""
    with pytest.raises(InputError, match=message):
        make()


def test_the_scale_of_an_own_metric_may_be_another():
    assert with_metric(Metric("loss", "Loss", scale="log")).measure.scale == "log"
    assert with_metric(Metric("accuracy", "Accuracy", True, "linear")).measure.scale == "linear"


def with_metric(metric):
    tasks = Tasks(("lines_32",)) if metric.name.startswith("task:") else None
    return Experiment("e", "E", metric, {}, cells_of({"a": "exp/sum"}), (0,), "a", tasks=tasks)
