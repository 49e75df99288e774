"""lm-evaluation-harness: our model answers it as its own class would, and our tasks are asked through it."""

import json
import logging
from itertools import islice

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from maclaurin.errors import InputError
from maclaurin.evaluation.eval_task import task_named
from maclaurin.evaluation.harness import (
    AnsweringModel,
    ask_harness_task,
    find_tasks,
    group_metrics,
    harness_task,
    local_tasks,
    quiet_libraries,
)
from maclaurin.evaluation.prose import Prose
from maclaurin.evaluation.results import Score
from maclaurin.evaluation.scoring import Scorer, ask
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.model_folder import as_fast_tokenizer, byte_tokenizer

pytestmark = pytest.mark.slow

CONTEXTS = ["one", "a somewhat longer text", "a\x00", "the third text of them all \x00\x00"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = MaclaurinConfig(
        attention="exp/sum",
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=48,
        initializer_range=0.3,
    )
    return MaclaurinForCausalLM(config).eval()


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=n) for n, a in enumerate(arguments)]


def ours(model, batch_size):
    return AnsweringModel(model, as_fast_tokenizer(byte_tokenizer()), batch_size, None)


def theirs(model, batch_size):
    return HFLM(pretrained=model, tokenizer=as_fast_tokenizer(byte_tokenizer()), batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_likelihoods_are_the_same_from_fewer_logits(model, batch_size):
    pairs = [(text, end) for text in CONTEXTS for end in (" x", " yes", "\x00", " a long end")]
    requests = instances("loglikelihood", pairs)
    asked, shares = ours(model, batch_size), []
    asked.begin(lambda share, what: shares.append(share))
    found = asked.loglikelihood(requests)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    expected = theirs(model, batch_size).loglikelihood(requests, disable_tqdm=True)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-4)


def test_rolling_likelihood_is_the_sum_over_every_token_after_one_separator(model):
    texts = [text * 2 for text in CONTEXTS]
    asked = AnsweringModel(model, as_fast_tokenizer(byte_tokenizer()), 2, 200)
    found = asked.loglikelihood_rolling(instances("loglikelihood_rolling", [(t,) for t in texts]))
    for text, likelihood in zip(texts, found, strict=True):
        tokens = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1].log_softmax(-1)
        assert likelihood == pytest.approx(float(logits.gather(1, tokens[0, 1:, None]).sum()), abs=2e-2)


def test_texts_that_do_not_fit_are_counted(model):
    asked = ours(model, 2)
    asked.loglikelihood(instances("loglikelihood", [("x" * 46, " y"), ("x" * 47, " y")]))
    assert asked.truncated == 1
    asked.begin()
    settings = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
    asked.generate_until(instances("generate_until", [("x" * 39, settings), ("x" * 40, settings)]))
    assert asked.truncated == 1


def test_non_finite_output_is_counted(model):
    asked = ours(model, 2)
    with torch.no_grad():
        kept = model.lm_head.weight[5, 0].clone()
        model.lm_head.weight[5, 0] = torch.nan
    asked.loglikelihood(instances("loglikelihood", [("abc", " y")]))
    model.lm_head.weight.data[5, 0] = kept
    assert asked.non_finite == 1


# ------------------------------------------------------------------------------------ our tasks


@pytest.mark.parametrize(
    "name",
    [
        "maclaurin_recall_64",
        "maclaurin_multiquery_256",
        "maclaurin_multivalue_256",
        "maclaurin_induction_16",
        "maclaurin_lines_32",
        "maclaurin_recall_64_exact",
        "maclaurin_words_256_exact",
    ],
)
def test_our_tasks_give_the_same_scores_with_and_without_the_harness(model, name):
    task = task_named(name)
    items = list(islice(task.task.items(Prose.embedded(), 0), 4))
    tokenizer = as_fast_tokenizer(byte_tokenizer())
    alone = ask(Scorer(model, tokenizer, 4000), items, task.mode)
    asked = AnsweringModel(model, tokenizer, 2, 4000)
    harness = ask_harness_task(asked, harness_task(task, items), limit=None, seed=0)
    (metric,) = harness.metrics
    assert harness.metrics[metric].value == pytest.approx(alone.metrics[metric].value)
    assert harness.questions == alone.questions
    assert (harness.truncated, alone.truncated) == (0, 0)


def test_perplexity_is_the_same_with_and_without_the_harness(model):
    from maclaurin.evaluation.eval_task import Item, TaskInMode
    from maclaurin.evaluation.text_tasks import HeldOutText

    items = [Item("def f(x):\n    return x\n"), Item("y = 1\nz = 2\n")]
    task = TaskInMode(HeldOutText(), "text")
    tokenizer = as_fast_tokenizer(byte_tokenizer())
    alone = ask(Scorer(model, tokenizer, 4000), items, "text").metrics
    asked = AnsweringModel(model, tokenizer, 2, 4000)
    harness = ask_harness_task(asked, harness_task(task, items), limit=None, seed=0).metrics
    assert {n: m.value for n, m in harness.items()} == pytest.approx(
        {n: m.value for n, m in alone.items()}, rel=1e-4
    )


