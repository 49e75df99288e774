"""`maclaurin bench` as a user types it, on a CPU."""

import json
import os
import re
import signal
import time

import pytest

from tests.e2e import command

CHOSEN = ["--quick", "--case", "exp/l2 B2 H2 T128 D64", "--case", "step B1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def bench(*arguments, cwd, expect=0):
    return command.run("bench", *arguments, cwd=cwd, env=ENVIRONMENT, expect=expect, timeout=120)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder in which two cases were measured, and what the command said."""
    folder = tmp_path_factory.mktemp("bench")
    return folder, bench(*CHOSEN, "--plots", "figures", cwd=folder)


def test_results_are_printed_and_saved(measured):
    folder, said = measured
    assert re.search(r"1/2 exp/l2 B2 H2 T128 D64: [\d.]+ / [\d.]+ ms; torch SDPA ", said.stderr)
    assert re.search(r"2/2 taylor\(2\)/sum step B1 H2 T1 D64: [\d.]+ ms; \d+ % of a device copy", said.stderr)
    assert "small shapes" in said.stdout
    assert "without a verdict" in said.stdout
    data = json.loads((folder / "benchmarks" / "results" / "cpu_bench.json").read_text())
    first, second = data["cases"]
    assert (first["spec"], first["form"], first["backend"], first["dtype"]) == (
        "exp/l2",
        "parallel",
        "sdpa",
        "float32",
    )
    assert 0 < first["own"]["error"] < 1e-5
    assert first["own"]["forward_backward_ms"] > first["own"]["forward_ms"] > 0
    assert first["peers"]["sdpa"]["forward_ms"] > 0
    assert first["reached"] is None
    assert second["share_of_copy"] > 0
    assert data["roofs"]["copy_bytes_per_s"] > 0
    assert data["made"]["commit"]


def test_figures_are_drawn_where_there_is_something_to_draw(measured):
    folder, said = measured
    assert sorted(path.name for path in (folder / "figures").iterdir()) == ["roofline.svg", "table.md"]
    assert "time.svg is not drawn" in said.stdout


def test_resumed_it_has_nothing_left_to_do(measured):
    folder, _ = measured
    file = folder / "benchmarks" / "results" / "cpu_bench.json"
    before = json.loads(file.read_text())["cases"]
    said = bench(*CHOSEN, "--resume", cwd=folder)
    assert "2 cases of this machine and this code are kept" in said.stderr
    assert json.loads(file.read_text())["cases"] == before


def test_a_table_and_figures_from_the_file_alone(measured, tmp_path):
    folder, said = measured
    file = folder / "benchmarks" / "results" / "cpu_bench.json"
    again = bench("--table", file, "--plots", tmp_path / "figures", cwd=tmp_path)
    assert "1/2" not in again.stderr
    name = "exp/l2 B2 H2 T128 D64"
    row = next(line for line in said.stdout.splitlines() if name in line)
    assert row in again.stdout
    for path in (folder / "figures").iterdir():
        assert (tmp_path / "figures" / path.name).read_text() == path.read_text()


def test_cases_are_listed_with_their_targets(tmp_path):
    said = bench("--list", cwd=tmp_path).stdout
    assert "exp/len*out B2 H16 T16384 D64" in said
    assert "memory ≤ 0.8 GB" in said
    assert list(tmp_path.iterdir()) == []


def test_stopped_by_hand_it_says_how_to_go_on(tmp_path):
    arguments = ["bench", "--quick", "--case", "exp family", "--out", "bench.json"]
    process = command.start(*arguments, cwd=tmp_path, env=ENVIRONMENT)
    deadline = time.monotonic() + 60
    while not (tmp_path / "bench.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "results so far are in bench.json" in said
    assert "--out bench.json --resume" in said
    cases = json.loads((tmp_path / "bench.json").read_text())["cases"]
    assert 1 <= len(cases) < 18


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "exp/l3"], "no case has 'exp/l3' in its name or group"),
        (["--device", "cuda"], "the device cuda cannot be used here"),
        (["--device", "meta"], "a benchmark runs on cpu, cuda, cuda:1 …, not on 'meta'"),
        (["--table", "nothing.json"], "there is no benchmark at nothing.json"),
        (["--plots", "file", "--list"], "--plots: file is a file; name a folder"),
        (["--out", "file/x.json"], "--out: file is a file; name a folder"),
        (["--plots", "file/x", "--list"], "--plots: file/x cannot be written"),
        (["--out", "."], "--out: . is a folder; name a file"),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(tmp_path, arguments, words):
    (tmp_path / "file").write_text("")
    error = bench(*arguments, cwd=tmp_path, expect=2).stderr
    assert words in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
