"""Bad input gets one clear error: what came, why it cannot work, what would."""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.forms.inputs import Inputs, working_dtype
from maclaurin.forms.packing import check_cu_seqlens
from maclaurin.forms.state import State
from maclaurin.spec import AttentionSpec

_GATE_SYMBOLS = {
    "input_gate": "*in",
    "log_forget": "*forget",
    "denominator_gate": "/running",
    "output_gate": "*out",
}


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [B, T, H, d], k [B, S, Hkv, d], v [B, S, Hkv, e], one dtype, one device."""
    for name, u in (("q", q), ("k", k), ("v", v)):
        if not isinstance(u, Tensor):
            raise InputError(f"{name} must be a torch tensor, not {type(u).__name__}.")
        if u.dim() != 4:
            raise InputError(
                f"{name} must be [batch, tokens, heads, size], got {_shape(u)} with {u.dim()} axes."
            )
        if not u.is_floating_point():
            raise InputError(f"{name} must be floating point, got {u.dtype}.")
        if 0 in u.shape:
            raise InputError(f"{name} is empty: {_shape(u)}; every axis must be at least 1.")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise InputError(
            f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them to one."
        )
    if len({q.device, k.device, v.device}) > 1:
        raise InputError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}.")
    if k.shape[:3] != v.shape[:3]:
        raise InputError(
            f"k and v must agree in batch, tokens and heads, got k {_shape(k)} and v {_shape(v)}."
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"q and k must agree in batch and size, got q {_shape(q)} and k {_shape(k)}.")
    if q.shape[2] % k.shape[2]:
        raise InputError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}: the query heads must be a multiple of "
            "the key-value heads."
        )


def check_gates(spec: AttentionSpec, inputs: Inputs) -> None:
    """Just the gates that the spec has, each with its shape."""
    q, k = inputs.q, inputs.k
    shapes = {
        "input_gate": tuple(k.shape[:3]),
        "log_forget": tuple(k.shape[:3]),
        "denominator_gate": (*k.shape[:2], q.shape[2]),
        "output_gate": tuple(q.shape[:3]),
    }
    for name, shape in shapes.items():
        gate: Tensor | None = getattr(inputs, name)
        symbol = _GATE_SYMBOLS[name]
        if gate is None:
            if name in spec.gates:
                raise InputError(f"{spec} has {symbol}, so it needs {name} {list(shape)}; none was given.")
            continue
        if name not in spec.gates:
            raise InputError(
                f"{name} was given, but {spec} has no {symbol}: leave it out or add {symbol} to the spec."
            )
        per_channel = name == "output_gate" and not spec.output_gate_is_scalar
        if tuple(gate.shape) != shape and not (per_channel and gate.shape == (*shape, inputs.v.shape[3])):
            or_channels = f" or {[*shape, inputs.v.shape[3]]}" if per_channel else ""
            raise InputError(f"{name} must be {list(shape)}{or_channels} here, got {_shape(gate)}.")
        if gate.device != q.device:
            raise InputError(f"{name} is on {gate.device} and q on {q.device}: move one.")
        if not gate.is_floating_point():
            raise InputError(f"{name} must be floating point, got {gate.dtype}.")


def check_layout(
    inputs: Inputs,
    *,
    causal: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    key_padding_mask: Tensor | None,
) -> None:
    """Padding, packing and a number of queries that differs from the number of keys."""
    q, k = inputs.q, inputs.k
    if cu_seqlens is not None and key_padding_mask is not None:
        raise InputError("cu_seqlens and key_padding_mask both say where tokens are: give one of them.")
    if q.shape[1] != k.shape[1]:
        if cu_seqlens is not None or key_padding_mask is not None:
            raise InputError(
                f"with padding or packing there must be as many queries as keys, got {q.shape[1]} and "
                f"{k.shape[1]}."
            )
        if causal and q.shape[1] > k.shape[1]:
            raise InputError(
                f"causal attention takes the queries as the last tokens of the keys, but there are "
                f"{q.shape[1]} queries and {k.shape[1]} keys. Use causal=False for cross attention."
            )
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1], max_seqlen)
    mask = key_padding_mask
    if mask is not None and not isinstance(mask, Tensor):
        raise InputError(f"key_padding_mask must be a bool tensor, not {type(mask).__name__}.")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        raise InputError(
            f"key_padding_mask must be bool {list(k.shape[:2])}, True for real tokens; got "
            f"{mask.dtype} {_shape(mask)}."
        )


def check_state(spec: AttentionSpec, state: State, inputs: Inputs, sequences: int) -> None:
    """The state must be this spec's, for these heads and this many sequences."""
    if not isinstance(state, State):
        raise InputError(f"state must be one that attention returned, not {type(state).__name__}.")
    if state.spec != spec:
        raise InputError(f"this state belongs to {state.spec}, and the call is for {spec}.")
    batch, kv_heads = state.moments.shape[:2]
    d, e = inputs.k.shape[3], inputs.v.shape[3]
    wanted = (sequences, inputs.k.shape[2], spec.features(d), e + int(spec.needs_row_sum))
    if tuple(state.moments.shape) != wanted:
        raise InputError(
            f"this state is for {batch} sequences and {kv_heads} key-value heads with moments "
            f"{_shape(state.moments)}; these inputs need {list(wanted)}."
        )
    if state.moments.dtype != working_dtype(inputs.q.dtype):
        raise InputError(
            f"this state is kept in {state.moments.dtype}, and inputs in {inputs.q.dtype} need one in "
            f"{working_dtype(inputs.q.dtype)}: cast the inputs or begin again."
        )
    if state.running is not None and state.running.shape[1] != inputs.q.shape[2]:
        raise InputError(
            f"this state is for {state.running.shape[1]} query heads, and q has {inputs.q.shape[2]}."
        )
    if state.device != inputs.q.device:
        raise InputError(f"the state is on {state.device} and q on {inputs.q.device}: use state.to(…).")


def _shape(u: Tensor) -> str:
    return str(list(u.shape))
