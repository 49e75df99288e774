"""A text read in pieces is the text read at once; generate() in all its ways; caches that fork and last."""

import pytest
import torch
from transformers import TextStreamer

from maclaurin import InputError, State, StateBudgetError
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models import cache as maclaurin_cache
from maclaurin.models.generating import Generation, Sampling, TextWriter, end_tokens
from maclaurin.models.model_folder import as_fast_tokenizer, byte_tokenizer
from maclaurin.models.recorded_step import RecordedStep, can_record

FINITE = [
    "taylor(2)/sum",
    "taylor(2,about=mean)+window(8,sinks=1)/sum",
    "2mamba",
    "simple-gla",
    "power(2)*in/running*out",
    "hermite(2)+window(3)*forget/sum",
    "poly(0)+window(4,sinks=2)/sum",
    "taylor(2,about=mean)+window(3,sinks=1,kept=4)/sum",
]
GROWING = [
    "exp/sum",
    "exp/l2",
    "exp*forget/sum",
    "exp*in/running(len)*out",
    "conv-in-out-layer",
    "conv-extra-tokens",
    "sigmoid(0)/len",
]
HYBRID = ["exp/sum", "taylor(2)/sum", "2mamba"]
#: heads of one layer that differ, the second layer with gates of some heads
BY_HEADS = [
    "0: poly(0)+window(3,sinks=1,kept=4)/sum; 1: exp/sum",
    "1: exp*in/sum*out; *: taylor(2)+window(4)*forget/sum",
]
ALL = [*FINITE, *GROWING, HYBRID, BY_HEADS]


def model_of(attention, **more):
    torch.manual_seed(0)
    layers = len(attention) if isinstance(attention, list) else 2
    config = MaclaurinConfig(
        attention=attention,
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        **more,
    )
    return MaclaurinForCausalLM(config).eval().double()


def tokens(batch=2, length=20, seed=1):
    return torch.randint(1, 31, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model, ids, cache, pieces, mask=None):
    """Logits of ids, fed to the cache in pieces; the mask is given as far as the text goes."""
    outputs, place = [], 0
    for size in pieces:
        seen = None if mask is None else mask[:, : place + size]
        out = model(input_ids=ids[:, place : place + size], attention_mask=seen, past_key_values=cache)
        outputs.append(out.logits)
        place += size
    return torch.cat(outputs, dim=1)


def whole(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def close(a, b):
    return torch.allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("attention", ALL, ids=str)
def test_pieces_and_steps_give_what_the_whole_text_gives(attention):
    model, ids = model_of(attention), tokens()
    assert close(read(model, ids, MaclaurinCache(model.config), [7, 5, 1, 1, 1, 3, 1, 1]), whole(model, ids))


@pytest.mark.parametrize("attention", ALL, ids=str)
def test_padding_on_the_left_reaches_no_cache(attention):
    model, ids = model_of(attention), tokens(2, 23)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    y = read(model, ids, MaclaurinCache(model.config), [3, 4, 6, 1, 1, 5, 1, 2], mask)
    assert close(y[0, 5:], whole(model, ids[:1, 5:])[0])
    assert close(y[1], whole(model, ids[1:])[0])


@pytest.mark.parametrize("attention", ALL, ids=str)
def test_generate_is_the_same_with_and_without_a_cache(attention):
    model = model_of(attention)
    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    ways = [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "top_k": 5},
        {"do_sample": False, "prefill_chunk_size": 4},
    ]
    for way in ways:
        found = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            chunked = {} if use_cache else {"prefill_chunk_size": None}
            found.append(
                model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=7,
                    pad_token_id=0,
                    use_cache=use_cache,
                    **way | chunked,
                )
            )
        assert torch.equal(*found), way
    alone = model.generate(ids[:1, 4:], max_new_tokens=7, do_sample=False, pad_token_id=0)
    greedy = model.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False, pad_token_id=0)
    assert torch.equal(greedy[0, 9:], alone[0, 5:])


