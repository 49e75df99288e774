"""Our models under other trainers: transformers' Trainer, TRL's SFTTrainer, PEFT; a few real steps each.

What they ask of a model is served or refused with a clear error, never ignored.
"""

import warnings

import pytest
import torch

from maclaurin import InputError
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM, size_named

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 64, 32
SPECS = ["exp/sum", "taylor(2)/sum", "exp*in*forget/len*out", "linear(elu1)/sum"]


def model_with(attention="exp/l2", **more):
    torch.manual_seed(0)
    config = MaclaurinConfig.of_size(size_named("pico"), attention, VOCABULARY, **more)
    return MaclaurinForCausalLM(config)


def repeated_rows(count=64):
    """Rows whose second half repeats the first: a loss that falls soon."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(0, 8, (count, LENGTH // 2), generator=generator)
    return [{"input_ids": row, "labels": row} for row in torch.cat([half, half], dim=1)]


def settings(folder, kind, **more):
    return kind(
        output_dir=str(folder),
        max_steps=8,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_trained(trainer, steps=8):
    found = losses(trainer)
    assert len(found) == steps
    assert all(loss == loss for loss in found)  # no NaN
    assert found[-1] < found[0]


# -------------------------------------------------------------------------------------------- trainers


@pytest.mark.parametrize("attention", SPECS)
def test_transformers_trainer(tmp_path, attention):
    trainer = transformers.Trainer(
        model_with(attention),
        settings(tmp_path, transformers.TrainingArguments),
        train_dataset=repeated_rows(),
    )
    trainer.train()
    assert_trained(trainer)
    trainer.save_model(tmp_path / "saved")
    again = MaclaurinForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokens = repeated_rows(2)[0]["input_ids"][None]
    expected = trainer.model.eval()(input_ids=tokens).logits
    torch.testing.assert_close(again(input_ids=tokens).logits, expected)


def test_transformers_trainer_evaluates_and_accumulates(tmp_path):
    """The loss of 2 × 4 rows accumulated is that of 8 rows, as num_items_in_batch has it."""
    found = {}
    for parts in (1, 2):
        arguments = settings(tmp_path, transformers.TrainingArguments, gradient_accumulation_steps=parts)
        arguments.per_device_train_batch_size = 8 // parts
        trainer = transformers.Trainer(
            model_with(), arguments, train_dataset=repeated_rows(), eval_dataset=repeated_rows(8)
        )
        trainer.train()
        found[parts] = losses(trainer)
        assert trainer.evaluate()["eval_loss"] > 0
    assert found[2] == pytest.approx(found[1], rel=1e-3)


def test_transformers_trainer_with_gradient_checkpointing(tmp_path):
    plain, recomputed = (
        transformers.Trainer(
            model_with(),
            settings(tmp_path, transformers.TrainingArguments, gradient_checkpointing=on),
            train_dataset=repeated_rows(),
        )
        for on in (False, True)
    )
    plain.train()
    recomputed.train()
    assert losses(recomputed) == pytest.approx(losses(plain), rel=1e-4)


def test_peft_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    base = model_with()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    )
    trainer = transformers.Trainer(
        adapted, settings(tmp_path, transformers.TrainingArguments), train_dataset=repeated_rows()
    )
    trainer.train()
    assert len(losses(trainer)) == 8
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = repeated_rows(1)[0]["input_ids"][None]
    expected = adapted.eval()(input_ids=tokens).logits
    fresh = model_with()
    fresh.load_state_dict(before)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(input_ids=tokens).logits, expected)


def word_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{n}": n for n in range(VOCABULARY - 2)} | {"<end>": VOCABULARY - 2, "<pad>": VOCABULARY - 1}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def texts(count=64):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for n in range(count):
        half = [f"w{int(x)}" for x in torch.randint(0, 8, (4 + n % 6,), generator=generator)]
        rows.append({"text": " ".join(half + half)})
    return rows


def sft_losses(folder, **how):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL names the attention implementations it has tested
        trainer = trl.SFTTrainer(
            model_with("taylor(2)/sum"),
            args=settings(folder, trl.SFTConfig, bf16=False, **how),
            train_dataset=datasets.Dataset.from_list(texts()),
            processing_class=word_tokenizer(),
        )
        trainer.train()
    assert_trained(trainer)
    return losses(trainer)


def test_trl_sft_trainer(tmp_path):
    sft_losses(tmp_path, max_length=LENGTH)


def test_trl_sft_trainer_with_packed_rows(tmp_path):
    sft_losses(tmp_path, max_length=LENGTH, packing=True)


def test_trl_sft_trainer_has_the_same_losses_without_padding(tmp_path):
    """The same texts in one row, told apart by positions alone: attention must not cross them."""
    padded = sft_losses(tmp_path, max_length=None)
    assert sft_losses(tmp_path, max_length=None, padding_free=True) == pytest.approx(padded, rel=1e-3)


# ------------------------------------------------------------------------ what trainers ask of a model


@pytest.fixture
def tokens():
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, (2, 12))


@pytest.mark.parametrize("attention", SPECS)
def test_packing_by_position_ids_alone_keeps_documents_apart(attention):
    """As TRL's padding-free batches: one row, positions that begin again with each document."""
    model = model_with(attention).eval()
    lengths = (5, 9, 7)
    documents = [torch.randint(0, VOCABULARY, (1, n)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(input_ids=torch.cat(documents, dim=1), position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(input_ids=document).logits for document in documents], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)


def test_hidden_states_are_returned_where_asked_for(tokens):
    model = model_with().eval()
    out = model(input_ids=tokens, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)


def test_hidden_states_of_the_config(tokens):
    model = model_with(output_hidden_states=True).eval()
    assert len(model(input_ids=tokens).hidden_states) == model.config.num_hidden_layers + 1


def test_attention_weights_are_refused(tokens):
    with pytest.raises(InputError, match="output_attentions"):
        model_with().eval()(input_ids=tokens, output_attentions=True)


def test_a_tuple_is_returned_where_asked_for(tokens):
    model = model_with().eval()
    expected = model(input_ids=tokens, use_cache=False).logits
    out = model(input_ids=tokens, return_dict=False, use_cache=False)
    assert isinstance(out, tuple)
    assert torch.equal(out[0], expected)
    loss, logits, *_ = model(input_ids=tokens, labels=tokens, return_dict=False, use_cache=False)
    assert loss.dim() == 0
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("wanted", [True, False])
def test_use_cache_decides_whether_there_is_a_cache(tokens, wanted):
    model = model_with().eval()
    out = model(input_ids=tokens, use_cache=wanted)
    assert (out.past_key_values is not None) is wanted


def test_use_cache_of_the_config_holds_where_the_call_says_nothing(tokens):
    for wanted in (True, False):
        model = model_with(use_cache=wanted).eval()
        assert (model(input_ids=tokens).past_key_values is not None) is wanted


def test_unknown_argument_is_rejected(tokens):
    with pytest.raises((TypeError, ValueError)):
        model_with()(input_ids=tokens, output_hiden_states=True)
