"""Every fused program, compiled for a Hopper GPU that is not there: it compiles, fits, and does not spill."""

import math
from functools import partial

import pytest
import torch

from maclaurin.programs.triton import INSTALLED, INTERPRETED

if not INSTALLED or INTERPRETED:
    pytest.skip("needs triton, not interpreted", allow_module_level=True)

from maclaurin.programs.triton import (
    about_mean,
    block_layout,
    decode_step,
    exact_step,
    kept_keys,
    linear_attention,
    linear_time,
    moments,
    one_query,
    quadratic_polynomial,
    rows,
    score_mod,
)
from maclaurin.programs.triton.compiled_code import compiled_for
from maclaurin.programs.triton.exact_step import Held

HOPPER = 90
#: bytes of shared memory a program can have there
SHARED = 227 * 1024
#: spilled registers that may move at every turn of a loop: with 19 one tile was the fastest, dozens cost half
SPILLS = 24
#: where fp16 is multiplied as fp32, in three passes: right, not fast
SPILLS_OF_FP16 = 64
#: of gradients with both gates, or with an exact window: their tiles were not tuned yet, and these limits are
#: what they spill today (benchmarks/tiles.py searches tiles)
SPILLS_OF_GATED_ORDER_1 = {torch.bfloat16: 140, torch.float16: 420}
SPILLS_OF_COSINE = 170
SPILLS_OF_WINDOW = 80
#: at d = 128, where the compiler does not know that 16 divides the length, as for rows of odd length
SPILLS_OF_ODD_LENGTHS = 72
#: programs whose matrix products may wait for each other: a small part of the time, or too many registers in
#: some versions of the compiler
MAY_WAIT = {"_small", "backward_keys"}
#: two orders of moments one after the other are more than the assembler keeps apart
WITH_ORDER_3 = {*MAY_WAIT, "forward_rows", "backward_queries"}
#: shapes beyond those that studies and converted models use
more = partial(pytest.param, marks=pytest.mark.exhaustive)
SERIES = tuple(0.125**n / math.factorial(n) for n in range(5))


def tensors(d, e, dtype=torch.bfloat16, *, heads=4, kv_heads=2, batch=1):
    shapes = ((heads, d), (kv_heads, d), (kv_heads, e))
    return tuple(torch.empty(batch, 2048, h, size, dtype=dtype) for h, size in shapes)


def assert_good(found, *, matrix_units=True, spills=SPILLS, may_wait=MAY_WAIT):
    assert found, "nothing was compiled"
    for program in found:
        assert program.shared <= SHARED, program
        assert program.spills_in_loops <= spills, program
        assert not program.serialized or program.name in may_wait, program
        assert not program.overwritten, program
        assert not program.unset, program
        assert not program.refilled, program
    if matrix_units:
        assert any(program.matrix_instructions for program in found)


@pytest.mark.parametrize("order", [2, more(4)])
@pytest.mark.parametrize(
    ("d", "dtype"),
    [more(16, torch.bfloat16), (64, torch.bfloat16), more(128, torch.bfloat16), more(64, torch.float16)],
)
def test_quadratic(order, d, dtype):
    q, k, v = tensors(d, d, dtype)
    call = quadratic_polynomial.Call(SERIES[: order + 1], "sum", 0.0, True, narrow=True)
    with compiled_for(HOPPER) as found:
        y, rest, z = quadratic_polynomial.forward(q, k, v, call)
        quadratic_polynomial.backward(y, q, k, v, y, rest, z, call)
    assert_good(found)


@pytest.mark.parametrize(
    ("coefficients", "divisor", "sigmoid"),
    [((-6.9, 0.125), "one", True), more((1.0, 0.1, 0.1), "sum", False), more((0.0, 0.0, 0.1), "sum", False)],
)
def test_quadratic_of_other_weights(coefficients, divisor, sigmoid):
    q, k, v = tensors(64, 64)
    call = quadratic_polynomial.Call(coefficients, divisor, 0.0, True, sigmoid, narrow=True)
    with compiled_for(HOPPER) as found:
        y, rest, z = quadratic_polynomial.forward(q, k, v, call)
        quadratic_polynomial.backward(y, q, k, v, y, rest, z, call)
    assert_good(found)