def test_generate_makes_our_cache_and_streams():
    class Spelled:
        def decode(self, ids, **_):
            return "".join(f"{int(i):02d} " for i in ids)

    class Collected(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            pieces.append(text)

    pieces = []
    model = model_of("taylor(2)/sum")
    streamer = Collected(Spelled(), skip_prompt=True)
    out = model.generate(
        tokens(1), max_new_tokens=6, do_sample=False, streamer=streamer, return_dict_in_generate=True
    )
    assert "".join(pieces).split() == [f"{i:02d}" for i in out.sequences[0, 20:].tolist()]
    assert isinstance(out.past_key_values, MaclaurinCache)
    assert out.past_key_values.get_seq_length() == 25


@pytest.mark.parametrize("attention", FINITE)
def test_a_finite_cache_has_one_size(attention):
    model, cache = model_of(attention), None
    cache = MaclaurinCache(model.config)
    read(model, tokens(2, 3), cache, [3])
    before = cache.nbytes
    read(model, tokens(2, 60), cache, [30, 30])
    assert cache.nbytes == before
    assert cache.is_constant


def test_of_a_hybrid_only_the_growing_layers_grow():
    model = model_of(HYBRID)
    cache = MaclaurinCache(model.config)
    sizes = []
    for _ in range(2):
        read(model, tokens(2, 30), cache, [30])
        sizes.append([memory.nbytes for memory in cache.memories])
    assert sizes[1][0] == 2 * sizes[0][0]
    assert sizes[1][1:] == sizes[0][1:]
    assert not cache.is_constant


def test_training_makes_no_state(monkeypatch):
    model, ids = model_of("taylor(2)/sum").train(), tokens()
    monkeypatch.setattr(State, "empty", None)
    assert model(input_ids=ids).past_key_values is None
    monkeypatch.undo()
    assert model(input_ids=ids, use_cache=True).past_key_values.get_seq_length() == 20


@pytest.mark.parametrize("attention", [*FINITE, *GROWING, HYBRID], ids=str)
def test_a_saved_conversation_goes_on(attention, tmp_path):
    model, ids = model_of(attention), tokens(2, 23)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    cache = MaclaurinCache(model.config)
    read(model, ids[:, :15], cache, [15], mask)
    cache.save(tmp_path / "talk.safetensors")
    again = MaclaurinCache.load(tmp_path / "talk.safetensors", model)
    assert again.nbytes == cache.nbytes
    rest = read(model, ids[:, 15:], cache, [4, 4])
    assert torch.equal(read(model, ids[:, 15:], again, [4, 4]), rest)


def test_a_saved_conversation_belongs_to_its_model(tmp_path):
    path = tmp_path / "talk.safetensors"
    model = model_of("taylor(2)/sum")
    cache = MaclaurinCache(model.config)
    with pytest.raises(InputError, match="read nothing"):
        cache.save(path)
    read(model, tokens(), cache, [20])
    cache.save(path)
    with pytest.raises(InputError, match=r"attention is taylor\(2\)/sum .*here it is exp/sum"):
        MaclaurinCache.load(path, model_of("exp/sum"))
    other = model_of("taylor(2)/sum")
    with torch.no_grad():
        other.model.embed_tokens.weight += 1
    with pytest.raises(InputError, match="other weights"):
        MaclaurinCache.load(path, other)
    cache.memories[0].heads[0].state.save(path)
    with pytest.raises(InputError, match="one attention"):
        MaclaurinCache.load(path, model)
    with pytest.raises(InputError, match="no file"):
        MaclaurinCache.load(tmp_path / "none", model)


def test_the_fingerprint_is_computed_once_and_again_for_changed_weights(monkeypatch):
    computed = []
    compute = maclaurin_cache._fingerprint
    monkeypatch.setattr(maclaurin_cache, "_fingerprint", lambda t: computed.append(1) or compute(t))
    model = model_of("taylor(2)/sum")
    first = maclaurin_cache.weights_fingerprint(model)
    assert maclaurin_cache.weights_fingerprint(model) == first
    assert len(computed) == 1
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 0] += 1
    assert maclaurin_cache.weights_fingerprint(model) != first
    with torch.inference_mode():
        model.model.norm.weight = torch.nn.Parameter(torch.ones(32), requires_grad=False)
    assert maclaurin_cache.weights_fingerprint(model) != first


def test_a_conversation_saved_by_a_newer_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "talk.safetensors"
    model = model_of("taylor(2)/sum")
    cache = model(input_ids=tokens(), use_cache=True).past_key_values
    monkeypatch.setattr("maclaurin.models.cache.FILE_VERSION", 2)
    cache.save(path)
    monkeypatch.undo()
    with pytest.raises(InputError, match="upgrade maclaurin"):
        MaclaurinCache.load(path, model)


