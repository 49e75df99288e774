"""Results on disk, and what goes on from them."""

import json

import pytest

from maclaurin.errors import InputError
from maclaurin.evaluation.results import Identity, Metric, Results, TaskResult, finished_tasks

IDENTITY = Identity(
    model="m", weights="w", attention=["exp/sum"], tokenizer="bytes", max_length=64, limit=4, seed=0
)
RESULT = TaskResult(
    task="t",
    kind="multiple_choice",
    version="1.0",
    fingerprint="f",
    items=4,
    metrics={"acc": Metric(value=0.5, stderr=None, higher_is_better=True)},
    distance=[1, 2, 3],
)


def test_what_was_written_is_read_again(tmp_path):
    path = tmp_path / "r.json"
    assert finished_tasks(path, IDENTITY) == {}
    Results(IDENTITY, {"python": "3"}, {"t": RESULT}).write(path)
    assert finished_tasks(path, IDENTITY) == {"t": RESULT}
    assert json.loads(path.read_text())["attention"] == ["exp/sum"]


def test_results_of_another_evaluation_are_not_gone_on_from(tmp_path):
    path = tmp_path / "r.json"
    Results(IDENTITY, {}, {"t": RESULT}).write(path)
    other = Identity(**{**vars(IDENTITY), "attention": ["poly(0)+window(8)/sum"]})
    with pytest.raises(InputError, match=r"another evaluation \(attention: \['exp/sum'\], now"):
        finished_tasks(path, other)


@pytest.mark.parametrize("content", ["no json", "[]", '{"schema": 99, "tasks": {}}'])
def test_other_files_are_told_apart(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(InputError, match="--out"):
        finished_tasks(path, IDENTITY)