@pytest.mark.parametrize("d", [64, more(128)])
def test_quadratic_of_packed_sequences(d):
    q, k, v = tensors(d, d)
    call = quadratic_polynomial.Call(SERIES[:3], "sum", 0.0, True, narrow=True)
    cuts = torch.zeros(17, dtype=torch.int32)
    with compiled_for(HOPPER) as found:
        y, rest, z = quadratic_polynomial.forward(q, k, v, call, cuts=cuts)
        quadratic_polynomial.backward(y, q, k, v, y, rest, z, call, cuts=cuts)
    assert_good(found, spills=SPILLS_OF_ODD_LENGTHS if d == 128 else SPILLS)


@pytest.mark.exhaustive
def test_quadratic_with_a_decay_gate():
    q, k, v = tensors(64, 64)
    call = quadratic_polynomial.Call((0.0, 0.0, 0.0078), "sum", 0.0, True, narrow=True)
    log_decay = torch.empty(1, 2, 2048)
    with compiled_for(HOPPER) as found:
        y, rest, z = quadratic_polynomial.forward(q, k, v, call, log_decay)
        quadratic_polynomial.backward(y, q, k, v, y, rest, z, call, log_decay)
    assert_good(found, spills=32)


@pytest.mark.parametrize(
    ("d", "dtype", "gated", "call"),
    [
        (64, torch.bfloat16, False, linear_attention.Call("identity", 0.125)),
        more(64, torch.bfloat16, True, linear_attention.Call("elu1", 1.0, "sum")),
        more(128, torch.bfloat16, False, linear_attention.Call("cosine", 1.0, length=1.0, rests=True)),
        more(64, torch.float16, True, linear_attention.Call("elu1", 1.0, "sum")),
    ],
)
def test_linear_attention(d, dtype, gated, call):
    q, k, v = tensors(d, d, dtype)
    gates = (torch.empty(1, 2048, 2), torch.empty(1, 2048, 2)) if gated else (None, None)
    state = torch.empty(1, 2, d, d + 1) if gated else None
    with compiled_for(HOPPER) as found:
        y, stat, rest, _, states = linear_attention.forward(
            q, k, v, *gates, None, call, initial=state, return_state=gated
        )
        linear_attention.backward(
            y, q, k, v, *gates, None, y, stat, rest, states, call, d_state=state, started=gated
        )
    spills = SPILLS_OF_GATED_ORDER_1[dtype] if gated else SPILLS_OF_COSINE if d == 128 else SPILLS
    assert_good(found, spills=spills, may_wait={"_key_states", "_gradient_states"})


@pytest.mark.parametrize(
    ("d", "call"),
    [
        (64, about_mean.Call(0.125, (1.0, 1.0, 0.5), narrow=True)),
        more(64, about_mean.Call(0.125, (1.0, 1.0, 0.5), window=64, sinks=1, narrow=True)),
        more(64, about_mean.Call(0.125, (1.0, 1.0, 0.5), window=64, sinks=1, chunk=1024, narrow=True)),
        more(128, about_mean.Call(0.125, (1.0, 1.0, 0.5), window=64, sinks=1, narrow=True)),
        more(128, about_mean.Call(0.125, (1.0, 1.0, 0.5), chunk=1024, narrow=True)),
        more(128, about_mean.Call(0.125, (1.0, 1.0, 0.5), window=64, sinks=1, chunk=1024, narrow=True)),
        more(64, about_mean.Call(0.125, (1.0, 1.0), chunk=64, narrow=True)),
        more(64, about_mean.Call(0.125, (1.0, 1.0, 0.5), window=16, sinks=1, chunk=64, narrow=True)),
        more(24, about_mean.Call(0.125, (1.0, 1.0), chunk=128, narrow=True)),
        more(64, about_mean.Call(0.125, (1.0, 1.0, 0.5), narrow=True, divisor="balanced")),
        more(64, about_mean.Call(0.125, (1.0, 1.0, 0.5), chunk=1024, narrow=True, divisor="balanced")),
        more(128, about_mean.Call(0.125, (1.0, 1.0, 0.5), narrow=True, divisor="balanced")),
        more(128, about_mean.Call(0.125, (1.0, 1.0, 0.5), chunk=1024, narrow=True, divisor="balanced")),
    ],
)
def test_about_the_mean(d, call):
    q, k, v = tensors(d, 40 if d == 24 else d)
    with compiled_for(HOPPER) as found:
        y, rest, rows, offset, _ = about_mean.forward(q, k, v, call)
        about_mean.backward(y, q, k, v, y, rest, rows, offset, call)
    short = 0 < call.chunk < 1024  # nobody's default
    assert_good(
        found,
        spills=SPILLS_OF_WINDOW if call.window else SPILLS,
        may_wait={*MAY_WAIT, "_forward", "_backward_queries"} if short else MAY_WAIT,
    )