@pytest.mark.parametrize("attention", ALL, ids=str)
def test_forks_go_their_own_ways(attention):
    model, ids = model_of(attention), tokens(2, 30)
    cache = MaclaurinCache(model.config)
    read(model, ids, cache, [12])
    fork = cache.fork()
    other = torch.cat([ids[:, :12], tokens(2, 8, seed=9)], dim=1)
    read(model, other[:, 12:], fork, [3, 5])
    assert close(read(model, ids[:, 12:20], cache, [8]), whole(model, ids[:, :20])[:, 12:])
    assert close(
        read(model, ids[:, 20:21], fork, [1]), whole(model, torch.cat([other, ids[:, 20:21]], 1))[:, -1:]
    )


@pytest.mark.parametrize("attention", ALL, ids=str)
def test_rolled_back_it_is_as_if_the_tokens_had_not_come(attention):
    model, ids = model_of(attention), tokens(2, 24)
    cache = MaclaurinCache(model.config, rollback=6)
    read(model, torch.cat([ids[:, :14], tokens(2, 6, seed=9)], dim=1), cache, [12, 6, 1, 1])
    cache.rollback(2)
    cache.rollback(4)
    assert cache.get_seq_length() == 14
    assert close(read(model, ids[:, 14:], cache, [1, 9]), whole(model, ids)[:, 14:])


@pytest.mark.parametrize("attention", ALL, ids=str)
@pytest.mark.parametrize("pieces", [[20], [3, 2, 1, 14], [2, 2] + 16 * [1]], ids=str)
def test_any_number_of_tokens_up_to_rollback_can_be_dropped(attention, pieces):
    model, ids = model_of(attention), tokens(2, 24)
    expected = whole(model, torch.cat([ids[:, :15], ids[:, 20:]], dim=1))[:, 15:]
    for first in (1, 4, 5):
        cache = MaclaurinCache(model.config, rollback=5)
        read(model, ids, cache, pieces)
        cache.rollback(first)
        cache.rollback(5 - first)
        assert close(read(model, ids[:, 20:], cache, [1, 3]), expected)


KEEPS_KEYS = ["poly(0)+window(3,sinks=1,kept=4)/sum", BY_HEADS, "simple-gla"]


@pytest.mark.parametrize("attention", KEEPS_KEYS, ids=str)
def test_tokens_after_padding_can_be_dropped(attention):
    model, ids = model_of(attention), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for pieces in ([12], [4, 8], [3, 3, 1, 5]):
        cache = MaclaurinCache(model.config, rollback=6)
        read(model, ids, cache, pieces, mask)
        cache.rollback(4)
        y = read(model, ids[:, 8:], cache, [1, 11])
        assert close(y[0], whole(model, ids[:1, 5:])[0, 3:])
        assert close(y[1], whole(model, ids[1:])[0, 8:])


@torch.no_grad()
def speculate(model, ids, new, guess):
    """Greedy continuation: candidates are read in one piece, and the wrong ones are rolled back."""
    cache = MaclaurinCache(model.config, rollback=4)
    read(model, ids[:, :-1], cache, [ids.shape[1] - 1])
    text, end, wrong = ids, ids.shape[1] + new, 0
    while text.shape[1] < end:
        candidates = guess(text)
        piece = torch.cat([text[:, -1:], candidates], dim=1)
        found = model(input_ids=piece, past_key_values=cache).logits.argmax(-1)
        right = int((found[:, :-1] == candidates).long().cumprod(1).sum())
        cache.rollback(candidates.shape[1] - right)
        wrong += candidates.shape[1] - right
        text = torch.cat([text, candidates[:, :right], found[:, right : right + 1]], dim=1)
    assert wrong > 0
    return text[:, :end]


@pytest.mark.parametrize("attention", [*KEEPS_KEYS, "taylor(2,about=mean)+window(8,sinks=1)/sum"], ids=str)
def test_speculative_decoding_writes_the_greedy_text(attention):
    model, ids = model_of(attention), tokens(1, 9)
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    draws = torch.Generator().manual_seed(5)

    def guess(text):
        """Three tokens of the greedy text, each wrong one time in three."""
        right = torch.nn.functional.pad(greedy, (0, 4))[:, text.shape[1] : text.shape[1] + 3]
        return torch.where(torch.rand(right.shape, generator=draws) < 1 / 3, (right + 1) % 31, right)

    assert torch.equal(speculate(model, ids, 30, guess), greedy)


