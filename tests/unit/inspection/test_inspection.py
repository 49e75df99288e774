"""Files, sentences, resumption, and what convert asks of an inspection."""

import dataclasses
import html
import json
import math
import re

import pytest
import torch
from tests.unit.inspection.small import SETTINGS

from maclaurin.errors import InputError
from maclaurin.inspection import Inspection, inspect_model, layers_to_keep, read_inspection, sharp_heads
from maclaurin.inspection.contexts import read_contexts
from maclaurin.inspection.inspect_model import InspectionFolder, Settings, check_layers, trials
from maclaurin.inspection.inspection_page import inspection_files
from maclaurin.inspection.inspection_record import (
    error_at,
    findings,
    heads_within,
    layer_errors,
    perplexity_text,
    rounded,
    write_inspection,
)
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.plain_data import to_plain
from maclaurin.spec.catalogue import resolve


def run(model, contexts, path, settings=SETTINGS, name="tiny"):
    return inspect_model.inspect_model(name, model, contexts, settings, InspectionFolder(path))


# ------------------------------------------------------------------------------------------ files


def test_what_is_written_is_read_back(inspection, tmp_path):
    page = InspectionFolder(tmp_path / "out").write(inspection, {"index.html": "<!doctype html>"})
    again = read_inspection(tmp_path / "out")
    assert isinstance(again, Inspection)
    assert rounded(to_plain(again)) == rounded(to_plain(inspection))
    assert again.made["versions"]["torch"]
    assert again.made["date"].endswith("+00:00")
    assert len(again.model.fingerprint) == 64
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["index.html", "inspection.json"]
    assert page.read_text().startswith("<!doctype html>")


def test_files_of_older_versions_have_no_fingerprint(inspection, tmp_path):
    write_inspection(inspection, tmp_path / "inspection.json")
    data = json.loads((tmp_path / "inspection.json").read_text())
    del data["model"]["fingerprint"]
    (tmp_path / "inspection.json").write_text(json.dumps(data))
    assert read_inspection(tmp_path).model.fingerprint == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is not an inspection"),
        ("{", "is not an inspection"),
        ('{"schema": 99}', "has schema 99"),
        ('{"schema": 1, "model": {}}', "does not have the form of an inspection"),
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


def test_findings_are_sentences(inspection):
    lines = findings(inspection)
    assert all(line.endswith(".") for line in lines)
    own = inspection.own_perplexity()
    assert any(
        f"Perplexity with the model's own attention: {perplexity_text(own)}." in line for line in lines
    )
    assert any("Of 12 heads, within 1 % of softmax about the row mean" in line for line in lines)
    assert perplexity_text(18695.98) == "18,696"
    assert perplexity_text(28.639) == "28.64"
    assert perplexity_text(None) == "–"


# ------------------------------------------------------------------------------------- resumption


