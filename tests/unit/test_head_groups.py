"""A different attention for each group of key-value heads: notation, layers, and caches to the byte."""

import gc
import itertools

import pytest
import torch

import maclaurin
from maclaurin import SpecError
from maclaurin.layers.attention import AttentionLayer
from maclaurin.layers.layout import Layout
from maclaurin.layers.rotary import Rotary
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM, save_quietly
from maclaurin.models.cache import cache_bytes
from maclaurin.spec import parse
from maclaurin.spec.head_groups import LayerAttention, specs_in
from maclaurin.testing import assert_same

KEPT = "poly(0)+window(3,sinks=1,kept=4)/sum"
TAIL = "taylor(2,about=mean)+window(4,sinks=1)/sum"
MIXED = [f"1: exp/sum; 0,2: {KEPT}", f"0: {TAIL}; *: {KEPT}"]


def model_of(attention, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    config = MaclaurinConfig(
        attention=attention, vocab_size=31, hidden_size=48, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=3, initializer_range=0.3,
    )  # fmt: skip
    return MaclaurinForCausalLM(config).eval().to(device, dtype)


# ------------------------------------------------------------------------------------ notation


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("exp/sum", "exp/sum"),
        ("*: exp/sum", "exp/sum"),
        (f"1: exp/sum; *: {KEPT}", f"1: exp/sum; 0,2-3: {KEPT}"),
        ("3 : exp/sum;0-2: softmax", "3: exp/sum; 0-2: exp/sum"),
        ("0-3: exp/sum; *: taylor(2)/sum", "exp/sum"),
    ],
)
def test_a_layer_is_read_and_written(text, written):
    layer = LayerAttention.read(text, 4)
    assert str(layer) == written
    assert str(LayerAttention.read(written, 4)) == written
    assert sorted(head for group in layer.groups for head in group.heads) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0: exp/sum", "leaves out 1-2 of 3"),
        ("0,1: exp/sum; 1-2: taylor(2)/sum", "gives head 1 two attentions"),
        ("0-5: exp/sum", "heads 0 to 2"),
        ("*: exp/sum; *: taylor(2)/sum", "two groups for \\*"),
        ("first: exp/sum; *: taylor(2)/sum", "numbers and ranges"),
        ("0: exp/sum; taylor(2)/sum", "does not say which heads"),
        ("0: 2mamba; *: exp/sum", "share it"),
        ("0: exp/rms(heads); *: exp/sum", "over all heads"),
        ("0: exq/sum; *: exp/sum", "exq"),
    ],
)
def test_a_layer_without_meaning_is_refused(text, problem):
    with pytest.raises(SpecError, match=problem):
        LayerAttention.read(text, 3)


def test_wrong_heads_are_reported_also_for_a_model_with_parts_of_its_own():
    config = MaclaurinConfig(num_attention_heads=6, num_key_value_heads=3)
    config.attention, config.imports = "0: exp/sum", ["my_parts.py"]
    with pytest.raises(SpecError, match="leaves out 1-2 of 3") as problem:
        config.layer_attention()
    assert "import" not in str(problem.value)


def test_heads_with_one_attention_are_one_group():
    one, other = parse("exp/sum"), parse(KEPT)
    assert str(LayerAttention.of_heads([one, other, one])) == f"0,2: exp/sum; 1: {KEPT}"
    assert specs_in(f"0,2: exp/sum; 1: {KEPT}") == (one, other)


# -------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_each_group_is_one_call_of_attention(order):
    """Every head gets what attention alone gives it, in whatever order the groups are named."""
    specs = [KEPT, "exp/sum", TAIL]
    layer = AttentionLayer(
        LayerAttention.read("; ".join(f"{head}: {specs[head]}" for head in order), 3),
        hidden_size=48, heads=6, kv_heads=3, head_size=8, rotary=Rotary(),
    )  # fmt: skip
    q, k, v = (torch.randn(2, 20, n, 8) for n in (6, 3, 3))
    y = layer.attend(q, k, v, {}, Layout(torch.arange(20)[None]))
    for head, spec in enumerate(specs):
        alone = maclaurin.attention(
            q[:, :, 2 * head : 2 * head + 2], k[:, :, head : head + 1], v[:, :, head : head + 1], spec
        )
        assert_same(y[:, :, 2 * head : 2 * head + 2], alone, spec)


def test_a_layer_of_many_attentions_has_no_one_spec():
    layer = model_of(MIXED).model.layers[0].self_attn
    with pytest.raises(maclaurin.InputError, match="use `groups`"):
        _ = layer.spec


# -------------------------------------------------------------------------------------- caches


def storages(cache):
    """Address and bytes of everything that a cache holds."""
    return {u.data_ptr(): u.nbytes() for u in (t.untyped_storage() for t in cache.tensors().values())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_holds_exactly_the_bytes_it_says(dtype):
    model = model_of(MIXED, dtype)
    cache = MaclaurinCache(model.config)
    ids = torch.randint(1, 31, (2, 40))
    for start, stop in [(0, 17), (17, 18), (18, 19), (19, 36), (36, 40)]:
        with torch.no_grad():
            model(input_ids=ids[:, start:stop], past_key_values=cache)
        tensors = cache.tensors().values()
        said = cache_bytes(model.config, 2, stop, dtype)
        assert sum(t.nbytes for t in tensors) == cache.nbytes == said
        assert sum(storages(cache).values()) == said, "memory that no tensor shows"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_gives_a_cache_what_it_says():
    model = model_of(MIXED, torch.bfloat16, "cuda")
    ids = torch.randint(1, 31, (2, 300), device="cuda")
    with torch.no_grad():
        first = MaclaurinCache(model.config)
        model(input_ids=ids, past_key_values=first)
        gc.collect()
        before = torch.cuda.memory_allocated()
        cache = MaclaurinCache(model.config)
        model(input_ids=ids, past_key_values=cache)
    gc.collect()
    taken = torch.cuda.memory_allocated() - before
    shared = storages(first)  # states that are equal share the number of their tokens
    held = {at: size for at, size in storages(cache).items() if at not in shared}
    blocks = sum(-(-size // 512) * 512 for size in held.values())
    assert cache.nbytes == cache_bytes(model.config, 2, 300, torch.bfloat16)
    assert sum(storages(cache).values()) - cache.nbytes < 32 * len(cache.tensors()), (
        "alignment of scores alone"
    )
    assert taken == blocks, "the allocator gives blocks of 512 bytes"


def test_saved_and_loaded_it_is_the_same_model_and_text(tmp_path):
    model = model_of(MIXED)
    ids = torch.randint(1, 31, (2, 12))
    save_quietly(model, tmp_path / "model", None)
    again = MaclaurinForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert again.config.attention == MIXED
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
    cache = MaclaurinCache(model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        cache.save(tmp_path / "text")
        loaded = MaclaurinCache.load(tmp_path / "text", again)
        fork, token = cache.fork(), ids[:, :1]
        expected = model(input_ids=token, past_key_values=cache).logits
        for other in (loaded, fork):
            torch.testing.assert_close(again(input_ids=token, past_key_values=other).logits, expected)


def test_a_hybrid_trains():
    """Every projection gets a gradient, with documents packed into a row."""
    model = model_of(MIXED).train()
    ids = torch.randint(1, 31, (2, 24))
    documents = torch.arange(24).div(9, rounding_mode="floor").expand(2, -1)
    model(input_ids=ids, labels=ids, documents=documents).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