@pytest.mark.parametrize("attention", [*KEEPS_KEYS, "taylor(2)/sum"], ids=str)
def test_a_cache_that_rolls_back_can_be_saved_forked_reordered_and_recorded(attention, tmp_path):
    model, ids = model_of(attention), tokens(2, 30)
    expected, cache = whole(model, ids), MaclaurinCache(model.config, rollback=3)
    read(model, ids, cache, [14, 1])
    cache.save(tmp_path / "cache")
    turned = cache.fork()
    turned.reorder_cache(torch.tensor([1, 0]))
    for other, rows in [(MaclaurinCache.load(tmp_path / "cache", model), [0, 1]), (turned, [1, 0])]:
        other.rollback(3)
        assert close(read(model, ids[rows, 12:], other, [1, 17]), expected[rows, 12:])
    step = RecordedStep(model, cache, again)
    for t in range(15, 20):
        assert close(step(ids[:, t : t + 1]), expected[:, t])
    cache.rollback(2)
    assert close(read(model, ids[:, 18:], cache, [12]), expected[:, 18:])


@pytest.mark.parametrize("attention", KEEPS_KEYS, ids=str)
def test_a_cache_that_was_rolled_back_as_far_as_possible_can_be_saved(attention, tmp_path):
    """Its two states are then the same."""
    model, ids = model_of(attention), tokens(2, 20)
    cache = MaclaurinCache(model.config, rollback=3)
    read(model, ids, cache, [12])
    cache.rollback(3)
    cache.save(tmp_path / "cache")
    again = MaclaurinCache.load(tmp_path / "cache", model)
    for each in (cache, again):
        with pytest.raises(InputError, match="the last 0 only"):
            each.rollback(1)
        assert close(read(model, ids[:, 9:], each, [2, 9]), whole(model, ids)[:, 9:])
        each.rollback(3)
        assert close(read(model, ids[:, 17:], each, [3]), whole(model, ids)[:, 17:])


def test_a_prompt_read_with_other_attention_is_not_dropped():
    model, ids = model_of("poly(0)+window(3,sinks=1,kept=4)/sum", prompt_attention="exp/sum"), tokens(2, 24)
    cache, other = (MaclaurinCache(model.config, rollback=4) for _ in range(2))
    read(model, ids, cache, [20, 2])
    with pytest.raises(InputError, match="roll back the last 2 only"):
        cache.rollback(3)
    cache.rollback(2)
    read(model, ids, other, [20])
    assert close(read(model, ids[:, 20:], cache, [4]), read(model, ids[:, 20:], other, [4]))


def test_what_cannot_be_rolled_back_says_so_and_stays():
    for attention, why in [("simple-gla", r"\*forget"), ("poly(0)+window(4)/sum", r"\+window\(4\)")]:
        model, ids = model_of(attention), tokens()
        cache = MaclaurinCache(model.config)
        read(model, ids, cache, [18])
        with pytest.raises(InputError, match=f"{why} has discarded.*rollback=2 or more.*fork"):
            cache.rollback(2)
        assert close(read(model, ids[:, 18:], cache, [2]), whole(model, ids)[:, 18:])
    model = model_of("taylor(2)/sum")
    cache = MaclaurinCache(model.config, rollback=4)
    read(model, tokens(), cache, [20])
    with pytest.raises(InputError, match="rollback=5 or more"):
        cache.rollback(5)
    with pytest.raises(InputError, match="from a cache of 20"):
        cache.rollback(21)
    cache.rollback(3)
    with pytest.raises(InputError, match=r"the last 1 only\. Make it with rollback=5"):
        cache.rollback(2)
    padded = MaclaurinCache(model.config, rollback=4)
    read(model, tokens(2, 3), padded, [3], torch.tensor([[0, 1, 1], [1, 1, 1]]))
    with pytest.raises(InputError, match="At most 2"):
        padded.rollback(3)
    padded.rollback(2)
    cache.rollback(17)
    assert cache.get_seq_length() == 0


