"""Files, sentences, resumption, and what convert asks of an inspection."""

import dataclasses
import json
import math

import pytest
import torch
from tests.unit.inspection.small import SETTINGS

from maclaurin.errors import InputError
from maclaurin.inspection import Inspection, layers_to_keep, read_inspection, run, sharp_heads
from maclaurin.inspection.schema import head_named, to_json
from maclaurin.inspection.settings import Settings, read_orders, read_windows
from maclaurin.inspection.sharpness import error_at, heads_within, layer_errors
from maclaurin.inspection.summary import findings, number
from maclaurin.inspection.text import read_contexts, require_tokenizer
from maclaurin.inspection.trials import check_layers, trials
from maclaurin.inspection.write import write_inspection
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.spec.catalogue import resolve

# ------------------------------------------------------------------------------------------ files


def test_what_is_written_is_read_back(inspection, tmp_path):
    page = write_inspection(inspection, tmp_path / "out")
    again = read_inspection(tmp_path / "out")
    assert isinstance(again, Inspection)
    assert json.loads(to_json(again)) == json.loads(to_json(inspection))
    assert (
        again.made["versions"]["torch"] == torch.__version__.split("+")[0] or again.made["versions"]["torch"]
    )
    assert again.made["date"].endswith("+00:00")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["index.html", "inspection.json"]
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is not an inspection"),
        ("{", "is not an inspection"),
        ('{"schema": 99}', "has schema 99"),
        ('{"schema": 1, "model": {}}', "not a whole inspection"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    (tmp_path / "inspection.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_inspection(tmp_path)


def test_no_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no inspection"):
        read_inspection(tmp_path)


# -------------------------------------------------------------------------------------- sharpness


def with_errors(inspection, *errors):
    """The first head with these errors about the mean, all others exact at order 0."""
    heads = [
        dataclasses.replace(head, error_about_mean=tuple(errors) if place == 0 else (0.0,) * len(errors))
        for place, head in enumerate(inspection.heads)
    ]
    return dataclasses.replace(inspection, heads=tuple(heads))


def test_the_order_needed_is_the_even_one_from_which_on_all_are_good(inspection):
    def needed(*errors):
        return with_errors(inspection, *errors).heads[0].order_needed()

    assert needed(0.5, 0.5, 0.005, 0.9, 0.001) == 2
    assert needed(0.005, 0.5, 0.5, 0.5, 0.001) == 4
    assert needed(0.005, 0.5, 0.5, 0.5, 0.5) is None
    assert needed(0.5, None, 0.001, None, 0.001) == 2
    assert needed(0.5, 0.5, 0.001, 0.5, None) is None


def test_sharp_heads_come_sharpest_first(inspection):
    found = sharp_heads(inspection, 2)
    assert found
    assert [head.error for head in found] == sorted((head.error for head in found), reverse=True)
    assert len(found) == len(inspection.heads) - heads_within(inspection, 2)
    assert sharp_heads(inspection, 2, tolerance=1e9) == []
    one = with_errors(inspection, 0.5, 0.5, 0.3, 0.2, 0.001)
    assert [(head.layer, head.head, head.order_needed) for head in sharp_heads(one, 2)] == [(0, 0, 4)]
    assert layers_to_keep(one, 1) == [0]
    assert layer_errors(one, 2) == pytest.approx([0.3 / math.sqrt(4), 0, 0])
    assert error_at(with_errors(inspection, 0.5, 0.5, None).heads[0], 2, "mean") == math.inf


def test_a_head_is_found_by_its_place(inspection):
    assert head_named(inspection, 2, 3).layer == 2
    with pytest.raises(InputError, match=r"no head 2\.9"):
        head_named(inspection, 2, 9)


def test_findings_are_sentences(inspection):
    lines = findings(inspection)
    assert all(line.endswith(".") for line in lines)
    own = inspection.own_perplexity()
    assert any(f"Perplexity as it came: {number(own)}." in line for line in lines)
    assert any("Of 12 heads, within 1 % of softmax about the row mean" in line for line in lines)
    assert number(18695.98) == "18,696"
    assert number(28.639) == "28.64"
    assert number(None) == "–"


# ------------------------------------------------------------------------------------- resumption


@pytest.mark.parametrize("after", [0, 1, 5, 20])
def test_an_interrupted_inspection_goes_on(inspection, model, contexts, tmp_path, monkeypatch, after):
    calls, loss = [], run.summed_loss

    def interrupted(*arguments):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(1)
        return loss(*arguments)

    monkeypatch.setattr(run, "summed_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.inspect_model("tiny", model, contexts, SETTINGS, tmp_path, quiet=True)
    assert (tmp_path / "unfinished").is_dir()
    assert not (tmp_path / "inspection.json").exists()

    counted = []
    monkeypatch.setattr(run, "summed_loss", lambda *a: counted.append(1) or loss(*a))
    monkeypatch.setattr(run, "measured", None)  # the heads are not looked at twice
    found = run.inspect_model("tiny", model, contexts, SETTINGS, tmp_path, quiet=True)
    assert len(counted) == 12 * 3 - after
    assert dataclasses.replace(found, made={}) == dataclasses.replace(inspection, made={})


def test_heads_go_on_between_contexts(inspection, model, contexts, tmp_path, monkeypatch):
    calls, measure = [], run.measured

    def interrupted(*arguments, **options):
        if len(calls) == 4:  # in the second context
            raise KeyboardInterrupt
        calls.append(1)
        return measure(*arguments, **options)

    monkeypatch.setattr(run, "measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.inspect_model("tiny", model, contexts, SETTINGS, tmp_path, quiet=True)
    calls.clear()
    monkeypatch.setattr(run, "measured", lambda *a, **o: calls.append(1) or measure(*a, **o))
    found = run.inspect_model("tiny", model, contexts, SETTINGS, tmp_path, quiet=True)
    assert len(calls) == 3 * 2
    assert found.heads == inspection.heads


def test_another_plan_starts_anew(inspection, model, contexts, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "summed_loss", lambda *_: 1.0)
    run.inspect_model("tiny", model, contexts, SETTINGS, tmp_path, quiet=True)
    monkeypatch.undo()
    other = dataclasses.replace(SETTINGS, sinks=2)
    found = run.inspect_model("tiny", model, contexts, other, tmp_path, quiet=True)
    assert found.own_perplexity() == inspection.own_perplexity()


def test_the_model_is_left_as_it_was(model, contexts, inspection):
    assert {str(layer.self_attn.spec) for layer in model.model.layers} == {"exp/sum"}
    assert all("_attend" not in vars(layer.self_attn) for layer in model.model.layers)


# ---------------------------------------------------------------------------------------- trials


def test_norms_and_gates_of_a_model_stay():
    found = trials([resolve("exp/l2")] * 2, SETTINGS, 16)
    names = [trial.attention for trial in found]
    assert names[:3] == ["exp/l2", "taylor(1)/l2", "taylor(2)/l2"]
    assert "poly(0)+window(3,sinks=1)/l2" in names


def test_layers_with_a_window_of_their_own_stay():
    sliding, full = resolve("poly(0)+window(8)/sum"), resolve("exp/sum")
    found = trials([sliding, full], SETTINGS, 16)
    assert found[2].specs == (sliding, resolve("taylor(2)/sum"))
    assert found[2].attention == "poly(0)+window(8)/sum | taylor(2)/sum"
    assert len(trials([sliding], SETTINGS, 16)) == 1
    assert [t.window for t in trials([full], SETTINGS, 3) if t.kind == "window"] == []


def test_a_kernel_that_is_no_exp_is_refused():
    config = MaclaurinConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        attention="linear(elu1)/sum",
    )  # fmt: skip
    layers = [layer.self_attn for layer in MaclaurinForCausalLM(config).model.layers]
    with pytest.raises(InputError, match="no series to look at"):
        check_layers("tiny", layers)


# ------------------------------------------------------------------------------- settings and text


@pytest.mark.parametrize(
    ("read", "written", "words"),
    [
        (read_orders, "two", "'two' in 'two' is no whole number"),
        (read_orders, "1,,2", "'' in '1,,2'"),
        (read_orders, "2,-4", "'-4'"),
        (read_orders, "171", "beyond 170"),
        (read_windows, "0,3", "at least 1 token"),
        (read_windows, "wide", "--windows 32,64,128, or none"),
    ],
)
def test_lists_that_are_none(read, written, words):
    with pytest.raises(InputError) as problem:
        read(written)
    assert words in str(problem.value)


def test_lists_are_sorted_and_without_doubles():
    assert read_orders("4, 2,2") == (2, 4)
    assert read_windows("none") == ()


@pytest.mark.parametrize("changed", [{"weights": "int8"}, {"tolerance": 0.0}, {"context": 1}])
def test_settings_that_mean_nothing(changed):
    with pytest.raises(InputError):
        Settings(**changed)


class Letters:
    """A tokenizer: a = 0, b = 1, …; with a beginning, 26 stands before every text."""

    def __init__(self, beginning=False):
        self.bos_token_id = 26
        self._first = [26] if beginning else []

    def __call__(self, text, add_special_tokens=True, verbose=True):
        first = self._first if add_special_tokens else []
        return {"input_ids": first + [ord(c) - 97 for c in text if c.isalpha()]}


def test_contexts_are_disjoint_and_begin_as_the_tokenizer_begins(tmp_path):
    file = tmp_path / "text"
    file.write_text("abcde\nfghij\n")
    plain = read_contexts(file, Letters(), 0, 4, 30)
    assert [c.tolist() for c in plain] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (len(plain), plain.predicted) == (3, 7)
    begun = read_contexts(file, Letters(beginning=True), 7, 4, 30)
    assert [c.tolist() for c in begun] == [[26, 0, 1, 2], [26, 3, 4, 5], [26, 6]]
    assert (len(begun), begun.predicted) == (3, 7)
    assert len(read_contexts(file, Letters(), 9, 4, 30)) == 2, "one token alone predicts nothing"


def test_pieces_give_the_same_tokens(tmp_path, monkeypatch):
    file = tmp_path / "text"
    file.write_text("abc\ndefgh\n\nij\n" * 50)
    whole = read_contexts(file, Letters(), 0, 8, 30)
    monkeypatch.setattr("maclaurin.inspection.text.PIECE", 7)
    assert read_contexts(file, Letters(), 0, 8, 30).tokens.equal(whole.tokens)


@pytest.mark.parametrize(
    ("content", "vocabulary", "words"),
    [
        (b"a", 30, "holds 1 tokens"),
        (b"", 30, "holds 0 tokens"),
        (b"\xff\xfe", 30, "no UTF-8"),
        (b"abz", 20, "makes the token 25"),
    ],
)
def test_texts_that_cannot_be_read(tmp_path, content, vocabulary, words):
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_contexts(file, Letters(), 0, 8, vocabulary)


def test_a_tokenizer_must_be_there():
    with pytest.raises(InputError, match="--tokenizer"):
        require_tokenizer("tiny", None, None)
    with pytest.raises(InputError, match="cannot be opened"):
        require_tokenizer("tiny", None, "./nothing-of-the-kind")
    assert require_tokenizer("tiny", None, "bytes")("hé", add_special_tokens=False)["input_ids"] == [
        104,
        195,
        169,
    ]
