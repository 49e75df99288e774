"""`maclaurin explore` as a user types it: the page alone, and with the scores of a model."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.e2e.in_process import maclaurin

TEXT = Path(__file__).parents[1] / "data" / "moby-dick-excerpt.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = MaclaurinConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    MaclaurinForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def shown(monkeypatch):
    """The addresses that a browser was asked to open."""
    found = []
    monkeypatch.setattr("webbrowser.open", found.append)
    return found


def captures(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL)[1])["captures"]


def test_alone_it_opens_the_page(monkeypatch, capfd, shown):
    page = Path(maclaurin(monkeypatch, capfd, "explore").stdout.strip())
    assert shown == [page.as_uri()]
    assert [c["model"] for c in captures(page.read_text("utf-8"))] == ["SmolLM2-135M-Instruct (Q4_1)"]


def test_a_model_and_a_text_give_its_scores(monkeypatch, capfd, shown, model, tmp_path):
    page, file = tmp_path / "new" / "page.html", tmp_path / "scores.json"
    arguments = ["--text", TEXT, "--tokenizer", "bytes", "--tokens", 20, "--out", page, "--capture", file]
    said = maclaurin(monkeypatch, capfd, "explore", model, *arguments, "--no-open")
    assert shown == []
    assert said.stdout.strip() == str(page)
    captured = json.loads(file.read_text("utf-8"))
    assert captures(page.read_text("utf-8"))[0] == captured
    first, *words = captured["tokens"]
    assert first == "<|separator|>", "what the tokenizer puts before a text is a token, too"
    assert "".join(words) == TEXT.read_text("utf-8")[:20]
    assert len({(head["layer"], head["head"]) for head in captured["heads"]}) == 6
    for head in captured["heads"]:
        assert [len(row) for row in head["scores"]] == list(range(1, 22))
        assert {len(row) for row in head["values"]} == {16}


def test_captured_scores_and_values_give_the_output_of_the_head(model):
    from maclaurin.explorer.capture import read_heads
    from maclaurin.layers.watch_attention import attention_layers
    from maclaurin.models.model_folder import load_model

    loaded, _ = load_model(str(model))
    outputs = []
    for layer in attention_layers(loaded):
        attend = layer.attend

        def recorded(*arguments, attend=attend):
            outputs.append(attend(*arguments))
            return outputs[-1]

        layer.attend = recorded
    heads = read_heads(loaded, torch.arange(12), "cpu")
    for head in heads:
        mine = head.weights @ head.values
        assert torch.allclose(mine, outputs[head.layer][0, :, head.head].double(), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["MODEL"], "a model is given without --text FILE"),
        (["--text", TEXT], "--text is given without a MODEL"),
        (["--capture", "x.json"], "give a MODEL and --text FILE"),
        (["MODEL", "--text", "nothing.txt"], "there is no file nothing.txt"),
        (["nowhere/at/all", "--text", TEXT], "nowhere/at/all"),
        (["--out", "."], "is a folder; name a file"),
    ],
)
def test_bad_input_is_one_error(monkeypatch, capfd, shown, model, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    given = [model if each == "MODEL" else each for each in arguments]
    error = maclaurin(monkeypatch, capfd, "explore", *given, expect=2).stderr
    assert words in error
    assert "Traceback" not in error
    assert shown == []
    assert list(tmp_path.iterdir()) == []
