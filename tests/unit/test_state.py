"""States are first-class: bytes, devices, batches, algebra, files."""

import pytest
import torch

from maclaurin import InputError, State, parse
from maclaurin.forms.stream import Inputs
from maclaurin.testing import Shape, assert_same, random_tensors

SPECS = [
    "taylor(2)/sum",
    "linear(identity)*in*forget/rms(heads)",
    "taylor(2)*in/running(floor=1)",
    "taylor(2,about=mean)+window(3,sinks=2)*forget/sum",
    "poly(0)+window(4,sinks=1)/sum",
    "taylor(2,about=mean)+window(2,sinks=1,kept=2)*forget/sum",
    "poly(0)+window(2,sinks=1,kept=2)/sum",
]


@pytest.fixture(params=SPECS)
def case(request):
    return random_tensors(parse(request.param), Shape(batch=3, tokens=8), 0)


def test_bytes_are_those_of_its_tensors(case):
    state = case.state()
    assert state.nbytes == sum(t.numel() * t.element_size() for t in state.tensors().values())
    spec, d, e = case.spec, 3, 4
    numbers = sum(t.numel() for n, t in state.tensors().items() if n.startswith(("moments", "exact.")))
    if not spec.decay_gates:
        assert numbers == 3 * 2 * spec.state_size(d, e)


def test_slicing_and_reordering_over_the_batch(case):
    state, more = case.state(), case.tokens(0, 2)
    beams = [2, 0, 0]
    y = more.map(lambda t: t[beams]).output(state=state[beams])
    assert_same(y, more.output(state=state)[beams], "reordered")
    one = more.map(lambda t: t[1:2])
    assert_same(one.output(state=state[1]), more.output(state=state)[1:2], "one of them")
    assert_same(one.output(state=state[1:2]), more.output(state=state)[1:2], "a slice")
    assert_same(one.output(state=state.reorder(torch.tensor([1]))), more.output(state=state)[1:2], "a tensor")


def test_stacking_undoes_slicing(case):
    state = case.state()
    again = State.stack([state[0], state[1], state[2]])
    for name, tensor in state.tensors().items():
        assert torch.equal(again.tensors()[name], tensor)


def test_a_clone_shares_nothing_and_a_call_changes_nothing(case):
    state = case.state()
    before = {n: t.clone() for n, t in state.tensors().items()}
    fork = state.clone()
    case.output(state=fork)
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before[name])
        assert tensor.numel() == 0 or tensor.data_ptr() != fork.tensors()[name].data_ptr()


def test_moving_to_a_device_and_detaching():
    case = random_tensors(parse("taylor(2)/sum"), Shape(), 0).with_gradients()
    state = case.state()
    assert state.to("meta").device.type == "meta"
    assert state.moments.requires_grad
    assert not state.detach().moments.requires_grad


def test_saved_and_loaded_it_goes_on_the_same(case, tmp_path):
    state = case.state()
    path = tmp_path / "talk.safetensors"
    state.save(path)
    assert list(tmp_path.iterdir()) == [path]
    again = State.load(path)
    assert again.spec == state.spec
    assert torch.equal(case.output(state=again), case.output(state=state))


def test_a_saved_series_keeps_its_certificate(tmp_path):
    case = random_tensors(parse("exp/sum"), Shape(d=2), 0, size=0.3)
    state = case.state(score_bound=4.0)
    state.save(tmp_path / "s.safetensors")
    again = State.load(tmp_path / "s.safetensors")
    assert again.certificate == state.certificate
    assert torch.equal(case.output(state=again), case.output(state=state))


def test_non_state_files_are_rejected(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="not a saved maclaurin state"):
        State.load(tmp_path / "other.safetensors")
    case = random_tensors(parse("taylor(2)/sum"), Shape(), 0)
    path = tmp_path / "cut.safetensors"
    case.state().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="not a complete safetensors file"):
        State.load(path)


