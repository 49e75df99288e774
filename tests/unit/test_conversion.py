"""Converting a pretrained model: which layers, offsets that change nothing, perplexities, whole folders."""

import copy
import json
import math
import subprocess
import sys

import pytest
import torch

from maclaurin.conversion.conversion_record import (
    ConversionRecord,
    Gap,
    MeasuredGap,
    Memory,
    Recovery,
    SampleSettings,
    read_conversion,
)
from maclaurin.conversion.converted_model import (
    calibrate_key_offsets,
    choose,
    convert_loaded,
    own_attention,
    read_layers,
    require_new,
    save,
)
from maclaurin.conversion.fact_questions import RecallOverDistance, recall_over
from maclaurin.conversion.measure import Perplexity, Reading, gap, measured_with, perplexities, without_tails
from maclaurin.conversion.memory_budget import memory_of
from maclaurin.conversion.sample_text import tokens_of
from maclaurin.data.corpus import StandardLibrary
from maclaurin.data.data_config import DataConfig
from maclaurin.data.splits import TEST, DocumentSplitter
from maclaurin.errors import InputError
from maclaurin.evaluation import Item, Query
from maclaurin.evaluation.results import wilson_interval
from maclaurin.evaluation.scoring import Scorer, ask
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM, size_named
from maclaurin.models.model_folder import as_fast_tokenizer, byte_tokenizer, load_model
from maclaurin.plain_data import from_plain, to_plain

TAIL = "taylor(2,about=mean)+window(8,sinks=1)/sum"


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = MaclaurinConfig.of_size(size_named("pico"), "exp/sum", 50, initialization="torch")
    found = MaclaurinForCausalLM(config).eval()
    for block in found.model.layers:
        block.self_attn.q_proj.weight.data *= 3
        block.self_attn.k_proj.weight.data += 0.05  # keys with a part in common
    return found


@pytest.mark.parametrize(
    ("text", "layers"), [("0-2,5", [0, 1, 2, 5]), ("-1", [7]), ("3", [3]), ("1, 1-2", [1, 2])]
)
def test_layers_are_read(text, layers):
    assert read_layers(text, 8) == layers


def test_a_control_is_named_by_what_it_switches_off():
    from maclaurin.conversion.measure import beyond_windows

    kept, tail = "poly(0)+window(8,sinks=1,kept=4)/sum", "taylor(2,about=mean)+window(8,sinks=1)/sum"
    assert beyond_windows(["exp/sum", kept]) == "kept keys"
    assert beyond_windows([tail]) == "tail"
    assert beyond_windows([f"0: {tail}; 1: {kept}"]) == "tail and kept keys"


def test_unknown_layer_is_rejected():
    with pytest.raises(InputError, match="numbers or ranges"):
        read_layers("a-b", 8)
    with pytest.raises(InputError, match="has layers 0 to 3, not 7"):
        choose(["exp/sum"] * 4, TAIL, layers=[7])
    with pytest.raises(InputError, match="no layer is left"):
        choose(["exp/sum"] * 2, TAIL, sharp=[0, 1])


def test_sharp_layers_keep_their_own_or_get_another():
    own = ["exp/sum"] * 4
    kept = choose(own, TAIL, sharp=[1])
    assert kept.attention == (TAIL, "exp/sum", TAIL, TAIL)
    assert kept.changed == (0, 2, 3)
    longer = choose(own, TAIL, layers=[0, 1], sharp=[1], sharp_attention="poly(0)+window(64)/sum")
    assert longer.attention == (TAIL, "poly(0)+window(64)/sum", "exp/sum", "exp/sum")
    assert set(choose(own, TAIL).attention) == {TAIL}


