"""`maclaurin eval` as a user types it, on a random Llama of a few thousand weights with its own tokenizer."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval")

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
OURS = "maclaurin_recall_64,maclaurin_recall_64_exact,maclaurin_induction_16,maclaurin_perplexity"


def run(*arguments, expect=0, code="", **options):
    start = ["-c", f"{code}; from maclaurin.cli.main import main; main()"] if code else ["-m", "maclaurin"]
    result = subprocess.run(
        [sys.executable, *start, "eval", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env=ENVIRONMENT,
        check=False,
        **options,
    )
    assert result.returncode == expect, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from maclaurin.data.text_tokenizers import SEPARATOR, train_byte_pairs

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(
            train_byte_pairs(300, iter(["the password of a river is a lamp"] * 20))
        ),
        eos_token=SEPARATOR,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def local_tasks(tmp_path_factory):
    """A YAML file with its data beside it."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "colours.jsonl").write_text(
        "".join(json.dumps({"q": f"{n} is", "c": ["red", "blue"], "a": n % 2}) + "\n" for n in range(6))
    )
    (folder / "colours.yaml").write_text(
        "task: colours\ndataset_path: json\ndataset_kwargs: {data_files: {test: colours.jsonl}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: c\ndoc_to_target: a\n"
        "metric_list: [{metric: acc}]\nmetadata: {version: 3.5}\n"
    )
    return folder


def test_every_kind_of_task_then_only_what_is_new(model, local_tasks, tmp_path):
    out = tmp_path / "results.json"
    local = ("--include-path", local_tasks, "--out", out)
    shown = run(model, "--tasks", f"{OURS},colours", "--limit", 3, *local).stdout
    assert "maclaurin_induction_16" in shown
    assert "lost their beginning" not in shown
    first = json.loads(out.read_text())
    assert first["attention"] == ["exp/sum"]
    assert first["machine"]["versions"]["lm-eval"]
    assert (first["limit"], first["seed"], first["model"]) == (3, 0, str(model))
    tasks = first["tasks"]
    kinds = {result["kind"] for result in tasks.values()}
    assert kinds == {"multiple_choice", "generate_until", "loglikelihood", "loglikelihood_rolling"}
    assert all(result["items"] == 3 and result["broken"] == 0 for result in tasks.values())
    assert tasks["colours"]["version"] == "3.5"
    assert tasks["colours"]["fingerprint"] is None
    assert len(tasks["maclaurin_recall_64"]["fingerprint"]) == 64
    assert tasks["maclaurin_perplexity"]["metrics"]["byte_perplexity"]["value"] > 5
    assert 0 <= tasks["maclaurin_recall_64_exact"]["metrics"]["exact_match (first_word)"]["value"] <= 1
    assert tasks["maclaurin_recall_64"]["distance"][0] > 64

    wider = ("--tasks", "colours,maclaurin_recall_64,maclaurin_cloze", "--limit", 3)
    run(model, *wider, *local)
    second = json.loads(out.read_text())["tasks"]
    assert set(second) == {*tasks, "maclaurin_cloze"}
    assert all(second[name] == tasks[name] for name in tasks)


def test_the_model_under_another_attention_and_too_short_a_memory(model, tmp_path):
    out = tmp_path / "results.json"
    options = ("--limit", 2, "--max-length", 64, "--out", out)
    spec = "poly(0)+window(8,sinks=1)/sum"
    group = ("--tasks", "maclaurin_induction", "--attention", spec)
    shown = run(model, *group, *options).stdout
    assert "longer than 64 tokens" in shown
    found = json.loads(out.read_text())
    assert found["attention"] == [spec]
    assert found["tasks"]["maclaurin_induction_192"]["cut"] == 2
    assert "acc" in found["groups"]["maclaurin_induction"]


def test_what_cannot_be_is_told_in_one_message(model, tmp_path):
    missing = "import sys; sys.modules['lm_eval'] = None"
    error = run(model, "--tasks", "maclaurin", code=missing, expect=2).stderr
    assert "pip install 'maclaurin[eval]'" in error
    assert "Did you mean maclaurin_recall" in run(model, "--tasks", "maclaurin_recal", expect=2).stderr
    assert "which tasks?" in run(model, expect=2).stderr
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        error = run(model, "--tasks", "maclaurin_cloze", "--limit", 1, expect=2).stderr
        assert "has no tokenizer" in error
    finally:
        (tmp_path / "tokenizer.json").rename(model / "tokenizer.json")


def test_list_needs_neither_model_nor_harness():
    text = run("--list", code="import sys; sys.modules['lm_eval'] = None").stdout
    assert "maclaurin_recall_1024" in text
