"""What benchmarks/gpu_training.py makes of the figures of its runs, without training."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(FOLDER))  # for machine.py
    try:
        spec = importlib.util.spec_from_file_location("benchmarks_gpu_training", FOLDER / "gpu_training.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("benchmarks_gpu_training", None)


def test_targets(script):
    runs = {run.name: run for run in script.RUNS}
    half = {"tokens_per_second": script.PEAK_FLOPS / 2e9, "flops_per_token": 1e9}
    found = script.judged(runs["softmax at 275M"], half, [])
    assert found == {"model_flop_utilisation": 0.5, "reached": True}
    softmax = {"group": "converted", "name": "softmax", "tokens_per_second": 100.0}
    found = script.judged(runs["window and tail"], {"tokens_per_second": 50.0}, [softmax])
    assert found == {"relative_to_softmax": 0.5, "reached": False}
    assert script.judged(runs["window and tail"], {"tokens_per_second": 50.0}, []) == {}
    assert script.judged(runs["window and tail"], {"error": "out of memory"}, [softmax]) == {}


def test_a_run_ends_at_its_limit(script):
    found = script.alone(script.RUNS[0].tiny(), 0.2, compiled=False)
    assert found["error"] == "not finished after 0.2 s"


@pytest.mark.slow
def test_a_tiny_run_gives_figures(script):
    found = script.alone(script.RUNS[-1].tiny(), 300, compiled=False)
    assert found["tokens_per_second"] > 0
    assert "not compiled" in script.line_of({**script.RUNS[-1].tiny().__dict__, **found})
