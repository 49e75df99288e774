"""Runs from waiting to their end with an executor that trains nothing; what is shown; locks."""

import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.study.making import make_record

from maclaurin import InputError
from maclaurin.files import is_locked
from maclaurin.study.executors import Result, processes_of
from maclaurin.study.live_table import Overview, Row, View, chosen_rows, seconds_to_end
from maclaurin.study.pool import Pool, RunPlace, study_lock
from maclaurin.study.run_progress import RunProgress, RunReporter, StoppedEarly, read_progress, write_progress
from maclaurin.study.run_record import Label
from maclaurin.study.session import Session
from maclaurin.wording import duration


class Scripted:
    """An executor that ends each run as a script says: a record, a problem, or None for stopped."""

    workers, threads = 2, 1

    def __init__(self, script, empty_polls=0):
        self._script, self.submitted, self._running, self._empty = script, [], [], empty_polls

    def free(self):
        return self.workers - len(self._running)

    def submit(self, record, place):
        self.submitted.append(record.key)
        self._running.append(record.key)

    def poll(self, seconds):
        if self._empty:
            self._empty -= 1
            return []
        ended, self._running = self._running, []
        return [self._script(key) for key in ended]

    def progress(self):
        return {key: RunProgress(3, 20, 1.5, 2.0, 8.0) for key in self._running}

    def stop(self, seconds):
        pass

    def close(self):
        pass


def plan_of(*records):
    return {Label("e", f"c{i}", r.run.seed): r for i, r in enumerate(records)}


def train(tmp_path, plan, script, **options):
    pool, seen = Pool(tmp_path / "pool"), []
    executor = Scripted(script)
    with Session(executor, RunPlace(pool=str(pool.root)), View(), **options) as session:
        found = session.train(plan, {"e": "loss"}, seen.append)
    return found, executor, seen


def test_a_stopped_run_is_as_far_as_its_last_report_in_the_pool_says(tmp_path):
    """Not as far as the study saw it last, which may be before its first step."""
    run, pool = make_record("waiting", seed=0), Pool(tmp_path / "pool")

    class SeenAtItsStart(Scripted):
        def progress(self):
            return {key: RunProgress(0, 20, None, 0.0, None) for key in self._running}

    def script(key):
        pool.entry(key).path.mkdir(parents=True, exist_ok=True)
        write_progress(pool.entry(key).progress, RunProgress(7, 20, 1.5, 2.0, 8.0))
        return Result(key)

    executor = SeenAtItsStart(script, empty_polls=1)
    with Session(executor, RunPlace(pool=str(pool.root)), View()) as session:
        found = session.train(plan_of(run), {"e": "loss"}, lambda records: None)
    assert (found[run.key].status, found[run.key].step) == ("stopped", 7)


def test_a_run_that_crashes_has_a_record_and_the_others_go_on(tmp_path):
    good, bad = make_record("waiting", seed=0), make_record("waiting", seed=1)

    def script(key):
        done = make_record("finished", seed=0, metrics={"loss": 1.0})
        return Result(key, done) if key == good.key else Result(key, problem="error: no such thing")

    found, _, seen = train(tmp_path, plan_of(good, bad), script)
    assert {key: record.status for key, record in found.items()} == {good.key: "finished", bad.key: "crashed"}
    assert found[bad.key].message == "error: no such thing"
    assert Pool(tmp_path / "pool").entry(bad.key).record().status == "crashed"
    during = [record.status for record in seen[1].values()]
    assert "stopped" not in during, "a running run is recorded as running"


def test_runs_that_follow_from_a_result_do_not_wait_for_other_runs(tmp_path):
    """The next run of a search begins while a slow run of another search is still in progress."""
    slow, quick, next_one = (make_record("waiting", seed=seed) for seed in range(3))
    order = []

    class OneIsSlow(Scripted):
        def poll(self, seconds):
            ended = [key for key in self._running if key != slow.key] or self._running
            self._running = [key for key in self._running if key not in ended]
            order.extend(ended)
            return [Result(key, make_record("finished", seed=seeds[key])) for key in ended]

    seeds = {record.key: record.run.seed for record in (slow, quick, next_one)}
    asked = {}

    def next_runs(results):
        if not asked:
            asked.update(plan_of(slow, quick))
            return dict(asked)
        if quick.key in results and len(asked) == 2:
            asked[Label("e", "next", 2)] = next_one
            return {Label("e", "next", 2): next_one}
        return {}

    executor = OneIsSlow(None)
    with Session(executor, RunPlace(pool=str(tmp_path / "pool")), View()) as session:
        found = session.train({}, {"e": "loss"}, lambda records: None, next_runs=next_runs)
    assert order == [quick.key, next_one.key, slow.key]
    assert {record.status for record in found.values()} == {"finished"}


