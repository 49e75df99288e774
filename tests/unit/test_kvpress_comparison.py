"""The parts of benchmarks/kvpress_comparison.py that need no kvpress."""

import importlib.util
import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from maclaurin.conversion.memory_page import METHODS

FILE = Path(__file__).parents[2] / "benchmarks" / "kvpress_comparison.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_kvpress_comparison", FILE)
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)

EXACT = "Maclaurin 25%: 11 heads exp/sum, others 36 to 1,028 exact keys by their damage on text, pressed"
SHARED = "Maclaurin 12.5%: 20 to 1,028 exact keys by their damage on text, limited while reading"


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("original", 1.0),
        ("KeyDiffPress 0.25", 0.25),
        ("KeyDiffPress limited while reading 0.125", 0.125),
        (EXACT, 0.25),
        (SHARED, 0.125),
    ],
)
def test_a_name_gives_the_share(name, share):
    assert script._share(name) == share


def test_the_published_kinds_are_those_of_pages():
    written = json.loads((FILE.parent / "results" / "kvpress.json").read_text())
    assert {row["kind"] for row in written["methods"].values()} <= set(METHODS)


def test_a_plan_is_named_by_its_share_of_the_bytes():
    chosen = {"budget": {"bytes": 125, "original": 1000}, "plan": {"name": "5 heads exp/sum"}}
    assert script._name_of(chosen) == "Maclaurin 12.5%: 5 heads exp/sum"


def test_a_summary_counts_right_answers_and_means_log_odds():
    rows = [{"right": 0}, {"right": 1}]
    found = script._summary(rows, [[2.0, 0.0, 0.0], [1.0, 0.0, 0.0]], [[1.0, 3.0]])
    first, second = 2 - math.log(2), 0 - math.log(math.e + 1)
    assert found["accuracy"] == 0.5
    assert found["log_odds"] == pytest.approx((first + second) / 2)
    assert found["low"] < 0.5 < found["high"]
    assert found["perplexity"] == pytest.approx(math.exp(2))
    assert script._summary(rows[:1], [[1.0, 0.0]], [])["perplexity"] is None


def test_of_logits_only_what_is_needed_is_kept():
    logits = torch.arange(12.0).view(3, 4)
    assert script._kept_of({"choices": [0, 3]}, logits) == [8.0, 11.0]
    losses = script._kept_of({"continuation": [1, 2, 3]}, logits)
    expected = [-float(logits[n].double().log_softmax(-1)[token]) for n, token in ((0, 2), (1, 3))]
    assert losses == pytest.approx(expected)


def test_results_of_both_environments_are_put_together(tmp_path):
    row = {"accuracy": 0.5, "machine": "a machine"}
    for name, content in {
        "questions": {"distance": 9, "questions": [1, 2], "texts": [1]},
        "kvpress": {"KnormPress 0.25": row},
        "ours": {"original": {**row, "kind": "full softmax"}, SHARED: {**row, "kind": "window + kept"}},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    files = [tmp_path / "kvpress.json", tmp_path / "ours.json"]
    out = tmp_path / "together.json"
    script.put_together(Namespace(questions=tmp_path / "questions.json", results=files, out=out))
    written = json.loads(out.read_text())
    assert (written["questions"], written["texts"], written["machine"]) == (2, 1, "a machine")
    assert {name: row["share"] for name, row in written["methods"].items()} == {
        "KnormPress 0.25": 0.25, "original": 1.0, SHARED: 0.125
    }  # fmt: skip
    assert {name: row["kind"] for name, row in written["methods"].items()} == {
        "KnormPress 0.25": "kvpress", "original": "full softmax", SHARED: "window + kept"
    }  # fmt: skip


class LastKeys:
    """A press that keeps a key at the beginning and the last ones."""

    def __init__(self, keys):
        self.target_size = keys

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return tuple(torch.cat([u[:, :, :1], u[:, :, 1 - self.target_size :]], dim=2) for u in (keys, values))


@torch.no_grad()
def test_a_text_is_read_in_pieces_with_few_keys():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    context = torch.randint(0, 31, (23,)).tolist()
    whole = model(torch.tensor([[*context, 5]])).logits[0, -1]

    def after(cache):
        positions = torch.tensor([[len(context)]])
        return model(torch.tensor([[5]]), past_key_values=cache, position_ids=positions).logits[0, -1]

    torch.testing.assert_close(
        after(script.read_in_pieces(model, LastKeys(99), context, 4)), whole, rtol=1e-4, atol=1e-5
    )
    cache = script.read_in_pieces(model, LastKeys(8), context, 4)
    assert [layer.keys.shape[2] for layer in cache.layers] == [8, 8]
    assert not torch.allclose(after(cache), whole, rtol=1e-4, atol=1e-5)


def test_plans_and_their_rivals_come_from_the_results_of_memory(tmp_path):
    budget = {"bytes": 250, "original": 1000, "at": 1280}
    plan = {
        "attention": ["a"],
        "budget": budget,
        "plan": {"name": "5 heads exp/sum", "kind": "every key in some heads"},
        "rivals": {"window": ["w"]},
    }
    other = {**plan, "budget": {**budget, "at": 4096}}
    file = tmp_path / "memory.json"
    file.write_text(json.dumps({"chosen": {"25% at 1280": plan, "30% at 4k": other}}))
    options = Namespace(attention=[], plans=file, rivals=True)
    assert list(script._plans(options)) == [
        (["a"], "Maclaurin 25%: 5 heads exp/sum", "every key in some heads", False),
        (["w"], "Maclaurin 25%: window", "window", True),
    ]
