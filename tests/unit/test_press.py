"""Prompts read with full attention, of which a small memory is kept."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import maclaurin
from maclaurin import InputError
from maclaurin.forms import kept as kept_keys
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.cache import cache_bytes

KEPT = "poly(0)+window(3,sinks=1,kept=4)/sum"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = MaclaurinConfig(
        vocab_size=31, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return MaclaurinForCausalLM(config).eval()


@torch.no_grad()
def test_the_prompt_is_read_in_full_and_kept_in_part(model):
    ids = torch.randint(1, 31, (2, 30), generator=torch.Generator().manual_seed(0))
    full = model(input_ids=ids).logits
    with maclaurin.press(model, KEPT):
        cache = MaclaurinCache(model.config)
        pressed = model(input_ids=ids, past_key_values=cache).logits
        assert cache.nbytes == cache_bytes(model.config, 2, 30, torch.float32)
        assert cache.is_constant
        after = model(input_ids=ids[:, :1], past_key_values=cache).logits
        state = cache.memories[0].heads[0].state
    torch.testing.assert_close(pressed, full)
    assert model.config.attention == "exp/sum"
    assert model.config.prompt_attention is None
    limited = MaclaurinForCausalLM(MaclaurinConfig(**{**model.config.to_dict(), "attention": KEPT})).eval()
    limited.load_state_dict(model.state_dict())
    reading = MaclaurinCache(limited.config)
    limited(input_ids=ids, past_key_values=reading)
    limited(input_ids=ids[:, :1], past_key_values=reading)
    own = reading.memories[0].heads[0].state  # the first layer sees the same keys either way
    for name in ("count", "exact.recent_k", "exact.recent_v", "exact.sink_k", "exact.sink_v"):
        torch.testing.assert_close(state.tensors()[name], own.tensors()[name])
    assert not torch.allclose(after, limited(input_ids=ids[:, :1], past_key_values=reading).logits)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_the_slots_hold_the_keys_that_the_last_queries_attend_to(side, monkeypatch):
    """Against a loop over rows, heads and queries in float64."""
    monkeypatch.setattr(kept_keys, "LAST_QUERIES", 5)
    window, sinks, kept, tokens = 3, 1, 4, 14
    spec = maclaurin.parse(f"poly(0)+window({window},sinks={sinks},kept={kept})/sum")
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, tokens, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, slice(0, 4) if side == "left" else slice(10, None) if side == "right" else slice(0)] = False
    given = None if side == "none" else mask
    _, state = maclaurin.attention(q, k, v, spec, return_state=True, key_padding_mask=given)
    after = kept_keys.keep_attended_keys(state, q, k, v, given)
    for row in range(2):
        real = mask[row].nonzero()[:, 0].tolist()
        for head in range(2):
            score = dict.fromkeys(real[sinks:-window], 0.0)
            for t in real[-5:]:
                seen = [s for s in real if s <= t]
                for query in q[row, t, 2 * head : 2 * head + 2]:
                    shares = (k[row, seen, head] @ query / 8**0.5).softmax(0)
                    for s, share in zip(seen, shares.tolist(), strict=True):
                        if s in score:
                            score[s] += share / 2 / 5 * window
            best = sorted(sorted(score, key=score.get)[-kept:])
            torch.testing.assert_close(after.exact.kept_k[row, head], k[row, best, head])
            torch.testing.assert_close(after.exact.kept_v[row, head], v[row, best, head])
            expected = torch.tensor([score[s] for s in best], dtype=torch.float64)
            torch.testing.assert_close(after.exact.kept_score[row, head], expected, rtol=1e-5, atol=1e-6)
    next_q, next_k, next_v = (u[:, :1] for u in (q, k, v))
    y, _ = maclaurin.attention(next_q, next_k, next_v, spec, state=after, return_state=True)
    assert y.isfinite().all()


@torch.no_grad()
def test_a_memory_larger_than_the_text_changes_nothing(model):
    ids = torch.randint(1, 31, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    for attention in (
        "poly(0)+window(4,sinks=1,kept=20)/sum",
        ["0: exp/sum; 1: poly(0)+window(30)/sum", "exp/sum"],
    ):
        with maclaurin.press(model, attention):
            assert torch.equal(model.generate(ids, **settings), expected)
            beams = model.generate(ids, **settings, num_beams=2)
        assert torch.equal(beams, model.generate(ids, **settings, num_beams=2))


def test_a_pressed_prompt_is_not_read_in_chunks(model):
    ids = torch.ones(1, 9, dtype=torch.long)
    settings = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "prefill_chunk_size": 4}
    with maclaurin.press(model, KEPT), pytest.raises(InputError, match="read all at once"):
        model.generate(ids, **settings)
    assert model.generate(ids, **settings).shape == (1, 11)  # without a press it may be


def test_a_model_of_transformers_is_refused_with_what_works(model):
    config = LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    foreign = LlamaForCausalLM(config)
    with (
        pytest.raises(
            InputError, match=r"not LlamaForCausalLM. Load .*load_model\(name\).* maclaurin.convert"
        ),
        maclaurin.press(foreign, KEPT),
    ):
        pass
    with pytest.raises(InputError, match="not str"), maclaurin.press("a folder", KEPT):
        pass


@pytest.mark.parametrize("attention", [[KEPT], [KEPT] * 3, [KEPT, KEPT, "exp/sum"], []])
def test_a_list_has_one_attention_for_each_layer(model, attention):
    with (
        pytest.raises(InputError, match=f"lists {len(attention)} layers, but the model has 2"),
        maclaurin.press(model, attention),
    ):
        pass
    assert model.config.attention == "exp/sum"


def test_unsupported_attention_cannot_be_pressed(model):
    with pytest.raises(InputError, match="has gates"), maclaurin.press(model, "taylor(2)*forget/sum"):
        pass
    with (
        maclaurin.press(model, KEPT),
        pytest.raises(InputError, match="use the original"),
        maclaurin.press(model, KEPT),
    ):
        pass
    assert model.config.attention == "exp/sum"