def test_results_of_another_torch_are_taken_from_the_pool_and_nothing_is_trained(tmp_path):
    done, missing = make_record("finished", seed=0), make_record("waiting", seed=1)
    pool = Pool(tmp_path / "pool")
    pool.entry(done.key).path.mkdir(parents=True)
    pool.entry(done.key).write(done)
    waiting = make_record("waiting", seed=0)
    found, executor, _ = train(tmp_path, plan_of(waiting), None, elsewhere="2.11")
    assert (found[done.key].status, executor.submitted) == ("finished", [])
    with pytest.raises(InputError, match=r"1 runs have no result of torch 2\.11"):
        train(tmp_path, plan_of(waiting, missing), None, elsewhere="2.11")


def test_wrong_input_is_recorded_and_not_kept_in_the_pool(tmp_path):
    """A mistyped tracker is not part of the key: another study took over the crash."""
    run = make_record("waiting", seed=0)
    found, _, _ = train(
        tmp_path, plan_of(run), lambda key: Result(key, problem="error: no tracker", is_input_error=True)
    )
    assert (found[run.key].status, found[run.key].message) == ("crashed", "error: no tracker")
    assert Pool(tmp_path / "pool").entry(run.key).record() is None
    _, executor, _ = train(tmp_path, plan_of(run), lambda key: Result(key, make_record("finished", seed=0)))
    assert executor.submitted == [run.key]


def test_trackers_get_the_names_of_the_study(tmp_path):
    class Watched(Scripted):
        places = ()

        def submit(self, record, place):
            self.places = (*self.places, (place.group, place.run_name, place.job_type))
            super().submit(record, place)

    executor = Watched(lambda key: Result(key, make_record()))
    place = RunPlace(pool=str(tmp_path / "pool"), group="mini")
    with Session(executor, place, View()) as session:
        tuning = make_record("waiting", seed=3, test=False)
        session.train(plan_of(tuning, make_record("waiting", seed=4)), {}, lambda records: None)
    assert executor.places == (("mini", "e/c0/seed-3", "tune"), ("mini", "e/c1/seed-4", "train"))


def test_a_run_that_ends_with_the_signal_to_the_study_is_stopped_and_not_crashed(tmp_path):
    """`timeout` and Slurm signal the whole process group: runs may end before the study asks them to."""
    record = make_record("waiting", seed=0)

    def script(key):
        signal.raise_signal(signal.SIGTERM)
        return Result(key, problem="the process ended with exit code 255")

    found, _, _ = train(tmp_path, plan_of(record), script)
    assert found[record.key].status == "waiting"
    assert Pool(tmp_path / "pool").entry(record.key).record() is None