def test_caches_of_other_kinds_and_wrong_masks_are_refused():
    from transformers import DynamicCache

    model, ids = model_of("exp/sum"), tokens()
    with pytest.raises(InputError, match="MaclaurinCache"):
        model(input_ids=ids, past_key_values=DynamicCache())
    cache = MaclaurinCache(model.config)
    read(model, ids, cache, [20])
    with pytest.raises(InputError, match=r"\[2, 21\]"):
        model(input_ids=ids[:, :1], attention_mask=torch.ones(2, 5), past_key_values=cache)
    with pytest.raises(InputError, match="documents"):
        model(input_ids=ids, documents=torch.zeros_like(ids), use_cache=True)
    with pytest.raises(InputError, match="negative"):
        cache.crop(3)
    cache.crop(-3)
    assert cache.get_seq_length() == 17


def test_states_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr("maclaurin.models.cache._free_bytes", lambda device: 1000)
    monkeypatch.setattr("maclaurin.models.cache._LARGE_STATES", 0)
    with pytest.raises(StateBudgetError, match="1,000 are free"):
        model_of("taylor(2)/sum")(input_ids=tokens(), use_cache=True)


def test_rows_can_be_chosen_and_repeated():
    model, ids = model_of(HYBRID), tokens(3, 20)
    cache = MaclaurinCache(model.config)
    read(model, ids[:, :12], cache, [12])
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    chosen = ids[[2, 2, 0, 0]]
    assert close(read(model, chosen[:, 12:], cache, [8]), whole(model, chosen)[:, 12:])


@pytest.mark.parametrize("attention", ["taylor(2)/sum", "exp/sum"])
def test_a_text_goes_on_token_by_token_as_generate_has_it(attention):
    model, ids = model_of(attention), tokens(2, 9)
    text = Generation(model, sampling=Sampling(temperature=0))
    text.add(ids[:, :4])
    text.add(ids[:, 4:])
    assert list(text.read(3)) == [8, 5, 2]
    steps = torch.stack([text.step() for _ in range(6)], dim=1)
    assert torch.equal(steps, model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[:, 9:])


def test_a_saved_text_knows_what_it_has_not_read_yet(tmp_path):
    model, ids = model_of("taylor(2)/sum"), tokens(1, 9)
    whole = Generation(model, sampling=Sampling(), seed=5)
    whole.add(ids)
    first = [int(whole.step()) for _ in range(3)]
    whole.save(str(tmp_path / "talk"))
    assert len(first) == 3
    again = Generation(model, MaclaurinCache.load(tmp_path / "talk", model), Sampling(temperature=0))
    whole.sampling = Sampling(temperature=0)
    assert [int(again.step()) for _ in range(5)] == [int(whole.step()) for _ in range(5)]
    with pytest.raises(InputError, match="at least one token"):
        Generation(model).step()


def again(work):
    """A recorder that does the work again: what a graph does, without one."""
    work()
    return work


CONSTANT_BY_HEADS = [
    "0: poly(0)+window(9,sinks=1)/sum; 1: poly(0)+window(3,sinks=1,kept=4)/sum",
    "0: taylor(2)/sum; 1: poly(0)+window(2,sinks=1,kept=3)/sum",
]


#: some heads keep every key
SOME_GROW = ["exp/sum", "0: exp/l2; 1: poly(0)+window(3,sinks=1,kept=4)/sum"]


@pytest.mark.parametrize(
    "attention", [*FINITE, ["taylor(2)/sum", "2mamba"], CONSTANT_BY_HEADS, SOME_GROW], ids=str
)
def test_recorded_steps_leave_the_cache_as_steps_do(attention):
    model, ids = model_of(attention), tokens(2, 40)
    expected = whole(model, ids)
    cache = MaclaurinCache(model.config)
    read(model, ids[:, :12], cache, [12])
    before = cache.fork()
    step = RecordedStep(model, cache, again)
    for t in range(12, 20):
        assert close(step(ids[:, t : t + 1]), expected[:, t])
    assert cache.get_seq_length() == 20
    assert before.get_seq_length() == 12
    fork = cache.fork()
    read(model, ids[:, 20:25], cache, [5])  # as any other cache
    for t in range(25, 30):
        assert close(step(ids[:, t : t + 1]), expected[:, t])
    assert close(read(model, ids[:, 12:], before, [28]), expected[:, 12:])
    assert close(read(model, ids[:, 20:], fork, [20]), expected[:, 20:])