def test_offsets_change_no_answer_and_survive_saving(model, tmp_path):
    tokens = torch.randint(0, 50, (3, 40))
    before = model(input_ids=tokens).logits
    calibrate_key_offsets(model, tokens)
    assert model.config.key_offset
    assert all(block.self_attn.key_offset.offset.abs().max() > 0 for block in model.model.layers)
    torch.testing.assert_close(model(input_ids=tokens).logits, before, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    again = MaclaurinForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_the_tail_lies_between_window_and_original(model):
    rows = torch.randint(0, 50, (2, 48))
    found = gap(model, ["exp/sum"] * 2, [TAIL] * 2, Perplexity(rows))
    assert found.window_only is not None
    losses = model(input_ids=rows, labels=rows).loss
    assert found.original == pytest.approx(float(losses.detach().exp()), rel=1e-4)
    alone = ["poly(0)+window(8,sinks=1)/sum"] * 2
    assert found.window_only == pytest.approx(measured_with(model, alone, Perplexity(rows)))
    assert without_tails([TAIL, "exp/sum"]) == [alone[0], "exp/sum"]
    assert without_tails(["taylor(2)/sum"]) is None
    assert Gap(10.0, 20.0, 12.0).closed == pytest.approx(0.8)
    assert Gap(10.0, None, 12.0).closed is None


def test_there_is_a_gap_where_softmax_is_the_better_one():
    assert str(Gap(10.0, 20.0, 20.0).closed) == "0.0"  # and not −0
    assert Gap(20.0, 10.0, 8.0).closed is None  # a text longer than softmax was trained on
    assert Gap(0.8, 0.2, 0.5, higher_is_better=True).closed == pytest.approx(0.5)
    assert Gap(0.2, 0.8, 0.5, higher_is_better=True).closed is None
    assert Gap(0.5, 0.5, 0.5, higher_is_better=True).closed is None


def test_the_default_sample_is_text_that_no_run_trains_on():
    class Letters:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [ord(letter) for letter in text]}

    sample = "".join(map(chr, tokens_of(Letters(), None, 3000, 1 << 20).tolist()))
    first = next(d.text for d in StandardLibrary().documents() if d.text.startswith(sample[:200]))
    assert DocumentSplitter(DataConfig().fractions, 60_000).split_of(first) == TEST


def test_a_conversion_is_a_model_folder(model, tmp_path):
    tokens = torch.randint(0, 50, (400,))
    choice = choose(own_attention(model), TAIL, layers=[1])
    told = []
    found = convert_loaded(
        model,
        "somewhere",
        choice,
        sample=tokens[:100],
        measures=perplexities(tokens[100:], [64], 200),
        on_tokens=told.append,
    )
    assert list(found.gaps) == ["perplexity"]
    assert list(found.gaps["perplexity"]) == [64]
    assert sum(told) == 100 + 3 * 192  # three rows of 64, three attentions
    with pytest.raises(InputError, match=r"at 4096 tokens: .* has 300"):
        perplexities(tokens[100:], [64, 4096], 200)
    save(model, None, found, tmp_path / "out")
    again, tokenizer = load_model(tmp_path / "out")
    assert tokenizer is None
    assert own_attention(again) == ["exp/sum", TAIL]
    rows = tokens[None, :64]
    torch.testing.assert_close(again(input_ids=rows).logits, model(input_ids=rows).logits)
    record = read_conversion(tmp_path / "out")
    assert record.reasons == ("kept", "swapped")
    assert record.perplexity[64].converted == found.gaps["perplexity"][64].converted
    assert (record.recall, record.chosen, record.recovery) == ({}, None, None)
    with pytest.raises(InputError, match="exists already"):
        require_new(tmp_path / "out")


def test_gates_have_no_weights_to_come_from(model):
    choice = choose(own_attention(model), "power(2)*forget/sum")
    with pytest.raises(InputError, match="has gates"):
        convert_loaded(model, "x", choice, sample=torch.arange(9), measures=[])


class Words:
    """A tokenizer whose words are numbers of tokens."""

    def __init__(self, beginning=False):
        self.bos_token_id, self.eos_token_id = (1 if beginning else None), 2
        self._first = [1] if beginning else []

    def __call__(self, text, add_special_tokens=True, verbose=True):
        words = [int(word) if word.isdecimal() else len(word) for word in text.split()]
        return {"input_ids": [*self._first, *words] if add_special_tokens else words}


def test_recall_is_asked_of_the_attention_that_is_there(model):
    """The likeliest of the choices by the whole rows, for every attention; caches are made for it too."""
    text = torch.randint(0, 50, (30,))
    choices = tuple(torch.randint(0, 50, (n,)) for n in (1, 2, 4, 1))

    def spelled(tokens):
        return " ".join(map(str, tokens.tolist()))

    for attention in (["exp/sum"] * 2, [TAIL] * 2, ["exp/sum", TAIL]):

        def likelihood(choice, attention=attention):
            row = torch.cat([text, choice])
            rows = Perplexity(row[None]), Perplexity(text[None])
            whole, begin = (measured_with(model, attention, measure) for measure in rows)
            return -(len(row) - 1) * math.log(whole) + (len(text) - 1) * math.log(begin)

        best = max(range(4), key=lambda n: likelihood(choices[n]))
        for answer in range(4):
            query = Query("", tuple(map(spelled, choices)), (answer,))
            item = Item(spelled(text), (query,), without=None)
            measure = RecallOverDistance(30, (item,), (30,), Words())
            assert measured_with(model, attention, measure) == float(answer == best)
    assert model.config.attention == "exp/sum"