@pytest.mark.parametrize("divisor", ["sum", more("balanced")])
@pytest.mark.parametrize("d", [64, more(128)])
def test_packed_sequences_about_the_mean(d, divisor):
    q, k, v = tensors(d, d)
    call = about_mean.Call(0.125, (1.0, 1.0, 0.5), narrow=True, divisor=divisor)
    cuts = torch.zeros(17, dtype=torch.int32)
    with compiled_for(HOPPER) as found:
        y, rest, rows, offset, _ = about_mean.forward(q, k, v, call, cuts=cuts)
        about_mean.backward(y, q, k, v, y, rest, rows, offset, call, cuts=cuts)
    assert_good(found)


@pytest.mark.parametrize(
    ("d", "dtype"), [(64, torch.bfloat16), more(128, torch.bfloat16), more(64, torch.float16)]
)
def test_kept_keys(d, dtype):
    q, k, v = (u.transpose(1, 2) for u in tensors(d, d, dtype, heads=9, kv_heads=3))
    exact = (kept_keys.Exact(32, 4, 96),) * 3
    with compiled_for(HOPPER) as found:
        until, score = kept_keys.lifetimes(q, k, 0.125, exact)
        windows = kept_keys.GroupOfHeads(2, kept_keys.Exact(32, 4, 0))
        kept_keys.exact_keys(k, v, until, score, (kept_keys.GroupOfHeads(1, exact[0]), windows))
        kept_keys.exact_keys(k, v, until, score, (windows._replace(heads=3),))
        o, lse = kept_keys.forward(q, k, v, until, 0.125, exact)
        kept_keys.backward(o, q, k, v, until, lse, lse, 0.125, exact)
    assert_good(found)


@pytest.mark.parametrize(
    ("d", "dtype"), [(64, torch.bfloat16), more(128, torch.bfloat16), more(64, torch.float16)]
)
def test_kept_keys_after_a_state_with_padding(d, dtype):
    q, k, v = tensors(d, d, dtype, heads=9, kv_heads=3)
    batch = q.shape[0]
    groups = (
        kept_keys.GroupOfHeads(1, kept_keys.Exact(32, 4, 96)),
        kept_keys.GroupOfHeads(2, kept_keys.Exact(32, 4, 0)),
    )
    recent, sinks, kept = (torch.empty(batch, 1, n, d, dtype=dtype) for n in (32, 4, 96))
    scores = (torch.empty(batch, 1, n) for n in (32, 96))
    windows = (torch.empty(batch, 2, n, d, dtype=dtype) for n in (32, 32, 4, 4))
    count = torch.zeros(batch, dtype=torch.int64)
    held = Held(recent, recent, sinks, sinks, *scores, kept, kept), Held(*windows)
    before = tuple(kept_keys.Before(count, each) for each in held)
    exact = tuple(group.exact for group in groups for _ in range(group.heads))
    with compiled_for(HOPPER) as found:
        kept_keys.read(q, k, v, 0.125, exact, groups, count, before)
        kept_keys.read(q, k, v, 0.125, exact, groups, count)
    assert_good(found)


@pytest.mark.parametrize(
    ("d", "dtype"), [(64, torch.bfloat16), more(128, torch.bfloat16), more(64, torch.float32)]
)
def test_a_step_with_exact_keys(d, dtype):
    q, k, v = (torch.empty(1, h, d, dtype=dtype) for h in (9, 3, 3))
    recent, sinks, kept = (torch.empty(1, 3, n, d, dtype=dtype) for n in (1131, 4, 3393))
    scores = (torch.empty(1, 3, n) for n in (1131, 3393))
    count = torch.zeros(1, dtype=torch.int64)
    with compiled_for(HOPPER) as found:
        exact_step.step(q, k, v, count, Held(recent, recent, sinks, sinks, *scores, kept, kept), 0.125)
        exact_step.step(q, k, v, count, Held(recent, recent, sinks, sinks), 0.125)
    assert_good(found, matrix_units=dtype == torch.bfloat16, may_wait={"_stretch_of_state"})


@pytest.mark.parametrize(
    ("d", "dtype"), [(64, torch.bfloat16), more(128, torch.bfloat16), more(64, torch.float32)]
)
def test_one_query(d, dtype):
    q, k, v = (torch.empty(1, n, h, d, dtype=dtype) for n, h in ((1, 9), (5000, 3), (5000, 3)))
    with compiled_for(HOPPER) as found:
        one_query.rows(q, k, v, None, 0.125)
        one_query.rows(q, k, v, torch.ones(1, 5000, dtype=torch.bool), 0.125)
    assert_good(found, matrix_units=dtype == torch.bfloat16, may_wait={"_stretch"})