@pytest.mark.parametrize("attention", ["taylor(2)*in/sum", SOME_GROW], ids=str)
def test_recorded_steps_follow_rows_positions_and_sizes(attention):
    model, ids = model_of(attention), tokens(2, 20)
    mask = torch.ones(2, 12)
    mask[0, :5] = 0
    padded = MaclaurinCache(model.config)
    read(model, ids[:, :12], padded, [12], mask)
    alone = MaclaurinCache(model.config)
    read(model, ids[:1, 5:12], alone, [7])
    step = RecordedStep(model, padded, again)
    for t in range(12, 16):
        found = step(ids[:, t : t + 1])
        assert close(found[:1], read(model, ids[:1, t : t + 1], alone, [1])[:, 0])
    assert padded.lengths.tolist() == [11, 16]
    padded.reorder_cache(torch.tensor([1, 0]))
    found = step(ids[[1, 0], 16:17])
    assert close(found[1:], read(model, ids[:1, 16:17], alone, [1])[:, 0])
    padded.batch_select_indices(torch.tensor([0]))
    assert step(ids[:1, 17:18]) is None


def recording(monkeypatch, step=lambda model, cache: RecordedStep(model, cache, again)):
    """Let texts record on a CPU."""
    monkeypatch.setattr("maclaurin.models.generating.can_record", lambda model, cache: True)
    monkeypatch.setattr("maclaurin.models.generating.RecordedStep", step)


@pytest.mark.parametrize("attention", ["taylor(2,about=mean)+window(8,sinks=1)/sum", SOME_GROW], ids=str)
def test_a_text_may_return_to_a_fork_while_steps_are_recorded(attention, monkeypatch):
    model = model_of(attention)
    texts = []
    for _ in range(2):  # one by one, then recorded
        text = Generation(model, sampling=Sampling(temperature=0))
        text.add(tokens(1, 5))
        begin = [int(text.step()) for _ in range(12)]
        kept, pending = text.cache.fork(), text.pending
        first = [int(text.step()) for _ in range(4)]
        text.add(tokens(1, 3, seed=9))
        other = [int(text.step()) for _ in range(4)]
        text.cache, text.pending = kept, pending
        again_ = [int(text.step()) for _ in range(14)]
        assert again_[:4] == first
        texts.append((begin, first, other, again_, text.cache.get_seq_length()))
        recording(monkeypatch)
    assert text._recorded is not None
    assert texts[0] == texts[1]


def test_steps_recorded_under_inference_mode_go_on_outside(monkeypatch):
    recording(monkeypatch)
    model = model_of("taylor(2)/sum")
    text = Generation(model, sampling=Sampling(temperature=0))
    text.add(tokens(1, 5))
    with torch.inference_mode():
        for _ in range(12):
            text.step()
    assert text._recorded is not None
    assert all(0 <= int(text.step()) < 31 for _ in range(3))


def test_a_step_is_recorded_again_when_its_buffers_are_full(monkeypatch):
    monkeypatch.setattr("maclaurin.models.recorded_step._LEAST_SPARE", 5)
    recordings = []

    def counted(model, cache):
        recordings.append(cache.seen)
        return RecordedStep(model, cache, again)

    model, drawn = model_of(SOME_GROW), []
    for records in (False, True):
        if records:
            recording(monkeypatch, counted)
        text = Generation(model, sampling=Sampling(temperature=0))
        text.add(tokens(1, 5))
        drawn.append([int(text.step()) for _ in range(40)])
    assert drawn[0] == drawn[1]
    assert len(recordings) > 1
    assert text.cache.seen == 44


def test_spare_capacity_is_counted_and_keys_can_be_rolled_back():
    model, ids = model_of("exp/sum"), tokens(2, 30)
    expected, cache = whole(model, ids), MaclaurinCache(model.config)
    read(model, ids[:, :12], cache, [12])
    without = cache.nbytes
    step = RecordedStep(model, cache, again)
    step(ids[:, 12:13])
    assert cache.nbytes == without * (12 + 1024 + 1) // 12
    assert {t.shape[1] for t in cache.tensors().values()} == {13}
    cache.rollback(3)
    for t in range(10, 14):
        assert close(step(ids[:, t : t + 1]), expected[:, t])
    assert close(read(model, ids[:, 14:], cache, [16]), expected[:, 14:])


