"""Results on disk, what continues from them, and intervals."""

import json
import math

import pytest

from maclaurin.errors import InputError
from maclaurin.evaluation.results import (
    Identity,
    Results,
    Score,
    TaskResult,
    finished_tasks,
    mean_score,
    read_results,
    share_score,
)

IDENTITY = Identity(
    model="m",
    weights="w",
    attention=("exp/sum",),
    tokenizer="bytes",
    max_length=64,
    limit=4,
    seed=0,
    text="novel 12",
)
RESULT = TaskResult(
    task="t",
    kind="choices",
    asked_by="maclaurin",
    version="1.0",
    fingerprint="f",
    items=4,
    questions=8,
    metrics={"acc": Score(value=0.5, stderr=None, higher_is_better=True)},
    distance=(1, 2, 3),
)


def test_what_was_written_is_read_again(tmp_path):
    path = tmp_path / "r.json"
    assert finished_tasks(path, IDENTITY) == {}
    Results(IDENTITY, {"python": "3"}, {"t": RESULT}).write(path)
    assert finished_tasks(path, IDENTITY) == {"t": RESULT}
    assert json.loads(path.read_text())["identity"]["attention"] == ["exp/sum"]
    assert read_results(path).groups == {}


def test_different_evaluation_is_not_resumed(tmp_path):
    path = tmp_path / "r.json"
    Results(IDENTITY, {}, {"t": RESULT}).write(path)
    other = Identity(**{**vars(IDENTITY), "attention": ("poly(0)+window(8)/sum",)})
    with pytest.raises(InputError, match=r"another evaluation \(attention: \('exp/sum',\), now"):
        finished_tasks(path, other)


@pytest.mark.parametrize(
    "content", ["no json", "[]", '{"schema": 99, "tasks": {}}', '{"schema": 2}', b"\xff"]
)
def test_other_files_are_told_apart(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match="`out`"):
        finished_tasks(path, IDENTITY)


# --------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(("right", "number"), [(0, 5), (1, 5), (7, 12), (190, 200), (200, 200)])
def test_wilsons_interval_is_scipys(right, number):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(right, number).proportion_ci(0.95, method="wilson")
    found = share_score([1.0] * right + [0.0] * (number - right))
    assert found.value == right / number
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_scores_in_between_have_an_interval_that_is_too_wide():
    found = share_score([0.5, 0.75, 0.5, 0.25] * 10)
    assert found.high - found.value > 1.96 * found.stderr


def test_means_have_their_standard_error():
    found = mean_score([1.0, 2.0, 3.0, math.inf])
    assert found.value == 2
    assert found.stderr == pytest.approx(1 / math.sqrt(3))
    assert (found.low, found.high) == pytest.approx((2 - 1.96 / 3**0.5, 2 + 1.96 / 3**0.5), rel=1e-3)
    assert mean_score([4.0]).stderr is None
    assert mean_score([math.nan]) == Score(value=None, higher_is_better=True)