@pytest.mark.parametrize("after", [0, 1, 20])
def test_an_interrupted_inspection_continues(inspection, model, contexts, tmp_path, monkeypatch, after):
    calls, loss = [], inspect_model.summed_loss

    def interrupted(*arguments):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(1)
        return loss(*arguments)

    monkeypatch.setattr(inspect_model, "summed_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, contexts, tmp_path)
    assert (tmp_path / "unfinished").is_dir()
    assert not (tmp_path / "inspection.json").exists()

    counted, reported = [], []
    monkeypatch.setattr(inspect_model, "summed_loss", lambda *a: counted.append(1) or loss(*a))
    monkeypatch.setattr(inspect_model, "tally_heads", None)  # the heads are not measured twice
    folder = InspectionFolder(tmp_path)
    found = inspect_model.inspect_model(
        "tiny", model, contexts, SETTINGS, folder, report=lambda share, what: reported.append((share, what))
    )
    assert len(counted) == 12 * 3 - after
    assert dataclasses.replace(found, made={}) == dataclasses.replace(inspection, made={})
    assert reported[0] == (0.0, "continuing the interrupted inspection")
    shares = [share for share, _ in reported]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


def test_heads_continue_between_contexts(inspection, model, contexts, tmp_path, monkeypatch):
    calls, measure = [], inspect_model.tally_heads

    def interrupted(*arguments, **options):
        if len(calls) == 4:  # in the second context
            raise KeyboardInterrupt
        calls.append(1)
        return measure(*arguments, **options)

    monkeypatch.setattr(inspect_model, "tally_heads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, contexts, tmp_path)
    calls.clear()
    monkeypatch.setattr(inspect_model, "tally_heads", lambda *a, **o: calls.append(1) or measure(*a, **o))
    assert run(model, contexts, tmp_path).heads == inspection.heads
    assert len(calls) == 3 * 2


def test_other_settings_start_again(inspection, model, contexts, tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_model, "summed_loss", lambda *_: 1.0)
    run(model, contexts, tmp_path)
    monkeypatch.undo()
    found = run(model, contexts, tmp_path, dataclasses.replace(SETTINGS, sinks=2))
    assert found.own_perplexity() == inspection.own_perplexity()


def other_model(model):
    """The same configuration with other weights."""
    torch.manual_seed(1)
    return MaclaurinForCausalLM(model.config).eval()


@pytest.mark.parametrize("finished", [True, False])
def test_the_inspection_of_another_model_is_not_overwritten(inspection, model, contexts, tmp_path, finished):
    folder = InspectionFolder(tmp_path)
    if finished:
        folder.write(inspection, {})
    else:
        folder.begin({"model": "tiny", "fingerprint": inspection.model.fingerprint})
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(InputError, match=r"holds the inspection of tiny; this one is of another"):
        run(other_model(model), contexts, tmp_path, name="another")
    with pytest.raises(InputError, match=r"holds the inspection of tiny, with other weights; this one is of"):
        run(other_model(model), contexts, tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    folder.require_same_model("the same by another path", inspection.model.fingerprint)


def test_older_inspections_are_told_apart_by_name(inspection, tmp_path):
    older = dataclasses.replace(inspection, model=dataclasses.replace(inspection.model, fingerprint=""))
    folder = InspectionFolder(tmp_path)
    folder.write(older, {})
    folder.require_same_model("tiny", "f" * 64)
    with pytest.raises(InputError, match="holds the inspection of tiny; this one is of other"):
        folder.require_same_model("other", "f" * 64)


def test_the_model_is_left_as_it_was(model, contexts, inspection):
    assert {str(layer.self_attn.spec) for layer in model.model.layers} == {"exp/sum"}
    assert all("attend" not in vars(layer.self_attn) for layer in model.model.layers)


# ---------------------------------------------------------------------------------------- trials


def all_trials(specs, windows=(3,)):
    return trials(specs, orders=(1, 2, 4, 12), tail_orders=(1, 2, 4), windows=windows, sinks=1)


def test_norms_and_gates_of_a_model_stay():
    names = [trial.attention for trial in all_trials([resolve("exp/l2")] * 2)]
    assert names[:3] == ["exp/l2", "taylor(1)/l2", "taylor(2)/l2"]
    assert "poly(0)+window(3,sinks=1)/l2" in names


def test_layers_with_a_window_of_their_own_stay():
    sliding, full = resolve("poly(0)+window(8)/sum"), resolve("exp/sum")
    found = all_trials([sliding, full])
    assert found[2].specs == (sliding, resolve("taylor(2)/sum"))
    assert found[2].attention == "poly(0)+window(8)/sum | taylor(2)/sum"
    assert len(all_trials([sliding])) == 1
    assert [t.window for t in all_trials([full], windows=()) if t.kind == "window"] == []


def test_a_kernel_that_is_no_exp_is_refused():
    config = MaclaurinConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        attention="linear(elu1)/sum",
    )  # fmt: skip
    layers = [layer.self_attn for layer in MaclaurinForCausalLM(config).model.layers]
    with pytest.raises(InputError, match="no orders to measure"):
        check_layers("tiny", layers)


# ------------------------------------------------------------------------------- settings and text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"weights": "int8"}, "bfloat16"),
        ({"tolerance": 0.0}, "between 0 and 1"),
        ({"context": 1}, "at least 2 tokens"),
        ({"orders": ()}, "none given"),
        ({"orders": (2, 171)}, "is over 170"),
        ({"windows": (0, 3)}, "at least 1 token"),
    ],
)
def test_settings_that_cannot_be(changed, words):
    with pytest.raises(InputError, match=words):
        Settings(**changed)


