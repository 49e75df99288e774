"""A whole evaluation: tasks, results on disk, what is repeated and what is not."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from maclaurin.errors import InputError
from maclaurin.evaluation.evaluate import EvaluationRequest
from maclaurin.evaluation.results import read_results
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM

TASKS = ("maclaurin_recall_64", "maclaurin_words_256_exact", "maclaurin_cloze")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = MaclaurinConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=4000,
        initializer_range=0.3,
    )
    MaclaurinForCausalLM(config).save_pretrained(folder)
    return str(folder)


def request(model, **options):
    return EvaluationRequest(**{"model": model, "tasks": TASKS, "tokenizer": "bytes", "limit": 3, **options})


def test_results_are_kept_and_only_what_is_new_is_asked(model, tmp_path):
    out, asked, loaded = tmp_path / "results.json", [], []

    @contextmanager
    def progress(title):
        asked.append(title)
        yield lambda share, what: None

    @contextmanager
    def status(text):
        loaded.append(text)
        yield

    first = request(model, out=out).run(progress, status)
    assert asked == list(TASKS)
    assert loaded == [f"loading {model}"]
    assert read_results(out) == first
    assert set(first.tasks) == set(TASKS)
    recall = first.tasks["maclaurin_recall_64"]
    assert (recall.items, recall.questions, recall.asked_by, recall.kind) == (3, 3, "maclaurin", "choices")
    assert set(recall.metrics) == {"acc", "log_odds", "log_odds_gain"}
    assert len(recall.fingerprint) == 64
    assert first.identity.text.startswith("moby-dick ")
    asked.clear()
    wider = request(model, out=out, tasks=("maclaurin_recall", *TASKS[1:])).run(progress)
    assert asked == ["maclaurin_recall_256", "maclaurin_recall_1024"]
    assert wider.tasks["maclaurin_recall_64"] == recall
    values = [wider.tasks[f"maclaurin_recall_{n}"].metrics["acc"].value for n in (64, 256, 1024)]
    assert wider.groups["maclaurin_recall"]["acc"].value == pytest.approx(sum(values) / 3)
    asked.clear()
    request(model, out=out, again=True).run(progress)
    assert asked == list(TASKS)
    assert set(read_results(out).tasks) == set(TASKS)


def test_another_text_or_model_does_not_go_into_the_same_file(model, tmp_path):
    out = tmp_path / "results.json"
    request(model, out=out, tasks=TASKS[2:]).run()
    novel = tmp_path / "novel.txt"
    novel.write_text("".join(f"This is sentence number {n} of a novel.\n" for n in range(40)))
    with pytest.raises(InputError, match=r"text: 'moby-dick .*', now 'novel.txt "):
        request(model, out=out, text=novel).run()
    with pytest.raises(InputError, match="attention: "):
        request(model, out=out, attention=("taylor(2)/sum",)).run()


@pytest.mark.slow
def test_a_constant_size_state_answers_too(model):
    options = {"tasks": ("maclaurin_recall_64", "maclaurin_multiquery_256_exact"), "limit": 2}
    whole = request(model, **options).run()
    tail = request(model, attention=("taylor(2,about=mean)+window(2000)/sum",), **options).run()
    assert tail.identity.attention == ("taylor(2,about=mean)+window(2000)/sum",)
    for name, result in whole.tasks.items():  # a window that holds everything is softmax
        for metric, found in result.metrics.items():
            assert tail.tasks[name].metrics[metric].value == pytest.approx(found.value, abs=1e-3)


def test_a_text_that_gives_no_items_is_an_error(model, tmp_path):
    novel = tmp_path / "novel.txt"
    novel.write_text("".join(f"This is it: number {n} of all.\n" for n in range(40)))
    with pytest.raises(InputError, match="maclaurin_cloze: no item can be made from the text"):
        request(model, text=novel, tasks=("maclaurin_cloze",)).run()


def test_invalid_requests_fail_before_loading(model, tmp_path, monkeypatch):
    monkeypatch.setattr("maclaurin.models.model_folder.load_model", None)
    with pytest.raises(InputError, match="`out`: /proc cannot be written"):
        request(model, out=Path("/proc/x.json")).run()
    with pytest.raises(InputError, match="the size must be"):
        request(model, tasks=("maclaurin_needle_7",)).run()
    with pytest.raises(InputError, match="`text`: there is no file"):
        request(model, text=tmp_path / "nothing").run()


def test_our_tasks_and_others_through_the_harness(model, tmp_path):
    pytest.importorskip("lm_eval")
    rows = [{"q": f"{n} is", "c": ["red", "blue"], "a": n % 2} for n in range(6)]
    (tmp_path / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "colours.yaml").write_text(
        "task: colours\ndataset_path: json\ndataset_kwargs: {data_files: {test: colours.jsonl}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: c\ndoc_to_target: a\n"
        "metric_list: [{metric: acc}]\nmetadata: {version: 3.5}\n"
    )
    (tmp_path / "all.yaml").write_text(
        "group: all\ntask: [colours]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    out, asked = tmp_path / "results.json", []

    @contextmanager
    def progress(title):
        asked.append(title)
        yield lambda share, what: None

    options = {"tasks": ("maclaurin_recall_64", "all"), "include": (tmp_path,), "out": out}
    alone = request(model, **options).run(progress)
    assert (alone.tasks["colours"].version, alone.tasks["colours"].asked_by) == ("3.5", "lm-eval")
    assert alone.tasks["colours"].fingerprint is None
    assert alone.groups["all"]["acc"].value == alone.tasks["colours"].metrics["acc"].value
    assert alone.machine["versions"]["lm-eval"]
    asked.clear()
    harness = request(model, **options, harness=True).run(progress)
    assert asked == ["maclaurin_recall_64"], "another scoring mode is another result"
    found = harness.tasks["maclaurin_recall_64"]
    assert found.asked_by == "lm-eval"
    assert found.metrics["acc"].value == alone.tasks["maclaurin_recall_64"].metrics["acc"].value