def test_a_text_outlives_a_recording_that_fails(monkeypatch):
    def no_memory(model, cache):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model, expected = model_of("taylor(2)/sum"), None
    for fails in (False, True):
        if fails:
            recording(monkeypatch, no_memory)
        text = Generation(model, sampling=Sampling(temperature=0))
        text.add(tokens(1, 5))
        if fails:
            with pytest.warns(
                UserWarning, match="could not be recorded as a CUDA graph.*: CUDA out of memory"
            ):
                found = [int(text.step()) for _ in range(20)]
        else:
            expected = [int(text.step()) for _ in range(20)]
    assert found == expected


def test_what_can_be_recorded():
    model = model_of("taylor(2)/sum")
    assert not can_record(model, MaclaurinCache(model.config))  # no GPU


def assert_holds_what_it_says(cache):
    """The storages behind the tensors of a cache are no larger, except to align tensors that share one."""
    storages = [t.untyped_storage() for t in cache.tensors().values()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert cache.nbytes <= held <= cache.nbytes + 32 * len(storages)


@pytest.mark.parametrize("rollback", [0, 4])
@pytest.mark.parametrize("attention", [*ALL, ["taylor(2)/sum", "hermite(2)+window(3)*forget/sum"]], ids=str)
def test_a_cache_holds_no_more_than_it_says(attention, rollback):
    model, ids = model_of(attention), tokens(1, 132)
    cache = MaclaurinCache(model.config, rollback=rollback)
    for size in (120, 1, 1, 10):
        read(model, ids[:, cache.seen :], cache, [size])
        assert cache.nbytes == sum(t.nbytes for t in cache.tensors().values())
        assert_holds_what_it_says(cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ALL, ids=str)
def test_a_cache_takes_the_bytes_that_are_computed_without_one(attention, dtype):
    model, ids = model_of(attention).to(dtype), tokens(2, 25)
    cache = MaclaurinCache(model.config)
    for size in (20, 1, 4):
        read(model, ids[:, cache.seen :], cache, [size])
        assert cache.nbytes == maclaurin_cache.cache_bytes(model.config, 2, cache.seen, dtype)


@pytest.mark.parametrize("attention", ["taylor(2)/sum", "conv-in-out-layer", *KEEPS_KEYS], ids=str)
def test_a_rolled_back_cache_holds_no_more_than_it_says(attention):
    model, ids = model_of(attention), tokens(1, 40)
    cache = MaclaurinCache(model.config, rollback=4)
    read(model, ids, cache, [40])
    for tokens_to_drop in (3, 1):
        cache.rollback(tokens_to_drop)
        assert_holds_what_it_says(cache)


def test_drawing_stays_among_the_likeliest():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).expand(400, -1)  # shares .64 .23 .09 .03 .01
    generator = torch.Generator().manual_seed(0)

    def drawn(**how):
        return set(Sampling(**how).draw(logits, generator).tolist())

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.8) == {0, 1}
    assert drawn(top_p=0.01) == {0}
    assert drawn(temperature=0) == {0}
    assert drawn(temperature=0.05) == {0}


def test_a_writer_passes_on_the_text_of_a_generation_and_counts_its_tokens():
    torch.manual_seed(0)
    config = MaclaurinConfig(
        attention="taylor(2)/sum", vocab_size=257, hidden_size=32, intermediate_size=48,
        num_hidden_layers=1, num_attention_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model, tokenizer, pieces = MaclaurinForCausalLM(config).eval(), as_fast_tokenizer(byte_tokenizer()), []
    writer = TextWriter(model, tokenizer, pieces.append, sampling=Sampling(0.0), max_new_tokens=12)
    writer.continue_text("It was")
    generation = Generation(model, sampling=Sampling(0.0))
    prompt = tokenizer("It was")["input_ids"]
    generation.add(torch.tensor([prompt]))
    expected = [int(generation.step()[0]) for _ in range(12)]
    assert "".join(pieces) == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert (writer.figures.prompt_tokens, writer.figures.tokens) == (len(prompt), 12)
    ends = TextWriter(model, tokenizer, pieces.append, sampling=Sampling(0.0), ends={expected[3]})
    ends.continue_text("It was")
    assert ends.figures.tokens == 1 + expected.index(expected[3])
    assert end_tokens(model, tokenizer) == {tokenizer.eos_token_id}