def test_lists_of_numbers_on_the_command_line():
    from maclaurin.cli import whole_numbers

    assert whole_numbers("4, 2,2", "--orders", "") == [4, 2, 2]
    for written, words in (("two", "'two' in 'two' is not"), ("1,,2", "'' in '1,,2'"), ("2,-4", "'-4'")):
        with pytest.raises(InputError, match=words):
            whole_numbers(written, "--orders", "1,2")
    with pytest.raises(InputError, match="--probe takes numbers of at least 2; got 1"):
        whole_numbers("64,1", "--probe", "64", least=2)


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
    monkeypatch.setattr("maclaurin.inspection.contexts.PIECE", 7)
    assert read_contexts(file, Letters(), 0, 8, 30).tokens.equal(whole.tokens)


@pytest.mark.parametrize(
    ("content", "vocabulary", "words"),
    [
        (b"a", 30, "has 1 tokens"),
        (b"", 30, "has 0 tokens"),
        (b"\xff\xfe", 30, "is not UTF-8 text"),
        (b"abz", 20, "produced token 25"),
    ],
)
def test_texts_that_cannot_be_read(tmp_path, content, vocabulary, words):
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_contexts(file, Letters(), 0, 8, vocabulary)


def test_a_context_that_the_prefix_fills_is_refused(tmp_path):
    (tmp_path / "text").write_text("abc")
    with pytest.raises(InputError, match="no space for text"):
        read_contexts(tmp_path / "text", Letters(beginning=True), 0, 1, 30)


# -------------------------------------------------------------------------------------------- page


@pytest.fixture(scope="module")
def files(inspection):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    return inspection_files(inspection)


def specs_of(page):
    found = re.findall(r'<script type="application/json" class="spec">(.*?)</script>', page, flags=re.DOTALL)
    return [json.loads(text) for text in found]


def encodings(part):
    """Every encoding of a chart and of the charts in it."""
    if isinstance(part, dict):
        if "encoding" in part:
            yield part["encoding"]
        for value in part.values():
            yield from encodings(value)
    elif isinstance(part, list):
        for value in part:
            yield from encodings(value)


def test_every_axis_says_what_it_shows(files):
    specs = specs_of(files["index.html"])
    assert len(specs) == 2
    axes = [
        channel
        for spec in specs
        for encoding in encodings(spec)
        for name, channel in encoding.items()
        if name in ("x", "y") and "field" in channel and channel.get("axis", ...) is not None
    ]
    assert len(axes) >= 10
    assert all(channel["title"] for channel in axes)


def test_the_page_needs_nothing_but_itself(inspection, files):
    page = files["index.html"]
    assert "src=" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert page.count("window.vegaEmbed=") == 1
    assert page.count("<noscript>") == 2
    assert page.count('"score_share":') == len(inspection.heads), "the data of all charts stand there once"


def test_a_chart_is_the_same_in_the_page_and_as_a_file(files):
    assert set(files) == {"index.html", "heads.svg", "orders.svg"}
    for name in ("heads.svg", "orders.svg"):
        assert files[name].startswith("<svg")
        assert files[name] in files["index.html"]
    assert ">about the row mean<" in files["orders.svg"]
    assert ">layer<" in files["heads.svg"]


def test_names_are_escaped(inspection, files):
    name = "<script>alert(1)</script>"
    hostile = dataclasses.replace(inspection, model=dataclasses.replace(inspection.model, name=name))
    page = inspection_files(hostile)["index.html"]
    assert name not in page
    assert "&lt;script&gt;alert(1)" in page


def test_without_altair_the_page_has_tables_and_says_what_is_missing(inspection, monkeypatch):
    from maclaurin.inspection import inspection_page

    monkeypatch.setattr(inspection_page, "has_charts", lambda: False)
    found = inspection_files(inspection)
    assert set(found) == {"index.html"}
    assert "pip install 'maclaurin[plot]'" in html.unescape(found["index.html"])
    assert "vegaEmbed=" not in found["index.html"]


def test_an_inspection_without_windows_and_orders_has_a_page(inspection):
    own = tuple(row for row in inspection.perplexity if row.kind == "own")
    bare = dataclasses.replace(inspection, perplexity=own)
    page = inspection_files(bare)["index.html"]
    assert 'id="orders"' not in page
    assert 'id="windows"' not in page