def test_a_newer_file_asks_for_an_upgrade(tmp_path, monkeypatch):
    from maclaurin.forms import state as module

    path = tmp_path / "new.safetensors"
    monkeypatch.setattr(module, "FILE_VERSION", 99)
    random_tensors(parse("taylor(2)/sum"), Shape(), 0).state().save(path)
    monkeypatch.undo()
    with pytest.raises(InputError, match="upgrade maclaurin"):
        State.load(path)


def test_states_of_different_specs_do_not_merge():
    one, other = (random_tensors(parse(s), Shape(), 0).state() for s in ("taylor(2)/sum", "power(2)/sum"))
    with pytest.raises(InputError, match="different specs"):
        one.merge(other)
    wide = random_tensors(parse("taylor(2)/sum"), Shape(e=7), 0).state()
    with pytest.raises(InputError, match="differ in moments"):
        one.merge(wide)


@pytest.mark.parametrize(
    "notation", ["taylor(2)*forget/sum", "taylor(2)+window(3)/sum", "poly(0)+window(3,kept=9)/sum"]
)
def test_what_is_forgotten_cannot_be_rolled_back(notation):
    case = random_tensors(parse(notation), Shape(), 0)
    with pytest.raises(InputError, match=r"Keep state.clone\(\)"):
        case.state().rollback(case.tensors["k"], case.tensors["v"])


def test_texts_that_chose_their_keys_apart_do_not_merge():
    """Queries of the later text would have given the keys of both other scores."""
    case = random_tensors(parse("poly(0)+window(2,kept=3)/sum"), Shape(), 0)
    with pytest.raises(InputError, match="Continue from the earlier state with the later text"):
        case.state().merge(case.state())