@pytest.mark.parametrize(
    ("batch", "order", "d", "e", "dtype"),
    [
        more(1, 1, 64, 64, torch.bfloat16),
        more(1, 2, 16, 64, torch.bfloat16),
        (1, 2, 64, 64, torch.bfloat16),
        more(64, 2, 64, 64, torch.bfloat16),
        more(64, 2, 128, 128, torch.bfloat16),
        more(1, 2, 64, 64, torch.float16),
        more(1, 3, 16, 64, torch.bfloat16),
        more(64, 3, 16, 64, torch.bfloat16),
        more(1, 3, 32, 32, torch.bfloat16),
    ],
)
def test_linear(batch, order, d, e, dtype):
    """Moments are made by programs of two sizes, by how many there are."""
    q, k, v = tensors(d, e, dtype, batch=batch)
    call = linear_time.Call(SERIES[: order + 1], "one" if order == 3 else "sum", 0.0, 1024, narrow=True)
    rows = linear_time.Rows()
    with compiled_for(HOPPER) as found:
        y, rest, divisor, past, _ = linear_time.forward(q, k, v, rows, call)
        linear_time.backward(y, None, q, k, v, y, rest, divisor, rows, past, call)
    assert_good(
        found,
        spills=SPILLS_OF_FP16 if dtype is torch.float16 else SPILLS,
        may_wait=WITH_ORDER_3 if order > 2 else MAY_WAIT,
    )


@pytest.mark.parametrize(("batch", "d"), [(1, 64), more(64, 64), more(64, 128), more(1, 16)])
def test_linear_without_a_causal_mask(batch, d):
    q, k, v = tensors(d, max(d, 64), batch=batch)
    call = linear_time.Call(SERIES[:3], "sum", 0.0, 1024, narrow=True, causal=False)
    rows = linear_time.Rows()
    with compiled_for(HOPPER) as found:
        y, rest, divisor, past, _ = linear_time.forward(q, k, v, rows, call)
        linear_time.backward(y, None, q, k, v, y, rest, divisor, rows, past, call)
    assert_good(found)


@pytest.mark.exhaustive
def test_linear_with_everything_per_row():
    q, k, v = tensors(64, 64)
    call = linear_time.Call(SERIES[:3], "sum", 0.0, 1024)
    rows = linear_time.Rows(torch.empty(3, 1, 4, 2048), torch.empty(1, 2, 2048))
    with compiled_for(HOPPER) as found:
        y, rest, divisor, past, _ = linear_time.forward(q, k, v, rows, call)
        linear_time.backward(y, divisor, q, k, v, y, rest, divisor, rows, past, call)
    assert_good(found)


@pytest.mark.parametrize("d", [64, more(128)])
@pytest.mark.parametrize(
    "call",
    [
        score_mod.Call(0.125, True, clamp=5.0),
        more(score_mod.Call(0.125, True)),
        more(score_mod.Call(0.125, True, window=64, sinks=1)),
    ],
)
def test_softmax_with_a_score_mod(d, call):
    q, k, v = (u.transpose(1, 2) for u in tensors(d, d))
    totals = None if call.clamp else torch.empty(1, 2, 2048, dtype=torch.float64)
    with compiled_for(HOPPER) as found:
        o, lse = score_mod.forward(q, k, v, totals, call)
        score_mod.backward(o, q, k, v, totals, lse, lse, call)
    assert_good(found, may_wait={*MAY_WAIT, "_forward"})  # rows are rescaled between its products anyway


@pytest.mark.parametrize("d", [64, more(128)])
@pytest.mark.parametrize(
    "call",
    [
        score_mod.Call(0.125, True),
        more(score_mod.Call(0.125, False)),
        more(score_mod.Call(0.125, True, clamp=5.0)),
        more(score_mod.Call(0.125, True, window=64, sinks=1)),
    ],
)
def test_softmax_of_packed_sequences(d, call):
    """No loop spills more than that of rows."""
    q, k, v = (u.transpose(1, 2) for u in tensors(d, d))
    cuts = torch.zeros(17, dtype=torch.int32)
    with compiled_for(HOPPER) as found:
        o, lse = score_mod.forward(q, k, v, None, call, cuts)
        score_mod.backward(o, q, k, v, None, lse, lse, call, cuts)
    assert_good(found, may_wait={*MAY_WAIT, "_forward"})
    with compiled_for(HOPPER) as of_rows:
        score_mod.forward(q, k, v, None, call)
        score_mod.backward(o, q, k, v, None, lse, lse, call)
    known = {program.name: program.spills_in_loops for program in of_rows}
    packed = {program.name: program.spills_in_loops for program in found if program.name in known}
    assert len(packed) == 3
    assert all(packed[name] <= known[name] for name in known), (packed, known)