@pytest.fixture
def clock(monkeypatch):
    """A clock that each run moves on by 10 seconds."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr("maclaurin.study.session.time.monotonic", lambda: Clock.now)
    return Clock


def run_of_ten_seconds(clock):
    def script(key):
        clock.now += 5.0  # two runs at once
        return Result(key, make_record(seed=seeds[key], seconds=10.0, step=20))

    seeds = {make_record(seed=seed).key: seed for seed in range(9)}
    return script


@pytest.mark.parametrize(("seconds", "trained"), [(9.0, 2), (12.0, 2), (22.0, 4), (1000.0, 8)])
def test_under_a_limit_of_time_no_run_is_started_that_would_not_end(tmp_path, clock, seconds, trained):
    """Two runs of 10 s at a time: the first two start, as nothing is known about their time."""
    plan = plan_of(*(make_record("waiting", seed=seed) for seed in range(8)))
    pool = Pool(tmp_path / "pool")
    executor = Scripted(run_of_ten_seconds(clock))
    with Session(executor, RunPlace(pool=str(pool.root)), View(), seconds=seconds) as session:
        found = session.train(plan, {"e": "loss"}, lambda records: None)
        assert session.interrupted == (trained < 8)
    assert len(executor.submitted) == trained
    assert [record.status for record in found.values()].count("waiting") == 8 - trained


def test_a_run_with_checkpoints_is_started_under_any_limit_of_time(tmp_path, clock):
    plan = plan_of(*(make_record("waiting", seed=seed, checkpoint_every=5) for seed in range(4)))
    executor = Scripted(run_of_ten_seconds(clock))
    with Session(executor, RunPlace(pool=str(tmp_path)), View(), seconds=12.0) as session:
        session.train(plan, {"e": "loss"}, lambda records: None)
    assert len(executor.submitted) == 4


def test_an_experiment_may_limit_its_runs_at_a_time(tmp_path):
    """Two workers: one trains the only run of `large` at a time, the other goes on with `small`."""
    small = {Label("small", "c", seed): make_record("waiting", seed=seed) for seed in range(3)}
    large = {Label("large", "c", seed): make_record("waiting", seed=seed) for seed in range(3, 6)}
    large_keys, together = {record.key for record in large.values()}, []

    class Watched(Scripted):
        def poll(self, seconds):
            together.append({key in large_keys for key in self._running} if len(self._running) > 1 else None)
            return super().poll(seconds)

    seeds = {make_record(seed=seed).key: seed for seed in range(6)}
    executor = Watched(lambda key: Result(key, make_record(seed=seeds[key])))
    with Session(executor, RunPlace(pool=str(tmp_path)), View(), at_once={"large": 1}) as session:
        found = session.train({**large, **small}, {}, lambda records: None)
    assert together == [{True, False}] * 3
    assert {record.status for record in found.values()} == {"finished"}


def test_a_running_run_is_recorded_as_running(tmp_path):
    waiting, snapshots = make_record("waiting"), []
    entry = Pool(tmp_path).entry(waiting.key)
    entry.path.mkdir(parents=True)
    write_progress(entry.progress, RunProgress(5, 20))
    executor = Scripted(lambda key: Result(key, make_record("finished")), empty_polls=1)
    with Session(executor, RunPlace(pool=str(tmp_path)), View()) as session:
        session.train(plan_of(waiting), {}, snapshots.append)
    statuses = [found[waiting.key].status for found in snapshots]
    assert statuses[0] == "stopped", "it was begun before"
    assert statuses[1] == "running"
    assert statuses[-1] == "finished"


def test_results_of_the_pool_are_taken_and_failures_only_with_retry_done_again(tmp_path):
    done, failed = make_record("finished", seed=0), make_record("crashed", seed=1)
    pool = Pool(tmp_path / "pool")
    for record in (done, failed):
        pool.entry(record.key).write(record)
    plan = plan_of(make_record("waiting", seed=0), make_record("waiting", seed=1))
    _, executor, _ = train(tmp_path, plan, lambda key: Result(key, done))
    assert executor.submitted == []
    _, executor, _ = train(tmp_path, plan, lambda key: Result(key, make_record(seed=1)), retry=True)
    assert executor.submitted == [failed.key]


def test_two_cells_that_ask_for_one_run_train_it_once(tmp_path):
    one = make_record("waiting")
    plan = {Label("e", "a", 0): one, Label("e", "b", 0): one}
    _, executor, _ = train(tmp_path, plan, lambda key: Result(key, make_record()))
    assert executor.submitted == [one.key]


def test_a_run_that_two_cells_share_is_shown_once(tmp_path):
    class Watched(View):
        rows = ()

        def show(self, overview):
            self.rows = overview.rows

    run, view = make_record("waiting", seed=0), Watched()
    executor = Scripted(lambda key: Result(key, make_record(seed=0)))
    with Session(executor, RunPlace(pool=str(tmp_path / "pool")), view) as session:
        session.train(plan_of(run, run), {"e": "loss"}, lambda records: None)
    assert [row.label.cell for row in view.rows] == ["c0"]


# --------------------------------------------------------------------------------- time to the end


def row(state, cell="a", *, tokens=320, seconds=None, left=None):
    steps = tokens // 16
    progress = RunProgress(1, steps, 1.0, (seconds or 0) - left, left) if left is not None else None
    record = make_record("waiting", steps=steps, seconds=None if left is not None else seconds)
    return Row(Label("e", cell, 0), record, state, progress)


def test_waiting_runs_use_times_of_similar_runs():
    done, other = row("finished", seconds=10.0), row("finished", "b", seconds=30.0)
    assert seconds_to_end([done, other, row("waiting", tokens=640)], 1) == pytest.approx(20.0)
    assert seconds_to_end([done, other, *[row("waiting", tokens=640)] * 2], 2) == pytest.approx(20.0)
    assert seconds_to_end([done, other, row("waiting", "c")], 1) == pytest.approx(20.0)


def test_nothing_measured_is_unknown_and_nothing_left_is_zero():
    assert seconds_to_end([row("waiting")], 1) is None
    assert seconds_to_end([row("finished", seconds=1.0)], 2) == 0.0


def test_running_ones_end_when_they_say_and_free_a_place():
    running = row("running", seconds=10.0, left=4.0)
    assert seconds_to_end([running, row("waiting")], 1) == pytest.approx(14.0)


def test_a_run_that_crashed_before_any_progress_is_not_counted_as_running():
    done, crashed = row("finished", seconds=10.0), row("crashed", "b")
    assert seconds_to_end([done, crashed], 1) == 0.0
    assert Overview((done, crashed), 1.0, 1).count("running") == 0


# --------------------------------------------------------------------------------- the live table


@given(
    st.lists(st.sampled_from(["waiting", "running", "finished", "crashed"]), max_size=60), st.integers(4, 30)
)
def test_the_table_fits_and_shows_what_runs(states, most):
    rows = [row(state, f"c{i}") for i, state in enumerate(states)]
    shown = chosen_rows(rows, most)
    assert len(shown) == min(most, len(rows))
    running = [r for r in rows if r.status == "running"]
    assert running[:most] == [r for r in shown if r.status == "running"]
    places = [next(i for i, r in enumerate(rows) if r is s) for s in shown]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3.2 s"), (41, "41 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


# ----------------------------------------------------------------------------------- progress


def test_progress_travels_through_a_file(tmp_path):
    file = tmp_path / "progress.json"
    assert read_progress(file) is None
    with RunReporter(10, lambda progress: write_progress(file, progress), seconds_before=5.0) as reporter:
        reporter.step(3, 1.5, 100.0)
    found = read_progress(file)
    assert (found.step, found.steps, found.loss) == (3, 10, 1.5)
    assert found.seconds >= 5.0


def run_through(losses, before=()):
    """Losses at steps 10, 20, …"""
    reporter = RunReporter(
        1000, lambda _: None, losses_before=[(10 * (i + 1), x) for i, x in enumerate(before)]
    )
    for place, loss in enumerate(losses, len(before) + 1):
        reporter.recorded(10 * place, loss)


def test_a_run_whose_loss_stays_far_above_its_start_is_given_up():
    with pytest.raises(StoppedEarly, match="stopped early") as caught:
        run_through([6.0, 6.1, 5.9, 5.0, *[8.0] * 30])
    assert caught.value.step == 140
    run_through([6.0, 6.1, 5.9, *[8.0] * 9, 5.0, *[8.0] * 9])  # a spike that comes back
    run_through([6.0, 6.1, 5.9, *[6.8] * 50])  # learns nothing, but has not diverged


def test_a_resumed_run_is_judged_by_where_it_first_began():
    run_through([5.0] * 20, before=[6.0, 6.1, 5.9, 3.0])
    with pytest.raises(StoppedEarly):
        run_through([8.0] * 4, before=[6.0, 6.1, 5.9, *[8.0] * 6])


def test_steps_that_a_resumed_run_repeats_are_judged_once():
    losses = [6.0, 6.1, 5.9, *[8.0] * 6]
    reporter = RunReporter(
        1000, lambda _: None, losses_before=[(10 * (i + 1), x) for i, x in enumerate(losses)]
    )
    for step in (60, 70, 80, 90, 100, 110, 120):
        reporter.recorded(step, 8.0)
    with pytest.raises(StoppedEarly) as caught:
        reporter.recorded(130, 8.0)
    assert caught.value.step == 130


def log(reporter, losses, log_every):
    """Losses as the trainer passes them on: all steps since the last report, then the report."""
    unread = []
    for step, loss in enumerate(losses, 1):
        unread.append((step, loss))
        if step % log_every == 0 or step == len(losses):
            for one in unread:
                reporter.recorded(*one)
            reporter.step(step, loss, 1.0)
            unread.clear()


@pytest.mark.parametrize("log_every", [1, 7, 10, 50, 1000])
def test_the_log_interval_does_not_change_when_a_run_is_given_up(log_every):
    """Losses were judged as they were logged, so the interval, which is not part of the key, decided."""
    with pytest.raises(StoppedEarly) as caught:
        log(RunReporter(300, lambda _: None), [6.0] * 30 + [8.0] * 270, log_every)
    assert caught.value.step == 130


# ------------------------------------------------------------------------------------------ locks

HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
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
    monkeypatch.setattr("maclaurin.study.pool.SECONDS_BETWEEN_CHECKS", 0.01)
    with (
        study_lock(tmp_path / "lock"),
        pytest.raises(InputError, match="another study is running"),
        study_lock(tmp_path / "lock"),
    ):
        pass
    with study_lock(tmp_path / "lock"):
        pass


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="cannot be written"),
        study_lock(tmp_path / "file" / "out" / "lock"),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "count"),
    [("", 1), ("--nproc-per-node 8", 8), ("--standalone --nproc_per_node=2 --nnodes=3", 6)],
)
def test_torchrun_arguments_say_how_many_processes(arguments, count):
    assert processes_of(arguments) == count