def test_recall_comes_with_its_interval_and_what_the_facts_add(model, tmp_path):
    """The scores of `maclaurin eval` for the same questions; they survive in the record."""
    tokenizer = as_fast_tokenizer(byte_tokenizer())
    model = MaclaurinForCausalLM(MaclaurinConfig.of_size(size_named("pico"), "exp/sum", 300)).eval()
    (measure,) = recall_over([32], tokenizer, 5)
    found = gap(model, ["exp/sum"] * 2, [TAIL] * 2, measure)
    assert found.scores.keys() == {"original", "window_only", "converted"}
    expected = ask(Scorer(model, tokenizer, 1 << 30), measure.items, "choices").metrics
    assert found.scores["original"] == expected
    score = found.scores["original"]["acc"]
    assert (score.value, score.low) == (found.original, wilson_interval(found.original, 5)[0])
    assert found.scores["original"]["log_odds_gain"].value is not None
    measured = MeasuredGap.of(found).after_training(Reading(1.0, expected), None, higher_is_better=True)
    assert from_plain(MeasuredGap, json.loads(json.dumps(to_plain(measured)))) == measured
    assert measured.scores["recovered"] == expected
    old = {"original": 0.5, "window_only": None, "converted": 0.5, "gap_closed": None}
    assert from_plain(MeasuredGap, old).scores == {}


def test_recall_facts_are_far_back():
    near, far = recall_over([64, 256], Words(beginning=True), 5)
    assert (near.at, far.at, len(far.items)) == (64, 256, 5)
    assert min(far.lengths) > max(near.lengths)
    assert [n.queries[0].choices for n in near.items] == [f.queries[0].choices for f in far.items]
    assert near.tokens == sum(near.lengths)


def test_memory_is_that_of_the_caches(model):
    before = memory_of(model, own_attention(model))
    assert (before.state_bytes, before.break_even_tokens) == (0, None)
    assert before.bytes_per_token == before.original
    choice = choose(own_attention(model), TAIL)
    found = convert_loaded(model, "x", choice, sample=torch.randint(0, 50, (40,)), measures=[])
    served = copy.deepcopy(model).bfloat16()  # bytes are counted in the dtype that models are served in
    cache = MaclaurinCache(served.config)
    served(input_ids=torch.randint(0, 50, (1, 20)), past_key_values=cache)
    assert found.memory.state_bytes == cache.nbytes
    assert found.memory.bytes_per_token == 0
    even, size = found.memory.break_even_tokens, cache.nbytes
    assert (even - 1) * before.original < size <= even * before.original


def test_the_control_has_neither_tails_nor_kept_keys():
    mixed = ["0: exp/sum; 1: poly(0)+window(8,sinks=1,kept=4)/sum", TAIL]
    alone = ["0: exp/sum; 1: poly(0)+window(8,sinks=1)/sum", "poly(0)+window(8,sinks=1)/sum"]
    assert without_tails(mixed) == alone
    assert without_tails(alone) is None


def test_an_original_with_a_state_has_a_size_and_none_per_token(model):
    """Whatever the original is: one with a finite state does not grow."""
    found = memory_of(model, ["taylor(2)/sum"] * model.config.num_hidden_layers)
    assert found.original == 0
    assert found.original_state_bytes > 0
    assert found.break_even_tokens is None


def test_records_and_their_page_are_read_without_torch():
    names = "maclaurin.conversion.conversion_record, maclaurin.conversion.memory_page"
    code = f"import sys, {names}; print({{'torch', 'transformers'}} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_a_record_adds_training_and_its_measures(tmp_path):
    gap_ = Gap(original=10.0, window_only=20.0, converted=15.0)
    record = ConversionRecord(
        source="somewhere",
        attention=("exp/sum",),
        reasons=("kept",),
        memory=Memory(0, 1, 0, 2),
        chosen=None,
        perplexity={64: MeasuredGap.of(gap_)},
        recall={},
        measured_on=SampleSettings(lengths=(64,)),
    )
    record = record.with_training(Recovery(text_steps=3), 1.0).with_training(Recovery(text_steps=3), 2.5)
    trained = record.perplexity[64].after_training(Reading(12.0), None, higher_is_better=False)
    record = record.with_gap(Perplexity(torch.zeros(1, 64, dtype=torch.long)), trained)
    record.write(tmp_path)
    again = read_conversion(tmp_path)
    assert again == record
    assert (again.recovery.seconds, again.recovery.settings.text_steps) == (3.5, 3)
    assert (again.perplexity[64].gap_closed, again.perplexity[64].gap_closed_recovered) == (0.5, 0.8)
    with pytest.raises(InputError, match="no conversion to continue"):
        read_conversion(tmp_path / "elsewhere")