def test_passes_over_rows():
    y = torch.empty(1, 2048, 4, 64, dtype=torch.bfloat16)
    gate = torch.empty(1, 2048, 4)
    o, gain = y.transpose(1, 2), torch.empty(1, 4, 2048)
    with compiled_for(HOPPER) as found:
        rows.normed_backward(rows.normed(y, gate, 1.0, True)[0], y, gate, 1.0, True)
        out, gain_of_norm = rows.normed(y, None, 1.0, True, keep=True)
        assert gain_of_norm is not None
        rows.normed_backward_from_answer(out, out, gain_of_norm, True, out.stride())
        answer = rows.scaled(o, gain, gain, gate)
        rows.scaled_backward(o, o, gain, gain, gate, gain, sums=True, rows_are_output=False)
        rows.scaled_backward(o, answer, gain, gain, gate, None, sums=True, rows_are_output=True)
        rows.delta(o, o, gain)
    assert_good(found, matrix_units=False)


def test_a_step():
    state, x = torch.empty(1, 16, 2145, 65), torch.empty(1, 16, 64, dtype=torch.bfloat16)
    index, sizes = torch.zeros(2145, 2, dtype=torch.int32), (1, 64, 2080)
    layout = decode_step.Layout(index, torch.empty(2145), sizes)
    token = decode_step.Token(x, x, x, torch.empty(1, 16), torch.empty(1, 16))
    with compiled_for(HOPPER) as found:
        decode_step.sums(state, token, layout)
        count = torch.zeros(1, dtype=torch.int64)
        decode_step.rows(
            state, count, token, layout, 0.125, ((1.0,), (1.0,), (0.5,)), "sum", 0.0, dtype=x.dtype
        )
        about_the_mean = ((1.0, 1.0, 0.5), (1.0, 1.0), (0.5,))
        exact = decode_step.Exact(*(torch.empty(1, 16, n, 64) for n in (64, 64, 1, 1)))
        plain = decode_step.Token(*token[:3])
        decode_step.window_rows(state, count, exact, plain, layout, 0.125, about_the_mean, 0.0)
    assert_good(found, matrix_units=False)
    assert not any(program.spills for program in found)
    blocks_of_any_order = next(program for program in found[2:] if program.name == "_step")
    assert blocks_of_any_order.registers <= 128  # 16 programs per multiprocessor


@pytest.mark.exhaustive
def test_a_step_with_large_values_and_many_queries():
    layout = decode_step.Layout(torch.zeros(2145, 2, dtype=torch.int32), torch.empty(2145), (1, 64, 2080))
    with compiled_for(HOPPER) as found:
        for e, group in ((1024, 2), (64, 16)):
            state, count = torch.empty(4, 4, 2145, e + 1), torch.zeros(4, dtype=torch.int64)
            q, k, v = torch.empty(4, 4 * group, 64), torch.empty(4, 4, 64), torch.empty(4, 4, e)
            token, table = decode_step.Token(k, q, v), ((1.0,), (1.0,), (0.5,))
            decode_step.rows(state, count, token, layout, 0.125, table, "sum", 0.0, dtype=q.dtype)
    assert_good(found, matrix_units=False)


@pytest.mark.parametrize(("order", "d"), [(2, 64), more(3, 16)])
@pytest.mark.exhaustive
def test_linear_from_one_state_to_another(order, d):
    q, k, v = tensors(d, 64)
    call = linear_time.Call(SERIES[: order + 1], "one" if order == 3 else "sum", 0.0, 1024, narrow=True)
    rows = linear_time.Rows(None, torch.empty(1, 2, 2048))
    totals = moments.Moments(
        torch.empty(2, moments.small_size(d, 64)),
        {n: torch.empty(2, block_layout.block_rows(d, n), 64) for n in range(2, order + 1)},
    )
    with compiled_for(HOPPER) as found:
        y, rest, divisor, past, after = linear_time.forward(q, k, v, rows, call, initial=totals, totals=True)
        linear_time.backward(
            y, None, q, k, v, y, rest, divisor, rows, past, call, started=True, totals=after, d_totals=totals
        )
    assert_good(found)
