"""`maclaurin eval` as a user types it, on a random Llama of a few thousand weights with its own tokenizer."""

import json
import os

import pytest

from tests.e2e.command import run_script
from tests.e2e.in_process import maclaurin

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100"}
OURS = "maclaurin_recall_64,maclaurin_recall_64_exact,maclaurin_induction_16,maclaurin_perplexity"


@pytest.fixture
def without_harness(tmp_path):
    """The command in a process where lm-evaluation-harness cannot be imported."""
    script = tmp_path / "without_harness.py"
    script.write_text(
        "import sys; sys.modules['lm_eval'] = None; from maclaurin.cli.main import main; main()\n"
    )
    return lambda *arguments: run_script(script, "eval", *arguments, cwd=tmp_path, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from maclaurin.models.model_folder import as_fast_tokenizer, byte_tokenizer

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = as_fast_tokenizer(byte_tokenizer())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2000,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_our_tasks_need_no_harness(model, tmp_path, without_harness):
    out = tmp_path / "results.json"
    said = without_harness(model, "--tasks", OURS, "--limit", 3, "--out", out)
    assert said.returncode == 0, said.stderr
    assert "induction_16" in said.stdout
    assert "lost their beginning" not in said.stdout
    assert said.stderr.startswith(f"loading {model} …\n")
    found = json.loads(out.read_text())
    identity = found["identity"]
    assert identity["attention"] == ["exp/sum"]
    assert (identity["limit"], identity["seed"], identity["model"]) == (3, 0, str(model))
    tasks = found["tasks"]
    assert {result["kind"] for result in tasks.values()} == {"choices", "written", "text"}
    assert all(result["items"] == 3 and result["non_finite"] == 0 for result in tasks.values())
    acc = tasks["maclaurin_recall_64"]["metrics"]["acc"]
    assert 0 <= acc["low"] <= acc["value"] <= acc["high"] <= 1
    assert tasks["maclaurin_recall_64"]["metrics"]["log_odds_gain"]["value"] is not None
    assert tasks["maclaurin_perplexity"]["metrics"]["byte_perplexity"]["value"] > 5
    assert tasks["maclaurin_recall_64"]["distance"][0] > 64
    for command in (["--tasks", "maclaurin_recall_64", "--harness"], ["--tasks", "hellaswag"]):
        missing = without_harness(model, *command)
        assert missing.returncode == 2
        assert "pip install 'maclaurin[eval]'" in missing.stderr


def test_the_model_under_another_attention_and_too_short_a_memory(model, tmp_path, monkeypatch, capfd):
    out, spec = tmp_path / "results.json", "poly(0)+window(8,sinks=1)/sum"
    arguments = ["--tasks", "maclaurin_induction", "--attention", spec, "--limit", 2, "--max-length", 64]
    said = maclaurin(monkeypatch, capfd, "eval", model, *arguments, "--out", out)
    assert "2 texts were longer than 64 tokens" in " ".join(said.stdout.split())
    found = json.loads(out.read_text())
    assert found["identity"]["attention"] == [spec]
    assert found["tasks"]["maclaurin_induction_192"]["truncated"] == 2
    assert "acc" in found["groups"]["maclaurin_induction"]


def test_the_table_fits_in_80_columns(model, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "80")
    tasks = "maclaurin_recall_1024,maclaurin_multiquery_1024_exact,maclaurin_perplexity"
    said = maclaurin(monkeypatch, capfd, "eval", model, "--tasks", tasks, "--limit", 2)
    assert "…" not in said.stdout.replace("… gain", "")
    assert "recall_1024" in said.stdout
    assert "multiquery_1024_exact" in said.stdout


def test_invalid_requests_print_one_error(model, tmp_path, monkeypatch, capfd):
    def error(*arguments):
        said = maclaurin(monkeypatch, capfd, "eval", *arguments, expect=2)
        assert said.stderr.count("error:") == 1
        return " ".join(said.stderr.split())

    recall = ("--tasks", "maclaurin_recall_64")
    assert "Did you mean maclaurin_recall" in error(model, "--tasks", "maclaurin_recal")
    assert "no tasks are given" in error(model)
    assert "no model is given" in error(*recall)
    assert "--out: /proc cannot be written" in error(model, *recall, "--out", "/proc/results.json")
    assert "is a folder; name a file" in error(model, *recall, "--out", tmp_path)
    (tmp_path / "latin1.txt").write_bytes("café. ".encode("latin1") * 100)
    assert "latin1.txt is not UTF-8 text" in error(model, *recall, "--text", tmp_path / "latin1.txt")
    near = model.with_name(model.name + "x")
    assert f"there is no folder {near}. Did you mean {model}" in error(near, *recall)
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        assert "has no tokenizer" in error(model, *recall, "--limit", 1)
    finally:
        (tmp_path / "tokenizer.json").rename(model / "tokenizer.json")


def test_list_needs_neither_model_nor_harness(without_harness):
    text = without_harness("--list").stdout
    assert "maclaurin_recall_N" in text
    assert "maclaurin_ruler" in text