def test_no_library_is_patched_or_left_quiet(model, capfd):
    """The process is as it was: tqdm's class, the levels of loggers, the bars of datasets."""
    import datasets
    from tqdm.std import tqdm

    begin, level = vars(tqdm)["__init__"], logging.getLogger("lm_eval").level
    during = []
    task = task_named("maclaurin_recall_64")
    items = list(islice(task.task.items(Prose.embedded(), 0), 2))
    asked = AnsweringModel(model, as_fast_tokenizer(byte_tokenizer()), 2, 4000)
    capfd.readouterr()
    ask_harness_task(
        asked,
        harness_task(task, items),
        limit=None,
        seed=0,
        report=lambda share, what: during.append(vars(tqdm)["__init__"] is begin),
    )
    assert during
    assert all(during)
    assert vars(tqdm)["__init__"] is begin
    assert logging.getLogger("lm_eval").level == level
    assert not datasets.are_progress_bars_disabled()
    with pytest.raises(KeyError), quiet_libraries():
        raise KeyError
    assert not datasets.are_progress_bars_disabled()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "it/s" not in captured.err


# ---------------------------------------------------------------------------------- other tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tasks with their data beside them, and a group with their mean."""
    place = tmp_path_factory.mktemp("tasks")
    rows = [{"q": f"{n} is", "c": ["red", "blue"], "a": n % 2} for n in range(6)]
    (place / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = "dataset_path: json\ndataset_kwargs: {data_files: {test: colours.jsonl}}\ntest_split: test\n"
    (place / "colours.yaml").write_text(
        f"task: colours\n{common}output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: c\n"
        "doc_to_target: a\nmetric_list: [{metric: acc}, {metric: acc_norm}]\nmetadata: {version: 3.5}\n"
    )
    (place / "likelihood.yaml").write_text(
        f"task: likelihood\n{common}output_type: loglikelihood\ndoc_to_text: q\ndoc_to_target: ' red'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true},"
        " {metric: perplexity, aggregation: perplexity, higher_is_better: false}]\n"
    )
    (place / "both.yaml").write_text(
        "group: both\ntask: [colours, likelihood]\n"
        "aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]\n"
    )
    return place


def test_tasks_in_files_give_what_the_harness_computes(model, folder):
    from lm_eval.evaluator import evaluate

    found = find_tasks(["both"], [folder])
    assert set(local_tasks([folder])) == {"both", "colours", "likelihood"}
    asked = ours(model, 2)
    results = {name: ask_harness_task(asked, task, limit=4, seed=0) for name, task in found.tasks.items()}
    fresh = find_tasks(["both"], [folder])
    with quiet_libraries():
        expected = evaluate(
            lm=theirs(model, 2), task_dict={"tasks": fresh.tasks, "groups": {}}, limit=4, bootstrap_iters=0
        )["results"]
    for name, result in results.items():
        assert result.questions == 4
        for metric, value in result.metrics.items():
            assert value.value == pytest.approx(expected[name][f"{metric},none"], rel=1e-4), (name, metric)
    acc = results["colours"].metrics["acc"]
    assert acc.low < acc.value < acc.high
    assert results["likelihood"].metrics["perplexity"].low is None
    metrics = {name: (result.questions, result.metrics) for name, result in results.items()}
    mean = (results["colours"].metrics["acc"].value + results["likelihood"].metrics["acc"].value) / 2
    assert group_metrics(found.groups["both"], metrics)["acc"].value == pytest.approx(mean)


def test_tasks_that_cannot_be_asked(model, folder, tmp_path):
    with pytest.raises(InputError, match=r"there is no task 'colour'\. Did you mean colours"):
        find_tasks(["colour"], [folder])
    with pytest.raises(InputError, match="there is no folder"):
        find_tasks(["colours"], [tmp_path / "nowhere"])
    (tmp_path / "broken.yaml").write_text(
        "task: broken\ndataset_path: json\ndataset_kwargs: {data_files: {test: nothing.jsonl}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: q\n"
    )
    with pytest.raises(InputError, match="the task broken cannot be loaded: FileNotFoundError"):
        find_tasks(["broken"], [tmp_path])
    unsafe = next(iter(find_tasks(["colours"], [folder]).tasks.values()))
    unsafe.UNSAFE_CODE = True
    with pytest.raises(InputError, match="runs code that models write"):
        ask_harness_task(ours(model, 1), unsafe, limit=1, seed=0)


def test_metrics_without_a_number_are_none():
    from maclaurin.evaluation.harness import _metric

    assert _metric([(1, 2), (3, 4)], lambda values: float("nan"), None) == Score(value=None)
    assert _metric([0.5, 0.5], None, False).value == 0.5
    assert _metric([1, 0], lambda values: 0.5, True).high <= 1
