"""Budgets, choices of cells, thinning, times to the end, the table's rows, locks, names."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin import InputError
from maclaurin.study import Behind, Experiment, Study, cells_of
from maclaurin.study.budget import read_scale, scaled
from maclaurin.study.eta import RunTiming, seconds_to_end
from maclaurin.study.find import find_study, known_studies, load_study
from maclaurin.study.glance import RunRow
from maclaurin.study.lifeline import is_locked, living_study
from maclaurin.study.progress import RunProgress, RunTeller, read_progress, write_progress
from maclaurin.study.select import select
from maclaurin.study.thinning import thinned
from maclaurin.study.torchrun_executor import processes_of
from maclaurin.study.view import chosen_rows, duration
from maclaurin.training.config import TrainConfig

# ------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(("text", "scale"), [("0.5x", 0.5), ("2x", 2.0), ("0.1", 0.1), (" 1x ", 1.0)])
def test_a_budget_is_a_factor(text, scale):
    assert read_scale(text) == scale


@pytest.mark.parametrize("text", ["", "x", "0x", "-1x", "nan", "inf", "half", "2xx"])
def test_what_is_no_factor_is_an_error(text):
    with pytest.raises(InputError, match=r"0\.5x or 2x"):
        read_scale(text)


@given(st.integers(1, 10**6), st.integers(0, 10**4), st.floats(1e-6, 100))
def test_a_scaled_run_keeps_its_shape(steps, warmup, scale):
    config = scaled(TrainConfig(steps=steps, warmup=warmup), scale)
    assert config.steps == max(1, round(steps * scale))
    assert (config.warmup == 0) == (warmup == 0)


# ------------------------------------------------------------------------------ choices of cells


def study():
    cells = cells_of({"softmax": "exp/sum", "norm": "exp/l2", "second": "taylor(2)/sum"})
    words = {"says": "?", "source": "?", "paper": "?"}
    return Study(
        "s", "S", "?", "none",
        (
            Experiment("text", "Text", "test_loss", {}, cells, (0,), "softmax"),
            Experiment("recall", "Recall", "accuracy", {}, cells[:2], (0,), "softmax"),
        ),
        (
            Behind(**words, experiment="text", cells=("softmax", "norm")),
            Behind(**words, experiment="text", cells=("softmax", "second")),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("wanted", ["second", "taylor(2)/sum"])
def test_cells_are_chosen_by_name_or_notation_with_their_baseline(wanted):
    chosen = select(study(), [wanted])
    assert [e.name for e in chosen.experiments] == ["text"]
    assert [cell.name for cell in chosen.experiments[0].cells] == ["softmax", "second"]
    assert [claim.cells for claim in chosen.claims] == [("softmax", "second")]


def test_a_catalogue_name_chooses_its_notation():
    assert select(study(), ["softmax"]).experiments == select(study(), ["exp/sum"]).experiments
    assert select(study(), []) == study()


def test_a_choice_that_meets_nothing_is_an_error_with_suggestions():
    with pytest.raises(InputError, match=r"it has softmax, norm, second\. Did you mean"):
        select(study(), ["norm", "secnd"])


# -------------------------------------------------------------------------------------- thinning


values = st.lists(st.floats(-1e6, 1e6), max_size=500)


@given(values, st.integers(1, 300))
def test_thinning_keeps_the_end_and_the_range(ys, most):
    points = [(i + 1, y) for i, y in enumerate(ys)]
    short = thinned(points, most)
    assert len(short) == min(most, len(points))
    assert [x for x, _ in short] == sorted({x for x, _ in short})
    if points:
        assert short[-1][0] == points[-1][0]
        slack = 1e-5 * (1 + max(map(abs, ys)))
        assert all(min(ys) - slack <= y <= max(ys) + slack for _, y in short)


@given(values)
def test_short_curves_stay_and_names_may_be_the_first(ys):
    points = [(i, y) for i, y in enumerate(ys)]
    assert [x for x, _ in thinned(points, 500)] == [x for x, _ in points]
    halves = thinned(points, 2, name_first=True)
    assert not points or halves[0][0] == 0


def test_what_is_no_number_is_left_out():
    assert thinned([(1, 2.0), (2, math.nan), (3, math.inf)], 9) == ((1, 2.0),)


# --------------------------------------------------------------------------------- time to the end


def waiting(tokens, cell="a"):
    return RunTiming("e", cell, tokens, True)


def test_waiting_runs_take_the_time_of_their_like():
    done = RunTiming("e", "a", 100, False, seconds=10.0)
    other = RunTiming("e", "b", 100, False, seconds=30.0)
    assert seconds_to_end([done, other, waiting(200)], 1) == pytest.approx(20.0)
    assert seconds_to_end([done, other, waiting(200), waiting(200)], 2) == pytest.approx(20.0)
    assert seconds_to_end([done, other, waiting(100, "c")], 1) == pytest.approx(20.0)


def test_nothing_measured_is_unknown_and_nothing_left_is_zero():
    assert seconds_to_end([waiting(5)], 1) is None
    assert seconds_to_end([RunTiming("e", "a", 5, False, seconds=1.0)], 2) == 0.0


def test_running_ones_end_when_they_say_and_free_a_place():
    running = RunTiming("e", "a", 100, False, seconds=10.0, seconds_left=4.0)
    assert seconds_to_end([running, waiting(100)], 1) == pytest.approx(14.0)


# --------------------------------------------------------------------------------- the live table


@given(
    st.lists(st.sampled_from(["waiting", "running", "finished", "crashed"]), max_size=60), st.integers(4, 30)
)
def test_the_table_fits_and_shows_what_runs(states, most):
    rows = [RunRow("e", f"c{i}", 0, state, 0, 1) for i, state in enumerate(states)]
    shown = chosen_rows(rows, most)
    assert len(shown) == min(most, len(rows))
    running = [row for row in rows if row.state == "running"]
    assert running[:most] == [row for row in shown if row.state == "running"]
    assert [rows.index(row) for row in shown] == sorted(rows.index(row) for row in shown)


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3 s"), (185, "3:05 min"), (7800, "2:10 h"), (864_000, "10 days")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_news_travel_through_a_file(tmp_path):
    file = tmp_path / "progress.json"
    assert read_progress(file) is None
    with RunTeller(10, 5.0, lambda news: write_progress(file, news)) as teller:
        teller.step(3, 1.5, 100.0)
    news = read_progress(file)
    assert (news.step, news.steps, news.loss) == (3, 10, 1.5)
    assert news.seconds >= 5.0
    assert news == RunProgress(3, 10, 1.5, news.seconds, None)


# ------------------------------------------------------------------------------------------ locks


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_as_long_as_its_process_lives(tmp_path):
    path = tmp_path / "lock"
    assert not is_locked(path)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    assert is_locked(path)
    process.kill()
    process.wait()
    assert not is_locked(path)


def test_two_studies_in_one_folder_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("maclaurin.study.lifeline.SECONDS_BETWEEN_LOOKS", 0.01)
    with (
        living_study(tmp_path / "lock"),
        pytest.raises(InputError, match="another study is at work"),
        living_study(tmp_path / "lock"),
    ):
        pass


# ------------------------------------------------------------------------------------------ names


STUDY = """
from maclaurin.study import Experiment, Study, cells_of
e = Experiment("e", "E", "test_loss", {}, cells_of({"a": "exp/sum"}), (0,), "a")
"""


def test_dashes_and_underscores_are_the_same_and_paths_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "studies" / "my_own_h200" / "study.py"
    file.parent.mkdir(parents=True)
    file.write_text(STUDY + "study = Study('my-own-h200', 'T', 'Q', 'B', (e,))\n")
    for name in ("my-own-h200", "my_own_h200", "studies/my_own_h200", str(file)):
        assert find_study(name).resolve() == file
    assert load_study("my-own-h200").name == "my-own-h200"
    assert "my-own-h200" in known_studies()
    with pytest.raises(InputError, match="Did you mean my-own-h200"):
        find_study("my_own_h20")


@pytest.mark.parametrize(
    ("arguments", "count"),
    [("", 1), ("--nproc-per-node 8", 8), ("--standalone --nproc_per_node=2 --nnodes=3", 6)],
)
def test_torchrun_arguments_say_how_many_processes(arguments, count):
    assert processes_of(arguments) == count