@pytest.mark.parametrize(
    "notation", ["poly(0)+window(3,sinks=1,kept=4)/sum", "taylor(2,about=mean)+window(3,sinks=1)/sum"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_exact_keys_are_kept_as_they_came(notation, dtype):
    """Each in its own dtype, to the last digit, and no byte more than the state says it takes."""
    spec = parse(notation)
    case = random_tensors(spec, Shape(batch=2, tokens=9), 0, dtype)
    state = case.state()
    keys = [t for name, t in state.tensors().items() if name.endswith(("_k", "_v"))]
    assert {t.dtype for t in keys} == {dtype}
    assert state.moments.dtype == torch.float32
    k = case.tensors["k"].transpose(1, 2)
    assert torch.equal(state.exact.recent_k, k[:, :, -3:])
    assert torch.equal(state.exact.sink_k, k[:, :, :1])
    assert state.nbytes == State.bytes_for(spec, Inputs(*(case.tensors[n] for n in "qkv")))
    assert state.nbytes == 4 * spec.state_bytes(3, 4, own=dtype.itemsize, working=4) + 2 * 8  # and two counts
    whole = case.output(form="parallel")
    _, half = case.tokens(0, 5)(return_state=True)
    assert_same(case.tokens(5, 9).output(state=half), whole[:, 5:], "from a state")


def test_values_that_a_gate_has_changed_are_not_rounded():
    case = random_tensors(parse("poly(0)+window(3)*in/sum"), Shape(), 0, torch.bfloat16)
    exact = case.state().exact
    assert (exact.recent_k.dtype, exact.recent_v.dtype) == (torch.bfloat16, torch.float32)


def test_a_state_of_narrow_keys_takes_no_wide_ones():
    case = random_tensors(parse("poly(0)+window(3)/sum"), Shape(), 0, torch.bfloat16)
    with pytest.raises(InputError, match="would lose precision"):
        case.map(torch.Tensor.float).output(state=case.state())


def test_a_key_is_kept_by_the_attention_it_received():
    """One key that every query of its window looks at is found again long after; its neighbours are not."""
    spec = parse("poly(0)+window(4,sinks=1,kept=2)/sum")
    case = random_tensors(spec, Shape(batch=1, tokens=40, kv_heads=1, group=2), 0, torch.float32)
    q, k = case.tensors["q"], case.tensors["k"]
    k[:, 7], q[:, 7:11] = 6.0, 1.0
    exact = case.state().exact
    assert any(torch.equal(key, k[0, 7, 0]) for key in exact.kept_k[0, 0])
    assert float(exact.kept_score.max()) > 3


@pytest.mark.slow
def test_chunks_with_kept_keys_take_no_square_of_the_text():
    """Twice the text, twice the memory at most, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            out = function(*arguments, **(named or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                self.numbers = max(self.numbers, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    largest = []
    for tokens in (256, 512):
        shape = Shape(batch=1, tokens=tokens, kv_heads=1, group=1, d=4, e=4)
        case = random_tensors(parse("poly(0)+window(8,sinks=1,kept=8)/sum"), shape, 0).with_gradients()
        with Largest() as seen:
            case.output(form="chunked", chunk_size=16).sum().backward()
        largest.append(seen.numbers)
    assert largest[1] <= 2 * largest[0] < 256 * 256


def test_states_of_different_batches_or_dtypes_do_not_merge():
    case = random_tensors(parse("taylor(2)/sum"), Shape(batch=3), 0)
    state = case.state()
    with pytest.raises(InputError, match="1 sequences cannot be followed by one of 3"):
        state[0].merge(state)
    with pytest.raises(InputError, match="differ in moments"):
        state.merge(case.map(torch.Tensor.float).state())
    with pytest.raises(InputError, match=r"need one in torch\.float32"):
        case.map(torch.Tensor.float).output(state=state)


def test_odd_indices_are_understood_or_refused():
    state = random_tensors(parse("taylor(2)/sum"), Shape(batch=3), 0).state()
    assert state[torch.tensor(1)].batch_size == 1
    assert state[torch.tensor([True, False, True])].batch_size == 2
    with pytest.raises(InputError, match="indexed by sequence numbers"):
        state[1.5]


def test_no_more_tokens_are_dropped_than_there_are():
    case = random_tensors(parse("taylor(2)/sum"), Shape(tokens=4), 0)
    state = case.tokens(0, 2).state()
    with pytest.raises(InputError, match="4 tokens cannot be dropped from a state of 2"):
        state.rollback(case.tensors["k"], case.tensors["v"])
    with pytest.raises(InputError, match="cannot be the last tokens"):
        state.rollback(case.tensors["v"][:, :1], case.tensors["v"][:, :1])


def test_a_running_sum_that_was_swamped_is_not_rolled_back():
    case = random_tensors(parse("taylor(2)/running"), Shape(tokens=4), 0, torch.float32)
    gates = case.tensors["denominator_gate"].clone()
    gates[:, -1] = 30
    last = case.with_tensors(denominator_gate=gates).tokens(3, 4)
    state = case.with_tensors(denominator_gate=gates).state()
    with pytest.raises(InputError, match="up to rounding"):
        state.rollback(
            last.tensors["k"], last.tensors["v"], denominator_gate=last.tensors["denominator_gate"]
        )


@pytest.mark.parametrize("seed", range(20))
def test_rolling_back_every_token_leaves_nothing_of_a_running_sum(seed):
    """In fp32 the share of the dropped tokens may round to a little more than 1."""
    case = random_tensors(parse("taylor(1)/running(floor=1)"), Shape(tokens=7), seed, torch.float32)
    state = case.state()
    back = state.rollback(**{n: t for n, t in case.tensors.items() if n != "q"})
    assert int(back.count.max()) == 0
    assert bool((back.running == -torch.inf).all())
    y = case.output(state=back)
    assert bool(y.isfinite().all())
    assert_same(y, case.output(), "as if from the start", 1e-3)


def test_rollback_asks_for_the_gates_it_needs():
    case = random_tensors(parse("taylor(2)*in/running(floor=1)"), Shape(), 0)
    with pytest.raises(InputError, match="input_gate"):
        case.state().rollback(case.tensors["k"], case.tensors["v"])
