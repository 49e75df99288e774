"""One model for every spec: sizes, saving, documents, padding, hybrids, initialisation."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from maclaurin import InputError, catalogue
from maclaurin.layers.rotary import Rotary
from maclaurin.models import SIZES, MaclaurinConfig, MaclaurinForCausalLM, size_named

GOLDEN = Path(__file__).parents[1] / "golden" / "parameter_counts.json"


def tiny(attention="exp/sum", **more):
    options = {
        "vocab_size": 31,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **more,
    }
    torch.manual_seed(0)
    return MaclaurinForCausalLM(MaclaurinConfig(attention=attention, **options))


def tokens(batch=2, length=12):
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(1))


def logits(model, ids, **more):
    return model(input_ids=ids, **more).logits


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts_are_the_golden_ones(request):
    own = {"pico": 512, "nano": 1024, "5m": 8192, "60m": 8192, "small": 32000, "large": 32000}
    vocabularies = dict.fromkeys(SIZES, 4096) | own
    with torch.device("meta"):
        counts = {
            name: {
                attention: count(
                    MaclaurinForCausalLM(MaclaurinConfig.of_size(size, attention, vocabularies[name]))
                )
                for attention in ("softmax", "norm", "gate", "based", "2mamba", "mamba-2")
            }
            for name, size in SIZES.items()
        }
    text = json.dumps(counts, indent=1) + "\n"
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert counts["small"]["softmax"] == 275_293_184
    assert counts["large"]["softmax"] == 2_084_170_752


@pytest.mark.parametrize("name", [e.name for e in catalogue if not e.spec.orders or max(e.spec.orders) <= 10])
def test_every_row_of_the_catalogue_makes_a_model_that_learns(name):
    model = tiny(name)
    ids = tokens()
    y = logits(model, ids)
    assert y.isfinite().all()
    torch.nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
    changed = ids.clone()
    changed[:, 8:] = 0
    assert torch.allclose(logits(model, changed)[:, :8], y[:, :8], atol=1e-5), "an output sees the future"


def test_saved_and_loaded_it_is_the_same_bit_for_bit(tmp_path):
    model = tiny(["exp/l2", "2mamba"]).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(again, MaclaurinForCausalLM)
    assert again.config.attention == ["exp/l2", "2mamba"]
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(logits(model, tokens()), logits(again, tokens()))


def test_one_spec_per_layer():
    model = tiny(["exp/sum", "taylor(2)/sum"])
    assert [str(layer.self_attn.spec) for layer in model.model.layers] == ["exp/sum", "taylor(2)/sum"]
    with pytest.raises(InputError, match="one for each"):
        tiny(["exp/sum"] * 3)


@pytest.mark.parametrize("attention", ["exp/sum", "power(2)*forget/sum", "2mamba", "linear-cosine"])
def test_documents_of_a_row_do_not_see_each_other(attention):
    model = tiny(attention).double()
    ids = tokens(2, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    together = logits(model, ids, documents=documents)
    alone = logits(model, ids[:1, 5:], position_ids=torch.arange(5, 12)[None])
    assert torch.allclose(together[:1, 5:], alone, atol=1e-9)
    assert torch.allclose(together[1:], logits(model, ids[1:]), atol=1e-9)


@pytest.mark.parametrize(
    "attention", ["exp/sum", "taylor(2)*forget/sum", "conv-in-out-layer", "conv-extra-tokens"]
)
def test_padding_on_the_left_is_not_seen(attention):
    model = tiny(attention).double()
    ids = tokens(1, 8)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 8])
    positions = torch.tensor([[0, 0, 0, *range(8)]])
    y = logits(model, padded, attention_mask=mask, position_ids=positions)
    assert torch.allclose(y[:, 3:], logits(model, ids), atol=1e-9)
    assert torch.equal(y, logits(model, padded, attention_mask=mask)), "positions follow the mask"


def test_gradient_checkpointing_changes_nothing():
    plain, saving = tiny("power(2)*forget/sum"), tiny("power(2)*forget/sum")
    saving.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, saving):
        model.train()
        logits(model, tokens()).square().mean().backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-7)


@pytest.mark.parametrize(
    ("attention", "checkpointing"),
    [
        pytest.param(attention, checkpointing, marks=[] if often else [pytest.mark.exhaustive])
        for attention, often_with in (
            ("taylor(2)/sum", False),
            ("power(2)*forget/sum", None),
            ("exp(clamp=5)/len", None),
            ("0: exp/sum; *: poly(0)+window(3,sinks=1,kept=2)/sum", True),
        )
        for checkpointing in (False, True)
        for often in (checkpointing is often_with,)
    ],
)
@pytest.mark.slow
def test_compiled_it_is_the_same_with_all_gradients(attention, checkpointing):
    model, twin = tiny(attention), tiny(attention)
    twin.load_state_dict(model.state_dict())
    if checkpointing:
        twin.gradient_checkpointing_enable({"use_reentrant": False})
    twin.train()
    torch._dynamo.reset()  # it counts what it has compiled of one function, whatever model that was in
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for one in (model, compiled):
        out = one(input_ids=tokens(), labels=tokens())
        out.loss.backward()
        torch.testing.assert_close(out.logits, logits(model, tokens()), atol=1e-5, rtol=1e-4)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-3)


@pytest.mark.slow
def test_a_compiled_step_of_heads_that_differ():
    model = tiny("0,2: taylor(2)/sum; *: poly(0)+window(3)/sum").eval()
    ids = tokens()
    torch._dynamo.reset()
    with torch.no_grad():
        memory = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
        step = torch.compile(
            lambda token, memory: model(input_ids=token, past_key_values=memory).logits,
            fullgraph=True,
            backend="aot_eager",
        )
        after = step(ids[:, -1:], memory)
    torch.testing.assert_close(after[:, 0], logits(model, ids)[:, -1], atol=1e-5, rtol=1e-4)


def test_angles_are_made_once_for_all_layers(monkeypatch):
    made, make = [], Rotary.angles
    monkeypatch.setattr(Rotary, "angles", lambda self, *given: made.append(given) or make(self, *given))
    logits(tiny("taylor(2)/sum"), tokens())
    assert len(made) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits(tiny("taylor(2)/sum"), tokens())
    assert len(made) == 2


def test_initialisations():
    scaled, default = tiny(hidden_size=128), tiny(hidden_size=128, initialization="torch")
    block = scaled.model.layers[0]
    assert block.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.self_attn.o_proj.weight.std().item() == pytest.approx(0.01, rel=0.05)  # 0.02/√(2·2)
    assert block.mlp.down_proj.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert default.model.embed_tokens.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert default.model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(
        1 / (3 * 128) ** 0.5, rel=0.05
    )


def test_forget_gates_begin_with_horizons_from_4_to_1024_tokens():
    for name in ("forgetting-transformer", "2mamba", "simple-gla"):
        gate = tiny(name).model.layers[0].self_attn.forget_gate
        log_forget = gate(torch.zeros(1, 1, 32), torch.zeros(1, 1), None)[0, 0]
        horizons = (1 / (1 - log_forget.exp())).tolist()
        assert horizons[0] == pytest.approx(4, rel=1e-2)
        assert horizons[-1] == pytest.approx(1024, rel=1e-2)


def test_an_unknown_size_gets_the_known_ones():
    with pytest.raises(InputError, match="sizes are pico"):
        size_named("nanno")


def test_labels_give_the_loss_of_the_next_token():
    model, ids = tiny(), tokens()
    expected = torch.nn.functional.cross_entropy(
        logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    assert torch.allclose(model(input_ids=ids, labels=ids).loss, expected)
